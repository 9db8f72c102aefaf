"""Labels against scores in a training loop: what happens to true quality, and to the order of
advantages?

A shopper's question has answers of true quality 0 to 5, which no trained judge sees. The cold start
imitates the mixed answers that judges were trained on. From it, with as many response tokens:

bt             the score of a Bradley-Terry model
bt_band        the same scores; those of a group that differ by less than a band count as equal
bt_labels      the same scores, cut into Better, Tie, Worse against the reference answer by the band
judge_direct   the labels of a generative judge that writes its label alone, both orders asked
judge          the labels of a generative judge that writes its steps first, both orders asked
oracle_labels  the labels that the true quality gives against the reference
oracle         the true quality

Bradley-Terry model and both judges: the same trunk, the same 24,000 pairs of a seed of their own,
1500 steps of 16. One of each serves all seeds. The band fits 1000 further pairs best. All is plain
GRPO: silent groups add nothing, no penalties. A dense policy as wide as that of `tiny-cpu`. All
runs begin with the weights of one cold start; a seed draws prompts and responses. A judge is asked
once about a response to a prompt. Inverted: pairs of a group of which the better answer has the
lower advantage. Split: pairs of equal quality whose advantages differ.

Rates: each arm has the one that ends with the highest true quality in runs as long on the seeds
3090 and 3091. Two rates are tried, then further ones by a factor of 2, until the best is inside.

Positive control: `oracle` must end above `bt`, with its whole interval. The design before failed
it: 200 steps of cold start, 24,000 tokens, seeds 0 to 5, `oracle` minus `bt` -0.05 [-0.08, -0.02].
Its policy could not read: it said the right price in 9 % of its answers, and no arm got past what
one and the same answer to all questions gets. `earlier` runs the old cold start again, for as many
tokens as now. Now the cold start has 1000 steps: the policy copies prices, which it can choose to
do, and may learn to choose the item.

Power, from seeds 3100 to 3103 (not compared, rate 1e-3, 72,000 tokens): paired differences had a
standard deviation of .14 (`oracle` minus `bt`) and .15 (`judge_direct` minus `bt`). With 8 seeds
half an interval is about .12. There `oracle` minus `bt` was +.5 to +.8. The trials have 48,000
tokens, twice those of the design before, because the judge with steps costs most of the
time. About 25 core-minutes, 6 of them for the judges and 1 for the cold start.
Last line: one JSON object; `ratio` is the true quality gained with `judge` over that with `bt`.
usage: make study NAME=labels, python benchmarks/studies/labels.py [--quick]
"""

import argparse
import json
import random
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import torch
from _evidence import allowed
from _runner import OFF, RUNS, common, digest, interval, prompts_of, rounded
from _shop_judges import TOK, ArmJudge, accuracy, reward_model, rewards_of
from tqdm import tqdm

from compassrl.algo.losses import LossConfig
from compassrl.data.tasks import Choices, Problem, task_family
from compassrl.data.tokenizer import response_text
from compassrl.data.toys import shop, shop_points, shop_quality
from compassrl.loop import Stop, fit
from compassrl.model.policy import Policy
from compassrl.records import derive_seed
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.runs.evaluate import evaluate
from compassrl.runs.judge_model import JudgeModelConfig, any_answer
from compassrl.runs.log import write_json
from compassrl.runs.summary import machine_info
from compassrl.train.sft import SFTConfig, cold_start
from compassrl.train.torch_train import TorchTrain

ARMS = 'bt', 'bt_band', 'bt_labels', 'judge_direct', 'judge', 'oracle_labels', 'oracle'
JUDGE_SEED = 1000
PAIRS = JudgeModelConfig(
    num_pairs=24_000, sft_steps=1500, rl_steps=1, num_heldout=256, seed=JUDGE_SEED
)


@task_family
def browse(level: int, choose: Choices) -> Problem | None:
    "A question of the shop, and an answer as the judges' pairs have them"
    p = shop(level, choose)
    rng = random.Random(derive_seed('browse', p.text)) if p else None
    return p and p._replace(
        solution=any_answer(p.text, rng) or p.solution
    )  # a spoiled one may be empty


@dataclass(frozen=True)
class Study:
    seeds: tuple[int, ...] = tuple(range(3000, 3008))
    tuning: tuple[int, ...] = (3090, 3091)
    rates: tuple[float, ...] = (5e-4, 1e-3)  # and more, until the best is inside
    budget: int = 48_000  # response tokens of a trial
    marks: int = 3
    cold_steps: int = 1000
    num_heldout: int = 512
    eval_k: int = 2
    judges: JudgeModelConfig = PAIRS

    def __post_init__(self):
        allowed(self.seeds)


