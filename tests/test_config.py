"One object for all settings: refused at once if wrong, the same as flags and as a file"

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from typing import get_args, get_origin, get_type_hints

import pytest

from compassrl.algo.algo_settings import EspoConfig, LossConfig
from compassrl.config import (
    RolloutEngineName,
    TrainConfig,
    TrainEngineName,
    config_from_dict,
    read_run_config,
)
from compassrl.judges.reward_settings import GenRMConfig
from compassrl.model.shape import PolicyConfig
from compassrl.rollout.rollout_settings import RolloutConfig, VllmConfig
from compassrl.runs.cli import parse_train
from compassrl.runs.presets import presets
from compassrl.settings import Range, above, at_least, between
from tests.support import ROOT


@pytest.mark.parametrize(
    'kw, words',
    [
        (dict(group_size=1), ['group_size=1', 'at least 2']),
        (dict(group_size=0), ['group_size=0']),
        (dict(prompts_per_step=0), ['prompts_per_step=0', 'at least 1']),
        (dict(eval_k=0), ['eval_k=0']),
        (dict(keep_checkpoints=0), ['keep_checkpoints=0']),
        (dict(num_threads=0), ['num_threads=0']),
        (dict(steps=-1), ['steps=-1', 'at least 0']),
        (dict(eval_every=-1), ['eval_every=-1']),
        (dict(trace_every=-1), ['trace_every=-1']),
        (dict(save_every=-1), ['save_every=-1']),
        (dict(seed=-1), ['seed=-1']),
        (dict(device='tpu'), ["device='tpu'", "'cpu', 'cuda'"]),
        (
            dict(loss=LossConfig('espo', clip_eps_high=0.3)),
            ['loss.clip_eps_high=0.3', 'espo.alpha'],
        ),
        (
            dict(loss=LossConfig('espo', aggregation='token-mean')),
            ["loss.aggregation='token-mean'"],
        ),
        (dict(rollout=RolloutConfig(temperature=0)), ['temperature=0', 'more than 0']),
        (
            dict(policy=PolicyConfig(max_position_embeddings=127)),
            ['= 128', 'max_position_embeddings=127', 'shorten'],
        ),
    ],
)
def test_bad_configs(kw, words):
    with pytest.raises(ValueError) as e:
        TrainConfig(**kw)
    assert '\n' not in str(e.value)
    for w in words:
        assert w in str(e.value)


@pytest.mark.parametrize(
    'cfg',
    [
        TrainConfig(),
        *(p() for p in presets.values()),
        TrainConfig(loss=LossConfig('dapo', clip_eps_high=0.3), espo=EspoConfig(groups='bins')),
    ],
    ids=lambda c: c.loss.name,
)
def test_a_config_survives_its_file(cfg, tmp_path):
    (tmp_path / 'config.json').write_text(json.dumps(dataclasses.asdict(cfg)))
    assert read_run_config(tmp_path) == cfg == read_run_config(tmp_path / 'config.json')


@pytest.mark.parametrize(
    'd, words',
    [
        (dict(learning_rate=1), ["'learning_rate' does not exist", 'seed']),
        (dict(optim=dict(learning_rate=1)), ["'optim.learning_rate'"]),
        (dict(steps='many'), ["steps='many'", 'whole number']),
        (dict(steps=1.5), ['steps=1.5']),
        (dict(steps=True), ['steps=True']),
        (dict(optim=dict(betas=[0.9])), ['optim.betas=[0.9]']),
        (dict(router_replay='R4'), ["router_replay='R4'", 'R2', 'R3']),
        (dict(loss=dict(clip_eps_low='a')), ["loss.clip_eps_low='a'", 'a number']),
        (dict(loss=dict(aggregation='mean')), ["loss.aggregation='mean'"]),
        (dict(optim=3), ['optim=3', 'object']),
        ([], ['config=[]']),
    ],
)
def test_bad_files(d, words):
    with pytest.raises(ValueError) as e:
        config_from_dict(TrainConfig, d)
    assert '\n' not in str(e.value)
    for w in words:
        assert w in str(e.value)


