"""Why is an agent of several turns so much weaker than one call, and what closes the gap (open
question 1 of the paper)?

`3abc:` asks to look up three letters, then what was found, and once more: one call for each step.
Nothing can be computed or remembered, and whoever answers must know when to go on. The cold start
has seen solutions with one call, and very few with two, three and four. From it, with as many
tokens that the policy draws (what the tool says costs nothing):

mix         RL on questions that need one to four calls, one reward at the end
one_call    RL on questions that need one call
per_turn    as mix, and a response that is wrong gets the share of its calls that were right
strict      as per_turn, and a call too many lowers that share
curriculum  one call, then two, three, four: a quarter of the tokens each, one reward at the end

What the policy sees of its own episode is varied from a second cold start. Each observation there
holds one number more: =2xyz; and in the cold start that number says nothing. It has shown every
solution twice, once with all of the history in view and once through the window. Then comes RL on
the mix, from the same weights, with observations of the same form:

mix           the number says nothing, all of the history is in view
state         the number says how many steps are left, all of the history is in view
window        as mix, and in view are the question and the last observation, nothing between
window_state  as state, through the window

All is plain GRPO: silent groups add nothing, no penalties. A dense policy as wide as that of
`tool-cpu`, a shorter cold start and a higher learning rate keep trials short. Held-out questions
are counted by the calls that they need, and by how many of those were right before the first that
was not.
Last line: one JSON object; `ratio` is the rate at four calls over that at one call after `mix`.
usage: make study NAME=turns, python benchmarks/studies/turns.py [--quick]
"""

import argparse
import json
import re
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean

import torch
from _runner import OFF, RUNS, digest, interval, prompts_of
from _views import VIEWS, Viewed, ViewedPolicy, Watcher, taught
from tqdm import tqdm

from compassrl.algo.losses import LossConfig
from compassrl.data.tasks import Choices, Problem, final, task_family, verifier
from compassrl.data.tokenizer import build_tokenizer
from compassrl.data.tools import ToolConfig, tool
from compassrl.loop import Stop, fit
from compassrl.records import Verdict, derive_seed
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.runs.evaluate import evaluate
from compassrl.runs.log import write_json
from compassrl.runs.presets import tool_cpu
from compassrl.runs.summary import machine_info
from compassrl.train.torch_train import TorchTrain

CALLS = (1, 2, 3, 4)  # calls that a question needs
SILENT = 'zero_variance_raw_frac'  # groups of a step whose rewards are equal


def follows(key):
    "What is stored under three letters: nothing to compute, nothing to remember, it must be asked"
    return ''.join(chr(97 + derive_seed('look up', key, i) % 26) for i in range(3))


@tool
def look_up(call: str) -> str:
    "What is stored under three letters; `?` for anything else"
    return follows(call) if re.fullmatch('[a-z]{3}', call) else '?'


@task_family
def chain(level: int, choose: Choices) -> Problem:
    "Look up three letters, then what was found, and so on: level + 1 times"
    key, calls = ''.join(chr(97 + choose(26)) for _ in range(3)), ''
    text = f'{level + 1}{key}:'
    for _ in range(level + 1):
        calls, key = f'{calls}<{key}>', follows(key)
    return Problem(text, key, f'{calls}#{key}', 'final')


def calls_of(text):
    return re.findall(r'<([^<>]*)>', text)


def right_calls(text, solution):
    "Calls of a response before the first that is not the solution's"
    n = 0
    for said, want in zip(calls_of(text), calls_of(solution)):
        if said != want:
            break
        n += 1
    return n


def shared_out(text, answer, due):
    "1 for the right result, else the calls that were right, in order, over what was due"
    v = final(text, answer.partition('#')[2])
    return replace(v, reward=1.0 if v.correct else right_calls(text, answer) / due)


@verifier
def each_call(text: str, answer: str) -> Verdict:
    "Due are the calls of the solution and its result"
    return shared_out(text, answer, len(calls_of(answer)) + 1)


