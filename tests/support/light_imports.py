"Imported first by a process that imports much"

import gc
import sys

gc.disable()  # what is imported stays: searched for garbage, it takes a third longer
# jsonschema would build a grammar, for a second, to check addresses that no schema here has
sys.modules.setdefault('rfc3987_syntax', None)
