"""A generative judge against a Bradley-Terry model: agreement, tie accuracy and inversions.

Makes a judge of the shop (`make_judge_model`: cold start, then RL), trains a scalar reward model of
the same trunk on the same pairs, and asks all of them about the same held-out pairs and groups.
The reward model calls a pair a tie where its scores differ by less than a band, which is chosen on
training pairs. Intervals: Wilson for shares of pairs, bootstrap over groups for the order of
advantages. Last line: one JSON object; `ratio` is the inversions of the reward model over those of
the judge. usage: python benchmarks/judge.py [--folder FOLDER] [--quick]
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from compassrl.algo.advantages import group_advantages
from compassrl.data.tokenizer import build_tokenizer
from compassrl.data.toys import shop_quality
from compassrl.judges.genrm import compare, label_rewards
from compassrl.judges.genrm_client import JUDGE_PROMPT
from compassrl.runs.judge_model import (
    JUDGE_SHAPE,
    JudgeModelConfig,
    agreement,
    label_of,
    make_judge_model,
    open_judge,
    shop_pairs,
    true_label,
)
from compassrl.runs.summary import machine_info
from compassrl.train.sft import SFTConfig
from course.reward_model import (
    RewardModel,
    answer_groups,
    judge_rewards,
    score_texts,
    train_reward_model,
)

TOK = build_tokenizer()
QUICK = dict(num_pairs=16, num_heldout=6, sft_steps=4, rl_steps=1)
NUM_GROUPS = 128  # groups of eight answers in which inversions are counted


def text_of(prompt, answer):
    return f'{prompt}\n{answer}\n'


def reward_model(c):
    "The same trunk, the same pairs, as many steps; where its scores are nearly equal, a tie"
    pairs = shop_pairs(c.num_pairs, 'train', c.seed, c.level, c.margin)
    rows = [
        (text_of(q.prompt, q.first), text_of(q.prompt, q.second), label_rewards[true_label(q)])
        for q in pairs
    ]
    model = RewardModel(JUDGE_SHAPE, c.seed)
    cfg = SFTConfig(steps=c.sft_steps, batch_size=16, lr=2e-3, warmup_steps=50)
    losses = [m['loss'] for m in train_reward_model(model, rows, cfg, TOK, c.seed)]
    gaps, truth = gaps_of(model, pairs[:2000]), [true_label(q) for q in pairs[:2000]]

    def hits(band):
        return sum(label_of(g, band) == t for g, t in zip(gaps, truth))

    bands = [0.05 * i for i in range(60)]
    return model, max(bands, key=hits), losses[-1]


def gaps_of(model, pairs):
    scores = [
        score_texts(model, [text_of(q.prompt, a) for q, a in zip(pairs, answers)], TOK)
        for answers in zip(*((q.first, q.second) for q in pairs))
    ]
    return (scores[0] - scores[1]).tolist()


def order_counts(rewards, groups):
    "Per group: pairs of different quality that are right, tied, inverted"
    out = []
    for p, answers in groups.values():
        r = rewards(p, answers).float()
        a = group_advantages(r, torch.zeros(len(r), dtype=torch.long))
        q = torch.tensor([shop_quality(p.text, x) for x in answers])
        sign = torch.sign(a[:, None] - a)[q[:, None] > q]
        out.append([int((sign == s).sum()) for s in (1, 0, -1)])
    return torch.tensor(out, dtype=torch.double)


def with_intervals(counts, seed=0, num=2000):
    "Shares of pairs, and 95 % intervals by a bootstrap over groups"
    gen = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(counts), (num, len(counts)), generator=gen)
    drawn = counts[rows].sum(1)
    shares = drawn / drawn.sum(1, keepdim=True)
    low, high = shares.quantile(torch.tensor([0.025, 0.975], dtype=torch.double), 0)
    mean = counts.sum(0) / counts.sum()
    return {k: [float(x[i]) for x in (mean, low, high)] for i, k in enumerate(ORDER)}


ORDER = 'right', 'tied', 'inverted'


def measured_judge(folder, prompt_file, pairs, groups, margin):
    ask, truth = open_judge(folder, prompt_file), [true_label(q, margin) for q in pairs]
    done, replies = compare(ask, pairs)
    found = agreement([c.label for c in done], truth)
    counts = order_counts(judge_rewards(ask), groups)
    examples = [
        dict(prompt=q.prompt, first=q.first, second=q.second, wrote=r.text, truth=t)
        for q, r, t in zip(pairs[:6], replies[::2], truth)
    ]
    disagree = sum(not c.agreed for c in done) / len(done)
    return found | dict(order=with_intervals(counts), disagree=disagree, examples=examples)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--folder', default='', help='where the judge is made; it goes on there')
    p.add_argument('--quick', action='store_true', help='a few steps, to see that it works')
    a = p.parse_args()
    torch.set_num_threads(1)
    c = JudgeModelConfig(**(QUICK if a.quick else {}))
    folder, t = Path(a.folder or tempfile.mkdtemp()), time.process_time()
    make_judge_model(folder, c)
    made_s, t = time.process_time() - t, time.process_time()
    model, band, loss = reward_model(c)
    reward_s = time.process_time() - t
    pairs = shop_pairs(c.num_heldout, 'heldout', c.seed, c.level, c.margin)
    # Nobody is asked about equal answers, and once about equal pairs
    pairs = [q for q in dict.fromkeys(pairs) if q.first != q.second]
    groups = answer_groups(2 if a.quick else NUM_GROUPS, level=c.level)
    truth = [true_label(q, c.margin) for q in pairs]
    arms = {}
    for name, weights in dict(sft='run/start', rl='run/model').items():
        arms[name] = measured_judge(
            folder / weights, folder / JUDGE_PROMPT, pairs, groups, c.margin
        )
    labels = [label_of(g, band) for g in gaps_of(model, pairs)]

    def scores(prompt, answers):
        return score_texts(model, [text_of(prompt.text, x) for x in answers], TOK)

    order = with_intervals(order_counts(scores, groups))
    arms['bt'] = agreement(labels, truth) | dict(order=order, band=band, loss=loss)
    found = dict(
        settings=vars(c) | dict(quick=a.quick, ties=truth.count('Tie') / len(truth)),
        arms=arms,
        cpu_s=dict(judge=round(made_s, 1), reward_model=round(reward_s, 1)),
        machine=machine_info(),
    )
    for name, arm in arms.items():
        say = {k: f'{arm[k][0]:.1%}' for k in ('agreement', 'tie_accuracy')}
        print(name, say, {k: f'{v[0]:.1%}' for k, v in arm['order'].items()})
    inverted = {k: v['order']['inverted'][0] for k, v in arms.items()}
    ratio = round(inverted['bt'] / max(inverted['rl'], 1e-9), 3)
    units = 'pairs that advantages put in the wrong order, Bradley-Terry model / judge'
    print(json.dumps(dict(name='judge', ratio=ratio, units=units, **found)))


if __name__ == '__main__':
    main()
