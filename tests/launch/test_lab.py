"In JupyterLab, in a real browser: whole lessons, a lesson's lab, and the panel of a run"

import json
import os
import re
import secrets
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from compassrl.rollout.vllm.server import free_port
from tests.support import ROOT
from tests.support.browser import CHROMIUM, FLAGS, MISSING, STILL

if not CHROMIUM:
    pytest.skip(MISSING, allow_module_level=True)
playwright = pytest.importorskip(
    'playwright.sync_api', reason='playwright is not installed (pip install playwright)'
)
playwright.expect.set_options(timeout=90_000)  # milliseconds, the same as in the tests of the pages

SHOTS = os.environ.get('LAB_SCREENSHOTS')  # a folder, to look at what the test saw


def panel_notebook(folder):
    "The panel notebook cut down to its imports and the cell that shows the panel"
    nb = json.loads((ROOT / 'nbs' / 'launch' / 'panel.ipynb').read_text())

    def source(c):
        return ''.join(c['source'])

    def keep(c):
        return (
            c['cell_type'] == 'code'
            and not source(c).startswith('#|')
            and bool(re.match(r'from compassrl\.launch import|panel\(', source(c)))
        )

    kept = [dict(c, outputs=[], source=source(c)) for c in nb['cells'] if keep(c)]
    assert any(c['source'].startswith('panel(') for c in kept), 'the notebook shows no panel'
    nb['metadata'].pop('widgets', None)
    (folder / 'panel.ipynb').write_text(
        json.dumps(
            nb
            | dict(
                cells=[
                    dict(
                        cell_type='code',
                        metadata={},
                        outputs=[],
                        execution_count=None,
                        id='first',
                        source='from compassrl.launch.panel import panel',
                    )
                ]
                + kept
            )
        )
    )


@pytest.fixture(scope='module')
def lab(tmp_path_factory):
    "JupyterLab on this machine alone, with its own settings -> address of the notebook, its folder"
    folder, token = tmp_path_factory.mktemp('lab'), secrets.token_hex(16)
    root, home = folder / 'root', folder / 'home'
    root.mkdir()
    home.mkdir()
    panel_notebook(root)
    port = free_port()
    env = {
        **os.environ,
        'OMP_NUM_THREADS': '1',
        **{f'JUPYTER_{k}_DIR': str(home / k.lower()) for k in ('CONFIG', 'DATA', 'RUNTIME')},
        'JUPYTERLAB_SETTINGS_DIR': str(home / 'settings'),
        'JUPYTERLAB_WORKSPACES_DIR': str(home / 'workspaces'),
        'IPYTHONDIR': str(home / 'ipython'),
    }
    env.pop('TQDM_DISABLE', None)
    env.pop('MPLBACKEND', None)
    args = [
        '--no-browser',
        '--allow-root',
        '--ip=127.0.0.1',
        f'--port={port}',
        '--ServerApp.port_retries=0',
        f'--IdentityProvider.token={token}',
        f'--ServerApp.root_dir={root}',
        '--LabApp.news_url=None',
        '--LabApp.expose_app_in_browser=True',  # a test asks it which cells have run
        '--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate',
    ]
    with open(home / 'log', 'w') as log:
        server = subprocess.Popen(
            [sys.executable, '-m', 'jupyterlab', *args],
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f'http://127.0.0.1:{port}/api?token={token}', timeout=2)
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, (
                    home / 'log'
                ).read_text()[-2000:]
                time.sleep(0.2)
        yield f'http://127.0.0.1:{port}/lab/tree/panel.ipynb?token={token}&reset', root
    finally:
        server.terminate()
        server.wait(30)


# the notebook in front has a kernel, which waits for work
READY = """() => {
    const session = window.jupyterapp?.shell.currentWidget?.sessionContext
    return session?.isReady && session.session?.kernel?.connectionStatus === 'connected'
        && session.session.kernel.status === 'idle'
}"""


def run_all(browser, address):
    "The notebook in a browser, its cells run"
    page = browser.new_page()
    page.set_default_timeout(90_000)
    page.goto(address, wait_until='domcontentloaded')
    page.wait_for_selector('.jp-Notebook .jp-Cell')
    page.wait_for_function(READY, polling=100)
    page.click('.lm-MenuBar-itemLabel:text-is("Run")')
    page.click('.lm-Menu-itemLabel:text-is("Run All Cells")')
    return page


@pytest.fixture(scope='module')
def browser():
    "One context: its pages share what they have loaded and compiled; nothing moves by itself"
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        context = browser.new_context(viewport=dict(width=1280, height=1100))
        context.add_init_script(STILL)
        yield context
        browser.close()


@pytest.fixture
def page(lab, browser):
    page = run_all(browser, lab[0])
    page.wait_for_selector('.jp-OutputArea-output .widget-button')
    yield page
    page.close()


def shot(page, name):
    if SHOTS:
        page.wait_for_timeout(500)
        page.screenshot(path=Path(SHOTS) / f'{name}.png')


def field(page, name):
    return page.locator(f'.widget-inline-hbox:has(label:text-is("{name}")) input')


def button(page, name):
    return page.locator(f'.jp-OutputArea-output .widget-button:text-is("{name}")')


def said(page, pattern, timeout=90):
    "Wait until the status line matches"
    deadline = time.monotonic() + timeout
    while not re.search(
        pattern, text := page.locator('.jp-OutputArea-output .widget-html pre').first.inner_text()
    ):
        assert time.monotonic() < deadline, f'{pattern!r} was not said, but {text!r}'
        page.wait_for_timeout(100)
    return text


