"""ESPO where its clip range fits: long answers, small steps, and every range at one share of
clipped tokens.

A policy of 3 M learns sums of 10 to 14 digits with working (answers of 100 to 140 tokens), 64
prompts x 8, 8 updates a step, silent groups off, 40 steps. Arms, each at two learning rates:

grpo            GRPO, the control: it must gain
gspo            GSPO with its paper's range (3e-4, 4e-4)
espo            ESPO with alpha 0.02
gspo_matched    GSPO, its range scaled until the share of clipped tokens is `SHARE`
espo_matched    ESPO, alpha found for that share
one_matched     ESPO with one group per response, alpha found for that share: what grouping is worth

Ranges are found by bisection in runs of three steps on a seed of their own, the same effort for
each. Two comparisons would fail if the law of `alpha_law` were wrong: ESPO minus GSPO at their own
ranges rises towards 0 as eps / (sigma / sqrt(n)) rises, over the two rates; and ESPO's own share is
below GSPO's. The clean test of grouping is `espo_matched` - `one_matched`.
Written for one H100, 8 processes at a time, about six minutes: not run on GPU.
Last line: one JSON object; `ratio` is ESPO's gain over GSPO's, both matched, at the higher rate.
usage: python benchmarks/studies/espo_range.py --gpu
       python benchmarks/studies/espo_range.py --tiny   a small case on a CPU, to see that it runs
"""

import argparse
import json
import math
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import losses
from _evidence import would_see
from _runner import Study, against, run_all, trial
from _tables import final

from compassrl.runs.summary import machine_info

MIX = tuple(('arithmetic', level, 0.2) for level in (9.0, 10.0, 11.0, 12.0, 13.0))
ROOM = dict(max_position_embeddings=256)
SHAPE = dict(hidden_size=192, num_hidden_layers=4, moe_intermediate_size=192, **ROOM)
SHARE, RATES, FINDER = 0.15, (3e-5, 1e-4), 1390
STEP_TOKENS = 64 * 8 * 120


def long_arm(cfg, loss, low, high, espo):
    cfg = losses.changed(cfg, loss, low, high, espo)
    rollout = replace(cfg.rollout, max_tokens=160, num_slots=512)
    return replace(cfg, prompts_per_step=64, group_size=8, rollout=rollout)


def arm(loss, low=None, high=None, **espo):
    return partial(long_arm, loss=loss, low=low, high=high, espo=espo)


def espo(x, **more):
    return arm('espo', alpha=min(x, 1.0), eps_min=0.0, **more)


def gspo(x):
    return arm('gspo', 3e-4 * x, 4e-4 * x)


FOUND = dict(  # arm -> how it is made from a number, and where that lies
    gspo_matched=(gspo, 1.0, 2000.0),
    espo_matched=(espo, 1e-3, 1.0),
    one_matched=(partial(espo, top_frac=1.0), 1e-3, 1.0),
)
OWN = dict(grpo=arm('grpo'), gspo=arm('gspo'), espo=arm('espo'))
STUDY = Study(
    'espo_range',
    dict(long=MIX),
    OWN,
    {},
    seeds=(1300, 1301, 1302, 1303),
    budget=40 * STEP_TOKENS,
    marks=2,
    num_heldout=256,
    eval_k=4,
    cold_steps=600,
    cold=MIX,
    shape=SHAPE,
)


