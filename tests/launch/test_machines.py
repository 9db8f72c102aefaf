"From a config to machines: who trains and who serves, whether it fits"

from dataclasses import replace

import pytest

from compassrl.launch import machines as module
from compassrl.launch.machines import machines, plan_run
from compassrl.launch.scripts import node_script
from compassrl.model.policy import PolicyConfig
from compassrl.plan.memory import workload
from compassrl.rollout.rollout_settings import VllmConfig
from compassrl.runs import factory
from compassrl.runs.presets import one_gpu, smoke_cpu
from compassrl.runs.run_data import resolve
from compassrl.train.megatron.parallel import ParallelConfig
from course.step_times import step_times
from tests.support.families import FAMILIES, original
from tests.support.faults import noticed, planted

Q30 = PolicyConfig(151936, 2048, 48, 32, 4, 128, 6144, 768, 128, 8, max_position_embeddings=8192)
BIG = replace(
    one_gpu(),
    policy=Q30,
    train_engine='megatron',
    rollout_engine='pool',
    run_dir='my runs/a',
    parallel=ParallelConfig(tp=4, ep=8, etp=1, dtype='bfloat16'),
    vllm=VllmConfig(num_replicas=3, tensor_parallel=4),
)
TWO = replace(
    smoke_cpu(),
    steps=2,
    save_every=0,
    eval_every=0,
    train_engine='megatron',
    parallel=ParallelConfig(ep=2),
)
ONE_PROMPT = replace(TWO, prompts_per_step=1, parallel=ParallelConfig())


# ---- who does what


def whole_nodes(m):
    "On one node the servers take some of its GPUs; on several whole nodes, the last ones"
    assert m.machines(BIG, 6, 8) == m.Machines(4, 8, 2, 2)
    assert m.machines(BIG, 1, 20) == m.Machines(1, 8)
    nine = replace(BIG, vllm=VllmConfig(num_replicas=9, tensor_parallel=2))
    assert m.machines(nine, 8, 8) == m.Machines(5, 8, 3, 4)
    assert m.machines(replace(BIG, vllm=VllmConfig(urls=('http://a:1',))), 4, 8) == m.Machines(4, 8)
    assert m.machines(replace(BIG, rollout_engine='torch'), 4, 8) == m.Machines(4, 8)
    assert m.machines(replace(BIG, device='cpu'), 1, 8) == m.Machines(1, 8), 'processes need no GPU'
    colocated = VllmConfig(num_replicas=2, tensor_parallel=4, colocated=True)
    assert m.machines(replace(BIG, vllm=colocated), 1, 8) == m.Machines(1, 8), 'they share GPUs'


def smallest(m):
    "Without a number of GPUs: as few as the layout can have, and those of the servers"
    assert m.machines(BIG) == m.Machines(1, 8) and m.machines(TWO) == m.Machines(1, 2)
    assert m.machines(smoke_cpu()) == m.Machines(1, 1)
    P = ParallelConfig

    def fewest(parallel):
        return m.machines(replace(BIG, rollout_engine='torch', parallel=parallel)).world_size

    assert fewest(P(tp=2, ep=3, etp=1)) == 6
    assert fewest(P(tp=4, pp=2)) == 8
    assert fewest(P(pp=3)) == 3
    assert fewest(P(tp=2, ep=2)) == 4
    assert fewest(P(ep=4, etp=1)) == 4


@pytest.mark.parametrize('law', [whole_nodes, smallest])
def test_machines(law):
    law(module)


@pytest.mark.parametrize(
    'old, new',
    [
        ('per_node-taken)', 'per_node)'),
        ('nodes-serving', 'nodes'),
        ('per_node//v.tensor_parallel', 'per_node'),
        ('not cfg.vllm.urls and', ''),
        ('not cfg.vllm.colocated and', ''),
        ("and cfg.device=='cuda'", ''),
        ('lcm(p.tp*p.cp, p.expert_tp*p.ep)', 'p.tp*p.cp*p.expert_tp*p.ep'),
    ],
)
def test_faults_are_noticed(old, new):
    assert noticed([whole_nodes, smallest], planted((factory, module), old, new), ValueError)


@pytest.mark.parametrize(
    'cfg, nodes, per_node, said',
    [
        (BIG, 0, 8, 'nodes=0'),
        (BIG, 1, 8, '1 x 8 GPUs: 3 servers of 4 leave none'),
        (BIG, 2, 8, '2 x 8 GPUs: 3 servers'),
        (BIG, 6, 3, r'vllm.tensor_parallel=4: a node has 3 GPUs'),
        (smoke_cpu(), 1, 2, "2 processes: train_engine='torch' is one, start it without torchrun"),
        (ONE_PROMPT, 1, 5, 'a step has 4 responses'),
    ],
)
def test_refusals(cfg, nodes, per_node, said):
    with pytest.raises(ValueError, match=said):
        machines(cfg, nodes, per_node)


