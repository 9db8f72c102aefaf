"The count on paper against engines that are built; the panel and a run count alike"

from dataclasses import replace

import pytest
import torch

from compassrl.config import TrainConfig
from compassrl.launch.machines import plan_run
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.plan import memory
from compassrl.plan.memory import check_memory, free_memory, memory_needed, run_memory
from compassrl.plan.sizing import num_params
from compassrl.rollout.rollout_settings import VllmConfig
from compassrl.rollout.torch_rollout import RolloutConfig, TorchRollout
from compassrl.runs.presets import presets
from compassrl.train.megatron.parallel import ParallelConfig
from compassrl.train.torch_train import OptimConfig, adamw

MIXED = PolicyConfig(tie_word_embeddings=True, num_hidden_layers=5, decoder_sparse_step=2)
GLM = PolicyConfig(
    family='glm4_moe',
    qk_norm='none',
    router_score='sigmoid',
    shared_expert_intermediate_size=64,
    mlp_only_layers=(0,),
)
Q30 = PolicyConfig(151936, 2048, 48, 32, 4, 128, 6144, 768, 128, 8, max_position_embeddings=8192)


def num_bytes(tensors):
    return sum(t.nbytes for t in tensors)


@pytest.mark.parametrize('shape', [PolicyConfig(), MIXED, GLM], ids=['moe', 'mixed', 'glm'])
def test_what_a_trainer_holds(shape):
    "Weights, gradients, and the moments of the optimiser after a step; weights of a reference"
    policy = Policy(shape)
    optim = adamw(policy, OptimConfig())
    for p in policy.parameters():
        p.grad = torch.ones_like(p)
    optim.step()
    corrections = [b for name, b in policy.named_buffers() if name.endswith('correction')]
    weights = [*policy.parameters(), *corrections]
    moments = [t for s in optim.state.values() for t in s.values() if t.dim()]
    cfg = TrainConfig(policy=shape)
    held = run_memory(cfg)
    assert held['weights'] == num_bytes(weights) and held['optimizer'] == num_bytes(moments)
    assert held['gradients'] == num_bytes(p.grad for p in policy.parameters())
    assert 'reference' not in held
    with_reference = run_memory(replace(cfg, loss=replace(cfg.loss, kl_coef=0.1)))
    assert with_reference['reference'] == num_bytes(weights)


@pytest.mark.parametrize('dtype', ['float32', 'float64', 'bfloat16'])
def test_what_a_rollout_holds(dtype):
    "Weights, and keys and values of the longest sequence in each slot"
    cfg = TrainConfig(policy=MIXED, rollout=RolloutConfig(num_slots=7, dtype=dtype))
    engine = TorchRollout(cfg.policy, 7, getattr(torch, dtype))
    engine.slots.reserve(cfg.data.max_prompt_tokens + cfg.rollout.max_tokens, 1)
    held = num_bytes(engine.policy.parameters()) + engine.slots.kv.nbytes
    tokens = cfg.data.max_prompt_tokens + cfg.rollout.max_tokens
    prompts = engine.slots.kv.nbytes * cfg.data.max_prompt_tokens // tokens  # one for each slot
    assert run_memory(cfg)['rollout'] == held + prompts


def test_where_vllm_holds_its_weights():
    "In this process, or in servers on this CPU; other GPUs and machines have memory of their own"
    size = num_params(PolicyConfig())[0]

    def rollout(engine, device='cpu', dtype='bfloat16', **kw):
        how = RolloutConfig(dtype=dtype)
        cfg = TrainConfig(rollout_engine=engine, device=device, vllm=VllmConfig(**kw), rollout=how)
        return run_memory(cfg)['rollout'] / size

    assert rollout('vllm') == 2 == rollout('vllm', 'cuda') and rollout('vllm', dtype='float32') == 4
    assert rollout('vllm', 'cuda', colocated=True) == 0  # it sleeps while the trainer works
    assert rollout('pool', num_replicas=3) == 6
    assert rollout('pool', 'cuda', num_replicas=3) == 0 == rollout('pool', urls=('http://a:1',))


def test_ranks_share_the_trainer():
    "Experts by `ep`, the rest's optimiser by all; a cold start is done by one process alone"
    cfg = TrainConfig(train_engine='megatron', init_from='m', parallel=ParallelConfig(ep=2))
    whole, half = run_memory(replace(cfg, train_engine='torch')), run_memory(cfg, 2, 1)
    assert whole['optimizer'] == 2 * half['optimizer'] and half['weights'] > whole['weights'] / 2
    assert 'rollout' not in half and run_memory(cfg, 2)['rollout'] == whole['rollout']
    cold = run_memory(replace(cfg, init_from=''), 2)
    assert all(cold[k] == whole[k] for k in ('weights', 'gradients', 'optimizer'))
    on_device, _ = memory_needed(cfg, 2, 2)
    both = sum(sum(run_memory(cfg, 2, r).values()) for r in (0, 1))
    assert sum(on_device.values()) == both


