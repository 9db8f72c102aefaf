"""Labs: their mathematics is the library's, and what a page shows follows mouse and keyboard.

One small page per lab, made of the stored output of its notebook as the site makes it.
"""

import json
import math
import random
import re
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import combinations
from statistics import fmean

import nbformat
import pytest
import torch

from compassrl.algo.advantages import AdvantageConfig, group_advantages
from compassrl.algo.loss_registry import policy_losses
from compassrl.algo.losses import LossConfig, aggregate
from compassrl.algo.losses.espo import EspoConfig, EspoStep
from compassrl.algo.ratios import kl_estimate, log_ratio, tis_weights
from compassrl.algo.zero_variance import ZeroVarianceConfig, growth, shape_rewards, token_advantages
from compassrl.config import TrainConfig
from compassrl.data.tasks import num_problems, problem, verify
from compassrl.judges.genrm import Comparison, Question, Reply, compare, parse_label, to_verdict
from compassrl.model.layers import softmax_gates
from compassrl.model.shape import PolicyConfig
from compassrl.records import Prompt, Request, Sample, Verdict, collate
from compassrl.rollout.fp8 import dequantise, quantise
from compassrl.runs.presets import tiny_cpu
from compassrl.train.routes import routes_agreement
from course.fp8_codes import decode_e4m3, encode_e4m3
from course.lesson import lab
from course.pages import recompute_loss
from course.simulator import simulate
from tests.support import ROOT
from tests.support.labs import in_page

sys.path.insert(0, str(ROOT / 'tools'))
import build_docs  # noqa: E402
from links import anchors  # noqa: E402

HOMES = dict(
    schedule='rollout/schedule',
    trace='runs/trace',
    fp8='rollout/fp8',
    mismatch='algo/engine_gap',
    clip='algo/losses/espo',
    groups='algo/zero_variance',
    grpo='algo/losses',
    countdown='how_to/countdown',
    run='launch/background',
    judge='judges/genrm',
    clinic='loop',
)
CONTRAST = (ROOT / 'tests' / 'support' / 'contrast.js').read_text()
CONTRAST_OF_BODY = f'() => ({CONTRAST})(document.body)'
PHONE = dict(width=360, height=800)


def box(name):
    "The HTML of a lab on the site"
    path = ROOT / 'nbs' / f'{HOMES[name]}.ipynb'
    nb = build_docs.prepare(nbformat.read(path, 4), '', path.parent, {}, set())
    outputs = [o.get('data', {}) for c in nb.cells for o in c.get('outputs', [])]
    found = [data.get('text/html', '') for data in outputs]
    return next(html for html in found if f'data-lab="{name}"' in html)


class Opened:
    "A page with one lab: its requests, its errors, and what can be moved"

    def __init__(self, browser, folder, name, **settings):
        self.faults = []
        self.page = browser.new_page(viewport=PHONE, **settings)
        self.page.on('console', lambda m: m.type == 'error' and self.faults.append(m.text))
        self.page.on('pageerror', lambda e: self.faults.append(str(e)))
        self.page.on(
            'request',
            lambda r: r.url.startswith(('file:', 'data:', 'blob:')) or self.faults.append(r.url),
        )
        path = folder / f'{name}.html'
        path.write_text(f'<!doctype html><meta charset="utf-8"><body>{box(name)}')
        self.page.goto(f'file://{path}')

    def named(self, label):
        return self.page.get_by_label(label, exact=True)

    def text(self, selector):
        return self.page.locator(selector).inner_text()

    def says(self, part):
        "Waits until the line under a lab says it: files are read in the background"
        self.page.locator('.said').filter(has_text=part).wait_for()

    def fits(self):
        "No fault so far, no wider than a phone, and readable in both themes"
        assert self.faults == []
        assert self.page.evaluate('document.documentElement.scrollWidth') <= PHONE['width']
        for theme in 'light', 'dark':
            self.page.evaluate('theme => document.documentElement.dataset.theme = theme', theme)
            seen = self.page.evaluate(CONTRAST_OF_BODY)
            assert seen['texts'] > 5 and seen['faint'] == [], theme


def close(got, want):
    got, want = torch.tensor(got, dtype=torch.double), torch.as_tensor(want, dtype=torch.double)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_every_lab_stands_in_a_lesson_and_no_dead_widget_is_stored():
    labs = {p.stem for p in (ROOT / 'nbs' / 'labs').glob('*.js')} - {'shared', 'play'}
    assert set(HOMES) == labs
    assert len(labs) == 11 and '| Eleven labs with' in (ROOT / 'nbs' / 'index.ipynb').read_text()
    for name, home in HOMES.items():
        text = (ROOT / 'nbs' / f'{home}.ipynb').read_text()
        assert 'anywidget' not in text  # a widget's state would hold its code
        assert box(name).count('<script type="module">') == 1 and 'alt="' in box(name)


# ---- clip lab


def clip_point(g):
    n = g.randint(1, 12)
    return dict(
        name=g.choice(['grpo', 'dapo', 'gspo', 'cispo', 'espo']),
        delta=[g.choice([1e-4, 1e-2, 0.5, 3]) * g.uniform(-1, 1) for _ in range(n)],
        entropy=[g.choice([0.0, 0.5, g.uniform(0, 4.6)]) for _ in range(n)],
        advantage=g.choice([-1, 1]) * g.uniform(0.1, 2),
        alpha=g.uniform(0, 0.4),
        topFrac=g.choice([0.2, 0.28, 1, g.uniform(0.05, 1)]),
        vocab=g.randint(2, 1000),
        epsMin=3e-4,
    )


def clip_by_autograd(p):
    "The gradient that the library gives each token of one response"
    old = torch.full((1, len(p['delta'])), -2.0, dtype=torch.double)
    new = (old + torch.tensor([p['delta']], dtype=torch.double)).requires_grad_()
    adv, mask = torch.full_like(old, p['advantage']), torch.ones_like(old, dtype=torch.bool)
    own = EspoStep(
        alpha=p['alpha'], eps_min=p['epsMin'], top_frac=p['topFrac'], vocab_size=p['vocab']
    )
    entropy = torch.tensor([p['entropy']], dtype=torch.double)
    fn = policy_losses[p['name']]
    more = [own, entropy] if p['name'] == 'espo' else []
    loss, sums = fn(new, old, adv, mask, LossConfig(p['name']).resolve(), *more)
    weight = 1 if p['name'] == 'espo' else 1 / old.numel()
    (loss.sum() * weight).backward()
    return new.grad[0].tolist()


def test_clip_lab_has_the_gradients_of_the_library(browser):
    g = random.Random(0)
    points = [clip_point(g) for _ in range(1000)]
    got = in_page(
        browser.new_page(), 'clip', points, '(lab, p) => lab.tokens(p.name, p).map(t => t.gradient)'
    )
    want = [clip_by_autograd(p) for p in points]
    silent = [sum(x == 0 for x in w) for w in want]
    assert 100 < sum(n > 0 for n in silent) < 900  # both cases are met
    for ours, library in zip(got, want, strict=True):
        assert [x == 0 for x in ours] == [x == 0 for x in library]
        close(ours, library)


def clip_expected(delta, entropy, advantage):
    "By Python: loss -> gradients"
    state = dict(delta=delta, entropy=entropy, advantage=advantage)
    state |= dict(alpha=0.02, topFrac=0.25, vocab=100, epsMin=3e-4)
    names = 'grpo', 'dapo', 'gspo', 'cispo', 'espo'
    return {name: clip_by_autograd(state | dict(name=name)) for name in names}


CELLS = """() => Array.from({ length: 5 }, (_, i) => [...document.querySelectorAll('.cell')]
    .slice(8 * i, 8 * i + 8).map(e => e.title.replace('−', '-').replace('e−', 'e-')))"""


MOVED = "() => [...document.querySelectorAll('.number[title]')].map(e => e.title)"


def clip_agrees(opened):
    "What stands in the cells is what Python computes from the handles; how many are silent"

    def values(what):
        return [float(e.input_value()) for e in opened.page.get_by_label(what).all()]

    bad = opened.page.get_by_role('button', name='bad, A = −1')
    sign = -1 if bad.get_attribute('aria-pressed') == 'true' else 1
    delta = [float(x) for x in opened.page.evaluate(MOVED)]
    want = clip_expected(delta, values(re.compile('^entropy of')), sign)
    rows = opened.page.evaluate(CELLS)
    for row, gradients in zip(rows, want.values(), strict=True):
        for said, gradient in zip(row, gradients, strict=True):
            if gradient == 0:
                assert said == 'no gradient'
            else:
                assert float(said.removeprefix('gradient ')) == pytest.approx(gradient, rel=1e-3)
    return [row.count('no gradient') for row in rows]


def test_clip_lab_follows_mouse_and_keyboard(browser, tmp_path):
    opened = Opened(browser, tmp_path, 'clip', reduced_motion='reduce', color_scheme='dark')
    assert clip_agrees(opened) == [1, 1, 8, 0, 2]
    handle = opened.named('log-ratio of token 5, so')
    for _ in range(10):
        handle.press('ArrowDown')  # 0.3 is left, and GRPO's range is not
    assert clip_agrees(opened) == [0, 0, 8, 0, 2]
    x, moved = float(handle.input_value()), float(opened.page.evaluate(MOVED)[4])
    assert moved == pytest.approx(5e-5 * (10 ** (4 * x) - 1), rel=1e-9)
    at = opened.named('log-ratio of token 2, +').bounding_box()
    opened.page.mouse.move(at['x'] + at['width'] / 2, at['y'] + at['height'] / 2)
    opened.page.mouse.down()
    opened.page.mouse.move(at['x'] + at['width'] / 2, at['y'] + 3, steps=3)
    opened.page.mouse.up()
    assert clip_agrees(opened)[0] == 1
    opened.page.get_by_role('button', name='bad, A = −1').click()
    assert clip_agrees(opened)[0] == 0  # a bad token may become likelier for GRPO
    opened.page.get_by_role('button', name='GSPO').click()
    assert opened.text('.said').startswith('GSPO. One ratio for the whole response')
    for label in ('ESPO: alpha', 'ESPO: top_frac', 'entropy of token 2, +'):
        opened.named(label).press('End')
    opened.page.get_by_role('button', name='One outlier token').click()  # sets all of them back
    good, bad = (opened.page.get_by_role('button', name=f'{x}, A = ') for x in ('good', 'bad'))
    assert good.get_attribute('aria-pressed') == 'true'
    assert clip_agrees(opened) == [1, 1, 8, 0, 2]
    assert opened.text('.said').endswith('Without a gradient: 8 of 8 tokens.')
    bad.click()
    handle.press('Home')  # down as far as it goes, as the lesson asks
    assert clip_agrees(opened) == [1, 1, 8, 0, 2]
    opened.page.get_by_role('button', name='The unsure move').click()
    assert clip_agrees(opened) == [0, 0, 8, 0, 2]
    opened.page.get_by_role('button', name='Rounding noise').click()
    assert clip_agrees(opened) == [0, 0, 0, 0, 0]
    opened.page.get_by_role('button', name='ESPO', exact=True).click()
    assert '2 unsure: ratio' in opened.text('.said') and '6 sure: ratio' in opened.text('.said')
    opened.named('ESPO: top_frac').press('End')
    assert 'A ratio per group. All 8: ratio' in opened.text('.said')
    opened.fits()


# ---- group lab


def group_point(g):
    n, settle = g.randint(1, 8), g.random()
    return dict(
        raw=[float(g.random() < settle) if g.random() < 0.7 else float(settle > 0.5)] * n
        if g.random() < 0.5
        else [float(g.random() < settle) for _ in range(n)],
        valid=[g.random() < 0.9 for _ in range(n)],
        entropy=[
            [g.choice([0.0, g.uniform(0, 3), 12.0]) for _ in range(g.randint(1, 12))]
            for _ in range(n)
        ],
        estimator=g.choice(['grpo', 'dr_grpo', 'rloo']),
        stdFloor=g.choice([0.0, g.uniform(0, 0.5)]),
        lengthWeight=g.choice([0.0, g.uniform(0, 0.4)]),
        overlongFrac=g.uniform(0.1, 1),
        zvpAlpha=g.choice([0.0, g.uniform(0, 0.5)]),
        maxTokens=12,
    )


