"The schematics: well-formed, self-contained, readable in both themes, and drawn from real numbers"

import json
import math
import re
import shutil
import sys
from dataclasses import replace
from xml.etree import ElementTree

import nbformat
import pytest
import torch

from compassrl.algo.advantages import group_advantages
from compassrl.algo.losses import LossConfig, PolicyLoss, clipped_surrogate
from compassrl.algo.losses.espo import EspoConfig
from compassrl.config import read_run_config
from compassrl.model.policy import PolicyConfig
from compassrl.model.pretrained import hf_shapes
from compassrl.plan.layout import layout
from compassrl.records import Request
from compassrl.rollout.fp8 import quantise
from compassrl.runs.presets import smoke_cpu
from compassrl.runs.run import resume_run, start_run
from compassrl.train.megatron.parallel import ParallelConfig
from course import algorithm, canvas, machines, rollout
from course.layouts import rank_groups
from course.simulator import rewards_done, simulate
from tests.support import ROOT

sys.path.insert(0, str(ROOT / 'tools'))
import alt  # noqa: E402
import build_docs  # noqa: E402
import toc  # noqa: E402

CHECK = (ROOT / 'tests' / 'support' / 'drawing.js').read_text()
STYLES = (ROOT / 'nbs' / 'styles.css').read_text()
COURSE = toc.Course(ROOT)
NAMES = dict(
    algorithm=(
        'loop_shapes',
        'shared_reward',
        'three_log_probs',
        'group',
        'clip_ranges',
        'token_groups',
        'router_tie',
    ),
    rollout=('kv_cache', 'batching', 'timelines', 'fp8_blocks'),
    machines=('ranks', 'weight_sync', 'run_folder'),
)
MODULES = dict(algorithm=algorithm, rollout=rollout, machines=machines)


def stored():
    "Every drawing of every notebook: (notebook, its source, SVG)"
    for name, path in COURSE.paths.items():
        for c in json.loads((ROOT / 'nbs' / path).read_text())['cells']:
            for o in c.get('outputs', []):
                svg = ''.join(o.get('data', {}).get('image/svg+xml', []))
                if 'class="drawing"' in svg:
                    yield name, toc.source(c), svg


STORED = list(stored())
# The widest and fullest drawings
FULL = {
    'group of eight': lambda: algorithm.group([0.25, 1, 0.5, 0, 1, 0, -1, 0.125]),
    'clip, DAPO': lambda: algorithm.clip_ranges([(1.26, 1), (0.7, -1)], (0.2, 0.28)),
    'six tokens': lambda: algorithm.token_groups([0.3, -0.2, 0, 0.1, 0, 0], [1, 2, 3, 4, 5, 6]),
    'six experts': lambda: algorithm.router_tie([1, 2, 3, 4, 5, 6.25], [1, 2, 3, 6.25, 5, 4], 3),
    'long cache': lambda: rollout.kv_cache([(12, 12)] * 8),
    'twelve requests': lambda: rollout.batching([9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1], 6),
    'twelve responses': lambda: rollout.timelines([9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1], 6, 1, 4),
    'six by six': lambda: rollout.fp8_blocks(torch.linspace(-9, 9, 36).view(6, 6), (2, 3)),
    'sixteen ranks': lambda: machines.ranks(ParallelConfig(tp=2, pp=2), 16, rank=15),
}
SVGS = {f'{name} {i}': svg for i, (name, _, svg) in enumerate(STORED)}
SVGS |= {name: draw().data for name, draw in FULL.items()}


def words(svg):
    return [e.text for e in ElementTree.fromstring(svg).iter() if e.tag.endswith('}text')]


def roles(svg, kind):
    "Which role each part of a kind has: box, ink, head, line"
    found = ElementTree.fromstring(svg).iter()
    own = [e.get('class', '').split() for e in found]
    return [c[1] for c in own if c[:1] == [kind]]


# ---- form


