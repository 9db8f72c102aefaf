"""Bad input of every kind: one line with the value and the fix, exit code 1, and nothing written

The command runs in this process, from its words to its exit; a few cases run as real processes.
"""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from compassrl.config import TrainConfig
from compassrl.runs.cli import main
from compassrl.settings import Range
from tests.support import chaos

pytestmark = chaos.kind('bad input')
ENV = {**os.environ, 'OMP_NUM_THREADS': '1'}
SMALL = ['smoke-cpu', '--cold-start.steps', '2', '--steps', '1', '--run-dir', 'run']


def contents(folder):
    "Every file below, its bytes; the lock of a run is none of its files"
    return {
        p.relative_to(folder): p.read_bytes() if p.is_file() else None
        for p in folder.rglob('*')
        if p.name != '.lock'
    }


def refused(folder, *args):
    "The one line with which a command is refused, in a folder that stays as it is"
    before, here = contents(folder), os.getcwd()
    os.chdir(folder)
    try:
        with pytest.raises(SystemExit) as e:
            main([str(a) for a in args])
    finally:
        os.chdir(here)
    said = e.value.code
    assert isinstance(said, str) and said.startswith('compassrl: '), said  # so the exit code is 1
    assert said.count('\n') == 0 and len(said) < 2000, said
    assert contents(folder) == before, 'something was written'
    return said


# ---- every setting, at its edges and beyond, of another type


def settings(cls=TrainConfig, at=''):
    "(name, hint without its range, ranges) of every setting of a run"
    for name, hint in get_type_hints(cls, include_extras=True).items():
        plain = get_type_hints(cls)[name]
        if dataclasses.is_dataclass(plain):
            yield from settings(plain, f'{at}{name}.')
        else:
            notes = [m.help_behavior_hint for m in getattr(hint, '__metadata__', ())]
            yield at + name, plain, [r for r in notes if isinstance(r, Range)]


def beyond(r, step):
    "Numbers next to the ends of a range that it leaves out"
    if r.low > -math.inf:
        yield r.low if r.open_low else r.low - step
    if r.high < math.inf:
        yield r.high if r.open_high else r.high + step


def wrong(hint, ranges):
    "Values that a setting cannot have"
    kinds = {hint, *get_args(hint)}
    if get_origin(hint) is Literal:
        return ['nosuch', 7, ['a']]
    if get_origin(hint) in (tuple, dict):
        edges = [[x] * 2 for r in ranges for x in beyond(r, 1)]
        return [7, 'nosuch', *edges]
    if bool in kinds:
        return ['maybe', 2]
    if int in kinds:
        edges = [x for r in ranges for x in beyond(r, 1)]
        return ['much', 1.5, True, 10**22, *edges]
    if float in kinds:
        edges = [x for r in ranges for x in beyond(r, 1e-6)]
        return ['much', math.nan, math.inf, -math.inf, 1e30, *edges]
    if str in kinds:
        return [7, True, 'a\0b']
    return ['nosuch', 7]


SETTINGS = [(name, wrong(hint, ranges)) for name, hint, ranges in settings()]


def nested(name, value):
    head, _, rest = name.partition('.')
    return {head: nested(rest, value) if rest else value}


@pytest.mark.parametrize('name, values', SETTINGS, ids=lambda x: x if isinstance(x, str) else '')
def test_a_wrong_value_of_a_setting(tmp_path, name, values):
    "In a file, where every value can be written; the part is named, too"
    for value in values:
        (tmp_path / 'c.json').write_text(json.dumps(nested(name, value)))
        said = refused(tmp_path, 'train', 'c.json')
        assert 'c.json: ' in said and name in said and 'use ' in said or 'leave out' in said, said


# ---- sizes


