"Imported last by a process that imports much: what is there is never looked at for garbage"

import gc

gc.freeze()
gc.enable()