def test_each_drawing_stands_in_a_lesson_or_a_how_to():
    taught = [(n, s) for n, s, _ in STORED if COURSE.order[n].kind != 'reference']
    for module, names in NAMES.items():
        for name in names:
            assert callable(getattr(MODULES[module], name))
            assert any(f'.{name}(' in source for _, source in taught), f'no lesson shows {name}'
    lessons = {n for n, _ in taught if COURSE.order[n].kind == 'lesson'}
    assert len(lessons) == 16


@pytest.mark.parametrize('name', SVGS)
def test_it_is_an_image_with_a_text_alternative_and_fetches_nothing(name):
    root = ElementTree.fromstring(SVGS[name])
    assert root.get('role') == 'img' and 'max-width:100%' in root.get('style')
    title, says = (e.text for e in list(root)[:2])
    assert [e.tag.split('}')[1] for e in list(root)[:2]] == ['title', 'desc']
    assert len(title.split()) > 1 and len(says.split()) > 4
    rest = SVGS[name].replace('xmlns="http://www.w3.org/2000/svg"', '')
    assert not re.search(r'http|href|url\(|<style|<script|<image|\bid=', rest)


def test_the_alternative_text_and_the_page_are_those_of_the_drawing():
    path = ROOT / 'nbs' / 'questions.ipynb'
    cells = nbformat.read(path, 4).cells
    i = next(i for i, c in enumerate(cells) if c.source == 'drawings.group([1, 0, 0, 0])')
    assert alt.alt(cells, i).startswith('A group, its baseline and its advantages: Rewards [1, 0,')
    nb = build_docs.prepare(nbformat.read(path, 4), '', path.parent, {}, set())
    html = [o.get('data', {}).get('text/html', '') for c in nb.cells for o in c.get('outputs', [])]
    drawn = [o for c in cells for o in c.get('outputs', []) if 'image/svg+xml' in o.get('data', {})]
    assert sum('class="drawing"' in h for h in html) == len(drawn) > 1


@pytest.fixture(scope='module')
def page(browser):
    return browser.new_page()


def look(page, svg, theme='light', pixels=1200, styles=STYLES):
    page.set_viewport_size(dict(width=pixels, height=800))
    page.set_content(
        f'<!doctype html><html data-theme="{theme}"><style>{styles}</style>'
        f'<body style="margin:16px">{svg}'
    )
    return page.evaluate(f'() => ({CHECK})(document.querySelector(".drawing"))')


@pytest.mark.parametrize('theme', ['light', 'dark'])
@pytest.mark.parametrize('name', SVGS)
def test_words_stay_in_their_boxes_and_stand_out(page, name, theme):
    "On a phone and on a screen, and where style sheets are removed"
    for settings in (dict(pixels=360), dict(pixels=1200), dict(styles='')):
        seen = look(page, SVGS[name], theme, **settings)
        assert seen['texts'] == len(words(SVGS[name])) > 2
        assert seen['faults'] == [], settings


WORD, BOX = canvas.text(380, 20, 'too far to the right'), canvas.box(10, 10, 20, 20, 'far too wide')
BAD = {
    'leaves the paper: too': WORD,
    'leaves its box: far': BOX,
    'overlaps: b': canvas.text(10, 20, 'a word') + canvas.text(12, 22, 'b'),
    'pixels high: small': '<g font-size="8">' + canvas.text(10, 20, 'small') + '</g>',
    'contrast 1.00: white': canvas.text(10, 20, 'white').replace('#292524', '#ffffff'),
    'faint: <path': canvas.line((10, 10), (50, 10)).replace('#78716c', '#eeeeee'),
}


@pytest.mark.parametrize('fault', BAD)
def test_a_planted_fault_is_seen(page, fault):
    svg = canvas.drawing('A planted fault', 'nothing of use at all', 60, BAD[fault]).data
    assert any(f.find(fault) >= 0 for f in look(page, svg)['faults']), fault


