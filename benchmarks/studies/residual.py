"""What to do with groups that stay silent: RL-ZVP, skipping, a second wave, heat, finer rewards,
an ensemble of rewards?

A quarter of the prompts are sums of two digits, a quarter have three, half have four, as in the
study of parts: more than half of the groups are silent. All arms have the penalties of the recipe,
GRPO's loss and one update of 16 prompts a step, all train on the same 96 prompts in the same order,
so that prompts come back, and all begin with the weights of one cold start. A seed draws prompts
and responses.

none     silent groups add nothing
zvp      RL-ZVP: an advantage per token from the entropy
skip     a prompt whose last z visits were all silent is asked with probability 2^-z (after GRESO)
wave     a silent group is asked for eight more responses, the hopeless first, as growth does
hot      the same, and the second eight are drawn at temperature 1.3; their log-probs, too, are
         those at 1.3
graded   a response earns the share of the answer's digits that are right, from the last one on
ensemble a silent group is paid what four learned reward models think of its responses (below)
disagree a silent group is paid how far these four differ on a response
schedule a prompt whose last z visits were all silent is asked at temperature 1 + 0.15 z, at most
         1.45, and at 1 again after a visit with a signal; log-probs are those at its temperature

The ensemble is our reading of the paper's words. A member is a reward model with the weights of the
cold start. It learns from the verdicts of the run itself, from a bootstrap of its own, so no arm
sees more responses or verdicts than another; only the compute is more. A member's opinion of a
response is the tanh of how far its logit lies above the group's mean. `ensemble` adds the mean of
the opinions, where members that disagree cancel out, `disagree` their standard deviation, as a
bonus for what is not known. Only silent groups get it, and the most that two responses can differ
by is 0.4: a wrong one stays below a right one, which earns 1. Settings of the members were chosen
by how well they order the responses of one run of `none` on seed 3280, which is compared with none.

`left`: share of groups that are silent after all this and the penalties, before RL-ZVP.
`noise`: the gradient of a step is a sum over groups; its variance, times 100, from how much the
gradients of the groups differ, before the norm is clipped.
All arms have the learning rate 4e-4; two other seeds check it against half and twice as much, for
`none`, `zvp` and `schedule` before the runs that are compared, for the others after them.
Earlier, at 4e-4 for all and on seeds 0 to 5, paired differences had standard deviations of 0.8 to
1.5 points (2.7 for `graded`): 12 seeds give half-widths of 0.5 to 1 point (1.7), and differences of
1.3 points are seen with 80 % power. Seeds 3200 to 3211 were drawn by no earlier study.
Controls: `none` ends far above its cold start; members order a right and a wrong response of one
group, before they learn from them, better than by chance; `schedule` asks above 1.
About 35 core-minutes.
Last line: one JSON object; `ratio` is the gain with RL-ZVP over that with none.
usage: make study NAME=residual, python benchmarks/studies/residual.py [--processes 2] [--quick]
"""

import tempfile
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from unittest.mock import patch

import torch
from _choice import BySilence, InTurn
from _ensemble import Ensemble
from _evidence import chance, holm
from _runner import OFF, SILENT, Study, against, interval, rounded
from _tables import final as last
from _tables import flags, rates_of, report, small

from compassrl import experience
from compassrl.algo.losses import LossConfig
from compassrl.algo.zero_variance import ZeroVarianceConfig
from compassrl.data.tasks import final, verifier
from compassrl.data.tokenizer import build_tokenizer
from compassrl.judges.serial import SerialJudge
from compassrl.loop import Stop, fit
from compassrl.records import RolloutEngine, select
from compassrl.train.torch_train import TorchTrain, accumulate_grads, clip_and_step


@verifier
def digits(text, answer):
    "Share of digits that are right, counted from the last; correct if all are"
    found = final(text, answer)
    said = text.partition('#')[2]
    same = sum(a == b for a, b in zip(said[::-1], answer[::-1]))
    return replace(found, reward=same / max(len(said), len(answer)))