def test_none_and_whole_numbers_of_a_file():
    cfg = config_from_dict(
        TrainConfig,
        dict(loss=dict(name='dapo', clip_eps_low=None, clip_eps_high=1), optim=dict(lr=1)),
    )
    assert (
        cfg.loss.clip_eps_low is None
        and cfg.loss.clip_eps_high == 1.0
        and isinstance(cfg.optim.lr, float)
    )


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(ValueError, match='does not exist'):
        read_run_config(tmp_path)
    (tmp_path / 'config.json').write_text('{"steps": ')
    with pytest.raises(ValueError, match='is not JSON'):
        read_run_config(tmp_path)


# ---- the range of every number


def parts(cls=TrainConfig, at=''):
    "Every config dataclass of a run, with its place in the whole"
    yield at, cls
    for name, hint in get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from parts(hint, f'{at}{name}.')


def ranges():
    "(place, config, name, range) of every setting that has a range"
    for at, cls in parts():
        for name, hint in get_type_hints(cls, include_extras=True).items():
            for note in getattr(hint, '__metadata__', ()):
                if isinstance(note.help_behavior_hint, Range):
                    yield at, cls, name, note.help_behavior_hint


def numeric(hint):
    return {int, float} & {hint, *get_args(hint)} and bool not in (hint, *get_args(hint))


def outside(numbers, whole):
    "Numbers that the range leaves out, next to its ends and far away"
    step = 1 if whole else 1e-6
    if numbers.low > -math.inf:
        yield numbers.low - step
        yield numbers.low - 1000
        if numbers.open_low:
            yield numbers.low
    if numbers.high < math.inf:
        yield numbers.high + step
        yield numbers.high + 1000
        if numbers.open_high:
            yield numbers.high


def test_every_number_has_a_range():
    ranged = {(at, name) for at, _, name, _ in ranges()}
    bare = [
        at + name
        for at, cls in parts()
        for name, hint in get_type_hints(cls).items()
        if numeric(hint) and (at, name) not in ranged
    ]
    assert bare == [] and len(ranged) > 70


@pytest.mark.parametrize('at, cls, name, numbers', list(ranges()), ids=lambda x: str(x).strip('.'))
def test_a_number_outside_its_range_is_refused(at, cls, name, numbers):
    "Where it is made and where it is read from a file, by one line with name, value and fix"
    hint = get_type_hints(cls)[name]
    whole = int in (hint, *get_args(hint))
    many = get_origin(hint) is tuple
    bad = [*outside(numbers, whole), math.nan, math.inf, -math.inf, 'much', True]
    assert len(bad) > 6
    for value in bad:
        given = tuple([value] * len(getattr(cls(), name) or [0])) if many else value
        with pytest.raises(ValueError) as e:
            cls(**{name: given})
        said = str(e.value)
        assert re.match(rf'{name}(\[0\])?={re.escape(repr(value))}: ', said), said
        assert 'use ' in said and '\n' not in said
        with pytest.raises(ValueError) as e:
            config_from_dict(cls, {name: given}, at)
        assert str(e.value) == at + said


@pytest.mark.parametrize('preset', ['tiny-cpu', 'one-node'])
def test_help_shows_every_range(preset, capsys, monkeypatch):
    monkeypatch.setenv('COLUMNS', '100')  # one column
    with pytest.raises(SystemExit):
        parse_train([preset, '--help-all'])
    told = ' '.join(re.sub(r'[│╭╮╰╯─]', ' ', capsys.readouterr().out).split())
    for at, _, name, numbers in ranges():
        flag = f'--{at}{name}'.replace('_', '-')
        line = re.search(re.escape(flag) + r' (?!-).*?default: [^)]*\)', told)
        assert line and f'({numbers}; default: ' in line[0], flag


