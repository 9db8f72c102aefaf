"The built site: links, pictures, the API; in a browser its looks, its requests, its errors"

import ast
import functools
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from html import unescape
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest
import yaml
from filelock import FileLock

from tests.support import ROOT
from tests.support.browser import CHROMIUM, FEW, FLAGS, STILL
from tests.test_notebooks import notebooks

sys.path.insert(0, str(ROOT / 'tools'))
import alt  # noqa: E402
import build_docs  # noqa: E402

PACKAGE = ROOT / 'compassrl'


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    "Built once, whichever worker needs it first"
    pytest.importorskip('sphinx', reason='make .venv/.docs')
    shared = tmp_path_factory.getbasetemp().resolve()
    if 'PYTEST_XDIST_WORKER' in os.environ:
        shared = shared.parent
    out, built = shared / 'site', shared / 'site.built'
    with FileLock(shared / 'site.lock'):
        if not built.exists():
            command = [sys.executable, 'tools/build_docs.py', '--out', str(out)]
            r = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert r.returncode == 0, r.stderr[-3000:]  # a warning is an error
            built.touch()
    return out


WORD = re.compile(r'<span class="\w{1,2}">([^<]*)</span>')  # Words of code: most of what a page has


class Page(HTMLParser):
    "The addresses, the targets, the pictures and the head of a page, and what it has in common"

    def __init__(self, path):
        super().__init__()
        self.links, self.targets, self.images, self.head = [], {''}, [], {}
        self.main, self.script, self.common = False, False, set()
        self.own = False  # a script in `main`, which works on this page's data
        self.feed(WORD.sub(r'\1', path.read_text()))

    def frame(self):
        "Alike for pages with the same scripts and styles, and the same elements around `main`"
        return frozenset(self.common)

    def handle_endtag(self, tag):
        self.main, self.script = self.main and tag != 'main', False

    def handle_data(self, data):
        if self.script:
            self.common.add(re.sub(r"(?<=pagename = ')[^']*", '', data))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.main |= tag == 'main'
        self.own |= self.main and tag == 'script'
        self.script = tag in ('script', 'style')
        if self.script or not self.main:
            style = attrs.get('rel') == 'stylesheet' and attrs['href']
            file = attrs.get('src') if tag == 'script' else style
            self.common.add((tag, attrs.get('class'), re.sub(r'^(\.\./)+', '', file or '')))
        self.targets |= {attrs[k] for k in ('id', 'name') if attrs.get(k)}
        self.links += [attrs[k] for k in ('href', 'src') if attrs.get(k)]
        if tag == 'img':
            self.images.append(attrs)
        if tag in ('meta', 'link'):
            keys = [attrs.get(k) for k in ('property', 'name', 'rel') if attrs.get(k)]
            self.head |= dict.fromkeys(keys, attrs.get('content') or attrs.get('href'))


@pytest.fixture(scope='module')
def pages(site):
    found = [p for p in site.rglob('*.html') if '_static' not in p.parts]
    return {p: Page(p) for p in found}


def broken(pages):
    @functools.cache  # the list of pages stands on every page
    def place(folder, file):
        to = (folder / file).resolve()
        return to, to.exists()

    for path, page in pages.items():
        for link in page.links:
            if re.match(r'\w+:|//', link):
                continue
            file, _, anchor = unquote(link).partition('#')
            to, there = place(path.parent, file.partition('?')[0]) if file else (path, True)
            if not there:
                yield f'{path.name}: {link}: no such page'
            elif to in pages and anchor not in pages[to].targets:
                yield f'{path.name}: {link}: no such anchor'


def test_links_of_the_site_lead_somewhere(pages):
    assert len(pages) > 150 and sum(len(p.links) for p in pages.values()) > 10_000
    assert sorted(set(broken(pages))) == []


def test_the_site_has_every_notebook_under_its_folder_and_name(site):
    names = (p.relative_to(ROOT / 'nbs') for p in notebooks())
    pages = [p.with_suffix('.html') for p in names if p.stem != 'readme']
    assert [str(p) for p in pages if not (site / p).exists()] == []


def test_a_page_is_marked_in_the_list_of_pages(site):
    here = r'<li class="current"><a href="#" class="current">([^<]+)'
    for name, title in (
        ('algo/losses/espo', 'ESPO'),
        ('rollout/vllm/pool', 'A pool of vLLM servers'),
    ):
        found = re.findall(here, (site / f'{name}.html').read_text())
        assert len(found) == 1 and found[0].endswith(title), (name, found)


def test_every_page_has_its_icon_and_its_card(site, pages):
    for path, page in pages.items():
        assert page.head['icon'].endswith('_static/favicon.svg'), path
        if path.name in ('genindex.html', 'search.html'):
            continue
        assert page.head['og:title'] and page.head['og:image'].endswith('_static/card.png'), path
    assert (site / '_static' / 'card.png').stat().st_size > 10_000
    assert 'learn from rewards' in pages[site / 'index.html'].head['description']


