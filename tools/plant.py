"""Plants each fault of tests/planted.yml in a copy of the repository and runs the test that must
notice it: python tools/plant.py [WORDS OF THE FAULT ...]"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.support.faults import places  # noqa: E402

TABLE = ROOT / 'tests/planted.yml'
NEEDED = 'compassrl', 'course', 'tests', 'pyproject.toml', 'settings.ini'


def read():
    "[{what, old, new, test, file}]"
    faults = []
    for file, rows in yaml.safe_load(TABLE.read_text()).items():
        faults += [dict(zip(('what', 'old', 'new', 'test'), row), file=file) for row in rows]
    return faults


def with_fault(source, fault):
    "The module with the fault. Raises ValueError if its place is not found, or found twice"
    found = places(source, fault['old'])
    if len(found) != 1:
        raise ValueError(f'{fault["file"]}: {fault["old"]!r} stands there {len(found)} times')
    (begin, end) = found[0]
    return source[:begin] + fault['new'].strip() + source[end:]


def run(copy, tests):
    "pytest's exit code, and the end of what it said; in a fork, which has torch already"
    said = copy / 'said.txt'
    pid = os.fork()
    if not pid:
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code = 99
        try:
            os.chdir(copy)
            for name in [m for m in sys.modules if m.split('.')[0] in ('tests', 'compassrl')]:
                del sys.modules[name]
            sys.path[:] = [str(copy), *(p for p in sys.path if Path(p or '.').resolve() != ROOT)]
            os.environ['PYTHONPATH'] = str(copy)  # for processes that a test starts
            sys.dont_write_bytecode = True  # a fault of the same second would not be seen
            code = pytest.main(['-qx', '-p', 'no:cacheprovider', *tests])
        finally:
            sys.stdout.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, said.read_text()[-3000:]


def main(words):
    faults = [f for f in read() if all(w in f['what'] + f['file'] + f['test'] for w in words)]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / 'repository'
        copy.mkdir()
        for name in NEEDED:
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copy / name)
        code, said = run(copy, sorted({f['test'] for f in faults}))
        if code:
            raise SystemExit(f'a test fails without a fault:\n{said}')
        for f in faults:
            path = copy / f['file']
            good = path.read_text()
            path.write_text(with_fault(good, f))
            code, said = run(copy, [f['test']])
            path.write_text(good)
            noticed = code == 1 and ' error' not in said.splitlines()[-1]
            wrong += not noticed
            print('noticed' if noticed else 'MISSED ', f['what'], '|', f['test'], flush=True)
            if not noticed:
                print(said)
    raise SystemExit(f'{wrong} of {len(faults)} faults are not noticed' if wrong else 0)


if __name__ == '__main__':
    import pytest
    import torch  # noqa: F401

    main(sys.argv[1:])
