"What the JavaScript of a lab computes, in Chromium; and the loss of a run by page and by library"

import json

import pytest

from compassrl.config import read_run_config
from course.lesson import lab_source
from course.pages import recompute_loss
from course.trace import read_trace
from tests.support.browser import chromium

MODULE = """async ({{ source, points }}) => {{
    const lab = await import(URL.createObjectURL(new Blob([source], {{ type: 'text/javascript' }})))
    return points.map(point => ({call})(lab, point))
}}"""
LOSSES = """(lab, [trace, config]) => lab.readTrace(trace).filter(s => s.rows[0].log_probs)
    .map(s => [s.head.step, lab.recomputeLoss(s, lab.settingsOf(JSON.parse(config)))])"""


def in_page(page, name, points, call):
    "What a lab's mathematics gives for each point; `call` is JavaScript, (lab, point) => number"
    return page.evaluate(MODULE.format(call=call), dict(source=lab_source(name), points=points))


def by_page(folder):
    "Of each traced step with an update its loss, as the page computes it"
    files = [(folder / name).read_text() for name in ('trace.jsonl', 'config.json')]
    with chromium() as browser:
        return dict(in_page(browser.new_page(), 'trace', [files], LOSSES)[0])


def by_library(folder):
    steps, cfg = read_trace(folder / 'trace.jsonl'), read_run_config(folder)
    return {h['step']: recompute_loss(h, rows, cfg) for h, rows in steps if 'log_probs' in rows[0]}


def expect_the_logged_losses(folder):  # -> of how many steps
    "From the trace alone, by library and by page; some are far from 0"
    rows = map(json.loads, (folder / 'metrics.jsonl').read_text().splitlines())
    logged, found = {m['step']: m['loss'] for m in rows}, by_library(folder)
    want = {step: pytest.approx(logged[step], rel=1e-6, abs=1e-6) for step in found}
    assert found == want and max(abs(logged[step]) for step in found) > 1e-4
    assert by_page(folder) == want  # last: it is skipped without a Chromium
    return len(found)