def test_the_site_has_a_dark_colour_for_every_class():
    dark = re.findall(r'^html\[data-theme="dark"\] \.drawing (.*) \{', STYLES, flags=re.M)
    kinds = {k for svg in SVGS.values() for k in re.findall(r'class="([a-z ]+)"', svg)} - {
        'drawing'
    }
    for kind in kinds:
        *part, role = kind.split()
        assert any(s.endswith(f'.{role}') and (not part or part[0] in s) for s in dark), kind


# ---- the numbers are the library's


@pytest.mark.parametrize('estimator', ['grpo', 'dr_grpo', 'rloo'])
def test_a_group(estimator):
    rewards = [1, 0.5, 0, 0]
    group = torch.zeros(4, dtype=torch.long)
    want = group_advantages(torch.tensor(rewards), group, estimator=estimator).tolist()
    svg = algorithm.group(rewards, estimator).data
    assert [w for w in words(svg) if w[0] in '+-'] == [f'{a:+.2f}' for a in want]
    assert roles(svg, 'box') == ['good' if a > 0 else 'hot' for a in want]
    assert roles(algorithm.group([1, 1]).data, 'head') == []


def test_clip_ranges():
    tokens = [(1.5, 1), (1.1, 1), (0.5, -1), (1.3, -1)]
    ratio, A = torch.tensor(tokens).T[:, None]
    for eps in ((0.2, 0.2), (0.1, 0.6)):
        _, low, high = clipped_surrogate(ratio, A, A != 0, *eps)
        want = ['hot' if c else 'good' for c in (low | high)[0].tolist()]
        svg = algorithm.clip_ranges(tokens, eps).data
        assert roles(svg, 'head') == want
        assert {f'{1 - eps[0]:g}', f'{1 + eps[1]:g}'} <= set(words(svg))
        heights = {f'{1 + eps[1]:g}', '1', '0.5', f'{eps[0] - 1:g}', '-1', '-1.5'}
        assert heights <= set(words(svg))


@pytest.mark.parametrize('A', [1.0, -1.0])
@pytest.mark.parametrize('name', ['grpo', 'gspo', 'espo'])
def test_token_groups_clip_whom_the_loss_clips(name, A):
    "A token of the drawing is orange where the loss has no gradient"
    delta, H = [0.3, -0.25, 0, 0.1, -0.1], [0.1, 2, 0.05, 1.5, 0.2]
    cfg = EspoConfig(top_frac=0.4)
    svg = algorithm.token_groups(delta, H, A, 100, cfg).data
    new = torch.tensor([delta], requires_grad=True)
    mask = torch.ones(1, 5, dtype=torch.bool)
    batch = replace(
        algorithm._small_batch(),
        response_mask=mask,
        rollout_log_probs=torch.zeros(1, 5),
        old_log_probs=torch.zeros(1, 5),
        advantages=torch.full((1, 5), A),
        entropy=torch.tensor([H]),
    )
    own = (cfg.for_batch(batch, 100),) if name == 'espo' else ()
    loss, _ = PolicyLoss(LossConfig(name, tis='off'), *own)(new, batch, 5, 1)
    (grad,) = torch.autograd.grad(loss, new)
    drawn = roles(svg, 'box')[5:]  # after the bars of the entropy
    at = dict(grpo=0, gspo=5, espo=10)[name]
    drawn = drawn[at : at + 5]
    if name == 'espo':  # the uncertain group first
        grad = grad[:, [1, 3, 0, 2, 4]]
    assert drawn == ['hot' if g == 0 else 'good' for g in grad[0].tolist()]
    eps = [x / math.log(100) * 0.02 for x in (1.75, 0.35 / 3)]  # equation 8, by hand
    bounds = dict(
        grpo=[1 + 0.2 * A], gspo=[1.0004 if A > 0 else 0.9997], espo=[1 + A * x for x in eps]
    )
    said = f'limit{"s" * (name == "espo")} ' + ', '.join(f'{x:.5g}' for x in bounds[name])
    assert (
        said in words(svg)
        and f'{name.upper()} ({said}) clips' in ElementTree.fromstring(svg)[1].text
    )


