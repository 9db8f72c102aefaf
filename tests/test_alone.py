"Files whose ranks fork a writer: each in a process of its own, where nobody has started threads before"
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip('megatron.core')
HERE = Path(__file__).parent


@pytest.mark.parametrize('path', sorted(HERE.glob('alone_*.py')), ids=lambda p: p.stem)
def test_alone(path):
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-p', 'no:xdist', path]
    r = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, timeout=850)
    assert r.returncode == 0, f'{r.stdout[-6000:]}\n{r.stderr[-2000:]}'
    print(r.stdout.splitlines()[-1])
