"A run knows what it is made of: whatever else a resume finds, it names, refuses or notes"

import json
import random
import shutil
from dataclasses import asdict, replace

import pytest

from compassrl.config import TrainConfig, read_run_config
from compassrl.runs import resume
from compassrl.runs.identity import file_sha256, named_files
from compassrl.runs.run_data import load
from tests.runs.test_own_data_and_reward import gsm8k, problem, save_model
from tests.runs.test_run import cli, same_model

REWARD = """import json
from pathlib import Path

from prices import of_text

TABLE = json.loads((Path(__file__).parent / 'tables' / 'eggs.json').read_text())


def score(text):
    return of_text(text) * TABLE['egg']
"""
LOSS = """from compassrl import policy_loss


@policy_loss()
def mine(log_probs, old_log_probs, advantages, cfg, mask):
    return -(log_probs - log_probs.detach()).exp() * advantages, {}
"""
FLAGS = (
    'smoke-cpu --init-from model --data.path train.jsonl --data.max-prompt-tokens 256 '
    '--data.num-heldout 4 --data.eval-path easy=test.jsonl --rewards.function reward.py:score '
    '--loss.name loss.py:mine --tools.name lookup --tools.table words.json --cold-start.steps 2 '
    '--prompts-per-step 4 --rollout.max-tokens 12 --save-every 1 --steps 2'
).split()


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    home = tmp_path_factory.mktemp('made')
    write_sources(home)
    r = cli('train', *FLAGS, '--run-dir', 'run', cwd=home)
    assert r.returncode == 0, r.stderr
    return home


def write_sources(home):
    "A model, data, a reward, a loss and a tool's table"
    for name, span in dict(train=range(40), test=range(50, 54)).items():
        (home / f'{name}.jsonl').write_text('\n'.join(json.dumps(gsm8k(i)) for i in span) + '\n')
    (home / 'reward.py').write_text(REWARD)
    (home / 'prices.py').write_text('def of_text(text):\n    return len(text) % 7 / 7\n')
    (home / 'tables').mkdir()
    (home / 'tables/eggs.json').write_text('{"egg": 1.0}')
    (home / 'words.json').write_text('{"sun": "star"}')
    (home / 'loss.py').write_text(LOSS)
    save_model(home / 'model', [problem(i)[0] for i in range(40)])


@pytest.fixture
def here(made, tmp_path):
    "A copy of it, all of which may be changed"
    home = shutil.copytree(made, tmp_path / 'home')
    change(home / 'run/origin.json', str(made), str(home))  # where it began
    return home


def refusal(home):
    "What a resume says before anything is started"
    folder = home / 'run'
    resume.check_files(folder)
    with pytest.raises(ValueError) as e:
        resume.check_origin(folder, read_run_config(folder))
    assert '\n' not in str(e.value)
    return str(e.value)


def change(path, old, new):
    text = path.read_text()
    assert old in text, (path, old)
    path.write_text(text.replace(old, new, 1))


SOURCES = {  # file, what is there, what takes its place, how the refusal names it
    'data': ('train.jsonl', 'Ann', 'Bea', 'data.path train.jsonl has changed'),
    'an evaluation set': ('test.jsonl', 'Ann', 'Bea', 'data.eval_path easy=test.jsonl'),
    "a reward's module": ('prices.py', '% 7', '% 5', 'rewards.function prices.py has changed'),
    "a reward's table": ('tables/eggs.json', '1.0', '2.0', 'rewards.function tables/eggs.json'),
    'a loss': ('loss.py', '-(log', '+(log', 'loss.name loss.py has changed'),
    "a tool's table": ('words.json', 'star', 'moon', 'tools.table words.json has changed'),
    'the tokenizer': ('model/tokenizer.json', '"Ġ"', '"Ġx"', 'init_from tokenizer.json'),
    'the template': ('model/chat_template.jinja', 'im_start', 'im_sttr', 'init_from chat_template'),
    'the model': ('model/config.json', '1e-06', '1e-05', 'init_from config.json has changed'),
    'an evaluation': ('run/eval_before.json', '"avg"', '"agv"', 'eval_before.json'),
    'a row of metrics': ('run/metrics.jsonl', '"step": 1, ', '"step": 1,  ', 'up to step 2'),
    'the cold start': ('run/cold_start.jsonl', '"loss": ', '"loss": 1', 'cold_start.jsonl is not'),
}