def test_many_limits_are_a_range():
    cfg = EspoConfig(groups='bins', num_bins=5)
    svg = algorithm.token_groups(cfg=cfg).data
    first, last = (1 + max(0.02 * h / math.log(100), cfg.eps_min) for h in (2, 0.05))
    assert f'limits {first:.5g} to {last:.5g}' in words(svg)


def test_a_router_with_replay_has_the_experts_of_the_rollout_and_its_own_gates():
    shown = [1.2, 2, 1.21, -1], [1.21, 2, 1.2, -1]
    svg = algorithm.router_tie(*shown).data
    plain, good, hot = 'plain', 'good', 'hot'
    rows = [plain, good, good, plain], [hot, good, plain, plain], [plain, good, good, plain]
    assert roles(svg, 'box') == [r for row in rows for r in row]
    gates = torch.tensor([2.0, 1.2]).softmax(0)
    said = ElementTree.fromstring(svg)[1].text
    assert said.endswith(f'expert 1 {gates[0]:.1%}, expert 2 {gates[1]:.1%}.')


def test_the_loop_has_the_shapes_of_its_batch():
    batch = algorithm._small_batch()
    said = words(algorithm.loop_shapes(batch).data)
    B, T = batch.token_ids.shape
    assert f'tokens [{B}, {T}]' in said and f'rewards [{B}],' in said
    assert f'{B} requests of' in said and f'{len(batch.group.unique())} prompts' in said
    stations = 'ask', 'sample', 'judge', 'compare', 'recompute', 'update', 'hand over'
    assert {f'{i} {name}' for i, name in enumerate(stations, 1)} <= set(said)


def test_the_cache_computes_one_entry_a_row():
    lengths = [(3, 2), (1, 6)]
    svg = rollout.kv_cache(lengths).data
    assert roles(svg, 'box').count('good') == len(lengths) + 1  # and one next to its name
    assert len(roles(svg, 'box')) == 12 + 3
    assert 'without a cache it computes 12' in words(svg)
    assert 'a step computes 2 entries; the cache has 10' in words(svg)


LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.mark.parametrize('slots', [1, 3])
def test_bars_are_the_spans_of_the_queue_and_lanes_do_not_overlap(slots):
    bars = rollout.queue_bars(LENGTHS, slots)
    requests = [Request(str(i), (i,)) for i in range(8)]
    spans = simulate(requests, lambda r, _: LENGTHS[int(r.prompt_id)], ['a'], slots)
    assert sorted((s.start, s.end, s.index) for s in spans) == sorted(tuple(b[1:]) for b in bars)
    assert {b.lane for b in bars} == set(range(slots))
    for a in bars:
        assert all(a is b or a.lane != b.lane or a.end <= b.start or b.end <= a.start for b in bars)


def test_batches_wait_for_their_longest():
    said = words(rollout.batching(LENGTHS, 3).data)
    assert said[0].startswith(f'in batches: {4 + 9 + 6} steps')
    end = max(b.end for b in rollout.queue_bars(LENGTHS, 3))
    assert f'continuous: {end:g} steps, {1 - sum(LENGTHS) / 3 / end:.0%} idle' in said


@pytest.mark.parametrize('judges', [1, 3])
@pytest.mark.parametrize('plan', ['serial', 'overlap', 'longest first'])
def test_verdicts_end_when_the_simulator_says(plan, judges):
    requests = [Request(str(i), (i,)) for i in range(8)]

    def seconds(r, _=None):
        return LENGTHS[int(r.prompt_id)]

    order = (lambda r: -seconds(r)) if plan == 'longest first' else (lambda r: 0)
    spans = simulate(requests, seconds, ['a'], 2, order=order)
    want = rewards_done(spans, lambda i: 2, judges, overlap=plan != 'serial')
    both = rollout.plan_bars(plan, LENGTHS, 2, 2, judges)
    assert max(b.end for bars in both for b in bars) == want
    drawn = words(rollout.timelines(LENGTHS, 2, 2, judges, [plan]).data)
    assert drawn[0] == f'{plan}: {want:g} seconds'


