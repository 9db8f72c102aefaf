"A verifier is added as CONTRIBUTING says: one function, and one line in a test"

import json
import os
import shutil
import subprocess
import sys

from tests.support import ROOT

FUNCTION = """#| export
@verifier
def ends_with(text: str, answer: str) -> Verdict:
    "The response ends with the answer"
    return judge(text.endswith(answer), f'{text[-20:]!r} against {answer!r}')"""


def test_a_new_verifier_is_a_function_and_a_line(tmp_path):
    "In a copy of the repository, with nothing else changed"
    tracked = subprocess.check_output(['git', 'ls-files', '-z'], cwd=ROOT, text=True)
    for name in filter(None, tracked.split('\0')):
        if (ROOT / name).is_file() and not name.startswith('benchmarks/results'):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    path = tmp_path / 'nbs/judges/verifiers.ipynb'
    nb = json.loads(path.read_text())
    after = next(
        i for i, c in enumerate(nb['cells']) if 'def check_isolation' in ''.join(c['source'])
    )
    cell = dict(cell_type='code', id='0ecca5e0', metadata={}, outputs=[], execution_count=None)
    nb['cells'].insert(after + 1, cell | dict(source=FUNCTION.splitlines(keepends=True)))
    path.write_text(json.dumps(nb))
    test = tmp_path / 'tests/judges/test_hostile.py'
    first = 'ANSWERS = dict('
    test.write_text(test.read_text().replace(first, f"{first}ends_with='42', ", 1))

    env = os.environ | dict(PYTHONPATH=str(tmp_path))

    def run(*args):
        r = subprocess.run(
            [sys.executable, *args], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert r.returncode == 0, r.stdout[-3000:] + r.stderr[-3000:]
        return r.stdout

    run('tools/nb.py', 'sync')
    kinds = 'left_out or thousands_of_hostile_strings and ends_with'
    quiet = '-q', '-p', 'no:cacheprovider'
    said = run('-m', 'pytest', *quiet, 'tests/judges/test_hostile.py', '-k', kinds)
    assert '2 passed' in said
