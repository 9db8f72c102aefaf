"A checkpoint is taught by all ranks of Megatron-Core, to the weights that one process gives it"

import json
import os
from dataclasses import replace
from unittest.mock import patch

import pytest

pytest.importorskip('megatron.core')

import torch.distributed as dist  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from compassrl.config import TrainConfig  # noqa: E402
from compassrl.data.prompts import DataConfig  # noqa: E402
from compassrl.data.tokenizer import build_tokenizer, save_tokenizer  # noqa: E402
from compassrl.loop import Stop  # noqa: E402
from compassrl.model.policy import PolicyConfig  # noqa: E402
from compassrl.model.pretrained import save_pretrained  # noqa: E402
from compassrl.rollout.torch_rollout import RolloutConfig  # noqa: E402
from compassrl.runs import factory  # noqa: E402
from compassrl.runs.cold_start import start_policy  # noqa: E402
from compassrl.runs.run_data import load, resolve  # noqa: E402
from compassrl.train.megatron.parallel import ParallelConfig  # noqa: E402
from compassrl.train.sft import SFTConfig  # noqa: E402
from compassrl.train.torch_train import OptimConfig  # noqa: E402
from tests.support.ranks import lively, run_ranks  # noqa: E402
from tests.support.stops import StopAfter

CFG = TrainConfig(
    prompts_per_step=4,
    data=DataConfig(num_train=24, num_heldout=4),
    policy=PolicyConfig(max_position_embeddings=128),
    rollout=RolloutConfig(max_tokens=24, temperature=0.7),  # the cold start knows no temperature
    cold_start=SFTConfig(steps=4, batch_size=8, warmup_steps=1, lr=1e-3),
    optim=OptimConfig(num_mini_batches=2, micro_batch_tokens=300),
)


def taught(cfg, folder, num=99):
    "One command, on every rank; on rank 0 the next engine's first weight as well"
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    with patch.dict(os.environ, dict(RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)):
        watch = factory.prepare(resolve(cfg))
        kind = factory.train_engines['megatron']
        if rank != '0':
            return kind.follow(watch)
        cfg = resolve(cfg)
        try:
            start_policy(cfg, load(cfg), folder, StopAfter(num), watch)
        except Stop:
            return sorted(p.name for p in (folder / 'cold_start').glob('step-*'))
        with kind.start(factory.train_setup(cfg), folder / 'start', watch) as engine:
            return {k: v.clone() for k, v in engine.weights()}


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
    "Model, and what the embedded engine makes of it"
    home = tmp_path_factory.mktemp('alone')
    save_pretrained(lively(CFG.policy), home / 'model')
    save_tokenizer(build_tokenizer(), home / 'model')
    cfg = resolve(replace(CFG, init_from=str(home / 'model')))
    start_policy(cfg, load(cfg), home, StopAfter(99))
    return home


def losses(folder):
    return [json.loads(line)['loss'] for line in (folder / 'cold_start.jsonl').open()]


@pytest.mark.parametrize('num, layout', [(1, {}), (2, {}), (2, dict(ep=2))], ids=['1', 'dp', 'ep'])
def test_all_ranks_teach_a_checkpoint(alone, tmp_path, num, layout):
    "Without a break, or stopped after two steps and gone on with: then RL's engine has the weights"
    cfg = replace(CFG, init_from=str(alone / 'model'), train_engine='megatron')
    cfg = replace(cfg, parallel=ParallelConfig(**layout))
    if layout or num == 1:
        (there, *_) = run_ranks(num, taught, cfg, tmp_path, 2)
        assert there and not (tmp_path / 'start').exists() and 0 < len(losses(tmp_path)) < 4
    weights = run_ranks(num, taught, cfg, tmp_path)[0]
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-3)
    want, got = (load_file(f / 'start' / 'model.safetensors') for f in (alone, tmp_path))
    before = load_file(alone / 'model' / 'model.safetensors')
    moved = max((want[k] - before[k]).abs().max() for k in want)
    assert want.keys() == got.keys() and moved > 1e-3
    assert max((want[k] - got[k]).abs().max() for k in want) < 0.05 * moved
    assert all(weights[k].equal(got[k]) for k in got)
    assert not (tmp_path / 'cold_start').exists()


def test_a_new_policy_is_taught_by_one_process(tmp_path):
    "Whatever trains it later: the same bytes"
    one = replace(CFG, cold_start=replace(CFG.cold_start, steps=1))
    files = []
    for name, cfg in dict(a=one, b=replace(one, train_engine='megatron')).items():
        (tmp_path / name).mkdir()
        start_policy(cfg, load(cfg), tmp_path / name, StopAfter(9))
        files.append((tmp_path / name / 'start' / 'model.safetensors').read_bytes())
    assert files[0] == files[1]
