"The count on paper against engines that are built, and against the count of the launch notebooks"

from dataclasses import replace

import pytest
import torch

from compassrl.config import TrainConfig
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.plan import memory
from compassrl.plan.memory import check_memory, free_memory, memory_needed, num_params
from compassrl.plan.sizing import num_params as by_rank
from compassrl.rollout.torch_rollout import RolloutConfig, TorchRollout
from compassrl.train.torch_train import OptimConfig, adamw

SHAPES = [
    PolicyConfig(),
    PolicyConfig(tie_word_embeddings=True, num_hidden_layers=5, decoder_sparse_step=2),
    PolicyConfig(num_hidden_layers=4, mlp_only_layers=(0, 3, 9), num_experts=300),
    PolicyConfig(num_hidden_layers=6, decoder_sparse_step=3, mlp_only_layers=(1, 2, 2)),
    PolicyConfig(151936, 2048, 48, 32, 4, 128, 6144, 768, 128, 8, max_position_embeddings=40960),
]


@pytest.mark.parametrize('shape', SHAPES, ids=lambda c: str(c.num_hidden_layers))
def test_parameters(shape):
    with torch.device('meta'):
        built = sum(p.numel() for p in Policy(shape).parameters())
    assert num_params(shape) == built == by_rank(shape)[0]


def num_bytes(tensors):
    return sum(t.nbytes for t in tensors)


def test_what_a_trainer_holds():
    "Weights, gradients, and the moments of the optimiser after a step"
    policy = Policy(SHAPES[1])
    optim = adamw(policy, OptimConfig())
    for p in policy.parameters():
        p.grad = torch.ones_like(p)
    optim.step()
    weights = list(policy.parameters())
    moments = [t for s in optim.state.values() for t in s.values() if t.dim()]
    held = num_bytes(weights) + num_bytes(p.grad for p in weights) + num_bytes(moments)
    cfg = TrainConfig(policy=SHAPES[1])
    assert memory_needed(cfg)[0]['trainer'] == held
    loss = replace(cfg.loss, kl_coef=0.1)
    with_reference = memory_needed(replace(cfg, loss=loss))[0]['trainer']
    assert with_reference == held + num_bytes(weights)


@pytest.mark.parametrize('dtype', ['float32', 'float64', 'bfloat16'])
def test_what_a_rollout_holds(dtype):
    "Weights, and keys and values of the longest sequence in each slot"
    cfg = TrainConfig(policy=SHAPES[1], rollout=RolloutConfig(num_slots=7, dtype=dtype))
    engine = TorchRollout(cfg.policy, 7, getattr(torch, dtype))
    engine.slots.reserve(cfg.data.max_prompt_tokens + cfg.rollout.max_tokens, 1)
    held = num_bytes(engine.policy.parameters()) + engine.slots.kv.nbytes
    assert memory_needed(cfg)[0]['rollout'] == held


def test_ranks_share_the_trainer():
    cfg = TrainConfig(train_engine='megatron', init_from='m')
    whole = memory_needed(cfg)[0]['trainer']
    assert memory_needed(cfg, 4)[0]['trainer'] == whole / 4
    alone = replace(cfg, train_engine='torch')
    assert memory_needed(alone, 4)[0]['trainer'] == whole


def group(folder, limit, used, droppable):
    folder.mkdir()
    (folder / 'memory.max').write_text(f'{limit}\n')
    (folder / 'memory.current').write_text(f'{used}\n')
    (folder / 'memory.stat').write_text(f'anon 5\ninactive_file {droppable}\nfile 7\n')
    return (str(folder), 'memory.max', 'memory.current', 'inactive_file ')


def test_a_container_has_less(tmp_path, monkeypatch):
    machine = free_memory()
    assert 0 < machine < 2**60
    monkeypatch.setattr(memory, '_groups', [group(tmp_path / 'a', 5000, 3000, 1000)])
    assert free_memory() == 3000
    for name, limit in (('b', 'max'), ('c', 2**62)):
        monkeypatch.setattr(memory, '_groups', [group(tmp_path / name, limit, 3000, 1000)])
        assert free_memory() > 3000
    monkeypatch.setattr(memory, '_groups', [('/nosuch', 'a', 'b', 'c')])
    assert free_memory() > 3000


@pytest.mark.parametrize(
    'cfg, advice',
    [
        (TrainConfig(), 'use a smaller policy'),
        (TrainConfig(eval_k=9000, group_size=9), 'lower eval_k=9000'),
        (TrainConfig(rollout=RolloutConfig(num_slots=99_999)), 'lower rollout.num_slots=99999'),
        (TrainConfig(policy=PolicyConfig(num_experts=9999)), 'lower policy.num_experts=9999'),
    ],
)
def test_the_setting_that_asks_for_most_is_named(cfg, advice, monkeypatch):
    need = sum(sum(part.values()) for part in memory_needed(cfg))
    monkeypatch.setattr(memory, 'free_memory', lambda: need)
    check_memory(cfg)
    monkeypatch.setattr(memory, 'free_memory', lambda: need - 1)
    with pytest.raises(ValueError, match=advice + '$'):
        check_memory(cfg)
