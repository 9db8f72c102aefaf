"A loss of one's own by its place: the same in every process, and until the run's end"

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from compassrl.algo.loss_registry import policy_loss, policy_losses
from compassrl.algo.losses import LossConfig, PolicyLoss
from compassrl.algo.losses.espo import EspoConfig
from compassrl.records import Batch
from compassrl.runs.cli import main, parse_train
from compassrl.runs.run import start_run
from tests.support import ROOT, fork_server

LOSS = """
from compassrl import policy_loss

@policy_loss(aggregation='token-mean')
def mine(log_probs, old_log_probs, advantages, mask, cfg):
    return -{factor} * log_probs * advantages, dict(mine_sum=mask.sum())

def bare(*args):
    pass
"""
SMOKE = 'train smoke-cpu --cold-start.steps 0 --eval-k 1 --steps 2 --run-dir run'.split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('loss.py').write_text(LOSS.format(factor=1))
    yield tmp_path
    policy_losses.functions.pop('mine', None)


def python(*args):
    "A process of its own"
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
    return subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True)


def main_there(folder, words):
    os.chdir(folder)
    main(words)


def batch():
    gen = torch.Generator().manual_seed(0)
    mask = torch.arange(5) < torch.tensor([[5], [2], [4]])
    old, adv = -torch.rand(3, 5, generator=gen), torch.randn(3, 5, generator=gen) * mask
    ids = torch.zeros(3, 5).long()
    return Batch(ids, mask, mask, old, ids[:, 0], old[:, 0], adv, old, entropy=-old)


def test_a_file_is_known_by_its_folder_and_read_again_by_a_run(folder):
    "Several runs may start in one process, as in a notebook"
    b = batch()

    def value():
        return float(PolicyLoss(LossConfig('loss.py:mine', tis='off'))(b.old_log_probs, b, 1, 3)[0])

    once = value()
    (folder / 'other').mkdir()
    os.chdir(folder / 'other')
    Path('loss.py').write_text(LOSS.format(factor=5))
    assert value() == pytest.approx(5 * once)
    cfg = parse_train([*SMOKE[1:], '--loss.name', 'loss.py:mine'])
    Path('loss.py').write_text('edited')
    with pytest.raises(ValueError, match='loss.py:mine'):
        start_run(cfg)
    assert not Path('run').exists()


def test_an_edited_file_is_read_again_but_not_by_a_run(folder):
    "In a notebook: the file itself, a module that it imports, a table that it has read"
    b = batch()
    Path('loss.py').write_text(
        LOSS.format(factor='scale() * int(TABLE)')
        + """
from pathlib import Path
from scales import scale
TABLE = Path(__file__).with_name('table').read_text()
"""
    )
    Path('scales.py').write_text('def scale():\n    return 1\n')
    Path('table').write_text('1')

    def value():
        return float(PolicyLoss(LossConfig('loss.py:mine', tis='off'))(b.old_log_probs, b, 1, 3)[0])

    once = value()
    Path('table').write_text('2')
    assert value() == pytest.approx(2 * once)
    Path('scales.py').write_text('def scale():  # edited\n    return 5\n')
    assert value() == pytest.approx(10 * once)
    with policy_losses.hold():
        assert value() == pytest.approx(10 * once)
        Path('loss.py').write_text(LOSS.format(factor=3))
        assert value() == pytest.approx(10 * once)
    assert value() == pytest.approx(3 * once)


def test_its_value_is_that_of_the_formula(folder):
    b = batch()
    loss = PolicyLoss(parse_train(['smoke-cpu', '--loss.name', 'loss.py:mine']).loss)
    value, metrics = loss(b.old_log_probs, b, 11, 3)
    want = -(b.old_log_probs * b.advantages)[b.response_mask].sum() / 11
    torch.testing.assert_close(value, want)
    assert metrics['mine_sum'] == 1 and loss.cfg.aggregation == 'token-mean'


def test_a_loss_that_leaves_is_an_error(folder):
    "Not the end of the run with exit code 0"
    leaves = LOSS.format(factor=1).replace('    return -', '    raise SystemExit(0)\n    return -')
    Path('loss.py').write_text(leaves)
    loss = PolicyLoss(parse_train(['smoke-cpu', '--loss.name', 'loss.py:mine']).loss)
    with pytest.raises(RuntimeError, match=r'ended the program by SystemExit\(0\)'):
        loss(batch().old_log_probs, batch(), 11, 3)


@pytest.mark.parametrize(
    'name, said',
    [
        ('gone.py:mine', "No such file or directory: 'gone.py'"),
        ('loss.py:yours', "loss.py has no function 'yours', only ['bare', 'mine']"),
        ('loss.py:bare', 'put @policy_loss() above it'),
        ('torn.py:mine', 'cannot be imported, ZeroDivisionError: division by zero (torn.py:2)'),
        ('no_such_module:mine', "No module named 'no_such_module'"),
        ('mine.py', 'use one of grpo'),
    ],
)
def test_what_is_no_loss_is_refused_in_one_line(folder, name, said):
    Path('torn.py').write_text('\n1 / 0\n')
    with pytest.raises(ValueError) as e:
        LossConfig(name)
    assert said in str(e.value) and name in str(e.value) and '\n' not in str(e.value)


def test_a_fresh_process_trains_with_it_and_does_not_go_on_with_another(folder):
    "Nothing was imported before; the run is resumed by other processes, once the file has changed"
    r = python('-m', 'compassrl', *SMOKE, '--loss.name', 'loss.py:mine')
    assert r.returncode == 0, r.stderr
    rows = [json.loads(line) for line in Path('run/metrics.jsonl').read_text().splitlines()]
    assert [m['mine_sum'] for m in rows] == [1, 1]

    def resumed():  # in a process that has not seen the file
        words = ['resume', 'run', '--steps', '3']
        return fork_server.run(folder / 'log', main_there, folder, words, timeout=300)

    Path('loss.py').write_text(LOSS.format(factor=2))
    r = resumed()
    assert r.returncode == 1 and 'loss.name loss.py has changed' in r.stderr
    assert len(r.stderr.splitlines()) == 1 and 'loss.py' in r.stderr
    Path('loss.py').write_text(LOSS.format(factor=1))
    r = resumed()
    assert r.returncode == 0 and len(Path('run/metrics.jsonl').read_text().splitlines()) == 3


@dataclass(frozen=True)
class Own:
    factor: float = 3.0


def test_settings_of_one_loss_never_reach_another(monkeypatch):
    "The loop hands ESPO's settings to every loss"
    monkeypatch.setattr(policy_losses, 'functions', dict(policy_losses.functions))

    @policy_loss(aggregation='token-mean', config=Own)
    def scaled(log_probs, old_log_probs, advantages, mask, cfg, own):
        return -own.factor * log_probs * advantages, {}

    b = batch()
    espo = EspoConfig().for_batch(b, 8)
    for own, factor in ((None, 3), (espo, 3), (Own(5.0), 5)):
        value, _ = PolicyLoss(LossConfig('scaled'), own)(b.old_log_probs, b, 11, 3)
        want = -factor * (b.old_log_probs * b.advantages)[b.response_mask].sum() / 11
        torch.testing.assert_close(value, want)
    changed = PolicyLoss(LossConfig('espo'), replace(espo, alpha=0.5)).own
    assert changed == (replace(espo, alpha=0.5),)
