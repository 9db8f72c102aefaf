"""The loop with its shapes, a group, clip ranges, token groups and a router near a tie: drawn from
the library's own numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from compassrl.algo.advantages import Estimator, group_advantages
from compassrl.algo.loss_registry import policy_losses
from compassrl.algo.losses import clipped_surrogate
from compassrl.algo.losses.espo import (
    EspoConfig,
    adaptive_clip,
    entropy_groups,
    group_mean,
    group_ratio,
)
from compassrl.model.layers import softmax_gates
from compassrl.records import Batch, Sample, collate

from .canvas import Role, arrow, box, dot, drawing, line, text, width

if TYPE_CHECKING:
    from IPython.display import SVG

__all__ = [
    'loop_shapes',
    'shared_reward',
    'three_log_probs',
    'group',
    'clip_ranges',
    'token_groups',
    'router_tie',
]


def _small_batch():  # two prompts, four responses each
    def sample(i):
        ids = list(range(2, 6 + i % 4))
        log_probs = torch.full((len(ids),), -1.0)
        return Sample(f'{i // 4}', i % 4, [2] * 7, ids, log_probs, None, None, 'stop', 0)

    return collate([sample(i) for i in range(8)])


def loop_shapes(
    batch: Batch | None = None,  # None = a small example
) -> SVG:
    "The loop, and what its arrows carry"
    batch = batch or _small_batch()
    (B, T), P = batch.token_ids.shape, len(batch.group.unique())
    names = 'prompts', '', 'verdicts', 'train engine', 'loss', 'advantages'
    tops = 10, 172, 322
    boxes = [box(8 + 244 * (i // 3), tops[i % 3], 140, 44, n) for i, n in enumerate(names)]
    arrows = [
        *(arrow((28, a), (28, b)) for a, b in ((57, 169), (219, 319))),
        arrow((151, 344), (249, 344)),
        *(arrow((372, b), (372, a)) for a, b in ((57, 169), (219, 319))),
        arrow((249, 24), (202, 24), (202, 186), (151, 186), role='good', thick=2),
        arrow((151, 202), (226, 202), (226, 40), (249, 40)),
        arrow((268, 57), (268, 169)),
    ]
    stations = [
        text(40, 80, '1 ask', bold=True),
        text(78, 208, '2 sample', anchor='middle', bold=True),
        text(40, 260, '3 judge', bold=True),
        text(200, 334, '4 compare', anchor='middle', bold=True),
        text(200, 224, '5 recompute', anchor='middle', bold=True),
        text(364, 124, '6 update', anchor='end', bold=True),
        text(196, 144, '7 hand over', 'good', anchor='end', bold=True),
    ]
    words = [
        text(40, 98, f'{B} requests of\n{P} prompts'),
        text(78, 190, 'rollout', anchor='middle'),
        text(40, 278, f'tokens [{B}, {T}]'),
        text(200, 364, f'rewards [{B}],\none per response', anchor='middle'),
        text(360, 278, f'advantages [{B}, {T}]', anchor='end'),
        text(274, 78, f'old log-probs\n[{B}, {T}]'),
        text(364, 142, 'one number,\nits gradient', anchor='end'),
        text(196, 162, 'weights', 'good', anchor='end'),
        text(200, 242, 'the same tokens', anchor='middle'),
    ]
    says = (
        f'1, ask: {P} prompts become {B} requests. 2, sample: the rollout answers with tokens of '
        f'shape {B} by {T}. 3, judge: the verdicts are {B} rewards. 4, compare: they become '
        'advantages. 5, recompute: the train engine gets the same tokens, and its old log-probs '
        'make with the advantages one number, the loss. 6, update: its gradient moves the train '
        'engine. 7, hand over: the new weights go back to the rollout.'
    )
    parts = *boxes, *arrows, *stations, *words
    return drawing('The loop and what its arrows carry', says, 396, *parts)


def shared_reward(
    probs: Sequence[float],  # probability of each token, when it was sampled
    reward: float,
    baseline: float,
) -> SVG:
    "One reward, minus a baseline, goes to every token of a response"
    a, n = reward - baseline, len(probs)
    step = (width - 24) / n
    parts, role = [], _sign(a)
    for i, q in enumerate(probs):
        x = 12 + step * i
        parts += [
            box(x, 14, step - 16, 48, f'token {i + 1}\nprob {q:g}'),
            arrow((x + step / 2 - 8, 118), (x + step / 2 - 8, 66), role=role, thick=2),
            text(x + step / 2, 100, f'{a:+.2f}', role),
        ]
    said = f'reward {reward:g} - baseline {baseline:g} = {a:+.2f}'
    parts += [box(12, 120, width - 40, 36, said, role)]
    says = (
        f'A response of {n} tokens has the reward {reward:g}. Minus the baseline {baseline:g}, '
        f'the same {a:+.2f} multiplies the log-probability of each token.'
    )
    return drawing('One reward for all tokens', says, 168, *parts)


def three_log_probs(
    probs: Sequence[float] = (0.5, 0.48, 0.6),  # probability of one token: rollout, before, now
) -> SVG:
    "The three log-probabilities of a token, where they are computed, and their quotients"
    names = 'rollout engine\nwhile sampling', 'train engine\nbefore the update', 'train engine\nnow'
    fields = 'rollout_log_probs', 'old_log_probs', 'log_probs'
    sampled, old, new = probs
    parts = []
    for i, (name, field, q) in enumerate(zip(names, fields, probs)):
        y = 12 + 84 * i
        parts += [
            box(12, y, 150, 48, name, 'good' if i == 2 else 'plain'),
            text(174, y + 20, field, bold=True),
            text(174, y + 40, f'probability {q:g}'),
        ]
    parts += [
        arrow((87, 62), (87, 93)),
        text(98, 83, f'old / rollout = {old / sampled:.2f}: TIS weight, a constant'),
        arrow((87, 146), (87, 177), role='hot'),
        text(98, 167, f'new / old = {new / old:.2f}: the ratio that is clipped', 'hot'),
    ]
    says = (
        f'One token has three probabilities. The rollout engine sampled it with {sampled:g}, the '
        f'train engine gave it {old:g} before the update and gives it {new:g} now. The quotient of '
        'the first two is the importance weight, that of the last two is the ratio of the clip.'
    )
    return drawing('Three log-probabilities of one token', says, 240, *parts)


def _sign(a):
    return 'good' if a > 0 else 'hot' if a < 0 else 'plain'


def group(
    rewards: Sequence[float] = (1, 0, 0, 0),  # Rewards of one prompt, two to eight
    estimator: Estimator = 'grpo',
) -> SVG:
    "Rewards, their mean and the advantages as arrows. Raises ValueError for another number"
    n = len(rewards)
    if not 2 <= n <= 8:
        raise ValueError(f'{n} rewards: draw two to eight of one group')
    r = torch.tensor(rewards).double()
    found = group_advantages(r, torch.zeros(n, dtype=torch.long), estimator=estimator).tolist()
    longest, step, mean, zero = max(map(abs, found)) or 1, 380 / n, r.mean().item(), 148
    parts = [text(10, 22, 'rewards of one group', bold=True)]
    for i, (reward, a) in enumerate(zip(rewards, found, strict=True)):
        x, role = 10 + step * (i + 0.5), _sign(a)
        parts.append(box(x - step / 2 + 3, 32, step - 6, 28, f'{reward:g}', role))
        tip = zero - 52 * a / longest
        if a:
            parts.append(arrow((x, zero), (x, tip), role=role, thick=3))
        parts.append(
            text(x, tip + (-6 if a >= 0 else 17), f'{a:+.{2 if n < 7 else 1}f}', role, 'middle')
        )
    parts += [
        line((10, zero), (390, zero), dashed=True),
        line((10, 235), (40, 235), dashed=True),
        text(48, 240, f'mean {mean:.3g}, the baseline'),
    ]
    end = 'up = more likely, down = less' if any(found) else 'no arrow: this group teaches nothing'
    says = f'Rewards {list(rewards)} with mean {mean:.3g}. Advantages: ' + (
        ', '.join(f'{a:+.2f}' for a in found)
    )
    return drawing(
        'A group, its baseline and its advantages', says, 270, *parts, text(10, 258, end)
    )


def _panel(x, A, ratios, low, high):  # 150 wide; the curve from ratio 1 - reach to 1 + reach
    reach = 1.15 * max(low, high, *(abs(r - 1) for r in ratios), 0.3)
    at = torch.tensor([[1 - reach, 1 - low, 1 + high, 1 + reach, *ratios]]).double()
    adv = torch.full_like(at, A)
    loss, *flat = clipped_surrogate(at, adv, adv != 0, low, high)
    values, clipped = (-loss[0]).tolist(), (flat[0] | flat[1])[0].tolist()
    top, span = max(values), max(values) - min(values)

    def height(v):
        return 58 + 100 * (top - v) / span

    points = [
        (x + 75 * (1 + (r - 1) / reach), height(v))
        for r, v in zip(at[0].tolist(), values, strict=True)
    ]
    corners = points[:4]
    parts = [
        text(
            x + 75, 18, 'wanted, A > 0' if A > 0 else 'unwanted, A < 0', anchor='middle', bold=True
        ),
        text(x - 30, 40, 'ratio × A, clipped'),
        text(x + 75, 214, 'ratio: now / before', anchor='middle'),
    ]
    for a, b, c in zip(corners, corners[1:], (clipped[0], False, clipped[3]), strict=False):
        parts.append(line(a, b, role='hot' if c else 'good', thick=3))
    parts.append(line((x, 50), (x, 173), (x + 150, 173)))
    for v in (top, A, A * (1 - A / 2)):  # 0.5 or -1.5, where it is on the curve
        if v >= min(values):
            y = height(v)
            parts += [line((x - 4, y), (x, y)), text(x - 7, y + 5, f'{v:.3g}', anchor='end')]
    for r, (u, _) in zip((1 - low, 1 + high), corners[1:3], strict=True):
        parts += [line((u, 168), (u, 178)), text(u, 194, f'{r:g}', anchor='middle')]
    for r, (u, v), c in zip(ratios, points[4:], clipped[4:], strict=True):
        role, side, up = 'hot' if c else 'good', 0 if c else 5, -9 if A < 0 and not c else 20
        anchor = 'middle' if c and A > 0 else 'start'
        if A < 0 and r == 1:  # below its line: the label of a dot to its left is above
            side, up, anchor = -5, 18, 'end'
        parts += [dot(u, v, role), text(u + side, v + up, f'{r:g}', role, anchor)]
    return parts


def clip_ranges(
    # ratio new/old and advantage of each token
    tokens: Sequence[tuple[float, float]] = ((1.5, 1), (1, 1), (0.5, -1), (1.1, -1), (0.9, -1)),
    eps: tuple[float, float] | None = None,  # lower, upper; None = GRPO's
) -> SVG:
    "What the clipped surrogate makes of a ratio, and which tokens keep their gradient"
    low, high = eps or policy_losses['grpo'].clip
    sides = [[r for r, A in tokens if A * sign > 0] for sign in (1, -1)]
    parts = [*_panel(42, 1, sides[0], low, high), *_panel(246, -1, sides[1], low, high)]
    parts += [
        line((10, 239), (40, 239), role='good', thick=3),
        text(48, 244, 'has a gradient', 'good'),
        line((190, 239), (220, 239), role='hot', thick=3),
        text(228, 244, 'clipped, has none', 'hot'),
    ]
    drawn = ', '.join(f'ratio {r:g} with A {A:+g}' for r, A in tokens)
    says = (
        f'A wanted token has no gradient once its ratio is above {1 + high:g}, an unwanted one '
        f'once it is below {1 - low:g}. Drawn: {drawn}.'
    )
    return drawing('Ratio and clip', says, 258, *parts)


def _ratios(delta, entropy, A, vocab_size, cfg):  # loss -> groups, ratio, limit, clipped? per token
    mask = torch.ones_like(delta, dtype=torch.bool)
    own, step = torch.arange(delta.shape[1])[None], cfg.for_batch(None, vocab_size)
    groups = dict(GRPO=own, GSPO=0 * own, ESPO=entropy_groups(entropy, mask, step))
    eps = {k: policy_losses[k.lower()].clip for k in ('GRPO', 'GSPO')}
    eps['ESPO'] = (adaptive_clip(group_mean(entropy, groups['ESPO'], mask), step),) * 2
    for name, g in groups.items():
        ratio = group_ratio(delta, g, mask)
        _, low, high = clipped_surrogate(ratio, torch.full_like(delta, A), mask, *eps[name])
        limit = (1 + eps[name][1] if A > 0 else 1 - eps[name][0]) * torch.ones_like(delta)
        yield name, *(x[0].tolist() for x in (g, ratio, limit, low | high))


def _shared(y, groups, ratios, clipped, step):  # a row per group, if there are few
    rows = {g: i for i, g in enumerate(dict.fromkeys(sorted(groups)))}
    many = len(rows) > 2
    for g, i in rows.items():
        own = [t for t, other in enumerate(groups) if other == g]
        at = y if many else y + 34 * i
        role = 'hot' if clipped[own[0]] else 'good'
        yield line(
            *((10 + step * (t + 0.5), at + 14) for t in (own[0], own[-1])), role=role, thick=3
        )
        for t in own:
            yield box(10 + step * t + 3, at, step - 6, 28, f'{ratios[t]:.3f}', role)


def _limits(groups, limits):
    "The limits in words, in the order of the groups"
    own = dict.fromkeys(f'{x:.5g}' for _, x in sorted(zip(groups, limits, strict=True)))
    shown = list(own)
    if len(shown) > 2:
        shown = [f'{shown[0]} to {shown[-1]}']
    return f'limit{"s" * (len(own) > 1)} {", ".join(shown)}'


def token_groups(
    log_ratios: Sequence[float] = (0.01, 0.1, 0, -0.05, -0.01),  # Log-ratios of 2 to 6 tokens
    entropy: Sequence[float] = (0.1, 2, 0.05, 1.5, 0.2),  # nats, before the update
    advantage: float = 1.0,
    vocab_size: int = 100,
    cfg: EspoConfig = EspoConfig(top_frac=0.4),
) -> SVG:
    "Which tokens share a ratio, and who loses the gradient. Raises ValueError for another number"
    n = len(log_ratios)
    if not 2 <= n <= 6 or len(entropy) != n:
        raise ValueError(f'{n} log-ratios, {len(entropy)} entropies: draw two to six, as many each')
    delta, H = (torch.tensor([x]).double() for x in (log_ratios, entropy))
    step, y, parts = 380 / n, 118, [text(10, 22, 'entropy of each token', bold=True)]
    for t, h in enumerate(entropy):
        tall = 46 * h / max(entropy)
        parts += [
            box(10 + step * (t + 0.5) - 9, 82 - tall, 18, tall),
            text(10 + step * (t + 0.5), 100, f'{h:g}', anchor='middle'),
        ]
    about = dict(GRPO='its own ratio each', GSPO='one ratio for all', ESPO='one per group')
    said = []
    for name, groups, ratios, limits, clipped in _ratios(delta, H, advantage, vocab_size, cfg):
        parts += [text(10, y + 14, f'{name}: {about[name]}', bold=True)]
        parts += [text(390, y + 14, limit := _limits(groups, limits), anchor='end')]
        parts += _shared(y + 22, groups, ratios, clipped, step)
        y += 62 + 34 * (len(set(groups)) == 2)
        said.append(f'{name} ({limit}) clips {sum(clipped)} of {n} tokens')
    parts.append(text(10, y + 12, 'orange: beyond the limit, clipped, no gradient', 'hot'))
    return drawing('Which tokens share a ratio', f'{"; ".join(said)}.', y + 26, *parts)


def _experts(y, title, scores, chosen, gates, roles):
    step = 380 / len(scores)
    parts = [text(10, y + 14, title, bold=True)]
    for e, s in enumerate(scores):
        gate = f'{gates[chosen.index(e)]:.0%}' if e in chosen else '-'
        look = dict(role=roles.get(e, 'plain'), dashed=e not in chosen)
        parts.append(box(10 + step * e + 4, y + 22, step - 8, 46, f'{s:g}\n{gate}', **look))
    return parts


def router_tie(
    rollout_scores: Sequence[float] = (1.2, 2, 1.21, -1),  # Scores of 2 to 6 experts, rounded
    train_scores: Sequence[float] = (1.21, 2, 1.2, -1),
    num_chosen: int = 2,
) -> SVG:
    "Scores, choices and gates of one token in two engines, without and with replay"
    seen, own = (torch.tensor([s]).double() for s in (rollout_scores, train_scores))
    ids, live = (s.topk(num_chosen).indices for s in (seen, own))
    rows = [
        ('rollout', rollout_scores, ids, seen),
        ('training: its own choice', train_scores, live, own),
        ('training with replay: experts of the rollout', train_scores, ids, own),
    ]
    parts, said = [], []
    for i, (title, shown, chosen, scores) in enumerate(rows):
        gates, chosen = softmax_gates(scores, chosen, norm=True)[0].tolist(), chosen[0].tolist()
        roles: dict[int, Role] = {e: 'good' if e in ids[0].tolist() else 'hot' for e in chosen}
        parts += _experts(8 + 86 * i, title, shown, chosen, gates, roles)
        shares = ', '.join(f'expert {e} {g:.1%}' for e, g in zip(chosen, gates, strict=True))
        said.append(f'{title}: {shares}')
    parts.append(text(10, 280, 'a box: score, and gate if it is chosen'))
    return drawing('A router near a tie', '; '.join(said) + '.', 294, *parts)
