"Imported first, `frozen` last: what imports leave stays, and nobody looks for garbage among it"

import gc

gc.disable()
