"""README.md from nbs/readme.ipynb: its text, its code and its stored outputs, as GitHub shows them.

python tools/readme.py [--check]     # --check: write nothing, fail if something is out of date
"""

import base64
import re
import sys
from pathlib import Path

import nbformat
from alt import alt, directives

ROOT = Path(__file__).resolve().parent.parent
FIGURES = 'readme_files'
LAB = f'{FIGURES}/grpo-lab.gif'  # tools/record_lab.py makes it
NOTE = '<!-- Generated from nbs/readme.ipynb by tools/readme.py: edit the notebook. -->'


def relink(text):
    "Links next to the notebook become links next to the README"

    def move(m):
        if m[1].startswith('../'):
            return m[1].removeprefix('../')
        return f'nbs/{m[1]}' if (ROOT / 'nbs' / m[1].split('#')[0]).exists() else m[1]

    text = re.sub(r'(?<=\]\()(?!\w+:|#|/)([^)\s]+)', move, text)
    return re.sub(r'(?<=(?:src|ref)=")(?!\w+:|#|/)([^"]+)', move, text)


def output(o, shows, figures, label):
    "One stored output as markdown; a figure, that `shows` something, is added to `figures`"
    if o.output_type == 'stream':
        return f'```\n{o.text.strip()}\n```'
    if o.output_type == 'error':
        sys.exit(f'nbs/readme.ipynb stores an error: {o.ename}: {o.evalue}')
    data = o.data
    for kind, decode in {'image/svg+xml': str.encode, 'image/png': base64.b64decode}.items():
        if kind not in data:
            continue
        name = f'{FIGURES}/{label}.{kind[6:9]}'
        figures[name] = decode(data[kind])
        return f'![{shows}]({name})'
    if 'text/markdown' in data:
        return relink(data['text/markdown'].strip())
    if 'text/html' in data:
        return re.sub(r'<style.*?</style>\s*', '', data['text/html'], flags=re.S).strip()
    return f'```\n{data.get("text/plain", "").strip()}\n```'


def readme():
    "What the README and its figures should hold: file name -> bytes"
    parts, figures = [NOTE], {}
    cells = nbformat.read(ROOT / 'nbs' / 'readme.ipynb', 4).cells
    for i, c in enumerate(cells):
        if c.cell_type == 'markdown':
            parts.append(relink(c.source.strip()))
        if c.cell_type != 'code':
            continue
        opts, code = directives(c.source)
        if not code or 'hide' in opts or opts.get('include') == 'false':
            continue
        block = f'```python\n{code}\n```'
        if opts.get('code-fold') == 'true':
            block = f'<details><summary>Code</summary>\n\n{block}\n\n</details>'
        if opts.get('echo') != 'false':
            parts.append(block)
        label = opts.get('label', f'figure-{i}')
        said = [output(o, alt(cells, i), figures, label) for o in c.outputs]
        if opts.get('output') != 'false':
            parts += said
    return {'README.md': ('\n\n'.join(parts) + '\n').encode(), **figures}


def main(args):
    files = readme()
    stale = [n for n, b in files.items() if not (ROOT / n).exists() or (ROOT / n).read_bytes() != b]
    extra = [f for f in (ROOT / FIGURES).glob('*') if f'{FIGURES}/{f.name}' not in {*files, LAB}]
    if '--check' in args:
        sys.exit(
            f'out of date: {", ".join(stale + [f.name for f in extra])}: run `make sync`'
            if stale or extra
            else 0
        )
    for f in extra:
        f.unlink()
    for name in stale:
        (ROOT / name).parent.mkdir(exist_ok=True)
        (ROOT / name).write_bytes(files[name])
    print(f'README.md: {len(files) - 1} figures, {len(stale)} files written')


if __name__ == '__main__':
    main(sys.argv[1:])