def by_the_library(p):
    "Advantages per token, [responses][tokens]"
    samples = [
        Sample('a', i, [1], list(range(len(H))), torch.zeros(len(H)), None, None, 'stop', 0)
        for i, H in enumerate(p['entropy'])
    ]
    for s, r, valid in zip(samples, p['raw'], p['valid'], strict=True):
        s.verdict = Verdict(r, r == 1, 'ok' if valid else 'failed')
    cfg = ZeroVarianceConfig(
        length_weight=p['lengthWeight'],
        overlong_frac=p['overlongFrac'],
        std_floor=p['stdFloor'],
        zvp_alpha=p['zvpAlpha'],
    )
    batch = collate(samples)
    entropy = torch.zeros(batch.response_mask.shape)
    entropy[batch.response_mask] = torch.tensor(sum(p['entropy'], []))
    batch = replace(batch, rewards=shape_rewards(samples, 12, cfg), entropy=entropy)
    adv, _ = token_advantages(
        batch,
        torch.tensor(p['raw']),
        torch.tensor(p['valid']),
        AdvantageConfig(p['estimator']),
        cfg,
    )
    return [row[m].tolist() for row, m in zip(adv, batch.response_mask, strict=True)]


def test_group_lab_has_the_advantages_of_the_library(browser):
    g = random.Random(0)
    points = [group_point(g) for _ in range(1000)]
    got = in_page(
        browser.new_page(), 'groups', points, '(lab, p) => lab.tokenAdvantages(p, p).tokens'
    )
    want = [by_the_library(p) for p in points]
    assert 200 < sum(any(map(any, w)) for w in want) < 950  # some groups are silent
    close([x for p in got for row in p for x in row], [x for p in want for row in p for x in row])


def test_group_lab_has_the_fp64_advantages_of_the_library(browser):
    "Rewards of any size, before anything is rounded to fp32"
    g = random.Random(1)
    points = [
        dict(
            rewards=[g.choice([0, 1, g.uniform(-5, 5)]) for _ in range(n)],
            valid=[g.random() < 0.8 for _ in range(n)],
            estimator=g.choice(['grpo', 'dr_grpo', 'rloo']),
            stdFloor=g.choice([0.0, 0.35]),
        )
        for n in (g.randint(1, 9) for _ in range(1000))
    ]
    got = in_page(
        browser.new_page(),
        'groups',
        points,
        '(lab, p) => lab.groupAdvantages(p.rewards, p.valid, p)',
    )
    for p, ours in zip(points, got, strict=True):
        rewards = torch.tensor(p['rewards'], dtype=torch.double)
        zero, valid = torch.zeros(len(rewards), dtype=torch.long), torch.tensor(p['valid'])
        close(ours, group_advantages(rewards, zero, valid, p['estimator'], p['stdFloor']))


def growing_group(g):
    "Often silent, some without a verdict; few lengths, so that costs are equal at times"
    n, reward = g.choice([1, 2, 4, 4, 8]), g.choice([0.0, 0.0, 1.0, 1.0, 0.5])
    return dict(
        raw=[reward if g.random() < 0.97 else 1 - reward for _ in range(n)],
        valid=[g.random() < 0.9 for _ in range(n)],
        lengths=[g.choice([5, 6])] * n,
    )


def grown(groups, budget, largest):
    "By the library: how many more responses each group gets"
    rows = [(x, i) for i, p in enumerate(groups) for x in zip(p['raw'], p['valid'], p['lengths'])]
    raw, valid, lengths = map(torch.tensor, zip(*(x for x, _ in rows)))
    cfg = ZeroVarianceConfig(max_group_size=largest)
    return growth(raw, torch.tensor([i for _, i in rows]), valid, lengths, cfg, budget).tolist()


def test_group_lab_grows_the_groups_that_the_library_grows(browser):
    g = random.Random(0)
    points = [
        dict(
            groups=[growing_group(g) for _ in range(g.randint(1, 6))],
            budget=g.choice([0, 24, g.uniform(0, 120)]),
            largest=g.choice([2, 8, 16]),
        )
        for _ in range(1000)
    ]
    call = '(lab, p) => lab.growth(p.groups, p.budget, p.largest)'
    got = in_page(browser.new_page(), 'groups', points, call)
    assert got == [grown(**p) for p in points]
    assert {0, 1, 2, 3} <= {sum(n > 0 for n in more) for more in got}


VERDICT = re.compile(r'(\w+) (\d+): (right|wrong|no verdict), (\d+) tokens')


def asked(page, name):
    "The responses of a group that the page shows"
    buttons = page.locator('.verdicts button')
    labels = buttons.evaluate_all("all => all.map(e => e.getAttribute('aria-label'))")
    rows = [m.groups() for m in map(VERDICT.fullmatch, labels) if m[1] == name]
    assert [int(i) for _, i, *_ in rows] == list(range(1, len(rows) + 1))
    return dict(
        raw=[float(v == 'right') for _, _, v, _ in rows],
        valid=[v != 'no verdict' for _, _, v, _ in rows],
        lengths=[int(n) for *_, n in rows],
    )


def nobody(names, groups, left, largest=32):
    "What is said where no group may grow, by the verdicts and lengths that the page shows"
    reasons = []
    for name, p in zip(names, groups):
        judged = [r for r, valid in zip(p['raw'], p['valid']) if valid]
        if len(judged) < 2:
            reasons.append(f'the {name} group has fewer than two verdicts')
        elif len(set(judged)) > 1:
            continue
        elif 2 * len(p['raw']) > largest:
            reasons.append(f'the {name} group has {len(p["raw"])} responses, the most allowed')
        else:
            assert sum(p['lengths']) > left
            reasons.append(f'the {name} group needs {sum(p["lengths"])} tokens')
    if not reasons:
        return 'No group grows: none is silent.'
    return f'No group grows: {"; ".join(reasons)}. {left:g} tokens are left.'


def test_silent_groups_grow_by_keyboard_and_what_they_cost_is_shown(browser, tmp_path):
    opened = Opened(browser, tmp_path, 'groups')
    page, names = opened.page, ('easy', 'mixed', 'hard')
    opened.named('RL-ZVP alpha').press('Home')

    def look():
        return [asked(page, name) for name in names]

    def cost(groups):
        return sum(sum(p['lengths']) for p in groups)

    def press(budget):
        "Python says who grows, from what the page showed before"
        was = look()
        left = (1 + budget) * first - cost(was)
        more = grown(was, left, 32)
        page.get_by_role('button', name='Grow silent groups').press('Enter')
        now = look()
        assert [len(p['raw']) for p in now] == [len(p['raw']) + n for p, n in zip(was, more)]
        who = [f'The {x} group has {n} more responses.' for x, n in zip(names, more) if n]
        spent = f' {cost(now) - first} of {budget * first:g} extra tokens are spent.'
        assert opened.text('.grown') == (' '.join(who) or nobody(names, was, left)) + spent
        return more

    first = cost(look())
    assert [press(0.5), press(0.5)] == [[0, 0, 8], [0, 0, 0]]  # the budget is used up
    assert 'the easy group needs 54 tokens. 25.5 tokens are left.' in opened.text('.grown')
    opened.named('budget of growth').press('End')
    assert [press(3), press(3), press(3)] == [[8, 0, 0], [16, 0, 0], [0, 0, 0]]
    easy, hard = look()[0], look()[2]
    assert sum(hard['raw']) == 1  # it speaks now
    assert (len(easy['raw']), sum(easy['raw'])) == (32, 30)  # what the lesson's answer says

    def shown_of_the_easy():
        told = {}
        for line in page.locator('.group').first.locator('.lane').all():
            words = line.locator('button').evaluate_all('all => all.map(e => e.className)')
            numbers = line.locator('.number').all_inner_texts()
            for word, number in zip(words, numbers, strict=True):
                told.setdefault(word, set()).add(number.replace('−', '-'))
        return told

    assert shown_of_the_easy() == dict(right={'0.25'}, wrong={'-3.81'})
    page.get_by_role('button', name='mean', exact=True).click()
    assert shown_of_the_easy() == dict(right={'0.06'}, wrong={'-0.94'})
    page.get_by_role('button', name='mean, ÷ std', exact=True).click()
    p = dict(estimator='grpo', stdFloor=0.35, lengthWeight=0.0, overlongFrac=0.5, zvpAlpha=0.0)
    p |= hard | dict(entropy=[[0.0] * n for n in hard['lengths']])
    html = page.locator('.group').last.inner_html()
    seen = [float(x) for x in re.findall('mean advantage ([^;]+);', html)]
    wide = page.locator('.verdicts button').evaluate_all('all => all.map(e => e.offsetWidth)')
    assert min(wide) > 30  # a finger's, on a phone
    assert seen == pytest.approx([row[0] for row in by_the_library(p)], rel=1e-6)
    opened.fits()
    after = look()
    page.get_by_role('button', name='Back to eight').press('Space')
    assert [len(p['raw']) for p in look()] == [8, 8, 8]
    assert [press(3), press(3), press(3)] == [[0, 0, 8], [8, 0, 0], [16, 0, 0]]
    assert look() == after  # the same verdicts again


def test_a_reset_brings_verdicts_and_sliders_back(browser, tmp_path):
    opened = Opened(browser, tmp_path, 'groups')
    page, names = opened.page, ('easy', 'mixed', 'hard')
    sliders = ['std_floor', 'length penalty', 'RL-ZVP alpha', 'budget of growth']

    def look():
        values = [opened.named(name).input_value() for name in sliders]
        pressed = page.locator('[aria-pressed=true]').all_inner_texts()
        return [asked(page, name) for name in names], values, pressed, opened.text('.said')

    start = look()
    for i in range(1, 9):  # without a verdict the group cannot grow
        button = page.get_by_role('button', name=f'mixed {i}: ')
        while '?' not in button.inner_text():
            button.press('Space')
    page.get_by_role('button', name='mean of the others').click()
    for name in sliders:
        opened.named(name).press('End')
    for _ in range(4):
        page.get_by_role('button', name='Grow silent groups').click()
    assert 'the mixed group has fewer than two verdicts' in opened.text('.grown')
    assert all(a != b for a, b in zip(look(), start))
    page.get_by_role('button', name='Reset').click()
    assert look() == start and opened.text('.grown').startswith('Every group has eight responses.')
    for name in ('easy', 'hard', 'hard'):  # right, wrong, no verdict, right: all groups speak
        page.get_by_role('button', name=f'{name} 1: ').click()
    page.get_by_role('button', name='Grow silent groups').click()
    assert opened.text('.grown').startswith('No group grows: none is silent.')


def test_group_lab_follows_mouse_and_keyboard(browser, tmp_path):
    opened = Opened(browser, tmp_path, 'groups')
    page = opened.page
    lengths = [9, 8, 10, 7, 9, 12, 8, 9]  # tokens of the hard prompt's responses

    def hard(raw, estimator='grpo'):
        "Mean advantages that Python gives the hard group, whose verdicts differ: no RL-ZVP"
        p = dict(raw=raw, valid=[True] * 8, entropy=[[0.0] * n for n in lengths])
        p |= dict(estimator=estimator, stdFloor=0.35, lengthWeight=0.0, overlongFrac=0.5)
        return [row[0] for row in by_the_library(p | dict(zvpAlpha=0.0))]

    def seen():
        html = page.locator('.group').last.inner_html()
        return [float(x) for x in re.findall('mean advantage ([^;]+);', html)]

    page.get_by_label('hard 2: wrong, 8 tokens').click()
    for _ in range(2):  # wrong, no verdict, right
        page.keyboard.press('Space')
    assert page.get_by_label('hard 2: wrong, 8 tokens').count() == 1
    page.keyboard.press('Space')
    page.keyboard.press('Enter')
    assert seen() == pytest.approx(hard([0.0, 1.0] + [0.0] * 6), rel=1e-6)
    page.get_by_role('button', name='mean', exact=True).click()
    assert seen() == pytest.approx(hard([0.0, 1.0] + [0.0] * 6, 'dr_grpo'), rel=1e-6)
    slider = opened.named('RL-ZVP alpha')
    slider.press('Home')
    assert float(slider.input_value()) == 0
    opened.named('length penalty').press('Home')
    all_tokens, mixed_and_hard = 54 + 69 + 72, 69 + 72
    assert opened.text('.said') == f'{mixed_and_hard} of {all_tokens} tokens have an advantage.'
    page.reload()
    penalty = opened.named('length penalty')
    while float(penalty.input_value()) < 0.099:
        penalty.press('ArrowRight')
    as_long_as_the_mean = sum(n for n in lengths if n == sum(lengths) / len(lengths))
    moved = all_tokens - as_long_as_the_mean  # 0 but for rounding, which does not count
    assert opened.text('.said') == f'{moved} of {all_tokens} tokens have an advantage.'
    opened.fits()


