"Whatever happens to the files of a checkpoint: it is noticed, named in one line, not used"

import json
import multiprocessing
import os
import shutil
import signal

import pytest
import safetensors.torch as st
import torch

import compassrl.train.checkpoint as ck
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.train.checkpoint import WholeState
from compassrl.train.checkpoint_files import CheckpointError, TornCheckpoint
from compassrl.train.torch_train import OptimConfig, TorchTrain
from tests.support import chaos
from tests.support.damage import FLIPS, OF_A_FILE, OF_A_FOLDER, SENSELESS, flips, renewed

SMALL = PolicyConfig(hidden_size=32, head_dim=8, moe_intermediate_size=32, num_hidden_layers=1)


def engine(seed):
    "As after some steps: every parameter has moments"
    e = TorchTrain(Policy(SMALL, seed), OptimConfig())
    for p in e.policy.parameters():
        p.grad = torch.full_like(p, 0.1)
    e.optimizer.step()
    e.num_steps = seed
    return e


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    "Two checkpoints of different weights"
    root = tmp_path_factory.mktemp('saved')
    for step in (1, 2):
        WholeState(engine(step), root, keep=2).save(step)
    return root


@pytest.fixture
def root(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / 'checkpoints', symlinks=True)


def weights(e):
    return torch.cat([w.flatten() for _, w in e.weights()])


def expect_the_earlier(root, capsys):
    "One line names the damaged one, the one before is in the engine, and the next save goes on"
    e = engine(9)
    saver = WholeState(e, root, keep=2)
    assert saver.load() == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and lines[0].startswith('skipped a torn checkpoint: step-')
    assert torch.equal(weights(e), weights(engine(1)))
    saver.save(2)
    assert WholeState(engine(9), root, keep=2).load() == 2
    assert sorted(p.name for p in root.iterdir()) == ['step-000001', 'step-000002']


@chaos.kind('flipped bits, whole checkpoints')
def test_random_flips_are_noticed(root, record_property):
    found = 0
    for where in flips(root / 'step-000002', seed=1):
        with pytest.raises(TornCheckpoint):
            ck._verify(root / 'step-000002')
            pytest.fail(where)
        found += 1
    assert found == FLIPS
    record_property('trials', FLIPS)
    ck._verify(root / 'step-000002')  # all were taken back


@pytest.mark.parametrize('name', ['manifest.json', 'state.json', 'tensors-00000.safetensors'])
@pytest.mark.parametrize('damage', OF_A_FILE)
def test_damaged_files(damage, name, root, capsys):
    OF_A_FILE[damage](root / 'step-000002' / name, root / 'step-000001' / name)
    expect_the_earlier(root, capsys)


@pytest.mark.parametrize('damage', OF_A_FOLDER)
def test_damaged_folders(damage, root, capsys):
    OF_A_FOLDER[damage](root / 'step-000002', root / 'step-000001')
    expect_the_earlier(root, capsys)


@pytest.mark.parametrize('damage', SENSELESS)
def test_senseless_manifests(damage, root, capsys):
    SENSELESS[damage](root / 'step-000002')
    expect_the_earlier(root, capsys)


def state(change):
    "A state that is whole and says something else"

    def damage(path):
        tree = json.loads((path / 'state.json').read_text())
        (path / 'state.json').write_text(json.dumps(change(tree)))
        renewed(path, 'state.json')

    return damage


def tensors(change):
    def damage(path):
        name = 'tensors-00000.safetensors'
        (path / name).write_bytes(change(st.load((path / name).read_bytes())))
        renewed(path, name)

    return damage


def without(key):
    return lambda tree: {k: v for k, v in tree.items() if k != key}


def fewer(found):
    "One moment has another shape"
    first = next(k for k in found if k.endswith('exp_avg'))
    return st.save(found | {first: torch.zeros(3)})


