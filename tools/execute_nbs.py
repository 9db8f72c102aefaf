"""Execute notebooks in a real kernel and store what a reader should see: outputs, figures, widgets.

    python tools/execute_nbs.py [--flags "slow gpu"] [--check] [nbs/algo/losses/espo.ipynb ...]

No names = all of them. Cells that nbdev-test would skip (`#| slow`, `#| gpu`, `#| eval: false`) are
not run and keep their stored outputs. Progress bars and Python warnings never go into the notebook;
ids are stable, so a second run of a deterministic notebook is byte-identical. A notebook that
fails, or whose source changed while it ran, is not written. Its seconds go into nbs/course.yml if
nothing else kept the machine busy; `make sync` writes them under the titles.
"""

import argparse
import json
import math
import os
import re
import sys
import tempfile
import time
import uuid
from pathlib import Path

import fonts
import nbformat
import toc
from fastcore.nbio import read_nb, write_nb
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbdev.clean import clean_nb
from nbdev.config import get_config
from nbdev.test import nb_test_cells
from same_numbers import kernels

TOOLS = Path(__file__).resolve().parent
KERNEL_ENV = (
    dict(
        OMP_NUM_THREADS='1',
        MKL_NUM_THREADS='1',
        OPENBLAS_NUM_THREADS='1',
        PYTHONHASHSEED='0',
        TOKENIZERS_PARALLELISM='false',
        TQDM_DISABLE='1',
        HF_HUB_OFFLINE='1',
        HF_DATASETS_DISABLE_PROGRESS_BARS='1',
        MATPLOTLIBRC=str(TOOLS / 'matplotlibrc'),
        MPLBACKEND='module://matplotlib_inline.backend_inline',
        COMPASSRL_STILL='1',  # a Play is stored as its frames
    )
    | kernels()
)
VIEW, STATE = (
    'application/vnd.jupyter.widget-view+json',
    'application/vnd.jupyter.widget-state+json',
)
HEX = r'[0-9a-f]{32}'


def execute(path, flags=()):
    "Run the cells that nbdev-test would run; raises `CellExecutionError`"
    skip = get_config(path.parent.resolve()).tst_flags
    run = {
        c.id
        for c in nb_test_cells(path, skip.split() if isinstance(skip, str) else skip, list(flags))
    }
    nb = nbformat.read(path, 4)
    nb.metadata.pop('widgets', None)
    skipped = [c for c in nb.cells if c.cell_type == 'code' and c.id not in run]
    for c in skipped:
        c.metadata['tags'] = [*c.metadata.get('tags', []), 'skip-execution']
    with tempfile.TemporaryDirectory() as home:  # no start-up files of the user's own
        (start := Path(home) / 'profile_default' / 'startup').mkdir(parents=True)
        (start / 'font.py').write_text(fonts.START)
        kernel = AsyncKernelManager(kernel_name='python3', transport='ipc', ip=f'{home}/kernel')
        client = NotebookClient(
            nb,
            km=kernel,
            timeout=3600 if flags else 180,  # slow cells take their time
            resources=dict(metadata=dict(path=str(path.parent))),
            skip_cells_with_tag='skip-execution',
        )
        client.execute(cleanup_kc=True, env={**os.environ, **KERNEL_ENV, 'IPYTHONDIR': home})
    for c in skipped:
        c.metadata.tags.remove('skip-execution')
    return nb


def terminal(text):
    "What a terminal shows of `text`: a carriage return goes back to the start of its line"
    return re.sub(r'[^\n]*\r(?=[^\n])', '', text.replace('\r\n', '\n')).replace('\r', '')


def is_bar(line):
    return bool(re.search(r'\d+%\|.*\|.*\[.*\]|^\d*it \[|\d+(\.\d+)?(it/s|s/it)', line))


def split_noise(text):
    "A stderr text without progress bars and warnings, and what was taken out"
    warning = r'^\S+:\d+: \w*Warning: (?:(?:.*\n){1,20}?  \S.*\n|.*\n)'
    warning += r'|^(?:\[rank\d+\]:)?\[?W\d{4} [\d:.]+ .*\n'  # torch's log
    noise = re.findall(warning, text, flags=re.M)
    lines = re.sub(warning, '', text, flags=re.M).splitlines(keepends=True)
    return ''.join(line for line in lines if not is_bar(line)), noise


def reach(roots, state):
    "The widget models that `roots` lead to"
    seen, todo = set(), list(roots)
    while todo:
        key = todo.pop()
        if key in state and key not in seen:
            seen.add(key)
            todo += re.findall(HEX, json.dumps(state[key]))
    return seen


def drop_bars(nb):
    "Remove tqdm's widgets, which carry times"
    state = nb.metadata.get('widgets', {}).get(STATE, {}).get('state', {})

    def view(o):
        return o.get('data', {}).get(VIEW, {}).get('model_id')

    outputs = [o for c in nb.cells for o in c.get('outputs', []) if view(o)]
    bars = [o for o in outputs if is_bar(o.data.get('text/plain', ''))]
    for key in reach(map(view, bars), state) - reach(
        [view(o) for o in outputs if o not in bars], state
    ):
        del state[key]
    for c in nb.cells:
        if c.cell_type == 'code':
            c.outputs = [o for o in c.outputs if o not in bars]


