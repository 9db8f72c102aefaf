"Links of a notebook or a markdown file to files and headings, and those that lead nowhere"

import json
import re
from functools import cache
from urllib.parse import unquote


def prose(path):
    "The markdown of a file without its code"
    text = path.read_text()
    if path.suffix == '.ipynb':
        cells = [c for c in json.loads(text)['cells'] if c['cell_type'] == 'markdown']
        text = '\n\n'.join(''.join(c['source']) for c in cells)
    return re.sub(r'^```.*?^```', '', text, flags=re.S | re.M)


def slug(heading):
    "The anchor that GitHub, JupyterLab and the site give a heading"
    plain = re.sub(r'`|\*\*|\]\([^)]*\)|\[', '', heading).strip().lower()
    return re.sub(r'[^\w\- ]', '', plain).replace(' ', '-')


@cache
def _anchors(path, changed):
    return {slug(h) for h in re.findall(r'^#+\s+(.+)$', prose(path), flags=re.M)}


def anchors(path):
    return _anchors(path, path.stat().st_mtime_ns)


def broken(path):
    "What is wrong with the links of a file, one line each"
    for target in re.findall(r'(?<!\\)\]\(<?([^)\s>]+)>?\)', prose(path)):
        if re.match(r'\w+:', target):
            continue
        file, _, anchor = unquote(target).partition('#')
        to = path.parent / file if file else path
        if not to.exists():
            yield f'{target}: no such file'
        elif anchor and anchor.lower() not in anchors(to):
            yield f'{target}: no such heading'