@verifier
def no_call_more(text: str, answer: str) -> Verdict:
    "The same, and a call too many lowers the share"
    return shared_out(text, answer, max(len(calls_of(t)) for t in (text, answer)) + 1)


@dataclass(frozen=True)
class Arm:
    stages: tuple[tuple[int, ...], ...] = (CALLS,)  # calls needed, one stage after another
    verifier: str = 'final'
    view: str = 'plain'


ARMS = dict(
    mix=Arm(),
    one_call=Arm(((1,),)),
    per_turn=Arm(verifier='each_call'),
    strict=Arm(verifier='no_call_more'),
    curriculum=Arm(tuple((n,) for n in CALLS)),
)
POOL = 4096  # prompts of a trial, solutions of a cold start
SHOWN = 'noise', 'noise_window'  # in the cold start of the arms below
SEEN = dict(mix=Arm(view='noise'), state=Arm(view='left'))
SEEN |= dict(window=Arm(view='noise_window'), window_state=Arm(view='left_window'))


@dataclass(frozen=True)
class Study:
    views: tuple[str, ...] = ('plain',)  # views that the cold start has shown
    room: int = 64  # tokens of a response, with what it reads
    seeds: tuple[int, ...] = tuple(range(6))
    budget: int = 60_000  # response tokens of a trial
    shown: tuple[float, ...] = (0.9925, 0.0025, 0.0025, 0.0025)  # shares of the cold solutions
    hasty: float = 0.3  # share of them with the answer alone
    cold_steps: int = 200  # for each view
    num_heldout: int = 64  # for each number of calls
    eval_k: int = 4


def config(study, seed):
    base = tool_cpu()
    sft = replace(base.cold_start, steps=study.cold_steps, hasty_frac=study.hasty)
    sft = replace(sft, num_solutions=POOL)
    layers = tuple(range(base.policy.num_hidden_layers))
    # no experts: three times faster
    more = dict(policy=replace(base.policy, mlp_only_layers=layers))
    more |= dict(cold_start=sft, rollout=replace(base.rollout, max_tokens=study.room))
    more |= dict(optim=replace(base.optim, lr=1e-3, warmup_steps=3))
    more |= dict(zero_variance=OFF, loss=LossConfig('grpo'), tools=ToolConfig('look_up'))
    return replace(base, seed=seed, steps=10**6, **more)


# ---- questions


@cache
def questions(arm, shares, num, seed, split):
    "Calls needed, share of each"
    mix = tuple(('chain', float(n - 1), share) for n, share in shares)
    found = prompts_of(mix, num, seed, split)
    if arm.verifier != 'final':
        found = [replace(p, verifier=arm.verifier, answer=p.solution) for p in found]
    return found


# ---- one trial


def short(found):
    "Five digits of every number"
    return json.loads(json.dumps(found), parse_float=lambda x: float(f'{float(x):.5g}'))


def engines(cfg, view, weights):
    tok = build_tokenizer()
    policy = ViewedPolicy(cfg.policy, cfg.seed, tok)
    policy.load_state_dict(weights)
    policy.window = view.window
    engine = TorchTrain(policy, cfg.optim, cfg.rollout.temperature, cfg.router_replay)
    rollout = TorchRollout(cfg.policy, cfg.rollout.num_slots)
    rollout.load_weights(engine.weights(), 0)
    return engine, Viewed(rollout, Watcher(cfg.tools, tok, view))