def test_a_table_that_a_cell_has_made_is_a_table(pages):
    "In CommonMark alone it would be a paragraph of bars"
    assert not [path for path in pages if re.search(r'<p>\| [^<]*\|', path.read_text())]


CODE = re.compile(
    r'<div class="highlight-i?python3? .*?</pre>|<script.*?</script>|<svg.*?</svg>', re.S
)
RAW = re.compile(r'(?<![\w.])-?(?!\d{4}\.\d{5}\b)\d+\.\d+')  # not the number of a preprint


def raw_floats(html):
    "Numbers of more than eight digits that matter, in what a page says or shows"
    text = re.sub(r'<[^>]*>', ' ', CODE.sub('', html.partition('<main')[2]))
    return [x for x in RAW.findall(text) if len(x.replace('.', '').lstrip('-0')) > 8]


def test_no_page_shows_a_raw_float(pages):
    found = {p.name: raw_floats(p.read_text()) for p in pages}
    assert {name: x for name, x in found.items() if x} == {}, 'round it: course.lesson.brief'


def test_a_raw_float_would_be_seen():
    page = '<main><div class="highlight-ipython3 notranslate"><pre>0.123456789</pre></div>{}'
    assert raw_floats(page.format('0.30000000000000004')) == ['0.30000000000000004']
    assert raw_floats(page.format('0.00314159, v1.2.345678901, arXiv 2512.07710')) == []


# ---- the API


def public(path):
    "What a module's `__all__` lists, and of it what has a signature"
    tree = ast.parse(path.read_text())
    lists = [n for n in tree.body if isinstance(n, ast.Assign)]
    named = next((n for n in lists if ast.unparse(n.targets[0]) == '__all__'), None)
    names = set(ast.literal_eval(named.value)) if named else set()
    return names, {n.name for n in tree.body if getattr(n, 'name', None) in names}


MODULES = {
    '.'.join(['compassrl', *p.relative_to(PACKAGE).with_suffix('').parts]): p
    for p in PACKAGE.rglob('[!_]*.py')
}


def test_the_api_has_every_public_name_and_leads_to_its_notebook(site, pages):
    for module, path in MODULES.items():
        page = pages[site / 'api' / f'{module}.html']
        names, _ = public(path)
        assert sorted(n for n in names if f'{module}.{n}' not in page.targets) == [], module
        if list(ROOT.glob(f'nbs/{"/".join(module.split(".")[1:-1])}/{path.stem}.ipynb')):
            back = f'../{"/".join(module.split(".")[1:])}.html'
            assert back in page.links, module


def test_the_api_shows_signatures_comments_and_patched_methods(site):
    def text(module):
        html = (site / 'api' / f'compassrl.{module}.html').read_text()
        return ' '.join(unescape(re.sub(r'<[^>]*>', '', html)).split())

    espo = text('algo.losses.espo')
    assert 'entropy_groups( entropy: Tensor, mask: Tensor, cfg: EspoConfig, ) → Tensor' in espo
    assert 'entropy – [B, T] nats, of the old policy' in espo  # a comment next to a parameter
    pool = text('rollout.vllm.pool')
    assert all(f'{method}(' in pool for method in ('generate', 'load_weights', 'close'))
    assert 'update( batch: Batch' in text('train.torch_train')


# ---- what a figure shows


def cell(kind, source, **more):
    return alt_cell(dict(cell_type=kind, source=source, outputs=[], **more))


class alt_cell(dict):
    __getattr__ = dict.__getitem__


@pytest.mark.parametrize(
    'code, want',
    [
        ('#| fig-alt: "Two lines that cross"\nplot()', 'Two lines that cross'),
        ("ax.set(xlabel='step', ylabel='loss', title='SFT')", 'Hook: SFT: loss against step'),
        ("ax.set_title(f'{n} of  seeds')", 'Hook: A batch is cut in two (of seeds)'),
        ("ax.set_title(f'{a}: {b} s')", 'Hook: A batch is cut in two'),
        ("ax.set_title('x')", 'Hook: A batch is cut in two'),
        ("t = 'The loss falls'\nax.set(title=t, xlabel='step')", 'Hook: The loss falls: step'),
        (
            "for a, t in zip(axs, ('It rises', f'{n} fall')):\n    a.set(title=t, xlabel='step')",
            'Hook: It rises; fall: step',
        ),
        (
            "for a, (k, y) in zip(axs, dict(A=1, B=2).items()):\n    a.set_title(f'{k} of {y}')",
            'Hook: A of; B of',
        ),
        (
            "def draw(y, title):\n    ax.set_title(title)\ndraw(y, 'It rises at once')",
            'Hook: It rises at once',
        ),
        ("t = f'{t} again'\nax.set_title(t)", 'Hook: A batch is cut in two (again)'),
        ('draw(4, 8)', 'Hook: A batch is cut in two'),
        ('%matplotlib inline', 'Hook: A batch is cut in two'),
    ],
)
def test_alt_is_the_cells_own_line_or_its_labels_or_the_text_above(code, want):
    above = cell('markdown', '## Hook\nFirst.\n\nA *batch* is cut in [two](x.ipynb). Then more.')
    assert alt.alt([above, cell('code', code)], 1) == want


