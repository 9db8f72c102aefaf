"""How long until the policy is right this often? Our default recipe against TRL's GRPOTrainer.

    python benchmarks/time_to_accuracy.py [--seeds 0 1 2] [--tasks silent] [--time 2.5] [--quick]

One checkpoint for all, per seed: the policy of `tiny-cpu` after its cold start, as a run writes it.
The same prompts, in the same order but for the default, which passes some over; responses of at
most 48 tokens; the same verifier on the same decoded text; fp32, one thread. Four contenders:

- default: the recipe of `tiny-cpu`, 32 prompts of 4 responses an update, with penalties, RL-ZVP,
  ESPO, router replay and prompts selected by length. Its learning rate falls over the 200 steps of
  that preset, as in `make train`;
- TRL: GRPOTrainer with the settings in TRL_BEST, in a process of its own (trl_side/learn.py), and
  with a learning rate tuned for the task, where ours has one rate for both tasks;
- TRL, beta2 0.999: the same with the beta2 of Adam that is TRL's default, in place of ours, 0.95;
- TRL's recipe here: our engines with its loss, advantages and optimiser, all prompts in turn,
  and without penalties, RL-ZVP and router replay: what is left between the two is speed.

They take turns, 512 responses each, at most 25,600 in all. Then our rollout engine draws 8
responses to each of 256 held-out prompts from the weights of each, with the same seeds. No clock
counts that. What counts is rollout, rewards and updates, from the first step to the first
evaluation at the target or above it. CPU seconds decide: on a machine of its own a process of one
thread has as many as seconds, and the work of others on a shared one is not counted. But it takes
room in the caches: with eight processes on two cores a step of TRL took twice as many CPU seconds.
Contenders take turns, so all have that alike. The clock's seconds say little there. Before TRL
trains, its log-probs of 16 responses of the checkpoint have to be within 1e-4 nats of ours.

Two tasks. `default` is that of `tiny-cpu`; the target is 70 %. `silent` is the mix of the study of
the recipe on which most groups are silent. Its seeds end at rates that lie far apart, so the target
is what TRL itself gets to: the mean of its last five evaluations in 16 CPU seconds. Each contender
has as many, and TRL, too, is counted to its first evaluation there. Those 16 are 64 of its updates
on the machine of the first race; `--time 2.5` gives all contenders 2.5 times as many seconds, for a
machine that takes so much longer.

TRL_BEST was found on seeds that are not compared. Step by step, on seed 3 and the default task:
CPU seconds of a step of 512 responses in two updates: experts eager 1.3, grouped_mm 1.35,
batched_mm 9.2; attention eager 1.3, sdpa 1.7; a static cache 1.7; micro-batches of 256 rows 1.2, of
128 1.3, of 64 1.4. Continuous batching had not finished a step after 25. One update needs no pass
for old log-probs. DAPO's loss and GRPO's came to the same rate; a rate that falls to 0 was no
better than a constant one. Then the rest, with one update a step and DAPO's loss, on four seeds.
Sums of CPU seconds; `>`: a seed did not get there in its time.

    prompts x responses, rate, warm-up   default to 60 %, 65 %, 70 %     silent to +5, +8, +10
    TRL's recipe on our engines, seeds 3, 7, 8, 9
    32 x 8, 4e-4, 10 steps                     7.6   10.3   23.2
    32 x 8, 4e-4, 2                            6.3   10.3   23.3
    32 x 4, 4e-4, 4                            5.7    7.7  >23.2
    32 x 4, 2e-4, 2                            5.9    9.0   15.8
    64 x 4, 4e-4, 2                            5.3    7.0   16.6
    TRL, seeds 3, 7, 8, 9 (default) and 7, 8, 11, 12 (silent)
    32 x 8, 4e-4, 2                                                     14.4   24.9  >36.5
    32 x 4, 2e-4, 2                           12.1   17.5   32.2        14.3   21.3  >33.4
    32 x 4, 3e-4, 2                            9.6   14.7   38.4
    64 x 4, 4e-4, 2                           14.3   19.4   40.9        14.6   22.9  >39.5
    64 x 4, 3e-4, 2                           15.6   22.2   35.3
    64 x 4, 2e-4, 2                                                     18.6   32.0  >39.0

Later, Adam's beta2 and its learning rate, with 32 x 4 and 2 steps of warm-up. Other work slowed
these runs, so the table has updates in place of CPU seconds: an update of TRL takes as long with
each of these settings. `-`: not run.

    beta2, rate       default to 60 %, 65 %, 70 %: seed 3, seed 7     silent to +5, +8, +10: seed 7
    0.999, 2e-4                      24   52  >56     20   24   32                   12   24   28
    0.999, 3e-4                      20   56  >60      -    -    -                   12   16   28
    0.999, 4e-4                      20   60  >60      -    -    -                    8   16   20
    0.95,  2e-4                      20   44  >56     20   24   28                   12   24   28
    0.95,  3e-4                      20   56  >60     16   16   24                   12   24   24
    0.95,  4e-4                      24  >56  >56      -    -    -                    8   16   20
    0.95,  6e-4                       -    -    -      -    -    -                   16  >32  >32

The rule was set before: the smallest geometric mean over levels and seeds. After a look it became
one of updates, and of a rate for each task; one rate for both would have been 4e-4. It gives 3e-4
on the default task and 4e-4 on the silent mix, each with a worse rate on either side. Before, TRL
raced with 2e-4 and 0.999 on both. The two beta2 hardly differ: in the seven pairs with the same
rate and seed, 648 updates with 0.999 and 632 with 0.95. TRL_BEST has 0.95, and 0.999 races as well.

Default task to 70 %, TRL over the default, on three machines, with three versions of the library.
A step hardly differs. The cold starts do, and with them the steps that each side needs.

    2e-4 and 0.999, alone           3.37 [2.66, 4.27]     a step 2.5 times as fast
    settings above, alone           3.20 [2.51, 4.07]     not noted
    settings above, both tasks      2.29 [1.84, 2.86]     2.3 (2.5 alone, by two_cores.py)
    at once, with other work: this one is stored

All in fp32, without gradient checkpointing, logging, a KL penalty or a router loss. Not tried: a
mask on truncated responses, several passes over a batch, two threads.

The shape of the default's step was found in the same way, on its own task and on seeds 3 and 7 to
13. As many responses in all; sums of CPU seconds:

    prompts x responses, rate, warm-up        to 50 %   55 %   60 %   65 %   70 %
    16 x 8, 4e-4, 10 steps                        6.4    9.5   12.8   19.8  >38.2
    32 x 4, 2e-4, 2                               6.1   10.4   15.6   21.7   39.9
    32 x 4, 3e-4, 2                               5.0    8.6   11.5   16.9   27.7
    32 x 4, 4e-4, 2                               5.2    7.6   11.0   15.6   27.7
    32 x 4, 6e-4, 2                               5.4    7.5   13.0   21.6   45.6
    64 x 2, 4e-4, 2                               4.5    6.9   10.8   16.5   34.6
    64 x 4, 4e-4, 2, in two updates               6.9   11.1   16.1   27.1   43.6
    32 x 4, 4e-4, 2, falls over half the steps    5.6    8.2   11.5   16.1  >33.1
    32 x 4, 4e-4, 2, all prompts in turn          5.4    7.8   11.5   18.0   32.8

Our CPU seconds in these tables are from before the train engine computed shared prefixes once: a
run takes about 0.7 of them now.

Tried and left out: evaluations of a running mean of the weights, of about ten steps. On the seeds
that are compared (0, 1, 2, 4, 5) it came to 70 % after 8.3, 2.1, 2.1, 3.0 and 16.8 CPU seconds, and
the newest weights after 8.3, 1.6, 1.6, 2.4 and 17.0. Where the rate had fallen it changed nothing.

`factors` has geometric means over seeds with intervals, so that no seed decides by its length.

Last line: one JSON object. `ratio` is the CPU seconds of TRL over ours on the default task, summed
over the seeds (goal: 3); `tasks` has it for both, and `levels` for lower targets. Where a contender
did not get there in its time, its last evaluation is counted and a `>` printed; `missed` counts
those.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parent / 'studies'))
from _evidence import interval  # noqa: E402
from _runner import SILENT, prompts_of  # noqa: E402
from _trl import Trl  # noqa: E402

from compassrl.algo.losses import LossConfig
from compassrl.algo.zero_variance import ZeroVarianceConfig
from compassrl.data.prompts import DataConfig
from compassrl.data.selection import prompts_of_step
from compassrl.experience import Sampler
from compassrl.judges.genrm_judge import make_judge
from compassrl.loop import Stop, run_steps
from compassrl.model.pretrained import read_shards
from compassrl.records import Request, derive_seed
from compassrl.rollout.torch_rollout import RolloutConfig, TorchRollout
from compassrl.runs.ahead import AheadSampler
from compassrl.runs.cold_start import start_policy
from compassrl.runs.evaluate import evaluate
from compassrl.runs.factory import open_engines
from compassrl.runs.presets import presets
from compassrl.runs.run_data import load
from compassrl.runs.run_process import set_up, stoppable
from compassrl.runs.summary import machine_info
from compassrl.train.sft import SFTConfig

PROMISED = 3  # times as fast as TRL
LARGEST_GAP = 1e-4  # gap of log-probs, in nats
EPOCH = 480  # steps of the preset whose prompts TRL is given
EVERY = 512  # responses from one evaluation to the next
TRL_BEST = dict(
    model_args=dict(experts_implementation='eager', attn_implementation='eager'),
    prompts=32,
    responses=4,
    updates=1,
    micro_batch=128,
    loss_type='dapo',
    lr_scheduler_type='constant_with_warmup',
    warmup_steps=2,
    adam_beta2=0.95,
)
OTHER = 'TRL, beta2 0.999'
FIXED = 0.05  # above the start: a goal that no contender sets
SAME = "TRL's recipe here"
UNITS = 'cpu_seconds', 'seconds', 'tokens'


@dataclass(frozen=True)
class Task:
    "What is asked after the cold start, and how much is enough"

    levels: tuple[float, ...]  # levels of held-out avg@k, the last one is what is raced for
    cap: float  # CPU seconds of each contender
    rate: float  # TRL's best learning rate
    shares: bool = False  # are the levels shares of what TRL gains in its time?
    mix: tuple = ()  # domain, difficulty, share; () = the prompts of the cold start

    def goal(self, s, level):
        "The rate that a level asks of a seed"
        if not self.shares:
            return level
        end = fmean(r['avg'] for r in s['curves']['TRL'][-5:])
        return s['before'] + level * (end - s['before'])

    def peers(self, **changed):
        "TRL's settings by name"
        best = TRL_BEST | dict(learning_rate=self.rate) | changed
        return {'TRL': best, OTHER: best | dict(adam_beta2=0.999)}

    def said(self, level):
        return f'{level:.0%}' + " of TRL's gain" * self.shares


TASKS = dict(
    default=Task((0.5, 0.55, 0.6, 0.65, 0.7), 100.0, 3e-4),
    silent=Task((0.5, 0.75, 0.9, 1.0), 16.0, 4e-4, shares=True, mix=SILENT),
)


class Start:
    "A checkpoint after its cold start, what is asked of it, and how it is judged"

    def __init__(self, cfg, folder, mix=()):
        self.cfg, self.folder, self.data = cfg, folder, load(cfg)
        folder.mkdir(parents=True, exist_ok=True)
        start_policy(cfg, self.data, folder, stoppable(folder))
        if mix:
            num = dict(train=cfg.data.num_train, heldout=cfg.data.num_heldout)
            self.data = replace(
                self.data, **{k: prompts_of(mix, n, cfg.seed, k) for k, n in num.items()}
            )
        self.model = folder / 'start'
        self.params = cfg.rollout.params(self.data.eos_id)
        self.rollout = TorchRollout(cfg.policy, cfg.data.num_heldout * cfg.eval_k)  # at once
        self.before = self.accuracy(read_shards(self.model))

    def accuracy(self, weights):
        "avg@k over the held-out prompts, the same draws each time"
        self.rollout.load_weights(weights, 0)
        d, c = self.data, self.cfg
        return evaluate(self.rollout, d.heldout, c.eval_k, self.params, d.tokenizer, c.seed).avg

    def responses(self, num):
        "Some responses of this checkpoint, with the log-probs that our engine drew them by"
        self.rollout.load_weights(read_shards(self.model), 0)
        requests = [
            Request(p.id, tuple(p.token_ids), 0, derive_seed('check', p.id), self.params)
            for p in self.data.heldout[:num]
        ]
        return [
            dict(
                prompt_ids=s.prompt_ids,
                response_ids=s.response_ids,
                log_probs=s.rollout_log_probs.tolist(),
            )
            for s in self.rollout.generate(requests)
        ]


class Ours:
    "`fit` with the engines of a config, one step per call"

    def __init__(self, start, cfg, stack):
        d = start.data
        self.cfg, self.data, self.done = cfg, d, 0
        self.rows = total_rows(cfg) // cfg.steps
        self.engines = stack.enter_context(open_engines(cfg, start.model, start.folder))
        self.judge = make_judge(
            d.prompts, d.tokenizer, d.eos_id, cfg.rewards, cfg.seed, cfg.group_size
        )
        stack.callback(self.judge.close)
        kind = AheadSampler if cfg.schedule.max_staleness else Sampler
        self.sampler = kind(cfg, d.train, self.engines.rollout, self.judge, d.eos_id)
        self.engines.rollout.load_weights(self.engines.train.weights(), 0)

    def on_step(self, step, metrics, samples, batch):
        self.done, self.tokens = step, int(metrics['tokens'])
        raise Stop

    def step(self):
        "CPU seconds, seconds, response tokens"
        e = self.engines
        start = time.process_time(), time.perf_counter()
        with suppress(Stop):
            run_steps(self.cfg, self.sampler, e.train, self, self.done, e.reference)
        return time.process_time() - start[0], time.perf_counter() - start[1], self.tokens

    def weights(self):
        return self.engines.train.weights()


def total_rows(cfg):
    "Responses of a run"
    return cfg.steps * cfg.prompts_per_step * cfg.group_size


def grpo_arguments(choice):
    "Of GRPOConfig, and of the model"
    ours = 'prompts', 'responses', 'updates', 'micro_batch'
    own = {k: v for k, v in choice.items() if k not in ours}
    model_args, rows = own.pop('model_args'), choice['prompts'] * choice['responses']
    return model_args, own | dict(
        bf16=False,
        gradient_checkpointing=False,
        logging_strategy='no',
        generation_batch_size=rows,
        per_device_train_batch_size=choice['micro_batch'],
        gradient_accumulation_steps=rows // choice['updates'] // choice['micro_batch'],
    )


class Peer(Trl):
    "GRPOTrainer on the same checkpoint and the same prompts in the same order"

    def __init__(self, start, choice, name='trl', threads=1):
        c, d = start.cfg, start.data
        steps = (prompts_of_step(d.train, n, c.prompts_per_step, c.seed) for n in range(EPOCH))
        model_args, grpo_args = grpo_arguments(choice)
        spec = dict(
            model=str(start.model),
            prompts=[asdict(p) for prompts in steps for p in prompts],
            eos_ids=d.eos_id,
            checks=start.responses(16),
            samples=choice['responses'],
            new_tokens=c.rollout.max_tokens,
            updates=choice['updates'],
            threads=threads,
            model_args=model_args,
            grpo_args=grpo_args,
        )
        self.now = start.folder / f'{name}-now'
        self.rows = choice['prompts'] * choice['responses']
        self.betas = [0.9, choice['adam_beta2']]
        super().__init__('learn.py', spec, start.folder, name)

    def __enter__(self):
        super().__enter__()
        gap = self.about['largest_gap']
        assert gap < LARGEST_GAP, f'not the same policy: log-probs differ by {gap}'
        return self

    def step(self):
        "CPU seconds, seconds, response tokens"
        done = self.ask('step')
        return done['cpu_seconds'], done['seconds'], done['response_tokens']

    def weights(self):
        betas = self.ask(f'save {self.now}')['betas']
        assert betas == [self.betas], f'the optimiser has {betas}'
        return read_shards(self.now)


def same_recipe(cfg, choice):
    "Our config with the prompts per step, advantages, loss and optimiser that TRL has"
    return replace(
        cfg,
        steps=total_rows(cfg) // (choice['prompts'] * choice['responses']),
        prompts_per_step=choice['prompts'],
        group_size=choice['responses'],
        zero_variance=ZeroVarianceConfig(
            'uniform', length_weight=0, repetition_weight=0, zvp_alpha=0
        ),
        loss=LossConfig(choice['loss_type'], clip_eps_high=0.2, tis='off'),
        router_replay='off',
        data=replace(cfg.data, select_by='turn'),
        optim=replace(
            cfg.optim,
            lr=choice['learning_rate'],
            warmup_steps=choice['warmup_steps'],
            final_lr_frac=1.0,
            betas=(0.9, choice['adam_beta2']),
            num_mini_batches=choice['updates'],
            micro_batch_tokens=16_384,  # its one update: one pass over the batch
        ),
    )


def ended(rows, steps, task, by):
    "It has reached the goal, had its time, or taken its last step"
    last = rows[-1] if rows else {'avg': -1, by: 0, 'steps': 0}
    over = last[by] >= task.cap or last['steps'] >= steps
    there = not task.shares and last['avg'] >= task.levels[-1]
    return over or there


def enter(start, peers, stack):
    "Ours, and GRPOTrainer with each of several settings"
    best = same_recipe(start.cfg, peers['TRL'])
    ours = {'default': Ours(start, start.cfg, stack), SAME: Ours(start, best, stack)}
    theirs = {
        name: stack.enter_context(Peer(start, choice, f'trl-{i}'))
        for i, (name, choice) in enumerate(peers.items())
    }
    return ours | theirs


def race(start, contenders, task, every, by='cpu_seconds'):
    "All in turns, each until it has reached the goal or had its time; evaluations by name"
    curves = {name: [] for name in contenders}
    sums = {name: (0, 0.0, 0.0, 0) for name in contenders}
    steps = {k: total_rows(start.cfg) // x.rows for k, x in contenders.items()}
    while running := [k for k in contenders if not ended(curves[k], steps[k], task, by)]:
        for name in running:
            c = contenders[name]
            for _ in range(max(1, every // c.rows)):
                sums[name] = tuple(x + y for x, y in zip(sums[name], (1, *c.step())))
            row = dict(zip(('steps', *UNITS), sums[name]), avg=start.accuracy(c.weights()))
            row |= {k: round(row[k], 4) for k in ('cpu_seconds', 'seconds')}
            curves[name].append(row)
            print(f'  {name:17} {line(row)}', flush=True)
    return curves


def line(row, more=''):
    return (
        f'{more}{row["steps"]:4} steps, {more}{row["cpu_seconds"]:6.1f} CPU seconds, '
        f'{more}{row["tokens"]:9,} tokens: {100 * row["avg"]:.1f} %'
    )


def first(s, name, task, level):
    "Of a seed: the first evaluation that reaches a level, else the last; was it reached?"
    rows, goal = s['curves'][name], task.goal(s, level)
    hit = next((r for r in rows if r['avg'] > goal - 1e-9), None)  # sums are rounded
    return hit or rows[-1], hit is not None


def needed(seeds, task, level):
    "What contenders need for all seeds, those alone that begin below the level; how many fail"
    below = [s for s in seeds if s['before'] < task.goal(s, level)] or seeds
    out = {}
    for name in seeds[0]['curves']:
        found = [first(s, name, task, level) for s in below]
        sums = {k: sum(row[k] for row, _ in found) for k in UNITS}
        out[name] = sums | dict(missed=sum(not hit for _, hit in found))
    return out


def by_level(seeds, task, by='cpu_seconds'):
    "What is needed for each level, and the seconds of TRL over those of the others"
    out = {}
    for level in task.levels:
        needs = needed(seeds, task, level)
        spent = {k: v[by] for k, v in needs.items()}
        ratios = {k: spent['TRL'] / v for k, v in spent.items() if k != 'TRL'}
        out[task.said(level)] = dict(ratios=ratios, needs=needs)
        said = ', '.join(f'{k} {v:.2f}' for k, v in ratios.items())
        print(f'to {task.said(level)}, times as fast as TRL: {said}')
    return out


PAIRS = dict(
    both=('TRL', 'default'),
    engine=('TRL', SAME),
    recipe=(SAME, 'default'),
    beta2=(OTHER, 'TRL'),
    other=(OTHER, 'default'),
)


def factors(seeds, goal, pairs=PAIRS, by='cpu_seconds'):
    """Seconds to a goal of each seed: of TRL over ours (`both`), of TRL over TRL's recipe here
    (`engine`), of that over the default (`recipe`), of TRL with PyTorch's beta2 over TRL with
    ours (`beta2`), of the TRL that is not in `both` over ours (`other`); geometric means and 95 %
    intervals over seeds. A contender that never gets there counts with all of its time: as the
    slower one of a pair it makes the factor a lower bound, as the faster one an upper bound"""
    spent = []
    for s in seeds:
        reached = {}
        for name, rows in s['curves'].items():
            there = (r for r in rows if r['avg'] > goal(s) - 1e-9)
            reached[name] = next(there, rows[-1])[by]
        spent.append(reached)
    there = {k: ab for k, ab in pairs.items() if set(ab) <= set(spent[0])}
    logs = {k: [math.log(x[a] / x[b]) for x in spent] for k, (a, b) in there.items()}
    return {k: [math.exp(x) for x in interval(v)] for k, v in logs.items() if len(v) > 1}


def summary(seeds, task):
    "Lines for seeds and contenders; what TRL needs over what the default does"
    level = task.levels[-1]
    for name in seeds[0]['curves']:
        for s in seeds:
            row, hit = first(s, name, task, level)
            print(f'seed {s["seed"]:2}  {name:17} {line(row, " " if hit else ">")}')
    levels = by_level(seeds, task)
    needs = levels[to := task.said(level)]['needs']
    for name, n in needs.items():
        print(f'all      {name:17} {">" if n["missed"] else " "}{n["cpu_seconds"]:.1f} CPU seconds')
    ratio = {k: needs['TRL'][k] / needs['default'][k] for k in UNITS}
    print(f'the default recipe: {ratio["cpu_seconds"]:.2f} times as fast (goal {PROMISED}),')
    print(f'TRL draws {ratio["tokens"]:.2f} times as many response tokens')
    found = dict(to=to, ratio=ratio['cpu_seconds'], seconds_ratio=ratio['seconds'])
    found |= dict(factors=factors(seeds, lambda s: task.goal(s, level)))
    found |= dict(fixed=factors(seeds, lambda s: s['before'] + FIXED))
    for goal, kind in ((to, 'factors'), ('start + 5 points', 'fixed')):
        for name, row in found[kind].items():
            print(f'to {goal}, {name:6} {"{:.2f} [{:.2f}, {:.2f}]".format(*row)}')
    return found | dict(tokens_ratio=ratio['tokens'], levels=levels, seeds=seeds)


def small(cfg):
    "For --quick"
    return replace(
        cfg,
        prompts_per_step=8,
        group_size=4,
        eval_k=2,
        data=DataConfig(difficulty=0.0, num_train=60, num_heldout=8),
        cold_start=SFTConfig(steps=10, num_solutions=60),
        rollout=RolloutConfig(max_tokens=16),
    )


def arguments(text=__doc__):
    p = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2, 4, 5, 6])
    p.add_argument('--tasks', nargs='+', default=list(TASKS), choices=TASKS)
    p.add_argument('--starts', help='folder that keeps cold starts; without it they are made again')
    p.add_argument('--time', type=float, default=1.0, help='times the CPU seconds of each task')
    p.add_argument('--quick', action='store_true', help='a small case, to see that it runs')
    return p.parse_args()


def race_all(cfg, task, peers, home, seeds, every):
    "Every seed of a task: its curves; what TRL says of itself"
    out = []
    for seed in seeds:
        start = Start(replace(cfg, seed=seed), home / f'seed{seed}', task.mix)
        print(f'seed {seed}: {100 * start.before:.1f} % after the cold start', flush=True)
        with ExitStack() as stack:
            contenders = enter(start, peers, stack)
            curves = race(start, contenders, task, every)
            about = contenders['TRL'].about
        out.append(dict(seed=seed, before=start.before, curves=curves))
    return out, about


def main():
    a, cfg, tasks, every, changed = arguments(), presets['tiny-cpu'](), TASKS, EVERY, {}
    cfg = replace(cfg, data=replace(cfg.data, num_heldout=256))
    if a.quick:
        cfg, a.tasks, a.seeds = small(cfg), ['silent'], [0]
        tasks = dict(silent=replace(TASKS['silent'], cap=1e-3))  # one evaluation of each
        changed, every = dict(prompts=4, micro_batch=16), 1
    tasks = {k: replace(t, cap=a.time * t.cap) for k, t in tasks.items()}
    set_up(cfg.device, cfg.num_threads)
    found = {}
    with ExitStack() as stack:
        home = Path(a.starts or stack.enter_context(tempfile.TemporaryDirectory()))
        for name in a.tasks:
            print(f'== {name}')
            peers = tasks[name].peers(**changed)
            if a.quick:
                peers.pop(OTHER)
            seeds, about = race_all(cfg, tasks[name], peers, home, a.seeds, every)
            found[name] = summary(seeds, tasks[name])
    settings = dict(every=every, eval_k=cfg.eval_k, heldout=cfg.data.num_heldout, quick=a.quick)
    settings |= {k: about[k] for k in ('largest_gap', 'versions')}
    settings |= dict(caps={k: tasks[k].cap for k in a.tasks})
    settings |= dict(trl={k: tasks[k].peers(**changed) for k in a.tasks})
    units = 'CPU seconds to the target: of TRL over those of the default recipe'
    main_ratio = found[a.tasks[0]]['ratio']
    result = dict(name='time_to_accuracy', ratio=main_ratio, units=units, tasks=found)
    print(json.dumps(result | dict(settings=settings, machine=machine_info())))


if __name__ == '__main__':
    main()