@pytest.mark.parametrize('size', [10**9, 10**15], ids=['9 zeros', '15 zeros'])
@pytest.mark.parametrize(
    'name',
    """
    prompts_per_step group_size eval_k num_threads
    policy.vocab_size policy.hidden_size policy.num_hidden_layers policy.num_attention_heads
    policy.num_key_value_heads policy.head_dim policy.moe_intermediate_size policy.num_experts
    policy.num_experts_per_tok policy.max_position_embeddings policy.eos_token_id
    data.num_train data.num_heldout data.max_prompt_tokens cold_start.batch_size
    rollout.max_tokens rollout.num_slots rewards.workers zero_variance.screen_samples
    schedule.partial_tokens optim.num_mini_batches parallel.vpp
    """.split(),
)
def test_a_size_beyond_any_machine(tmp_path, name, size):
    said = refused(tmp_path, 'train', 'smoke-cpu', '--' + name.replace('_', '-'), size)
    assert f'{name.rpartition(".")[2]}={size}' in said
    assert any(w in said for w in ('use ', 'lower ', 'shorten ', 'multiple of ', 'exceeds ')), said


def test_a_size_of_a_file_of_weights(tmp_path, model):
    "The shape of a checkpoint is that of the run: it is counted, too"
    for key, size in (('hidden_size', 10**7), ('num_hidden_layers', 10**9), ('vocab_size', 10**12)):
        shutil.copytree(model, tmp_path / 'm', dirs_exist_ok=True)
        d = json.loads((tmp_path / 'm/config.json').read_text())
        (tmp_path / 'm/config.json').write_text(json.dumps(d | {key: size}))
        said = refused(tmp_path, 'train', 'smoke-cpu', '--init-from', 'm')
        assert f'lower policy.{key}={size}' in said and 'GB of memory' in said


# ---- words of the command


WORDS = {
    'fly': ['fly', 'train, resume, eval, distill, report, merge, pipeline'],
    'tiny-cpu': ["unknown command 'tiny-cpu'"],
    '--stepz 3': ["unknown command '--stepz'"],
    'train tiny-gpu': ['tiny-gpu', 'tiny-cpu'],
    'train nosuch.json': ['nosuch.json', 'config file'],
    'train nosuch.yaml': ['nosuch.yaml', 'config file'],
    'train nosuch.toml': ['nosuch.toml', 'config file'],
    'train nosuch.csv': ['nosuch.csv', '.yaml'],
    'train tiny-cpu --stepz 3': ['--stepz', 'did you mean --steps?'],
    'train tiny-cpu --lr 1e-3': ['--lr', '--optim.lr', '--cold-start.lr'],
    'train tiny-cpu --optim.lrr 1': ['--optim.lrr', '--optim.lr?'],
    'train tiny-cpu --learning-rate 1': ['--learning-rate'],
    'train tiny-cpu --loss ppo': ['--loss'],
    'train tiny-cpu more words': ['more, words'],
    'train tiny-cpu --steps': ['--steps', 'INT'],
    'train tiny-cpu --steps --seed 3': ['--steps', 'INT'],
    'train tiny-cpu --steps ten': ['--steps', 'ten', 'INT'],
    'train tiny-cpu --steps 1.5': ['--steps', '1.5', 'INT'],
    'train tiny-cpu --steps -3': ['steps=-3', 'at least 0'],
    'train tiny-cpu --steps 3 4': ['4'],
    'train tiny-cpu --optim.lr fast': ['--optim.lr', 'fast', 'FLOAT'],
    'train tiny-cpu --optim.lr nan': ['lr=nan', 'finite'],
    'train tiny-cpu --optim.lr inf': ['lr=inf', 'finite'],
    'train tiny-cpu --optim.lr 0': ['lr=0', 'more than 0'],
    'train tiny-cpu --optim.betas 0.9': ['--optim.betas'],
    'train tiny-cpu --device tpu': ['tpu', "'cpu', 'cuda'"],
    'train tiny-cpu --router-replay R4': ['R4', 'R3'],
    'train tiny-cpu --loss.name ppo': ["name='ppo'", 'grpo'],
    'train tiny-cpu --loss.clip-eps-high 0.3': ['loss.clip_eps_high=0.3', 'espo.alpha'],
    'train tiny-cpu --data.domains maths': ['maths', 'arithmetic'],
    'train tiny-cpu --data.domains arithmetic arithmetic': ['arithmetic', 'once'],
    'train tiny-cpu --data.weights 1 2': ['weights=(1.0, 2.0)', '1 positive'],
    'train tiny-cpu --data.verifier nosuch': ['nosuch', 'exact'],
    'train tiny-cpu --data.difficulty 21': ['difficulty=21', '0 to 20'],
    'train tiny-cpu --policy.vocab-size 7': ['vocab_size=7'],
    'train tiny-cpu --policy.head-dim 15': ['head_dim=15'],
    'train tiny-cpu --policy.num-experts-per-tok 9': ['num_experts_per_tok=9'],
    'train tiny-cpu --rollout.max-tokens 100': ['rollout.max_tokens=100', 'shorten'],
    'train tiny-cpu --rollout.temperature 0': ['temperature=0', 'more than 0'],
    'train tiny-cpu --schedule.over-provision 1': ['over_provision=1', 'pool'],
    'train tiny-cpu --data.num-train 31': ['prompts_per_step=32', '31'],
    'train tiny-cpu --data.difficulty 0 --data.num-train 9999': ['num=9999', 'fewer'],
    'train tiny-cpu --seed 99999999999999999999999': ['seed=99999999999999999999999', 'at most'],
    'train tiny-cpu --num-threads 1000000': ['num_threads=1000000', '1 to 1024'],
    'train tiny-cpu --log-level loud': ['--log-level', 'loud', 'info'],
    'train tiny-cpu --train-engine megatron --loss.kl-coef 1': ['loss.kl_coef=1', 'torch'],
    'train tiny-cpu --rollout-engine pool --vllm.urls nosuch': ['nosuch'],
    'resume': ['run directory', 'RUN_DIR'],
    'resume --steps 3': ['run directory', 'RUN_DIR'],
    'resume nosuch': ['nosuch', 'run directory'],
    'report': ['RUN_DIR', 'missing'],
    'report nosuch': ['nosuch', 'check the path'],
    'report a b': ['b'],
}


