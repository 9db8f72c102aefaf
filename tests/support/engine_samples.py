"Samples of every rollout engine from one checkpoint, for tests whose own process stays without vLLM"

import pickle

import torch

from compassrl.model.policy import PolicyConfig
from compassrl.model.pretrained import from_pretrained, hf_weights
from compassrl.records import Request, SamplingParams, derive_seed
from compassrl.rollout.torch_engine import TorchRollout
from compassrl.rollout.vllm.config import VllmConfig

POLICY = PolicyConfig(
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
)  # what vLLM computes on a CPU


def sample(kind, folder):
    "Two responses to each of six prompts"
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
        return sorted(engine.generate(requests), key=lambda s: (s.prompt_id, s.index))
    finally:
        getattr(engine, 'close', lambda: None)()


def write_samples(kinds, folder):
    for k in kinds:
        (folder / k).write_bytes(pickle.dumps(sample(k, folder)))


def shared_prefixes(folder):
    "Requests that share two cached blocks and finish in a stream: every row has its route, which is the policy's own"
    from compassrl.rollout.vllm.in_process import VllmRollout

    policy = from_pretrained(folder)
    e = VllmRollout(folder, num_slots=4)
    e.load_weights(hf_weights(policy), 0)
    prefix = tuple(
        torch.randint(
            2, policy.config.vocab_size, (70,), generator=torch.Generator().manual_seed(0)
        ).tolist()
    )  # two blocks and more
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
