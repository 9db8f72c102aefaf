"""Three stages against zero variance: loops in fp64 as oracles, laws over random batches,
planted faults they must catch"""

import math
import random as rnd
import statistics
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from compassrl.algo import zero_variance as real
from compassrl.algo.advantages import AdvantageConfig, group_advantages, group_stats, std_eps
from compassrl.algo.zero_variance import (
    ZeroVarianceConfig,
    growth,
    length_penalty,
    repetition_penalty,
    screen,
    shape_rewards,
    token_advantages,
    zero_variance_rate,
    zvp_advantages,
    zvp_sign,
)
from compassrl.data.prompts import make_prompts
from compassrl.data.tokenizer import build_tokenizer
from compassrl.records import Batch, Sample, Verdict, collate
from tests.support.faults import planted

# examples come from a seed: nothing to shrink
random = settings(
    deadline=None,
    max_examples=40,
    derandomize=True,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.generate],
)
seeds = given(st.integers(0, 10**9))
H = [0.1, 2, 0.05, 1.5, 0.2]


def close(a, b, tol=1e-5):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol, check_dtype=False)


def sample(prompt, index, ids, reward=0.0, status='ok'):
    return Sample(
        prompt,
        index,
        [1],
        ids,
        torch.zeros(len(ids)),
        None,
        None,
        'stop',
        0,
        reward,
        Verdict(reward, reward == 1, status),
    )


# ---- random batches ------------------------------------------------------------------------------


def make(seed):
    """Unequal groups, most of them flat in the task reward; prompts and responses of any length;
    some without a verdict"""
    r = rnd.Random(seed)
    rows = []
    for g in r.sample(range(-5, 30), r.randint(1, 5)):
        kind = r.choice([[0.0], [1.0], [0.5], [0.0, 1.0], [0.0, 0.0625, 0.5, 1.0]])
        bend = r.choice([0, 0, 1, 2])
        for _ in range(r.randint(1, 6)):
            raw = r.choice(kind)
            penalty = [0.0, -1 / 16, -r.randint(0, 8) / 64][bend]
            rows.append(
                (g, raw, raw + penalty, r.random() < 0.85, r.randint(1, 3), r.randint(0, 5))
            )
    r.shuffle(rows)
    group, raw, shaped, valid, start, num = (torch.tensor(c) for c in zip(*rows))
    T = int((start + num).max()) + r.randint(0, 2)
    mask = (torch.arange(T) >= start[:, None]) & (torch.arange(T) < (start + num)[:, None])
    entropy = torch.tensor(
        [[r.expovariate(1.0) * r.choice([1, 1, 1, 8]) for _ in range(T)] for _ in rows]
    )
    batch = Batch(
        token_ids=torch.zeros(len(rows), T, dtype=torch.long),
        token_mask=mask | (torch.arange(T) < 1),
        response_mask=mask,
        rollout_log_probs=torch.zeros(len(rows), T),
        group=group,
        rewards=shaped,
        entropy=entropy,
    )
    adv_cfg = AdvantageConfig(r.choice(['grpo', 'grpo', 'dr_grpo', 'rloo']))
    cfg = ZeroVarianceConfig(std_floor=r.choice([0.0, 0.1, 0.5]), zvp_alpha=r.choice([0.1, 0.2]))
    return batch, raw, valid, adv_cfg, cfg


def oracle(batch, raw, valid, adv_cfg, cfg):
    "Token advantages and metrics, in Python floats, one response at a time"
    out, flats, group = [], {}, batch.group.tolist()
    for i, g in enumerate(group):
        rows = [j for j, h in enumerate(group) if h == g and valid[j]]
        raws, shaped = [raw[j].item() for j in rows], [batch.rewards[j].item() for j in rows]
        few = len(rows) < 2
        flats[g] = few or len(set(raws)) == 1, few or len(set(shaped)) == 1
        inside, h = batch.response_mask[i].tolist(), batch.entropy[i].tolist()
        top = max((x for x, m in zip(h, inside) if m), default=0.0)
        if few or not valid[i]:
            a = [0.0] * len(h)
        elif not flats[g][1]:
            x = batch.rewards[i].item() - statistics.fmean(shaped)
            floor = cfg.std_floor if flats[g][0] else 0.0
            x *= dict(
                grpo=1 / (max(statistics.stdev(shaped), floor) + std_eps),
                dr_grpo=1.0,
                rloo=len(rows) / (len(rows) - 1),
            )[adv_cfg.estimator]
            a = [x] * len(h)
        elif flats[g][0] and raws[0] == 1:
            a = [min(cfg.zvp_alpha * x, 1.0) for x in h]
        elif flats[g][0] and raws[0] == 0:
            a = [max(-cfg.zvp_alpha * (top - x), -1.0) for x in h]
        else:
            a = [0.0] * len(h)
        out.append([x if m else 0.0 for x, m in zip(a, inside)])
    alive = {g for g, row in zip(group, out) if any(row)}
    tokens = int(batch.response_mask.sum())
    share = {k: sum(f[i] for f in flats.values()) / len(flats) for i, k in enumerate(('_raw', ''))}
    return torch.tensor(out), dict(
        zero_variance_raw_frac=share['_raw'],
        zero_variance_frac=share[''],
        zero_variance_residual_frac=1 - len(alive) / len(flats),
        gradient_token_frac=sum(x != 0 for row in out for x in row) / max(tokens, 1),
    )


