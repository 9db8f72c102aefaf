"""Which prompts a trial asks, where that is the arm: by what became of a prompt, or of prompts like
it, the last times."""

from collections import Counter
from dataclasses import dataclass, replace
from unittest.mock import patch

from _runner import run

from compassrl import experience
from compassrl.data.tokenizer import build_tokenizer
from compassrl.experience import silent_groups
from compassrl.loop import Stop, fit
from compassrl.records import derive_seed


class InTurn:
    "All prompts in turn, in another order each time"

    def __init__(self, curve, prompts, cfg):
        self.curve, self.prompts, self.cfg, self.place = curve, prompts, cfg, 0

    def chance(self, prompt):
        "That it is asked when its turn comes"
        return 1.0

    def took(self, silent):
        "What became of the groups of a step"

    def next(self):
        out, num, seed = {}, self.cfg.prompts_per_step, self.cfg.seed
        while len(out) < num:
            epoch, at = divmod(self.place, len(self.prompts))
            if not at:
                self.order = sorted(
                    self.prompts, key=lambda p: derive_seed(seed, 'epoch', epoch, p.id)
                )
            p = self.order[at]
            lot = derive_seed(seed, 'skip', self.place, p.id) / 2**63
            if p.id not in out and lot < self.chance(p):
                out[p.id] = p
            self.place += 1
        return list(out.values())

    def on_step(self, step, metrics, samples, batch):
        self.took(silent_groups(samples))
        nothing = dict(gradient_noise=0.0)  # where all groups are silent
        self.curve.on_step(step, nothing | metrics, samples, batch)


class BySilence(InTurn):
    "A prompt whose last z visits were all silent is asked with probability 2^-z (after GRESO)"

    def __init__(self, *args):
        super().__init__(*args)
        self.silent = Counter()

    def chance(self, prompt):
        return 0.5 ** self.silent[prompt.id]

    def took(self, silent):
        for id, s in silent.items():
            self.silent[id] = self.silent[id] + 1 if s else 0


class ByLength(InTurn):
    """As often as prompts of its length have lately had a group that is not silent, against the
    length where that is most frequent"""

    def __init__(self, *args):
        super().__init__(*args)
        self.length = {p.id: len(p.token_ids) for p in self.prompts}
        self.awake = dict.fromkeys(self.length.values(), 1.0)

    def chance(self, prompt):
        return max(self.awake[self.length[prompt.id]] / max(self.awake.values()), 0.05)

    def took(self, silent):
        for id, s in silent.items():
            before = self.awake[self.length[id]]
            self.awake[self.length[id]] = 0.9 * before + 0.1 * (not s)


CHOICES = dict(turn=InTurn, silence=BySilence, length=ByLength)


@dataclass(frozen=True)
class Asked:
    "How an arm is trained: one step after the other, on prompts of its own choice"

    by: str  # one of CHOICES
    pool: int = 4096  # prompts that there are

    def __call__(self, cfg, pools, rollout, engine, curve):
        tok, ends, step = build_tokenizer(), cfg.policy.eos_ids, 0
        choice = CHOICES[self.by](curve, pools[0][: self.pool], cfg)
        try:
            while True:
                chosen, cfg = choice.next(), replace(cfg, steps=step + 1)
                fit(cfg, chosen, rollout, engine, tok, choice, ends, step)
                step += 1
        except Stop:
            pass


@dataclass(frozen=True)
class Probe:
    "Groups that differ after a first wave get `more` responses; the others are left as they are"

    more: int

    def __call__(self, *args):
        with patch.object(experience, 'next_wave', self.next_wave):
            run(*args)

    def next_wave(self, samples, asked, spent, prompts, step, cfg, unseen=None):
        if unseen is not None or len(spent) > 1:
            return []
        silent = silent_groups(samples)
        return [(id, self.more) for id in asked if not silent[id]]