@pytest.mark.parametrize('line', WORDS)
def test_wrong_words(tmp_path, line):
    said = refused(tmp_path, *line.split())
    assert all(w in said for w in WORDS[line]), said


# ---- a device, a package, a process that is not there


@pytest.mark.skipif(os.path.exists('/dev/nvidia0'), reason='a GPU is there')
def test_no_gpu(tmp_path):
    assert "device='cuda'" in refused(tmp_path, 'train', 'smoke-cpu', '--device', 'cuda')
    assert "device='cuda'" in refused(tmp_path, 'train', 'one-gpu')


def test_too_many_processes(tmp_path, monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '2')
    said = refused(tmp_path, 'train', 'smoke-cpu')
    assert '2 processes' in said and 'torchrun' in said


# ---- files that people write


CONFIGS = {
    'torn.json': (b'{"steps": ', 'JSON'),
    'empty.json': (b'', 'JSON'),
    'binary.json': (bytes(range(128, 256)), 'UTF-8'),
    'zeros.json': (bytes(64), 'JSON'),
    'deep.json': (b'[' * 100_000, 'nested too deeply'),
    'deepest.json': (b'{"a":' * 100_000, 'nested too deeply'),
    'digits.json': (b'{"seed": ' + b'9' * 5000 + b'}', '4300 digits'),
    'list.json': (b'[1, 2]', 'object'),
    'text.json': (b'"steps"', 'object'),
    'null.json': (b'null', 'object'),
    'key.json': (b'{"learning_rate": 1}', "'learning_rate' does not exist"),
    'part.json': (b'{"optim": {"momentum": 1}}', "'optim.momentum' does not exist"),
    'flat.json': (b'{"optim.lr": 1}', "'optim.lr' does not exist"),
    'number.json': (b'{"optim": 3}', 'optim=3'),
    'torn.yaml': (b'optim: {lr: 1', 'YAML'),
    'tab.yaml': (b'optim:\n\tlr: 1', 'YAML'),
    'binary.yaml': (b'\xff\xfe\x00\x01', 'UTF-8'),
    'empty.yaml': (b'', 'object'),
    'deep.yaml': (b'[' * 100_000, 'nested too deeply'),
    'object.yaml': (b'!!python/object/apply:os.system ["true"]', 'YAML'),
    'key.yaml': (b'3: 4', "'3' does not exist"),
    'value.yml': (b'steps: many', "steps='many'"),
    'torn.toml': (b'steps = ', 'TOML'),
    'twice.toml': (b'steps = 1\nsteps = 2', 'TOML'),
    'binary.toml': (b'\xff\xfe', 'UTF-8'),
    'key.toml': (b'[optim]\nmomentum = 1', "'optim.momentum' does not exist"),
}


