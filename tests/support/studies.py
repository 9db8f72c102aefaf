"What every study asks for: the hash of the library, which takes a second, computed once for all"

import sys

from tests.support import ROOT

sys.path.insert(0, folder := str(ROOT / 'benchmarks' / 'studies'))
from _evidence import library  # noqa: E402

sys.path.remove(folder)
library()
