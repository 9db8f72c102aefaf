"""The embedded rollout engine against transformers.generate on one Qwen3-MoE checkpoint.

    python benchmarks/rollout.py [--quick] [--repeats 31] [--threads 1]

Both sample 8 responses of 64 tokens to each of 16 prompts of 16 tokens, in fp32, and both hand back
the log-prob of every sampled token and the experts of every fed token. `generate` has no output for
routes, so a hook on each router records them. The fastest of its expert and attention
implementations and caches is found first; then all contenders take turns in one process. Times are
medians; a ratio is the median over the rounds of that round's ratio, so that a slow minute of the
machine slows both sides.

The floor is the time of the products that nobody can avoid: projections, router, experts at the
sizes that our samples' routes gave them, scores, softmax and values over caches that grow in all
layers, and the head. One prefill per prompt, as we do. No norms, rotations, gates, sorting, cache
writes, sampling or bookkeeping. Two versions: `plain` makes the textbook call for each product
(linear with the checkpoint's layout, a loop over experts, keys as they come); `floor` takes for
each the fastest kernel and layout found, weights transposed beforehand and keys kept transposed for
free. No engine reaches the second.

Last line: one JSON object. `ratio` is our tokens/s over generate's (goal: 2 or more), `floor_ratio`
our time over the floor's (goal: 1.5 or less), `plain_floor_ratio` our time over that of the
textbook calls.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
import time

os.environ.update(HF_HUB_OFFLINE='1', TRANSFORMERS_VERBOSITY='error', TQDM_DISABLE='1')
import torch
import torch.nn.functional as F

from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import hf_weights, save_pretrained
from compassrl.records import Request, SamplingParams, derive_seed
from compassrl.rollout.torch_rollout import TorchRollout


def cpu_model():
    try:
        lines = open('/proc/cpuinfo')
        return next(s.split(':')[1].strip() for s in lines if s.startswith('model name'))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def timed(fn):
    t = time.perf_counter()
    out = fn()
    return time.perf_counter() - t, out


# --------------------------------------------------------------------------------------------- ours
def make_policy(a):
    c = PolicyConfig(
        vocab_size=64,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        intermediate_size=256,
        max_position_embeddings=a.prompt_tokens + a.new_tokens,
    )
    p = Policy(c, seed=0)
    with torch.no_grad():
        for w in p.parameters():
            if w.dim() > 1:
                w.mul_(3)  # a next-token distribution that is not flat
    return p


def make_requests(a, prompts):
    def request(i, k):
        return Request(
            f'p{i}', tuple(prompts[i]), k, derive_seed(i, k), SamplingParams(a.new_tokens)
        )

    return [request(i, k) for i in range(len(prompts)) for k in range(a.samples)]


def ours(engine, weights, requests):
    # every step of training begins like this; it also drops the cached prompts
    engine.load_weights(weights.items(), 0)
    return lambda: list(engine.generate(requests))


# ------------------------------------------------------------------------------------- transformers
class Hf:
    "transformers.generate with log-probs and routes"

    def __init__(self, folder, a, experts, attention, cache):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            experts_implementation=experts,
            attn_implementation=attention,
        ).eval()
        self.name, self.routes = f'experts={experts} attention={attention} cache={cache}', []
        self.kwargs = dict(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=a.new_tokens,
            pad_token_id=0,
            eos_token_id=None,
            num_return_sequences=a.samples,
            return_dict_in_generate=True,
            output_scores=True,
            cache_implementation=cache,
            disable_compile=True,
        )

        def record(module, args, out):
            self.routes.append(out[2])

        for layer in self.model.model.layers:
            layer.mlp.gate.register_forward_hook(record)

    @torch.inference_mode()
    def __call__(self, ids):
        self.routes.clear()
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), **self.kwargs)
        # [B, Tr]
        log_probs = self.model.compute_transition_scores(
            out.sequences, out.scores, normalize_logits=True
        )
        L, (B, _) = len(self.model.model.layers), log_probs.shape
        # [B*tokens, L, K] of each
        steps = [torch.stack(self.routes[i : i + L], 1) for i in range(0, len(self.routes), L)]
        routes = torch.cat([s.view(B, -1, *s.shape[1:]) for s in steps], 1)
        assert routes.shape[1] == out.sequences.shape[1] - 1 and log_probs.isfinite().all()
        return out.sequences, log_probs, routes


def fastest_hf(folder, a, ids):
    """Try what transformers offers: one run of each, then three rounds of those within twice the
    fastest"""
    kinds = itertools.product(
        ('grouped_mm', 'batched_mm', 'eager'), ('sdpa', 'eager'), ('dynamic', 'static')
    )
    engines = [Hf(folder, a, *k) for k in kinds if not a.quick or k[1:] == ('sdpa', 'dynamic')]
    found = {hf: timed(lambda: hf(ids))[0] for hf in engines}
    finalists = [hf for hf, t in found.items() if t < 2 * min(found.values())]
    for _ in range(3):
        for hf in finalists:
            found[hf] = min(found[hf], timed(lambda: hf(ids))[0])
    for hf, t in found.items():
        print(f'  {a.tokens / t:9,.0f} tok/s  {hf.name}', flush=True)
    return min(found, key=found.get)


# ---------------------------------------------------------------------------------------- the floor
class Floor:
    """Bare products of the same work; of several ways to one product the fastest is taken, or the
    first if `plain`"""

    def __init__(self, c, a, samples, plain=False):
        self.c, self.a, self.plain = c, a, plain
        P, B = a.prompts, a.prompts * a.samples
        H, KV, L = c.num_attention_heads, c.num_key_value_heads, c.num_hidden_layers
        d, D, width = c.head_dim, c.hidden_size, c.moe_intermediate_size
        E, K, r = c.num_experts, c.num_experts_per_tok, torch.randn
        T = a.prompt_tokens + a.new_tokens
        self.qkv, self.out, self.router = r((H + 2 * KV) * d, D), r(D, H * d), r(E, D)
        self.gate_up, self.down, self.head = r(E, 2 * width, D), r(E, D, width), r(c.vocab_size, D)
        weights = (self.qkv, self.out, self.router, self.gate_up, self.down, self.head)
        self.turned = {w: w.mT.contiguous() for w in weights}  # the other layout of each
        self.keys, self.values, self.turned_keys = (
            [r(B, KV, *s) for _ in range(L)] for s in ((T, d), (T, d), (d, T))
        )
        self.q, self.x = r(B, KV, H // KV, d), {n: r(n, D) for n in (B, P * a.prompt_tokens)}
        self.xe = {n * K: (r(n * K, D), r(n * K, width)) for n in self.x}
        self.prompt_q, self.prompt_kv = r(P, H, a.prompt_tokens, d), r(P, KV, a.prompt_tokens, d)
        routes = torch.stack([s.routed_experts for s in samples]).long()  # [B, T-1, L, K]

        def ends(ids):
            return F.one_hot(ids.flatten(), E).sum(0).cumsum(0).int()

        self.prompt_ends = [ends(routes[:: a.samples, : a.prompt_tokens, i]) for i in range(L)]
        self.ends = [
            [ends(routes[:, t, i]) for i in range(L)] for t in range(a.prompt_tokens, T - 1)
        ]
        self.chosen = {}

    def best(self, name, *ways):
        "The fastest way, chosen once per name as it runs among the others: with cold caches"
        if self.plain:
            return ways[0]()
        if name not in self.chosen:

            def cost(f):
                return statistics.median((self.values[0].sum(), timed(f)[0])[1] for _ in range(9))

            self.chosen[name] = min(range(len(ways)), key=lambda i: cost(ways[i]))
        return ways[self.chosen[name]]()

    def linear(self, x, w):
        wt = self.turned[w]
        return self.best(
            ('linear', len(x), w.shape), lambda: F.linear(x, w), lambda: torch.mm(x, wt)
        )

    def grouped(self, x, w, ends):
        wt = self.turned[w]

        def loop(w):
            e = ends.tolist()
            return [torch.mm(x[s:t], w[i]) for i, (s, t) in enumerate(zip([0] + e, e))]

        return self.best(
            ('grouped', len(x), w.shape),
            lambda: loop(w.mT),
            lambda: loop(wt),
            lambda: F.grouped_mm(x, w.mT, offs=ends),
            lambda: F.grouped_mm(x, wt, offs=ends),
        )

    def layer(self, x, ends, attention):
        self.linear(x, self.qkv), attention(), self.linear(x, self.out), self.linear(x, self.router)
        xe, he = self.xe[len(x) * self.c.num_experts_per_tok]
        self.grouped(xe, self.gate_up, ends), self.grouped(he, self.down, ends)

    def prefill(self):
        q, kv = self.prompt_q, self.prompt_kv
        grouped = q.view(len(kv), kv.shape[1], -1, kv.shape[-1])
        self.best(
            'prefill',
            lambda: (grouped @ kv.mT).softmax(-1) @ kv,
            lambda: F.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True),
        )

    def decode(self, layer, T):
        "One query per sequence over `T` cached tokens"
        k, v = self.keys[layer][:, :, :T], self.values[layer][:, :, :T]
        kt, q = self.turned_keys[layer][..., :T], self.q
        self.best(
            ('decode', T // 16),
            lambda: (q @ k.mT).softmax(-1) @ v,
            lambda: (q @ kt).softmax(-1) @ v,
            lambda: F.scaled_dot_product_attention(q, k, v),
        )

    @torch.inference_mode()
    def __call__(self):
        a, L = self.a, self.c.num_hidden_layers
        x = self.x[a.prompts * a.samples]
        for ends in self.prompt_ends:
            self.layer(self.x[a.prompts * a.prompt_tokens], ends, self.prefill)
        self.linear(x, self.head)  # the first token comes from the prefill
        for t, ends in enumerate(self.ends, a.prompt_tokens + 1):
            for i in range(L):
                self.layer(x, ends[i], lambda: self.decode(i, t))
            self.linear(x, self.head)


# -------------------------------------------------------------------------------------------------
def largest_gap(folder, samples):
    "Largest |log-prob difference| between our samples and a plain forward pass of transformers"
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids, Tp = (
        torch.tensor([s.prompt_ids + s.response_ids for s in samples]),
        len(samples[0].prompt_ids),
    )
    with torch.inference_mode():
        log_probs = model(ids).logits.log_softmax(-1)[:, Tp - 1 : -1]
    chosen = log_probs.gather(-1, ids[:, Tp:, None])[..., 0]
    return float((chosen - torch.stack([s.rollout_log_probs for s in samples])).abs().max())


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--repeats', type=int, default=31, help='interleaved runs of each contender')
    p.add_argument('--threads', type=int, default=1, help='CPU threads of every contender')
    p.add_argument('--quick', action='store_true', help='a small case, to see that it runs')
    a = p.parse_args()
    a.prompts, a.prompt_tokens, a.samples, a.new_tokens = (
        (4, 8, 4, 8) if a.quick else (16, 16, 8, 64)
    )
    if a.quick:
        a.repeats = 2
    a.tokens = a.prompts * a.samples * a.new_tokens
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    policy = make_policy(a)
    ids = torch.randint(2, policy.config.vocab_size, (a.prompts, a.prompt_tokens))
    requests, weights = make_requests(a, ids.tolist()), dict(hf_weights(policy))
    engine = TorchRollout(policy.config, num_slots=len(requests))
    samples = ours(engine, weights, requests)()
    samples.sort(key=lambda s: (int(s.prompt_id[1:]), s.index))
    assert sum(len(s.response_ids) for s in samples) == a.tokens and all(
        s.routes_valid.all() for s in samples
    )
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(policy, folder)
        gap = largest_gap(folder, samples)
        print(
            'same model: our log-probs differ from a forward pass of transformers by at most '
            f'{gap:.1e}'
        )
        assert gap < 1e-4
        print('transformers.generate, by implementation')
        hf = fastest_hf(folder, a, ids)
    floor, plain = Floor(policy.config, a, samples), Floor(policy.config, a, samples, plain=True)
    floor(), plain()  # chooses the kernels
    contenders = dict(
        ours=lambda: ours(engine, weights, requests),
        generate=lambda: lambda: hf(ids),
        floor=lambda: floor,
        plain=lambda: plain,
    )
    times = {k: [] for k in contenders}
    for _ in range(a.repeats):
        for k, make in contenders.items():
            times[k].append(timed(make())[0])
    t = {k: statistics.median(v) for k, v in times.items()}
    print(
        f'medians of {a.repeats} interleaved runs, {a.threads} thread(s), log-probs and routes '
        'captured'
    )
    for k, v in t.items():
        print(
            f'  {k:9} {1000 * v:8.1f} ms {a.tokens / v:9,.0f} tok/s   fastest run '
            f'{a.tokens / min(times[k]):9,.0f} tok/s'
        )

    def ratio(i, j):
        return round(statistics.median(x / y for x, y in zip(times[i], times[j])), 3)

    result = dict(
        name='rollout',
        ratio=ratio('generate', 'ours'),
        units='tokens/s of ours / tokens/s of transformers.generate',
        floor_ratio=ratio('ours', 'floor'),
        plain_floor_ratio=ratio('ours', 'plain'),
        tokens_per_s={k: round(a.tokens / v) for k, v in t.items()},
        repeats=a.repeats,
        settings=dict(
            prompts=a.prompts,
            prompt_tokens=a.prompt_tokens,
            samples=a.samples,
            new_tokens=a.new_tokens,
            dtype='float32',
            generate=hf.name,
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
    print(
        f'ours is {result["ratio"]:.2f} times as fast as generate (goal 2) and takes '
        f'{result["floor_ratio"]:.2f} times the floor (goal 1.5), '
        f'{result["plain_floor_ratio"]:.2f} times the textbook calls'
    )
    print(json.dumps(result))


if __name__ == '__main__':
    main()