@pytest.mark.parametrize('name', CONFIGS)
def test_a_config_file_that_is_none(tmp_path, name):
    data, why = CONFIGS[name]
    (tmp_path / name).write_bytes(data)
    said = refused(tmp_path, 'train', name)
    assert name in said and why in said, said


ROW = '{"prompt": "1+1=", "answer": "2"}\n'
ROWS = {
    'torn': (ROW + '{"prompt": "1+2=', ':2'),
    'a list': (ROW + '[1]\n', ':2'),
    'no prompt': (ROW + '{"answer": "2"}\n', "'prompt'"),
    'no answer': (ROW + '{"prompt": "2"}\n', "'answer'"),
    'empty prompt': (ROW + '{"prompt": " ", "answer": "2"}\n', 'empty'),
    'null prompt': (ROW + '{"prompt": null, "answer": "2"}\n', "'prompt'"),
    'verifier': (ROW + '{"prompt": "3", "answer": "2", "verifier": "nosuch"}\n', 'nosuch'),
    'long': (ROW + '{"prompt": "%s", "answer": "2"}\n' % ('1' * 99), 'max_prompt_tokens=64'),
    'deep': (ROW + '[' * 100_000 + '\n', ':2'),
    'empty': ('', 'no usable row'),
    'blank': ('\n\n', 'no usable row'),
    'few': (ROW, 'rows'),
}


@pytest.mark.parametrize('name', ROWS)
def test_wrong_rows(tmp_path, name):
    text, why = ROWS[name]
    (tmp_path / 'rows.jsonl').write_text(text)
    before = contents(tmp_path)
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        with pytest.raises(SystemExit) as e:
            main(['train', *SMALL, '--data.path', 'rows.jsonl'])
    finally:
        os.chdir(here)
    said = e.value.code
    assert said.startswith('compassrl: ') and 'rows.jsonl' in said and why in said, said
    assert contents(tmp_path) == before


SOURCES = {
    'nosuch.jsonl': None,
    'nosuch.parquet': None,
    'binary.jsonl': bytes(range(256)),
    'binary.parquet': bytes(range(256)),
    'empty.parquet': b'',
    'a.weights': b'x',
    'folder': 'folder',
}


@pytest.mark.parametrize('name', SOURCES)
def test_a_source_that_is_none(tmp_path, name):
    data = SOURCES[name]
    if data == 'folder':
        (tmp_path / name).mkdir()
    elif data is not None:
        (tmp_path / name).write_bytes(data)
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        with pytest.raises(SystemExit) as e:
            main(['train', *SMALL, '--data.path', name])
    finally:
        os.chdir(here)
    assert e.value.code.startswith('compassrl: ') and name in e.value.code
    assert not (tmp_path / 'run').exists()


# ---- where results go