def cold_started(study, seed, folder):
    "The weights that all trials of a seed begin with, and their rates in each view: made once"
    arm = Arm()
    cfg = config(study, seed)
    path = folder / f'cold-{seed}-{digest(replace(study, seeds=(), budget=0), cfg)}.pt'
    if not path.exists():
        sft, tok = cfg.cold_start, build_tokenizer()
        prompts = questions(arm, tuple(zip(CALLS, study.shown)), sft.num_solutions, seed, 'train')
        policy = ViewedPolicy(cfg.policy, seed, tok)
        optim = replace(cfg.optim, lr=sft.lr, num_mini_batches=1)
        views = {name: VIEWS[name] for name in study.views}
        taught(TorchTrain(policy, optim, replay='off'), prompts, cfg, views.values(), tok)
        weights = policy.state_dict()
        rates = {k: seen(study, seed, engines(cfg, v, weights)[1]) for k, v in VIEWS.items()}
        torch.save(dict(weights=weights, rates=rates), path.with_suffix('.tmp'))
        path.with_suffix('.tmp').replace(path)
    return torch.load(path, weights_only=True)


def seen(study, seed, rollout):
    "Held-out rates of one policy, with all the room: a row for each number of calls"
    arm, rows, tok = Arm(), [], build_tokenizer()
    cfg = config(study, seed)
    params = cfg.rollout.params(cfg.policy.eos_ids)
    for n in CALLS:
        prompts = questions(arm, ((n, 1.0),), study.num_heldout, seed, 'heldout')
        found = evaluate(rollout, prompts, study.eval_k, params, tok, seed)
        solution = {p.id: p.solution for p in prompts}
        texts = [(s.response, solution[s.prompt_id]) for s in found.samples]
        right = [right_calls(*t) for t in texts]
        share = [fmean(r >= k for r in right) for k in range(1, n + 1)]
        calls = fmean(len(calls_of(t)) for t, _ in texts)
        rows.append(dict(needed=n, avg=found.avg, stderr=found.avg_stderr, calls=calls))
        rows[-1] |= dict(right_calls=share, truncated=found.truncated_frac)
    return rows


class Budget:
    "Stops a stage when its tokens are spent"

    def __init__(self, budget):
        self.budget, self.tokens, self.steps, self.rows = budget, 0, 0, []

    def on_step(self, step, metrics, samples, batch):
        self.rows.append(metrics)
        self.steps, self.tokens = step, self.tokens + int(metrics['tokens'])
        if self.tokens >= self.budget:
            raise Stop


def learn(study, cfg, arm, engine, rollout):
    "Stage after stage; the metrics of all steps"
    tok, steps, rows = build_tokenizer(), 0, []
    for stage in arm.stages:
        shares = tuple((n, 1 / len(stage)) for n in stage)
        prompts = questions(arm, shares, POOL, cfg.seed, 'train')
        end = Budget(study.budget / len(arm.stages))
        try:
            fit(cfg, prompts, rollout, engine, tok, end, cfg.policy.eos_ids, start=steps)
        except Stop:
            steps, rows = end.steps, rows + end.rows
    return rows


def trial(study, name, arm, seed, folder):
    "One run: what the policy can do before and after"
    torch.set_num_threads(1)
    cfg = config(study, seed)
    start = cold_started(study, seed, folder)
    engine, rollout = engines(cfg, VIEWS[arm.view], start['weights'])
    began = time.perf_counter()
    rows = learn(study, cfg, arm, engine, rollout)
    found = dict(arm=name, seed=seed, seconds=time.perf_counter() - began, steps=len(rows))
    found |= dict(tokens=int(sum(m['tokens'] for m in rows)), before=start['rates'][arm.view])
    found |= dict(after=seen(study, seed, rollout))
    silent, said = (fmean(m[k] for m in rows) for k in (SILENT, 'response_tokens_mean'))
    return short(found | dict(silent=silent, silent_first=rows[0][SILENT], response_tokens=said))


def kept(study, name, arm, seed, folder):
    "A trial from its file, or made now"
    whole = digest(replace(study, seeds=()), arm, config(study, seed))
    path = folder / f'{name}-{seed}-{whole}.json'
    if not path.exists():
        write_json(path, trial(study, name, arm, seed, folder))
    return json.loads(path.read_text())