def rows_of(batch, rows):
    return batch.map(lambda t: t[rows])


# ---- laws: each takes the module, real or with a planted fault -----------------------------------


def law_loop(z):
    @random
    @seeds
    def check(seed):
        args = make(seed)
        (adv, metrics), (want, counted) = z.token_advantages(*args), oracle(*args)
        assert adv.dtype == torch.float
        close(adv, want)
        assert metrics == pytest.approx(counted, abs=1e-6)

    check()


def law_order(z):
    @random
    @seeds
    def check(seed):
        batch, raw, valid, *cfgs = make(seed)
        perm = torch.randperm(len(raw), generator=torch.Generator().manual_seed(seed))
        adv, m = z.token_advantages(batch, raw, valid, *cfgs)
        moved, n = z.token_advantages(rows_of(batch, perm), raw[perm], valid[perm], *cfgs)
        close(moved, adv[perm])
        assert m == pytest.approx(n)

    check()


def law_alone(z):
    "What a group gets does not depend on the other groups of the batch"

    @random
    @seeds
    def check(seed):
        batch, raw, valid, *cfgs = make(seed)
        adv, _ = z.token_advantages(batch, raw, valid, *cfgs)
        for g in batch.group.unique():
            rows = batch.group == g
            close(
                z.token_advantages(rows_of(batch, rows), raw[rows], valid[rows], *cfgs)[0],
                adv[rows],
            )

    check()


def law_padding(z):
    "More columns, and anything at all outside the responses, change nothing"

    @random
    @seeds
    def check(seed):
        batch, *rest = make(seed)
        adv, m = z.token_advantages(batch, *rest)
        B, T = batch.response_mask.shape
        wide = batch.map(
            lambda t: torch.cat([t, torch.zeros(B, 3, dtype=t.dtype)], 1) if t.dim() > 1 else t
        )
        wide = replace(wide, entropy=wide.entropy.masked_fill(~wide.response_mask, 99.0))
        got, n = z.token_advantages(wide, *rest)
        close(got[:, :T], adv)
        assert not got[:, T:].any() and m == pytest.approx(n)

    check()


def law_failed(z):
    "A sample without a verdict gets 0 and changes nothing, whatever its rewards hold"

    @random
    @given(st.integers(0, 10**9), st.sampled_from([0.0, 1.0, float('nan'), float('inf')]))
    def check(seed, junk):
        batch, raw, valid, *cfgs = make(seed)
        odd = replace(batch, rewards=batch.rewards.masked_fill(~valid, junk))
        adv, _ = z.token_advantages(odd, raw.masked_fill(~valid, junk), valid, *cfgs)
        assert not adv[~valid].any()
        if valid.any():
            close(
                adv[valid],
                z.token_advantages(rows_of(batch, valid), raw[valid], valid[valid], *cfgs)[0],
            )

    check()


def law_zvp(z):
    "Every token of every response by the formula, bounded by 1"

    @random
    @seeds
    def check(seed):
        batch, *_ = make(seed)
        sign = torch.randint(-1, 2, (len(batch),), generator=torch.Generator().manual_seed(seed))
        got = z.zvp_advantages(batch.entropy, batch.response_mask, sign, 0.2)
        assert got.abs().max() <= 1
        for a, h, m, s in zip(got, batch.entropy, batch.response_mask, sign.tolist()):
            assert not a[~m].any()
            for x, y in zip(a[m], h[m]):
                want = {0: 0.0, 1: 0.2 * float(y), -1: -0.2 * (float(h[m].max()) - float(y))}[s]
                assert float(x) == pytest.approx(max(-1.0, min(1.0, want)), abs=1e-6)

    check()