def matched(study, make, low, high, lr, looks=7):
    "The number whose arm clips nearest to `SHARE` of the tokens, by halves of its logarithm"
    short = replace(study, budget=3 * study.budget // 40, marks=1, num_heldout=8)
    seen = {}
    for _ in range(looks):
        x = math.sqrt(low * high)
        look = replace(short, arms=dict(look=make(x)), learning_rates=dict(look=lr))
        seen[x] = trial(look, next(iter(study.tasks)), 'look', FINDER)['means']['clip_frac']
        low, high = (x, high) if seen[x] > SHARE else (low, x)
    return min(seen.items(), key=lambda item: abs(item[1] - SHARE))


def compared(rows, task, pairs):
    out = {}
    for one, other in pairs:
        mean, low, high = against(rows, task, one, other, final)
        n = len({r['seed'] for r in rows if r['arm'] == one})
        half = (high - low) / 2
        out[f'{one}-{other}'] = dict(points=[mean, low, high], would_see=would_see(half, n), n=n)
    return out


PAIRS = ('espo', 'gspo'), ('espo_matched', 'gspo_matched'), ('espo_matched', 'one_matched')
PAIRS += (('grpo', 'espo_matched'),)


def few(make):
    "A small step, for a CPU"

    def made(x):
        return partial(_few, arm=make(x))

    return made


def _few(cfg, arm):
    cfg = arm(cfg)
    rollout = replace(cfg.rollout, max_tokens=16)
    return replace(cfg, prompts_per_step=8, group_size=2, rollout=rollout)


def at_rate(study, own, found, lr, looks, processes):
    "All arms at one learning rate: ranges found, contrasts, shares of clipped tokens"
    ranges = {m: matched(study, *how, lr, looks) for m, how in found.items()}
    arms = own | {m: found[m][0](x) for m, (x, _) in ranges.items()}
    study = replace(study, arms=arms, learning_rates=dict.fromkeys(arms, lr))
    (task,) = study.tasks
    rows = run_all(study, [(task, m, s) for s in study.seeds for m in arms], processes)
    clip = {m: [r['means']['clip_frac'] for r in rows if r['arm'] == m] for m in arms}
    about = dict(found={m: dict(x=x, clip=c) for m, (x, c) in ranges.items()}, clip=clip)
    return about | dict(contrasts=compared(rows, task, PAIRS), runs=rows)


def gain(rows, name):
    mine = [r for r in rows if r['arm'] == name]
    return sum(final(r) - r['evals'][0][1] for r in mine) / len(mine)


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--gpu', action='store_true', help='the study, on CUDA, 8 runs at a time')
    p.add_argument('--tiny', '--quick', action='store_true', help='a small case on a CPU')
    a = p.parse_args()
    if a.gpu == a.tiny:
        p.error('choose --gpu (one H100, six minutes) or --tiny (a CPU, seconds)')
    with tempfile.TemporaryDirectory() as folder:
        study, looks, own, ways = replace(STUDY, device='cuda'), 7, OWN, FOUND
        if a.tiny:
            fewer = dict(shape=ROOM, cold=Study.cold, tasks=dict(long=Study.cold), budget=200)
            fewer |= dict(seeds=STUDY.seeds[:2], cold_steps=4, num_heldout=4, marks=1, pool=64)
            study, looks = replace(STUDY, runs=Path(folder), **fewer), 1
            own = {m: few(lambda _, arm=arm: arm)(None) for m, arm in OWN.items()}
            ways = {m: (few(how[0]), *how[1:]) for m, how in FOUND.items()}
        rates = RATES[-1:] if a.tiny else RATES
        by_rate = {f'{lr:g}': at_rate(study, own, ways, lr, looks, 8 * a.gpu) for lr in rates}
    for lr, of in by_rate.items():
        for name, row in of['contrasts'].items():
            print(lr, name, '{:+.1f} [{:+.1f}, {:+.1f}]'.format(*row['points']))
    rows = by_rate[f'{rates[-1]:g}']['runs']
    one, other = gain(rows, 'espo_matched'), gain(rows, 'gspo_matched')
    found = dict(name='espo_range', ratio=round(one / other, 3) if other else 1.0)
    found |= dict(units='gain with ESPO / with GSPO, at one share of clipped tokens')
    found |= dict(rates=by_rate, runs=[r for of in by_rate.values() for r in of.pop('runs')])
    settings = dict(seeds=study.seeds, share=SHARE, finder=FINDER, tiny=a.tiny)
    found |= dict(settings=settings, gpu='' if a.gpu else 'not run on GPU')
    print(json.dumps(found | dict(machine=machine_info())))


if __name__ == '__main__':
    main()