class Hotter(RolloutEngine):
    "Draws what was asked for in a second wave at a temperature of its own"

    def __init__(self, engine, first, hot):
        self.engine, self.first, self.hot = engine, first, hot

    def load_weights(self, weights, version):
        self.engine.load_weights(weights, version)

    def generate(self, requests, whole_groups=False):
        def drawn(r):
            late = r.index >= self.first
            return replace(r, params=replace(r.params, temperature=self.hot)) if late else r

        return self.engine.generate(map(drawn, requests), whole_groups)


class Scheduled(RolloutEngine):
    "Draws each prompt at the temperature that its history asks for"

    def __init__(self, engine, history):
        self.engine, self.history = engine, history

    def load_weights(self, weights, version):
        self.engine.load_weights(weights, version)

    def generate(self, requests, whole_groups=False):
        def drawn(r):
            return replace(r, params=replace(r.params, temperature=self.history.heat(r.prompt_ids)))

        return self.engine.generate(map(drawn, requests), whole_groups)


class Heated(InTurn):
    "A prompt is asked hotter by `warmer` for each of its last visits that were silent, up to `top`"

    def __init__(self, *args, warmer=0.15, top=1.45):
        super().__init__(*args)
        self.warmer, self.top, self.silent = warmer, top, Counter()
        self.ids = {tuple(p.token_ids): p.id for p in self.prompts}

    def heat(self, prompt_ids):
        return min(1 + self.warmer * self.silent[self.ids[tuple(prompt_ids)]], self.top)

    took = BySilence.took


class ByGroup(TorchTrain):
    "Adds up the gradients of groups, and reports how much they differ; some responses may be hot"

    def __init__(self, policy, config, first, hot):
        super().__init__(policy, config)
        self.first, self.hot = first, hot

    def late(self, batch):
        "[B] bool: of a second wave"
        seen, out = Counter(), []
        for g in batch.group.tolist():
            out.append(seen[g] >= self.first)
            seen[g] += 1
        return torch.tensor(out)

    def heat(self, batch):
        "[B] temperature at which each response was drawn"
        return torch.where(self.late(batch), self.hot, 1.0)

    def score(self, batch):
        found, heat = super().score(batch), self.heat(batch)
        for hot in heat[heat != 1].unique():
            self.temperature = float(hot)
            for k, v in super().score(batch).items():
                found[k][heat == hot] = v[heat == hot]
            self.temperature = 1.0
        return found

    def gradient(self, batch, rows, loss, counts):
        "Of some rows, as a part of the whole batch's; and their part of the clipped tokens"
        heat, total, clipped = self.heat(batch), 0.0, 0.0
        for hot in heat[rows].unique():
            part, size = select(batch, rows & (heat == hot)), self.config.micro_batch_tokens
            whole = partial(divided, loss, counts)
            sums, _ = accumulate_grads(self.policy, part, whole, size, float(hot))
            clipped += float(sums['clip_frac'])
            total = total + torch.cat([grad(p).flatten() for p in self.policy.parameters()])
        return total, clipped

    def update(self, batch, loss, lr=None):
        counts = int(batch.response_mask.sum()), len(batch)
        groups = [batch.group == g for g in batch.group.unique()]
        pulls = [rows for rows in groups if batch.advantages[rows].any()]
        grads, clipped = zip(*[self.gradient(batch, rows, loss, counts) for rows in pulls])
        whole, num = (grads := torch.stack(grads)).sum(0), len(groups)
        # silent groups are zeros among them
        noise = (grads.square().sum() - whole.square().sum() / num) * num / (num - 1)
        place = 0
        for p in self.policy.parameters():
            p.grad = whole[place : place + p.numel()].view_as(p)
            place += p.numel()
        metrics = clip_and_step(self.policy, self.optimizer, self.config.lr_at(self.num_steps), 1.0)
        self.num_steps += 1
        found = dict(gradient_noise=float(noise), clip_frac=sum(clipped), weights_finite=1.0)
        return metrics | found, {}


class ByPrompt(ByGroup):
    "The same, for responses whose temperature their prompt's history has chosen"

    def __init__(self, policy, config, history):
        super().__init__(policy, config, 0, 1.0)
        self.history = history

    def heat(self, batch):
        begins = batch.response_mask.long().argmax(1).tolist()
        asked = [row[:n].tolist() for row, n in zip(batch.token_ids, begins)]
        return torch.tensor([self.history.heat(ids) for ids in asked])