def law_shape(z):
    """Against the formulas in a loop;
    a better task reward wins by more than half the smallest gap, whatever the length"""

    @random
    @seeds
    def check(seed):
        r = rnd.Random(seed)
        cfg = ZeroVarianceConfig(
            length_weight=r.choice([0.0, 0.1, 0.3]),
            repetition_weight=r.choice([0.0, 0.1, 0.19]),
            overlong_frac=r.choice([0.2, 0.5, 1.0]),
            ngram=r.randint(1, 3),
        )
        samples = []
        for g in range(r.randint(1, 3)):
            kind = r.choice([[1.0], [0.0, 1.0], [0.0, 0.1, 0.25, 0.9, 1.0]])
            for k in range(r.randint(1, 5)):
                ids = [r.randint(0, 3) for _ in range(r.randint(0, 14))]
                samples.append(
                    sample(f'p{g}', k, ids, r.choice(kind), r.choice(['ok'] * 5 + ['failed']))
                )
        r.shuffle(samples)
        got = z.shape_rewards(samples, 10, cfg)
        for s, x in zip(samples, got.tolist()):
            mine = {
                t.verdict.reward
                for t in samples
                if t.prompt_id == s.prompt_id and t.verdict.status == 'ok'
            }
            gap = min((abs(a - b) for a in mine for b in mine if a != b), default=1.0)
            n, free = len(s.response_ids), 10 - cfg.overlong_frac * 10
            long = 0.0 if n <= free else (free - n) / (10 - free) if n <= 10 else -1.0
            grams = [
                tuple(s.response_ids[i : i + cfg.ngram]) for i in range(n) if i + cfg.ngram <= n
            ]
            again = -(1 - len(set(grams)) / len(grams)) if grams else 0.0
            penalty = cfg.length_weight * long + cfg.repetition_weight * again
            assert x == pytest.approx(s.verdict.reward + gap * penalty, abs=1e-5)
            for t, y in zip(samples, got.tolist()):
                if t.prompt_id == s.prompt_id and 'failed' not in (
                    s.verdict.status,
                    t.verdict.status,
                ):
                    if s.verdict.reward > t.verdict.reward:
                        assert x - y > gap / 2 - 1e-6

    check()


def law_sign(z):
    "Any rewards, also outside [0, 1]: the sign of a whole group, of those who have a verdict"

    @random
    @seeds
    def check(seed):
        r, rows = rnd.Random(seed), []
        for g in range(4):
            kind = r.choice([[1.0], [0.0], [0.5], [0.0, 1.0], [0.0, 2.0], [-1.0, 1.0]])
            rows += [(g, r.choice(kind), r.random() < 0.7) for _ in range(r.randint(1, 5))]
        r.shuffle(rows)
        group, raw, valid = (torch.tensor(c) for c in zip(*rows))
        for x, (i, _, ok) in zip(z.zvp_sign(raw, group, valid).tolist(), rows):
            seen = [reward for j, reward, valid in rows if j == i and valid]
            same = ok and len(seen) > 1 and len(set(seen)) == 1
            assert x == (same and seen[0] >= 1) - (same and seen[0] <= 0)

    check()


def law_growth(z):
    """Against a loop over groups: those that earn least first, of these the cheapest; whole blocks,
    within the budget"""
    group = torch.tensor([0, 0, 0, 0, 1, 1])
    for rewards, want in (([0] * 6, [0, 2]), ([1] * 6, [0, 2]), ([0] * 4 + [1] * 2, [4, 0])):
        got = z.growth(
            torch.tensor(rewards).float(), group, None, torch.ones(6), ZeroVarianceConfig(), 4.0
        )
        assert got.tolist() == want, 'there is enough for either'

    @random
    @seeds
    def check(seed):
        r, rows = rnd.Random(seed), []
        for g in r.sample(range(-9, 99), r.randint(1, 8)):
            kind = r.choice([[0.0], [1.0], [0.5], [0.0, 1.0]])
            rows += [
                (g, r.choice(kind), r.random() < 0.85, r.randint(1, 9))
                for _ in range(r.randint(1, 5))
            ]
        r.shuffle(rows)
        group, raw, valid, tokens = (torch.tensor(c) for c in zip(*rows))
        cfg = ZeroVarianceConfig(
            r.choice(['adaptive'] * 4 + ['uniform', 'refill']),
            max_group_size=r.choice([2, 6, 8, 32]),
        )
        budget = r.choice([0.0, 15.0, 30.0, 45.0, 1e9])
        spent = 0
        want = dict.fromkeys(sorted({row[0] for row in rows}), 0)

        def turn(g):
            seen = [row[1] for row in rows if row[0] == g and row[2]]
            return sum(seen) / max(len(seen), 1), sum(row[3] for row in rows if row[0] == g), g

        def may_grow(g):
            mine = [row for row in rows if row[0] == g]
            seen = [row[1] for row in mine if row[2]]
            silent = len(seen) > 1 and len(set(seen)) == 1
            fits = len(mine) * 2 <= cfg.max_group_size and sum(row[3] for row in mine) <= budget
            return cfg.sampling == 'adaptive' and silent and fits

        able = [g for g in want if may_grow(g)]
        least = [g for g in able if turn(g)[0] < max(turn(x)[0] for x in able)]
        for g in sorted(least or able, key=turn):
            mine = [row for row in rows if row[0] == g]
            cost = sum(row[3] for row in mine)
            if spent + cost <= budget:
                want[g], spent = len(mine), spent + cost
        got = z.growth(raw, group, valid, tokens, cfg, budget)
        assert got.dtype == torch.long and got.tolist() == list(want.values())

    check()


