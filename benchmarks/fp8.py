"""What FP8 saves in bytes, what it costs in accuracy, and, on a Hopper GPU, how much faster a
rollout is.

    python benchmarks/fp8.py [--quick] [--repeats 5] [--threads 1]

Bytes: the weights that a sync carries and that decoding reads for each step, in bfloat16 and in FP8
(codes of one byte for projections and experts, a 4-byte scale per 128x128; routers, embeddings,
head and norms stay). Accuracy: the embedded engine samples with FP8 weights, with activations too,
with keys and values too; the train engine computes the log-probs again in fp32, with live routers
and with replay. On a CPU the products are emulated: `emulation` is the time of FP8's rollout over
that of fp32, CPU seconds, taking turns. On a Hopper GPU (`torch._scaled_mm` has 1x128 by 128x128
scales there) the same engine rolls out a dense policy large enough to be bound by reading its
weights, in bfloat16 and in FP8: `rollout_speedup` (goal: 1.3 or more). Elsewhere it is "not run".

Last line: one JSON object. `ratio` is bytes in bfloat16 over bytes in FP8.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace

import torch

from compassrl.algo.engine_gap import discrepancy
from compassrl.algo.ratios import tis_weights
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import hf_weights
from compassrl.records import Request, SamplingParams, collate, derive_seed
from compassrl.rollout.fp8 import Fp8Rollout, quantise, takes_fp8
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.runs.summary import machine_info
from compassrl.train.torch_train import OptimConfig, TorchTrain

NOT_RUN = 'not run: needs a Hopper GPU'
ENGINES = {
    'fp32': None,
    'weights': dict(activations=False),
    'weights+activations': {},
    'weights+activations+kv': dict(kv_cache=True),
}


def requests(vocab, prompts, new, length=16):
    ids = torch.randint(
        2, vocab, (prompts, length), generator=torch.Generator().manual_seed(0)
    ).tolist()
    return [
        Request(f'p{i:04}', tuple(x), 0, derive_seed(i), SamplingParams(new))
        for i, x in enumerate(ids)
    ]


def num_bytes(policy):
    "Of all weights, and of those that are quantised: (bfloat16, FP8)"
    whole, part = [0, 0], [0, 0]
    for name, w in hf_weights(policy):
        eight = sum(t.nbytes for t in quantise(w)) if takes_fp8(name) else 2 * w.numel()
        for total in (whole, part) if takes_fp8(name) else (whole,):
            total[0] += 2 * w.numel()
            total[1] += eight
    return whole, part


def build(kw, policy, slots, dtype=torch.float32, device='cpu'):
    make = TorchRollout if kw is None else Fp8Rollout
    e = make(policy.config, slots, dtype, device, **kw or {})
    e.load_weights(hf_weights(policy), 0)
    return e


def mismatch(samples, policy):
    out, batch = {}, collate(sorted(samples, key=lambda s: s.prompt_id))
    for mode in ('off', 'R3'):
        b = batch.map(lambda t: t)
        b = replace(b, **TorchTrain(policy, OptimConfig(), replay=mode).score(b))
        found, (_, cut) = (
            discrepancy(b),
            tis_weights(b.old_log_probs, b.rollout_log_probs, b.response_mask, cap=2.0),
        )
        out[mode] = dict(
            mean_abs=found['rollout_train_gap'],
            k3=found['rollout_train_k3'],
            beyond_2=found['rollout_train_f2'],
            tis_cut=float(cut[b.response_mask].float().mean()),
        )
    return {mode: {k: float(f'{v:.3g}') for k, v in m.items()} for mode, m in out.items()}


def rollout_time(engine, rs, clock):
    start = clock()
    list(engine.generate(rs))
    return clock() - start


def turns(engines, rs, repeats, clock=time.process_time):
    "Time of the second over that of the first, the median of rounds in which they take turns"
    for e in engines:
        rollout_time(e, rs, clock)
    ratios = []
    for _ in range(repeats):
        a, b = (rollout_time(e, rs, clock) for e in engines)
        ratios.append(b / a)
    return round(statistics.median(ratios), 3)


def on_gpu(repeats, quick):
    "bfloat16 over FP8, seconds of the clock, and the GPU's name"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return NOT_RUN, ''
    size = 1024 if quick else 4096
    c = PolicyConfig(
        vocab_size=4096,
        hidden_size=size,
        num_hidden_layers=4 if quick else 12,
        num_attention_heads=size // 128,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3 * size,
        mlp_only_layers=tuple(range(12)),
    )
    policy = Policy(c)

    def clock():
        torch.cuda.synchronize()
        return time.perf_counter()

    engines = [build(kw, policy, 64, torch.bfloat16, 'cuda') for kw in ({}, None)]
    return turns(engines, requests(4096, 64, 128), repeats, clock), torch.cuda.get_device_name()


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--repeats', type=int, default=5, help='rounds in which the engines take turns')
    p.add_argument('--threads', type=int, default=1, help='CPU threads')
    p.add_argument('--quick', action='store_true', help='a small case, to see that it runs')
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    prompts, new, repeats = (8, 8, 1) if a.quick else (128, 32, a.repeats)
    c = PolicyConfig(
        vocab_size=64,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
    )
    policy = Policy(c, seed=0)
    with torch.no_grad():
        for w in policy.parameters():
            if w.dim() > 1:
                w.mul_(2)  # a next-token distribution that is not flat
    whole, part = num_bytes(policy)
    print(
        f'weights: {whole[0] / 1e6:.2f} MB in bfloat16, {whole[1] / 1e6:.2f} MB in FP8; '
        'projections and experts alone '
        f'{part[0] / part[1]:.4f} times smaller'
    )
    rs, found = requests(64, prompts, new), {}
    engines = {name: build(kw, policy, prompts) for name, kw in ENGINES.items()}
    print(f'{"":24}replay  mean |gap|        k3  beyond 2   TIS cuts')
    for name, e in engines.items():
        found[name] = mismatch(list(e.generate(rs)), policy)
        for mode, m in found[name].items():
            print(
                f'{name:24}{mode:6}{m["mean_abs"]:12.2e}{m["k3"]:10.1e}'
                f'{m["beyond_2"]:10.2%}{m["tis_cut"]:11.2%}'
            )
    assert found['fp32']['off']['mean_abs'] < 1e-4 < found['weights']['R3']['mean_abs']
    emulation = turns([engines['fp32'], engines['weights+activations']], rs, repeats)
    print(f'emulated on this CPU: {emulation:.2f} times the time of fp32')
    speedup, gpu = on_gpu(repeats, a.quick)
    print(f'rollout on a GPU, bfloat16 over FP8: {speedup}')
    settings = dict(
        layers=4,
        width=256,
        experts=16,
        experts_per_token=4,
        expert_width=128,
        prompts=prompts,
        new_tokens=new,
        quick=a.quick,
        repeats=repeats,
    )
    print(
        json.dumps(
            dict(
                name='fp8',
                ratio=round(whole[0] / whole[1], 4),
                units='bytes of the weights in bfloat16 / in FP8',
                bytes_bf16=whole[0],
                bytes_fp8=whole[1],
                quantised_ratio=round(part[0] / part[1], 4),
                mismatch=found,
                emulation=emulation,
                rollout_speedup=speedup,
                gpu=gpu,
                settings=settings,
                machine=machine_info(),
            )
        )
    )


if __name__ == '__main__':
    main()