def config(study, seed, lr):
    base = common()
    layers = tuple(range(base.policy.num_hidden_layers))
    more = dict(policy=replace(base.policy, mlp_only_layers=layers), zero_variance=OFF)
    more |= dict(cold_start=SFTConfig(steps=study.cold_steps, lr=5e-3))
    more |= dict(rollout=replace(base.rollout, max_tokens=24), loss=LossConfig('grpo'))
    more |= dict(optim=replace(base.optim, lr=lr, warmup_steps=3, final_lr_frac=1.0))
    more |= dict(data=replace(base.data, select_by='turn'))
    return replace(base, seed=seed, steps=10**6, **more, **STEP)


MIX = (('browse', 0.0, 1.0),)
POOL, STEP = 4096, {}  # prompts of a seed; what --quick changes of a step


# ---- one trial


def order_of(batch, quality, group):
    "Pairs of a step: right, tied, inverted of those that differ; equal ones, and split ones"
    mask = batch.response_mask
    a = (batch.advantages * mask).sum(1) / mask.sum(1)
    same = group[:, None] == group
    better, equal = same & (quality[:, None] > quality), same & (quality[:, None] == quality)
    gap = a[:, None] - a
    sign = torch.sign(gap * (gap.abs() > 1e-6))
    equal = equal.triu(1)
    found = {
        k: int((sign == s)[better].sum()) for k, s in dict(right=1, tied=0, inverted=-1).items()
    }
    return found | dict(equal=int(equal.sum()), split=int((sign != 0)[equal].sum()))


STARTS = {}  # what this process has evaluated


class Curve:
    "Counts tokens, evaluates true quality at marks, stops at the budget"

    def __init__(self, study, cfg, rollout, prompts):
        self.study, self.cfg, self.rollout = study, cfg, rollout
        self.text = {p.id: p.text for p in prompts}
        self.heldout = prompts_of(MIX, study.num_heldout, cfg.seed, 'heldout')
        self.steps, self.evals, self.points, self.ends, self.tokens = [], [], [], [], 0
        key = digest(replace(study, seeds=(), tuning=(), rates=()), cfg.seed, cfg.policy)
        if key not in STARTS:  # arms and rates share their start
            self.evaluate()
            STARTS[key] = self.evals[0], self.points[0]
        self.evals, self.points, self.ends = *([x] for x in STARTS[key]), [0]

    def evaluate(self):
        params = self.cfg.rollout.params(self.cfg.policy.eos_ids)
        found = evaluate(self.rollout, self.heldout, self.study.eval_k, params, TOK, self.cfg.seed)
        points = [shop_points(s.prompt, s.response)[1] for s in found.samples]
        self.points.append([fmean(x) for x in zip(*points)])
        self.evals.append((self.tokens, fmean(map(sum, points))))
        self.ends.append(len(self.steps))

    def on_step(self, step, metrics, samples, batch):
        ends, ids = self.cfg.policy.eos_ids, {s.prompt_id: i for i, s in enumerate(samples)}
        texts = [response_text(TOK, s.response_ids, ends) for s in samples]
        quality = [shop_quality(self.text[s.prompt_id], t) for s, t in zip(samples, texts)]
        group = torch.tensor([ids[s.prompt_id] for s in samples])
        row = order_of(batch, torch.tensor(quality), group)
        row |= dict(reward=metrics['reward_mean'], quality=fmean(quality))
        row |= dict(silent=metrics['zero_variance_raw_frac'])
        self.steps.append(row)
        self.tokens += int(metrics['tokens'])
        over = self.tokens >= self.study.budget
        if over or self.tokens >= self.study.budget / self.study.marks * len(self.evals):
            self.evaluate()
        if over:
            raise Stop

    def stretches(self):
        "What is kept of the steps between two evaluations: pairs in sum, the rest as a mean"
        parts = [self.steps[a:b] for a, b in pairwise(self.ends) if a < b]
        how = {k: fmean if k in MEANS else sum for k in self.steps[0]}
        return {k: [f(row[k] for row in part) for part in parts] for k, f in how.items()}


MEANS = 'reward', 'quality', 'silent'


def cold_started(study, folder):
    "The weights that all trials begin with, made once"
    seed = JUDGE_SEED
    cfg = config(study, seed, study.rates[0])
    path = Path(folder) / f'cold-{seed}-{digest(cfg.policy, cfg.cold_start)}.pt'
    if not path.exists():
        policy = Policy(cfg.policy, seed)
        optim = replace(cfg.optim, lr=cfg.cold_start.lr, num_mini_batches=1)
        train = prompts_of(MIX, POOL, seed, 'train')
        for _ in cold_start(
            TorchTrain(policy, optim, replay='off'), train, cfg.cold_start, TOK, seed
        ):
            pass
        torch.save(policy.state_dict(), path)
    return torch.load(path, weights_only=True)