def law_certain(z):
    "What grows while some groups run, grows whatever they turn out to be"
    cfg, found = ZeroVarianceConfig('adaptive', max_group_size=8), 0
    for seed in range(1500):
        r, rows = rnd.Random(seed), []
        for g in range(r.randint(3, 8)):
            kind = r.choice([[0.0], [0.0], [0.5], [1.0], [0.0, 1.0]])
            tokens = r.randint(1, 5)
            rows += [(g, r.choice(kind), tokens) for _ in range(r.choice([2, 4, 8]))]
        group, raw, tokens = (torch.tensor(c) for c in zip(*rows))
        running = {g for g in range(group.max()) if r.random() < 0.4}
        here = torch.tensor([g not in running for g in group.tolist()])
        budget, more = r.uniform(0, 50), r.choice([0, 0, 20])
        unseen = float(tokens[~here].sum()) + r.choice([0, 9])
        seen = group[here], raw[here], tokens[here]
        early = z.growth(seen[1], seen[0], None, seen[2], cfg, budget, unseen).tolist()
        final = z.growth(raw, group, None, tokens, cfg, budget + more).tolist()
        ids = sorted(set(seen[0].tolist()))
        found += sum(n > 0 for n in early)
        assert all(final[g] == n for g, n in zip(ids, early) if n)
    assert found > 100


LAWS = [
    law_loop,
    law_order,
    law_alone,
    law_padding,
    law_failed,
    law_zvp,
    law_sign,
    law_shape,
    law_growth,
    law_certain,
]


@pytest.mark.parametrize('law', LAWS, ids=lambda f: f.__name__)
def test_law(law):
    law(real)


# ---- mutants: one line of the module's source replaced -------------------------------------------


def population(rewards, group, valid, estimator, floor):
    s = group_stats(rewards, group, valid)
    n = s.num.clamp(min=2)
    adv = group_advantages(rewards, group, valid, 'dr_grpo').double()
    return (
        (adv / (torch.maximum(s.std * ((n - 1) / n).sqrt(), floor) + std_eps)[s.index])
        .nan_to_num()
        .float()
    )


