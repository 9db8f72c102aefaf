"""Numbers of real runs stand in the glossary, and the glossary has no others; trackers show them,
go on after a resume, and never cost a run"""

import json
import os
import re
import struct
import threading
from importlib.util import find_spec
from itertools import chain

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from compassrl.config import TrainConfig, read_run_config
from compassrl.runs import factory
from compassrl.runs import trackers as module
from compassrl.runs.cli import main, parse_train
from compassrl.runs.presets import settings_of
from compassrl.runs.trackers import Trackers, check_trackers, entry, eval_values, glossary, grouped
from course.pages import glossary_markdown
from tests.support import ROOT
from tests.support import fork_server as forked

SMOKE = 'train smoke-cpu --steps 4 --eval-every 2 --cold-start.steps 8'.split()
MORE = [  # settings that bring numbers of their own
    '--loss.kl-coef 0.01 --schedule.partial-tokens 8 --zero-variance.sampling uniform',
    '--loss.name grpo --loss.tis off --schedule.max-staleness 1',
]
RUN_BY_OTHER_TESTS = {'a judge model', 'rollout_engine pool'}  # they need a server


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def run(folder, *args):
    main([*SMOKE, *args, '--run-dir', str(folder)])
    return folder


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    "A plain run, and those with more settings"
    home = tmp_path_factory.mktemp('runs')
    asked = [[], *(more.split() for more in MORE)]
    return [run(home / str(i), *more) for i, more in enumerate(asked)]


def test_every_number_of_a_run_is_in_the_glossary(runs):
    for folder in runs:
        for row in rows(folder / 'metrics.jsonl'):
            assert [k for k in row if not entry(k)] == []
        for row in rows(folder / 'cold_start.jsonl'):
            assert {*row} == {m.key for m in glossary()['cold_start']}
        for name in ('before', 'after'):
            found = json.loads((folder / f'eval_{name}.json').read_text())
            assert [k for k in found if not entry(k, 'evaluation')] == []


def test_the_glossary_names_nothing_else(runs):
    found = {entry(k).key for folder in runs for k in rows(folder / 'metrics.jsonl')[0]}
    plain = {entry(k).key for k in rows(runs[0] / 'metrics.jsonl')[0]}
    for m in glossary()['metrics']:
        other = m.when in RUN_BY_OTHER_TESTS or m.key == 'eval_*_avg'
        assert other or m.key in found, f'{m.key} is in no run'
        assert m.when or m.key in plain, f'{m.key} is not in every run'
    evaluated = {*json.loads((runs[0] / 'eval_before.json').read_text())}
    for m in glossary()['evaluation']:
        assert m.when or m.key in evaluated, f'{m.key} is in no evaluation'


def test_an_entry_names_the_module_that_spells_the_number():
    for m in chain(*glossary().values()):
        path = ROOT / 'compassrl' / m.where.replace('.', '/')
        source = (path / '__init__.py' if path.is_dir() else path.with_suffix('.py')).read_text()
        parts = re.split(r'[*]', m.key)
        words = [m.key] if len(parts) == 1 else [p for p in parts if p]
        # `timed` and a few others put a prefix in front
        short = re.sub('^(genrm|time|length|eval)_|_(frac|s)$', '', m.key.replace('*', 'any'))
        short = re.sub('^(failed|tie|disagree)_frac$', r'\1', short)
        assert all(w in source for w in words) or re.search(rf'\b{short}\b', source), m


def test_names_and_page():
    names = [m.name for m in glossary()['metrics'] if m.name]
    assert len(names) == len(set(names)) and all(re.fullmatch(r'[a-z_]+/\S+', n) for n in names)
    page = glossary_markdown()
    assert all(f'| `{m.key}` |' in page for m in chain(*glossary().values()))
    for m in glossary()['metrics']:
        assert m.unit and m.range and m.about and m.healthy, m


def shown(folder, run='.'):
    events = EventAccumulator(str(folder / 'tensorboard' / run)).Reload()
    return {k: [(e.step, e.value) for e in events.Scalars(k)] for k in events.Tags()['scalars']}


