"Engines at work, for tests whose own process stays without vLLM"

import importlib
import pickle
import pkgutil
import sys
from collections import Counter

import torch
import torch.distributed as dist

import compassrl
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import from_pretrained, hf_weights
from compassrl.records import Request, SamplingParams, derive_seed
from compassrl.rollout.episodes import Episodes
from compassrl.rollout.rollout_settings import VllmConfig
from compassrl.rollout.torch_rollout import TorchRollout

POLICY = PolicyConfig(  # what vLLM computes on a CPU
    vocab_size=70,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=96,
    moe_intermediate_size=32,
    mlp_only_layers=(0,),
    max_position_embeddings=96,
)


class Echo:
    "A tool of token ids, without a tokenizer: says the last two of them backwards"

    def __init__(self, stop_id, max_calls=3, first=9):
        self.stop_ids, self.max_calls, self.first = (stop_id,), max_calls, first

    def ends(self, ids):
        return True

    def begin(self, prompt_id, calls=()):
        return lambda ids: (self(ids), False)

    def __call__(self, ids):
        return [self.first, *list(ids)[-3:-1][::-1]]


def calling(engine, plain):
    "Four episodes, called by the token that this policy likes best"
    liked = Counter(i for s in plain for i in s.response_ids if i != 1).most_common(1)[0][0]
    params = SamplingParams(30, 0.8, stop_ids=(1,))
    asked = [Request(f'e{i // 2}', (5, 6 + i // 2), i % 2, i, params) for i in range(4)]
    return list(Episodes(engine, Echo(liked)).generate(asked))


def sample(kind, folder):
    "Two responses to each of six prompts, and to each of two in which a tool is called"
    if kind == 'torch':
        engine = TorchRollout(POLICY, 8, torch.float)
    elif kind == 'vllm':
        from compassrl.rollout.vllm.in_process import VllmRollout

        engine = VllmRollout(folder, num_slots=8)
    else:
        from compassrl.rollout.vllm.pool import VllmPool

        engine = VllmPool(folder, VllmConfig(num_replicas=2), num_slots=4)
    try:
        engine.load_weights(hf_weights(from_pretrained(folder)), 0)
        requests = [
            Request(
                f'p{i // 2}',
                (5 + i // 2, 6, 7)[: 1 + i // 2 % 3],
                i % 2,
                derive_seed(i),
                SamplingParams(6 + i, 0.8, stop_ids=(1,)),
            )
            for i in range(12)
        ]
        plain = list(engine.generate(requests))
        return sorted(plain + calling(engine, plain), key=lambda s: (s.prompt_id, s.index))
    finally:
        engine.close()


def write_samples(kinds, folder):
    for k in kinds:
        (folder / k).write_bytes(pickle.dumps(sample(k, folder)))


def shared_prefixes(folder):
    "Requests that share two cached blocks: every row has its route, which is the policy's own"
    from compassrl.rollout.vllm.in_process import VllmRollout

    policy = from_pretrained(folder)
    e = VllmRollout(folder, num_slots=4)
    e.load_weights(hf_weights(policy), 0)
    g = torch.Generator().manual_seed(0)  # two blocks and more
    prefix = tuple(torch.randint(2, policy.config.vocab_size, (70,), generator=g).tolist())
    requests = [
        Request(f'p{i % 2}', prefix + (3 + i % 2,), i, i, SamplingParams(8)) for i in range(10)
    ]
    samples = list(e.generate(requests))
    assert len(samples) == 10 and len({s.index for s in samples[:5]}) == 5
    for s in samples:
        assert (
            len(s.routed_experts) == len(s.prompt_ids) + len(s.response_ids) - 1
            and s.routes_valid.all()
        )
        _, own = policy(torch.tensor([s.prompt_ids + s.response_ids]))
        same = (own[:-1, 1:].sort(-1)[0] == s.routed_experts[:, 1:].long().sort(-1)[0]).all(-1)
        assert same.float().mean() > 0.99, same.float().mean()
    e.close()
    print('all routes are there')


def import_all_but_engines():
    for m in pkgutil.walk_packages(compassrl.__path__, 'compassrl.'):
        engine = '.vllm.' in m.name or '.megatron.' in m.name
        if not engine and not m.name.endswith('__main__'):
            importlib.import_module(m.name)


def late_vllm(folder):
    """Two engines, one after the other is closed; then one beside a process group of somebody else.
    None compiles"""
    import_all_but_engines()
    import tests.support.gc_frozen  # noqa: F401
    from compassrl.rollout.vllm.in_process import VllmRollout

    assert 'vllm' not in sys.modules and 'megatron' not in sys.modules
    from torch._dynamo.utils import counters
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as factory

    def engine():
        return VllmRollout(folder, num_slots=4)

    def responses(e):
        e.load_weights(hf_weights(Policy(e.config)), 0)
        request = Request('p', (4, 5, 6), params=SamplingParams(9))
        return [s.response_ids for s in e.generate([request])]

    assert 'compassrl' not in factory._registry
    a, b = engine(), engine()
    assert factory._registry['compassrl']().__name__ == 'PartTransfer'
    first = responses(a)
    a.close()
    assert responses(b) == first and dist.is_initialized()
    b.close()
    assert not dist.is_initialized()
    dist.init_process_group('gloo', init_method='tcp://127.0.0.1:0', rank=0, world_size=1)
    c = engine()
    assert responses(c) == first
    c.close()
    assert not counters['frames'], 'a CPU waits for no compiler'
    x = torch.ones(2)
    dist.all_reduce(x)
    dist.destroy_process_group()
    print('all', x.sum().item())
