"""Which families of models are supported: executed, then stored for README and notebooks.

    PYTHONPATH=. python tools/families.py     # writes benchmarks/results/families.json

`tests/model/test_families.py` executes the same and compares.
"""

import json
import tempfile
from pathlib import Path

from tests.support import ROOT, families, vllm_fork_server


def make(home):
    "Every family, as its makers publish it and as we have written it: model, policy, our folder"
    made = {}
    for name in families.FAMILIES:
        model = families.original(name, home / name / 'in')
        out = home / name / 'out'
        made[name] = model, families.there_and_back(home / name / 'in', out), out
    return made


def main():
    with tempfile.TemporaryDirectory() as home:
        made = make(Path(home))
        folders = {name: out for name, (*_, out) in made.items()}
        served = families.served(folders, Path(home) / 'log', vllm_fork_server.run)
        table = {
            name: {c: families.claim(name, c, *of, served) for c in families.COLUMNS}
            for name, of in made.items()
        }
    text = json.dumps(table, indent=2) + '\n'
    (ROOT / 'benchmarks' / 'results' / 'families.json').write_text(text)


if __name__ == '__main__':  # processes are forked
    main()
