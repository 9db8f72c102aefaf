"""What users typed, and what comes back: exit code, one clear line, what stands in the run folder

Here are the lines that no other test types. Words of the command are in test_cli.py and
test_bad_input.py, rows, evaluation sets and reward functions one by one in
test_own_data_and_reward.py, models in test_own_model.py, Ctrl-C and kills in test_run.py and
test_resume.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compassrl.runs import cli
from compassrl.runs.cli import main
from compassrl.runs.log import set_level
from tests.runs.test_bad_input import contents
from tests.runs.test_own_data_and_reward import CODE, gsm8k, problem, save_model, verl, write
from tests.support import ROOT

SMALL = '--steps 1 --eval-k 1 --rollout.max-tokens 4 --save-every 0 --quiet'
MODEL = (
    f'train smoke-cpu --init-from model --data.max-prompt-tokens 256 --prompts-per-step 4 {SMALL}'
)
TOY = f'train smoke-cpu --cold-start.steps 0 --prompts-per-step 4 {SMALL}'
REWARDS = """
from compassrl import Verdict

def number(text, answer):
    return 0.1

def verdict(text, answer):
    return Verdict(0.5, len(text) > 0, 'ok', 'it has letters')

def fails(text):
    return int('x')
"""
EVERY_RUN = {
    'config.json',
    'metrics.jsonl',
    'trace.jsonl',
    'machine.json',
    'eval_before.json',
    'eval_after.json',
    'report.md',
    'report.json',
    'model',
    'checkpoints',
}


@pytest.fixture(scope='module')
def home(tmp_path_factory):
    "A folder with what people bring"
    folder, before = tmp_path_factory.mktemp('users'), os.getcwd()
    os.chdir(folder)
    questions = [problem(i) for i in range(48)]
    write('gsm8k.jsonl', map(gsm8k, range(48)))
    write('integers.jsonl', [dict(prompt=q, answer=i) for i, (q, _) in enumerate(questions)])
    write('messages.jsonl', [dict(messages=verl(i)['prompt'], answer=str(i)) for i in range(48)])
    write('list.jsonl', [dict(prompt=verl(i)['prompt'], answer=str(i)) for i in range(48)])
    write('verl.jsonl', map(verl, range(48)))
    write('code.jsonl', [CODE | dict(prompt=f'{i}: {CODE["prompt"]}') for i in range(48)])
    write('twice.jsonl', [dict(prompt=problem(i % 24)[0], answer=i % 24) for i in range(48)])
    rows = [dict(prompt=q, answer=a) for q, a in questions]
    Path('table.csv').write_text('prompt,answer\n' + ''.join(f'"{q}",7\n' for q, _ in questions))
    write('accents.jsonl', [dict(prompt=f'{i} é', answer='1') for i in range(48)])
    faults = ['{"prompt": "1", "answer": ', '[]', '7', '{"prompt": 1}', '{"answer": "2"}', '{}', '']
    good = [json.dumps(r) for r in rows[:30]]
    Path('faults.jsonl').write_text('\n'.join([*good[:9], *faults, *good[9:]]))
    Path('rewards.py').write_text(REWARDS)
    save_model('model', [q for q, _ in questions])
    write('run_settings.yaml', [dict(steps=1)])  # JSON is YAML
    yield folder
    os.chdir(before)


@pytest.fixture
def typed(home, tmp_path, capsys):
    "Type a line; what it prints, and the folder of its run"

    def call(line, code=0):
        words = line.replace('{run}', str(tmp_path / 'run')).split()
        ended = 0
        try:
            main(words)
        except SystemExit as e:
            ended = e.code or 0
        out = capsys.readouterr().out
        if code:
            assert isinstance(ended, str) and ended.startswith('compassrl: '), ended
            assert '\n' not in ended or 'bad rows of' in ended  # then a line for each row
            return ended, tmp_path / 'run'
        assert ended == 0, ended
        return out, tmp_path / 'run'

    yield call
    set_level('info')  # after --quiet


def last_row(run):
    return json.loads((run / 'metrics.jsonl').read_text().splitlines()[-1])


# ---- what runs, from the words to the report


RUNS = {
    'GSM8K as it is': (MODEL, '--data.path gsm8k.jsonl'),
    'GSM8K, one column named': (MODEL, '--data.path gsm8k.jsonl --data.columns prompt question'),
    'numbers as answers': (MODEL, '--data.path integers.jsonl'),
    'messages': (MODEL, '--data.path messages.jsonl'),
    'a list in prompt': (MODEL, '--data.path list.jsonl'),
    'rows of verl': (MODEL, '--data.path verl.jsonl'),
    'lists of tests': (
        MODEL,
        '--data.path code.jsonl --data.columns answer tests --data.verifier code --rewards.unsafe',
    ),
    'a CSV table': (MODEL, '--data.path table.csv'),
    'questions twice': (MODEL, '--data.path twice.jsonl'),
    'letters that the tokenizer does not know': (TOY, '--data.path accents.jsonl'),
    'bad rows, left out': (MODEL, '--data.path faults.jsonl --data.on-bad-row skip'),
    'a set for evaluation': (MODEL, '--data.path gsm8k.jsonl --data.eval-path mine=integers.jsonl'),
}


@pytest.mark.parametrize('case', RUNS)
def test_a_run_to_its_end(typed, case):
    "Exit code 0, a whole folder, a verdict for every response"
    preset, flags = RUNS[case]
    out, run = typed(f'{preset} {flags} --data.num-heldout 4 --run-dir {{run}}')
    assert out.splitlines()[-1] == str(run) and EVERY_RUN <= {p.name for p in run.iterdir()}
    assert not (run / 'failed.json').exists() and last_row(run)['failed_frac'] == 0
    asked = json.loads((run / 'eval_after.json').read_text())
    assert asked['num_prompts'] == 4 and asked['failed_frac'] == 0
    if 'eval-path' in flags:
        assert asked['sets']['mine']['num_prompts'] == 48
    if 'model' in preset:
        names = {p.name for p in (run / 'model').iterdir()}
        assert {p.name for p in Path('model').iterdir()} <= names
        assert (run / 'model/chat_template.jinja').exists()


@pytest.mark.parametrize(
    'flags, mean, correct',
    [
        ('rewards.py:number', 0.1, 0.0),
        ('rewards.py:verdict', 0.5, 1.0),
        ('rewards:number', 0.1, 0.0),
        ('rewards.py:number rewards.py:verdict --rewards.weights 1 2', 1.1, 0.0),
    ],
)
def test_a_reward_of_ones_own(typed, monkeypatch, flags, mean, correct):
    "A float as other frameworks take it, a verdict, a module's name, several: none is lost"
    monkeypatch.syspath_prepend(os.getcwd())
    _, run = typed(
        f'{MODEL} --data.path gsm8k.jsonl --data.num-heldout 4 --rewards.function {flags} '
        '--run-dir {run}'
    )
    row, after = last_row(run), json.loads((run / 'eval_after.json').read_text())
    assert row['failed_frac'] == 0 and row['reward_mean'] == pytest.approx(mean)
    assert after['avg'] == correct and after['reward_mean'] == pytest.approx(mean)
    report = (run / 'report.md').read_text()
    names = flags.split(' --')[0].split()
    assert 'function=' in report and all(n in report for n in names)
    assert 'http:/v1' not in report


def test_a_reward_that_always_fails_ends_the_run(typed):
    "Not with exit code 0 and a mean of nothing: with the error and its place in the file"
    said, run = typed(f'{TOY} --rewards.function rewards.py:fails --run-dir {{run}}', code=1)
    line = REWARDS[: REWARDS.index("int('x')")].count('\n') + 1
    assert 'ValueError: invalid literal' in said and said.endswith(f'(rewards.py:{line})')
    assert json.loads((run / 'failed.json').read_text())['why'] in said
    assert not (run / 'model').exists() and not (run / 'metrics.jsonl').exists()


def test_a_folder_whose_name_begins_with_a_dash(typed, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    typed(f'{TOY} --run-dir=-x')
    assert EVERY_RUN <= {p.name for p in (tmp_path / '-x').iterdir()}
    out, _ = typed('report ./-x')
    assert out.splitlines()[-1] == './-x'


def test_the_settings_of_a_run_start_another(typed, tmp_path):
    "Its config.json is a config file; the new run has a folder of its own"
    _, run = typed(f'{TOY} --seed 3 --run-dir {{run}}')
    _, again = typed(f'train {run}/config.json --run-dir {tmp_path}/again --group-size 6 --quiet')
    told = json.loads((tmp_path / 'again/config.json').read_text())
    assert (told['seed'], told['group_size'], told['steps']) == (3, 6, 1)
    said, _ = typed(f'train {run}/config.json --quiet', code=1)
    assert 'compassrl resume' in said  # the file names the first run's folder


# ---- what is refused, before anything is written


REFUSED = {
    f'{TOY} --data.verifier mymodule:reward': ["'mymodule:reward'", 'cannot be imported'],
    f'{MODEL} --data.path faults.jsonl': ['6 bad rows of 36', 'faults.jsonl:10', '--data.on-bad'],
    f'{MODEL} --data.path gsm8k.jsonl --data.num-heldout 48': ['num_heldout=48', '48'],
    f'{MODEL} --rewards.functions rewards.py:number': ['did you mean --rewards.function?'],
    'train smoke-cpu --run-dir -x': ['--run-dir', 'STR'],
    'train smoke-cpu --tracker wandb': ['did you mean --trackers?'],
    'train run_settings.csv': ['run_settings.csv', '.yaml'],
    'export run': ["unknown command 'export'", 'eval'],
    'serve run': ["unknown command 'serve'", 'eval'],
    'resume model': ['model'],
    'report model': ['model'],
}


@pytest.mark.parametrize('line', REFUSED, ids=lambda x: x.replace(SMALL, '')[-60:])
def test_a_line_that_is_refused(typed, home, line):
    before = contents(home)
    said, _ = typed(line, code=1)
    assert all(w in said for w in REFUSED[line]), said
    assert contents(home) == before


FAMILIES = {
    'deepseek_v3': 'multi-head latent attention',
    'gpt_oss': 'attention sinks',
    'qwen3_next': 'linear attention',
    'bert': "'qwen3_moe'",
}


@pytest.mark.parametrize('name', FAMILIES)
def test_a_family_that_is_not_supported_is_named_with_what_is_missing(typed, home, name):
    folder = home / name
    folder.mkdir()
    (folder / 'config.json').write_text(json.dumps(dict(model_type=name)))
    said, run = typed(f'{TOY} --init-from {name} --run-dir {{run}}', code=1)
    assert f'model_type={name!r}' in said and FAMILIES[name] in said and not run.exists()


# ---- pages


@pytest.mark.parametrize('words', [['--version'], ['-V']])
def test_the_version(words, capsys):
    main(words)
    assert capsys.readouterr().out == f'compassrl {cli.__version__}\n'


def test_every_setting_stands_on_a_page():
    "With its default, its allowed values and a description"
    from compassrl import TrainConfig
    from compassrl.runs.presets import flag, settings_of
    from course.pages import settings_markdown

    rows = [x.split(' | ') for x in settings_markdown(TrainConfig()).splitlines() if '| `--' in x]
    values = settings_of(TrainConfig())
    assert [r[0][3:-1] for r in rows] == sorted(
        map(flag, values), key=[r[0][3:-1] for r in rows].index
    )
    assert len(rows) == len(values)
    by_flag = {r[0][3:-1]: r for r in rows}
    assert by_flag['--optim.lr'][1:3] == [str(TrainConfig().optim.lr), 'more than 0']
    assert 'gspo' in by_flag['--loss.name'][2] and by_flag['--device'][2] == 'cpu, cuda'
    silent = [k for k, r in by_flag.items() if not r[3].rstrip(' |')]
    assert not silent
    for key in ('--loss.aggregation', '--rollout.quantization', '--trackers'):
        assert ',' in by_flag[key][2], by_flag[key]  # every value is listed


def test_the_panel_says_what_it_needs(monkeypatch):
    from compassrl.launch import panel

    monkeypatch.setattr(panel, 'find_spec', lambda name: None)
    with pytest.raises(ValueError, match=r'ipywidgets: pip install "compassrl\[notebook\]"'):
        panel.panel()


# ---- as real processes


@pytest.mark.parametrize(
    'line, code, words',
    [
        ('python -m compassrl train nosuch', 1, ["unknown preset 'nosuch'"]),
        ('python -m compassrl train tiny-cpu --help | head -5', 0, ['compassrl train tiny-cpu']),
        ('python -m compassrl.train --help', 1, ['compassrl.train']),
    ],
)
def test_a_line_in_a_shell(tmp_path, line, code, words):
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
    line = 'set -o pipefail; ' * ('|' not in line) + line.replace('python', sys.executable, 1)
    r = subprocess.run(
        ['bash', '-c', line], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    said = r.stdout + r.stderr
    assert r.returncode == code and all(w in said for w in words), said
    assert 'Traceback' not in said and not list(tmp_path.iterdir())