def test_tensorboard_shows_steps_evaluations_and_cold_start(runs):
    found, cold = shown(runs[0]), shown(runs[0], 'cold_start')
    metrics = rows(runs[0] / 'metrics.jsonl')
    for m in glossary()['metrics']:
        if m.name and not m.when:
            wanted = [(r['step'], pytest.approx(r[m.key])) for r in metrics]
            assert found[m.name] == wanted, m.name
    before, after = (
        json.loads((runs[0] / f'eval_{n}.json').read_text()) for n in ('before', 'after')
    )
    points = [(0, before['avg']), (2, metrics[1]['eval_avg']), (4, after['avg'])]
    assert found['eval/avg'] == [(step, pytest.approx(v)) for step, v in points]
    assert found['eval/reward_mean'][0] == (0, pytest.approx(before['reward_mean']))
    events = EventAccumulator(str(runs[0] / 'tensorboard')).Reload()
    [text] = events.Tensors('settings/text_summary')
    table = text.tensor_proto.string_val[0].decode()
    config = settings_of(read_run_config(runs[0]))
    told = [f'| {k} | {v} |' for k, v in config.items() if isinstance(v, (int, float, str))]
    assert set(told) < set(table.splitlines())
    loss = [(r['step'], pytest.approx(r['loss'])) for r in rows(runs[0] / 'cold_start.jsonl')]
    assert cold['cold_start/loss'] == loss


def test_several_evaluation_sets_have_names_of_their_own():
    one = dict(avg=0.5, avg_stderr=0.1, samples=[], genrm_calls=3.0)
    found = eval_values(dict(one, name='easy', sets=dict(hard=dict(one, avg=0.25))))
    stderr = {'eval/avg_stderr': 0.1, 'eval/hard/avg_stderr': 0.1}
    assert found == {'eval/avg': 0.5, 'eval/hard/avg': 0.25} | stderr
    assert grouped(dict(eval_hard_avg=0.25)) == {'eval/hard/avg': 0.25}


def test_a_missing_package_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(module, 'find_spec', lambda name: None)
    with pytest.raises(SystemExit, match=r"^compassrl: trackers='wandb': .*pip install wandb$"):
        run(tmp_path / 'run', '--trackers', 'wandb')
    assert not (tmp_path / 'run').exists()


def test_the_setting():
    assert TrainConfig().trackers == ('tensorboard',)
    both = 'tensorboard', 'wandb'
    assert parse_train(['smoke-cpu', '--trackers', *both]).trackers == both
    with pytest.raises(ValueError, match="'comet'.*'tensorboard', 'wandb'"):
        parse_train(['smoke-cpu', '--trackers', 'comet'])


class Failing:
    "A tracker whose disk fills up at some point"

    is_new = True
    fails_at = 'start'

    def __init__(self, folder, config, start):
        self.at('start')

    def log(self, values, step):
        self.at(step)

    def close(self, finished):
        self.at('close')

    def at(self, point):
        if point == self.fails_at:
            raise OSError(28, 'No space left on device')


@pytest.mark.parametrize('points', [('start', 0), (2, 'close')])
def test_a_tracker_that_fails_costs_one_line_and_nothing_else(
    points, runs, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(module, 'find_spec', lambda name: True)
    monkeypatch.setattr(factory, 'check_trackers', lambda names: None)
    names = 'tensorboard', 'wandb'
    for name, point in zip(names, points):
        monkeypatch.setitem(
            module.tracker_types, name, type(name, (Failing,), dict(fails_at=point))
        )
    folder = run(tmp_path / 'run', '--trackers', *names)
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith('tracker ')]
    assert len(told) == 2 and all(sum(f'{n}: OSError' in t for t in told) == 1 for n in names)
    assert same(folder, runs[0])