# ---- plans


def test_plan():
    "Layout with servers, and an estimate; refused where it does not fit, with a way out"
    p = plan_run(BIG, 6, 8, 'H200')
    assert len(p.layout.places) == 32 and p.layout.num_nodes == 6
    assert [s.node for s in p.layout.servers] == [4, 4, 5]
    assert p.estimate.server['cached_tokens'] > 1e5
    times = step_times(p.estimate, BIG.vllm, rollout=BIG.rollout)
    assert set(times) == {'rollout_s', 'sync_s', 'log_probs_s', 'update_s'}
    assert workload(BIG).responses == 1024
    assert workload(BIG).response_tokens == 1536
    assert workload(BIG, 1.0).response_tokens == 3072
    with pytest.raises(ValueError, match='of the 80 GB of a H100.*use parallel.tp='):
        plan_run(replace(BIG, parallel=replace(BIG.parallel, tp=1)), 6, 8, 'H100')
    with pytest.raises(ValueError, match=r"gpu='H1000': use one of \['A100"):
        plan_run(BIG, 6, 8, 'H1000')
    with pytest.raises(ValueError, match='ep=3 does not divide num_experts=8'):
        plan_run(replace(TWO, parallel=ParallelConfig(ep=3)))
    pool = replace(TWO, rollout_engine='pool', vllm=VllmConfig(num_replicas=2))
    with pytest.raises(ValueError, match='head_dim=16: attention on a CPU needs'):
        plan_run(pool)
    small = plan_run(replace(pool, policy=replace(TWO.policy, head_dim=32)))
    assert len(small.layout.places) == len(small.layout.servers) == 2
    assert small.layout.num_nodes == 1
    assert small.estimate.server == {} and 'CPU' in small.estimate.table()
    with pytest.raises(ValueError, match='nowhere'):
        plan_run(replace(TWO, init_from='nowhere'))


# ---- a plan and a run refuse the same


def refusal(ask, *args):
    try:
        ask(*args)
    except ValueError as e:
        return str(e)


CASES = {
    'as it is': (1, {}),
    'two ranks': (2, {}),
    'three ranks': (3, {}),
    'split experts': (2, dict(parallel=ParallelConfig(ep=2))),
    'split context': (2, dict(parallel=ParallelConfig(cp=2))),
    'in process': (1, dict(rollout_engine='vllm')),
    'in two processes': (2, dict(rollout_engine='vllm')),
    'servers': (1, dict(rollout_engine='pool')),
    'servers by NCCL': (1, dict(rollout_engine='pool', vllm=VllmConfig(sync='nccl'))),
    'colocated': (1, dict(rollout_engine='pool', vllm=VllmConfig(colocated=True))),
    'no routes': (1, dict(rollout_engine='vllm', router_replay='off')),
}


@pytest.mark.parametrize('train_engine', factory.train_engines)
@pytest.mark.parametrize('family', FAMILIES)
def test_a_plan_accepts_what_a_run_accepts(family, train_engine, tmp_path, monkeypatch):
    "Every family on every engine: with the same message where both refuse"
    original(family, tmp_path)
    started = replace(smoke_cpu(), init_from=str(tmp_path), train_engine=train_engine)
    monkeypatch.setattr(factory, 'check_memory', lambda *args: None)
    alone = replace(factory.train_engines[train_engine], meet=lambda *args: None)
    monkeypatch.setitem(factory.train_engines, train_engine, alone)
    accepted = 0
    for name, (ranks, settings) in CASES.items():
        cfg = replace(started, **settings)
        monkeypatch.setenv('WORLD_SIZE', str(ranks))
        said = refusal(lambda c: factory.prepare(resolve(c)), cfg)
        assert refusal(plan_run, cfg, 1, ranks) == said, name
        accepted += said is None
    mapped = family in ('Qwen3', 'Qwen3-MoE')
    assert accepted >= (1 if train_engine == 'torch' or mapped else 0)
    if train_engine == 'torch':
        plan_run(started), node_script(started)


def test_a_shape_that_no_family_has_is_refused_by_both():
    odd = replace(smoke_cpu(), policy=PolicyConfig(family='llama', qk_norm='width'))
    assert refusal(resolve, odd) == refusal(plan_run, odd) is not None
