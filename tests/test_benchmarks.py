"Every benchmark runs, in a small case, and ends with one JSON line that `make bench` can keep"
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((ROOT/'benchmarks').glob('[!_]*.py'))


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda p: p.stem)
def test_quick(script):
    r = subprocess.run([sys.executable, script, '--quick'], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert r.returncode == 0, r.stderr[-2000:]
    result = json.loads(r.stdout.splitlines()[-1])
    assert {'name', 'ratio', 'units', 'settings', 'machine'} <= result.keys()
    assert result['name'] == script.stem and isinstance(result['units'], str)
    assert isinstance(result['ratio'], (int, float)) and math.isfinite(result['ratio'])
    assert result['settings'] and {'cpu', 'threads', 'torch'} <= result['machine'].keys()
    assert str(ROOT) not in r.stdout.splitlines()[-1], 'no paths of this machine'
