"""Killed or refused at any operation on the disk, from the first one on: `resume` goes on to the
same end"""

import errno
import json
import os
import random
import resource
import shutil
import signal
import tempfile
from functools import partial
from pathlib import Path

import pytest

from compassrl.runs import resume
from compassrl.runs.cli import main
from compassrl.runs.log import Log
from course.checkpoints import latest_checkpoint
from tests.support import chaos
from tests.support import fork_server as forked
from tests.support.file_events import Killer, Refusing
from tests.support.whole_runs import (
    AHEAD,
    ENV,
    TINY,
    command,
    expect_the_same,
    note_operations,
    nothing,
)


def cli(*args, hook=nothing, timeout=120):
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / 'log'
        return forked.run(log, command, list(map(str, args)), hook, env=ENV, timeout=timeout)


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "A run that nobody disturbed, and the number of its operations"
    home = tmp_path_factory.mktemp('whole')
    r = cli('train', *TINY, '--run-dir', home / 'run', hook=partial(note_operations, home, home))
    assert r.returncode == 0, r.stderr
    return home / 'run', len((home / 'operations0').read_text().splitlines())


def one_line(r, *words):
    assert r.returncode == 1 and 'Traceback' not in r.stderr, r.stderr
    last = r.stderr.splitlines()[-1]
    assert last.startswith('compassrl: ') and all(w in last for w in words), r.stderr


def begin_or_resume(folder, hook):
    "As a script does that is started again and again"
    words = ['resume', folder] if (folder / 'config.json').exists() else ['train', *TINY]
    return cli(*words, *(['--run-dir', folder] if words[0] == 'train' else []), hook=hook)


def test_the_same_words_go_on_before_the_first_checkpoint(whole, tmp_path):
    "`train` again, as a queue does it: the same run goes on, another one is refused"
    folder, checkpoints = tmp_path / 'run', tmp_path / 'run/checkpoints'
    again = ['train', *TINY, '--run-dir', folder]
    for n in (3, 30, 80):
        r = cli(*again, hook=partial(Killer, n, under=folder))
        assert r.returncode == -signal.SIGKILL, r.stderr
        assert not list(checkpoints.glob('step-*')), 'the test lost its bite'
    before = {p: p.read_bytes() for p in folder.rglob('*') if p.is_file()}
    one_line(cli(*again, '--seed', '1'), 'go on with `compassrl resume')
    assert before == {p: p.read_bytes() for p in folder.rglob('*') if p.is_file()}
    r = cli(*again)
    assert r.returncode == 0, r.stderr
    expect_the_same(folder, whole[0])


def test_killed_again_and_again(whole, tmp_path):
    "Each time a little later, until it has come to its end"
    folder, rng = tmp_path / 'run', random.Random(3)
    kills = 0
    while kills < 40:
        n = rng.randint(20, 70)
        r = begin_or_resume(folder, partial(Killer, n, under=folder))
        if r.returncode == 0:
            break
        assert r.returncode == -signal.SIGKILL, r.stderr
        kills += 1
    assert r.returncode == 0 and kills >= 3, 'the test lost its bite'
    expect_the_same(folder, whole[0])