def test_places_for_results(tmp_path):
    (tmp_path / 'file').write_text('here')
    (tmp_path / 'full').mkdir()
    (tmp_path / 'full/x').write_text('here')
    for place, words in (
        ('a' * 5000, 'name too long'),
        ('a/' * 3000, 'name too long'),
        ('file', 'Not a directory'),
        ('full', 'holds no run'),
        ('file/below', 'choose another'),
        ('/proc/nosuch', 'choose another'),
    ):
        said = refused(tmp_path, 'train', 'smoke-cpu', '--run-dir', place)
        assert words in said and f"run_dir='{place[:150]}" in said, said
    (tmp_path / 'c.json').write_text(json.dumps(dict(run_dir='a\0b')))
    assert "run_dir='a\\x00b'" in refused(tmp_path, 'train', 'c.json')
    assert 'name too long' in refused(tmp_path, 'train', 'a' * 5000 + '.json')


# ---- checkpoints of others


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    "A small run that is whole"
    folder = tmp_path_factory.mktemp('small')
    here = os.getcwd()
    os.chdir(folder)
    try:
        main(['train', *SMALL, '--trace-every', '1', '--quiet'])
    finally:
        os.chdir(here)
    return folder / 'run'


@pytest.fixture(scope='module')
def model(run):
    return run / 'model'


def shape(**kw):
    def change(data):
        return json.dumps(json.loads(data) | kw).encode()

    return change


