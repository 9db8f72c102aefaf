"Every benchmark runs, in a small case, and ends with one JSON line that `make bench` can keep"

import json
import math
import runpy
import sys

import pytest

from tests.support import ROOT
from tests.support import fork_server as forked
from tests.support import vllm_fork_server as nursed

SCRIPTS = sorted(p for d in ('', 'studies') for p in (ROOT / 'benchmarks' / d).glob('[!_]*.py'))


def quick(script):  # `python SCRIPT --quick`
    sys.argv = [str(script), '--quick']
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name='__main__')


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda p: p.stem)
def test_quick(script, tmp_path):
    run = nursed.run if 'compassrl.rollout.vllm' in script.read_text() else forked.run
    r = run(tmp_path / 'log', quick, script, timeout=300)
    assert r.returncode == 0, r.stderr[-2000:]
    result = json.loads(r.stdout.splitlines()[-1])
    assert {'name', 'ratio', 'units', 'settings', 'machine'} <= result.keys()
    assert result['name'] == script.stem and isinstance(result['units'], str)
    assert isinstance(result['ratio'], (int, float)) and math.isfinite(result['ratio'])
    assert result['settings'] and {'cpu', 'threads', 'torch'} <= result['machine'].keys()
    assert str(ROOT) not in r.stdout.splitlines()[-1], 'no paths of this machine'