# ---- GRPO lab


RESPONSES = torch.cartesian_prod(*[torch.arange(4)] * 3)
TASKS = dict(
    rising=(RESPONSES.diff(dim=1) >= 0).all(1).double(),
    three=(RESPONSES == 3).any(1).double(),
    constant=torch.ones(64).double(),
)


def token_log_probs(theta, y):
    prefix = torch.stack([0 * y[:, 0], 1 + y[:, 0], 5 + 4 * y[:, 0] + y[:, 1]], 1)
    return theta.log_softmax(-1)[prefix].gather(2, y[..., None]).squeeze(2)


def expected_reward(theta, task):
    return float(token_log_probs(theta, RESPONSES).sum(1).exp() @ TASKS[task])


def grpo_step(theta, picks, advantages, lr):
    "New logits and loss, by the library's loss and autograd"
    theta = torch.as_tensor(theta, dtype=torch.double).clone().requires_grad_()
    new = token_log_probs(theta, RESPONSES[picks])
    adv = torch.tensor(advantages, dtype=torch.double)[:, None].expand(new.shape)
    mask = torch.ones(new.shape, dtype=torch.bool)
    values, _ = policy_losses['grpo'](new, new.detach(), adv, mask, LossConfig().resolve())
    loss = aggregate(values, mask, 'seq-mean-token-mean', mask.sum(), len(picks))
    (grad,) = torch.autograd.grad(loss, theta)
    return theta.detach() - lr * grad, loss.item()


def test_the_live_grpo_steps_as_the_library(browser):
    g = random.Random(0)
    points = []
    for _ in range(1000):
        n = g.randint(2, 8)
        theta = [[g.uniform(-3, 3) for _ in range(4)] for _ in range(21)]
        A = [g.uniform(-2, 2) for _ in range(n)]
        task = g.choice(list(TASKS))
        points.append(
            dict(
                theta=theta, picks=g.choices(range(64), k=n), A=A, lr=g.uniform(0.5, 20), task=task
            )
        )
    call = """(lab, p) => {
        const { theta, loss } = lab.step(p.theta, p.picks, p.A, p.lr)
        const z = lab.advantages(p.picks.map(i => lab.TASKS[p.task](lab.RESPONSES[i])),
            (r, mean, std) => (r - mean) / std)
        return { theta, loss, z, reward: lab.expectedReward(p.theta, p.task) }
    }"""
    for p, got in zip(points, in_page(browser.new_page(), 'grpo', points, call), strict=True):
        theta, loss = grpo_step(p['theta'], p['picks'], p['A'], p['lr'])
        close(got['theta'], theta)
        close(
            [got['loss'], got['reward']],
            [loss, expected_reward(torch.tensor(p['theta'], dtype=torch.double), p['task'])],
        )
        one = torch.zeros(len(p['picks']), dtype=torch.long)
        close(got['z'], group_advantages(TASKS[p['task']][p['picks']], one))


def test_the_live_grpo_follows_mouse_and_keyboard(browser, tmp_path):
    opened = Opened(browser, tmp_path, 'grpo', reduced_motion='reduce')
    page, theta, silent = opened.page, torch.zeros(21, 4).double(), []
    assert page.locator('.named b').count() == 0  # no bar leads

    def follow(lr, formula, task='rising'):
        "Python takes the step that the page has taken, from the responses that the page shows"
        words = [c.split()[0] for c in page.locator('.chips span').all_inner_texts()]
        picks = [int(w, 4) for w in words]
        r = TASKS[task][picks]
        new, loss = grpo_step(theta, picks, formula(r).tolist(), lr)
        said = f'expected reward {expected_reward(new, task):.4f}, loss {loss + 0.0:.6f}.'
        silent.append(len(set(r.tolist())) == 1)
        said += f' Silent steps (all rewards equal): {sum(silent)} of {len(silent)}.'
        assert opened.text('.said').endswith(said.replace('-0.000000', '0.000000'))
        return new

    def z(r):
        return (r - r.mean()) / (r.std() + 1e-6)

    page.get_by_role('button', name='Step', exact=True).click()
    theta = follow(2.0, z)
    opened.named('learning rate').press('ArrowRight')
    page.get_by_role('button', name='Step', exact=True).press('Enter')
    theta = follow(2.5, z)
    opened.named('advantage').fill('3 * r')
    page.get_by_role('button', name='Step', exact=True).click()
    theta = follow(2.5, lambda r: 3 * r)
    page.get_by_role('button', name='Run 20').click()  # at once where motion is unwanted
    assert opened.text('.said').startswith('Step 23:')
    name = page.locator('.axis').last.locator('span').last.text_content()
    assert name == '−5'  # where the axis of the loss ends
    high = page.locator('.bars rect').evaluate_all('all => all.map(e => +e.getAttribute("height"))')
    leads = page.locator('.bars title').nth(high.index(max(high))).text_content()
    name, chance = leads.split(': ')
    said = f'{float(chance):.2f}' if float(chance) < 0.995 else '> 0.99'
    assert opened.text('.named b') == f'{name}: {said}'
    begins = page.locator('.named i').evaluate_all(
        'all => all.map(e => [e.textContent, e.getBoundingClientRect().left])'
    )
    lefts = page.locator('.bars rect').evaluate_all(
        'all => all.map(e => e.getBoundingClientRect().left)'
    )
    assert [name for name, _ in begins] == ['000', '100', '200', '300']
    for i, (_, x) in enumerate(begins):  # each name stands where its bars begin
        assert abs(x - lefts[16 * i]) < 1
    opened.named('advantage').fill('r -')
    assert 'not a formula' in opened.text('.fault')
    opened.fits()


def test_the_live_grpo_of_the_losses_shows_what_its_lesson_says(browser, tmp_path):
    "Which bars have grown after 20 steps, and how many steps were silent by the size of the group"
    opened = Opened(browser, tmp_path, 'grpo', reduced_motion='reduce')
    page = opened.page
    page.get_by_role('button', name='Run 20').click()
    said = opened.text('.said')
    assert said.startswith('Step 20:') and ', loss 0.000000.' in said
    bars = page.locator('.bars title').all_text_contents()
    chance = {b[:3]: float(b[5:].replace('−', '-')) for b in bars}
    right = [name for name in chance if list(name) == sorted(name)]
    assert len(chance) == 64 and len(right) == 20
    assert {n for n in right if chance[n] > 1 / 64} == {n for n in right if n[0] == '0'}
    assert sum(n[0] == '0' for n in right) == 10 and {'333', '222', '133'} <= set(right)
    assert 1 / 64 < chance['010'] < min(sorted(chance.values())[-5:])
    # By their first digit so many responses are right, and so likely are they now
    first = {d: sum(p for n, p in chance.items() if n[0] == d) for d in '0123'}
    assert [sum(n[0] == d for n in right) for d in '0123'] == [10, 6, 3, 1]
    assert first['0'] > 0.25 > max(first[d] for d in '123')
    page.get_by_role('button', name='Run 20').click()  # what step 0 says of step 40
    assert opened.text('.said').endswith(' Silent steps (all rewards equal): 8 of 40.')
    bars = page.locator('.bars title').all_text_contents()
    chance = {b[:3]: float(b[5:].replace('−', '-')) for b in bars}
    likeliest = max(chance, key=chance.get)
    assert likeliest[0] == '0' and likeliest in right and chance['010'] < 1 / 64
    for size, silent in ('2', 15), ('32', 0):
        page.get_by_role('button', name='Start again').click()
        assert opened.text('.said') == 'Step 0: expected reward 0.3125.'
        opened.named('group').fill(size)
        page.get_by_role('button', name='Run 20').click()
        said = f' Silent steps (all rewards equal): {silent} of 20.'
        assert opened.text('.said').endswith(said)
    page.get_by_role('button', name='always').click()
    page.get_by_role('button', name='Step', exact=True).click()
    assert opened.text('.said').endswith(': 1 of 1.')
    page.get_by_role('button', name='Start again').click()
    page.get_by_role('button', name='Run 20').click()
    assert opened.text('.said').endswith(' Silent steps (all rewards equal): 20 of 20.')
    bars = page.locator('.bars title').all_text_contents()
    assert {b[3:] for b in bars} == {': 0.0156'}  # no bar has moved
    opened.fits()


def test_the_live_grpo_of_the_policy_gradient_shows_what_its_lesson_says(
    browser, tmp_path, monkeypatch
):
    """Its learning rate is the lesson's, and it leaves out the loss of a later lesson

    A verifier that adds 10 lets one wrong response win."""
    monkeypatch.setitem(HOMES, 'grpo', 'algo/policy_gradient')
    opened = Opened(browser, tmp_path, 'grpo', reduced_motion='reduce')
    page, ends = opened.page, {}
    assert opened.named('learning rate').input_value() == '6'
    assert opened.named('advantage').input_value() == 'r + 10'
    pressed = page.locator('button[aria-pressed="true"]').all_inner_texts()
    assert pressed == ['digits never fall']
    for formula in 'r', 'r - mean', 'r + 10 - (mean + 10)', 'r + 10':
        page.get_by_role('button', name='Start again').click()
        opened.named('advantage').fill(formula)
        page.get_by_role('button', name='Run 20').click()
        ends[formula] = float(re.search(r'reward (\d\.\d+)', opened.text('.said'))[1])
        assert page.locator('.pair svg').count() == 1 and 'loss' not in opened.text('.bench')
    assert ends['r + 10'] < 0.05 and page.locator('.named b').inner_text() == '211: 0.99'
    assert [round(e, 2) for e in list(ends.values())[:3]] == [0.95, 0.91, 0.91]
    bars = page.locator('.bars rect')
    high = bars.evaluate_all('all => all.map(e => +e.getAttribute("height"))')
    top = high.index(max(high))
    assert high[top] > 50 * sorted(high)[-2] and TASKS['rising'][top] == 0
    opened.fits()


def test_a_lesson_says_where_a_slider_of_its_lab_begins():
    import matplotlib.pyplot as plt

    figure = plt.figure()
    some = dict(lr=6.0, formula='r > 0')
    made, plain = (lab('grpo', figure, 'an empty figure', **more) for more in (some, {}))
    plt.close(figure)
    begins = '<div class="lab" data-lab="grpo" data-lr="6" data-formula="r &gt; 0"><img '
    assert made.html.startswith(begins)
    assert plain.html.startswith('<div class="lab" data-lab="grpo"><img ')
    assert (made.widget.begin, plain.widget.begin) == (some, {})


def test_the_axis_of_a_loss_holds_all_of_it(browser):
    points = [[], [0.2], [-1], [1.001], [-11], [33.3, -20.1], [-1000], [1001], [float('inf'), 3]]
    points = [[str(x) for x in p] for p in points]
    call = '(lab, p) => lab.reach(p.map(x => x === "inf" ? Infinity : +x))'
    got = in_page(browser.new_page(), 'grpo', points, call)
    assert got == [1, 1, 1, 2, 20, 50, 1000, 2000, 5]


# ---- mismatch lab

STORED = dict(
    fp32=lambda x: x.float().double(),
    bf16=lambda x: x.bfloat16().double(),
    e4m3=lambda x: decode_e4m3(encode_e4m3(x)).double(),
)


def mismatch_point(g):
    C, V, E = g.randint(1, 4), g.randint(2, 6), g.randint(1, 5)

    def table(width, size):
        return [[g.gauss(0, size) for _ in range(width)] for _ in range(C)]

    return dict(
        logits=table(V, 2.5),
        drift=table(V, 0.3),
        scores=[[x, *(g.choice([x + 1e-3, y]) for y in row)] for x, *row in table(E, 1)],
        turn=table(E, 0.1),
        experts=[[[g.gauss(0, 2) for _ in range(V)] for _ in range(E)] for _ in range(C)],
        top=g.randint(1, E),
        routes=g.choice(['live', 'replayed', 'late']),
        stale=g.choice([0, 1, 8]),
        format=g.choice(list(STORED)),
        temperature=g.choice([1, g.uniform(0.5, 1.5)]),
        raw=g.random() < 0.5,
        tis=g.choice(['off', 'truncate', 'mask']),
        cap=g.uniform(1, 4),
    )