def test_every_picture_says_what_it_shows(pages):
    said = [(p.name, i) for p, page in pages.items() for i in page.images]
    assert len(said) > 300
    # the logo stands next to its name
    silent = [
        f'{name}: {i["src"]}'
        for name, i in said
        if 'logo__image' not in i.get('class', '')
        and (
            len(re.findall(r'[^\W\d_]{2,}', i.get('alt') or '')) < 3
            or re.search(r'\.(png|svg)', i['alt'])
        )
    ]
    assert silent == []


# ---- in a browser


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args): ...

    def end_headers(self):
        self.send_header('Cache-Control', 'max-age=600')  # scripts are fetched once
        super().end_headers()


@pytest.fixture(scope='module')
def address(site):
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}/'
        server.shutdown()


CONTRAST = (ROOT / 'tests' / 'support' / 'contrast.js').read_text()
# what an element shows, in both themes; code that a reader must push sideways: its longest line
LOOK = f"""selector => {{
    const root = document.querySelector(selector), faint = {CONTRAST}
    const now = document.documentElement.dataset, seen = {{}}
    for (const theme of now.theme === 'dark' ? ['dark', 'light'] : ['light', 'dark']) {{
        if (now.theme !== theme) now.theme = theme  // all styles are computed anew
        seen[theme] = faint(root)
    }}
    const cut = [...root.querySelectorAll('div.highlight pre')]
        .filter(e => e.scrollWidth > e.clientWidth)
        .map(e => Math.max(...e.innerText.split('\\n').map(line => line.length)))
    return {{ ...seen, cut }}
}}"""
# wider than the screen: a page that must be pushed sideways itself, with all that can be unfolded
WIDE = """() => {
    const page = document.documentElement
    page.querySelectorAll('details').forEach(d => (d.open = true))
    return page.scrollWidth - page.clientWidth
}"""
# every box holds what its script has made
ALIVE = """async patience => {
    const boxes = [...document.querySelectorAll('.lab[data-lab]')], begun = performance.now()
    while (!boxes.every(box => box.querySelector('.bench'))) {
        if (performance.now() - begun > patience) return false
        await new Promise(done => setTimeout(done, 20))
    }
    return true
}"""
ASK = """src => new Promise(done => {
    const image = new Image()
    Object.assign(image, { onload: () => done('came'), onerror: () => done('did not come'), src })
})"""
# before anything is laid out: in a block of code the words of a class that another has there are
# plain text, and the list of pages is not drawn
PLAIN = """document.addEventListener('readystatechange', () => {
    if (document.readyState !== 'interactive') return
    for (const block of document.querySelectorAll('div.highlight pre')) {
        const known = new Set()
        for (const e of [...block.children]) {
            if (e.tagName !== 'SPAN' || e.attributes.length > 1 || e.firstElementChild) continue
            if (known.has(e.className)) e.replaceWith(e.textContent)
            known.add(e.className)
        }
        block.normalize()
    }
    for (const e of document.querySelectorAll('.bd-sidebar-primary > *'))
        e.style.contentVisibility = 'hidden'
})"""
SCREEN, PHONE = 1280, 360  # px; little is painted
WIDTHS = {px: dict(width=px, height=100) for px in (SCREEN, PHONE)}


def look(page, name, part='body'):
    "Faults of a page, or of a part of it, in both themes on a screen and in width on a phone, too"
    now = page.viewport_size['width']
    for width in (now, SCREEN + PHONE - now):
        if width != now:
            page.set_viewport_size(WIDTHS[width])
        if width == SCREEN:
            seen = page.evaluate(LOOK, part)
            for theme in 'light', 'dark':
                assert seen[theme]['texts'] > (10 if part == 'body' else 3), name
                yield from (f'{name}: {theme}: {said}' for said in seen[theme]['faint'])
            if cut := [n for n in seen['cut'] if n <= 100]:
                yield f'{name}: code of {cut} columns is cut at {SCREEN} px'
        if (more := page.evaluate(WIDE)) > 0:
            yield f'{name}: {more} px wider than a screen of {width}'


def opened(page, address, name, own=True, patience_ms=30_000):
    """Loads a page, and waits until its labs and its Plays are alive; says it where they are not

    A page with a script of its `own` begins as wide as a screen; the others, which have no more
    than styles for a width, begin as the page before has ended.
    """
    if own and page.viewport_size != WIDTHS[SCREEN]:
        page.evaluate('document.documentElement.hidden = true')  # it is not laid out again
        page.set_viewport_size(WIDTHS[SCREEN])
    page.goto(address + name, wait_until='load')
    return [] if page.evaluate(ALIVE, patience_ms) else [f'{name}: a lab or a Play is not alive']