def divided(loss, counts, log_probs, batch, *_):
    return loss(log_probs, batch, *counts)


def grad(p):
    return torch.zeros_like(p) if p.grad is None else p.grad


SEEN = {}  # measurements of an arm's own code in the step that has just ended


@dataclass(frozen=True)
class Way:
    "How an arm is trained: one step after the other, on prompts of its own choice"

    skip: bool = False  # by the history of silence?
    hot: float = 1.0  # temperature of a second wave
    graded: bool = False
    pool: int = 96  # prompts
    ensemble: str = ''  # silent groups are paid its 'mean' or its 'spread'
    schedule: bool = False  # temperatures by the history of silence?

    def __call__(self, cfg, pools, rollout, engine, curve):
        tok, ends, first = build_tokenizer(), cfg.policy.eos_ids, cfg.group_size
        prompts, step = pools[0][: self.pool], 0
        judged = [replace(p, verifier='digits') for p in prompts] if self.graded else prompts
        judge = SerialJudge(judged, tok, ends)
        history = self.remembers(curve, prompts, cfg)
        engine, rollout = self.engines(engine.policy, cfg, rollout, history, first)
        members = Ensemble(engine.policy, self.ensemble, cfg.seed) if self.ensemble else None
        pays = patch.object(experience, 'shape_rewards', members.rewards) if members else None
        SEEN.clear()
        try:
            with pays or nullcontext():
                while True:
                    chosen, cfg = history.next(), replace(cfg, steps=step + 1)
                    hooks = Beside(history, members, chosen)
                    fit(cfg, chosen, rollout, engine, tok, hooks, ends, step, judge=judge)
                    step += 1
        except Stop:
            pass

    def remembers(self, *of):
        return (Heated if self.schedule else BySilence if self.skip else InTurn)(*of)

    def engines(self, policy, cfg, rollout, history, first):
        if self.schedule:
            return ByPrompt(policy, cfg.optim, history), Scheduled(rollout, history)
        return ByGroup(policy, cfg.optim, first, self.hot), Hotter(rollout, first, self.hot)


@dataclass
class Beside:
    "Keeps what the arm has measured, then lets members and history learn from the step"

    history: InTurn
    members: Ensemble | None
    chosen: list

    def on_step(self, step, metrics, samples, batch):
        if self.members:
            SEEN.update(self.members.seen)
            self.members.learn(samples)
        if isinstance(self.history, Heated):
            heats = [self.history.heat(p.token_ids) for p in self.chosen]
            SEEN.update(heat=fmean(heats))
        self.history.on_step(step, metrics, samples, batch)


def seen(batch):
    return dict(SEEN)


DEFAULT = ZeroVarianceConfig()
PENALTIES = {k: getattr(DEFAULT, k) for k in ('length_weight', 'repetition_weight', 'std_floor')}


def changed(cfg, changes):
    zero = replace(OFF, **PENALTIES, **changes)
    return replace(cfg, loss=LossConfig('grpo'), zero_variance=zero)


WAVE = dict(sampling='adaptive', max_group_size=16)
ARMS = dict(
    none=partial(changed, changes={}),
    zvp=partial(changed, changes=dict(zvp_alpha=DEFAULT.zvp_alpha)),
    skip=partial(changed, changes={}),
    wave=partial(changed, changes=WAVE),
    hot=partial(changed, changes=WAVE),
    graded=partial(changed, changes={}),
    ensemble=partial(changed, changes={}),
    disagree=partial(changed, changes={}),
    schedule=partial(changed, changes={}),
)
WAYS = dict.fromkeys(ARMS, Way()) | dict(
    skip=Way(skip=True),
    hot=Way(hot=1.3),
    graded=Way(graded=True),
    ensemble=Way(ensemble='mean'),
    disagree=Way(ensemble='spread'),
    schedule=Way(schedule=True),
)
RATES, CHECK = (2e-4, 4e-4, 8e-4), (3290, 3291)
STUDY = Study(
    'residual',
    dict(silent=SILENT),
    ARMS,
    dict.fromkeys(ARMS, 4e-4),
    seeds=tuple(range(3200, 3212)),
    budget=48_000,
    marks=1,
    eval_k=4,
    cold_seed=0,
    look=seen,
    ways=WAYS,
)