STATES = dict(
    no_policy=state(without('policy')),
    no_optimizer=state(without('optimizer')),
    no_num_steps=state(without('num_steps')),
    steps_are_text=state(lambda t: t | dict(num_steps='many')),
    a_list=state(lambda t: [t]),
    a_number=state(lambda t: 3),
    no_such_tensor=state(lambda t: t | dict(policy={'embed': {'$tensor': 'nowhere'}})),
    bad_number=state(lambda t: t | dict(num_steps={'$int': 'zz'})),
    bad_float=state(lambda t: t | dict(lr={'$float': '00'})),
    no_groups=state(lambda t: t | dict(optimizer={})),
    no_state=state(lambda t: t | dict(optimizer=t['optimizer'] | dict(state=[]))),
    no_tensors=tensors(lambda found: st.save({})),
    no_safetensors=tensors(lambda found: b'hello'),
    other_moments=tensors(fewer),
)


@pytest.mark.parametrize('damage', STATES)
def test_senseless_states(damage, root, capsys):
    STATES[damage](root / 'step-000002')
    expect_the_earlier(root, capsys)


def test_none_is_left(root, capsys):
    for p in root.iterdir():
        (p / 'state.json').write_text('{}')
    with pytest.raises(CheckpointError, match=r'no valid checkpoint \(2 torn\)'):
        WholeState(engine(0), root, keep=2).load()
    assert len(capsys.readouterr().out.splitlines()) == 2 and len(list(root.iterdir())) == 2


def test_what_lies_beside_a_checkpoint_belongs_to_it(root, capsys):
    asked = []

    def beside(step):
        asked.append(step)
        if step == 2:
            raise TornCheckpoint('its other half is gone')

    e = engine(9)
    assert WholeState(e, root, keep=2).load(beside) == 1 and asked == [2, 1]
    assert 'its other half is gone' in capsys.readouterr().out
    assert torch.equal(weights(e), weights(engine(1)))


def test_leftovers_go_with_a_resume(root):
    (root / '.tmp-gone-x' / 'step-000000').mkdir(parents=True)
    assert WholeState(engine(9), root, keep=2).load() == 2
    assert sorted(p.name for p in root.iterdir()) == ['step-000001', 'step-000002']


def die(*args, **kw):
    os.kill(os.getpid(), signal.SIGKILL)


def killed_while_it_removes(root):
    shutil.rmtree = die
    WholeState(engine(3), root, keep=2).save(3)


def test_leftovers_go_with_the_next_save(root):
    "A kill between the new name of an old checkpoint and its end"
    p = multiprocessing.get_context('fork').Process(target=killed_while_it_removes, args=[root])
    p.start()
    p.join(60)
    assert p.exitcode == -signal.SIGKILL
    names = sorted(q.name for q in root.iterdir())
    assert names[0].startswith('.tmp-gone-') and names[1:] == ['step-000002', 'step-000003']
    WholeState(engine(4), root, keep=2).save(4)
    assert sorted(q.name for q in root.iterdir()) == ['step-000003', 'step-000004']


def test_every_byte_is_read_and_hashed_once(root, monkeypatch):
    import compassrl.train.checkpoint_files as mf

    hashed, read = [], []
    sha256 = mf.hashlib.sha256

    class Counted:
        "hashlib, with a note of how much is hashed"

        @staticmethod
        def sha256(data=b''):
            hashed.append(len(data))
            return sha256(data)

    def count(event, args):
        if event == 'open' and str(args[0]).startswith(str(root)) and counting:
            read.append(args[0])

    import sys

    counting = True
    sys.addaudithook(count)
    monkeypatch.setattr(mf, 'hashlib', Counted)
    WholeState(engine(9), root, keep=2).load()
    counting = False
    newest = root / 'step-000002'
    files = [p for p in newest.iterdir() if p.name != 'manifest.json']
    assert sorted(map(str, read)) == sorted(map(str, newest.iterdir()))
    assert sum(hashed) - sum(p.stat().st_size for p in files) < 3 * 2**10  # and the manifest