def same(a, b):
    "Are the weights and all numbers that no clock gave equal?"

    def timeless(folder):
        found = rows(folder / 'metrics.jsonl')
        return [{k: v for k, v in r.items() if not k.startswith(('time', 'eval'))} for r in found]

    name = 'model/model.safetensors'
    return (a / name).read_bytes() == (b / name).read_bytes() and timeless(a) == timeless(b)


def test_a_tracker_that_hangs_is_left_behind(tmp_path, monkeypatch, capsys):
    free = threading.Event()

    class Hanging(Failing):
        fails_at = 'never'

        def log(self, values, step):
            free.wait()

    monkeypatch.setitem(module.tracker_types, 'tensorboard', Hanging)
    monkeypatch.setattr(module, '_patience_s', 0.05)
    with Trackers(['tensorboard'], tmp_path, {}, 0) as found:
        for step in range(3):
            found.log({'reward/mean': 0.5}, step)
    assert 'tracker tensorboard: still busy' in capsys.readouterr().out
    free.set()


def test_who_asks_for_wandb_is_logged_in(monkeypatch):
    pytest.importorskip('wandb', reason='wandb is not installed: pip install compassrl[trackers]')
    monkeypatch.delenv('WANDB_API_KEY', raising=False)
    monkeypatch.setenv('WANDB_MODE', 'offline')
    check_trackers(['wandb'])


# The packages themselves, in processes of their own: they keep state, and write where they are told


def command(args, cwd):
    os.chdir(cwd)
    module._patience_s = 240.0  # all of them are imported meanwhile
    main(args)


@pytest.fixture(scope='module')
def tracked(tmp_path_factory):
    "A run of 2 steps with all that are installed, resumed to 4: its folder is run/"
    home = tmp_path_factory.mktemp('tracked')
    names = [name for name in ('wandb',) if find_spec(name)]
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}
    env |= dict(WANDB_MODE='offline', WANDB_SILENT='true')
    at = str(home / 'run')
    args = [*SMOKE, '--trackers', *names, '--run-dir', at]
    for call in (args + ['--steps', '2'], ['resume', at, '--steps', '4']):
        r = forked.run(home / 'log', command, call, home, env=env, timeout=300)
        assert r.returncode == 0 and 'tracker ' not in r.stdout, r.stdout + r.stderr
    return home


def run_of(name, home):
    if not find_spec(name):
        pytest.skip(f'{name} is not installed: pip install compassrl[trackers]')
    return home / 'run'


def expected(folder):
    found = {r['step']: pytest.approx(r['entropy']) for r in rows(folder / 'metrics.jsonl')}
    assert [*found] == [1, 2, 3, 4]
    return found


def test_wandb(runs, tracked):
    at = run_of('wandb', tracked)
    files = sorted((at / 'wandb').glob('offline-run-*/*.wandb'))
    run_id = (at / 'trackers/wandb').read_text().strip()
    assert len(files) == 2 and all(f.name == f'run-{run_id}.wandb' for f in files)
    found, names = {}, set()
    for record in map(history_of, files):
        for values in record:
            names |= {*values}
            if 'policy/entropy' in values:
                found[values['step']] = values['policy/entropy']
    told = {'cold_start/loss', 'eval/avg', 'time/step_s'}
    assert found == expected(at) and told <= names
    assert any(name.startswith('eval/samples') for name in names), 'a table of responses'
    assert same(at, runs[0])


def records_of(data, block=32768):
    "Records of a LevelDB log, wandb's format on the disk: 7 bytes in front of each piece"
    at, whole = 7, b''
    while at + 7 <= len(data):
        if block - at % block < 7:  # too little room for a piece
            at += block - at % block
            continue
        _, size, kind = struct.unpack_from('<IHB', data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last piece
            yield whole
            whole = b''


def history_of(file):
    from wandb.proto.wandb_internal_pb2 import Record

    for data in records_of(file.read_bytes()):
        record = Record.FromString(data)
        if record.HasField('history'):
            items = record.history.item
            yield {i.key or '/'.join(i.nested_key): json.loads(i.value_json) for i in items}