MUTANTS = {  # the law that must notice -> what is replaced by what
    law_zvp: dict(
        max_over_batch=('H.amax(1, keepdim=True)', 'H.amax()'),
        max_over_prompt_too=('detach().masked_fill(~response_mask, -inf)', 'detach()'),
        no_max=('H-H.amax(1, keepdim=True)', '-H'),
        pushes_the_wrong_way=('sign[:,None]>0', 'sign[:,None]<0'),
        unbounded=('.clamp(-1, 1)', ''),
    ),
    law_sign: dict(
        of_the_failed=(
            'return sign if valid is None else sign.masked_fill(~valid, 0.)',
            'return sign',
        ),
        of_one_verdict=(' | (s.num<2), 0.)', ', 0.)'),
        of_partial_credit=('(s.mean>=1-tolerance)', '(s.mean>=.5)'),
        of_mixed_groups=('masked_fill(~s.flat | ', 'masked_fill('),
    ),
    law_alone: dict(
        sign_of_the_whole_batch=(
            'zvp_sign(raw_rewards, batch.group',
            'zvp_sign(raw_rewards, 0*batch.group',
        ),
        max_over_batch_too=('H.amax(1, keepdim=True)', 'H.amax()'),
    ),
    law_order: dict(
        wrong_group_axis=(
            'per_token(group_advantages(batch.rewards, batch.group',
            'per_token(group_advantages(batch.rewards, batch.group.sort().values',
        )
    ),
    law_padding: dict(
        max_over_padding=('detach().masked_fill(~response_mask, -inf)', 'detach()'),
        counts_padding=('(adv!=0)[batch.response_mask]', 'adv!=0'),
    ),
    law_failed: dict(
        zvp_for_the_failed=(
            'return sign if valid is None else sign.masked_fill(~valid, 0.)',
            'return sign',
        )
    ),
    law_loop: dict(
        sign_from_shaped=('zvp_sign(raw_rewards, batch', 'zvp_sign(batch.rewards, batch'),
        zvp_on_top_of_penalties=('*shaped.flat[raw.index]', ''),
        floor_missing=('cfg.std_floor*raw.flat.double()', '0.'),
        floor_everywhere=('cfg.std_floor*raw.flat.double()', 'cfg.std_floor'),
        floor_where_shaped_is_flat=(
            'cfg.std_floor*raw.flat.double()',
            'cfg.std_floor*shaped.flat.double()',
        ),
        biased_std=(
            'group_advantages, group_stats, per_token, tolerance)',
            'group_stats, per_token, tolerance)\n'
            'from tests.algo.test_zero_variance import population as group_advantages',
        ),
        alive_means_all=('(adv!=0).any(1)', '(adv!=0).all(1)'),
        raw_counter_of_shaped=('_frac(raw.flat)', '_frac(shaped.flat)'),
    ),
    law_shape: dict(
        absolute_penalties=('_gaps(samples)*penalty', 'penalty'),
        gap_of_the_batch=(
            '.setdefault(s.prompt_id, set())',
            '.setdefault(samples[0].prompt_id, set())',
        ),
        failed_set_the_gap=("if v.status not in ('failed', 'timeout'):", 'if True:'),
        window_upside_down=('window = frac*max_tokens', 'window = (1-frac)*max_tokens+1e-9'),
        penalty_without_end=('.clamp(-1, 0).float()', '.clamp(max=0).float()'),
        one_ngram_short=('range(len(ids)-n+1)', 'range(len(ids)-n)'),
    ),
    law_growth: dict(
        grows_live_groups=('wants = s.flat & ', 'wants = '),
        grows_without_verdicts=('(s.num>=2) & ', ''),
        grows_beyond_the_cap=('2*size<=cfg', 'size<=cfg'),
        never_pays=('budget -= float(cost[g])', 'pass'),
        overdraws=('cost[g]+(unseen or 0.0)<=budget', 'budget>0'),
        in_order_of_id=('key=lambda g: (earned[g], cost[g])', 'key=lambda g: g'),
        solved_first=('(earned[g], cost[g])', '(-earned[g], cost[g])'),
        dearest_first=('(earned[g], cost[g])', '(earned[g], -cost[g])'),
        cheapest_of_all=('(earned[g], cost[g])', 'cost[g]'),
        solved_do_not_wait=('if unseen is not None or others.any(): may = others', ''),
        who_cannot_pay_holds_up_others=('may = wants & (cost<=budget)', 'may = wants'),
        grows_anyway=("if cfg.sampling!='adaptive': return more", ''),
    ),
    law_certain: dict(
        others_cost_nothing=('(unseen or 0.0)', '0.0'),
        who_comes_first_pays_nothing=('if more[g] or unseen is not None:', 'if more[g]:'),
        the_best_may_be_missing=('if unseen is not None or others.any():', 'if others.any():'),
    ),
}


@pytest.mark.parametrize(
    'law, name',
    [(law, name) for law, faults in MUTANTS.items() for name in faults],
    ids=lambda x: getattr(x, '__name__', x),
)
def test_law_kills_the_mutant(law, name):
    mutant = planted(real, *MUTANTS[law][name])
    with pytest.raises((AssertionError, ValueError)):
        law(mutant)


# ---- numbers of the papers -----------------------------------------------------------------------


@pytest.mark.parametrize(
    'sign, want',
    [(1, [0.01, 0.2, 0.005, 0.15, 0.02]), (-1, [-0.19, 0, -0.195, -0.05, -0.18]), (0, [0.0] * 5)],
)
def test_worked_zvp(sign, want):
    mask = torch.tensor([[False] + [True] * 5, [False] + [True] * 5])
    # the prompt and another response are far more uncertain
    entropy = torch.tensor([[7.0] + H, [7.0] + [50.0] * 5])
    close(zvp_advantages(entropy, mask, torch.tensor([sign, -1]))[0, 1:], torch.tensor(want), 1e-6)


def test_worked_soft_overlong():
    lengths = torch.tensor([1, 16384, 18432, 20480, 20481])
    close(length_penalty(lengths, 20480, 4096 / 20480), torch.tensor([0, 0, -0.5, -1, -1]), 1e-6)


def test_worked_repetition():
    assert repetition_penalty([7, 8, 7, 8, 7], 3) == pytest.approx(-1 / 3)
    assert repetition_penalty([1] * 5, 4) == -0.5 and repetition_penalty(
        [1, 2], 3
    ) == 0.0 == repetition_penalty([], 1)


