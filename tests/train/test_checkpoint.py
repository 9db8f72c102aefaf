"""Promise 2 of the architecture: whatever happens to a save or to its files, what loads is whole
and never older than the last save that returned."""

import errno
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import struct
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as hs

import compassrl.train.checkpoint as ck
import compassrl.train.checkpoint_files as mf
from compassrl.train import checkpoint as states_module
from compassrl.train.checkpoint import (
    check_shapes,
    decode_state,
    encode_state,
    load_checkpoint,
    save_checkpoint,
)
from compassrl.train.checkpoint_files import (
    CheckpointError,
    TornCheckpoint,
    discard,
    found_checkpoints,
    makes_sense,
)
from course.checkpoints import latest_checkpoint
from tests.support.file_events import Killer

torch.set_num_threads(1)
DTYPES = sorted(states_module._dtypes, key=str)
MEMORY = (
    '/dev/shm' if os.access('/dev/shm', os.W_OK) else None
)  # a file system without a slow fsync, where there is one


@pytest.fixture
def tmp_path():
    with tempfile.TemporaryDirectory(dir=MEMORY) as d:
        yield Path(d)


def bits(t):
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b''


def same(a, b):
    "Equal to the last bit, types included"
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and bits(a) == bits(b)
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return (
            list(a) == list(b)
            and [*map(type, a)] == [*map(type, b)]
            and all(same(a[k], b[k]) for k in a)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return struct.pack('>d', a) == struct.pack('>d', b) if isinstance(a, float) else a == b


# ---- round trip


@hs.composite
def tensors(draw):
    dtype, shape = draw(hs.sampled_from(DTYPES)), draw(hs.lists(hs.integers(0, 3), max_size=3))
    size = torch.empty(shape, dtype=dtype).nbytes
    raw = bytearray(draw(hs.binary(min_size=size, max_size=size)))
    if dtype == torch.bool:
        raw = bytearray(b & 1 for b in raw)
    return (
        torch.frombuffer(raw, dtype=dtype).reshape(shape).clone()
        if size
        else torch.empty(shape, dtype=dtype)
    )


keys = (
    hs.text(max_size=4)
    | hs.integers()
    | hs.booleans()
    | hs.none()
    | hs.floats(allow_nan=False)
    | hs.sampled_from(['$tensor', '__metadata__', '', 'a.b'])
)
leaves = (
    tensors()
    | hs.none()
    | hs.booleans()
    | hs.integers()
    | hs.integers(-(2**200), 2**200)
    | hs.floats()
    | hs.text(hs.characters(), max_size=6)
)
states = hs.recursive(
    leaves,
    lambda x: (
        hs.lists(x, max_size=4)
        | hs.lists(x, max_size=3).map(tuple)
        | hs.dictionaries(keys, x, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(
    state=hs.dictionaries(keys, states, max_size=4),
    step=hs.integers(0, 10**7),
    shard=hs.sampled_from([1, 16, 2**30]),
)
def test_round_trip_is_bitwise(state, step, shard):
    with tempfile.TemporaryDirectory(dir=MEMORY) as d:
        path = save_checkpoint(d, step, state, shard_bytes=shard)
        found, back = load_checkpoint(path)
        assert found == step and same(state, back)
        assert latest_checkpoint(d) == path


@settings(max_examples=200, deadline=None)
@given(state=states)
def test_encoding_is_strict_json_and_invertible(state):
    tree, tensors = encode_state(state)
    assert same(state, decode_state(json.loads(json.dumps(tree, allow_nan=False)), tensors))


def test_views_shared_memory_and_names(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    shared = dict(
        w=base,
        tied=base,
        t=base.T,
        row=base[1],
        every=base[:, ::2],
        expanded=torch.ones(1).expand(5),
        param=torch.nn.Parameter(base),
        conj=torch.tensor([1 + 2j]).conj(),
        channels_last=torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last),
        **{
            'a.b': torch.ones(1),
            'é\ud800': torch.zeros(1),
            '': torch.full((1,), 7.0),
            '__metadata__': torch.full((1,), 8.0),
        },
        a={'b': torch.ones(2)},
    )
    back = load_checkpoint(save_checkpoint(tmp_path, 1, shared))[1]

    def flat(s):
        return [t.detach().resolve_conj() for t in encode_state(s)[1].values()]

    assert list(back) == list(shared) and all(map(same, flat(shared), flat(back)))
    back['w'][0, 0] = 99  # nothing that was shared is shared after loading
    assert (
        back['tied'][0, 0] == 0
        and back['t'][0, 0] == 0
        and back['param'][0, 0] == 0
        and not back['param'].requires_grad
    )
    assert len({t.data_ptr() for t in flat(back)}) == len(flat(back)) and not any(
        t.data_ptr() % 64 for t in flat(back)
    )  # aligned as torch does


def test_saving_changes_nothing(tmp_path):
    state = dict(w=torch.randn(5).bfloat16(), l=[1, (2,)], d={1: 2.0})
    copy = decode_state(*encode_state(state))
    before = state['w'].clone()
    save_checkpoint(tmp_path, 1, state)
    assert same(copy, state) and same(before, state['w'])


def test_numbers_of_any_size(tmp_path):
    state = dict(
        i=[10**5000, -(10**5000), 2**63 - 1, 2**63, -(2**63)],
        f=[float('inf'), -float('inf'), float('nan'), -0.0, 5e-324, 0.1, 1e308],
        nan=struct.unpack('>d', bytes.fromhex('fff0000000000123'))[0],
    )
    assert same(state, load_checkpoint(save_checkpoint(tmp_path, 1, state))[1])


def test_subclasses_come_back_as_their_base(tmp_path):
    import collections
    import enum

    import numpy as np

    state = dict(
        od=collections.OrderedDict(a=1),
        i=enum.IntEnum('E', 'x y').y,
        f=np.float64(0.1),
        s=np.str_('q'),
    )
    assert same(
        load_checkpoint(save_checkpoint(tmp_path, 1, state))[1],
        dict(od=dict(a=1), i=2, f=0.1, s='q'),
    )


class Run:
    """A small training run with everything that a resume needs: weights with two dtypes, AdamW with
    two groups, a scheduler, dropout, two generators"""

    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )
        self.model[3].bfloat16()
        self.opt = torch.optim.AdamW(
            [
                dict(params=self.model[0].parameters(), lr=1e-2),
                dict(params=self.model[3].parameters(), lr=3e-3),
            ],
            betas=(0.9, 0.99),
            amsgrad=True,
        )
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, 20)
        self.data, self.py = torch.Generator().manual_seed(1), random.Random(2)

    def step(self):
        x = torch.randn(4, 6, generator=self.data) * self.py.random()
        loss = (
            (
                self.model[:3](x).bfloat16() @ self.model[3].weight.T
                + self.model[3].bias
                - x.sum(1, keepdim=True)
            )
            .float()
            .pow(2)
            .mean()
        )
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.sched.step()
        return loss.item()

    def state(self):
        return dict(
            model=self.model.state_dict(),
            opt=self.opt.state_dict(),
            sched=self.sched.state_dict(),
            rng=torch.get_rng_state(),
            data=self.data.get_state(),
            py=self.py.getstate(),
        )

    def load(self, s):
        self.model.load_state_dict(s['model'])
        self.opt.load_state_dict(s['opt'])
        self.sched.load_state_dict(s['sched'])
        torch.set_rng_state(s['rng'])
        self.data.set_state(s['data'])
        self.py.setstate(s['py'])


def test_a_restored_run_continues_bitwise(tmp_path):
    run = Run()
    whole = [run.step() for _ in range(30)]
    end = run.state()
    run = Run()
    parts = [run.step() for _ in range(7)]
    for n in (0, 1, 10, 12):  # resumed three times, once without a step in between
        save_checkpoint(tmp_path, len(parts), run.state())
        run = Run()
        torch.manual_seed(99)
        step, state = load_checkpoint(latest_checkpoint(tmp_path, required=True))
        assert step == len(parts)
        run.load(state)
        parts += [run.step() for _ in range(n)]
    assert parts == whole and same(
        decode_state(*encode_state(run.state())), decode_state(*encode_state(end))
    )
    assert (
        type(state['opt']['state']) is dict
        and set(state['opt']['state']) == {0, 1, 2, 3}
        and type(state['py']) is tuple
    )


# ---- damage

STATE = dict(
    w=torch.arange(6.0).reshape(2, 3),
    b=torch.ones(2, dtype=torch.bfloat16),
    opt={0: dict(step=3, lr=1e-3)},
    note='ok',
)


def two(root, shard_bytes=2**30):
    save_checkpoint(root, 1, STATE | dict(note='one'), shard_bytes=shard_bytes)
    return save_checkpoint(root, 2, STATE, shard_bytes=shard_bytes)


def expect_torn(path, capsys, *words):
    "The damaged one does not load, it is named in one line, and the one before is found"
    with pytest.raises(TornCheckpoint) as e:
        load_checkpoint(path)
    capsys.readouterr()
    found = latest_checkpoint(path.parent)
    lines = capsys.readouterr().out.splitlines()
    assert found.name == 'step-000001' and load_checkpoint(found)[1]['note'] == 'one'
    assert len(lines) == 1 and str(e.value) in lines[0] and '\n' not in str(e.value)
    for w in (path.name, *words):
        assert w in lines[0]


FILES = ['manifest.json', 'state.json', 'tensors-00000.safetensors', 'tensors-00001.safetensors']


@pytest.mark.parametrize('name', FILES)
def test_every_flipped_bit_is_found(tmp_path, name):
    path = two(tmp_path, shard_bytes=8)
    good = (path / name).read_bytes()
    for i in range(len(good)):
        for bit in range(8):
            (path / name).write_bytes(good[:i] + bytes([good[i] ^ 1 << bit]) + good[i + 1 :])
            with pytest.raises(TornCheckpoint):
                ck._verify(path)
    (path / name).write_bytes(good)
    assert latest_checkpoint(tmp_path) == path


@pytest.mark.parametrize('name', FILES)
def test_every_truncation_is_found(tmp_path, name):
    path = two(tmp_path, shard_bytes=8)
    good = (path / name).read_bytes()
    for n in range(len(good)):
        (path / name).write_bytes(good[:n])
        with pytest.raises(TornCheckpoint):
            ck._verify(path)


@settings(max_examples=150, deadline=None)
@given(name=hs.sampled_from(FILES), data=hs.data())
def test_any_other_bytes_are_found(name, data):
    with tempfile.TemporaryDirectory(dir=MEMORY) as d:
        path = two(d, shard_bytes=8)
        good = (path / name).read_bytes()
        i, j = (data.draw(hs.integers(0, len(good))) for _ in range(2))
        bad = (
            good[:i] + data.draw(hs.binary(max_size=20)) + good[j:]
        )  # cut, repeat, insert, overwrite
        (path / name).write_bytes(bad)
        if bad == good:
            assert latest_checkpoint(d) == path
            return
        with pytest.raises(TornCheckpoint):
            load_checkpoint(path)
        assert latest_checkpoint(d).name == 'step-000001'


@pytest.mark.parametrize('name', FILES)
def test_messages_name_file_and_both_values(tmp_path, capsys, name):
    path = two(tmp_path, shard_bytes=8)
    file = path / name
    good = file.read_bytes()
    file.unlink()
    expect_torn(path, capsys, name, 'missing')
    file.mkdir()
    expect_torn(path, capsys, name)
    file.rmdir()
    file.write_bytes(b'')
    expect_torn(path, capsys, name)
    if name != 'manifest.json':
        file.write_bytes(good + b'x')
        expect_torn(path, capsys, name, f'{len(good) + 1:,} bytes', f'{len(good):,}')
        bad = good[:-1] + bytes([good[-1] ^ 1])
        file.write_bytes(bad)
        expect_torn(
            path,
            capsys,
            name,
            hashlib.sha256(bad).hexdigest()[:12],
            hashlib.sha256(good).hexdigest()[:12],
        )
    else:
        m = json.loads(good)
        m['step'] = 9
        file.write_bytes(json.dumps(m, sort_keys=True, indent=1).encode())
        expect_torn(path, capsys, 'sha256', json.loads(good)['sha256'][:12])
        for other in (b'[]', b'3', b'{}', b'"x"', b'null', b'[' * 10000, b'\xff\xfe'):
            file.write_bytes(other)
            expect_torn(path, capsys, name)
    file.write_bytes(good)
    assert latest_checkpoint(tmp_path) == path


def test_a_renamed_checkpoint_is_not_taken_for_another_step(tmp_path, capsys):
    path = two(tmp_path)
    os.rename(path, tmp_path / 'step-000009')
    expect_torn(tmp_path / 'step-000009', capsys)
    os.rename(tmp_path / 'step-000009', tmp_path / 'best')  # a name of the user's own is fine
    assert load_checkpoint(tmp_path / 'best')[0] == 2


def test_files_of_another_checkpoint_do_not_pass(tmp_path):
    path = two(tmp_path)
    for name in ('state.json',):
        shutil.copy(tmp_path / 'step-000001' / name, path / name)
    with pytest.raises(TornCheckpoint):
        load_checkpoint(path)


@pytest.mark.parametrize('error', [MemoryError, torch.OutOfMemoryError])
def test_a_full_memory_makes_no_checkpoint_torn(error, tmp_path):
    "It would be skipped, and a later save would remove it"
    with pytest.raises(error), makes_sense(tmp_path):
        raise error


def test_a_linked_checkpoint_goes_and_its_target_stays(tmp_path):
    (target := tmp_path / 'elsewhere').mkdir()
    (target / 'file').write_text('kept')
    (link := tmp_path / 'root' / 'step-000001').parent.mkdir()
    link.symlink_to(target)
    discard(link)
    assert (target / 'file').read_text() == 'kept' and not [*link.parent.iterdir()]


def test_all_torn(tmp_path, capsys):
    two(tmp_path)
    for p in tmp_path.iterdir():
        (p / 'state.json').unlink()
    assert latest_checkpoint(tmp_path) is None and len(capsys.readouterr().out.splitlines()) == 2
    with pytest.raises(CheckpointError, match='no valid checkpoint .2 torn.*begin another run'):
        latest_checkpoint(tmp_path, required=True)


# ---- bad input: one line, the value, the fix


def rewrite(path, **changes):  # a well-formed manifest that says something else
    m = json.loads((path / 'manifest.json').read_text())
    m.pop('sha256')
    (path / 'manifest.json').write_bytes(mf.seal(m | changes)[1])


@pytest.mark.parametrize(
    'call,words',
    [
        (lambda d: load_checkpoint(d / 'nowhere'), ['nowhere', 'no such folder', 'step-000123']),
        (
            lambda d: load_checkpoint(d),
            ['holds checkpoints and is none', 'step-000002, step-000001'],
        ),
        (
            lambda d: latest_checkpoint(d / 'nowhere', required=True),
            ['nowhere', 'no such folder', 'begin another run'],
        ),
        (lambda d: save_checkpoint(d, 1, {}), ['step 1', 'step-000002', 'another folder']),
        (lambda d: save_checkpoint(d, -1, {}), ['step=-1', '0 or more']),
        (lambda d: save_checkpoint(d, True, {}), ['step=True']),
        (lambda d: save_checkpoint(d, 1.0, {}), ['step=1.0']),
        (lambda d: save_checkpoint(d, 3, {}, keep=0), ['keep=0', 'at least 1']),
        (lambda d: save_checkpoint(d, 3, [1]), ['state is a list', 'dict']),
        (
            lambda d: save_checkpoint(d, 3, dict(a=[dict(b={1, 2})])),
            ['state[a][0][b] is a set', 'use tensors'],
        ),
        (lambda d: save_checkpoint(d, 3, dict(a=print)), ['state[a] is a builtin_function']),
        (
            lambda d: save_checkpoint(d, 3, dict(a=torch.eye(2).to_sparse())),
            ['state[a]', 'sparse', 'dense'],
        ),
        (
            lambda d: save_checkpoint(d, 3, dict(a=torch.empty(2, device='meta'))),
            ['state[a]', 'meta'],
        ),
        (
            lambda d: save_checkpoint(d, 3, dict(a=torch.zeros(1, dtype=torch.complex128))),
            ['complex128', 'complex64'],
        ),
        (
            lambda d: save_checkpoint(d / 'step-000002' / 'state.json', 3, {}),
            ['state.json', 'not saved'],
        ),
    ],
)
def test_errors(tmp_path, call, words):
    two(tmp_path)
    before = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob('*'))
    with pytest.raises(ValueError) as e:
        call(tmp_path)
    assert '\n' not in str(e.value)
    for w in words:
        assert w in str(e.value)
    assert (
        before == sorted(p.relative_to(tmp_path) for p in tmp_path.rglob('*'))
        and latest_checkpoint(tmp_path).name == 'step-000002'
    )


@pytest.mark.parametrize('change', [dict(version=2), dict(format='other')])
def test_another_format_is_refused_not_skipped_or_removed(tmp_path, change):
    path = two(tmp_path)
    rewrite(path, **change)
    for call in (
        lambda: load_checkpoint(path),
        lambda: latest_checkpoint(tmp_path),
        lambda: save_checkpoint(tmp_path, 1, {}),
    ):
        with pytest.raises(CheckpointError, match='the release that wrote it') as e:
            call()
        assert not isinstance(e.value, TornCheckpoint)
    assert path.exists()


def test_check_shapes():
    model = torch.nn.Linear(3, 2).state_dict()
    check_shapes(model, model)
    check_shapes(dict(m=model, n=1), dict(m=dict(model), n=2))
    with pytest.raises(CheckpointError) as e:
        check_shapes(model, torch.nn.Linear(3, 4).state_dict())
    assert (
        'weight is [4, 3] in the checkpoint and [2, 3] here; '
        'bias is [4] in the checkpoint and [2] here' in str(e.value)
    )
    with pytest.raises(CheckpointError, match=r'bias is missing in the checkpoint and \[2\] here'):
        check_shapes(model, dict(weight=model['weight']))
    with pytest.raises(CheckpointError, match=r'x is \[1\] in the checkpoint and unknown here'):
        check_shapes(model, model | dict(x=torch.ones(1)))
    many = {f'l{i}': torch.ones(i) for i in range(9)}
    with pytest.raises(CheckpointError, match='; and 6 more: use the config') as e:
        check_shapes(many, {k: torch.ones(99) for k in many})
    assert '\n' not in str(e.value)


# ---- what stays in the folder


def names(root):
    return sorted(p.name for p in root.iterdir())


def test_keep_and_stale_folders(tmp_path):
    root = tmp_path / 'a' / 'b' / 'checkpoints'
    for step in (1, 2, 10, 1_000_000, 1_000_001):
        save_checkpoint(root, step, dict(step=step), keep=3)
        (root / '.tmp-step-000099').mkdir()
        (root / '.tmp-step-000099' / 'state.json').write_text('half')
    assert names(root) == ['.tmp-step-000099', 'step-000010', 'step-1000000', 'step-1000001']
    (root / 'notes').mkdir()
    (root / 'step-x').mkdir()
    (root / 'step-000011').write_text('a file')
    save_checkpoint(root, 1_000_002, {}, keep=1)
    assert (
        names(root) == ['notes', 'step-000011', 'step-1000002', 'step-x']
        and latest_checkpoint(root).name == 'step-1000002'
    )


def test_the_same_step_again_replaces(tmp_path):
    for i in range(3):
        save_checkpoint(tmp_path, 5, dict(i=i))
    assert names(tmp_path) == ['step-000005'] and load_checkpoint(tmp_path / 'step-000005')[
        1
    ] == dict(i=2)


def test_a_torn_later_step_makes_room(tmp_path, capsys):
    (two(tmp_path) / 'state.json').write_text('{}')
    save_checkpoint(tmp_path, 1, dict(again=True))
    assert names(tmp_path) == ['step-000001'] and load_checkpoint(latest_checkpoint(tmp_path))[
        1
    ] == dict(again=True)


def test_full_disk(tmp_path, monkeypatch):
    two(tmp_path)
    write = ck.write_file
    for full in ('state.json', 'tensors-00000.safetensors', 'manifest.json'):

        def fails(path, data):
            if path.name != full:
                return write(path, data)
            path.write_bytes(data[:3])
            raise OSError(errno.ENOSPC, 'No space left on device', str(path))

        monkeypatch.setattr(ck, 'write_file', fails)
        with pytest.raises(
            CheckpointError, match='step 3 was not saved .No space left on device.*free space'
        ):
            save_checkpoint(tmp_path, 3, STATE)
        assert names(tmp_path) == ['step-000001', 'step-000002']


# ---- the order of what reaches the disk: this is what survives a power cut


def test_order_of_syncs(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, STATE)
    log = []
    real = {n: getattr(os, n) for n in ('fsync', 'replace')}

    def where(fd):
        return os.path.relpath(os.readlink(f'/proc/self/fd/{fd}'), tmp_path)

    monkeypatch.setattr(
        os, 'fsync', lambda fd: (log.append(('sync', where(fd))), real['fsync'](fd))
    )
    monkeypatch.setattr(
        os,
        'replace',
        lambda a, b: (
            log.append(('rename', os.path.relpath(a, tmp_path), os.path.relpath(b, tmp_path))),
            real['replace'](a, b),
        ),
    )
    monkeypatch.setattr(
        shutil, 'rmtree', lambda p, **k: log.append(('remove', os.path.relpath(p, tmp_path)))
    )
    save_checkpoint(tmp_path, 2, STATE, keep=1, shard_bytes=8)
    t = '.tmp-step-000002'
    files = [
        'state.json',
        'tensors-00000.safetensors',
        'tensors-00001.safetensors',
        'manifest.json',
    ]
    assert log[:7] == [
        *[('sync', f'{t}/{f}') for f in files],
        ('sync', t),
        ('rename', t, 'step-000002'),
        ('sync', '.'),
    ]
    assert (
        [x[0] for x in log[7:]] == ['rename', 'remove']
        and log[7][1] == 'step-000001'
        and log[7][2].startswith('.tmp-')
    )


# ---- killed: every point of a save, then any moment

SIZES = dict(small=50, large=300_000)


def state_of(step, size='small', tag=0):
    "A state that says of each of its parts which step it belongs to"
    return dict(
        step=step,
        tag=tag,
        w=torch.full((SIZES[size],), float(step)),
        opt={i: dict(m=torch.full((SIZES[size] // 4,), step + tag)) for i in range(3)},
    )


def check(path, tags=(0,)):
    "A checkpoint that loads must be of one piece"
    step, s = load_checkpoint(path)
    assert (
        s['step'] == step
        and s['tag'] in tags
        and (s['w'] == step).all()
        and all((o['m'] == step + s['tag']).all() for o in s['opt'].values())
    )
    return step, s['tag']


def child_nth(saver, root, log, steps, n, half):
    "Saves `steps` and is killed at operation n; notes each save that returned"
    save = globals()[saver]
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    Killer(n, half)
    for step, tag in steps:
        save(root, step, state_of(step, tag=tag))
        os.write(fd, f'{step} {tag}\n'.encode())
    os._exit(0)


def child_loop(root, log):
    "Saves as fast as it can, going on from what is there"
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    path = latest_checkpoint(root)
    step = check(path)[0] if path else 0
    while True:
        step += 1
        save_checkpoint(root, step, state_of(step, 'large'))
        os.write(fd, f'{step} 0\n'.encode())


@pytest.fixture(scope='module')
def spawn():
    ctx = multiprocessing.get_context('forkserver')
    ctx.set_forkserver_preload(['compassrl.train.checkpoint', 'pytest', 'hypothesis.strategies'])

    def start(target, *args):
        p = ctx.Process(target=target, args=args)
        p.start()
        return p

    return start


def returned(log):
    lines = log.read_text().splitlines() if log.exists() else []
    return [tuple(map(int, line.split())) for line in lines]


def kill_at_every_point(spawn, tmp_path, saver, steps, half, prepare=()):
    """Yields (root, last save that returned) after a kill at each operation, until a run ends by
    itself"""
    for n in range(1, 400):
        root, log = tmp_path / f'{n}-{half}', tmp_path / f'{n}-{half}.log'
        for step, tag in prepare:
            save_checkpoint(root, step, state_of(step, tag=tag))
        p = spawn(child_nth, saver, root, log, steps, n, half)
        p.join(60)
        assert p.exitcode in (0, -signal.SIGKILL)
        yield root, (returned(log) or list(prepare) or [None])[-1]
        if p.exitcode == 0:
            return
    raise AssertionError('never ended')


@pytest.mark.parametrize('half', [False, True])
def test_killed_at_every_operation(spawn, tmp_path, half, capsys):
    "A fresh folder, then four saves that also remove old ones"
    count = 0
    for root, last in kill_at_every_point(
        spawn, tmp_path, 'save_checkpoint', [(s, 0) for s in (1, 2, 3, 4)], half
    ):
        count += 1
        found = latest_checkpoint(root)
        assert (
            not capsys.readouterr().out
        )  # a kill never leaves a torn checkpoint under a name that is read
        assert found or last is None
        if found:
            assert check(found)[0] >= (last or (0,))[0]
        next_ = check(found)[0] + 1 if found else 1  # and the run can go on, in a clean folder
        save_checkpoint(root, next_, state_of(next_))
        assert (
            check(latest_checkpoint(root))[0] == next_
            and not [n for n in names(root) if n[0] == '.']
            and len(names(root)) <= 2
        )
    assert count > 50


def test_killed_while_a_step_is_saved_again(spawn, tmp_path, capsys):
    "The old content or the new one, at every point"
    tags = set()
    for root, last in kill_at_every_point(
        spawn, tmp_path, 'save_checkpoint', [(2, 1), (2, 2), (3, 2)], True, prepare=[(1, 0), (2, 0)]
    ):
        step, tag = check(latest_checkpoint(root), tags=(0, 1, 2))
        assert not capsys.readouterr().out and (step, tag) >= last
        tags.add((step, tag))
        save_checkpoint(
            root, step, state_of(step, tag=9)
        )  # the leftovers of a replacement do not disturb the next one
        assert check(latest_checkpoint(root), tags=(9,)) == (step, 9) and not [
            n for n in names(root) if n.endswith('.old')
        ]
    assert tags == {(2, 0), (2, 1), (2, 2), (3, 2)}


def naive_save(
    root, step, state
):  # a saver that the tests above must catch: no folder of its own, no rename
    path = Path(root) / f'step-{step:06}'
    if not path.exists():
        os.makedirs(path)
    for p in path.iterdir():
        p.unlink()
    ck._fill(path, step, *encode_state(state), 2**30)
    for p in found_checkpoints(Path(root))[1:]:
        shutil.rmtree(p)


def test_the_tests_catch_a_naive_saver(spawn, tmp_path, capsys):
    torn = 0
    for root, _ in kill_at_every_point(spawn, tmp_path, 'naive_save', [(1, 0), (2, 0)], True):
        latest_checkpoint(root)
        torn += bool(capsys.readouterr().out)
    assert torn > 3


def test_killed_at_random_moments(spawn, tmp_path, capsys):
    rng, inside, last = random.Random(0), 0, 0
    root, log = tmp_path / 'run', tmp_path / 'log'
    for _ in range(40):
        done = len(returned(log))
        p = spawn(child_loop, root, log)
        deadline = time.monotonic() + 60
        while len(returned(log)) == done and p.is_alive() and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(rng.random() * 0.05)
        os.kill(p.pid, signal.SIGKILL)
        p.join(60)
        assert p.exitcode == -signal.SIGKILL
        inside += any(n[0] == '.' for n in names(root))
        found = latest_checkpoint(root)
        assert not capsys.readouterr().out
        assert check(found)[0] >= returned(log)[-1][0] > last
        last = returned(log)[-1][0]
    assert inside >= 10, f'only {inside} of 40 kills hit a save: the test lost its bite'
