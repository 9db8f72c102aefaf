"One object for all settings: refused at once if wrong, the same as flags and as a file"

import dataclasses
import json

import pytest

from compassrl.algo.espo import EspoConfig
from compassrl.algo.losses import LossConfig
from compassrl.config import TrainConfig, config_from_dict, read_run_config
from compassrl.model.policy import PolicyConfig
from compassrl.rollout.torch_engine import RolloutConfig
from compassrl.runs.cli import presets


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
