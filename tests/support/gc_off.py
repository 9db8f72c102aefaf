"Imported first by a process that imports much: garbage is not looked for"

import gc

gc.disable()
