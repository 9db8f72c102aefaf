"""Does entropy find the tokens that decide, and does noise mislead it? Answers of 40 tokens, of
which three count.

A prompt is three letters. The answer walks three stretches and turns left or right after each
(`on the way kL`). Each letter has a side of its own, and an answer is right if all three sides are:
37 of its 40 tokens decide nothing. The cold start shows the right side five times in eight.

forks  all filler is the same in every answer
noise  the first four letters of each stretch are drawn by lot: twelve free tokens, far more
       uncertain than the three that decide

espo, gspo, grpo   each with the clip range and the average of its own paper

A step has 16 prompts and 8 updates. All runs begin with the weights of one cold start; a seed draws
prompts and responses. Each loss has the learning rate with the highest held-out rate, averaged over
a shorter run of `forks` on seeds 100 and 101, which are not compared, and keeps it for `noise`.
Seeds 6 to 9 were added when those of the first six had been seen, because the intervals were wide.
Recall: share of the forks that are in the fifth of a response with the highest entropy (ESPO's
group). Precision: share of that group that are forks; three of eight is the most there can be.
Last line: one JSON object; `ratio` is the gain with ESPO over that with GSPO on `forks`.
usage: make study NAME=forks, python benchmarks/studies/forks.py [--processes 2] [--quick]
"""

import re
import statistics
from dataclasses import replace
from functools import partial

import torch
from _runner import OFF, Study, interval
from _tables import final, flags, rates_of, report, run_quick

from compassrl.algo.losses import LossConfig
from compassrl.algo.losses.espo import EspoConfig, entropy_groups
from compassrl.data.tasks import Problem, judge, task_family, verifier
from compassrl.data.tokenizer import build_tokenizer
from compassrl.records import derive_seed

RIGHT = frozenset('bcfhilmortvwz')  # letters that go right


def road(choose, stretches):
    "Three letters, and an answer whose sides are drawn by lot"
    key = [chr(97 + choose(26)) for _ in range(3)]
    answer = ['LR'[c in RIGHT] for c in key]
    sides = [side if choose(8) < 5 else 'LR'[side == 'L'] for side in answer]
    return ''.join(key), ''.join(answer), ''.join(map(''.join, zip(stretches, key, sides)))


@task_family
def forks(level, choose):
    key, answer, text = road(choose, ['on the way '] * 3)
    return Problem(f'{key}:', answer, text, 'sides')


@task_family
def noise(level, choose):
    lot = choose(2**20)
    letters = ''.join(chr(97 + derive_seed('noise', lot, i) % 26) for i in range(12))
    key, answer, text = road(choose, [f'{letters[i : i + 4]} a way ' for i in (0, 4, 8)])
    return Problem(f'{key}~', answer, text, 'sides')


@verifier
def sides(text, answer):
    "What is said at the forks, nothing else"
    said = ''.join(re.findall('[LR]', text))
    return judge(said == answer, f'{said!r} against {answer!r}')


SIDES = torch.tensor([build_tokenizer().token_to_id(c) for c in 'LR'])


def look(batch):
    "Of a step, before its updates: does the group of high entropy hold the forks?"
    mask = batch.response_mask
    fork = torch.isin(batch.token_ids, SIDES) & mask
    top = (entropy_groups(batch.entropy, mask, EspoConfig()) == 0) & mask
    hit = float((fork & top).sum())
    found = dict(recall=hit / max(1, int(fork.sum())), precision=hit / int(top.sum()))
    mean = [float(batch.entropy[m].mean()) for m in (fork, mask & ~fork)]
    return found | dict(zip(('entropy_forks', 'entropy_filler'), mean))


def changed(cfg, loss):
    optim = replace(cfg.optim, num_mini_batches=8)
    return replace(cfg, zero_variance=OFF, optim=optim, loss=LossConfig(loss))


LOSSES = {name: partial(changed, loss=name) for name in ('espo', 'gspo', 'grpo')}
STUDY = Study(
    'forks',
    dict(forks=(('forks', 0.0, 1.0),), noise=(('noise', 0.0, 1.0),)),
    LOSSES,
    {},
    seeds=tuple(range(10)),
    budget=25_000,
    marks=2,
    num_heldout=64,
    eval_k=4,
    cold_steps=300,
    cold=(('forks', 0.0, 0.5), ('noise', 0.0, 0.5)),
    cold_seed=0,
    look=look,
)


RATES = 2e-4, 4e-4, 1e-3
TUNING = replace(
    STUDY,
    name='forks_rates',
    tasks=dict(forks=STUDY.tasks['forks']),
    seeds=(100, 101),
    budget=20_000,
    num_heldout=80,
    marks=1,
)


def grouping(trials):
    "What `look` has seen, per task and loss: at the first step, at the last, on average"
    out = {}
    for task, arm in dict.fromkeys((r['task'], r['arm']) for r in trials):
        seen = [r['seen'] for r in trials if (r['task'], r['arm']) == (task, arm)]
        row = out.setdefault(task, {}).setdefault(arm, {})
        for key in seen[0]:
            scale = 1 if key.startswith('entropy') else 100
            moments = dict(first=lambda v: v[0], last=lambda v: v[-1], mean=statistics.fmean)
            for name, of in moments.items():
                row[f'{key}_{name}'] = interval([scale * of(s[key]) for s in seen])
    return out


def lost(trials):
    "Points by which the lead of ESPO over each other loss is smaller with noise, paired by seed"
    ends = {(r['task'], r['arm'], r['seed']): 100 * final(r) for r in trials}
    arms, seeds = ({k[i] for k in ends} for i in (1, 2))

    def lead(task, other, seed):
        return ends[task, 'espo', seed] - ends[task, other, seed]

    return {
        other: interval([lead('noise', other, s) - lead('forks', other, s) for s in sorted(seeds)])
        for other in sorted(arms - {'espo'})
    }


def more(trials):
    return dict(grouping=grouping(trials), lead_with_noise=lost(trials))


def main():
    a = flags(__doc__)
    compared = 'espo', 'gspo'
    if a.quick:
        return run_quick(STUDY, 'gspo', compared, more)
    found = rates_of(TUNING, LOSSES, RATES, a.processes)
    best = {m: max(RATES, key=lambda lr: found[m][f'{lr:g}']) for m in LOSSES}
    study = replace(STUDY, learning_rates=best)
    report(study, 'gspo', compared, False, found, a.processes, more)


if __name__ == '__main__':
    main()