@pytest.mark.parametrize(
    'p, row',
    [
        (0.5, (0.125, 0.0078, 0, 0)),
        (0.8, (0.411, 0.168, 0.028, 0.001)),
        (0.9, (0.656, 0.431, 0.185, 0.034)),
        (0.95, (0.815, 0.663, 0.440, 0.194)),
    ],
)
def test_worked_rate(p, row):
    for N, want in zip((4, 8, 16, 32), row):
        assert zero_variance_rate(p, N) == pytest.approx(want, abs=1e-3)
        close(
            zero_variance_rate(torch.tensor([p, 1 - p]).double(), N), torch.full((2,), want), 1e-3
        )


def test_rate_against_sampling():
    p = torch.linspace(0.02, 0.98, 13)
    for N in (2, 8, 32):
        r = torch.bernoulli(
            p.repeat_interleave(4000 * N), generator=torch.Generator().manual_seed(N)
        )
        sampled = (
            group_stats(r, torch.arange(13 * 4000).repeat_interleave(N))
            .flat.view(13, 4000)
            .double()
            .mean(1)
        )
        assert (sampled - zero_variance_rate(p, N)).abs().max() < 5 * (0.25 / 4000) ** 0.5


def test_the_floor_against_the_trap():
    """Right answers that differ by 1e-3 in a penalty:
    as loud as right against wrong without the floor, quiet with it"""
    r, g = torch.ones(12), torch.tensor([0] * 4 + [1] * 4 + [2] * 4)
    r[1:4], raw = 0.0, torch.ones(12)
    raw[1:4] = 0.0
    r[7] -= 0.001
    batch = collate([sample(f'p{g[i]}', i, [1]) for i in range(12)])
    batch = replace(batch, rewards=r, entropy=torch.zeros(12, 2))

    def adv(floor):
        cfg = ZeroVarianceConfig(std_floor=floor)
        return token_advantages(batch, raw, raw > -1, AdvantageConfig(), cfg)[0][:, 1]

    close(adv(0.0)[4:8], torch.tensor([0.5, 0.5, 0.5, -1.5]), 1e-2)
    close(adv(0.1)[4:8], torch.tensor([0.0025, 0.0025, 0.0025, -0.0075]), 1e-4)
    for floor in (0.0, 0.1):
        close(adv(floor)[:4], torch.tensor([1.5, -0.5, -0.5, -0.5]))


# ---- growth: what its stopping rule does, by enumeration -----------------------------------------


def grown(p, sizes=(2, 4, 8)):
    """Every outcome of a group that may grow, through the library: (probability,
    rewards it ends with)"""
    out = {}
    for bits in product((0.0, 1.0), repeat=sizes[-1]):
        n = sizes[0]
        while more := int(
            growth(
                torch.tensor(bits[:n]),
                torch.zeros(n, dtype=torch.long),
                None,
                torch.ones(n),
                ZeroVarianceConfig(max_group_size=sizes[-1]),
                math.inf,
            )
        ):
            n += more
        out[bits[:n]] = math.prod(p if b else 1 - p for b in bits[:n])
    return [(q, bits) for bits, q in out.items()]


@pytest.mark.parametrize('p', [0.1, 0.5, 0.9])
def test_growth_by_enumeration(p):
    outcomes = grown(p)
    z = {N: zero_variance_rate(p, N) for N in (2, 4, 8)}
    assert sum(q for q, _ in outcomes) == pytest.approx(1)
    assert sum(q for q, b in outcomes if len(set(b)) == 1) == pytest.approx(z[8])
    assert sum(q * len(b) for q, b in outcomes) == pytest.approx(2 + 2 * z[2] + 4 * z[4])
    # Wald: sums are not biased
    assert sum(q * sum(b) for q, b in outcomes) == pytest.approx(p * (2 + 2 * z[2] + 4 * z[4]))


@pytest.mark.parametrize('p', [0.1, 0.5, 0.9])
def test_growth_biases_the_mean_as_computed(p):
    "One doubling pulls the mean reward towards one half, by (p (1-p)^N - (1-p) p^N)/2"
    mean = sum(q * statistics.fmean(b) for q, b in grown(p, (4, 8)))
    assert mean - p == pytest.approx((p * (1 - p) ** 4 - (1 - p) * p**4) / 2)


def test_growth_reaches_the_cap_in_blocks():
    def sizes(start, cap):
        n, seen = start, [start]
        while more := int(
            growth(
                torch.ones(n),
                torch.zeros(n, dtype=torch.long),
                None,
                torch.ones(n),
                ZeroVarianceConfig(max_group_size=cap),
                1e9,
            )
        ):
            n += more
            seen.append(n)
        return seen

    assert (
        sizes(8, 32) == [8, 16, 32]
        and sizes(8, 31) == [8, 16]
        and sizes(12, 32) == [12, 24]
        and sizes(8, 8) == [8]
    )