def test_replayed_gates_survive_a_kill(tmp_path):
    "Of responses that are drawn ahead and in parts, which checkpoints hold"
    words = [*TINY, '--router-replay', 'R3-gates', *AHEAD, '--schedule.partial-tokens', '3']
    words += ['--zero-variance.sampling', 'uniform', '--rollout.dtype', 'bfloat16']
    home, firsts, num = tmp_path, [], 0
    for name in ('whole', 'killed', 'experts'):
        mode = ['--router-replay', 'R3', '--steps', '1'] if name == 'experts' else []
        again = ['train', *words, *mode, '--run-dir', home / name]
        for n in (num * 3 // 4, 20) if name == 'killed' else ():
            r = cli(*again, hook=partial(Killer, n, under=home / name))
            assert r.returncode == -signal.SIGKILL, r.stderr
            assert list((home / name / 'checkpoints').glob('step-*')), 'the test lost its bite'
            again = ['resume', home / name]
        r = cli(*again, hook=partial(note_operations, home, home) if name == 'whole' else nothing)
        assert r.returncode == 0, r.stderr
        num = num or len((home / 'operations0').read_text().splitlines())
        firsts.append(json.loads((home / name / 'metrics.jsonl').read_text().splitlines()[0]))
    expect_the_same(home / 'killed', home / 'whole')
    assert firsts[0]['loss'] != firsts[2]['loss'], 'gates were used'


@chaos.kind('full disks')
@pytest.mark.parametrize('number', range(chaos.trials(2, 20)))
def test_a_full_disk_at_an_operation(number, whole, tmp_path):
    "One line, nothing lost: with room again it goes on to the same end"
    folder, operations = whole
    full, n = tmp_path / 'run', chaos.draw('full', number).randint(1, operations)
    r = begin_or_resume(full, partial(Refusing, n, errno.ENOSPC, under=full))
    one_line(r, 'No space left on device')
    r = begin_or_resume(full, nothing)
    assert r.returncode == 0, (n, r.stderr)
    expect_the_same(full, folder)


def short_files(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@chaos.kind('full disks')
@pytest.mark.parametrize('size', [600, 2_000, 60_000])
def test_files_that_cannot_grow(whole, tmp_path, size):
    "A write breaks off in its middle: a row, a model, a checkpoint, a trace"
    folder = tmp_path / 'run'
    one_line(begin_or_resume(folder, partial(short_files, size)), 'File too large')
    r = begin_or_resume(folder, nothing)
    assert r.returncode == 0, r.stderr
    expect_the_same(folder, whole[0])


def test_a_folder_that_may_not_be_written(whole, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path / 'run')
    hook = partial(Refusing, 1, errno.EROFS, under=folder)
    one_line(cli('resume', folder, '--steps', '3', hook=hook), str(folder), 'Read-only file')
    one_line(cli('report', folder, hook=hook), 'Read-only file')
    expect_the_same(folder, whole[0])


def asks_after_the_first_row():
    row = Log.row

    def asking(log, metrics):
        row(log, metrics)
        if metrics['step'] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    Log.row = asking


def test_asked_to_stop_between_a_row_and_its_checkpoint(tmp_path):
    "It stops after the next step, with a checkpoint of all its rows"
    r = cli(
        *['train', *TINY, '--save-every', '0', '--steps', '3', '--run-dir', tmp_path / 'run'],
        hook=asks_after_the_first_row,
    )
    assert r.returncode == 130, r.stderr
    assert len((tmp_path / 'run/metrics.jsonl').read_text().splitlines()) == 2
    assert latest_checkpoint(tmp_path / 'run/checkpoints').name == 'step-000002'


# ---- evaluations are done once


def test_an_evaluation_is_neither_repeated_nor_lost(whole, tmp_path):
    "The one before RL stays as it is; one that is lost is made again from the starting weights"
    folder = shutil.copytree(whole[0], tmp_path / 'run')
    marked = json.loads((folder / 'eval_after.json').read_text()) | dict(mark='kept')
    (folder / 'eval_after.json').write_text(json.dumps(marked))
    for name in ('eval_before.json', 'screen.json'):
        (folder / name).unlink()
    r = cli('resume', folder)
    assert r.returncode == 0
    assert r.stdout.count('eval_before.json is missing: evaluating the starting weights') == 1
    assert json.loads((folder / 'eval_after.json').read_text()) == marked
    (folder / 'eval_after.json').write_bytes((whole[0] / 'eval_after.json').read_bytes())
    expect_the_same(folder, whole[0])


def test_an_evaluation_of_other_weights_is_not_kept(whole, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path / 'run')
    shutil.rmtree(folder / 'checkpoints' / 'step-000002')
    stale = json.loads((folder / 'eval_after.json').read_text()) | dict(mark='stale')
    (folder / 'eval_after.json').write_text(json.dumps(stale))
    assert cli('resume', folder).returncode == 0
    expect_the_same(folder, whole[0])


# ---- what was changed or damaged


@pytest.mark.parametrize(
    'key, value',
    [
        ('seed', 1),
        ('group_size', 5),
        ('data.difficulty', 2.0),
        ('cold_start.steps', 61),
        ('policy.num_experts', 4),
    ],
)
def test_settings_changed_by_hand(whole, tmp_path, key, value):
    folder = shutil.copytree(whole[0], tmp_path / 'run')
    config = json.loads((folder / 'config.json').read_text())
    *parts, last = key.split('.')
    inside = config[parts[0]] if parts else config
    was, inside[last] = inside[last], value
    (folder / 'config.json').write_text(json.dumps(config))
    with pytest.raises(SystemExit) as e:
        main(['resume', str(folder)])
    said = str(e.value)
    assert '\n' not in said and f'{key}={value}' in said and f'began with {was}' in said
    assert 'config.json' in said


BAD = [b'', b'{', b'\xff\xfe{}', b'[' * 5000, b'3', b'null', b'\0' * 40]


@pytest.mark.parametrize(
    'name',
    ['machine', 'origin', 'written', 'eval_before', 'eval_after', 'screen', 'timings', 'rollout'],
)
def test_damaged_files_are_named_before_anything_starts(whole, tmp_path, name):
    folder = shutil.copytree(whole[0], tmp_path / 'run')
    for bad in BAD:
        (folder / f'{name}.json').write_bytes(bad)
        with pytest.raises(SystemExit) as e:
            main(['resume', str(folder)])
        assert '\n' not in str(e.value) and f'{name}.json' in str(e.value), bad
        assert 'remove it' in str(e.value)


ROWS = [b'{"step": 1\n', b'\xff\n', b'[]\n', b'{"step": "1"}\n', b'3\n', b'\n', b'{}\n']


@pytest.mark.parametrize('name', ['metrics', 'trace', 'cold_start'])
def test_damaged_rows_are_named_before_anything_starts(whole, tmp_path, name):
    folder = shutil.copytree(whole[0], tmp_path / 'run')
    good = (folder / f'{name}.jsonl').read_bytes()
    for bad in ROWS:
        first, rest = good.split(b'\n', 1)
        (folder / f'{name}.jsonl').write_bytes(first + b'\n' + bad + rest)
        with pytest.raises(SystemExit) as e:
            main(['resume', str(folder)])
        assert '\n' not in str(e.value) and f'{name}.jsonl line 2' in str(e.value), bad
        assert 'remove that line' in str(e.value)


def test_a_last_row_that_was_cut_off_is_no_damage(whole, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path / 'run')
    for name in ('metrics', 'trace'):
        with open(folder / f'{name}.jsonl', 'ab') as f:
            f.write(b'{"step": 3, "rew\xc3')
    assert cli('resume', folder).returncode == 0
    expect_the_same(folder, whole[0])


def test_train_says_what_to_do_with_a_folder(whole, tmp_path):
    with pytest.raises(SystemExit, match=f'go on with `compassrl resume {whole[0]}`'):
        main(['train', *TINY, '--run-dir', str(whole[0])])
    (tmp_path / 'notes').touch()
    with pytest.raises(SystemExit, match='holds no run: choose another'):
        main(['train', *TINY, '--run-dir', str(tmp_path)])


def test_steps_without_a_checkpoint_are_not_thrown_away(whole, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path / 'run')
    shutil.rmtree(folder / 'checkpoints')
    with pytest.raises(SystemExit, match='metrics.jsonl has steps, but .* has no checkpoint'):
        main(['resume', str(folder)])
    assert (folder / 'metrics.jsonl').read_bytes() == (whole[0] / 'metrics.jsonl').read_bytes()


# ---- what a rollout engine has learned


class Learner:
    "As much of a rollout engine as keeps something"

    def __init__(self, known):
        self.known = known

    def state_dict(self):
        return {'lengths': self.known}

    def load_state_dict(self, state):
        self.known = state['lengths']


def test_a_checkpoint_gives_back_what_was_known_then(tmp_path):
    "Not what a later one has noted; the oldest are dropped, and without a note nothing changes"
    for step in range(5):
        resume.note_learned(tmp_path, Learner(step), f'step-{step:06}', keep=2)
    for step, known in ((4, 4), (3, 3), (2, 2), (1, 9), (7, 9)):
        engine = Learner(9)
        resume.recall_learned(tmp_path, engine, f'step-{step:06}')
        assert engine.known == known, step