def watched(browser, address, fault):
    """A page that reaches no host but the site's; what it asks of others, and errors, are faults.

    Outside requests go to a proxy that is not there. A route that aborts them would do so, too, but
    with routes Chromium has no cache: every page would fetch the scripts of the site anew.
    """
    proxy = dict(server='http://127.0.0.1:1', bypass='<-loopback>,127.0.0.1')
    page = browser.new_page(proxy=proxy, viewport=WIDTHS[SCREEN])
    page.add_init_script(STILL)
    page.on('console', lambda m: m.type == 'error' and fault(m.text))
    page.on('pageerror', lambda e: fault(str(e)))
    page.on('request', lambda r: r.url.startswith((address, 'data:')) or fault(r.url))
    return page


@pytest.fixture
def still(browser):
    """A Chromium for pages that nothing moves: frames cost more than what is seen of them

    Its pictures never `decode()`: the other tests have the usual one."""
    few = (
        *FEW,
        '--js-flags=--no-opt --no-maglev',
        '--disable-features=RenderDocument',  # a page takes the frame of the page before
    )
    started = browser.browser_type.launch(executable_path=CHROMIUM, args=[*FLAGS, *few])
    yield started
    started.close()


def test_pages_in_a_browser(site, pages, address, still):
    """Contrast, code that fits, no request to another host and no error, on every page

    Of the pages of the API, which one template makes, it is a quarter.

    A frame that pages have in common is looked at once; the rest of these pages is laid out with
    less, which `PLAIN` leaves out."""
    faults, alike, name, part = [], {}, '', 'body'

    def fault(text):
        faults.append(f'{name}: {text}')

    page = watched(still, address, fault)
    api = [p for p in sorted(pages) if p.parent.name == 'api']
    for path in sorted({*pages} - {*api[::2], *api[1::4]} | {*api[:4]}):  # made by one template
        alike.setdefault(pages[path].frame(), []).append(path)
    assert len(alike) > 3, alike
    first = [paths[0] for paths in alike.values()]
    for path in [*first, *(p for paths in alike.values() for p in paths[1:])]:
        if part == 'body' and path not in first:
            part = 'main'
            page.add_init_script(PLAIN)
        name = path.relative_to(site).as_posix()
        faults += opened(page, address, name, pages[path].own)
        faults += look(page, name, part)
    assert faults == [], json.dumps(faults, indent=1)


def test_labs_and_plays_are_on_pages_with_a_script_of_their_own(pages):
    own = {path for path, page in pages.items() if page.own}
    boxes = {path for path in pages if '<div class="lab" data-lab=' in path.read_text()}
    assert len(boxes) > 50 and boxes - own == set()


def test_a_request_to_another_host_is_blocked_and_seen(address, browser):
    faults = []
    page = watched(browser, address, faults.append)
    page.goto(address + 'genindex.html')
    assert faults == []
    other = address.replace('127.0.0.1', 'localhost') + '_static/favicon.svg'  # it would answer
    assert page.evaluate(ASK, address + '_static/favicon.svg') == 'came'
    assert page.evaluate(ASK, other) == 'did not come'
    assert faults[0] == other


def test_a_play_that_does_not_find_its_data_is_seen(site, tmp_path, browser):
    html = (site / 'algo' / 'advantages.html').read_text()
    box = re.search(r'<div class="lab" data-lab="play".*?</script>', html, flags=re.S)[0]
    for name, text in {'whole': box, 'spoilt': box.replace('"controls"', '"x"')}.items():
        (tmp_path / f'{name}.html').write_text(f'<main>{text}</main>')
    faults, address = [], f'file://{tmp_path}/'
    page = watched(browser, address, faults.append)
    assert opened(page, address, 'whole.html') == faults == []
    assert 'is not alive' in opened(page, address, 'spoilt.html', patience_ms=300)[0]
    assert faults != []


def test_faults_would_be_seen(tmp_path, browser):
    "The measures themselves: grey on grey, a long line, a page too wide"
    faint = '<p>dark</p><p style="color:#999;background:#aaa">grey</p>'
    code = '<div class="highlight"><pre style="width:99px;overflow:auto">{}</pre></div>'
    word = f'<span class="n">{"x" * 45}</span>'
    (tmp_path / 'a.html').write_text(
        f'<body style="width:3000px">{faint}{code.format(word * 2)}{"<p>more</p>" * 10}'
    )
    page = watched(browser, 'file:', pytest.fail)
    opened(page, f'file://{tmp_path}/', 'a.html')
    faults = list(look(page, 'a.html'))
    page.set_viewport_size(WIDTHS[PHONE])
    page.add_init_script(PLAIN)
    assert opened(page, f'file://{tmp_path}/', 'a.html', own=False) == []
    assert page.locator('pre > span').count() == 1
    assert page.viewport_size == WIDTHS[PHONE] and sorted(look(page, 'a.html')) == sorted(faults)
    said = ('light: 1.2', 'dark: 1.2', 'code of [90]', 'px wider than a screen of 1280')
    assert [sum(s in f for f in faults) for s in said] == [1, 1, 1, 1]


HERO = """() => {
    const box = document.querySelector('.lab[data-plays] .bench').getBoundingClientRect()
    return [box.top, box.bottom, document.querySelector('.lab .said').textContent]
}"""