def test_words_of_ranges():
    said = {
        at_least(1): 'at least 1',
        above(0): 'more than 0',
        above(0, up_to=1): 'more than 0, at most 1',
        above(0, below=1): 'more than 0, less than 1',
        at_least(0, below=1): 'at least 0, less than 1',
        between(0, 20): '0 to 20',
    }
    assert [str(k.help_behavior_hint) for k in said] == list(said.values())


def test_every_token_that_ends_a_response_is_in_the_vocabulary():
    policy = replace(TrainConfig().policy, eos_token_id=(1, 2))
    assert TrainConfig(policy=policy).policy.eos_ids == (1, 2)
    size = policy.vocab_size
    with pytest.raises(ValueError, match=f'policy.eos_token_id={size}: use less than'):
        TrainConfig(policy=replace(policy, eos_token_id=(1, size)))


# ---- the recipes of CONTRIBUTING


def test_an_engine_has_a_name_and_a_row():
    "The names on the command line are those of the tables that build engines"
    from compassrl.runs.factory import rollout_engines, train_engines

    assert get_args(RolloutEngineName) == tuple(rollout_engines)
    assert get_args(TrainEngineName) == tuple(train_engines)


FIELD = """
    look_ahead: Annotated[int, at_least(1)] = 7  # Steps of a new optimiser
"""
NEW_SETTING = """
import contextlib, dataclasses, io, json
from compassrl.config import TrainConfig, config_from_dict
from compassrl.runs.cli import parse_train
c = parse_train(['tiny-cpu', '--optim.look-ahead', '3'])
page = io.StringIO()
with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit):
    parse_train(['tiny-cpu', '--help-all'])
read = config_from_dict(TrainConfig, json.loads(json.dumps(dataclasses.asdict(c))))
assert c.optim.look_ahead == read.optim.look_ahead == 3
text = ' '.join(page.getvalue().split())
assert '--optim.look-ahead INT' in text
assert 'Steps of a new optimiser (at least 1; default: 7)' in text
try:
    parse_train(['tiny-cpu', '--optim.look-ahead', '0'])
except ValueError as e:
    assert 'look_ahead=0: use at least 1' in str(e)
"""


def test_a_setting_is_one_field(tmp_path):
    "It is then a flag with its range, a line of `--help` and a key of config.json"
    copy = tmp_path / 'compassrl'
    shutil.copytree(ROOT / 'compassrl', copy, ignore=shutil.ignore_patterns('__pycache__'))
    module = copy / 'train/train_settings.py'
    before, head, after = module.read_text().partition(
        '    "AdamW and how a batch is cut for it"\n'
    )
    assert head
    module.write_text(before + head + FIELD + after)
    env = {**os.environ, 'PYTHONPATH': str(tmp_path), 'COLUMNS': '200'}
    run = [sys.executable, '-c', NEW_SETTING]
    r = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert not r.returncode, r.stderr


@pytest.mark.parametrize(
    'make', [lambda u: VllmConfig(urls=(u,)), lambda u: GenRMConfig(base_url=u)]
)
def test_an_address_with_a_password_is_refused(make):
    "Settings are written into reports; the message does not repeat it"
    make('https://host:8000/v1?at=a@b')
    for url in ('http://me:secret@host/v1', 'https://me@host'):
        with pytest.raises(ValueError, match='put a key into the environment') as e:
            make(url)
        assert 'me' not in str(e.value).split(':')[0] and 'secret' not in str(e.value)


def test_a_run_of_earlier_code_can_be_read(tmp_path):
    "It noted the hash of a reward file among the settings; any other unknown key is refused"
    d = json.loads(json.dumps(dataclasses.asdict(presets['smoke-cpu']())))
    d['rewards']['function_sha256'] = {'reward.py': '0' * 64}
    (tmp_path / 'config.json').write_text(json.dumps(d))
    assert read_run_config(tmp_path) == presets['smoke-cpu']()
    d['rewards']['function_sha'] = {}
    (tmp_path / 'config.json').write_text(json.dumps(d))
    with pytest.raises(ValueError, match='rewards.function_sha'):
        read_run_config(tmp_path)
