"""The embedded rollout engine against vLLM on one checkpoint, over a ladder of sizes.

    python benchmarks/engines.py [--quick] [--repeats 5] [--threads 1]

Each size is a Qwen3-MoE in fp32 with random weights. Both engines are given the same requests (8
responses of 64 tokens to each of 8 prompts of 16 tokens, at temperature 1, each with a seed of its
own), and both hand back the log-prob of every sampled token and the experts of every fed token.
vLLM (the CPU build) runs in this process, eagerly, as
compassrl.rollout.vllm.in_process.VllmRollout; what it samples is compared with what the policy
itself gives to those tokens before anything is timed. New weights are loaded before each run, as
before every step of training, and are not part of the time. The engines take turns; a ratio is the
median over the rounds of that round's ratio, so that a slow minute of the machine slows both sides.

Last line: one JSON object. `ratio` is our tokens/s over vLLM's on the tiny size (goal: 2 or more),
`ladder` the same for every size, `overtaken_at` the smallest hidden size at which vLLM is the
faster one (null: none of these).
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time

os.environ.update(HF_HUB_OFFLINE='1', TRANSFORMERS_VERBOSITY='error', TQDM_DISABLE='1')
import torch

from compassrl.model.hf_config import write_config
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import hf_weights
from compassrl.records import Request, SamplingParams, collate, derive_seed
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.rollout.vllm.in_process import VllmRollout
from compassrl.train.torch_train import response_log_probs

# name: hidden size, width of one expert, experts, layers, heads
SIZES = dict(
    tiny=(64, 64, 8, 2, 4),
    small=(128, 64, 8, 4, 4),
    medium=(256, 128, 16, 4, 8),
    large=(512, 256, 16, 4, 8),
    wide=(1024, 512, 16, 4, 16),
)


def cpu_model():
    try:
        return next(
            line.split(':')[1].strip()
            for line in open('/proc/cpuinfo')
            if line.startswith('model name')
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def make_policy(size, length):
    hidden, expert, num_experts, layers, heads = SIZES[size]
    c = PolicyConfig(
        vocab_size=99,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,
        num_experts=num_experts,
        num_experts_per_tok=2,
        moe_intermediate_size=expert,
        intermediate_size=2 * expert,
        max_position_embeddings=length,
    )
    p = Policy(c, seed=0)
    with torch.no_grad():
        for w in p.parameters():
            if w.dim() > 1:
                w.mul_(3)  # a next-token distribution that is not flat
    return p


def make_requests(a):
    g = torch.Generator().manual_seed(0)
    ids = [
        tuple(torch.randint(2, 99, (a.prompt_tokens,), generator=g).tolist())
        for _ in range(a.prompts)
    ]
    return [
        Request(f'p{i}', ids[i], k, derive_seed(i, k), SamplingParams(a.new_tokens))
        for i in range(a.prompts)
        for k in range(a.samples)
    ]


@torch.no_grad()
def gap(policy, samples):
    "Mean |log-prob that was reported - log-prob that the policy gives|, with the reported experts"
    b = collate(samples)
    assert (b.routes_valid == b.fed_mask).all()
    return float(
        (response_log_probs(policy, b)[0] - b.rollout_log_probs)[b.response_mask].abs().mean()
    )


def run(engine, weights, requests, version):
    "Seconds, and the samples"
    engine.load_weights(weights.items(), version)
    start = time.perf_counter()
    samples = list(engine.generate(requests))
    return time.perf_counter() - start, samples


def rung(size, a):
    "One size: tokens per second of both, and their ratio"
    policy, requests = make_policy(size, a.prompt_tokens + a.new_tokens), make_requests(a)
    weights, times, gaps = dict(hf_weights(policy)), dict(ours=[], vllm=[]), {}
    with tempfile.TemporaryDirectory() as folder:
        write_config(policy.config, folder)
        engines = dict(
            ours=TorchRollout(policy.config, len(requests)),
            vllm=VllmRollout(folder, num_slots=len(requests)),
        )
    for k, e in engines.items():
        gaps[k] = gap(policy, run(e, weights, requests, 0)[1])  # also warms up
    assert max(gaps.values()) < 1e-4, gaps
    for r in range(a.repeats):
        for k, e in engines.items():
            times[k].append(run(e, weights, requests, r + 1)[0])
    engines['vllm'].close()
    ratio = statistics.median(v / o for v, o in zip(times['vllm'], times['ours']))
    rates = {k: round(a.tokens / statistics.median(v)) for k, v in times.items()}
    megabytes = sum(w.nbytes for w in weights.values()) / 1e6
    print(
        f'  {size:8} {megabytes:8.1f} MB  '
        f'ours {rates["ours"]:8,} tok/s  vLLM {rates["vllm"]:8,} tok/s  ratio {ratio:5.2f}   '
        f'gaps {gaps["ours"]:.0e}, {gaps["vllm"]:.0e}',
        flush=True,
    )
    hidden, expert, num_experts, layers, _ = SIZES[size]
    return dict(
        size=size,
        hidden=hidden,
        expert=expert,
        experts=num_experts,
        layers=layers,
        ratio=round(ratio, 3),
        tokens_per_s=rates,
    )


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        '--repeats', type=int, default=5, help='interleaved runs of each engine, per size'
    )
    p.add_argument('--threads', type=int, default=1, help='CPU threads of both engines')
    p.add_argument(
        '--sizes', nargs='+', default=list(SIZES), choices=SIZES, help='rungs of the ladder'
    )
    p.add_argument('--quick', action='store_true', help='a small case, to see that it runs')
    a = p.parse_args()
    a.prompts, a.prompt_tokens, a.samples, a.new_tokens = (
        (4, 8, 4, 8) if a.quick else (8, 16, 8, 64)
    )
    if a.quick:
        a.repeats, a.sizes = 2, ['tiny']
    a.tokens = a.prompts * a.samples * a.new_tokens
    torch.set_num_threads(a.threads)
    print(
        f'{a.repeats} interleaved runs, {a.threads} thread(s), fp32, '
        f'log-probs and routes captured, {a.prompts * a.samples} responses of {a.new_tokens} tokens'
    )
    ladder = [rung(size, a) for size in a.sizes]
    slower = next((r['hidden'] for r in ladder if r['ratio'] < 1), None)
    result = dict(
        name='engines',
        ratio=ladder[0]['ratio'],
        units='tokens/s of ours / tokens/s of vLLM on the first size',
        ladder=ladder,
        overtaken_at=slower,
        repeats=a.repeats,
        settings=dict(
            prompts=a.prompts,
            prompt_tokens=a.prompt_tokens,
            samples=a.samples,
            new_tokens=a.new_tokens,
            dtype='float32',
            quick=a.quick,
        ),
        machine=dict(
            cpu=cpu_model(),
            cores=os.cpu_count(),
            threads=a.threads,
            torch=torch.__version__,
            load=round(os.getloadavg()[0], 1),
        ),
    )
    where = (
        f'vLLM overtakes at hidden size {slower}'
        if slower
        else 'vLLM overtakes at none of these sizes'
    )
    size, ratio = ladder[0]['size'], result['ratio']
    print(f'ours is {ratio:.2f} times as fast as vLLM on {size} (goal 2); {where}')
    print(json.dumps(result))


if __name__ == '__main__':
    main()