def test_the_first_screen_shows_the_lab_whole_and_it_plays_once(address, browser):
    "And stands still where somebody wants no motion"
    for width, height in (1280, 800), (390, 844):
        for motion in 'no-preference', 'reduce':
            screen = dict(width=width, height=height)
            page = browser.new_page(viewport=screen, reduced_motion=motion)
            page.goto(address)
            page.wait_for_selector('.lab[data-plays] .bench')
            top, bottom, said = page.evaluate(HERO)
            assert 0 < top < bottom <= height, (width, top, bottom)
            high = page.evaluate('document.documentElement.scrollHeight')
            assert high <= (4 if width == 1280 else 7) * height, f'{width}: {high} px'
            if motion == 'reduce':
                page.wait_for_timeout(300)
                assert page.evaluate(HERO)[2].startswith('Step 0:')
            else:
                page.wait_for_function(
                    "!document.querySelector('.said').textContent.match('Step 0')"
                )
                page.locator('.lab .bars').first.click()  # whoever touches it stops it
                now = page.evaluate(HERO)[2]
                page.wait_for_timeout(300)
                assert page.evaluate(HERO)[2] == now
            page.close()


def test_a_section_for_the_careful_opens_by_a_link_and_a_figure_stands_above_its_code(
    address, browser
):
    page = browser.new_page()
    page.goto(address + 'algo/zero_variance.html')
    fold, inside = page.locator('details.careful'), page.locator('#four-laws-of-the-three-stages')
    assert fold.count() == 1 and not inside.is_visible()
    assert fold.locator('summary h2').inner_text().startswith('For the careful')
    page.evaluate("location.hash = 'four-laws-of-the-three-stages'")
    inside.wait_for()
    assert inside.bounding_box()['y'] < page.viewport_size['height'], 'it is scrolled to'
    page.goto('about:blank')
    page.goto(address + 'algo/zero_variance.html')
    page.evaluate("""() => {
        history.replaceState(null, '', '#four-laws-of-the-three-stages')
        dispatchEvent(new HashChangeEvent('hashchange'))
    }""")  # a browser that opens no fold by itself
    inside.wait_for()
    below = """() => [...document.querySelectorAll('.cell')]
        .filter(c => c.matches(':has(> details.above-input + .cell_output img)'))
        .map(c => [...c.children].map(x => x.getBoundingClientRect().top))
        .map(([code, figure]) => code > figure)"""
    found = page.evaluate(below)
    assert len(found) > 3 and all(found)
    for anchor, opens in dict(labs=True, **{'how-a-lesson-is-built': False}).items():
        page.goto('about:blank')
        page.goto(f'{address}lesson.html#{anchor}')  # a section that is little more than a fold
        page.wait_for_load_state()
        fold = page.locator(f'#{anchor} details').first
        assert (fold.get_attribute('open') is not None) == opens, anchor
    page.close()


