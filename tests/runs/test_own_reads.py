"A file that one's own code opens by a name which stands nowhere is a source of the run, too"

import json
import os
import sqlite3
import sys

import numpy as np
import pytest

from compassrl import own_code
from compassrl.config import TrainConfig, read_run_config
from compassrl.judges.reward_settings import RewardConfig
from compassrl.runs import resume
from tests.runs.test_own_data_and_reward import gsm8k, problem, save_model
from tests.runs.test_run import cli

REWARD = """import json, os, sqlite3, subprocess, tempfile, threading
from pathlib import Path

import numpy as np

HERE, FAR = Path(__file__).parent, Path(__file__).parents[1] / 'far'

def table(level):
    return json.loads((HERE / f'{level}.json').read_text())

def in_thread(found):
    found.append(open(FAR / ''.join(['thr', 'ead'])).read())

def score(text, **others):
    found = []
    worker = threading.Thread(target=in_thread, args=[found])
    worker.start()
    worker.join()
    scale = np.load(FAR / '-'.join(['a', 'b']), allow_pickle=False)
    with sqlite3.connect(FAR / ('d' + 'b')) as db:
        [[price]] = db.execute('select price from eggs')
    with sqlite3.connect(HERE / ('lo' + 'gs')) as db:
        db.execute('insert into seen values (?)', [text])
    import importlib
    other = importlib.import_module('l' + 'ate')
    seen = HERE / ''.join(['ca', 'che'])
    seen.write_text(str(int(seen.read_text()) + 1))
    (HERE / 'notes').write_text(text)
    with tempfile.NamedTemporaryFile() as f:
        subprocess.run(['cp', seen, f.name])
        open(f.name).read()
    return len(text) % 7 * table('ea' + 'sy')['egg'] * price * float(scale[0]) * other.ONE
"""
LOSS = """from pathlib import Path
from compassrl import policy_loss

@policy_loss()
def mine(log_probs, old_log_probs, advantages, cfg, mask):
    name = 'by-' + 'loss'
    scale = float(Path(__file__).with_name(name).read_text())
    return -scale * (log_probs - log_probs.detach()).exp() * advantages, {}
"""
GAME = """from pathlib import Path

class Game:
    def reset(self):
        Path(__file__).with_name('by-' + 'game').read_text()
    def step(self, action):
        return 'x', True
"""
ENGINE = """from pathlib import Path
from compassrl.runs.factory import _torch_train

def make(setup, weights):
    Path(__file__).with_name('by-' + 'engine').read_text()
    return _torch_train(setup, weights)
"""
FLAGS = (
    'smoke-cpu --init-from model --data.path train.jsonl --data.max-prompt-tokens 256 '
    '--data.num-heldout 4 --loss.name loss.py:mine --tools.name game.py:Game '
    '--train-engine engine.py:make --cold-start.steps 0 --prompts-per-step 2 '
    '--rollout.max-tokens 12 --save-every 1 --steps 2'
).split()
HIDDEN = dict(  # what nobody names, and another content of it
    {'easy.json': '{"egg": 3.0}', 'late.py': 'ONE = 2', '../far/thread': 'y'},
    **{'by-loss': '2', 'by-game': 'other', 'by-engine': 'other'},
)


def write_home(home):
    (home / '../far').resolve().mkdir(exist_ok=True)
    for name, text in dict(reward=REWARD, loss=LOSS, game=GAME, engine=ENGINE).items():
        (home / f'{name}.py').write_text(text)
    (home / 'train.jsonl').write_text('\n'.join(json.dumps(gsm8k(i)) for i in range(20)) + '\n')
    save_model(home / 'model', [problem(i)[0] for i in range(40)])
    texts = {'easy.json': '{"egg": 1.0}', 'late.py': 'ONE = 1', '../far/thread': 'x', 'cache': '0'}
    texts['notes'] = ''
    for name, text in (texts | {'by-loss': '1', 'by-game': 'go', 'by-engine': ''}).items():
        (home / name).write_text(text)
    np.save(home / '../far/a-b.npy', np.ones(1))
    os.rename(home / '../far/a-b.npy', home / '../far/a-b')
    with sqlite3.connect(home / '../far/db') as db:
        db.execute('create table eggs (price real)')
        db.execute('insert into eggs values (1.0)')
    with sqlite3.connect(home / 'logs') as db:
        db.execute('create table seen (text text)')


@pytest.fixture(scope='module', params=['reward.py:score', 'workers'])
def made(request, tmp_path_factory):
    "A run whose reward judges in its process, and one with workers"
    home = tmp_path_factory.mktemp('made') / 'home'
    home.mkdir()
    write_home(home)
    flags = ['--rewards.function', 'reward.py:score']
    flags += ['--rewards.workers', '2'] if request.param == 'workers' else []
    r = cli('train', *FLAGS, *flags, '--run-dir', 'run', cwd=home)
    assert r.returncode == 0, r.stderr
    (home / 'said').write_text(r.stdout)
    return home


def changes(home):
    "What a resume names"
    folder = home / 'run'
    try:
        resume.check_origin(folder, read_run_config(folder))
    except ValueError as e:
        return str(e)
    return ''


def test_each_is_named_and_nothing_else_is(made):
    said = (made / 'said').read_text()
    assert said.count('writes there: rewards.function notes\n') == 1, said
    assert ' cache' not in said
    assert changes(made) == ''
    sources = json.loads((made / 'run/origin.json').read_text())['sources']
    read = {k.removeprefix('read by your code: '): h for k, h in sources.items() if ' by ' in k}
    far = str((made / '../far').resolve()) + '/'
    named = {n.replace('../far/', far) for n in [*HIDDEN, '../far/a-b', '../far/db']}
    assert {*read} == named and all(read.values())
    assert sources['rewards.function notes'] is None


