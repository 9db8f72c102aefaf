"""A picture of the panel as JupyterLab shows it, for the notebook and the site.

    python tools/record_panel.py [--out nbs/launch/panel.png]

A notebook with the cell `panel()` runs in a JupyterLab of its own, and a run of seconds is launched
in it. It needs Chromium, playwright and JupyterLab, which the extras `dev` and `notebook` have.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import nbformat
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.browser import chromium  # noqa: E402

CELL = "from compassrl.launch.panel import panel\npanel(preset='smoke-cpu')"


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def picture(address, out, patience_ms=180_000):
    "Runs the cell, presses launch, waits for the run to end"
    with chromium() as browser:
        page = browser.new_page(viewport=dict(width=1000, height=1500))
        page.goto(f'{address}/lab/tree/panel.ipynb', timeout=patience_ms)
        page.locator('.jp-Cell-inputWrapper').first.click(timeout=patience_ms)
        page.keyboard.press('Shift+Enter')
        launch = page.get_by_role('button', name='launch', exact=True)
        launch.click(timeout=patience_ms)
        page.get_by_text('finished').first.wait_for(timeout=patience_ms)
        page.wait_for_timeout(2000)
        page.locator('.jp-OutputArea-output .widget-box, .jp-OutputArea-output').first.screenshot(
            path=out
        )


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--out', type=Path, default=ROOT / 'nbs' / 'launch' / 'panel.png')
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cells = [nbformat.v4.new_code_cell(CELL)]
        nb = nbformat.v4.new_notebook(
            cells=cells, metadata=dict(kernelspec=dict(name='python3', display_name='python3'))
        )
        nbformat.write(nb, Path(folder) / 'panel.ipynb')
        port = free_port()
        quiet = ['--no-browser', '--allow-root', '--ServerApp.token=', f'--ServerApp.port={port}']
        command = [sys.executable, '-m', 'jupyterlab', *quiet, f'--ServerApp.root_dir={folder}']
        env = os.environ | dict(PYTHONPATH=str(ROOT))
        with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as server:
            try:
                address = f'http://127.0.0.1:{port}'
                for _ in range(120):
                    try:
                        urllib.request.urlopen(f'{address}/api').close()
                        break
                    except OSError:
                        time.sleep(1)
                picture(address, a.out)
            finally:
                server.terminate()
    whole = Image.open(a.out)  # form, buttons, curves, and the first tables of the report
    few = whole.crop((0, 0, whole.width, 1195)).convert(
        'P', palette=Image.Palette.ADAPTIVE, colors=64
    )
    few.save(a.out, optimize=True)
    print(f'{a.out}: {a.out.stat().st_size / 1000:.0f} kB')


if __name__ == '__main__':
    main()