def trial(study, arm, seed, lr, folder):
    "One run: true quality on the way, and what every step's advantages made of it"
    cfg = config(study, seed, lr)
    policy = Policy(cfg.policy, seed)
    policy.load_state_dict(cold_started(study, folder))
    engine = TorchTrain(policy, cfg.optim, cfg.rollout.temperature, cfg.router_replay)
    rollout = TorchRollout(cfg.policy, cfg.rollout.num_slots)
    rollout.load_weights(engine.weights(), 0)
    train = prompts_of(MIX, POOL, seed, 'train')
    curve, ends = Curve(study, cfg, rollout, train), cfg.policy.eos_ids
    band = reward_model(folder, study.judges)[1] if arm == 'bt_band' else None
    judge, began = ArmJudge(train, rewards_of(arm, study, folder), ends, band), time.process_time()
    try:
        fit(cfg, train, rollout, engine, TOK, curve, ends, judge=judge)
    except Stop:
        pass
    found = dict(arm=arm, seed=seed, lr=lr, tokens=curve.tokens, judged=len(judge.known))
    found |= dict(seconds=time.process_time() - began, num_steps=len(curve.steps))
    found |= dict(evals=curve.evals, points=[curve.points[0], curve.points[-1]])
    return rounded(found | dict(steps=curve.stretches()))


def kept(study, arm, seed, lr, folder):
    "A trial from its file, or made now"
    whole = digest(replace(study, seeds=(), tuning=(), rates=()), config(study, seed, lr))
    path = Path(folder) / f'{arm}-{seed}-{whole}.json'
    if not path.exists():
        write_json(path, trial(study, arm, seed, lr, folder))
    return json.loads(path.read_text())


# ---- what they show


def share(trial, part, of):
    "Of the pairs of a trial, in percent"
    s = trial['steps']
    return 100 * sum(map(sum, (s[k] for k in part))) / max(1, sum(map(sum, (s[k] for k in of))))


DIFFER = 'right', 'tied', 'inverted'


