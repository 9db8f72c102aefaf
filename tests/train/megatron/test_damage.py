"Sharded checkpoints: damage is noticed by every rank, the one before is used, and no code runs"

import io
import os
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

import compassrl.train.megatron.shards as shards
from compassrl.train.checkpoint import ShardedState
from compassrl.train.checkpoint_files import CheckpointError, TornCheckpoint, first_usable
from compassrl.train.megatron.dist_checkpoint import load_sharded, save_sharded
from compassrl.train.megatron.leader import Leader, RankMonitor, serve_leader
from compassrl.train.megatron.parallel import ParallelConfig
from compassrl.train.megatron.shards import verify_sharded
from course.checkpoints import latest_sharded
from tests.support import chaos
from tests.support.damage import FLIPS, OF_A_FILE, OF_A_FOLDER, SENSELESS, flips, renewed, reseal
from tests.support.ranks import run_ranks
from tests.train.megatron.test_dist_checkpoint import batch, begin, push, train

TWO = ParallelConfig(ep=2)


def held(engine):
    "What this rank holds of the weights"
    return [p.detach().clone() for m in engine.chunks for p in m.parameters()]


def save_two(root):
    engine, states = begin(TWO), {}
    for step in (1, 2):
        train(engine, step)
        save_sharded(engine, root, step).wait()
        states[step] = held(engine)
    return states


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    "The folder, and on each rank the weights of both steps"
    root = tmp_path_factory.mktemp('saved')
    return root, run_ranks(2, save_two, root)


def load_all(roots, optimizer):
    "On both ranks: which checkpoint each folder gave, and its weights"
    engine, found = begin(TWO, seed=9), []
    for root in roots:
        for m in engine.chunks:
            for p in m.parameters():
                p.data.zero_()  # what the folder before gave is no answer
        path, step, _ = first_usable(root, lambda p: load_sharded(engine, p, optimizer))
        found.append((path and path.name, step, held(engine)))
    return found


def expect_the_earlier(damages, saved, tmp_path, optimizer=True):
    """Each in a folder of its own; all are loaded by the same two ranks, one after another.
    Without the moments it takes half the time; every file is verified all the same"""
    root, states = saved
    for name, damage in damages.items():
        shutil.copytree(root, tmp_path / name)
        damage(tmp_path / name / 'step-000002', tmp_path / name / 'step-000001')
    ranks = run_ranks(2, load_all, [tmp_path / name for name in damages], optimizer)
    for found, was in zip(ranks, states):
        for name, (used, step, loaded) in zip(damages, found):
            assert (used, step) == ('step-000001', 1), name
            assert len(loaded) > 10 and all(map(torch.equal, loaded, was[1])), name


@chaos.kind('flipped bits, sharded checkpoints')
def test_random_flips_are_noticed(saved, tmp_path, record_property):
    root, found = shutil.copytree(saved[0], tmp_path / 'root'), 0
    for where in flips(root / 'step-000002', seed=2):
        with pytest.raises(TornCheckpoint):
            verify_sharded(root / 'step-000002')
            pytest.fail(where)
        found += 1
    assert found == FLIPS
    record_property('trials', FLIPS)
    verify_sharded(root / 'step-000002')


FILES = 'manifest.json', '.metadata', 'metadata.json', 'common.pt', '__0_0.distcp', '__1_0.distcp'


@pytest.mark.parametrize('name', FILES)
def test_damaged_files(name, saved, tmp_path):
    def of(damage):
        return lambda path, earlier: damage(path / name, earlier / name)

    damages = {k: of(d) for k, d in OF_A_FILE.items()}
    if name == 'metadata.json':  # the same in every checkpoint: nothing is changed by these
        for k in ('swapped', 'link', 'hard_link'):
            del damages[k]
    expect_the_earlier(damages, saved, tmp_path, optimizer=False)


def test_damaged_folders(saved, tmp_path):
    expect_the_earlier(OF_A_FOLDER, saved, tmp_path, optimizer=False)


