"A Chromium that is installed, driven by playwright"

import shutil
from contextlib import contextmanager

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None
)
MISSING = 'no Chromium is installed (Debian: apt-get install chromium)'
FLAGS = [
    '--no-sandbox',
    '--disable-gpu',
    '--no-first-run',
    '--disable-background-networking',
    '--disable-component-update',
    '--disable-sync',
]
FEW = ['--in-process-gpu', '--disable-threaded-compositing']  # for pages that nothing moves
STILL = """{
    const still = new CSSStyleSheet()
    still.replaceSync('* { animation: none !important; transition: none !important }')
    document.adoptedStyleSheets = [still]
}"""


@contextmanager
def chromium():
    "Without a window; a test is skipped where none is installed"
    if not CHROMIUM:
        pytest.skip(MISSING)
    api = pytest.importorskip('playwright.sync_api', reason='make .venv/.dev')
    with api.sync_playwright() as p:
        yield p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
