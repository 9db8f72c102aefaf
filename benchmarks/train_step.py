"""A whole RL step of the embedded engines against TRL's GRPOTrainer on one Qwen3-MoE checkpoint.

    python benchmarks/train_step.py [--quick] [--repeats 7] [--threads 1]

One step: 8 responses of 64 tokens to each of 16 prompts of 16 tokens, one pass for the old
log-probs, two mini-batches of 64 responses with an optimiser step each; fp32, no early stops. Ours
is `loop.fit` with the embedded engines and its whole default recipe (verification, penalties,
ESPO with its entropies, router replay) and weight sync; rewards differ within every group, so
none grows. TRL's loss is GRPO's. TRL is that of the extra `dev`; its side is trl_side/step.py,
which counts what it does so that equal work is checked, not assumed. Three settings of it:

- fastest: fp32, no gradient checkpointing, no logging; experts, attention, cache and micro-batch
  are searched one after the other;
- defaults in fp32: what GRPOConfig sets (micro-batches of 8, gradient checkpointing), with 8
  accumulation steps to make the same two updates;
- defaults: the same with bfloat16 autocast, as GRPOConfig wants it.

All contenders take turns step by step, each in its own process, and medians are compared. The
floor is the time of the bare products and attention of one step: the generation floor of
rollout.py, the forward products three times over (old log-probs, updates) and the backward
products of the updates, by the fastest kernel and micro-batch found. No norms, gates, sorting,
losses or optimiser: no engine reaches it.

Last line: one JSON object. `ratio` is the time of TRL's fastest over ours (goal: 1.4 or more),
`defaults_ratio` that of its defaults in fp32 (goal: 2). `--quick` runs a small case of our side
and the floor alone: its ratio is floor / ours.
"""

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from _trl import Trl
from rollout import Floor, make_policy, timed
from tokenizers import Tokenizer, models

from compassrl.config import TrainConfig
from compassrl.data.prompts import DataConfig
from compassrl.data.tasks import verifier
from compassrl.loop import fit
from compassrl.model.pretrained import save_pretrained
from compassrl.procs import keep_freed_memory
from compassrl.records import Prompt, Verdict
from compassrl.rollout.torch_rollout import RolloutConfig, TorchRollout
from compassrl.runs.summary import machine_info
from compassrl.train.torch_train import OptimConfig, TorchTrain

LR, UPDATES, MICRO_BATCH = 1e-4, 2, 2560  # padded tokens: a mini-batch in two equal parts


def clocked(fn):
    "Wall and CPU seconds"
    start = time.perf_counter(), time.process_time()
    fn()
    return time.perf_counter() - start[0], time.process_time() - start[1]


# ---- ours
@verifier
def digit_sum(text: str, answer: str) -> Verdict:
    "A reward that costs nothing and differs within every group"
    return Verdict(sum(map(int, text.split())) % 17 / 17, False)


class FullLength(TorchRollout):
    "No stop id: every response has its full length"

    def generate(self, requests):
        return super().generate(replace(r, params=replace(r.params, stop_ids=())) for r in requests)


class Ours:
    "`fit`, one step per call"

    def __init__(self, a, ids):
        policy, words = make_policy(a), [str(i) for i in range(64)]
        self.cfg = TrainConfig(
            steps=0,
            prompts_per_step=a.prompts,
            group_size=a.samples,
            data=DataConfig(max_prompt_tokens=a.prompt_tokens),
            policy=policy.config,
            rollout=RolloutConfig(max_tokens=a.new_tokens),
            optim=OptimConfig(lr=LR, num_mini_batches=UPDATES, micro_batch_tokens=MICRO_BATCH),
        )
        self.engine = TorchTrain(policy, self.cfg.optim)
        self.rollout = FullLength(policy.config, num_slots=a.prompts * a.samples)
        self.rollout.load_weights(self.engine.weights(), 0)
        self.tokenizer = Tokenizer(
            models.WordLevel({w: i for i, w in enumerate(words)}, unk_token='0')
        )
        self.prompts = [
            Prompt(f'p{i}', 'bench', '', row, '', 'digit_sum') for i, row in enumerate(ids)
        ]
        self.a, self.metrics = a, []

    def on_step(self, step, metrics, samples, batch):
        assert (
            metrics['tokens'] == self.a.tokens
            and metrics['failed_frac'] == 0
            and metrics['grad_norm'] > 0
        )
        self.samples = samples
        self.metrics.append(metrics)

    def step(self):
        n = self.cfg.steps
        self.cfg = replace(self.cfg, steps=n + 1)
        return clocked(
            lambda: fit(
                self.cfg, self.prompts, self.rollout, self.engine, self.tokenizer, self, 63, start=n
            )
        )


