"Imported last, after `unswept` and all that stays"

import gc

gc.freeze()
gc.enable()