# ---- what they show


def rate(trial, when, needed):
    return 100 * trial[when][needed - 1]['avg']


def gap(trial, when='after'):
    "Points that the longest questions are behind the shortest"
    return rate(trial, when, CALLS[0]) - rate(trial, when, CALLS[-1])


def several(trial, when='after'):
    "Mean rate of questions that need more than one call"
    return fmean(rate(trial, when, n) for n in CALLS[1:])


def paired(trials, arm, other, measure):
    "Differences on the same seeds, in points, and their interval"
    found = {(r['arm'], r['seed']): measure(r) for r in trials}
    return interval([found[arm, s] - found[other, s] for a, s in found if a == arm])


def summary(trials):
    "Rates by calls needed, the gap, and the differences from `mix`; each with its interval"
    out = {}
    for arm in dict.fromkeys(r['arm'] for r in trials):
        mine = [r for r in trials if r['arm'] == arm]
        row = dict(seeds=[r['seed'] for r in mine])
        for when in ('before', 'after'):
            row[when] = [interval([rate(r, when, n) for r in mine]) for n in CALLS]
            row[f'gap_{when}'] = interval([gap(r, when) for r in mine])
            row[f'several_{when}'] = interval([several(r, when) for r in mine])
        row['calls'] = [fmean(r['after'][n - 1]['calls'] for r in mine) for n in CALLS]
        row |= {k: interval([r[k] for r in mine]) for k in ('silent', 'silent_first')}
        row |= {k: fmean(r[k] for r in mine) for k in ('steps', 'tokens', 'seconds')}
        if arm != 'mix':
            row['several_against_mix'] = paired(trials, arm, 'mix', several)
            row['gap_against_mix'] = paired(trials, arm, 'mix', gap)
        out[arm] = row
    return out


def show(table):
    print(f'{"arm":12}{"before":>24}{"after, 1 to 4 calls":>28}{"2 to 4 calls - mix":>28}')
    for arm, row in table.items():
        cells = [''.join(f'{x[0]:6.1f}' for x in row[w]) for w in ('before', 'after')]
        against = '{:+10.1f} [{:+6.1f}, {:+6.1f}]'.format(*row.get('several_against_mix', (0,) * 3))
        print(f'{arm:12}{cells[0]}{cells[1]:>28}{against}')


def made(study, arms, folder):
    "All trials of some arms, their table, and what they depend on"
    jobs = [(name, arm, s) for s in study.seeds for name, arm in arms.items()]
    trials = [kept(study, *job, folder) for job in tqdm(jobs, 'turns')]
    table = summary(trials)
    for other in {'window', 'state'} & set(arms):
        pair = paired(trials, 'window_state', other, several)
        table['window_state'][f'several_against_{other}'] = pair
    show(table)
    return dict(table=short(table), runs=trials, settings=asdict(study) | dict(calls=CALLS))


def main():
    global POOL
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--quick', action='store_true', help='a small case, to see that it runs')
    quick = p.parse_args().quick
    small, folder = {}, RUNS / 'turns'
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as tmp:
        if quick:
            small = dict(seeds=(0, 1), budget=1, cold_steps=4, num_heldout=2, eval_k=1)
            small |= dict(room=16)
            folder, POOL = Path(tmp), 128
        arms = {k: ARMS[k] for k in ('mix', 'one_call')} if quick else ARMS
        found = made(replace(Study(), **small), arms, folder)
        seen = made(replace(Study(), views=SHOWN, **small), SEEN, folder)
    last, first = (found['table']['mix']['after'][i][0] for i in (-1, 0))
    found['settings']['quick'] = quick
    head = dict(name='turns', ratio=round(last / first, 3) if first else 0.0)
    head |= dict(units='held-out avg@k after RL on the mix: four calls needed / one call')
    print(json.dumps(head | found | dict(views=seen, machine=machine_info())))


if __name__ == '__main__':
    main()