def test_senseless_manifests(saved, tmp_path):
    def of(damage):
        return lambda path, earlier: damage(path)

    more = dict(
        no_policy=lambda path: reseal(path, drop=['policy']),
        other_policy=lambda path: reseal(path, policy=dict(num_experts=99)),
        policy_is_a_list=lambda path: reseal(path, policy=[1]),
    )
    expect_the_earlier({k: of(d) for k, d in (SENSELESS | more).items()}, saved, tmp_path)


def test_what_is_skipped_is_named_in_one_line(saved, tmp_path, capsys):
    root = shutil.copytree(saved[0], tmp_path / 'root')
    (root / 'step-000002' / '__1_0.distcp').unlink()
    assert latest_sharded(root).name == 'step-000001'
    line, *more = capsys.readouterr().out.splitlines()
    assert not more and 'step-000002/__1_0.distcp: the file is missing' in line
    (root / 'step-000001' / '.metadata').unlink()
    with pytest.raises(CheckpointError, match=r'no valid checkpoint \(2 torn\)'):
        latest_sharded(root, required=True)


# ---- nothing is unpickled that could run


class Runs:
    "A pickle that makes a folder when it is loaded"

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def metadata_is_code(path, mark):
    (path / '.metadata').write_bytes(pickle.dumps(Runs(mark)))
    renewed(path, '.metadata')
    return lambda: pickle.loads((path / '.metadata').read_bytes())


def metadata_holds_code(path, mark):
    "All that it should be, and one thing more"
    found = pickle.loads((path / '.metadata').read_bytes())
    found.planner_data = Runs(mark)
    (path / '.metadata').write_bytes(pickle.dumps(found))
    renewed(path, '.metadata')
    return lambda: pickle.loads((path / '.metadata').read_bytes())


def common_holds_code(path, mark):
    torch.save(dict(num_steps=2, optimizer=Runs(mark)), path / 'common.pt')
    renewed(path, 'common.pt')
    return lambda: torch.load(path / 'common.pt', weights_only=False)


def shard_holds_code(path, mark):
    "In the place of an object that lies beside the tensors of a shard"
    box = io.BytesIO()
    torch.save([Runs(mark)], box)
    found = pickle.loads((path / '.metadata').read_bytes())
    objects = [k for k, v in found.state_dict_metadata.items() if type(v) is BytesStorageMetadata]
    for index, place in found.storage_data.items():
        if index.fqn in objects:
            file = path / place.relative_path
            at = file.stat().st_size
            file.write_bytes(file.read_bytes() + box.getvalue())
            found.storage_data[index] = replace(place, offset=at, length=len(box.getvalue()))
            renewed(path, file.name)
    (path / '.metadata').write_bytes(pickle.dumps(found))
    renewed(path, '.metadata')
    return lambda: torch.load(io.BytesIO(box.getvalue()), weights_only=False)


def metadata_leads_away(path, mark):
    "To a file that no manifest has verified"
    shutil.copy(path / '__0_0.distcp', path.parent / 'elsewhere')
    found = pickle.loads((path / '.metadata').read_bytes())
    for index, place in found.storage_data.items():
        found.storage_data[index] = replace(place, relative_path='../elsewhere')
    (path / '.metadata').write_bytes(pickle.dumps(found))
    renewed(path, '.metadata')
    return mark.mkdir


FORGED = (
    metadata_is_code,
    metadata_holds_code,
    common_holds_code,
    shard_holds_code,
    metadata_leads_away,
)


def test_a_forged_checkpoint_runs_nothing(saved, tmp_path):
    "With right hashes; each would run if it were read as torch reads it"
    loads, damages = {}, {}

    def forged(forge):
        def damage(path, earlier):
            loads[forge.__name__] = forge(path, tmp_path / f'{forge.__name__} ran')
            verify_sharded(path)  # its hashes do not betray it

        return damage

    damages = {f.__name__: forged(f) for f in FORGED}
    expect_the_earlier(damages, saved, tmp_path)
    for name, load in loads.items():
        mark = tmp_path / f'{name} ran'
        assert not mark.exists()
        load()
        assert mark.exists(), f'{name} is no threat: the test proves nothing'


