"""Labels against scores in a training loop: what happens to true quality, and to the order of
advantages?

A shopper's question has answers of true quality 0 to 5, which no trained judge sees. The cold start
imitates the mixed answers that judges were trained on. From it, with as many response tokens:

bt             the score of a Bradley-Terry model
bt_labels      the same scores, cut into Better, Tie, Worse against the reference answer by a band
judge          the labels of a generative judge against the reference, both orders asked
oracle_labels  the labels that the true quality gives against the reference
oracle         the true quality

One generative judge and one Bradley-Terry model serve all seeds: the same trunk, the same 24,000
pairs of a seed of their own, 1500 steps of 16. The band fits 1000 further pairs best. All is plain
GRPO: silent groups add nothing, no penalties. A dense policy as wide as that of `tiny-cpu`. Each
arm has the lowest learning rate that ends within 0.05 of true quality of its best one, in runs as
long on seeds 100 and 101, which are not compared. A first try took the best one: with the judge's
labels that was 1e-3, and one run of six fell from 2.9 to 0. All runs begin with the weights of one
cold start; a seed draws prompts and responses. A judge is asked once about a response to a prompt.
Inverted: pairs of a group of which the better answer has the lower advantage. Split: pairs of equal
quality whose advantages differ.
Last line: one JSON object; `ratio` is the true quality gained with `judge` over that with `bt`.
usage: make study NAME=labels, python benchmarks/studies/labels.py [--quick]
"""

import argparse
import json
import random
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from _runner import OFF, RUNS, common, digest, interval, prompts_of, rounded
from _shop_judges import TOK, ArmJudge, accuracy, rewards_of
from _tables import lowest
from tqdm import tqdm

from compassrl.algo.losses import LossConfig
from compassrl.data.tasks import Choices, Problem, task_family
from compassrl.data.tokenizer import response_text
from compassrl.data.toys import shop, shop_quality
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

ARMS = 'bt', 'bt_labels', 'judge', 'oracle_labels', 'oracle'
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
    seeds: tuple[int, ...] = tuple(range(6))
    tuning: tuple[int, ...] = (100, 101)
    rates: tuple[float, ...] = (2.5e-4, 5e-4, 1e-3, 2e-3)
    budget: int = 24_000  # response tokens of a trial
    marks: int = 4
    cold_steps: int = 200
    num_heldout: int = 512
    eval_k: int = 4
    judges: JudgeModelConfig = PAIRS


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


class Curve:
    "Counts tokens, evaluates true quality at marks, stops at the budget"

    def __init__(self, study, cfg, rollout, prompts):
        self.study, self.cfg, self.rollout = study, cfg, rollout
        self.text = {p.id: p.text for p in prompts}
        self.heldout = prompts_of(MIX, study.num_heldout, cfg.seed, 'heldout')
        self.steps, self.evals, self.tokens = [], [], 0
        self.evaluate()

    def evaluate(self):
        params = self.cfg.rollout.params(self.cfg.policy.eos_ids)
        found = evaluate(self.rollout, self.heldout, self.study.eval_k, params, TOK, self.cfg.seed)
        value = fmean(shop_quality(s.prompt, s.response) for s in found.samples)
        self.evals.append((self.tokens, value))

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
    judge, began = ArmJudge(train, rewards_of(arm, study, folder), ends), time.perf_counter()
    try:
        fit(cfg, train, rollout, engine, TOK, curve, ends, judge=judge)
    except Stop:
        pass
    steps = {k: [row[k] for row in curve.steps] for k in curve.steps[0]}
    found = dict(arm=arm, seed=seed, lr=lr, tokens=curve.tokens, judged=len(judge.known))
    found |= dict(seconds=time.perf_counter() - began, evals=curve.evals, steps=steps)
    return rounded(found)


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
    "Did the mean reward rise and true quality fall from the middle third of the steps to the last?"
    s = trial['steps']
    third = len(s['reward']) // 3

    def change(k):
        return fmean(s[k][-third:]) - fmean(s[k][third : 2 * third])

    return bool(third) and change('reward') > 0 > change('quality')


MEASURES = dict(
    before=lambda r: r['evals'][0][1],
    after=lambda r: r['evals'][-1][1],
    gain=lambda r: r['evals'][-1][1] - r['evals'][0][1],
    fall_from_best=lambda r: max(v for _, v in r['evals']) - r['evals'][-1][1],
    silent=lambda r: 100 * fmean(r['steps']['silent']),
    **{k: lambda r, k=k: share(r, (k,), DIFFER) for k in DIFFER},
    split=lambda r: share(r, ('split',), ('equal',)),
)


def summary(trials):
    "Each measure with its interval, and the differences of `after` and `inverted` from `bt`"
    out = {}
    for arm in dict.fromkeys(r['arm'] for r in trials):
        mine = [r for r in trials if r['arm'] == arm]
        row = dict(
            lr=mine[0]['lr'], hacked=sum(map(fell, mine)), seconds=fmean(r['seconds'] for r in mine)
        )
        row |= {k: interval([f(r) for r in mine]) for k, f in MEASURES.items()}
        base = {r['seed']: r for r in trials if r['arm'] == 'bt'}
        for k in ('after', 'inverted'):
            f = MEASURES[k]
            row[f'{k}_against_bt'] = interval([f(r) - f(base[r['seed']]) for r in mine])
        out[arm] = row
    return out


def tuned(study, arms, folder):
    "Per arm, the true quality that each rate has brought on the seeds for that"
    found = {arm: {f'{lr:g}': [] for lr in study.rates} for arm in arms}
    jobs = [(arm, s, lr) for arm in arms for s in study.tuning for lr in study.rates]
    for arm, s, lr in tqdm(jobs, 'rates'):
        found[arm][f'{lr:g}'].append(kept(study, arm, s, lr, folder)['evals'][-1][1])
    return {arm: {lr: fmean(v) for lr, v in of.items()} for arm, of in found.items()}


def measured(study, arms, folder, quick):
    Path(folder).mkdir(parents=True, exist_ok=True)
    judges = accuracy(folder, study.judges)
    print(judges)
    rates = tuned(study, arms, folder)
    print(rates)
    jobs = [(arm, s, lowest(rates[arm], 0.05)) for s in study.seeds for arm in arms]
    trials = [kept(study, *job, folder) for job in tqdm(jobs, 'labels')]
    table = summary(trials)
    for arm, row in table.items():
        print(arm, {k: [round(x, 2) for x in v] for k, v in row.items() if isinstance(v, list)})
    one, other = (table[k]['gain'][0] for k in ('judge', 'bt'))
    found = dict(name='labels', ratio=round(one / other, 3) if other else 1.0)
    found |= dict(units='true quality gained with the labels of the judge / with BT scores')
    settings = asdict(study) | dict(quick=quick)
    return found | dict(
        table=rounded(table), rates=rates, judges=judges, runs=trials, settings=settings
    )


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
            few = JudgeModelConfig(num_pairs=48, sft_steps=3, rl_steps=1, num_heldout=8)
            small = dict(seeds=(0, 1), tuning=(100,), rates=(4e-4,), budget=200, cold_steps=4)
            study = replace(study, **small, num_heldout=2, eval_k=1, judges=few)
            arms, folder = ('bt', 'judge'), Path(tmp)
            POOL, STEP = 64, dict(prompts_per_step=4)
        found = measured(study, arms, str(folder), quick)
    print(json.dumps(found | dict(machine=machine_info())))


if __name__ == '__main__':
    main()