# ---- never raises, bad input ---------------------------------------------------------------------


@pytest.mark.parametrize('reward', [0.0, 0.4, 1.0])
@pytest.mark.parametrize('valid', [True, False])
@pytest.mark.parametrize('sampling', ['uniform', 'adaptive', 'refill'])
@pytest.mark.parametrize('size', [1, 4])
def test_all_flat_never_raises(reward, valid, sampling, size):
    cfg = ZeroVarianceConfig(sampling)
    samples = [
        sample(f'p{i % 2}', i, [1, 2, 3], reward, 'ok' if valid else 'timeout')
        for i in range(2 * size)
    ]
    batch = collate(samples)
    batch = replace(
        batch, rewards=shape_rewards(samples, 3, cfg), entropy=torch.rand(batch.token_ids.shape)
    )
    raw, ok = torch.full((2 * size,), reward), torch.full((2 * size,), valid)
    adv, m = token_advantages(batch, raw, ok, AdvantageConfig(), cfg)
    assert adv.isfinite().all() and m['zero_variance_raw_frac'] == m['zero_variance_frac'] == 1
    assert bool(adv.any()) == (valid and reward in (0, 1) and size > 1)
    assert growth(raw, batch.group, ok, torch.ones(2 * size), cfg, 1e9).sum() == (
        2 * size if valid and size > 1 and sampling == 'adaptive' else 0
    )


def test_everything_off_is_grpo():
    off = ZeroVarianceConfig('uniform', length_weight=0, repetition_weight=0, zvp_alpha=0)
    for seed in range(20):
        batch, raw, valid, adv_cfg, _ = make(seed)
        batch = replace(batch, rewards=raw, entropy=None)
        want = (
            group_advantages(raw, batch.group, valid, adv_cfg.estimator)[:, None]
            * batch.response_mask
        )
        close(token_advantages(batch, raw, valid, adv_cfg, off)[0], want)
    samples = [sample('p', k, [1] * 9, x) for k, x in enumerate((0.0, 0.3, 1.0))]
    assert shape_rewards(samples, 4, off).tolist() == pytest.approx([0.0, 0.3, 1.0])


def test_half_precision_entropy():
    entropy, mask = torch.tensor([H]), torch.ones(1, 5, dtype=torch.bool)
    for sign in (1, -1):
        got = zvp_advantages(entropy.bfloat16(), mask, torch.tensor([sign]))
        assert got.dtype == torch.float
        close(got, zvp_advantages(entropy, mask, torch.tensor([sign])), 2e-2)


def test_entropy_gets_no_gradient():
    entropy = torch.tensor([H], requires_grad=True)
    assert not zvp_advantages(
        entropy, torch.ones(1, 5, dtype=torch.bool), torch.tensor([1])
    ).requires_grad


def test_zvp_sign():
    raw = torch.tensor([1.0, 1, 0, 0, 0.4, 0.4, 1, 0, 1])
    group = torch.tensor([3, 3, 1, 1, 2, 2, 0, 0, 9])
    assert zvp_sign(raw, group).tolist() == [1, 1, -1, -1, 0, 0, 0, 0, 0]
    third = torch.tensor([True] * 2 + [True, False] + [True] * 5)
    assert zvp_sign(raw, group, third).tolist() == [1, 1, 0, 0, 0, 0, 0, 0, 0]


def test_screen():
    r = torch.tensor([1.0, 1, 0, 0, 0, 1, 0.4, 0.4, 1, 0])
    g = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    assert screen(r, g).tolist() == [False, False, True, True, True]
    assert screen(r, g, g < 4).tolist() == [False, False, True, True, True], (
        'no verdict is no reason to drop a prompt'
    )


def test_a_prompt_with_one_verdict_is_screened_by_it():
    "Alone it is always or never solved, too"
    r, g = torch.tensor([1.0, 0.0, 0.4, 1.0]), torch.arange(4)
    assert screen(r, g).tolist() == [False, False, True, False]
    assert screen(r, g, g < 3).tolist() == [False, False, True, True]


def test_noise_between_equal_rewards_is_no_unit():
    "0.1 + 0.2 is not 0.3: the smallest gap is the one to 1"
    cfg = ZeroVarianceConfig(length_weight=0, repetition_weight=0.4, ngram=1)
    got = shape_rewards(
        [sample('p', k, [5, 5], x) for k, x in enumerate((0.1 + 0.2, 0.3, 1.0))], 9, cfg
    )
    close(got, torch.tensor([0.3, 0.3, 1.0]) - 0.7 * 0.4 / 2, 1e-6)


