"""What to do with groups that stay silent: RL-ZVP, skipping, a second wave, heat, finer rewards?

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

`left`: share of groups that are silent after all this and the penalties, before RL-ZVP.
`noise`: the gradient of a step is a sum over groups; its variance, times 100, from how much the
gradients of the groups differ, before the norm is clipped.
Last line: one JSON object; `ratio` is the gain with RL-ZVP over that with none.
usage: make study NAME=residual, python benchmarks/studies/residual.py [--processes 2] [--quick]
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import torch
from _choice import BySilence, InTurn
from _runner import OFF, SILENT, Study, against, interval
from _tables import final as last
from _tables import flags, report, run_quick

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


class ByGroup(TorchTrain):
    "Adds up the gradients of groups, and reports how much they differ; second waves may be hot"

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

    def score(self, batch):
        found = super().score(batch)
        late = self.late(batch)
        if self.hot != 1 and late.any():
            self.temperature = self.hot
            for k, v in super().score(batch).items():
                found[k][late] = v[late]
            self.temperature = 1.0
        return found

    def gradient(self, batch, rows, loss, counts):
        "Of some rows, as a part of the whole batch's; and their part of the clipped tokens"
        late, total, clipped = self.late(batch), 0.0, 0.0
        for at, heat in ((rows & ~late, 1.0), (rows & late, self.hot)):
            if at.any():
                part, size = select(batch, at), self.config.micro_batch_tokens
                whole = partial(divided, loss, counts)
                sums, _ = accumulate_grads(self.policy, part, whole, size, heat)
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


def divided(loss, counts, log_probs, batch, *_):
    return loss(log_probs, batch, *counts)


def grad(p):
    return torch.zeros_like(p) if p.grad is None else p.grad


@dataclass(frozen=True)
class Way:
    "How an arm is trained: one step after the other, on prompts of its own choice"

    skip: bool = False  # by the history of silence?
    hot: float = 1.0  # temperature of a second wave
    graded: bool = False
    pool: int = 96  # prompts

    def __call__(self, cfg, pools, rollout, engine, curve):
        tok, ends, first = build_tokenizer(), cfg.policy.eos_ids, cfg.group_size
        prompts, step = pools[0][: self.pool], 0
        judged = [replace(p, verifier='digits') for p in prompts] if self.graded else prompts
        judge = SerialJudge(judged, tok, ends)
        engine = ByGroup(engine.policy, cfg.optim, first, self.hot)
        rollout = Hotter(rollout, first, self.hot)
        history = (BySilence if self.skip else InTurn)(curve, prompts, cfg)
        try:
            while True:
                chosen, cfg = history.next(), replace(cfg, steps=step + 1)
                fit(cfg, chosen, rollout, engine, tok, history, ends, step, judge=judge)
                step += 1
        except Stop:
            pass


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
)
WAYS = dict.fromkeys(ARMS, Way()) | dict(
    skip=Way(skip=True), hot=Way(hot=1.3), graded=Way(graded=True)
)
STUDY = Study(
    'residual',
    dict(silent=SILENT),
    ARMS,
    dict.fromkeys(ARMS, 4e-4),
    seeds=tuple(range(6)),
    budget=48_000,
    marks=1,
    eval_k=4,
    cold_seed=0,
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
    return dict(residual=out, against_zvp=rivals(trials))


def rivals(trials):
    "Of what else wakes silent groups, paired with RL-ZVP"
    arms = dict.fromkeys(r['arm'] for r in trials)
    measures = dict(final=last, noise=noise)
    return {
        arm: {k: against(trials, 'silent', arm, 'zvp', of) for k, of in measures.items()}
        for arm in arms
        if 'zvp' in arms and arm not in ('none', 'zvp')
    }


def main():
    a = flags(__doc__)
    if a.quick:
        return run_quick(STUDY, 'none', ('hot', 'none'), more)
    report(STUDY, 'none', ('zvp', 'none'), False, processes=a.processes, more=more)


if __name__ == '__main__':
    main()
