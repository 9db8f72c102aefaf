"""Which families of models are supported: executed, then stored for README and notebooks.

    PYTHONPATH=. python tools/families.py     # writes benchmarks/results/families.json

`tests/model/test_families.py` executes the same and compares.
"""

import json
import tempfile
from pathlib import Path

from tests.support import ROOT, families, vllm_fork_server


def row(name, home):
    model = families.original(name, home / 'in')
    policy = families.there_and_back(home / 'in', home / 'out')
    of = model, policy, home / 'out', vllm_fork_server.run
    return {column: families.claim(name, column, *of) for column in families.COLUMNS}


def main():
    table = {}
    for name in families.FAMILIES:
        with tempfile.TemporaryDirectory() as home:
            table[name] = row(name, Path(home))
        print(name, table[name], flush=True)
    text = json.dumps(table, indent=2) + '\n'
    (ROOT / 'benchmarks' / 'results' / 'families.json').write_text(text)


if __name__ == '__main__':  # processes are forked
    main()
