"Imported first by a process that imports much"

import gc
import os
import sys

from tools.same_numbers import kernels

for name, value in kernels().items():  # torch reads them when it is imported
    os.environ.setdefault(name, value)
gc.disable()  # what is imported stays: searched for garbage, it takes a third longer
# jsonschema would build a grammar, for a second, to check addresses that no schema here has
sys.modules.setdefault('rfc3987_syntax', None)