@pytest.mark.parametrize('name', [*HIDDEN, '../far/a-b', '../far/db'])
def test_a_changed_one_is_named_and_one_that_is_gone(made, name):
    path = (made / name).resolve()
    whole = path.read_bytes()
    other = HIDDEN[name].encode() if name in HIDDEN else whole[:-1] + bytes([whole[-1] ^ 1])
    path.write_bytes(other)
    shown = name if '/' not in name else str(path)
    assert f'read by your code: {shown} has changed' in changes(made)
    path.unlink()
    assert f'read by your code: {shown} is gone' in changes(made)
    path.write_bytes(whole)
    assert changes(made) == ''


COUNTING = """import itertools, os
from pathlib import Path

HERE, calls = Path(__file__).parent, itertools.count()

def score(text):
    number = next(calls)
    if number == 20 and os.path.exists(HERE / ('ki' + 'lls')):
        os.kill(os.getpid(), 9)
    return int((HERE / 'levels' / f'{number}.txt').read_text()) % 5
"""


def test_no_verdict_is_on_file_before_the_hashes_of_its_files(tmp_path):
    "The run is killed in step 2; 8 verdicts of the evaluation and 8 of step 1 are stored"
    write_home(tmp_path)
    (tmp_path / 'reward.py').write_text(COUNTING)
    (tmp_path / 'levels').mkdir()
    for i in range(99):
        (tmp_path / f'levels/{i}.txt').write_text(f'{i}')
    (tmp_path / 'kills').touch()
    flags = ['--rewards.function', 'reward.py:score', '--save-every', 9, '--group-size', 4]
    r = cli('train', *FLAGS, *flags, '--run-dir', 'run', cwd=tmp_path)
    assert r.returncode == -9
    assert (tmp_path / 'run/metrics.jsonl').read_text().count('\n') == 1
    noted = (tmp_path / 'run/origin.json').read_text()
    assert [i for i in range(99) if f'levels/{i}.txt"' in noted] == [*range(16)]
    (tmp_path / 'kills').unlink()
    (tmp_path / 'levels/15.txt').write_text('150')
    r = cli('resume', 'run', cwd=tmp_path)
    assert r.returncode == 1 and r.stderr.count('\n') == 1
    assert 'read by your code: levels/15.txt has changed' in r.stderr
    (tmp_path / 'levels/15.txt').write_text('15')
    r = cli('resume', 'run', cwd=tmp_path)
    assert r.returncode == 0 and 'same data, same code, same model' in r.stdout, r.stderr


def test_many_files_are_said_to_be_too_many(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(own_code, 'most_reads', 3)
    monkeypatch.setattr(resume, 'most_reads', 3)
    own_code.forget_own()
    for i in range(5):
        (tmp_path / f'{i}.txt').touch()
        own_code.call_own((tmp_path / f'{i}.txt').read_text, 5.0)
    reads = resume.NotedReads(tmp_path, TrainConfig())
    reads.note()
    reads.note()
    said = 'your code opens 3 files or more: a resume compares the first of them\n'
    assert len(own_code.own_reads()) == 3 and capsys.readouterr().out == said
    own_code.forget_own()


def test_no_module_is_looked_up_unless_own_code_has_read_a_file(tmp_path, monkeypatch):
    "A run begins so, and there are thousands of modules"
    looked_up = []
    monkeypatch.setattr(os.path, 'realpath', lambda file: looked_up.append(file) or file)
    own_code.forget_own()
    looked_up.clear()
    own_code.forget_own()
    assert not looked_up
    (tmp_path / 'a.txt').touch()
    own_code.call_own((tmp_path / 'a.txt').read_text, 5.0)
    own_code.forget_own()
    assert len(looked_up) > 100


@pytest.mark.parametrize('opens, way', [('json', ''), ('pyarrow.parquet', 'pyarrow')])
def test_what_cannot_be_seen_is_said(opens, way, tmp_path, capsys):
    "A library that is not Python opens files on its own"
    code = f'import {opens}\ndef reward(response, answer): return 1.0\n'
    (tmp_path / 'reward.py').write_text(code)
    cfg = TrainConfig(rewards=RewardConfig(function=(f'{tmp_path}/reward.py:reward',)))
    resume.NotedReads(tmp_path / 'run', cfg)
    said = f'not compared by a resume unless your code names them: files opened by {way}\n'
    assert capsys.readouterr().out == said * bool(way)


def test_a_module_is_a_source_where_python_caches_its_bytecode(tmp_path, monkeypatch):
    "It writes a file for the module: that is not own code that writes, the first time or later"
    monkeypatch.setattr(sys, 'dont_write_bytecode', False)
    monkeypatch.setattr(sys, 'pycache_prefix', None)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / 'cached_prices.py').write_text('def of(text):\n    return 1.0\n')
    reward = tmp_path / 'reward.py'
    reward.write_text(
        'import cached_prices\n\n\ndef score(text):\n    return cached_prices.of(text)\n'
    )
    known = own_code.file_sha256(tmp_path / 'cached_prices.py')
    for _ in range(2):  # the second time Python reads what it has cached
        own_code.forget_own()
        sys.modules.pop('cached_prices', None)
        own_code.own_function(f'{reward}:score', 'reward')
        assert own_code.own_reads()[str(tmp_path / 'cached_prices.py')] == known
    assert list((tmp_path / '__pycache__').iterdir())
    own_code.forget_own()