@pytest.mark.parametrize('difficulty', [1.0, 2.0, 4.0])
def test_a_right_answer_with_its_working_is_not_fined(difficulty):
    "What repeats in good working is shorter than an n-gram; circles of any period are found"
    tokenizer, cfg = build_tokenizer(), ZeroVarianceConfig()
    prompts = make_prompts('arithmetic', 300, difficulty, 0, 'train', tokenizer)
    ids = [tokenizer.encode(p.solution).ids for p in prompts]
    assert min(map(len, ids)) > cfg.ngram, 'long enough to be fined'
    fined, by_trigrams = (sum(repetition_penalty(x, n) < 0 for x in ids) for n in (cfg.ngram, 3))
    assert fined <= 3 and by_trigrams > 100, (fined, by_trigrams)
    for period in range(1, cfg.ngram + 1):
        assert repetition_penalty([*range(period)] * 30, cfg.ngram) < -0.5


@pytest.mark.parametrize('apart, flat', [(0.9e-6, True), (1.1e-6, False), (1e-3, False)])
def test_one_tolerance_for_all(apart, flat):
    "Growth, screen, gaps, signs and advantages agree about what is equal"
    from compassrl.algo.advantages import zero_variance

    r = torch.tensor([1.0 - apart, 1.0], dtype=torch.double)
    g, cfg = torch.zeros(2, dtype=torch.long), ZeroVarianceConfig(ngram=3)
    samples = [sample('p', k, [5, 5, 5, 5], float(x)) for k, x in enumerate(r)]
    batch = replace(
        collate(samples), rewards=r, entropy=torch.ones(2, 5), group=torch.zeros(2, dtype=int)
    )
    assert zero_variance(r, g).item() == flat
    assert (growth(r, g, None, torch.ones(2), cfg, 1e9).item() == 2) == flat
    assert bool(zvp_sign(r, g).any()) == flat
    adv, found = token_advantages(batch, r, r > 0, AdvantageConfig(), replace(cfg, std_floor=0.0))
    assert found['zero_variance_raw_frac'] == flat
    assert found['zero_variance_frac'] == flat
    assert bool((adv[:, 1] < 0).any()) == (not flat), 'z-scores have both signs'
    unit = (r.float() - shape_rewards(samples, 9, cfg)).max() / (0.1 * 2 / 4)  # unit of the penalty
    assert unit.item() == pytest.approx(1.0 if flat else apart, rel=0.2, abs=2e-6)
    assert screen(r, g).item() == (apart / 2 > 1e-6)
    for sign, same in ((-1, apart), (1, 1 - apart)):  # rewards that are equal, at both ends
        r = torch.full((2,), same, dtype=torch.double)
        assert screen(r, g).item() == (not flat)
        assert zvp_sign(r, g).tolist() == [sign * flat] * 2


@pytest.mark.parametrize(
    'kw, message',
    [
        (dict(sampling='adaptiv'), "sampling='adaptiv': use one of"),
        (dict(max_group_size=1), 'max_group_size=1: use at least 2'),
        (dict(token_budget=-1.0), 'token_budget=-1.0'),
        (dict(token_budget=math.inf), 'token_budget=inf'),
        (dict(max_refills=-1), 'max_refills=-1'),
        (dict(ngram=0), 'ngram=0: use at least 1'),
        (dict(length_weight=0.3, repetition_weight=0.2), r'= 0.5: keep them below 0.5'),
        (dict(length_weight=0.6), 'length_weight=0.6'),
        (dict(overlong_frac=0.0), 'overlong_frac=0.*length_weight=0'),
        (dict(overlong_frac=1.5), 'overlong_frac=1.5'),
        (dict(std_floor=float('nan')), 'std_floor=nan'),
        (dict(zvp_alpha=-0.1), 'zvp_alpha=-0.1'),
        (dict(screen_samples=-1), 'screen_samples=-1'),
    ],
)
def test_bad_config(kw, message):
    with pytest.raises(ValueError, match=message):
        ZeroVarianceConfig(**kw)


def test_bad_input():
    batch, raw, valid, *cfgs = make(1)
    with pytest.raises(ValueError, match='batch.entropy is None.*zvp_alpha=0'):
        token_advantages(replace(batch, entropy=None), raw, valid, *cfgs)
    with pytest.raises(ValueError, match=r'rewards \[2\] and group'):
        token_advantages(batch, raw[:2], valid, *cfgs)
    with pytest.raises(ValueError, match='use a finite reward'):
        token_advantages(batch, raw * math.nan, torch.ones_like(valid), *cfgs)
    with pytest.raises(ValueError, match='sample p/0 has no verdict: judge it first'):
        shape_rewards([replace(sample('p', 0, [1]), verdict=None)], 4, ZeroVarianceConfig())
    with pytest.raises(ValueError, match='N=0'):
        zero_variance_rate(0.5, 0)