# ---- TRL
class Stepper(Trl):
    "GRPOTrainer that makes one step per call"

    def __init__(self, a, ids, folder, name, model_args, grpo_args):
        spec = dict(
            model=str(folder / 'model'),
            prompts=ids,
            samples=a.samples,
            new_tokens=a.new_tokens,
            vocab_size=64,
            updates=UPDATES,
            threads=a.threads,
            model_args=model_args,
            grpo_args=grpo_args
            | dict(
                learning_rate=LR,
                lr_scheduler_type='constant',
                generation_batch_size=a.prompts * a.samples,
            ),
        )
        super().__init__('step.py', spec, folder, name)
        self.a = a

    def step(self):
        work = self.ask('step')
        seconds = work.pop('seconds'), work.pop('cpu_seconds')
        rows = self.a.prompts * self.a.samples
        assert work == dict(
            generations=1, log_prob_rows=rows, grad_rows=rows, response_tokens=self.a.tokens
        ), f'not the same work: {work}'
        return seconds


def trl_arguments(a, choice):
    "Of the model and of GRPOConfig, for one set of choices"
    rows = a.prompts * a.samples // UPDATES
    grpo = dict(
        bf16=False,
        gradient_checkpointing=False,
        logging_strategy='no',
        per_device_train_batch_size=choice['micro_batch'],
        gradient_accumulation_steps=rows // choice['micro_batch'],
        cache_implementation=choice['cache'],
    )
    return dict(
        experts_implementation=choice['experts'], attn_implementation=choice['attention']
    ), grpo