@pytest.mark.parametrize('name, old, new, said', SOURCES.values(), ids=list(SOURCES))
def test_a_source_that_is_another_is_named(here, name, old, new, said):
    if name == 'run/eval_before.json':  # a digit; a key would be noticed without a hash
        old, new = ('"num_prompts": 4', '"num_prompts": 5')
    change(here / name, old, new)
    found = refusal(here)
    assert said in found and found.endswith('take it on purpose by --accept-changes'), found
    assert found.count(';') == 0, 'the others are the same'


def test_any_byte_of_any_source(here):
    "A hundred times another one, but of the reward's file, of which the run has a copy"
    rng, folder = random.Random(0), here / 'run'
    names = ['train.jsonl', 'test.jsonl', 'prices.py', 'tables/eggs.json', 'loss.py']
    names += ['words.json', 'run/eval_before.json', 'run/metrics.jsonl', 'run/cold_start.jsonl']
    names += [f'{f}/{n.name}' for f in ('model', 'run/start') for n in (here / f).iterdir()]
    cfg, missed = read_run_config(folder), []
    for _ in range(100):
        path = here / rng.choice(names)
        whole = path.read_bytes()
        at = rng.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(7)]) + whole[at + 1 :])
        try:
            resume.check_files(folder)
            resume.check_origin(folder, cfg)
            missed.append((path, at))
        except ValueError as e:
            assert path.name in str(e), (path, e)
        path.write_bytes(whole)
    assert not missed
    resume.check_origin(folder, cfg)


def test_weights_that_are_others_are_named(here):
    path = here / 'model/model.safetensors'
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert 'init_from model.safetensors has changed' in refusal(here)


@pytest.mark.parametrize(
    'key, value',
    [
        ('optim.lr', 0.0006),
        ('rollout.temperature', 1.8),
        ('espo.alpha', 0.5),
        ('rollout.max_tokens', 11),
        ('rewards.weights', [2.0]),
        ('router_replay', 'R2'),
        ('data.select_by', 'length'),
    ],
)
def test_one_setting_changed_by_hand_is_named(here, key, value):
    path = here / 'run/config.json'
    config = json.loads(path.read_text())
    *above, last = key.split('.')
    part = config[above[0]] if above else config
    part[last] = value
    path.write_text(json.dumps(config))
    assert f'config.json says {key}={value!r}, but the run began with ' in refusal(here)


def test_what_is_gone_and_what_is_new_are_named(here):
    (here / 'words.json').unlink()
    (here / 'model/added_tokens.json').write_text('{}')
    (here / 'run/metrics.jsonl').unlink()
    said = refusal(here)
    for words in ('words.json is gone', 'added_tokens.json is new', 'metrics.jsonl is not as'):
        assert words in said


@pytest.mark.parametrize('name', ['tokenizer.json', 'chat_template.jinja', 'model.safetensors'])
def test_a_damaged_start_never_becomes_a_model(here, name):
    "Neither a resume nor the end of a run that goes on takes it, on purpose or not"
    path, folder = here / 'run/start' / name, here / 'run'
    path.write_bytes(path.read_bytes()[:-1] + b' ')
    cfg = read_run_config(folder)
    for takes in (
        lambda: resume.check_origin(folder, cfg, accept=True),
        lambda: resume.check_source(folder, cfg),
    ):
        with pytest.raises(ValueError, match=f'start/{name} is not as the run wrote it'):
            takes()


def test_other_prompts_from_the_same_files_are_noticed(here):
    "Another release reads rows in another way, say"
    folder = here / 'run'
    cfg = read_run_config(folder)
    origin = resume.check_origin(folder, cfg)
    prompts = load(cfg, folder).prompts
    resume.settle_origin(folder, origin, prompts)
    for change in (dict(answer='0'), dict(solution='#0')):
        others = [replace(prompts[0], **change), *prompts[1:]]
        with pytest.raises(ValueError, match='the prompts are others, though their files are the'):
            resume.settle_origin(folder, origin, others)


def test_unchanged_from_another_folder_and_then_taken_on_purpose(made, here, tmp_path):
    "One line says that all is the same; what is taken stands in origin.json and in the report"
    again = shutil.copytree(here / 'run', tmp_path / 'again')
    r = cli('resume', again, cwd=tmp_path)
    assert r.returncode == 0 and same_model(again, made / 'run'), r.stderr
    assert r.stdout.count('same data, same code, same model\n') == 1
    change(here / 'prices.py', '% 7', '% 5')
    assert cli('resume', again, '--steps', 3, cwd=tmp_path).returncode == 1
    r = cli('resume', again, '--steps', 3, '--accept-changes', cwd=tmp_path)
    assert r.returncode == 0, r.stderr
    what = 'rewards.function prices.py has changed'
    assert f'taken on purpose: {what}' in r.stdout
    assert json.loads((again / 'origin.json').read_text())['accepted'] == [what]
    assert f'Changes taken on purpose: `{what}`' in (again / 'report.md').read_text()
    assert str(here) not in (again / 'report.md').read_text()
    resume.check_origin(again, read_run_config(again))  # from now on that is what it is made of