def first_of_the_best(scores, top):
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :top]


def mixed(logits, scores, experts, idx):
    "The library's gates; a sum over the experts used"
    gates = softmax_gates(scores, idx, norm=True)
    used = experts.gather(1, idx[..., None].expand(-1, -1, experts.shape[-1]))
    return logits + (gates[..., None] * used).sum(1)


def by_two_engines(p):
    "Logits of the trainer and of the rollout; their routes, recorded and the trainer's own"
    logits, drift, scores, turn, experts = (
        torch.tensor(p[k], dtype=torch.double)
        for k in ('logits', 'drift', 'scores', 'turn', 'experts')
    )
    stored = STORED[p['format']]
    past = stored(scores - p['stale'] * turn)
    chosen, own = (first_of_the_best(x, p['top']) for x in (past, scores))
    recorded = chosen.roll(1, 0) if p['routes'] == 'late' else chosen
    old = mixed(stored(logits - p['stale'] * drift), past, stored(experts), chosen)
    new = mixed(logits, scores, experts, own if p['routes'] == 'live' else recorded)
    return new, old, recorded, own


def by_enumeration(p):
    "The lab's measures, every token of every context weighed by the probability to be drawn"
    logits, old, recorded, own = by_two_engines(p)
    x = (logits / p['temperature']).requires_grad_()
    train, sampled = x.log_softmax(-1), (old / p['temperature']).log_softmax(-1)
    reported = old.log_softmax(-1) if p['raw'] else sampled
    shape = PolicyConfig(num_hidden_layers=1)
    q, mask = sampled.exp() / len(logits), torch.ones_like(x, dtype=torch.bool)
    w, hit = tis_weights(train, reported, mask, p['tis'], p['cap'])
    adv = torch.eye(x.shape[1])[0].double() - train.exp()[:, :1].detach()
    (got,) = torch.autograd.grad((q * w * adv * train).sum(), x, retain_graph=True)
    (exact,) = torch.autograd.grad(train.exp()[:, 0].mean(), x)
    delta = log_ratio(train.detach(), reported, mask)
    return dict(
        gap=(q * delta.abs()).sum(),
        k3=(q * kl_estimate(reported, train.detach(), 'k3')).sum(),
        f2=(q * (delta.abs() > torch.tensor(2.0).double().log())).sum(),
        agree=routes_agreement(own[:, None], recorded[:, None], shape).double().mean(),
        changed=(q * hit).sum(),
        cosine=((got * exact).sum() / got.norm() / exact.norm()).nan_to_num(),  # all dropped: 0
        size=got.norm() / exact.norm(),
    )


def test_mismatch_lab_measures_what_the_library_measures(browser):
    g = random.Random(0)
    points = [mismatch_point(g) for _ in range(1000)]
    got = in_page(browser.new_page(), 'mismatch', points, '(lab, p) => lab.measures(p)')
    agreed = []
    for p, ours in zip(points, got, strict=True):
        want = by_enumeration(p)
        assert ours.keys() == want.keys()
        close(list(ours.values()), torch.stack([want[k] for k in ours]))
        agreed.append((p['routes'], float(want['agree']) == 1))
    assert len(set(agreed)) == 6  # each kind of routes, with other experts and without


def mismatch_shows(opened, state):
    for key, value in by_enumeration(state).items():
        seen = float(opened.text(f'td.{key}').replace('−', '-'))
        assert seen == pytest.approx(float(value), rel=1e-3, abs=1e-12), key


def test_the_world_of_the_mismatch_lab_is_the_one_its_lesson_describes(browser):
    (world,) = in_page(browser.new_page(), 'mismatch', [0], '(lab) => lab.WORLD')
    shapes = {k: tuple(torch.tensor(world[k]).shape) for k in ('logits', 'scores', 'experts')}
    assert shapes == dict(logits=(24, 6), scores=(24, 4), experts=(24, 4, 6))
    assert world['top'] == 2
    best = torch.tensor(world['scores'], dtype=torch.double).sort().values
    assert int((best[:, -2] - best[:, -3] < 2e-3).sum()) == 4


def test_replay_takes_away_what_other_experts_add_and_nothing_else(browser):
    "In the lab's own world, context by context: the gap, and where other experts were used"
    call = """(lab, p) => {
        const { train, reported, other } = lab.engines({ ...lab.WORLD, ...p })
        return other.map((x, c) => [x, train[c].map((y, v) => Math.abs(y - reported[c][v]))])
    }"""
    still = dict(temperature=1, raw=False, stale=0)
    points = [
        still | dict(format=f, routes=r) for f in ('bf16', 'e4m3') for r in ('live', 'replayed')
    ]
    found = in_page(browser.new_page(), 'mismatch', points, call)
    for live, replayed in (found[:2], found[2:]):
        assert not any(other for other, _ in replayed)
        for (other, gap), (_, left) in zip(live, replayed, strict=True):
            assert max(left) > 0  # rounding is still there
            if other:
                assert fmean(gap) > 2 * fmean(left)
            else:
                assert gap == left
        assert 1 < sum(other for other, _ in live) < 12


def test_tis_repairs_true_reports_and_harms_false_ones(browser):
    "In the lab's own world: the answer that its lesson gives"
    call = """(lab, p) => lab.measures({ ...lab.WORLD, format: 'fp32', temperature: 1, raw: false,
        stale: 0, routes: 'replayed', cap: 2, ...p }).cosine"""
    faults = dict(format='e4m3'), dict(format='bf16', routes='live'), dict(stale=4)
    raw = dict(temperature=0.7, raw=True)
    points = [f | dict(tis=tis) for f in (*faults, raw) for tis in ('off', 'truncate')]
    cosines = in_page(browser.new_page(), 'mismatch', points, call)
    *better, (before, after) = zip(cosines[::2], cosines[1::2])
    assert all(old < new for old, new in better)
    assert before == pytest.approx(1) and after < 0.995


def test_the_mismatch_lab_shows_the_numbers_of_its_answers(browser):
    "In the lab's own world: gaps and cosines as the lesson says them, here by the library"
    (world,) = in_page(browser.new_page(), 'mismatch', [0], '(lab) => lab.WORLD')
    start = world | dict(format='fp32', temperature=1, raw=False, stale=0, routes='live')

    def of(key, digits, **change):
        found = by_enumeration(start | dict(tis='off', cap=2) | change)
        return round(float(found[key]), digits)

    def gap(digits=3, **change):
        return of('gap', digits, **change)

    def cosine(**change):
        return of('cosine', 3, **change)

    replayed, late = dict(routes='replayed'), dict(routes='late')
    raw = dict(temperature=0.6, raw=True)
    assert [gap(4, format='bf16'), gap(4, format='bf16', **replayed)] == [0.0465, 0.0017]
    assert [gap(format='e4m3'), gap(format='e4m3', **replayed)] == [0.115, 0.029]
    assert of('cosine', 4, format='bf16') == 0.9997
    assert [cosine(format='e4m3'), cosine(format='e4m3', **replayed)] == [0.983, 0.999]
    assert of('cosine', 4, format='e4m3', tis='truncate') == 0.9995
    assert gap(format='bf16', **late) == 0.345 > 7 * gap(4, format='bf16')
    assert gap(temperature=0.6) == 0
    assert [gap(**raw), gap(**raw, **replayed), cosine(**raw)] == [0.193, 0.193, 1]
    assert [gap(stale=4), gap(stale=4, **replayed), gap(stale=8)] == [0.041, 0.02, 0.036]
    assert [cosine(stale=k) for k in (1, 4, 8)] == [0.999, 0.992, 0.986]
    assert cosine(**raw, tis='truncate') == 0.981
    assert [of(k, 2, **raw, tis='truncate') for k in ('changed', 'size')] == [0, 0.7]
    for fault, off, masked in ((dict(format='e4m3'), 0.983, 0.944), (late, 0.904, 0.878)):
        assert [cosine(**fault), cosine(**fault, tis='mask')] == [off, masked]


def test_a_report_without_temperature_is_harmed_by_weights_below_one(browser):
    "In the lab's own world: no weight reaches the cap, and raising the low ones repairs most"
    (world,) = in_page(browser.new_page(), 'mismatch', [0], '(lab) => lab.WORLD')
    live, old, _, _ = by_two_engines(world | dict(format='fp32', stale=0, routes='live'))
    x = (live / 0.6).requires_grad_()
    train, sampled = x.log_softmax(-1), (old / 0.6).log_softmax(-1)
    w = (train - old.log_softmax(-1)).exp().detach()
    assert w.max() < 2
    adv = torch.eye(6)[0].double() - train.exp()[:, :1].detach()
    (exact,) = torch.autograd.grad(train.exp()[:, 0].mean(), x, retain_graph=True)

    def gradient(w):  # its cosine and its length
        (g,) = torch.autograd.grad(
            (sampled.exp() / 24 * w * adv * train).sum(), x, retain_graph=True
        )
        return float((g * exact).sum() / g.norm() / exact.norm()), float(g.norm() / exact.norm())

    both, low, high = (gradient(v) for v in (w, w.clamp(max=1), w.clamp(min=1)))
    assert [round(v, 2) for v in both] == [0.98, 0.7]
    assert 1 - low[0] > 10 * (1 - high[0]) and low[1] < 0.7 < 1 < high[1]


def test_mismatch_lab_follows_mouse_and_keyboard(browser, tmp_path):
    opened = Opened(browser, tmp_path, 'mismatch')
    page = opened.page
    page.get_by_role('button', name='truncate').click()
    page.get_by_role('button', name='e4m3').press('Enter')
    hot = page.locator('.dot.other')
    assert hot.count() > 0  # tokens of other experts, which replay takes away
    page.get_by_role('button', name='replayed (R3)').press('Space')
    assert hot.count() == 0
    page.get_by_role('button', name='reports without temperature').press('Space')
    opened.named('steps behind').press('End')
    for _ in range(6):
        opened.named('temperature').press('ArrowLeft')
    (world,) = in_page(page, 'mismatch', [0], '(lab) => lab.WORLD')
    settings = dict(stale=8, format='e4m3', temperature=0.7, raw=True, tis='truncate', cap=2)
    mismatch_shows(opened, world | settings | dict(routes='replayed'))
    page.get_by_role('button', name='one late').click()
    mismatch_shows(opened, world | settings | dict(routes='late'))
    assert hot.count() > 0
    page.get_by_role('button', name='Hide a fault').click()
    assert not page.get_by_label('temperature', exact=True).is_visible()
    for fault in HIDDEN:
        assert not opened.text('.said').startswith('Right')
        page.get_by_role('button', name=fault).click()
        if opened.text('.said').startswith(f'Right, {fault}: '):
            break
        assert opened.text('.said').startswith(f'Not "{fault}": then ')
    shows_run(opened, world, HIDDEN[fault] | dict(tis='truncate'))
    opened.fits()


HIDDEN = {
    'e4m3': dict(format='e4m3'),
    'reports without temperature': dict(temperature=0.7, raw=True),
    'steps behind': dict(stale=4),
    'live routes': dict(routes='live'),
    'routes one late': dict(routes='late'),
    'no fault': {},
}


def shows_run(opened, world, change):
    "Numbers, controls and orange dots are those of a run with a fault"
    sound = dict(format='bf16', routes='replayed', temperature=1, raw=False, stale=0, tis='off')
    run = sound | change
    mismatch_shows(opened, world | run | dict(cap=2))
    said = [dict(bf16='BF16', e4m3='e4m3')[run['format']]]
    said += ['reports without temperature'] * run['raw']
    said += [dict(live='live', replayed='replayed (R3)', late='one late')[run['routes']]]
    said += [run['tis']]
    assert opened.page.locator('[aria-pressed="true"]').all_inner_texts() == said
    for name, key in (('temperature', 'temperature'), ('steps behind', 'stale')):
        value = opened.page.get_by_label(name, exact=True).input_value()
        assert float(value) == run[key]
    orange = opened.page.locator('.dot.other').count()
    assert (orange > 0) == (run['routes'] != 'replayed')


