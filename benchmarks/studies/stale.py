"""Who keeps learning when the sampler's weights are old? GRPO, GSPO, CISPO and ESPO with samples
whose weights are k updates of the trainer behind: k = 0, 1, 2, 4, 8.

NAME_k          the loss alone: no replay, no weight for the distance of old and new policy
NAME_k_mended   with router replay (R3) and truncated importance sampling
NAME_8_tis, NAME_8_replay   with one of the two; added after a look at the other arms

A step has 16 prompts of 8 responses and two updates, so a run of 96,000 tokens has 30 to 45 steps.
Sums of two and three digits, half and half, from the cold start of `tiny-cpu`. In no arm do silent
groups add anything, nor grow, nor are there penalties. ESPO has the wide alpha 0.5, as in the study
of losses. The sampler is the one of `schedule.max_staleness` without its process: step t is drawn
by the weights after t - k steps, and the queue's bits are equal (a test). Each arm has the lowest
of three rates that ends within a point of its best one, on seeds 1590 and 1591 (`rates`).

`lost`   by arm: points at the end behind the same arm with k = 0 (one of the two: behind the loss
         alone), paired by seed
Last line: one JSON object; `ratio` is the gain of GRPO at k = 8 over that at k = 0.
usage: make study NAME=stale, python benchmarks/studies/stale.py [--processes 2] [--quick]
"""

from collections import deque
from dataclasses import replace
from functools import partial
from statistics import fmean

from _runner import OFF, Study, against
from _tables import final, flags, report, run_quick, tuned

from compassrl.algo.losses import LossConfig
from compassrl.algo.losses.espo import EspoConfig
from compassrl.experience import Sampler, counted
from compassrl.judges.serial import SerialJudge
from compassrl.loop import Stop, run_steps
from compassrl.rollout.torch_rollout import TorchRollout

LOSSES = 'grpo', 'gspo', 'cispo', 'espo'
DEPTHS = 0, 1, 2, 4, 8
SHOWN = 'rollout_train_ess', 'rollout_train_gap', 'tis_clip_frac'


class StaleSampler(Sampler):
    "Step t is drawn by the weights after max(0, t - k) steps, in this process"

    def __init__(self, k, engine, *args):
        super().__init__(*args)
        self.kept = deque(maxlen=k + 1)
        self.keep(0, engine.weights())

    def keep(self, step, weights):
        self.kept.append((step, [(name, w.detach().clone()) for name, w in weights]))
        version, old = self.kept[0]
        self.rollout.load_weights(old, version)

    def hand_over(self, step, engine, metrics):
        self.keep(step, counted(engine.weights(), metrics))


def run(cfg, pools, rollout, engine, curve, k):
    "`rollout` evaluates, by the newest weights; another one draws"
    [train], tok, ends = pools, curve.study.tokenizer, cfg.policy.eos_ids
    drawer = TorchRollout(cfg.policy, cfg.rollout.num_slots)
    judge = SerialJudge(train, tok, ends)
    sampler = StaleSampler(k, engine, cfg, train, drawer, judge, ends)

    class Newest:
        @staticmethod
        def on_step(step, metrics, samples, batch):
            rollout.load_weights(engine.weights(), step)
            curve.on_step(step, metrics, samples, batch)

    try:
        run_steps(cfg, sampler, engine, Newest)
    except Stop:
        pass


def changed(cfg, loss, how):
    optim = replace(cfg.optim, num_mini_batches=2, final_lr_frac=0.05)
    cfg = replace(cfg, zero_variance=OFF, optim=optim, espo=EspoConfig(alpha=0.5))
    cfg = replace(cfg, router_replay='R3' if how in ('mended', 'replay') else 'off')
    tis = 'truncate' if how in ('mended', 'tis') else 'off'
    return replace(cfg, loss=LossConfig(loss, tis=tis))


def named(loss, k, how):
    return f'{loss}_{k}_{how}'.rstrip('_')


ARMS = [(m, k, how) for m in LOSSES for how in ('', 'mended') for k in DEPTHS]
ARMS += [(m, DEPTHS[-1], how) for how in ('tis', 'replay') for m in LOSSES]
NAMES = {named(*arm): arm for arm in ARMS}
STUDY = Study(
    'stale',
    dict(sums=(('arithmetic', 1.5, 1.0),)),
    {name: partial(changed, loss=m, how=how) for name, (m, _, how) in NAMES.items()},
    {},
    seeds=tuple(range(1500, 1506)),
    budget=96_000,
    marks=2,
    num_heldout=256,
    eval_k=4,
    ways={name: partial(run, k=k) for name, (_, k, _) in NAMES.items()},
)
RATES = 1e-4, 2e-4, 4e-4
TUNING = replace(STUDY, name='stale_rates', seeds=(1590, 1591), marks=1)


def lost(trials):
    "Points at the end, and what the samples were like, by arm"
    found = {}
    for name, (loss, _, how) in NAMES.items():
        base = named(loss, 0, how if how == 'mended' else '')
        mine = [r for r in trials if r['arm'] == name]
        if not mine:
            continue
        found[name] = dict(points=against(trials, 'sums', name, base, final))
        found[name] |= {
            k: fmean(r['means'][k] for r in mine) for k in SHOWN if k in mine[0]['means']
        }
    return dict(lost=found)


def main():
    a = flags(__doc__)
    ratio = 'grpo_8', 'grpo_0'
    if a.quick:
        return run_quick(STUDY, 'grpo_0', ratio, lost)
    study, rates = tuned(STUDY, TUNING, RATES, a.processes, final)
    report(study, 'grpo_0', ratio, False, rates, a.processes, lost)


if __name__ == '__main__':
    main()
