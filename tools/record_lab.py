"""A moving picture of a lab, for pages on which no script runs: README shows it.

    python tools/record_lab.py [--out readme_files/grpo-lab.gif]

The lab runs in a page of its own, as on the site; *Step* is pressed 40 times, and each step is a
frame. It needs Chromium, and playwright and Pillow, which the extra `dev` has.
"""

import argparse
import base64
import io
import re
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from course.lesson import lab_source  # noqa: E402
from tests.support.browser import chromium  # noqa: E402

PAGE = """<body style="margin:0;width:{width}px;background:#fff;font-family:system-ui,sans-serif">
<div class="lab" data-lab="{name}"></div><script type="module">
const code = {source!r}
const lab = await import(URL.createObjectURL(new Blob([code], {{ type: 'text/javascript' }})))
lab.default.render({{ el: document.querySelector('.lab') }})
document.body.dataset.ready = 'yes'
</script></body>"""
WIDTH, STEPS, SHOWN_MS, LAST_MS = 720, 40, 110, 2500


def fonts():
    "The style sheet of the site's fonts with the fonts in it"
    folder = ROOT / 'docs' / '_static'

    def inside(found):
        data = base64.b64encode((folder / found[1]).read_bytes()).decode()
        return f'url(data:font/ttf;base64,{data})'

    return re.sub(r'url\((.+?)\)', inside, (folder / 'fonts.css').read_text())


def frames(page):
    "One picture of the lab after each step"
    box = page.locator('.lab')
    step = page.get_by_role('button', name='Step', exact=True)
    yield box.screenshot()
    for _ in range(STEPS):
        step.click()
        yield box.screenshot()


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--out', type=Path, default=ROOT / 'readme_files' / 'grpo-lab.gif')
    a = p.parse_args()
    with chromium() as browser:
        page = browser.new_page(viewport=dict(width=WIDTH, height=700))
        page.set_content(PAGE.format(name='grpo', width=WIDTH, source=lab_source('grpo')))
        page.add_style_tag(content=fonts())
        page.wait_for_selector('[data-ready]', state='attached')
        page.evaluate('document.fonts.ready')
        pictures = [Image.open(io.BytesIO(x)).convert('RGB') for x in frames(page)]
    size = max(x.width for x in pictures), max(x.height for x in pictures)
    whole = [Image.new('RGB', size, 'white') for _ in pictures]
    for canvas, x in zip(whole, pictures):
        canvas.paste(x)
    palette = whole[-1].quantize(64)
    colours = [x.quantize(palette=palette, dither=Image.Dither.NONE) for x in whole]
    shown = [SHOWN_MS] * STEPS + [LAST_MS]
    a.out.parent.mkdir(exist_ok=True)
    colours[0].save(a.out, save_all=True, append_images=colours[1:], duration=shown, loop=0)
    print(f'{a.out}: {len(whole)} frames, {a.out.stat().st_size / 1000:.0f} kB')


if __name__ == '__main__':
    main()
