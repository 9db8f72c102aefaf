"From a config to machines: who trains and who serves, whether it fits"

from dataclasses import replace

import pytest

from compassrl.launch import plan as module
from compassrl.launch.plan import machines, plan, workload
from compassrl.model.policy import PolicyConfig
from compassrl.rollout.rollout_settings import VllmConfig
from compassrl.runs import factory
from compassrl.runs.presets import one_gpu, smoke_cpu
from compassrl.train.megatron.parallel import ParallelConfig
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
        (smoke_cpu(), 1, 2, "2 ranks: train_engine='torch' is one process"),
        (ONE_PROMPT, 1, 5, 'a step has 4 responses'),
    ],
)
def test_refusals(cfg, nodes, per_node, said):
    with pytest.raises(ValueError, match=said):
        machines(cfg, nodes, per_node)


# ---- plans


def test_plan():
    "Layout with servers, and an estimate; refused where it does not fit, with a way out"
    p = plan(BIG, 6, 8, 'H200')
    assert len(p.layout.places) == 32 and p.layout.num_nodes == 6
    assert [s.node for s in p.layout.servers] == [4, 4, 5]
    assert set(p.estimate.times) == {'rollout_s', 'sync_s', 'log_probs_s', 'update_s'}
    assert workload(BIG).responses == 1024
    assert workload(BIG).response_tokens == 1536
    assert workload(BIG, 1.0).response_tokens == 3072
    with pytest.raises(ValueError, match='of the 80 GB of a H100.*use parallel.tp='):
        plan(BIG, 6, 8, 'H100')
    with pytest.raises(ValueError, match=r"gpu='H1000': use one of \['A100"):
        plan(BIG, 6, 8, 'H1000')
    with pytest.raises(ValueError, match='ep=3 does not divide num_experts=8'):
        plan(replace(TWO, parallel=ParallelConfig(ep=3)))
    small = plan(replace(TWO, rollout_engine='pool', vllm=VllmConfig(num_replicas=2)))
    assert len(small.layout.places) == len(small.layout.servers) == 2
    assert small.layout.num_nodes == 1
    assert small.estimate.times == {} and 'CPU' in small.estimate.table()
    with pytest.raises(ValueError, match='nowhere'):
        plan(replace(TWO, init_from='nowhere'))