def fastest_settings(a, ids, folder):
    "One choice after the other, the better of two steady steps decides"
    rows = a.prompts * a.samples // UPDATES
    best, best_s = (
        dict(experts='grouped_mm', attention='sdpa', cache=None, micro_batch=rows),
        float('inf'),
    )
    for key, values in dict(
        experts=('grouped_mm', 'batched_mm', 'eager'),
        micro_batch=(rows // 2, rows // 4),
        attention=('eager',),
        cache=('static',),
    ).items():
        for value in values:
            choice = best | {key: value}
            with Stepper(a, ids, folder, 'search', *trl_arguments(a, choice)) as trl:
                s = trl.step()[0]  # the first is slower, but not by much
                if s < 3 * best_s:
                    s = min(trl.step()[0] for _ in range(2))
            print(f'  {s:6.2f} s  {choice}', flush=True)
            if s < best_s:
                best, best_s = choice, s
    return best, trl_arguments(a, best)


# ---- the floor
class StepFloor(Floor):
    "Adds the bare products of the old-log-prob pass and of two updates to the floor of generation"

    def __init__(self, c, a, samples):
        super().__init__(c, a, samples)
        self.T, B = a.prompt_tokens + a.new_tokens, a.prompts * a.samples
        self.sizes = sorted({max(1, B // UPDATES // k) for k in (1, 2, 4)})
        self.parts = {rows: self.part(rows) for rows in self.sizes}
        self.size = min(
            self.sizes, key=lambda rows: min(self.train_seconds(rows) for _ in range(3))
        )

    def part(self, rows):
        "Inputs of one micro-batch and the gradients that come back, per product"
        c = self.c
        N, K = rows * self.T, c.num_experts_per_tok
        d, D, inner = c.head_dim, c.hidden_size, c.moe_intermediate_size
        ends = (torch.arange(1, c.num_experts + 1) * (N * K) // c.num_experts).int()

        def r(*shape):
            return torch.randn(*shape, requires_grad=True)

        def sdpa(q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        def grouped(x, w):
            return F.grouped_mm(x, w.transpose(1, 2), offs=ends)

        def leaf(w):
            return w.detach().requires_grad_()

        kv = rows, c.num_key_value_heads, self.T, d
        layer = [
            (F.linear, r(N, D), leaf(self.qkv)),
            (F.linear, r(N, c.num_attention_heads * d), leaf(self.out)),
            (F.linear, r(N, D), leaf(self.router)),
            (grouped, r(N * K, D), leaf(self.gate_up)),
            (grouped, r(N * K, inner), leaf(self.down)),
            (sdpa, r(rows, c.num_attention_heads, self.T, d), r(*kv), r(*kv)),
        ]
        head = [(F.linear, r(rows * self.a.new_tokens, D), leaf(self.head))]
        return [
            (f, args, torch.ones_like(f(*args))) for f, *args in layer * c.num_hidden_layers + head
        ]

    def train_seconds(self, rows):
        return timed(lambda: self.train(rows))[0]

    def train(self, rows):
        B = self.a.prompts * self.a.samples
        for _ in range(B // rows):
            with torch.no_grad():
                for f, args, _ in self.parts[rows]:
                    f(*args)
        for _ in range(B // rows):
            for f, args, grad in self.parts[rows]:
                torch.autograd.grad(f(*args), args, grad)

    def step(self):
        return clocked(lambda: (self(), self.train(self.size)))


# ---- all of it
def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--repeats', type=int, default=7, help='steps of each contender, taken in turns')
    p.add_argument('--threads', type=int, default=1, help='CPU threads of every contender')
    p.add_argument(
        '--fastest',
        type=json.loads,
        help="TRL's fastest settings as JSON, as an earlier run found them: no search",
    )
    p.add_argument(
        '--quick', action='store_true', help='a small case without TRL, to see that it runs'
    )
    a = p.parse_args()
    a.prompts, a.prompt_tokens, a.samples, a.new_tokens = (
        (4, 8, 4, 8) if a.quick else (16, 16, 8, 64)
    )
    if a.quick:
        a.repeats = 2
    a.tokens = a.prompts * a.samples * a.new_tokens
    torch.set_num_threads(a.threads)
    keep_freed_memory()  # `compassrl train` does so, and the floor also has it
    torch.manual_seed(0)
    ids = torch.randint(2, 64, (a.prompts, a.prompt_tokens)).tolist()
    ours = Ours(a, ids)
    versions, chosen = {}, None
    with ExitStack() as stack:
        contenders = {}
        if not a.quick:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            save_pretrained(ours.engine.policy, folder / 'model')
            print('TRL, by settings: one step')
            chosen, fastest = (
                (a.fastest, trl_arguments(a, a.fastest))
                if a.fastest
                else fastest_settings(a, ids, folder)
            )
            default = dict(
                per_device_train_batch_size=8,
                gradient_accumulation_steps=a.prompts * a.samples // UPDATES // 8,
            )
            for name, args in {
                'TRL fastest': fastest,
                'TRL defaults fp32': ({}, default | dict(bf16=False)),
                'TRL defaults': ({}, default),
            }.items():
                contenders[name] = stack.enter_context(Stepper(a, ids, folder, name, *args))
            versions = contenders['TRL fastest'].about['versions']
        ours.step()
        contenders = dict(ours=ours, floor=StepFloor(ours.cfg.policy, a, ours.samples)) | contenders
        times = {k: [] for k in contenders}
        for _ in range(a.repeats + 1):  # the first of each does not count
            for k, c in contenders.items():
                times[k].append(c.step())
    t, cpu = ({k: statistics.median(s[i] for s in v[1:]) for k, v in times.items()} for i in (0, 1))
    print(f'medians of {a.repeats} steps in turns, {a.threads} thread(s)')
    for k, v in t.items():
        fastest = min(times[k][1:])[0]
        print(f'  {k:18} {v:7.3f} s   fastest step {fastest:7.3f} s   CPU time {cpu[k]:7.3f} s')
    phases = {
        k: statistics.median(m[f'time_{k}_s'] for m in ours.metrics[-a.repeats :])
        for k in ('rollout', 'reward', 'log_probs', 'update', 'sync')
    }
    print('ours, by phase: ' + ', '.join(f'{k} {v:.3f} s' for k, v in phases.items()))
    result = dict(
        name='train_step',
        ratio=t['floor'] / t['ours'],
        units='time of the floor / time of ours',
        floor_ratio=t['ours'] / t['floor'],
    )
    if not a.quick:
        ratios = [t[k] / t['ours'] for k in ('TRL fastest', 'TRL defaults fp32', 'TRL defaults')]
        print(f"ours is {ratios[0]:.2f} times as fast as TRL's fastest (goal 1.4),")
        print(f'{ratios[1]:.2f} times as fast as its defaults in fp32 (goal 2),')
        print(f'{ratios[2]:.2f} times as fast as its defaults in bfloat16;')
        print(f'it takes {result["floor_ratio"]:.2f} times the floor (goal 1.4)')
        result |= dict(
            ratio=ratios[0],
            units="time of TRL's fastest settings / time of ours",
            defaults_ratio=ratios[1],
            defaults_bf16_ratio=ratios[2],
            cpu_time_ratio=cpu['TRL fastest'] / cpu['ours'],
            cpu_time_defaults_ratio=cpu['TRL defaults fp32'] / cpu['ours'],
        )
    settings = dict(
        prompts=a.prompts,
        prompt_tokens=a.prompt_tokens,
        samples=a.samples,
        new_tokens=a.new_tokens,
        updates=UPDATES,
        dtype='float32',
        micro_batch_tokens=ours.cfg.optim.micro_batch_tokens,
        repeats=a.repeats,
        trl_fastest=chosen,
        trl_versions=versions,
        quick=a.quick,
    )
    rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}
    print(
        json.dumps(
            rounded
            | dict(
                seconds={k: round(v, 4) for k, v in t.items()},
                phases_s={k: round(v, 4) for k, v in phases.items()},
                settings=settings,
                machine=machine_info(),
            )
        )
    )


if __name__ == '__main__':
    main()