def fell(trial):
    "Did the mean reward rise and true quality fall from the middle of the run to its end?"
    s = trial['steps']
    reward, quality = (s[k][-1] - s[k][len(s[k]) // 2] for k in ('reward', 'quality'))
    return reward > 0 > quality


MEASURES = dict(
    before=lambda r: r['evals'][0][1],
    after=lambda r: r['evals'][-1][1],
    gain=lambda r: r['evals'][-1][1] - r['evals'][0][1],
    fall_from_best=lambda r: max(v for _, v in r['evals']) - r['evals'][-1][1],
    silent=lambda r: 100 * fmean(r['steps']['silent']),
    **{k: lambda r, k=k: share(r, (k,), DIFFER) for k in DIFFER},
    split=lambda r: share(r, ('split',), ('equal',)),
)


CONTRASTS = dict(  # one less the other
    control=('oracle', 'bt'),
    judge=('judge', 'bt'),
    direct=('judge_direct', 'bt'),
    cut=('bt_labels', 'bt'),
    band=('bt_band', 'bt'),
    model=('judge_direct', 'bt_labels'),  # labels of two models, taught by labels alone
    steps=('judge', 'judge_direct'),  # what written steps add
    form=('oracle_labels', 'oracle'),  # what labels of the truth lose against one reference
)


def summary(trials):
    "Each measure with its interval, and the differences of `after` and `inverted` from `bt`"
    out = {}
    for arm in dict.fromkeys(r['arm'] for r in trials):
        mine = [r for r in trials if r['arm'] == arm]
        row = dict(lr=mine[0]['lr'], hacked=sum(map(fell, mine)))
        row |= {k: fmean(r[k] for r in mine) for k in ('seconds', 'num_steps')}
        row |= {k: interval([f(r) for r in mine]) for k, f in MEASURES.items()}
        points = ([r['points'][i] for r in mine] for i in (0, 1))
        row |= dict(points=[[fmean(x) for x in zip(*rows)] for rows in points])
        row |= {f'{k}_against_bt': against(trials, arm, 'bt', k) for k in ('after', 'inverted')}
        out[arm] = row
    return out


def against(trials, arm, other, key):
    "Paired by seed"
    one, two = ({r['seed']: r for r in trials if r['arm'] == a} for a in (arm, other))
    return interval([MEASURES[key](r) - MEASURES[key](two[s]) for s, r in one.items()])


def tuned(study, arms, folder):
    "Per arm, the true quality that each rate has brought; more rates until the best is inside"
    found = {}
    for arm in tqdm(arms, 'rates'):
        of, rates = {}, list(study.rates)
        while rates:
            for lr in rates:
                ends = [kept(study, arm, s, lr, folder)['evals'][-1][1] for s in study.tuning]
                of[lr] = fmean(ends)
                print(arm, lr, ends, flush=True)
            best = max(of, key=of.get)
            beyond = {min(of): min(of) / 2, max(of): max(of) * 2}
            rates = [beyond[best]] if best in beyond and len(of) > 1 else []
        found[arm] = {f'{lr:g}': of[lr] for lr in sorted(of)}
    return found


def rate_of(rates):
    "The one that ended best"
    return float(max(rates, key=rates.get))


def blind(seeds, num):
    "The best answer without reading the question: one and the same to all, and its quality"
    texts = [p.text for s in seeds for p in prompts_of(MIX, num, s, 'heldout')]
    answers = [f'{x}{y}' for x in 'AB' for y in ('', *(f' for {n}' for n in range(1, 10)))]
    found = {a: fmean(shop_quality(t, a) for t in texts) for a in answers}
    return max(found.items(), key=lambda x: x[1])


# the design before, as its stored result had it (commit 6ae76797): 200 steps of cold start
BEFORE = dict(cold_steps=200, budget=24_000, seeds=tuple(range(6)))
BEFORE |= dict(control=(-0.053874, -0.082979, -0.024769), after=dict(bt=3.1287, oracle=3.0748))


def earlier(study, rates, folder):
    "Its cold start again, for as many tokens as now, on the seeds that chose the rates"
    short, out = replace(study, cold_steps=BEFORE['cold_steps']), {}
    for arm in ('bt', 'oracle'):
        ran = [kept(short, arm, s, rate_of(rates[arm]), folder) for s in study.tuning]
        row = {k: fmean(MEASURES[k](r) for r in ran) for k in ('before', 'after')}
        points = ([r['points'][i] for r in ran] for i in (0, 1))
        out[arm] = row | dict(points=[[fmean(x) for x in zip(*rows)] for rows in points])
    return dict(before=BEFORE, blind=blind(study.tuning, study.num_heldout), arms=out)


def measured(study, arms, folder, quick):
    Path(folder).mkdir(parents=True, exist_ok=True)
    judges = accuracy(folder, study.judges)
    print(judges)
    rates = tuned(study, arms, folder)
    jobs = [(arm, s, rate_of(rates[arm])) for s in study.seeds for arm in arms]
    trials = [kept(study, *job, folder) for job in tqdm(jobs, 'labels')]
    table = summary(trials)
    for arm, row in table.items():
        print(arm, {k: [round(x, 2) for x in v] for k, v in row.items() if k in MEASURES})
    one, other = (table[k]['gain'][0] for k in ('judge', 'bt'))
    found = dict(name='labels', ratio=one / other if other else 1.0)
    found |= dict(units='true quality gained with the labels of the judge / with BT scores')
    pairs = {k: v for k, v in CONTRASTS.items() if set(v) <= set(arms)}
    found |= dict(contrasts={k: against(trials, *v, 'after') for k, v in pairs.items()})
    if not quick:
        found |= dict(earlier=earlier(study, rates, folder))
    settings = asdict(study) | dict(quick=quick, contrasts=CONTRASTS)
    found |= dict(table=table, rates=rates, judges=judges)
    return rounded(found) | dict(runs=trials, settings=settings)


def main():
    global POOL, STEP
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--quick', action='store_true', help='a small case, to see that it runs')
    quick = p.parse_args().quick
    torch.set_num_threads(1)
    study, arms, folder = Study(), ARMS, RUNS / 'labels'
    with tempfile.TemporaryDirectory() as tmp:
        if quick:
            few = JudgeModelConfig(num_pairs=16, sft_steps=2, rl_steps=1, num_heldout=3)
            small = dict(seeds=(0, 1), tuning=(100,), rates=(4e-4,), budget=50, cold_steps=2)
            study = replace(study, **small, num_heldout=2, eval_k=1, judges=few)
            arms, folder = ('bt', 'bt_band', 'judge'), Path(tmp)
            POOL, STEP = 16, dict(prompts_per_step=2)
        found = measured(study, arms, str(folder), quick)
    print(json.dumps(found | dict(machine=machine_info())))


if __name__ == '__main__':
    main()