def test_a_hidden_fault_is_seen_in_the_numbers_and_named(browser, tmp_path):
    opened = Opened(browser, tmp_path, 'mismatch')
    page = opened.page
    (world,) = in_page(page, 'mismatch', [0], '(lab) => lab.WORLD')
    still = world | dict(temperature=1, raw=False, stale=0, tis='off', cap=2)
    run = still | dict(format='bf16', routes='replayed')
    sound = float(by_enumeration(run)['k3'])
    for i, (fault, change) in enumerate(HIDDEN.items()):
        page.evaluate('x => { Math.random = () => x }', (i + 0.5) / len(HIDDEN))
        page.get_by_role('button', name='Hide a fault').press('Enter')
        mismatch_shows(opened, run | change)
        assert page.locator('.dot.other').count() == 0  # the colour would tell
        assert fault == 'no fault' or float(by_enumeration(run | change)['k3']) > 100 * sound
        if i:  # a wrong answer hides the fault still, and says what its sign would be
            page.get_by_role('button', name='e4m3').press('Enter')
            assert opened.text('.said').startswith('Not "e4m3": then all dots')
            mismatch_shows(opened, run | change)
        page.get_by_role('button', name=fault).press('Enter')
        assert opened.text('.said').startswith(f'Right, {fault}: then ')
        shows_run(opened, world, change)
    page.get_by_role('button', name='FP32').click()  # the reader goes on from there
    mismatch_shows(opened, run | dict(format='fp32'))


# ---- FP8 ruler


def test_fp8_ruler_has_the_codes_and_the_blocks_of_the_library(browser):
    g = random.Random(0)
    size = [1e-6, 1e-3, 1, 300, 1e5]
    blocks = [
        [g.choice(size) * g.uniform(-1, 1) for _ in range(g.randint(1, 8))] for _ in range(1000)
    ]
    blocks += [[0.0, -0.0], [448.0, 1.0625, 1.1875, 2**-10, 3 * 2**-10]]  # ties
    call = """(lab, block) => ['e4m3', 'e5m2'].map(format => {
        const { scale, stored, values } = lab.quantise(block, format)
        return { scale, stored, values, codes: stored.map(x => lab.encode(x, format)) }
    })"""
    page = browser.new_page()
    for block, got in zip(blocks, in_page(page, 'fp8', blocks, call), strict=True):
        x, row = torch.tensor([block]), (1, len(block))
        codes, scale = quantise(x, row)
        close(got[0]['scale'], scale.item())
        close(got[0]['stored'], codes.double()[0])
        close(got[0]['values'], dequantise(codes, scale, row).double()[0])
        if any(block):
            assert [c & 127 for c in got[0]['codes']] == [
                c & 127 for c in codes.view(torch.uint8)[0].tolist()
            ]
        top = x.abs().max() / 57344
        wide = (x / torch.where(top == 0, 1.0, top)).clamp(-57344, 57344).to(torch.float8_e5m2)
        close(got[1]['stored'], wide.double()[0])
    (all_numbers,) = in_page(page, 'fp8', ['e4m3'], '(lab, format) => lab.numbers(format)')
    close(all_numbers, decode_e4m3(torch.arange(127, dtype=torch.uint8)).double())


def test_fp8_ruler_follows_mouse_and_keyboard(browser, tmp_path):
    opened = Opened(browser, tmp_path, 'fp8')
    opened.named('number').press('ArrowRight')
    opened.named('largest of its block').press('End')
    x = torch.tensor([[10**-0.99, 1000.0]], dtype=torch.double)
    codes, scale = quantise(x, (1, 2))
    stored, value = codes.double()[0, 0].item(), dequantise(codes, scale, (1, 2))[0, 0].item()
    assert f'Scale {scale.item():.5g}.' in opened.text('.said')
    assert f'stored {stored:.5g}, code 0 ' in opened.text('.said')
    assert f'off by {abs(value / x[0, 0].item() - 1):.2%}'.replace('%', ' %') in opened.text(
        '.said'
    )
    mark = opened.page.locator('.kept').bounding_box()
    assert 0 < mark['x'] < PHONE['width']  # the ruler is wider, and follows the number
    opened.page.get_by_role('button', name='e5m2').click()
    assert f'stored {stored:.5g}, code 0 ' not in opened.text('.said')
    opened.fits()


# ---- trace viewer