def test_the_fullest_gpu_counts():
    "A middle stage has no vocabulary; the first one holds the most micro-batches"
    p = ParallelConfig(pp=4, ep=2, etp=1, dtype='bfloat16', recompute='full')
    cfg = replace(presets['one-node'](), policy=Q30, parallel=p)
    stages = [sum(run_memory(cfg, 8, r).values()) for r in (0, 2, 4, 6)]
    assert sum(memory_needed(cfg, 8)[0].values()) == max(stages) > min(stages)


MACHINES = {'one-node': (1, 8), 'multi-node': (4, 8), 'paper-base': (24, 8)}


@pytest.mark.parametrize('name', presets)
def test_panel_and_run_give_the_same_number(name):
    "The panel asks `plan_run`, the run `check_memory`: rank by rank the same parts"
    cfg = presets[name]()
    if name in ('one-node', 'multi-node'):
        cfg = replace(cfg, policy=Q30)
    p = plan_run(cfg, *MACHINES.get(name, (1, 0)))
    n, found = p.machines.world_size, p.estimate
    per_stage = n // len(found.stages)
    assert found.stages == [run_memory(cfg, n, s * per_stage) for s in range(len(found.stages))]
    if cfg.device == 'cuda' or n == 1:
        assert found.peak == sum(memory_needed(cfg, n)[0].values())


def test_a_model_of_30_billion_on_four_gpus():
    "Weights and gradients are not shared by all ranks, as a sixteenth part of 16 bytes would be"
    cfg = replace(presets['one-node'](), policy=Q30)
    assert round(sum(memory_needed(cfg, 4)[0].values()) / 1e9) == 147


Q06 = PolicyConfig(151936, 1024, 28, 16, 8, 128, 3072, max_position_embeddings=4096)
Q06 = replace(Q06, mlp_only_layers=tuple(range(28)), tie_word_embeddings=True)
# 1.3 G parameters, 0.4 G active
SMALL_MOE = PolicyConfig(49152, 1024, 24, 16, 8, 64, 512, 512, 32, 8, max_position_embeddings=4096)
BASE = presets['paper-base']().policy
FITS = [  # preset, policy, ranks that train, GB of a GPU, does it fit?
    ('one-gpu', Q06, 1, 24, True),
    ('one-gpu', Q06, 1, 80, True),
    ('one-gpu', SMALL_MOE, 1, 80, True),
    ('one-gpu', SMALL_MOE, 1, 24, False),
    ('one-gpu', Q30, 1, 141, False),
    ('one-node', SMALL_MOE, 4, 80, True),
    ('one-node', Q30, 4, 80, False),  # 147 GB: four H200 do not hold it either
    ('multi-node', Q30, 16, 80, True),
    ('paper-base', BASE, 128, 80, True),
    ('paper-base', BASE, 64, 80, False),
]


def test_the_base_of_the_paper_has_its_published_counts():
    "245 G parameters, 71 G active, of which a quarter of the experts"
    total, active = num_params(BASE)
    assert total == pytest.approx(245e9, rel=0.005) and active == pytest.approx(71e9, rel=0.01)
    assert (BASE.num_experts, BASE.num_experts_per_tok) == (16, 4)


@pytest.mark.parametrize('name, policy, ranks, size, fits', FITS)
def test_presets_fit_the_gpus_that_they_name(monkeypatch, name, policy, ranks, size, fits):
    "Public shapes, with activations, logits and caches; 3 GB are CUDA's"
    cfg = replace(presets[name](), policy=policy, init_from='m')
    room = size * 1e9 - 3e9
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda: (room, size * 1e9))
    monkeypatch.setattr(memory, 'free_memory', lambda: 1e12)
    if fits:
        return check_memory(cfg, ranks)
    with pytest.raises(ValueError, match='needs .* GB of memory') as refusal:
        check_memory(cfg, ranks)
    assert '\n' not in str(refusal.value)


def test_vllm_beside_the_trainer_needs_its_share(monkeypatch):
    cfg = replace(presets['one-gpu'](), policy=Q06, init_from='m')
    cfg = replace(cfg, vllm=replace(cfg.vllm, gpu_memory_utilization=0.8))
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda: (21e9, 24e9))
    with pytest.raises(ValueError, match='next to vllm.gpu_memory_utilization=0.8'):
        check_memory(cfg)


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


SHORT = TrainConfig(optim=OptimConfig(micro_batch_tokens=1), rollout=RolloutConfig(num_slots=1))


@pytest.mark.parametrize(
    'cfg, advice',
    [
        (TrainConfig(), 'lower optim.micro_batch_tokens=2048'),
        (SHORT, 'use a smaller policy'),
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