def torn(data):
    return data[: len(data) // 2]


def gone(data):
    return None


def binary(data):
    return bytes(range(128, 256)) * 4


def empty(data):
    return b''


def deep(data):
    return b'[' * 100_000


def listed(data):
    return b'[1]'


MODELS = [
    *[('config.json', how) for how in (torn, gone, binary, empty, deep, listed)],
    *[('tokenizer.json', how) for how in (torn, gone, binary, empty, deep, listed)],
    *[('tokenizer_config.json', how) for how in (torn, binary, empty, deep, listed)],
    *[('model.safetensors', how) for how in (torn, gone, binary, empty, listed)],
    ('config.json', shape(model_type='nosuch')),
    ('config.json', shape(hidden_size='wide')),
    ('config.json', shape(hidden_size=None)),
    ('config.json', shape(hidden_size=0)),
    ('config.json', shape(hidden_size=96)),
    ('config.json', shape(num_experts=9)),
    ('config.json', shape(num_hidden_layers=3)),
    ('config.json', shape(num_hidden_layers=1)),
    ('config.json', shape(vocab_size=50)),
    ('config.json', shape(max_position_embeddings=9)),
]


@pytest.mark.parametrize('name, how', MODELS, ids=lambda x: getattr(x, '__name__', x))
def test_a_checkpoint_that_is_damaged(tmp_path, model, name, how):
    shutil.copytree(model, tmp_path / 'm')
    data = how((tmp_path / 'm' / name).read_bytes())
    (tmp_path / 'm' / name).unlink()
    if data is not None:
        (tmp_path / 'm' / name).write_bytes(data)
    said = refused(tmp_path, 'train', *SMALL, '--init-from', 'm')
    if how.__name__ != 'change':
        assert f'm/{name}' in said, said


def test_a_checkpoint_that_is_none(tmp_path):
    (tmp_path / 'nothing').mkdir()
    (tmp_path / 'file').write_text('x')
    for where in ('nosuch', 'nothing', 'file', 'a' * 5000):
        assert where[:100] in refused(tmp_path, 'train', *SMALL, '--init-from', where)


# ---- a run that goes on, from files that are not whole


def mixed(data):
    lines = data.splitlines(keepends=True)
    return b'\xff\xfe\x00\n' + b''.join(lines)


def cut(data):
    return b'{"ste\n' + data


RUNS = [
    *[('config.json', how) for how in (torn, gone, binary, empty, deep, listed)],
    *[('eval_before.json', how) for how in (torn, binary, empty, deep, listed)],
    *[('eval_after.json', how) for how in (torn, binary, empty, deep, listed)],
    *[('machine.json', how) for how in (torn, binary, empty, deep, listed)],
    *[('timings.json', how) for how in (torn, binary, listed)],
    *[('metrics.jsonl', how) for how in (mixed, cut)],
    *[('trace.jsonl', how) for how in (mixed, cut)],
    *[('cold_start.jsonl', how) for how in (mixed, cut)],
]


def goes_on(folder, *more):
    return refused(folder, 'resume', 'run', *more)


@pytest.mark.parametrize('name, how', RUNS, ids=lambda x: getattr(x, '__name__', x))
def test_a_run_with_a_torn_file(tmp_path, run, name, how):
    shutil.copytree(run, tmp_path / 'run')
    data = how((tmp_path / 'run' / name).read_bytes())
    (tmp_path / 'run' / name).unlink()
    if data is not None:
        (tmp_path / 'run' / name).write_bytes(data)
    assert name in goes_on(tmp_path)


def test_a_run_that_cannot_go_on(tmp_path, run):
    shutil.copytree(run, tmp_path / 'run')
    for words, told in (
        (['--steps', '0'], 'steps=0'),
        (['--stepz', '3'], '--steps?'),
        (['--optim.lr', '3'], '--optim.lr'),
        (['--steps', 'x'], "'x'"),
        (['--parallel.tp', '0'], 'tp=0'),
        (['more'], 'more'),
    ):
        assert told in goes_on(tmp_path, *words)
    config = json.loads((tmp_path / 'run/config.json').read_text())
    for key, value in (('hidden_size', 10**7), ('hidden_size', 96), ('eos_token_id', 500)):
        changed = config | dict(policy=config['policy'] | {key: value})
        (tmp_path / 'run/config.json').write_text(json.dumps(changed))
        assert 'policy' in goes_on(tmp_path)
    (tmp_path / 'run/config.json').write_text(json.dumps(config))
    for p in (tmp_path / 'run/checkpoints').glob('step-*/state.json'):
        p.write_bytes(p.read_bytes()[:-9])
    assert 'checkpoints' in goes_on(tmp_path)


REPORTS = [
    *[('config.json', how) for how in (torn, binary, deep)],
    *[('eval_before.json', how) for how in (torn, binary)],
    *[('eval_after.json', how) for how in (torn, empty)],
    *[('machine.json', how) for how in (torn, deep)],
    *[('timings.json', how) for how in (torn, binary)],
    *[('metrics.jsonl', how) for how in (mixed, cut)],
]


@pytest.mark.parametrize('name, how', REPORTS, ids=lambda x: getattr(x, '__name__', x))
def test_a_report_of_a_damaged_run(tmp_path, run, name, how):
    shutil.copytree(run, tmp_path / 'run')
    (tmp_path / 'run' / name).write_bytes(how((tmp_path / 'run' / name).read_bytes()))
    assert name in refused(tmp_path, 'report', 'run')


# ---- as real processes


REAL = [
    ['train', 'smoke-cpu', '--num-threads', '1000000'],
    ['train', 'smoke-cpu', '--policy.hidden-size', '1000000'],
    ['train', 'smoke-cpu', '--cold-start.batch-size', '1000000000'],
    ['train', 'smoke-cpu', '--data.path', 'nosuch.jsonl'],
]


@pytest.mark.parametrize('args', REAL, ids=lambda a: a[2])
def test_a_real_process(tmp_path, args):
    r = subprocess.run(
        [sys.executable, '-m', 'compassrl', *args],
        cwd=tmp_path,
        env=ENV | dict(PYTHONPATH=str(Path(__file__).parents[2])),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert r.returncode == 1 and r.stdout == ''
    assert r.stderr.startswith('compassrl: ') and r.stderr.count('\n') == 1, r.stderr
    assert args[3] in r.stderr and not list(tmp_path.iterdir())


def test_there_are_many_cases():
    tables = WORDS, CONFIGS, ROWS, SOURCES, MODELS, RUNS, REPORTS, REAL
    assert sum(len(values) for _, values in SETTINGS) > 400 and sum(map(len, tables)) > 150