def test_the_list_of_headings_follows_the_reader(address, browser):
    "The heading that is read is marked, and its mark is in view; only its section lists its parts"
    page = browser.new_page(viewport=dict(width=1280, height=800))
    page.goto(f'{address}/algo/losses.html')
    page.add_style_tag(content='.toc-entry a { padding: 2rem 0 !important }')  # more than a screen
    parts = page.locator('#pst-page-toc-nav ul ul')
    assert parts.count() > 3 and sum(e.is_visible() for e in parts.all()) <= 1
    page.wait_for_function("""() => {
        scrollTo(0, document.documentElement.scrollHeight)
        const links = [...document.querySelectorAll('#pst-page-toc-nav a')]
        const a = links.slice(links.length / 2).find(e => e.hasAttribute('aria-current'))
        const box = a?.closest('.bd-sidebar-secondary').getBoundingClientRect()
        const at = a?.getBoundingClientRect()
        return at && at.top >= box.top && at.bottom <= box.bottom
    }""")
    far = page.evaluate("document.querySelector('#exercises').offsetTop") - 150
    for at in (far, far // 2, far // 3, far):  # no heading passes the top of the window at a jump
        page.evaluate(f'scrollTo(0, {at})')
        page.wait_for_function("""() => {
            const above = [...document.querySelectorAll('article :is(h2, h3)')].filter(h =>
                h.offsetParent && h.getBoundingClientRect().top < 0.3 * innerHeight)
            const marked = document.querySelector('#pst-page-toc-nav a[aria-current]')
            return marked?.hash.slice(1) === above.at(-1).closest('section').id
        }""")
    page.close()


def test_the_list_of_all_pages_stands_where_the_page_is(address, browser):
    page = browser.new_page(viewport=dict(width=1280, height=800))
    for name in 'algo/losses', 'runs/presets', 'how_to/own_engine', 'runs/presets':
        page.goto(f'{address}{name}.html')  # the theme would keep the place of the page before
        page.wait_for_function("""() => {
            const own = document.querySelector('.bd-sidebar-primary .current > a')
            const at = own.getBoundingClientRect()
            return at.top > 50 && at.bottom < innerHeight
        }""")
    page.close()


def test_on_a_phone_the_map_shows_where_one_is_and_wide_figures_scroll(address, browser):
    page = browser.new_page(viewport=dict(width=390, height=844))
    page.goto(f'{address}/algo/losses.html')
    page.wait_for_function('document.querySelector("svg.map").parentElement.scrollLeft > 100')
    wide = page.locator('.cell_output > img.wide')
    assert wide.count() > 0 and wide.first.evaluate('e => e.width') == 620
    assert page.evaluate('document.documentElement.scrollWidth') <= 390
    page.close()


def test_an_answer_of_a_question_shows_whether_it_is_right(address, browser):
    page = browser.new_page()
    page.goto(f'{address}algo/advantages.html')
    right, wrong = (page.locator(f'.bd-article details.{name}') for name in ('yes', 'no'))
    assert right.count() == page.get_by_text('Predict.', exact=True).count() == 2
    assert wrong.count() == 4
    mark = 'e => getComputedStyle(e.querySelector("summary"), "::after").content'
    for option, sign in ((right.first, '✓'), (wrong.first, '✗')):
        assert sign not in option.evaluate(mark)
        option.locator('summary').click()
        assert sign in option.evaluate(mark)
    page.close()


def test_on_a_phone_a_printed_line_wraps_and_short_code_is_not_cut(address, browser):
    page = browser.new_page(viewport=dict(width=390, height=844))
    page.goto(f'{address}loop.html')
    lines = page.locator('.cell_output pre').evaluate_all(
        'all => all.map(e => [e.textContent.trim().includes("\\n"), e.style.whiteSpace])'
    )
    assert {wraps for many, wraps in lines if not many} == {'pre-wrap'}
    assert {wraps for many, wraps in lines if many} == {''}
    codes = page.locator('.bd-article p code').evaluate_all(
        'all => all.map(e => [e.textContent.length < 25, e.style.whiteSpace])'
    )
    assert {short for short, wraps in codes if wraps == 'nowrap'} == {True}
    page.close()


def test_a_box_of_the_map_leads_to_its_page(address, browser):
    page = browser.new_page()
    page.goto(f'{address}lesson.html')
    whole = page.locator('svg.map').last
    boxes = whole.locator('a')
    assert boxes.count() == len(build_docs.MAP) and not whole.is_visible()
    page.locator('summary', has_text='All boxes').click()
    boxes.get_by_text('FP8', exact=True).click()
    page.wait_for_url(re.compile('rollout/fp8.html'))
    page.goto(f'{address}algo/losses/espo.html')
    boxes = page.locator('svg.map a')
    assert boxes.count() == 6  # the stations
    boxes.get_by_text('rollout', exact=True).click()
    page.wait_for_url(re.compile('rollout/answers.html'))
    page.close()


def test_a_word_says_what_it_means_and_the_line_that_leads_on_is_a_card():
    words = dict(slot=('word-slot', 'A place in a batch.'))
    text = build_docs.with_words('a *slot*, a *stone*', 'loop', words)
    assert text == 'a [*slot*](words.html#word-slot "A place in a batch."), a *stone*'
    card = build_docs.next_card('One.\n\nNext: [a](b.html). What.\n\nPrevious: [c](d.html)')
    line = '<div class="next">\n\nNext: [a](b.html). What.\n\n</div>'
    last = build_docs.next_card('The end.\n\n**Next:** [a](b.html). What.')
    assert last.endswith('<div class="next">\n\n**Next:** [a](b.html). What.\n\n</div>')
    assert card == f'One.\n\n{line}\n\nPrevious: [c](d.html)'


def test_the_workflow_that_publishes_the_site_builds_what_this_test_has_built():
    jobs = yaml.safe_load((ROOT / '.github' / 'workflows' / 'pages.yml').read_text())['jobs']
    steps = jobs['site']['steps']
    assert [s['run'] for s in steps if 'run' in s] == ['make docs']
    upload = next(s for s in steps if s.get('uses', '').startswith('actions/upload-pages'))
    makefile = (ROOT / 'Makefile').read_text()
    assert f'build_docs.py --out {upload["with"]["path"]}' in makefile
    assert steps[-1]['uses'].startswith('actions/deploy-pages')


def test_the_search_finds_a_word(address, browser):
    "Its index is fetched by its own page alone"
    page = watched(browser, address, pytest.fail)
    page.goto(f'{address}search.html?q=advantage')
    page.wait_for_function('document.querySelectorAll("ul.search > li").length > 3', timeout=60_000)
    found = page.locator('ul.search > li').all_inner_texts()
    assert any('dvantage' in text.splitlines()[0] for text in found), found
    page.close()


@pytest.mark.parametrize('width', [1280, 390])
def test_every_page_searches_while_one_types(address, browser, width):
    "The index is fetched when the field is opened; arrow keys and Enter lead to a section"
    asked, at = [], f'{address}algo/losses/espo.html'
    page = watched(browser, address, pytest.fail)
    page.set_viewport_size(dict(width=width, height=800))
    page.on('request', lambda r: asked.append(r.url))
    page.goto(at)
    assert not [url for url in asked if 'search_data' in url]
    page.keyboard.press('Control+k')
    page.keyboard.type('ruoter replay ')  # a slip, and what is said of it
    note = page.locator('#pst-search-dialog ul.search > li').first
    note.wait_for(timeout=60_000)
    said = 'Nothing here has the words “ruoter replay”. Found for “router replay”:'
    assert note.inner_text() == said
    page.locator('#pst-search-dialog input').fill('')
    page.keyboard.type('router rep')
    first = page.locator('#pst-search-dialog ul.search > li').first
    first.wait_for(timeout=60_000)
    title, section, says = first.inner_text().splitlines()[:3]
    assert title.startswith('Router replay') and len(says) > 30
    page.keyboard.press('ArrowUp')  # it stays in the field
    page.keyboard.press('ArrowDown')
    page.keyboard.type('l')  # and typing comes back to it
    assert page.locator('#pst-search-dialog input').input_value() == 'router repl'
    for key in ('ArrowDown', 'ArrowDown', 'ArrowDown', 'ArrowUp', 'Enter'):
        page.keyboard.press(key)
    page.wait_for_url(re.compile('engine_gap.html#'))
    assert page.locator(':target').inner_text().startswith(section)
    page.go_back()
    page.keyboard.press('Control+k')
    page.keyboard.type('xyzzy')
    page.get_by_text('Nothing found').wait_for()
    page.locator('#pst-search-dialog ul.search a').last.focus()
    page.keyboard.press('Escape')  # also from what was found
    page.locator('#pst-search-dialog').wait_for(state='hidden')
    page.close()


def test_a_state_of_the_map_of_the_paper_shows_its_chapters_alone(address, browser):
    page = watched(browser, address, pytest.fail)
    page.goto(f'{address}paper_map.html')
    folds, rows = page.locator('.paper-chapter'), page.locator('.paper-chapter tbody tr')

    def shown(found):
        return found.evaluate_all('all => all.filter(e => e.checkVisibility()).length')

    heads = page.locator('.paper-chapter > summary')
    chapters, said = folds.count(), heads.all_inner_texts()
    assert (shown(folds), shown(rows)) == (chapters, 0)
    chosen = page.locator('.paper-choice label', has_text='absent')
    chosen.click()
    absent = int(chosen.inner_text().split()[-1])
    assert shown(rows) == absent == page.locator('.paper-chapter tr.absent').count() > 0
    assert 0 < shown(folds) <= absent and shown(folds) < chapters, 'no empty chapter'
    seen = [h.inner_text() for h in heads.all() if h.is_visible()]
    assert all(h.endswith(' absent') for h in seen) and len(seen) == shown(folds)
    page.evaluate('location.hash = "espo"')  # hidden so far
    page.locator('#espo h2').wait_for()
    assert shown(folds) == chapters and heads.all_inner_texts() == said
    assert shown(rows) == page.locator('#espo tr:is(.here, .in-part, .absent)').count() > 0
    page.close()


@pytest.mark.parametrize('width', [1280, 390])
def test_a_word_is_found_while_one_types(address, browser, width):
    "By its name here or elsewhere; a link to a word shows it; without the script all rows show"
    page = watched(browser, address, pytest.fail)
    page.set_viewport_size(dict(width=width, height=800))
    page.goto(f'{address}words.html')
    field, rows = page.get_by_label('Find a word'), page.locator('table.words tbody tr')
    words, status = rows.count(), page.locator('.word-field [role="status"]')
    assert words > 150 and status.inner_text().strip() == f'{words} words'
    for _ in range(200):
        page.keyboard.press('Tab')
        if field.evaluate('el => el === document.activeElement'):
            break
    for asked, word in ('CLIP_ratio low', 'clip'), ('frac_reward_zero_std', 'silent group'):
        page.keyboard.type(asked)
        seen = [r for r in rows.all() if r.is_visible()]
        assert [r.locator('b').inner_text() for r in seen] == [word]
        assert status.inner_text().strip() == f'1 of {words} words'
        assert page.locator('section h2:visible', has_text='Many machines').count() == 0
        page.keyboard.press('Escape')
        assert field.input_value() == '' and status.inner_text().strip() == f'{words} words'
    page.keyboard.type('manifest')  # in a fold
    assert page.locator('#word-manifest').is_visible()
    page.keyboard.type(' xyzzy')
    assert status.inner_text().strip().startswith(f'0 of {words} words. Try the search (Ctrl + K)')
    page.evaluate('location.hash = "word-broker"')
    page.locator('#word-broker').wait_for()
    assert field.input_value() == '' and page.locator('#word-manifest').is_visible()
    page.close()
    plain = browser.new_context(java_script_enabled=False).new_page()
    plain.goto(f'{address}words.html')
    assert plain.locator('table.words tbody tr').count() == words
    assert plain.locator('#word-clip').is_visible() and plain.locator('.word-field').count() == 0
    plain.context.close()


def test_code_can_be_copied(address, browser):
    "The button stands in every block of code, and gives the code alone"
    page = browser.new_page()
    page.goto(address + 'algo/losses/espo.html')
    blocks, buttons = page.locator('div.highlight pre'), page.locator('button.copybtn')
    assert blocks.count() == buttons.count() > 20


PLAY = '.lab[data-lab="play"]'
# the part of the strip that belongs to the sliders as they stand, and what the page shows
SHOWN = """async el => {
    const { controls, frames, width, height } = JSON.parse(el.dataset.frames)
    const chosen = [...el.querySelectorAll('input, select')].map(e => +e.value)
    const at = controls.filter(c => c.labels.length > 1)
        .reduce((n, c, i) => n * c.labels.length + chosen[i], 0)
    const strip = new Image(), own = document.createElement('canvas')
    strip.src = el.dataset.strip
    await strip.decode()
    Object.assign(own, { width, height })
    own.getContext('2d').drawImage(strip, -frames[at].picture * width, 0)
    return [own.toDataURL(), el.querySelector('canvas').toDataURL()]
}"""


def test_a_play_moves_on_a_page_from_a_disk(site, browser):
    "By keyboard; what it shows is the frame that is stored for these values"
    page = browser.new_page(viewport=dict(width=360, height=800), reduced_motion='reduce')
    page.goto(f'file://{site}/algo/advantages.html')
    play = page.locator(PLAY)
    play.locator('canvas').wait_for()
    pictures = set()
    for key in 'Home', 'ArrowRight', 'End':
        play.get_by_label('p', exact=True).press(key)
        stored, seen = play.evaluate(SHOWN)
        assert stored == seen
        pictures.add(seen)
    assert len(pictures) == 3
    still = browser.new_page(java_script_enabled=False)
    still.goto(f'file://{site}/algo/advantages.html')
    assert (
        still.locator(f'{PLAY} img').is_visible() and still.locator(f'{PLAY} canvas').count() == 0
    )


def labs_of(path):
    return set(re.findall(r'<div class="lab" data-lab="(\w+)"', path.read_text())) - {'play'}


def still_pictures(page, path):
    "Faults of a page's labs where no script runs: a picture that is whole, fits and says something"
    page.goto(f'file://{path}')
    for name in sorted(labs_of(path)):
        box = page.locator(f'.lab[data-lab="{name}"]')
        images = box.locator('img')
        if (n := images.count()) != 1 or not images.is_visible():
            yield f'{path.name}: {name}: {n} pictures, or a hidden one'
            continue
        at = images.bounding_box()
        if at['x'] < 0 or at['x'] + at['width'] > 360:
            yield f'{path.name}: {name}: the picture is at {at}'
        if not images.evaluate('e => e.complete && e.naturalWidth > 100'):
            yield f'{path.name}: {name}: the picture is broken'
        if len((images.get_attribute('alt') or '').split()) < 4:
            yield f'{path.name}: {name}: no words for the picture'
        if box.locator('.bench').count():
            yield f'{path.name}: {name}: a script has run'


def test_every_lab_is_a_picture_with_words_where_no_script_runs(site, browser):
    homes = [p for p in sorted(site.rglob('*.html')) if labs_of(p)]
    labs = {p.stem for p in (ROOT / 'nbs' / 'labs').glob('*.js')} - {'shared', 'play'}
    assert set().union(*map(labs_of, homes)) == labs
    still = browser.new_page(java_script_enabled=False, viewport=dict(width=360, height=800))
    faults = [f for path in homes for f in still_pictures(still, path)]
    assert faults == [], json.dumps(faults, indent=1)


def test_a_lab_without_its_picture_would_be_seen(site, browser, tmp_path):
    "The measures themselves, on copies of one lab's box"
    html = (site / 'algo' / 'losses' / 'espo.html').read_text()
    box = re.search('<div class="lab" data-lab="clip"><img [^>]*></div>', html)[0]
    broken = {
        '<img alt="[^"]*"': ('<img', 'no words'),
        'base64,[^"]{500}': ('base64,', 'broken'),
        '<img ': ('<img hidden ', 'hidden'),
        '<img [^>]*>': ('', '0 pictures'),
        '<img  ?(?=alt)': ('<img style="margin-left: 99px" ', 'picture is at'),
        '$': ('', ''),
    }
    still = browser.new_page(java_script_enabled=False, viewport=dict(width=360, height=800))
    for i, (was, (becomes, fault)) in enumerate(broken.items()):
        path = tmp_path / f'{i}.html'
        path.write_text('<style>img { max-width: 100% }</style>' + re.sub(was, becomes, box))
        faults = list(still_pictures(still, path))
        assert [fault in f for f in faults] == [True] * bool(fault), (was, faults)


def test_the_looks_of_a_play_stay_in_its_own_box(site, browser):
    "A long name may wrap there; in a lab on the same page a number stands beside its slider"
    page = browser.new_page(viewport=dict(width=360, height=800))
    page.goto(f'file://{site}/algo/engine_gap.html')
    for name, wraps in ('play', 'wrap'), ('mismatch', 'nowrap'):
        labels = page.locator(f'.lab[data-lab="{name}"] label')
        labels.first.wait_for()
        seen = labels.evaluate_all('all => all.map(e => getComputedStyle(e).flexWrap)')
        assert set(seen) == {wraps}, name
