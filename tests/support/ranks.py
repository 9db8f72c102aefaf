"""What the tests of the distributed engines share: ranks, a lively policy, packed sequences, one
pass through Megatron-Core"""

from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

import compassrl.train.megatron.cpu  # noqa: F401  before Megatron-Core, which it makes lighter

# isort: split
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import hf_weights as policy_weights
from compassrl.train.megatron.cpu import megatron_calls
from compassrl.train.megatron.model import build_model, init_parallel
from compassrl.train.megatron.parallel import ParallelConfig
from compassrl.train.megatron.weights import gather_hf_weights, load_hf
from course.gradients import hf_gradients
from course.ranks import RankError, run_ranks  # noqa: F401

MIXED = PolicyConfig(
    vocab_size=99, num_hidden_layers=4, moe_intermediate_size=32, mlp_only_layers=(1,)
)  # 99: odd
DENSE = replace(MIXED, num_hidden_layers=2, mlp_only_layers=(0, 1))
LAYOUTS = [  # (ranks, how)
    (1, {}),
    (2, {}),
    (2, dict(tp=2)),
    (2, dict(tp=2, etp=1)),
    (2, dict(ep=2)),
    (2, dict(etp=2)),
    (2, dict(pp=2)),
    (2, dict(pp=2, vpp=2)),
    (4, dict(tp=2)),
    (4, dict(tp=2, ep=2)),
    (4, dict(tp=2, ep=2, etp=1)),
    (4, dict(pp=2, ep=2)),
    (4, dict(tp=2, pp=2, ep=2, etp=1)),
    (4, dict(pp=2, vpp=2, ep=2)),
    (4, dict(tp=2, pp=2, vpp=2)),
    (4, dict(tp=2, ep=4, etp=1)),
    (4, dict(pp=4)),
]


def name(layout):
    return f'{layout[0]}-' + ('-'.join(f'{k}{v}' for k, v in layout[1].items()) or 'dp')


def lively(config, seed=5):
    "A policy whose routers, norms and rows all differ, so that nothing can be swapped unseen"
    policy, g = Policy(config, seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters():
            if p.dim() > 1:
                p.mul_(4)
            p.add_(torch.randn(p.shape, generator=g), alpha=0.1)
    return policy


def sequences(lengths=(5, 9, 2, 8), vocab=99, seed=3):
    "(tokens, labels) of each length"
    g = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, vocab, (2, n), generator=g)) for n in lengths]


def packed(parts, tp=1):
    """ids [1, T], positions [1, T], labels [T] (-100 = none) and where each sequence ends; T is a
    multiple of `tp`"""
    lengths = [len(x) for x, _ in parts]
    if n := -sum(lengths) % tp:
        parts, lengths = [*parts, (torch.zeros(n).long(), torch.full((n,), -100))], [*lengths, n]
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    params = PackedSeqParams(
        'thd',
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    ids, labels = (torch.cat([p[i] for p in parts]) for i in (0, 1))
    return ids[None], torch.cat([torch.arange(n) for n in lengths])[None], labels, params


def one_process(policy, parts):
    "Logits of each sequence and the gradient of the mean cross-entropy, by the embedded policy"
    policy.zero_grad()
    logits = [policy.logits(policy(x[None])[0]) for x, _ in parts]
    losses = [F.cross_entropy(a, y, reduction='sum') for a, (_, y) in zip(logits, parts)]
    (sum(losses) / sum(len(x) for x, _ in parts)).backward()
    return [a.detach() for a in logits], {k: v.clone() for k, v in hf_gradients(policy)}


def run_schedule(models, config, tp, micro_batches, total):
    """One forward and backward pass of this rank's micro-batches (lists of sequences); logits of
    each on the last stage"""
    seen = {}

    def step(batches, model):
        i, parts = next(batches)
        ids, positions, labels, params = packed(parts, tp)

        def loss(out):
            logits = gather_from_tensor_model_parallel_region(out)[0, :, : config.vocab_size]
            seen[i] = logits[labels >= 0].detach()
            scale = (
                len(micro_batches) * mpu.get_data_parallel_world_size() / total
            )  # Megatron-Core divides by both
            return F.cross_entropy(logits.float(), labels, reduction='sum') * scale, {}

        return model(ids, positions, None, packed_seq_params=params), loss

    data = [iter(micro_batches) for _ in models]
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=data if len(models) > 1 else data[0],
        model=models if len(models) > 1 else models[0],
        num_microbatches=len(micro_batches),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    return seen


def wrapped(pieces, distributed=False):
    "With Megatron-Core's data parallelism around each piece"
    cfg = pieces[0].config
    cfg.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, grad_reduce_in_fp32=True
    )
    models = [DistributedDataParallel(cfg, ddp, m) for m in pieces]
    for m in models:
        m.zero_grad_buffer()
    return models


def model_pass(parallel, policy, parts, replay=False):
    """On every rank: logits by sequence, and on rank 0 gradients by Hugging Face name; each
    sequence a micro-batch"""
    init_parallel(parallel, timeout_s=60)
    config = policy.config
    pieces = build_model(config, parallel, router_replay=replay)
    load_hf(pieces, config, policy_weights(policy))
    with megatron_calls():
        mine = [(i, [p]) for i, p in enumerate(parts)][
            mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()
        ]
        models = wrapped(pieces)
        logits = run_schedule(models, config, parallel.tp, mine, sum(len(x) for x, _ in parts))
    return logits, {
        k: v.clone() for k, v in gather_hf_weights(pieces, config, lambda p: p.main_grad)
    }


def rank():
    return dist.get_rank()


def layout(kw):
    return ParallelConfig(**kw)