def traced(g, groups=2, size=3, tool=False):
    "A step as a run writes it, and the config of the run"

    def near(values, spread):
        return [x + g.choice([0.01, 1]) * g.gauss(0, spread) for x in values]

    rows = []
    for i in range(groups * size):
        n = g.randint(1, 7)
        old = [g.uniform(-4, -0.1) for _ in range(n)]
        rows.append(
            dict(version=1, step=3, kind='sample', group=i // size, prompt_ids=[5, 6])
            | dict(response_ids=[g.randrange(50) for _ in range(n)], reward=float(i % 2))
            | dict(old_log_probs=old, log_probs=near(old, 0.3), ref_log_probs=near(old, 0.5))
            | dict(rollout_log_probs=near(old, 0.5), advantages=near([0.0] * n, 1))
            | dict(entropy=[g.choice([0.0, 0.7, g.uniform(0, 4)]) for _ in range(n)])
        )
        if tool and g.random() < 0.7:  # the values where it wrote must not matter
            rows[-1]['policy_mask'] = [int(g.random() < 0.6) for _ in range(n)]
    rows[0].pop('policy_mask', None)
    head = dict(version=1, step=3, kind='step', num_samples=len(rows))
    head |= dict(num_mini_batches=g.choice([1, 2, 4]), metrics=dict(time_rollout_s=2.0))
    loss = LossConfig(
        g.choice(['grpo', 'dr_grpo', 'dapo', 'gspo', 'gmpo', 'cispo', 'espo']),
        tis=g.choice(['off', 'truncate', 'mask']),
        kl_coef=g.choice([0, 0.1]),
        kl_estimator=g.choice(['k1', 'k2', 'k3']),
        max_response_tokens=20,
    )
    espo = EspoConfig(
        alpha=g.uniform(0.02, 0.5),
        top_frac=g.choice([0.2, 0.5, 1]),
        groups=g.choice(['top_frac', 'batch_quantile', 'bins']),
        ratio=g.choice(['gspo_token', 'literal']),
        low_entropy_weight=g.choice([0, 0.5, 1]),
    )
    return head, rows, TrainConfig(loss=loss, espo=espo)


def as_files(head, rows, cfg):
    lines = ''.join(json.dumps(r) + '\n' for r in [head, *rows])
    return lines, json.dumps(asdict(cfg))


def written(folder, head, rows, cfg):
    "The two files of a run"
    paths = folder / 'trace.jsonl', folder / 'config.json'
    for path, text in zip(paths, as_files(head, rows, cfg), strict=True):
        path.write_text(text)
    return paths


def test_trace_viewer_recomputes_every_loss_as_the_library(browser):
    g = random.Random(0)
    runs = [traced(g, tool=tool) for tool in (False, True) for _ in range(300)]
    for some in runs[:300], runs[300:]:
        assert len({(cfg.loss.name, cfg.loss.tis) for *_, cfg in some}) == 21
    call = """(lab, [trace, config]) =>
        lab.recomputeLoss(lab.readTrace(trace)[0], lab.settingsOf(JSON.parse(config)))"""
    got = in_page(browser.new_page(), 'trace', [as_files(*run) for run in runs], call)
    close(got, [recompute_loss(*run) for run in runs])


def test_trace_viewer_opens_the_files_of_a_run(browser, tmp_path):
    head, rows, cfg = traced(random.Random(7))
    head['metrics']['loss'] = recompute_loss(head, rows, cfg)
    trace, config = as_files(head, rows, cfg)
    (tmp_path / 'trace.jsonl').write_text(trace + '{"half a line')
    (tmp_path / 'config.json').write_text(config)
    opened = Opened(browser, tmp_path, 'trace')
    opened.says('equal within 1e-6.')  # the sample that is there first
    files = opened.named('files of a run')
    files.set_input_files(tmp_path / 'trace.jsonl')
    opened.says('Add config.json')
    opened.page.get_by_label('colour').select_option('silent')
    opened.says('needs config.json')
    files.set_input_files(tmp_path / 'config.json')
    opened.says(f'recomputed {head["metrics"]["loss"]:.9f}: equal within 1e-6.')
    opened.page.get_by_label('group').select_option('1')
    want = [str(i) for r in rows if r['group'] == 1 for i in r['response_ids']]
    assert opened.page.locator('.token').all_inner_texts() == want
    head['metrics']['loss'] += 2e-6
    (tmp_path / 'trace.jsonl').write_text(as_files(head, rows, cfg)[0])
    files.set_input_files(tmp_path / 'trace.jsonl')
    opened.says('off by −2.00e−6')
    (tmp_path / 'trace.jsonl').write_text('{"prompt": "2+2="}\n')
    files.set_input_files(tmp_path / 'trace.jsonl')
    opened.says('line 1 is no row of a trace')
    opened.fits()


def coloured(opened):
    "Of each token on the page: how strong its colour is, and what it says when it is pointed at"
    say = 'all => all.map(e => [+e.style.getPropertyValue("--a"), e.title])'
    return opened.page.locator('.token').evaluate_all(say)


def choose(opened, *paths):
    "Files, by the page's button; what it says then is new"
    opened.page.locator('.said').evaluate('line => { line.textContent = "" }')
    opened.named('files of a run').set_input_files(paths)


def give(opened, folder, head, rows, cfg):
    "A run to the page, which finds its loss to be right"
    head['metrics']['loss'] = loss = recompute_loss(head, rows, cfg)
    choose(opened, *written(folder, head, rows, cfg))
    opened.says(f'recomputed {loss:.9f}: equal within 1e-6.')


def test_trace_viewer_leaves_out_what_a_tool_wrote(browser, tmp_path):
    "Which tokens are silent, by hand: clipped ones of the policy"
    head, rows, cfg = traced(random.Random(5), groups=1, size=20, tool=True)
    cfg = replace(cfg, loss=LossConfig('grpo'))
    opened = Opened(browser, tmp_path, 'trace')
    give(opened, tmp_path, head, rows, cfg)
    opened.page.get_by_label('colour').select_option('silent')
    want = []
    for r in rows:
        for t, by_policy in enumerate(r.get('policy_mask', [1] * len(r['response_ids']))):
            a, ratio = r['advantages'][t], math.exp(r['log_probs'][t] - r['old_log_probs'][t])
            clipped = ratio < 0.8 if a < 0 else ratio > 1.2
            want.append((int(clipped and by_policy), not by_policy))
    assert [(a, 'a tool wrote this' in title) for a, title in coloured(opened)] == want
    assert len(set(want)) == 3
    opened.fits()


def routed(g, row):
    "With what a rollout's routes and the trainer's routers have in common; some are unknown"
    n, prompt = len(row['response_ids']), len(row['prompt_ids'])
    valid = [1] * prompt + [int(g.random() < 0.8) for _ in range(n - 1)]
    agree = [g.choice([0.5, 0.75, 1.0]) * v for v in [*valid[prompt:], 0]]
    return row | dict(routes_agree=agree, routes_valid=valid)


def test_trace_viewer_colours_by_route_agreement(browser, tmp_path):
    "Strong where layers disagree, with tokens of a tool; a trace without routes has no such colour"
    g = random.Random(3)
    head, rows, cfg = traced(g, groups=1, size=8, tool=True)
    opened, color = Opened(browser, tmp_path, 'trace'), 'route agreement'
    told = opened.page.get_by_label('colour')
    give(opened, tmp_path, head, rows, cfg)
    assert told.locator('option').count() == 5 and color not in told.inner_text()
    rows = [routed(g, r) for r in rows]
    give(opened, tmp_path, head, rows, cfg)
    told.select_option(color)
    want = []
    for r in rows:
        known = [*r['routes_valid'][len(r['prompt_ids']) :], 0]
        for x, v in zip(r['routes_agree'], known, strict=True):
            want.append((2 * (1 - x), f'{color} {x:g}') if v else (0, f'{color} unknown'))
    assert [(a, title.split('\n')[0]) for a, title in coloured(opened)] == want
    assert {a for a, _ in want} == {0, 0.5, 1}
    choose(opened, tmp_path / 'config.json')
    opened.says('equal within 1e-6.')
    assert told.input_value() == 'routes'  # a file more does not change what is looked at
    old = [{k: v for k, v in r.items() if k != 'routes_agree'} for r in rows]
    give(opened, tmp_path, head, old, cfg)
    assert told.input_value() == 'entropy' and color not in told.inner_text()
    opened.fits()


def test_trace_viewer_shows_a_step_without_an_update(browser, tmp_path):
    head, rows, cfg = traced(random.Random(7))
    head['metrics']['loss'] = 0.0
    rows = [{k: v for k, v in r.items() if k != 'log_probs'} for r in rows]
    paths = written(tmp_path, head, rows, cfg)
    opened = Opened(browser, tmp_path, 'trace')
    choose(opened, *paths)
    opened.says('No update was made of this step. Mean reward')
    first = sum(len(r['response_ids']) for r in rows if r['group'] == 0)
    assert len(coloured(opened)) == first
    opened.fits()


def drop(page, selector, paths):
    "What a person does who drags files from a folder: the browser itself makes the events"
    box, client = page.locator(selector).bounding_box(), page.context.new_cdp_session(page)
    at = dict(x=box['x'] + box['width'] / 2, y=box['y'] + 10)
    data = dict(items=[], files=list(map(str, paths)), dragOperationsMask=1)
    for kind in ('dragEnter', 'dragOver', 'drop'):
        client.send('Input.dispatchDragEvent', dict(type=kind, data=data, **at))


def test_trace_viewer_takes_files_that_are_dropped(browser, tmp_path):
    head, rows, cfg = traced(random.Random(7))
    head['metrics']['loss'] = loss = recompute_loss(head, rows, cfg)
    paths = written(tmp_path, head, rows, cfg)
    opened = Opened(browser, tmp_path, 'trace')
    drop(opened.page, '.drop', paths[:1])
    opened.says('Add config.json')
    want = [str(i) for r in rows if r['group'] == 0 for i in r['response_ids']]
    assert opened.page.locator('.token').all_inner_texts() == want
    drop(opened.page, '.drop', paths[1:])
    opened.says(f'recomputed {loss:.9f}: equal within 1e-6.')
    assert opened.page.locator('.drop.over').count() == 0
    opened.fits()


# ---- scheduler lab


def simulated(lengths, predicted, slots):
    "(request, start, end), in the order of the requests"
    asked = [Request('p', (2,), k) for k in range(len(lengths))]
    spans = simulate(
        asked, lambda r, n: lengths[r.index], ['r'], slots, order=lambda r: -predicted[r.index]
    )
    return sorted((s.index, s.start, s.end) for s in spans)


def test_scheduler_lab_is_the_simulation(browser):
    g = random.Random(0)
    points = []
    for _ in range(1000):
        lengths = [g.uniform(0.1, 9) for _ in range(g.randint(1, 20))]
        guesses = [g.choice([1.0, x * g.uniform(0.5, 2)]) for x in lengths]
        points.append(dict(lengths=lengths, guesses=guesses, slots=g.randint(1, 6)))
    call = """(lab, p) => ['fifo', 'longest'].map(kind => lab
        .schedule(p.lengths, lab.queue(p.guesses, kind), p.slots)
        .sort((a, b) => a.request - b.request).map(s => [s.request, s.start, s.end]))"""
    for p, got in zip(points, in_page(browser.new_page(), 'schedule', points, call), strict=True):
        for ours, guesses in zip(got, ([0.0] * len(p['lengths']), p['guesses']), strict=True):
            close(ours, simulated(p['lengths'], guesses, p['slots']))


def test_scheduler_lab_follows_mouse_and_keyboard(browser, tmp_path):
    opened = Opened(browser, tmp_path, 'schedule', reduced_motion='reduce')
    opened.page.get_by_role('button', name='longest first').click()
    opened.named('slots').press('ArrowLeft')
    opened.named('spread').press('End')
    (lengths,) = in_page(opened.page, 'schedule', [2], '(lab, x) => lab.lengthsOf(x)')
    end = max(e for *_, e in simulated(lengths, lengths, 5))
    said = opened.text('.said')
    assert f'The last ends at second {end:.1f};' in said
    assert f'can end before second {max(sum(lengths) / 5, *lengths):.1f}.' in said
    other = max(e for *_, e in simulated(lengths, [0.0] * len(lengths), 5))
    assert f'As they come it would be second {other:.1f}.' in said
    assert opened.named('noise of the prediction').is_enabled()
    opened.page.get_by_role('button', name='as they come').click()
    assert f'Longest first it would be second {end:.1f}.' in opened.text('.said')
    again = opened.page.get_by_role('button', name='New noise')
    assert opened.named('noise of the prediction').is_disabled()  # a predicted order has noise
    assert again.is_disabled()
    tall = 'document.documentElement.scrollHeight'
    before = opened.page.evaluate(tall)
    opened.page.get_by_role('button', name='longest first').click()
    assert opened.page.evaluate(tall) == before  # nothing jumps
    opened.named('noise of the prediction').press('End')
    again.click()
    call = '(lab, draw) => lab.guesses(lab.lengthsOf(2), 3, draw)'
    (guesses,) = in_page(opened.page, 'schedule', [2], call)
    late = max(e for *_, e in simulated(lengths, guesses, 5))
    assert f'The last ends at second {late:.1f};' in opened.text('.said')
    opened.named('noise of the prediction').press('Home')
    opened.named('time').press('Home')
    assert opened.text('.said').startswith('Second 0.0: 0 of 40 have ended.')
    opened.page.get_by_role('button', name='Play').click()  # at its end where motion is unwanted
    assert f'Second {end:.1f}: 40 of 40' in opened.text('.said')
    opened.fits()


def test_scheduler_lab_shows_the_numbers_of_its_answers(browser):
    "Ends and idle time as the lesson says them, here by the simulation"
    points = [(1, 0, 1), (2, 0, 1), (1, 3, 2), (1, 3, 4)]  # spread, noise, draw
    call = """(lab, [spread, noise, draw]) => {
        const lengths = lab.lengthsOf(spread)
        return [lengths, lab.guesses(lengths, noise, draw)]
    }"""
    one, two, second, fourth = in_page(browser.new_page(), 'schedule', points, call)

    def ends(lengths, guesses):  # first in order of arrival, then by the guesses
        spans = [simulated(lengths, by, 6) for by in ([0.0] * 40, guesses)]
        last = [max(e for *_, e in of) for of in spans]
        idle = [1 - sum(lengths) / 6 / end for end in last]
        starts = [spans[1][i][1] for i in sorted(range(40), key=lambda i: -lengths[i])[:2]]
        return [round(x, 1) for x in last], [round(100 * x, 1) for x in idle], starts

    assert ends(*one)[:2] == ([96.4, 67.2], [30.8, 0.7])
    assert ends(*two)[0] == [126.8, 126.8] and round(max(two[0]), 1) == 126.8
    end, _, starts = ends(*second)
    assert end[1] == 69.3 and max(starts) < 3
    end, _, starts = ends(*fourth)
    assert end[1] == 82.4 and round(starts[0]) == 26
    assert round(starts[0] + max(fourth[0]), 1) == 82.4


# ---- countdown lab


def test_countdown_lab_writes_the_solutions_of_the_family(browser):
    g, size = random.Random(0), num_problems('countdown_search', 2)
    drawn = (problem('countdown_search', 2, g.randrange(size)) for _ in range(6000))
    found = [p for p in drawn if p]
    points = [[int(x) for x in re.findall(r'\d+', p.text)] for p in found]
    for point in points:
        point[:3] = g.sample(point[:3], 3)  # the lab takes the numbers in any order
    call = '(lab, [a, b, c, t]) => [lab.search([a, b, c], t), lab.ways([a, b, c]).map(w => w.expr)]'
    for p, (got, ways) in zip(found, in_page(browser.new_page(), 'countdown', points, call)):
        assert got['text'] == p.solution and p.guess[1:] in ways
        asked = Prompt('p', 'countdown_search', p.text, [], p.answer, p.verifier)
        right = sum(verify(asked, '#' + w).correct for w in ways)
        assert got['guesses'] == right and len(ways) == 27
    assert len(found) > 1000


def test_countdown_lab_follows_mouse_and_keyboard(browser, tmp_path):
    opened = Opened(browser, tmp_path, 'countdown', reduced_motion='reduce')
    assert opened.text('.thinking') == '24+20=44,17:61 27!#(24+20)-17'
    opened.named('target').press('ArrowRight')
    said = 'None of the 27 ways makes 28. The search wrote 18 of them, 118 characters,'
    assert said in opened.text('.said')
    opened.named('target').press('ArrowLeft')
    opened.page.get_by_role('button', name='Write it').click()
    assert 'Way 2 of 27 makes 27. The response has 30 tokens' in opened.text('.said')
    assert opened.page.locator('.way.read').count() == 1 == opened.page.locator('.way.hit').count()
    wide = opened.page.locator('.way').evaluate_all(
        'all => all.filter(r => +r.getAttribute("width") > 100).length'
    )
    assert wide == 3 and opened.page.get_by_text('pair above 99: left out').count() == 3
    assert 'number alone' not in opened.text('.said')
    for _ in range(3):
        opened.named('target').press('ArrowLeft')
    assert opened.text('.said').endswith(
        'would be right. (The number alone would do; no problem has such a target.)'
    )
    opened.fits()


def test_countdown_lab_shows_all_ways(browser, tmp_path):
    "The ways that the search does not write: those that reach the target have a border"
    opened = Opened(browser, tmp_path, 'countdown', reduced_motion='reduce')
    spare, right = (opened.page.locator(f'.way.{look}') for look in ('spare', 'right'))
    opened.page.get_by_role('button', name='Show all ways').press('Enter')
    assert (spare.count(), right.count()) == (25, 2)  # 20+(24-17) and 24+(20-17)
    assert opened.page.get_by_text('pair above 99').count() == 0
    assert 'Of 27 guesses 3 would be right' in opened.text('.said')
    for name, times in (('first number', 22), ('second number', 18), ('third number', 15)):
        for _ in range(times):
            opened.named(name).press('ArrowLeft')
    for _ in range(19):
        opened.named('target').press('ArrowLeft')
    # 2, 2, 2 to 8: the third way, and five more
    assert 'Of 27 guesses 6 would be right' in opened.text('.said')
    assert (spare.count(), right.count()) == (24, 5)
    edge = right.first.evaluate('e => getComputedStyle(e).stroke')
    assert edge == opened.page.locator('.way.hit').evaluate('e => getComputedStyle(e).fill')
    opened.fits()
    opened.page.get_by_role('button', name='Show all ways').click()
    assert spare.count() == 0 and opened.page.locator('.way').count() == 27


def test_countdown_lab_writes_letter_by_letter(browser, tmp_path):
    opened = Opened(browser, tmp_path, 'countdown')
    opened.named('target').press('ArrowLeft')
    whole = opened.text('.thinking')
    button = opened.page.get_by_role('button', name='Write it')
    at_once = """b => {
        b.click() // nothing else runs between this and the next line
        return ['.thinking', '.said'].map(s => document.querySelector(s).textContent)
    }"""
    result = opened.text('.said')
    assert result and button.evaluate(at_once) == ['', '']  # the result comes at the end
    opened.page.locator('.thinking').filter(has_text=whole).wait_for()
    opened.says(result)
    opened.fits()


# ---- judge lab


def judge_point(g):
    n = g.randint(2, 9)
    return dict(
        gaps=[g.choice([0.0, 0.5, g.uniform(-1.5, 1.5)]) for _ in range(n)],
        errors=[[g.gauss(0, 1), g.gauss(0, 1)] for _ in range(n)],
        habit=g.choice([0.0, g.uniform(0, 1.5)]),
        noise=g.choice([0.0, g.uniform(0, 1)]),
        tie=g.choice([0.5, g.uniform(0.05, 1)]),
        twice=g.random() < 0.5,
    )


def compared(p, habit):
    "Labels and rewards by the library's `compare`; a text is the number of its answer"

    def felt(q):
        first = q.first != 'reference'
        i = int(q.first if first else q.second)
        gap = p['gaps'][i] if first else -p['gaps'][i]
        return gap + habit + p['noise'] * p['errors'][i][0 if first else 1]

    def ask(questions):
        def label(x):
            return 'Tie' if abs(x) < p['tie'] else 'Better' if x > 0 else 'Worse'

        return [Reply(f'Verdict: {label(felt(q))}') for q in questions]

    asked = [Question('', str(i), 'reference') for i in range(len(p['gaps']))]
    done, replies = compare(ask, asked)
    if not p['twice']:  # the first order alone
        done = [Comparison(parse_label(r.text)) for r in replies[::2]]
    return [c.label for c in done], [to_verdict(c).reward for c in done]


def judged_by_the_library(p):
    labels, rewards = compared(p, p['habit'])
    unbiased, _ = compared(p, 0)
    truth, _ = compared(p | dict(noise=0, twice=False), 0)
    one = torch.zeros(len(labels), dtype=torch.long)
    return dict(
        labels=labels,
        unbiased=unbiased,
        truth=truth,
        placed=sum(a != b for a, b in zip(labels, unbiased)),
        right=sum(a == b for a, b in zip(labels, truth)),
        advantages=group_advantages(torch.tensor(rewards, dtype=torch.double), one).tolist(),
    )


def test_judge_lab_says_what_the_library_says(browser):
    g = random.Random(0)
    points = [judge_point(g) for _ in range(1000)]
    call = """(lab, p) => {
        const found = lab.judged(p)
        return { ...found, labels: found.said.map(s => s.label) }
    }"""
    met = set()
    for p, ours in zip(points, in_page(browser.new_page(), 'judge', points, call), strict=True):
        want = judged_by_the_library(p)
        close(ours['advantages'], want.pop('advantages'))
        assert {k: ours[k] for k in want} == want
        met.add((p['twice'], want['placed'] > 0, len(set(want['labels'])) > 1))
    assert len(met) == 8  # each way to ask, with and without changed labels, silent and not


def test_a_habit_makes_no_label_better_where_both_orders_are_asked_without_noise(browser):
    call = """(lab, [habit, twice]) => {
        const p = { gaps: lab.GAPS, errors: lab.errorsOf(1), tie: lab.TIE, noise: 0, habit, twice }
        const found = lab.judged(p)
        return found.said.map((s, i) => [s.label, found.truth[i]])
    }"""
    points = [[k / 20, twice] for k in range(31) for twice in (False, True)]
    for (habit, twice), labels in zip(points, in_page(browser.new_page(), 'judge', points, call)):
        turned = [a for a, b in labels if a != b]
        assert not (habit == 0 and turned)
        if twice:
            assert set(turned) <= {'Tie'}
        else:
            assert set(turned) <= {'Tie', 'Better'} and (habit < 0.4 or turned)


def test_judge_lab_follows_mouse_and_keyboard(browser, tmp_path):
    opened = Opened(browser, tmp_path, 'judge')
    page, twice = opened.page, False
    (world,) = in_page(
        page, 'judge', [0], '(lab) => ({ gaps: lab.GAPS, tie: lab.TIE, errors: lab.errorsOf(1) })'
    )

    def follow():
        "What stands under the lab is what Python finds for its sliders; the labels, with frames"
        p = world | dict(twice=twice)
        p['habit'] = float(opened.named('prefers the first place').input_value())
        p['noise'] = float(opened.named('noise').input_value())
        want, cells = judged_by_the_library(p), page.locator('.result')
        assert cells.all_inner_texts() == want['labels']
        assert page.locator('.result.placed').count() == want['placed']
        said = opened.text('.said')
        assert said.startswith(f'{16 if twice else 8} calls: ')
        assert f'{want["right"]} of 8 labels ' in said
        shown = page.locator('.eight').last.locator('span').all_inner_texts()
        numbers = [float(x.replace('−', '-')) for x in shown]
        assert numbers == pytest.approx(want['advantages'], abs=5.1e-3)
        return want['placed'], want['right'], len(set(want['labels']))

    assert follow() == (3, 5, 3)
    assert (
        'The preference changes 3 of 8 labels: 1 from Worse to Tie, 2 from Tie to Better.'
        in opened.text('.said')
    )
    page.get_by_role('button', name='in both orders').click()
    twice = True
    assert follow() == (2, 6, 2)
    assert page.locator('.result.Tie').count() == 7
    opened.named('prefers the first place').press('End')
    assert follow()[2] == 1 and 'the group is silent' in opened.text('.said')
    page.get_by_role('button', name='once').press('Enter')
    twice = False
    assert follow() == (7, 1, 1)
    assert '1 of 8 labels is that of a perfect judge.' in opened.text('.said')
    opened.named('prefers the first place').press('Home')
    for _ in range(8):
        opened.named('noise').press('ArrowRight')
    assert follow()[0] == 0
    page.get_by_role('button', name='New noise').press('Space')
    (world['errors'],) = in_page(page, 'judge', [2], '(lab, seed) => lab.errorsOf(seed)')
    follow()
    opened.fits()


def test_judge_lab_shows_the_numbers_of_its_answers(browser):
    "Right labels in five draws, and what a strong preference leaves"
    call = '(lab, draw) => ({ gaps: lab.GAPS, tie: lab.TIE, errors: lab.errorsOf(draw) })'
    draws = in_page(browser.new_page(), 'judge', [2, 3, 4, 5, 6], call)

    def found(world, habit, noise, twice):
        return judged_by_the_library(world | dict(habit=habit, noise=noise, twice=twice))

    right = [[found(w, 0, 0.4, twice)['right'] for w in draws] for twice in (False, True)]
    assert right == [[7, 6, 4, 7, 4], [7, 7, 7, 7, 6]]
    strong = found(draws[0], 1.2, 0, False)
    assert strong['labels'] == ['Tie'] + ['Better'] * 7
    assert round(strong['advantages'][0], 2) == -2.47
    assert set(found(draws[0], 1.5, 0, False)['labels']) == {'Better'}
    once, both = (found(draws[0], 0.4, 0, twice) for twice in (False, True))
    turned = [i for i, (a, b) in enumerate(zip(once['labels'], once['truth'])) if a != b]
    wrong = [i for i, (a, b) in enumerate(zip(both['labels'], both['truth'])) if a != b]
    assert turned == [1, 5, 6] and wrong == [1, 7]


# ---- sick-run clinic

CLINIC = json.loads((ROOT / 'nbs' / 'labs' / 'clinic.json').read_text())
SHOWN_BY = {  # the fault -> the curve in which it must be seen
    'broken verifier': 'failed_frac',
    'fooled verifier': 'reward_mean',
    'cut off': 'truncated_frac',
    'too hard': 'zero_variance_frac',
    'learning rate': 'approx_kl',
    'stale weights': 'rollout_train_gap',
    'wrong experts': 'routes_agree_frac',
    'off by one': 'approx_kl',
    'entropy': 'grad_norm',
    'herd': 'expert_busiest_frac',
    'leak': 'heldout',
}


def clinic_point(g):
    "A small ward: curves that differ clearly, a little, or not at all"
    curves = {k: ['', g.choice([1e-3, 0.1, 1.0])] for k in 'abcd'[: g.randint(1, 4)]}
    steps = g.randint(5, 9)

    def run(middle):
        return [middle + g.choice([0, 1e-4, 0.2]) * g.gauss(0, 1) for _ in range(steps)]

    healthy = {k: [run(0.5) for _ in range(g.randint(2, 4))] for k in curves}
    names = 'pqrst'[: g.randint(2, 5)]
    patients = {n: {k: run(g.choice([0.5, 0.5, 0.9, -3])) for k in curves} for n in names}
    data = dict(healthy=healthy, patients=patients)
    return dict(data=data, curves=curves, opened=g.sample([*curves], g.randint(0, len(curves))))


def examined(data, curves):
    "Patient -> curve -> (value, low, high, half widths away) of the first step, the last 5"
    out = {}
    for name, own in data['patients'].items():
        for key, (_, floor) in curves.items():
            for part in (slice(0, 1), slice(-5, None)):
                low, *_, high = sorted(fmean(r[part]) for r in data['healthy'][key])
                value = fmean(own[key][part])
                away = (value - (low + high) / 2) / max((high - low) / 2, floor)
                out.setdefault(name, {}).setdefault(key, []).append((value, low, high, away))
    return out


def sides(ends):
    return tuple(0 if abs(e[-1]) <= 3 else 1 if e[-1] > 0 else -1 for e in ends)


def still_open(found, name, opened):
    seen = [sides(found[name][k]) for k in opened]
    return [n for n in found if [sides(found[n][k]) for k in opened] == seen]


def smallest(found, name):
    "Number of curves that leave one diagnosis, and how clear the clearest such set is; or None"
    keys = list(found[name])

    def clear(some):
        return min((max(abs(e[-1]) for e in found[name][k]) for k in some), default=math.inf)

    for n in range(len(keys) + 1):
        sets = [s for s in combinations(keys, n) if still_open(found, name, s) == [name]]
        if sets:
            return n, max(map(clear, sets)), clear
    return None


def test_clinic_compares_as_python_does(browser):
    g = random.Random(0)
    points = [clinic_point(g) for _ in range(1000)]
    call = """(lab, p) => {
        const all = lab.examine(p.data, p.curves)
        const per = f => Object.fromEntries(Object.keys(all).map(n => [n, f(n)]))
        return { all, open: per(n => lab.compatible(all, n, p.opened)),
            least: per(n => lab.fewest(all, n)),
            tale: per(n => lab.tellTale(all[n])) }
    }"""
    sizes = set()
    for p, got in zip(points, in_page(browser.new_page(), 'clinic', points, call), strict=True):
        want = examined(p['data'], p['curves'])
        for name, curves in want.items():
            for key, ends in curves.items():
                ours = got['all'][name][key]
                close([[e[k] for k in ('value', 'low', 'high', 'away')] for e in ours], ends)
                assert tuple(e['sick'] for e in ours) == sides(ends)
            assert got['open'][name] == still_open(want, name, p['opened'])
            best, ours = smallest(want, name), got['least'][name]
            assert (best is None) == (ours is None)
            if best:
                assert still_open(want, name, ours) == [name]
                assert (len(ours), best[2](ours)) == pytest.approx(best[:2])
            furthest = max(abs(e[-1]) for ends in curves.values() for e in ends)
            assert abs(got['tale'][name]['away']) == pytest.approx(furthest)
            sizes.add(best and best[0])
    assert sizes >= {1, 2, None}


def test_every_patient_of_the_clinic_has_a_fault_of_its_own(browser):
    (own,) = in_page(browser.new_page(), 'clinic', [0], '(lab) => [lab.CURVES, lab.DIAGNOSES]')
    curves, diagnoses = own
    assert set(CLINIC['healthy']) == set(curves) and set(CLINIC['patients']) == set(diagnoses)
    assert set(diagnoses) == {'healthy', *SHOWN_BY}
    found = examined(CLINIC, curves)
    assert all(sides(ends) == (0, 0) for ends in found['healthy'].values())
    for name, key in SHOWN_BY.items():
        assert any(sides(found[name][key])), f'{name}: {key} looks healthy'
    assert all(still_open(found, name, curves) == [name] for name in found)
    last = {key: ends[1] for key, ends in found['fooled verifier'].items()}  # value, low, high
    assert last['reward_mean'][0] > last['reward_mean'][2]
    assert all(last[exam][0] < last[exam][1] for exam in ('heldout', 'fresh'))


def test_the_first_round_of_the_clinic_needs_no_experts(browser):
    (rounds,) = in_page(browser.new_page(), 'clinic', [0], '(lab) => [lab.ROUNDS]')[0]
    first, second = rounds['first'], rounds['second']
    assert sorted(first['patients'] + second['patients']) == sorted(CLINIC['patients'])
    assert first['diagnoses'] == first['patients'] and 'healthy' in first['patients']
    assert set(second['diagnoses']) == set(CLINIC['patients'])
    said = ' '.join([*first['diagnoses'], *first['curves']])
    assert 'expert' not in said and 'route' not in said


def test_who_may_be_met_in_a_round_is_told_apart_by_its_curves_alone(browser):
    "A patient or a curve of the other round does not count where the fewest curves are counted"
    call = '(lab, name) => [lab.ROUNDS[name], lab.ward(lab.ROUNDS[name])]'
    for rules, ward in in_page(browser.new_page(), 'clinic', ['first', 'second'], call):
        assert sorted(ward) == sorted(rules['diagnoses'])
        assert all(sorted(curves) == sorted(rules['curves']) for curves in ward.values())


def test_the_lessons_of_the_clinic_are_there(browser):
    call = """(lab) => Object.values(lab.DIAGNOSES).map(d =>
        [d[2], lab.address(d[2], '/a/loop.html'), lab.address(d[2], '/nbs/loop.ipynb')])"""
    for notebook, page, same in in_page(browser.new_page(), 'clinic', [0], call)[0]:
        file, _, anchor = notebook.partition('#')
        assert anchor in anchors(ROOT / 'nbs' / file), notebook
        assert page == build_docs.page_link(notebook, 'loop', '') and same == notebook


def test_clinic_follows_mouse_and_keyboard(browser, tmp_path):
    opened = Opened(browser, tmp_path, 'clinic', reduced_motion='reduce')
    page = opened.page
    (facts,) = in_page(
        page,
        'clinic',
        [0],
        """(lab) => {
            const per = ({ patients, ...round }) => Object.fromEntries(
                patients.map(n => [n, lab.fewest(lab.ward({ patients, ...round }), n, lab.GIVEN)]))
            return { curves: lab.CURVES, diagnoses: lab.DIAGNOSES, rounds: lab.ROUNDS,
                least: Object.values(lab.ROUNDS).map(per) }
        }""",
    )
    curves, diagnoses, rounds = facts['curves'], facts['diagnoses'], facts['rounds']
    found = examined(CLINIC, curves)

    def press(name):
        page.get_by_role('button', name=name, exact=True).click()

    def patient(round):
        "Who it is, by the numbers that the page shows of all curves"
        keys = round['curves']
        for key in keys:
            press(curves[key][0])
        said = page.locator('.opened svg').evaluate_all(
            "all => all.map(e => e.getAttribute('aria-label'))"
        )
        values = [
            float(re.search('[:;] ([^ ]+) in its first step', x)[1].replace('−', '-')) for x in said
        ]
        assert len(values) == len(keys)
        return next(
            n
            for n in round['patients']
            if all(v == pytest.approx(found[n][k][0][0], rel=6e-3) for k, v in zip(keys, values))
        )

    for round, least in zip(rounds.values(), facts['least'], strict=True):
        press(round['name'])
        shown = page.locator('[aria-label="diagnosis"] button:visible').all_inner_texts()
        assert sorted(shown) == sorted(diagnoses[n][0] for n in round['diagnoses'])
        order = []
        for i in range(len(round['patients'])):
            order.append(patient(round))
            press(diagnoses[order[-1]][0])
            if i + 1 < len(round['patients']):
                assert page.evaluate('document.activeElement.textContent') == 'Next patient'
                page.keyboard.press('Enter')
        assert sorted(order) == sorted(round['patients'])
        assert f'Cost: {(len(round["curves"]) - 2) * len(order)}.' in opened.text('.score')
        opened.fits()
        press('Start again')
        other = patient(round)
        wrong = next(n for n in round['diagnoses'] if n != other)
        press(diagnoses[wrong][0])
        assert opened.text('.said').startswith('No (cost 3). With')
        assert f'Cost: {len(round["curves"]) - 2 + 3}.' in opened.text('.score')
        press(diagnoses[other][0])
        assert ', '.join(curves[k][0] for k in least[other]) in opened.text('.said')
    press('Start again')
    assert 'Cost: 0. The least that was needed so far: 0.' in opened.text('.score')
    assert page.locator('.opened').count() == 2
    first = page.get_by_role('button', name='loss', exact=True)
    first.focus()
    page.keyboard.press('Space')
    page.keyboard.press('Enter')  # is open already
    assert 'Cost: 1.' in opened.text('.score') and page.locator('.opened').count() == 3
    assert opened.text('.said') == 'Opened: loss (value of the loss). What is wrong?'
    opened.fits()


def test_the_clinic_names_what_was_open(browser, tmp_path):
    "The first patient is told by the two curves; where another is plainer, the text says so"
    opened = Opened(browser, tmp_path, 'clinic', reduced_motion='reduce')
    press = opened.page.get_by_role('button', name='the verifier can be fooled', exact=True).click
    press()
    assert 'What gives it away: mean reward is' in opened.text('.said')
    assert 'The two curves from the start were enough' in opened.text('.said')
    for _ in range(6):
        opened.page.get_by_role('button', name='Next patient', exact=True).click()
        for name in opened.page.locator('[aria-label="diagnosis"] button:visible').all():
            if not opened.text('.said').startswith('Right.'):
                name.click()
                said = opened.text('.said')
                assert re.match(
                    r'Right\. |No \(cost 3\)\. (With “.*” the curve “.*” would be (far above|'
                    r'far below|near) the band in its (first step|last five steps)\.$|'
                    r'What you have opened does not rule it out, )',
                    said,
                ), said
        said = opened.text('.said')
        told = re.search(
            r'(On your curves|What gives it away): (mean reward|held-out exam) is', said
        )
        plainer = 'The surest sign was not open: ' in said or 'Even its furthest curve' in said
        assert told or plainer, said
    assert 'Read on: the lesson.' in opened.text('.said')
    assert opened.text('.said').endswith('That was the last patient of this round.')


def test_the_runs_of_the_clinic_can_be_made_again(tmp_path):
    out = tmp_path / 'clinic.json'
    tool = [sys.executable, ROOT / 'tools' / 'make_clinic.py', '--quick', '--out', out]
    subprocess.run(tool, check=True, cwd=ROOT, capture_output=True, timeout=600)
    made = json.loads(out.read_text())
    assert made['healthy'].keys() == CLINIC['healthy'].keys()
    assert made['patients'].keys() == CLINIC['patients'].keys()
    steps = {len(x) for own in made['patients'].values() for x in own.values()}
    assert steps == {2}
    assert (ROOT / 'nbs' / 'labs' / 'clinic.json').stat().st_size < 300_000


# ---- run lab

RUN = json.loads((ROOT / 'nbs' / 'labs' / 'run.json').read_text())
# `struck` ends the process within a step, `asked` asks it to stop; both after so many steps
STRUCK = """
import os, sys
from compassrl.runs.cli import main
from compassrl.runs.run import Run
kind, at, *words = sys.argv[1:]
on_step = Run.on_step
def struck(run, step, *rest):
    print('step', step, flush=True)
    if (kind, step) == ('kill', int(at) + 1):
        os._exit(9)
    run.stop.asked |= (kind, step) == ('stop', int(at))
    on_step(run, step, *rest)
Run.on_step = struck
sys.exit(main(words))
"""


def lived(*words):
    "The steps that a process of the library trains until it ends"
    run = subprocess.run(
        [sys.executable, '-c', STRUCK, *map(str, words)], capture_output=True, text=True
    )
    return [int(n) for n in re.findall(r'^step (\d+)$', run.stdout, flags=re.M)]


def test_the_run_lab_loses_and_repeats_the_steps_that_a_run_does(browser, tmp_path):
    small = ['--steps', '6', '--save-every', '2', '--eval-every', '0', '--cold-start.steps', '20']
    small += ['--prompts-per-step', '4', '--data.num-heldout', '4', '--run-dir', tmp_path / 'run']
    real = [lived('kill', 3, 'train', 'smoke-cpu', *small)[:-1]]  # it dies within the last one
    real += [lived('stop', 5, 'resume', tmp_path / 'run'), lived('', 0, 'resume', tmp_path / 'run')]
    assert [len(r) for r in real] == [3, 3, 1]
    call = """(lab, events) => {
        let state = lab.FRESH
        return events.map(e => state = lab.after(state, e, { steps: 6, save_every: 2 }))
    }"""
    parts = ['start', *['step'] * 3, 'kill'], ['resume', *['step'] * 3, 'stop'], ['resume', 'step']
    page = browser.new_page()
    states = in_page(page, 'run', [[e for part in parts for e in part]], call)[0]
    steps = [s['at'] for e, s in zip((e for part in parts for e in part), states) if e == 'step']
    assert steps == [n for part in real for n in part]
    assert states[-1] == dict(how='finished', at=6, saved=6, again=1)
    # what cannot happen changes nothing
    for events in (['step'], ['kill'], ['resume'], ['start', 'resume']):
        last = in_page(page, 'run', [events], call)[0][-1]
        assert last == dict(how='runs' if 'start' in events else 'ready', at=0, saved=0, again=0)


def test_the_recorded_run_is_that_of_the_preset_and_its_marks_are_its_verdicts():
    cfg = tiny_cpu()
    assert [RUN[k] for k in ('steps', 'save_every', 'seed')] == [
        cfg.steps,
        cfg.save_every,
        cfg.seed,
    ]
    assert [e['step'] for e in RUN['exams']] == list(range(0, cfg.steps + 1, 10))
    assert len(RUN['correct']) == len(RUN['seconds']) == len(RUN['prompt_tokens']) == cfg.steps
    # `45-12=` has 6 tokens, `450-123=` 8: what the lab says of steps 29 to 31
    assert min(RUN['prompt_tokens'][28:31]) > 7.7 and max(RUN['correct'][28:31]) < 0.25
    others = [c for c, n in zip(RUN['correct'], RUN['prompt_tokens']) if n < 7.4]
    assert min(others) > 0.25 and len(others) > 150
    for exam in RUN['exams']:
        for p, (says, right) in zip(RUN['prompts'], exam['says'], strict=True):
            a, sign, b = re.match(r'(\d+)(.)(\d+)=', p['prompt']).groups()
            assert int(p['answer']) == (int(a) + int(b) if sign == '+' else int(a) - int(b))
            number = re.search(r'#(-?\d+)$', says)
            assert len(right) == cfg.eval_k
            assert (number is not None and int(number[1]) == int(p['answer'])) == (right[0] == '1')
    assert (ROOT / 'nbs' / 'labs' / 'run.json').stat().st_size < 20_000


def test_the_run_can_be_recorded_again(tmp_path):
    out = tmp_path / 'run.json'
    tool = [sys.executable, ROOT / 'tools' / 'record_run.py', '--quick', '--out', out]
    subprocess.run(tool, check=True, cwd=ROOT, capture_output=True, timeout=600)
    made = json.loads(out.read_text())
    assert made.keys() == RUN.keys() and [e['step'] for e in made['exams']] == [0, 2, 4]
    assert made['exams'][0].keys() == RUN['exams'][0].keys()
    assert len(made['prompts']) == len(RUN['prompts']) == len(made['exams'][0]['says'])


def test_the_run_lab_follows_mouse_and_keyboard(browser, tmp_path):
    opened = Opened(browser, tmp_path, 'run')
    opened.page.clock.install()
    press = lambda name: opened.page.get_by_role('button', name=name, exact=True).click()  # noqa: E731
    upto = lambda n: opened.page.clock.run_for(1000 * sum(RUN['seconds'][:n]) + n)  # noqa: E731
    percent = lambda step: f'{round(100 * RUN["exams"][step // 10]["right"])} %'  # noqa: E731
    assert f'{percent(0)} of the held-out answers are right' in opened.text('.said')
    press('Start')
    upto(57)
    press('Kill (power cut)')  # time goes on meanwhile
    at = int(re.match(r'Killed at step (\d+)\.', opened.text('.said'))[1])
    assert 50 <= at < 80
    assert f'checkpoint is step 40: {at - 40} steps are lost' in opened.text('.said')
    look = opened.named('look at step')
    for _ in range(at - 9):
        look.press('ArrowLeft')
    assert f'the evaluation at step 0, {percent(0)} right' in opened.text('.said')
    assert opened.page.locator('td.right').count() == sum(
        s[1][0] == '1' for s in RUN['exams'][0]['says']
    )
    look.press('ArrowRight')
    assert f'the evaluation at step 10, {percent(10)} right' in opened.text('.said')
    press('Resume')
    assert opened.text('.said').startswith('Step 40 of 200.')
    opened.page.clock.run_for(1000)
    press('Stop (Ctrl-C)')
    stopped = int(re.match(r'Stopped: step (\d+) was', opened.text('.said'))[1])
    assert stopped > 40 and opened.page.get_by_role('button', name='Kill').is_disabled()
    press('Resume')
    opened.page.clock.run_for(60_000)
    assert f'Finished: {percent(200)} of the held-out answers' in opened.text('.said')
    assert f'{at - 40} steps were done twice' in opened.text('.said')
    marks = opened.page.locator('td.marks').all_inner_texts()
    assert marks == [s[1].replace('1', '●').replace('0', '○') for s in RUN['exams'][-1]['says']]
    press('Start over')
    assert opened.text('.said').startswith('A policy after its cold start')
    opened.page.evaluate("""() => {
        const all = [...document.querySelectorAll('button')]
        const keys = Object.fromEntries(all.map(b => [b.textContent, b]))
        keys['Start'].click()
        keys['Kill (power cut)'].click()
    }""")  # at a checkpoint, here the first
    assert 'is step 0: nothing is lost.' in opened.text('.said')
    opened.fits()