def noise(trial):
    return trial['means']['gradient_noise']


def left(trial):
    return trial['means']['zero_variance_frac']


def more(trials):
    "Groups left to RL-ZVP, and noise of the gradient, of each arm and against `none`"
    out = {}
    for arm in dict.fromkeys(r['arm'] for r in trials):
        mine = [r for r in trials if r['arm'] == arm]
        for name, of in dict(left=left, noise=noise).items():
            row = out.setdefault(arm, {})
            row[name] = interval([100 * of(r) for r in mine])
            if arm != 'none':
                row[f'{name}_against_none'] = against(trials, 'silent', arm, 'none', of)
    found = dict(residual=out, against_zvp=rivals(trials), measured=measured(trials))
    found |= dict(holm={base: told_apart(trials, base) for base in ('none', 'zvp')})
    return found | dict(runs=[slim(r) for r in trials])


def rivals(trials):
    "Of what else wakes silent groups, paired with RL-ZVP"
    arms = dict.fromkeys(r['arm'] for r in trials)
    measures = dict(final=last, noise=noise)
    return {
        arm: {k: against(trials, 'silent', arm, 'zvp', of) for k, of in measures.items()}
        for arm in arms
        if 'zvp' in arms and arm not in ('none', 'zvp')
    }


def told_apart(trials, base):
    "Arms whose final rate differs from that of `base` where all arms are tested together (Holm)"
    arms = [a for a in dict.fromkeys(r['arm'] for r in trials) if a != base]
    seeds = len({r['seed'] for r in trials})
    ps = []
    for arm in arms:
        ps.append(chance(against(trials, 'silent', arm, base, last), seeds))
    kept = holm(ps)
    return [arm for i, arm in enumerate(arms) if i in kept]


def measured(trials):
    """Of the arms with own code: pairs of a right and a wrong response that the members ordered
    right before they learned from them, in percent; how far members differ in silent groups; mean
    temperature"""
    out = {}
    for r in map(slim, trials):
        row = {k: v for k, v in r['seen'].items() if k in ('spread', 'heat')}
        if 'pairs' in r['seen']:
            row |= dict(order=100 * r['seen']['ordered'] / max(r['seen']['pairs'], 1))
        for k, v in row.items():
            out.setdefault(r['arm'], {}).setdefault(k, []).append(v)
    return {arm: {k: interval(v) for k, v in row.items()} for arm, row in out.items()}


KEPT = 'zero_variance_first_frac zero_variance_raw_frac zero_variance_frac clip_frac steps '
KEPT += 'zero_variance_residual_frac gradient_noise gradient_token_frac entropy rollout_train_gap '
KEPT += 'response_tokens_mean'


def slim(trial):
    "What is kept of a trial; of the first step nothing, as its members know nothing yet"
    seen = {}
    for k, v in trial['seen'].items():
        rest = v if k == 'heat' else v[1:]
        rest = [x for x in rest if x == x]  # NaN where no group was silent
        seen[k] = fmean(rest or [0.0]) if k in ('spread', 'heat') else sum(rest)
    means = {k: trial['means'][k] for k in KEPT.split() if k in trial['means']}
    rest = {k: v for k, v in trial.items() if k != 'groups'}  # the table has their means
    return rest | dict(means=means, seen=rounded(seen))


def main():
    a = flags(__doc__)
    if a.quick:
        with tempfile.TemporaryDirectory() as folder:
            quick = small(STUDY, STUDY.arms, folder)
            return report(quick, 'none', ('zvp', 'none'), True, processes=0, more=more)
    rates = rates_of(replace(STUDY, seeds=CHECK), ARMS, RATES, a.processes, last)
    report(STUDY, 'none', ('zvp', 'none'), False, rates, a.processes, more)


if __name__ == '__main__':
    main()