def test_blocks_have_the_scales_and_the_codes_of_the_rollout():
    w = torch.tensor([[0.3, 1.0, 100.0, 0.01], [0.2, -0.4, 7.0, 9000.0]])
    said = words(rollout.fp8_blocks(w, (2, 2)).data)
    codes, scales = quantise(w, (2, 2))
    assert 'scales: ' + ', '.join(f'{s:.2g}' for s in scales.flatten().tolist()) in said
    kept = codes.float() * scales.repeat_interleave(2, 1)
    bad = int(((kept - w).abs() > w.abs() / 16).sum())
    assert f'a scale per block: {bad} of 8 are far off' in said
    assert roles(rollout.fp8_blocks(w, (2, 2)).data, 'box')[-8:].count('hot') == bad


def test_ranks_hold_what_the_layout_says():
    parallel = ParallelConfig(tp=2, pp=2, ep=2, etp=1)
    found = layout(parallel, PolicyConfig(), 8)
    svg = machines.ranks(parallel, 8, rank=5).data
    drawn = [w for w in words(svg) if w.startswith('rank ')]
    by_stage = sorted(found.places, key=lambda p: (p.pp, p.dp, p.tp))
    assert drawn == [f'rank {p.rank}: heads {p.heads[0]}-{p.heads[-1]}' for p in by_stage]
    marked = [w for w, r in zip(words(svg), roles(svg, 'ink'), strict=True) if r == 'good']
    same = next(g for g in rank_groups(found, 'dp') if 5 in g)
    assert [int(w.split(':')[0][5:]) for w in marked if w.startswith('rank ')] == same


def test_new_weights_are_those_of_the_checkpoint():
    shapes = hf_shapes(PolicyConfig())
    said = words(machines.weight_sync(num_shown=3).data)
    for name, shape in list(shapes.items())[:3]:
        assert said[said.index(name) + 1] == str(list(shape))
    numbers = sum(torch.Size(s).numel() for s in shapes.values())
    assert f'{len(shapes)} tensors, {numbers:,} numbers' in said


# ---- the run folder


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    "The folder of a real run"
    folder = tmp_path_factory.mktemp('run') / 'first'
    return start_run(replace(smoke_cpu(), steps=2, eval_every=0, run_dir=str(folder)))


def copy_of(folder, to, without):
    shutil.copytree(folder, to)
    for p in list(to.iterdir()):
        if p.name in without:
            shutil.rmtree(p) if p.is_dir() else p.unlink()
    return to


NEEDED = {name for name, (_, needed) in machines.run_files.items() if needed}


def test_every_file_of_a_run_is_known(finished):
    found = {p.name for p in finished.iterdir() if not p.name.startswith('.')}
    assert found <= machines.run_files.keys() and found >= NEEDED
    svg = machines.run_folder(finished).data
    assert len(roles(svg, 'box')) == len(found) and 'hot' not in roles(svg, 'box')


def test_teal_is_what_a_run_needs_to_go_on(finished, tmp_path):
    "It goes on with that alone; without any of it, it says so"
    cfg = replace(read_run_config(finished), steps=3)
    others = {p.name for p in finished.iterdir()} - NEEDED
    alone = copy_of(finished, tmp_path / 'alone', others)
    resume_run(alone, cfg)
    assert (alone / 'report.md').exists()
    for name in NEEDED:
        folder = copy_of(finished, tmp_path / name, {name})
        with pytest.raises(ValueError, match=re.escape(str(folder))):
            resume_run(folder, cfg if name != 'config.json' else None)


def test_a_stranger_in_the_folder_is_marked(tmp_path):
    (tmp_path / 'notes.txt').touch()
    assert roles(machines.run_folder(tmp_path).data, 'box') == ['hot']