# ---- through the leader: a refusal leaves all ranks alive


def lead(fn, root):
    engine = begin(TWO, seed=9)
    watch = RankMonitor(engine.control)
    if dist.get_rank():
        return serve_leader(engine, watch)
    with Leader(engine, watch) as leader:
        return fn(leader, root)


def refused_then_saved(leader, root):
    shutil.rmtree(root / 'step-000001')
    (root / 'step-000002' / 'common.pt').write_bytes(b'')
    with pytest.raises(CheckpointError, match='no valid checkpoint'):
        ShardedState(leader, root, keep=2).load()
    leader.update(batch(0), push)
    return [k for k, _ in leader.weights()] != []


def test_no_rank_dies_of_a_refusal(saved, tmp_path):
    root = shutil.copytree(saved[0], tmp_path / 'root')
    assert run_ranks(2, lead, refused_then_saved, root)[0]


def skipped_with_a_later_one(leader, root):
    saver = ShardedState(leader, root, keep=1)
    asked = []
    assert saver.load(asked.append) == 1 and asked == [9, 2, 1]
    saver.save(2)
    saver.wait()
    return ShardedState(leader, root, keep=1).load()


def test_a_skipped_one_makes_room_when_the_next_save_is_whole(saved, tmp_path):
    root = shutil.copytree(saved[0], tmp_path / 'root')
    (root / 'step-000002' / '__1_0.distcp').write_bytes(b'')
    shutil.copytree(root / 'step-000002', root / 'step-000009')
    assert run_ranks(2, lead, skipped_with_a_later_one, root)[0] == 2
    assert sorted(p.name for p in root.iterdir()) == ['step-000002']


def back_in_time(root):
    with pytest.raises(CheckpointError, match='step 1 is older than step-000002'):
        save_sharded(begin(TWO), root, 1)
    return sorted(p.name for p in root.iterdir())


def test_a_good_later_one_is_never_removed(saved, tmp_path):
    root = shutil.copytree(saved[0], tmp_path / 'root')
    assert run_ranks(2, back_in_time, root) == [['step-000001', 'step-000002']] * 2


def full(root):
    "Rank 0 finds it out before the ranks depend on each other; on both ranks one line"
    from pathlib import Path
    from unittest.mock import patch

    def write(path, data):
        raise OSError(28, 'No space left on device')

    with patch.object(Path, 'write_bytes', write), pytest.raises(CheckpointError) as e:
        save_sharded(begin(TWO), root, 3)
    return str(e.value)


def test_a_full_disk_is_known_before_the_save_begins(tmp_path):
    for said in run_ranks(2, full, tmp_path):
        assert 'No space left on device' in said and '\n' not in said


def hashed_where_it_was_written(root):
    "What each rank's writer has hashed: its own file, no other"
    saving = save_sharded(begin(TWO), root, 1)
    saving.wait()
    return saving.results.files


def test_every_rank_hashes_its_own_file(tmp_path):
    noted = run_ranks(2, hashed_where_it_was_written, tmp_path)
    assert [list(n) for n in noted] == [['__0_0.distcp'], ['__1_0.distcp']]
    files = shards.sharded_manifest(tmp_path / 'step-000001')['files']
    for n in noted:
        for name, entry in n.items():
            assert files[name] == entry
    verify_sharded(tmp_path / 'step-000001')


def share(path):
    seen = []
    verify, shards.verify_files = shards.verify_files, lambda path, files: seen.extend(files)
    try:
        shards.verify_shares(path)
    finally:
        shards.verify_files = verify
    return seen


def test_every_file_is_verified_by_one_rank(saved):
    path = saved[0] / 'step-000002'
    parts = run_ranks(2, share, path)
    files = shards.sharded_manifest(path)['files']
    assert sorted(sum(parts, [])) == sorted(files) and abs(len(parts[0]) - len(parts[1])) <= 1
