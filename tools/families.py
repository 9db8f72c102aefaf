"""Which families of models are supported: executed, then stored for README and notebooks.

    PYTHONPATH=. python tools/families.py     # writes benchmarks/results/families.json

`tests/model/test_hf_config.py` executes the same and compares.
"""

import json
import tempfile
from pathlib import Path

from tests.support import ROOT, families, vllm_fork_server


def main():
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        made = {name: families.made(name, home / name) for name in families.FAMILIES}
        served = families.served(made, home / 'log', vllm_fork_server.run)
        table = {
            name: {c: families.claim(name, c, *of, served) for c in families.COLUMNS}
            for name, of in made.items()
        }
    text = json.dumps(table, indent=2) + '\n'
    (ROOT / 'benchmarks' / 'results' / 'families.json').write_text(text)


if __name__ == '__main__':  # processes are forked
    main()