def drop_labs(nb):
    "A lab or a Play is stored as a marked box: its widget would be dead without the kernel"
    state = nb.metadata.get('widgets', {}).get(STATE, {}).get('state', {})
    outputs = [o.data for c in nb.cells for o in c.get('outputs', []) if VIEW in o.get('data', {})]
    for data in outputs:
        if 'data-lab=' in data.get('text/html', ''):
            del data[VIEW]
    shown = [data[VIEW]['model_id'] for data in outputs if VIEW in data]
    for key in set(state) - reach(shown, state):
        del state[key]
    if not state:
        nb.metadata.pop('widgets', None)


def tidy_streams(nb):
    "Join the pieces of each stream and drop what is noise to a reader; returns dropped warnings"
    dropped = []
    for c in nb.cells:
        if c.cell_type != 'code':
            continue
        out = []
        for o in c.outputs:
            same = (
                out and o.output_type == out[-1].output_type == 'stream' and o.name == out[-1].name
            )
            if same:
                out[-1].text += o.text
            else:
                out.append(o)
        for o in out:
            if o.output_type != 'stream':
                continue
            o.text = terminal(o.text)
            if o.name == 'stderr':
                o.text, noise = split_noise(o.text)
                dropped += noise
        c.outputs = [o for o in out if o.output_type != 'stream' or o.text.strip()]
    return dropped


def stable_ids(nb, name):
    "Random ids of widgets and of matplotlib animations now follow from `name` and their order"
    state = nb.metadata.get('widgets', {}).get(STATE, {}).get('state', {})
    text = {k: json.dumps(v, sort_keys=True) for k, v in state.items()}
    order = {}

    def visit(key):
        if key in order or key not in state:
            return
        order[key] = len(order)
        for ref in re.findall(HEX, text[key]):
            visit(ref)

    for c in nb.cells:
        for o in c.get('outputs', []):
            visit(o.get('data', {}).get(VIEW, {}).get('model_id', ''))

    # models that no view reaches: by their own text, with the references known so far resolved
    def resolved(key):
        return re.sub(HEX, lambda m: str(order.get(m[0], '?')), text[key])

    for key in sorted(set(state) - set(order), key=resolved):
        visit(key)
    raw = nbformat.writes(nb)
    for key in re.findall(rf'_anim_img({HEX})', raw):
        order.setdefault(key, len(order))
    new = {k: uuid.uuid5(uuid.NAMESPACE_URL, f'{name}#{i}').hex for k, i in order.items()}
    if new:
        nb = nbformat.reads(re.sub('|'.join(new), lambda m: new[m[0]], raw), 4)
    state = nb.metadata.get('widgets', {}).get(STATE, {}).get('state', {})
    if state:
        nb.metadata.widgets[STATE]['state'] = dict(sorted(state.items()))
    return nb


def write_clean(nb, path):
    "Clean as nbdev-clean does and replace the file in one step"
    tmp = path.with_name(f'.{path.name}.tmp')
    tmp.write_text(nbformat.writes(nb) + '\n')
    cleaned = read_nb(tmp)
    clean_nb(cleaned)
    write_nb(cleaned, tmp)
    os.replace(tmp, path)


def sources(path):
    return [(c.cell_type, c.source) for c in nbformat.read(path, 4).cells]


def busy():
    "Does something else compute on this machine?"
    return os.getloadavg()[0] > os.cpu_count()


def rounded(seconds):
    "To two digits, upwards, in steps that a reader can use"
    step = 1 if seconds < 10 else 5 if seconds < 60 else 10
    return max(1, math.ceil(seconds / step) * step)


def keep_seconds(path, took):
    "Write what a notebook took into course.yml, unless it is about what stands there"
    place = toc.Course(get_config().config_path)
    name = toc.name_of(path.resolve().relative_to(place.nbs))
    known = place.data['seconds'].get(name)
    if name in place.order and not (known and known / 1.5 < took < known * 1.5):
        toc.write_seconds(place, {name: rounded(took)})


def run_one(path, flags, check):
    "True if the notebook ran; prints one line with its time"
    quiet, before = not busy(), sources(path)
    start = time.monotonic()
    try:
        try:
            nb = execute(path, flags)
        except (
            CellTimeoutError
        ):  # now and then a message between client and kernel is lost, and both wait
            print(f'{path}: no cell takes that long; once more, in a new kernel', flush=True)
            nb = execute(path, flags)
    except (CellExecutionError, CellTimeoutError) as e:
        print(f'{path}: FAILED after {time.monotonic() - start:.1f} s\n{e}', flush=True)
        return False
    drop_bars(nb)
    drop_labs(nb)
    dropped = tidy_streams(nb)
    took = time.monotonic() - start
    figures = sum(
        'image/' in str(list(o.get('data', {}))) for c in nb.cells for o in c.get('outputs', [])
    )
    for w in dict.fromkeys(dropped):
        print(f'  not stored: {w.splitlines()[0]}')
    if not check:
        if sources(path) != before:
            print(f'{path}: its source changed while it ran; not written, run it again', flush=True)
            return False
        write_clean(stable_ids(nb, path.name), path)
        if quiet and not flags:
            keep_seconds(path, took)
    print(
        f'{path}: {took:.1f} s, {figures} figures, {path.stat().st_size / 1024:.0f} kB', flush=True
    )
    return True


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        '--flags', default='', help='flags of tst_flags to run all the same, e.g. "slow"'
    )
    p.add_argument('--check', action='store_true', help='run and write nothing')
    p.add_argument('files', nargs='*', type=Path)
    a = p.parse_args()
    files = a.files or toc.notebooks(Path(os.path.relpath(get_config().nbs_path)))
    ok = [run_one(f, a.flags.split(), a.check) for f in files]
    sys.exit(0 if all(ok) else 1)


if __name__ == '__main__':
    main()