def test_a_missing_origin_is_named_once(here, capsys, monkeypatch):
    monkeypatch.chdir(here)
    folder = here / 'run'
    (folder / 'origin.json').unlink()
    (folder / 'written.json').unlink()
    cfg = read_run_config(folder)
    for lines in (1, 0):
        resume.settle_origin(folder, resume.check_origin(folder, cfg), [])
        said = capsys.readouterr().out
        assert said.count('origin.json is missing') == lines
        assert said.count('same data, same code, same model') == 1 - lines


def test_large_files_are_known_by_parts_of_them(tmp_path):
    path = tmp_path / 'weights'
    path.write_bytes(bytes(4 << 20))
    before = file_sha256(path, 1 << 10)
    (tmp_path / 'longer').write_bytes(bytes((4 << 20) + 1))
    assert file_sha256(tmp_path / 'longer', 1 << 10) != before, 'equal parts of another size'
    for at in (0, 2 << 20, (4 << 20) - 1):
        with open(path, 'r+b') as f:
            f.seek(at)
            f.write(b'x')
        now = file_sha256(path, 1 << 10)
        assert now != before
        before = now


def test_files_that_a_program_names(tmp_path):
    "Modules of modules and packages, files in a folder that is named; not what it only might be"
    texts = {
        'reward.py': 'import a\nfrom pkg.deep import x\nopen(F / "data" / "t.json")\n"note.log"',
        'a.py': 'import b, reward',
        'b.py': '',
        'c.py': '',
        'pkg/__init__.py': '',
        'pkg/deep.py': 'from .near import y\nopen("../out.txt")',
        'pkg/near.py': '',
        'data/t.json': '{}',
        'data/u.json': '{}',
        'note.log': '',
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    program = tmp_path / 'reward.py'
    found = {str(p.relative_to(tmp_path)) for p in named_files(program, program.read_bytes())}
    assert found == {'a.py', 'b.py', 'pkg/__init__.py', 'pkg/deep.py', 'pkg/near.py', 'data/t.json'}


def test_relative_paths_lead_back_to_where_the_run_began(made, tmp_path, monkeypatch):
    "From the folder itself they stay as they are; a name is no path, whatever lies there"
    for name in ('espo', 'lookup', 'maths'):
        (made / name).mkdir()
    monkeypatch.chdir(made)
    here = read_run_config('run')
    monkeypatch.chdir(tmp_path)
    there = read_run_config(made / 'run')
    assert here.data.path == 'train.jsonl' and there.data.path == f'{made}/train.jsonl'
    assert there.data.eval_path == (f'easy={made}/test.jsonl',)
    assert there.rewards.function == (f'{made}/reward.py:score',)
    assert (there.loss.name, there.tools.name) == (f'{made}/loss.py:mine', 'lookup')
    assert there.init_from == f'{made}/model' and there.tools.table == f'{made}/words.json'


def test_every_path_among_the_settings_is_known():
    "A setting whose words say file or folder is compared by its content"
    from compassrl.config import TrainConfig, places
    from compassrl.runs.presets import about_setting, settings_of

    cfg, named = TrainConfig(), set()
    for key in settings_of(cfg):
        part, _, name = key.rpartition('.')
        owner = cfg
        for step in filter(None, part.split('.')):
            owner = getattr(owner, step)
        if {'File', 'Folder', 'FILE.py:NAME'} & set(
            about_setting(owner, name).replace(',', '').split()
        ):
            named.add(key)
    assert named - {'run_dir', 'vllm.sync_dir'} <= set(places)
    assert named >= {'tools.table', 'rewards.function', 'data.replay_from'}
    assert 'init_from' in places  # a folder or a name


def test_a_run_without_a_checkpoint_is_the_same_on_the_next_day(tmp_path):
    "Its template writes the date, which is that of the start"

    def on(day, **kw):
        cfg = TrainConfig(run_dir=str(tmp_path), **kw)
        return replace(cfg, data=replace(cfg.data, template_date=f'2024-01-{day}'))

    (tmp_path / 'config.json').write_text(json.dumps(asdict(on('01'))))
    assert resume.has_begun(on('02')) and not resume.has_begun(on('02', seed=5))
