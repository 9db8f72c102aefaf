"""The judges of the study of labels against scores: made once, and asked for rewards."""

import time
from functools import cache
from pathlib import Path
from statistics import fmean

import torch

from compassrl.data.tokenizer import build_tokenizer, response_text
from compassrl.data.toys import shop_quality
from compassrl.judges.genrm import Question, compare, label_rewards
from compassrl.judges.serial import Judge, record_verdict
from compassrl.model.pretrained import read_shards
from compassrl.records import Verdict
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.runs.judge_model import (
    JUDGE_SHAPE,
    agreement,
    label_of,
    make_judge_model,
    open_judge,
    pair_row,
    shop_pairs,
    true_label,
)
from compassrl.runs.log import json_text, replace_text
from compassrl.train.sft import SFTConfig
from course.reward_model import RewardModel, score_texts, train_reward_model

TOK = build_tokenizer()


# ---- the judges, made once


def text_of(prompt, answer):
    return f'{prompt}\n{answer}\n'


def gaps_of(model, pairs):
    parts = [[text_of(q.prompt, a) for q, a in zip(pairs, x)] for x in zip(*(q[1:] for q in pairs))]
    first, second = (score_texts(model, part, TOK) for part in parts)
    return (first - second).tolist()


@cache
def reward_model(folder, c):
    "The same trunk, the same pairs, as many steps, and the band within which scores are a tie"
    path, model = Path(folder) / 'reward_model.pt', RewardModel(JUDGE_SHAPE, c.seed)
    if not path.exists():
        pairs = shop_pairs(c.num_pairs, 'train', c.seed, c.level, c.margin)
        rows = [
            (text_of(q.prompt, q.first), text_of(q.prompt, q.second), label_rewards[true_label(q)])
            for q in pairs
        ]
        cfg = SFTConfig(steps=c.sft_steps, batch_size=16, lr=2e-3, warmup_steps=50)
        for _ in train_reward_model(model, rows, cfg, TOK, c.seed):
            pass
        torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path, weights_only=True))
    pairs = shop_pairs(min(1000, c.num_pairs), 'train', c.seed + 1, c.level, c.margin)
    gaps, truth = gaps_of(model, pairs), [true_label(q) for q in pairs]
    bands = [0.05 * i for i in range(60)]
    return model, max(bands, key=lambda b: sum(label_of(g, b) == t for g, t in zip(gaps, truth)))


def label_alone(folder, c):
    "The pairs of the judge that writes no steps: the same, with the label as all there is to say"
    folder.mkdir(parents=True, exist_ok=True)
    for name, num, split in (
        ('pairs', c.num_pairs, 'train'),
        ('heldout', c.num_heldout, 'heldout'),
    ):
        rows = [pair_row(q, c.margin) for q in shop_pairs(num, split, c.seed, c.level, c.margin)]
        lines = [json_text(r | dict(solution=f'#{r["answer"]}')) + '\n' for r in rows]
        if not (path := folder / f'{name}.jsonl').exists():
            replace_text(path, ''.join(lines))


@cache
def judge_of(folder, c, name='judge'):
    "In single precision and large waves: twice as fast"
    path = Path(folder) / name
    if name == 'judge_direct' and not (path / 'judge.json').exists():
        label_alone(path, c)  # files that are there already are what it learns from
    path = make_judge_model(path, c)
    ask = open_judge(path)
    ask.rollout = TorchRollout(ask.rollout.config, 256, return_routes=False)
    ask.rollout.load_weights(read_shards(path), 0)
    return ask


def accuracy(folder, c):
    "Agreement of all on the same held-out pairs"
    model, band = reward_model(folder, c)
    pairs = shop_pairs(c.num_heldout, 'heldout', c.seed, c.level, c.margin)
    pairs = [q for q in dict.fromkeys(pairs) if q.first != q.second]
    truth = [true_label(q) for q in pairs]
    labels = dict(bt=[label_of(g, band) for g in gaps_of(model, pairs)])
    for name in ('judge', 'judge_direct'):
        labels[name] = [x.label for x in compare(judge_of(folder, c, name), pairs)[0]]
    return {k: agreement(v, truth) for k, v in labels.items()} | dict(band=band, pairs=len(pairs))


# ---- rewards


def rewards_of(arm, study, folder):
    "A function of prompts and texts"

    def oracle(asked):
        return [float(shop_quality(p.text, t)) for p, t in asked]

    def oracle_labels(asked):
        return [label_rewards[true_label(Question(p.text, t, p.answer))] for p, t in asked]

    def bt(asked):
        texts = [text_of(p.text, t) for p, t in asked]
        return score_texts(reward_model(folder, study.judges)[0], texts, TOK).tolist()

    def bt_labels(asked):
        model, band = reward_model(folder, study.judges)
        gaps = gaps_of(model, [Question(p.text, t, p.answer) for p, t in asked])
        return [label_rewards[label_of(g, band)] for g in gaps]

    def judge(asked, name='judge'):
        questions = [Question(p.text, t, p.answer) for p, t in asked]
        done, _ = compare(judge_of(folder, study.judges, name), questions)
        return [label_rewards.get(c.label, 0.5) for c in done]

    def judge_direct(asked):
        return judge(asked, 'judge_direct')

    # the band of `bt_band` joins the scores of a group later
    found = dict(oracle=oracle, oracle_labels=oracle_labels, bt=bt, bt_band=bt)
    return (found | dict(bt_labels=bt_labels, judge=judge, judge_direct=judge_direct))[arm]


def with_ties(scores, band):
    """Scores of a group, those near each other made equal

    From the highest down: a score that is at most the band below the highest of its cluster
    belongs to it. Each gets the mean of its cluster."""
    clusters: list[list[int]] = []
    for i in sorted(range(len(scores)), key=lambda i: -scores[i]):
        if clusters and scores[clusters[-1][0]] - scores[i] <= band:
            clusters[-1].append(i)
        else:
            clusters.append([i])
    means = {i: fmean(scores[j] for j in c) for c in clusters for i in c}
    return [means[i] for i in range(len(scores))]


class ArmJudge(Judge):
    "Each response to a prompt is judged once; with a band, scores of a group become ties"

    def __init__(self, prompts, rewards, ends, band=None):
        self.prompts, self.rewards, self.ends = {p.id: p for p in prompts}, rewards, ends
        self.known, self.band = {}, band

    def settle(self, samples):
        samples = [s for s in samples if s.verdict is None]
        start = time.perf_counter()
        keys = [(s.prompt_id, response_text(TOK, s.response_ids, self.ends)) for s in samples]
        new = [k for k in dict.fromkeys(keys) if k not in self.known]
        if new:
            asked = [(self.prompts[i], text) for i, text in new]
            self.known |= dict(zip(new, self.rewards(asked), strict=True))
        times = dict(reward_start=start, detokenise=0.0, reward_end=time.perf_counter())
        for s, reward in zip(samples, self.settled(keys)):
            record_verdict(s, Verdict(reward, False, 'ok', ''), times)

    def settled(self, keys):
        "The reward of each response; a group is all responses to a prompt that come together"
        out = [self.known[k] for k in keys]
        if self.band is None:
            return out
        for prompt in {i for i, _ in keys}:
            mine = [n for n, (i, _) in enumerate(keys) if i == prompt]
            for n, reward in zip(mine, with_ties([out[n] for n in mine], self.band)):
                out[n] = reward
        return out
