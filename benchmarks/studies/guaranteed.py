"""What does each stage do with groups that are silent for certain, and what does it cost?

A quarter of the prompts pays every response, a quarter none, whatever is written; half are sums of
two digits. So stage by stage it is known which groups can be woken rightly: none of the first two
kinds can be by more samples, and what penalties or RL-ZVP make of them is not about the task.

grpo       nothing: these groups add nothing
growth     silent groups are asked for more responses
penalties  length and repetition
zvp        RL-ZVP
recipe     penalties and RL-ZVP, prompts in turn
refill     dynamic sampling

`audit`: per arm and kind of prompt, the first step of fresh cold starts: groups silent at first,
still silent before RL-ZVP, responses asked per prompt. `table`: held-out rate on sums alone after a
budget. The control: growth never wakes a guaranteed group, and the sums gain with `grpo`.
About ten minutes on two idle cores.
Last line: one JSON object; `ratio` is the responses that growth spends on guaranteed prompts over
those it spends on sums.
usage: make study NAME=guaranteed, python benchmarks/studies/guaranteed.py [--quick]
"""

import json
import tempfile
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import recipe
from _evidence import library
from _runner import OFF, Study, cold_started, engines, rounded, run_all
from _tables import flags, show, small, summary

from compassrl.algo.zero_variance import ZeroVarianceConfig, shape_rewards
from compassrl.data.tasks import verifier
from compassrl.experience import collect, silent_groups
from compassrl.judges.serial import SerialJudge
from compassrl.runs.summary import machine_info


@verifier
def always(text, answer):
    "Pays whatever is written"
    return 1.0


@verifier
def never(text, answer):
    "Pays nothing"
    return 0.0


def stage(cfg, zero_variance):
    return replace(cfg, loss=recipe.LossConfig('grpo'), zero_variance=zero_variance)


off = dict(length_weight=0, repetition_weight=0, zvp_alpha=0)
STAGES = dict(
    grpo=OFF,
    growth=ZeroVarianceConfig('adaptive', **off),
    penalties=ZeroVarianceConfig('uniform', zvp_alpha=0),
    zvp=ZeroVarianceConfig('uniform', length_weight=0, repetition_weight=0),
    refill=recipe.DYNAMIC,
)
ARMS = {m: partial(recipe.as_default, partial(stage, zero_variance=z)) for m, z in STAGES.items()}
ARMS |= dict(recipe=recipe.ARMS['turn'])
SUMS = (('arithmetic', 1.0, 1.0),)
KINDS = dict(right='always', wrong='never')


class Guaranteed(Study):
    "Every fourth prompt pays always, every fourth never; held-out ones are sums"

    def prompts(self, mix, num, seed, split):
        found = super().prompts(mix, num, seed, split)
        if split == 'heldout' or mix == self.cold:
            return found
        kinds = [*KINDS.values(), None, None]
        return [
            p if kinds[i % 4] is None else replace(p, verifier=kinds[i % 4])
            for i, p in enumerate(found)
        ]


STUDY = Guaranteed(
    'guaranteed',
    dict(half=SUMS),
    ARMS,
    dict.fromkeys(ARMS, 4e-4),
    seeds=tuple(range(1400, 1412)),
    budget=60_000,
    marks=1,
    eval_k=4,
)


def audit(study, arm, seed):
    "The first step of a run: kind of prompt -> groups, silent ones, responses"
    cfg = study.config(arm, seed)
    prompts = study.prompts(SUMS, min(512, study.pool), seed, 'train')
    kind = {p.id: {v: k for k, v in KINDS.items()}.get(p.verifier, 'sums') for p in prompts}
    _, rollout = engines(cfg, cold_started(study, seed))
    judge = SerialJudge(prompts, study.tokenizer, cfg.policy.eos_ids)
    _, samples, found = collect(rollout, prompts, 0, cfg, judge, cfg.policy.eos_ids)
    judge.settle(samples)
    before = silent_groups(samples)
    shaped = {}
    rewards = shape_rewards(samples, cfg.rollout.max_tokens, cfg.zero_variance)
    for sample, reward in zip(samples, rewards.tolist()):
        shaped.setdefault(sample.prompt_id, []).append(reward)
    after = {i: max(v) - min(v) < 1e-4 for i, v in shaped.items()}
    out = {}
    for name in ('right', 'wrong', 'sums'):
        mine = [i for i in before if kind[i] == name]
        num = Counter(kind[s.prompt_id] for s in samples)[name]
        out[name] = dict(groups=len(mine), silent=sum(before[i] for i in mine))
        out[name] |= dict(shaped=sum(after[i] for i in mine), responses=num)
    return dict(arm=arm, seed=seed, tokens=int(found['tokens']), kinds=out, library=library())


def main():
    a = flags(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        study = small(STUDY, ('grpo', 'growth'), Path(folder)) if a.quick else STUDY
        audits = [audit(study, m, s) for s in study.seeds for m in study.arms]
        trials = [('half', m, s) for s in study.seeds for m in study.arms]
        rows = [r | dict(budget=study.budget) for r in run_all(study, trials, 0)]
    show(table := summary(rows, study.tasks, study.arms, 'grpo'), 'grpo')
    spent = Counter()
    for x in audits:
        if x['arm'] == 'growth':
            for kind, of in x['kinds'].items():
                spent['sums' if kind == 'sums' else 'guaranteed'] += of['responses']
                assert kind == 'sums' or of['silent'] == of['groups'], 'the control'
    found = dict(name='guaranteed', ratio=round(spent['guaranteed'] / max(spent['sums'], 1), 3))
    found |= dict(units='responses of growth on guaranteed prompts / on sums')
    settings = dict(seeds=study.seeds, budget=study.budget, quick=a.quick)
    found |= dict(table=rounded(table), audit=audits, runs=rows, settings=settings)
    print(json.dumps(found | dict(machine=machine_info())))


if __name__ == '__main__':
    main()
