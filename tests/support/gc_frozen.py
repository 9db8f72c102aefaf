"Imported last by a process that imports much: what is there is never looked at for garbage"

import gc

gc.freeze()
gc.unfreeze = lambda: None  # an engine of vLLM that ends would search all of it
gc.set_threshold(50_000, 20, 20)  # the rest seldom: a test leaves little, and its process ends
gc.enable()