def test_panel(page, lab):
    assert field(page, 'steps').input_value() != '4'
    page.get_by_label('preset', exact=True).select_option('smoke-cpu')
    playwright.expect(field(page, 'steps')).to_have_value('4')
    playwright.expect(field(page, 'group_size')).to_have_value('4')  # this one is also filled
    shot(page, '1_form')
    field(page, 'group_size').fill('1')
    field(page, 'group_size').press('Tab')
    said(page, 'group_size=1: .* use at least 2')
    shot(page, '2_refused')
    field(page, 'group_size').fill('4')
    field(page, 'group_size').press('Tab')
    field(page, 'steps').fill('40')
    field(page, 'steps').press('Tab')
    said(page, 'ready')
    page.locator('summary:text-is("As a script")').click()
    assert 'python -m compassrl ' in page.locator('details pre').last.inner_text()
    page.locator('summary:text-is("As a script")').click()
    button(page, 'launch').click()
    said(page, r'step \d+ of 40')
    picture = page.locator('.jp-OutputArea-output img').first
    first = picture.get_attribute('src')
    shot(page, '3_live')
    button(page, 'stop').click()
    done = int(re.search(r'stopped: step (\d+) of 40', said(page, r'stopped: step \d+ of 40'))[1])
    assert done < 40
    playwright.expect(picture).not_to_have_attribute('src', first)  # the curves are live
    shot(page, '4_stopped')
    playwright.expect(button(page, 'launch')).to_be_enabled()
    button(page, 'resume').click()
    said(page, 'finished: step 40 of 40')
    page.wait_for_selector('.jp-OutputArea-output h2:has-text("Before and after")')
    page.locator(
        '.jp-OutputArea-output h2:has-text("Before and after")'
    ).scroll_into_view_if_needed()
    shot(page, '5_report')
    (run,) = [p for p in (lab[1] / 'runs').iterdir() if p.is_dir()]
    steps = [json.loads(line)['step'] for line in (run / 'metrics.jsonl').read_text().splitlines()]
    assert steps == list(range(1, 41)), 'stopped and resumed, each step once'


# ---- lessons


def lesson(root, name, last=None):
    "A copy without outputs, whole or up to the first cell that has `last`; the code that it runs"
    nb = json.loads((ROOT / 'nbs' / f'{name}.ipynb').read_text())
    codes = [c for c in nb['cells'] if c['cell_type'] == 'code']
    for c in codes:
        c.update(outputs=[], execution_count=None)
    if last:
        at = next(i for i, c in enumerate(nb['cells']) if last in ''.join(c['source']))
        nb['cells'] = nb['cells'][: at + 1]
    path = root / f'{Path(name).name}.ipynb'
    path.write_text(json.dumps(nb))
    return path.name


# The notebook in front: cells that have run, errors, kinds of output; null while it runs
RAN = """() => {
    const cells = jupyterapp.shell.currentWidget.content.widgets.map(w => w.model)
        .filter(m => m.type === 'code' && m.sharedModel.source.trim())
    const ended = cells.filter(m => m.executionCount !== null)  // an error is there before
    const outputs = ended.flatMap(m => m.outputs.toJSON())
    const errors = outputs.filter(o => o.output_type === 'error').map(o => o.evalue)
    const left = cells.length - ended.length
    const kinds = [...new Set(outputs.flatMap(o => Object.keys(o.data ?? {})))]
    return left && !errors.length ? null : { ran: ended.length, left, errors, kinds }
}"""
VIEW = 'application/vnd.jupyter.widget-view+json'


@pytest.fixture
def ran(lab, browser):
    "Runs a notebook of the folder to its end -> its page, and what has run; its kernel ends later"
    opened = []

    def run(name):
        page = run_all(browser, lab[0].replace('panel.ipynb', name))
        opened.append(page)
        return page, page.wait_for_function(RAN, polling=200).json_value()

    yield run
    for page in opened:
        page.evaluate('jupyterapp.serviceManager.sessions.shutdownAll()')
        page.close()


@pytest.mark.parametrize('name', ['data/tasks', 'algo/advantages', 'judges/gym'])
def test_a_lesson_runs(lab, ran, name):
    "Every cell, without an error; its figures and its Play are there"
    page, found = ran(lesson(lab[1], name))
    assert found['errors'] == [] and found['left'] == 0
    assert found['ran'] > 20 and {'image/png', VIEW} <= set(found['kinds'])
    shot(page, Path(name).name)


def test_an_error_of_a_lesson_is_seen(lab, ran):
    path = lab[1] / lesson(lab[1], 'judges/gym', last='default_exp')
    nb = json.loads(path.read_text())
    cell = dict(cell_type='code', metadata={}, outputs=[], execution_count=None)
    nb['cells'] += [cell | dict(id=f'own{i}', source=s) for i, s in enumerate(['1 / 0', '2'])]
    path.write_text(json.dumps(nb))
    _, found = ran(path.name)
    assert found['errors'] == ['division by zero'] and found['left'] == 1


def test_a_lab_of_a_lesson_is_alive(lab, ran):
    "The lesson's own cells up to its lab: anywidget shows the module that the site shows"
    page, found = ran(lesson(lab[1], 'algo/losses', last="lab('grpo'"))
    assert found['errors'] == [] and found['left'] == 0
    line = page.locator('.jp-OutputArea-output .said')
    playwright.expect(line).to_have_text('Step 0: expected reward 0.3125.')  # 20 of 64
    page.get_by_role('button', name='Step', exact=True).press('Enter')
    playwright.expect(line).to_contain_text('Step 1: ')
    assert '0.312500' not in line.inner_text() and 'loss 0.000000' in line.inner_text()
    shown = page.locator('.jp-OutputArea-output:has(.said)')
    assert shown.count() == 1 and shown.locator('img').count() == 0  # the widget, no picture
    shot(page, 'grpo')
