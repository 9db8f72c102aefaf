"""How the notebooks work: one pipeline, one stage per notebook, every claim checked by a cell."""

__all__ = [
    'stages',
    'pipeline',
    'answers',
    'predict',
    'lab_source',
    'Lab',
    'lab',
    'check',
    'expect',
    'brief',
    'show_settings',
    'show_source',
]

import inspect
import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.display import HTML, SVG, Markdown
    from matplotlib.figure import Figure
    from torch import Tensor

from course.stages import columns, homes, stages

_w, _h, _gx, _gy = 118, 34, 20, 10  # boxes and the gaps between them
_below = 36  # more below the stations, for the arrow back
_hot, _grey = '#c2410c', '#78716c'


def _place(col, row):
    return 8 + col * (_w + _gx), 8 + row * (_h + _gy) + (_below if row else 0)


def _box(col, row, stage, on):
    x, y = _place(col, row)
    number, label = stages[stage]
    fill, ink, faint = ('#f5f5f4', '#44403c', '#57534e')
    if on:
        fill, ink, faint = (_hot, '#ffffff', '#ffedd5')
    line = _hot if on else '#a8a29e'
    return (
        f'<rect x="{x}" y="{y}" width="{_w}" height="{_h}" rx="6" fill="{fill}" stroke="{line}"/>'
        f'<text x="{x + 6}" y="{y + _h / 2 + 4}" fill="{faint}" font-size="11">{number}</text>'
        f'<text x="{x + _w / 2 + 11}" y="{y + _h / 2 + 4.5}" text-anchor="middle" '
        f'fill="{ink}">{label}</text>'
    )


# along the stations, and from the last one back to the second; `run`: boxes stand below the first
def _arrows(color, run):
    middle, below = 8 + _h / 2, 8 + _h
    along = [f'{_place(i, 0)[0] + _w + 2} {middle}h{_gx - 5}' for i in range(5)]
    first, last = (_place(i, 0)[0] + _w / 2 for i in (1, 5))
    back = f'{last} {below + 2}v22H{first}v-19'
    name = f'arrow-{color[1:]}'
    paths = ''.join(f'<path d="M{p}" marker-end="url(#{name})"/>' for p in [*along, back])
    head = (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{color}"/></marker>'
    )
    of_run = (
        f'<text x="{8 + _w / 2}" y="{_place(0, 1)[1] - 8}" text-anchor="middle" fill="#57534e" '
        'font-size="11">the whole run</text>'
    )
    return (
        f'<defs>{head}</defs><g stroke="{color}" fill="none">{paths}</g>'
        f'<text x="{(last + first) / 2}" y="{below + 18}" text-anchor="middle" fill="{color}" '
        'font-size="11">new weights</text>' + (of_run if run else '')
    )


def _stage(name):  # a stage or a module -> the stage; a module's is its own or that of its folder
    if name in stages or name in (None, 'records'):
        return name
    parts = name.split('.')
    above = ['.'.join(parts[: i + 1]) for i in reversed(range(len(parts)))]
    found = [homes[n] for n in above if n in homes]
    if not found:
        raise ValueError(f"stage={name!r}: use 'records', a module, or one of {list(stages)}")
    return found[0]


def pipeline(
    # a key of `stages` or a module ('train.sft'); 'records' = the arrows; None = highlight nothing
    stage: str | None = None,
    whole: bool = False,  # with all that stands below the stations
) -> 'SVG':  # an SVG that Jupyter and the site both show
    """The map of the series with one stage highlighted: the six stations, and below its station
    the stage. Raises ValueError for an unknown stage"""
    from IPython.display import SVG

    here = _stage(stage)
    shown = [[s for s in c if whole or s in (c[0], here)] for c in columns]
    width = 16 + 6 * _w + 5 * _gx
    rows = max(map(len, shown))
    height = _place(0, rows - 1)[1] + _h + 8 if rows > 1 else _place(0, 1)[1] - 8
    boxes = ''.join(
        _box(i, j, s, s == here) for i, column in enumerate(shown) for j, s in enumerate(column)
    )
    return SVG(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        'style="max-width:100%;height:auto" font-family="Inter,system-ui,sans-serif" '
        'font-size="13">'
        f'{_arrows(_hot if here == "records" else _grey, len(shown[0]) > 1)}{boxes}</svg>'
    )


def _marked(text):  # what stands in backticks is code
    return re.sub('`([^`]+)`', r'<code>\1</code>', escape(text))


def predict(
    question: str,  # one question
    options: Sequence[str],  # what to choose from
    answer: int,  # index of the right one, computed by the caller
    why: str = '',  # one sentence
    wrong: Sequence[str] = (),  # why each option is wrong, one for each; '' says "Try another."
) -> 'HTML':  # HTML without scripts
    """A question whose options answer a click.

    Raises ValueError if `answer` is no option, or `wrong` has not one text for each option."""
    from IPython.display import HTML

    if not 0 <= answer < len(options):
        raise ValueError(f'answer={answer}: use the index of one of {len(options)} options')
    if len(wrong := list(wrong) or [''] * len(options)) != len(options):
        raise ValueError(f'{len(wrong)} texts for {len(options)} options')
    says = [f'<b>No.</b> {_marked(text or "Try another.")}' for text in wrong]
    says[answer] = f'<b>Yes.</b> {_marked(why)}'
    items = ''.join(
        f'<li><details><summary>{_marked(o)}</summary>{said}</details></li>'
        for o, said in zip(options, says)
    )
    return HTML(
        '<div style="border-left:4px solid #c2410c;padding:.4em 1em"><b>Predict.</b> '
        f'{_marked(question)} <i>Click an answer.</i><ol type="a">{items}</ol></div>'
    )


def answers(
    *paragraphs: str,  # what holds for the sample that this machine drew, computed by the caller
) -> 'HTML':  # HTML without scripts
    "A fold with the answers to questions about a computed sample, which differs between machines"
    from IPython.display import HTML

    said = ''.join(f'<p>{escape(p)}</p>' for p in paragraphs)
    return HTML(f'<details><summary>Answers</summary>{said}</details>')


def lab_source(
    name: str,  # a file of the folder `labs`, without '.js'
) -> str:  # an ES module that imports nothing: it exports the lab's mathematics and `render`
    "The code of a lab, for a widget or a page. Raises ValueError for an unknown lab"
    folder = Path(__file__).resolve().parents[1] / 'nbs' / 'labs'
    scripts = [p for p in folder.iterdir() if p.name.endswith('.js')]
    known = {p.name.removesuffix('.js'): p.read_text() for p in scripts}
    shared = known.pop('shared')
    if name not in known:
        raise ValueError(f'lab={name!r}: use one of {sorted(known)}')

    def data(m):
        return f'const {m[1]} = {(folder / m[2]).read_text().strip()}'

    code = re.sub(r"^import .* from '\./shared\.js'$", '', known[name], flags=re.M)
    return shared + re.sub(r"^import (\w+) from '\./(\w+\.json)'.*$", data, code, flags=re.M)


class Lab:
    "What a cell shows of a lab: the widget where one can be alive, or else its still picture"

    def __init__(
        self,
        name: str,
        html: str,  # the picture in a marked box
        widget: Any,  # widget of anywidget; None = it is not installed
    ) -> None:
        self.name, self.html, self.widget = name, html, widget

    def _repr_mimebundle_(self, **kwargs):
        data = {'text/html': self.html, 'text/plain': f'Lab: {self.name}'}
        if self.widget is None:
            return data
        view = 'application/vnd.jupyter.widget-view+json'
        return data | {view: dict(version_major=2, version_minor=0, model_id=self.widget.model_id)}


def lab(
    name: str,  # a file of the folder `labs`, without '.js'
    figure: 'Figure',  # matplotlib's, drawn by Python: what stands there without scripts
    says: str,  # what the figure shows, for whoever does not see it
    # where a slider or a formula begins, or 0 for what is left out: lr=6, formula='r', loss=0
    **begin: float | str,
) -> Lab:  # for the last line of a cell
    "A lab, alive where scripts run. Raises ValueError for an unknown lab"
    source, picture = lab_source(name), BytesIO()
    figure.savefig(picture, dpi=80, bbox_inches='tight')
    data = b64encode(picture.getvalue()).decode()
    values = {k: escape(v) if isinstance(v, str) else f'{v:g}' for k, v in begin.items()}
    more = ''.join(f' data-{knob}="{value}"' for knob, value in values.items())
    html = f'<div class="lab" data-lab="{name}"{more}>' + (
        f'<img alt="{escape(says)}" src="data:image/png;base64,{data}"></div>'
    )
    try:
        from anywidget import AnyWidget
        from traitlets import Dict
    except ImportError:  # the extra `notebook` has it
        return Lab(name, html, None)
    own = dict(_esm=source, begin=Dict(begin).tag(sync=True))
    return Lab(name, html, type('LabWidget', (AnyWidget,), own)())


def check(
    laws: Sequence[Callable[..., None]],  # each raises where the functions break it
    *functions: Callable[..., Any],
) -> str:  # 'correct', or 'not yet: ', the docstring of the first broken law, and what was found
    "What an exercise says of its reader's functions"
    for law in laws:
        try:
            law(*functions)
        except NotImplementedError as e:
            return f'not yet: {e}'
        except AssertionError as e:
            return f'not yet: {law.__doc__}: {e}'
        except Exception as e:  # whatever a first attempt may raise
            return f'not yet: {law.__doc__}: it raised {type(e).__name__}: {e}'
    return 'correct'


def expect(
    got: 'Tensor',  # what a function has returned
    want: 'Tensor',
    tol: float = 1e-6,  # tolerance of each element, absolute or relative
) -> None:
    "Raises AssertionError that names the first place where they differ"
    if not hasattr(got, 'shape') or got.shape != want.shape:
        found = f'a tensor {list(got.shape)}' if hasattr(got, 'shape') else repr(got)
        raise AssertionError(f'{found} instead of a tensor {list(want.shape)}')
    a, b = got.detach().double(), want.detach().double()
    wrong = ~((a == b) | ((a - b).abs() <= tol * b.abs().clamp(min=1)))  # NaN is wrong
    for at in wrong.nonzero().tolist()[:1]:
        place = f' at {at}' if at else ''
        raise AssertionError(f'{a[tuple(at)]:.6g}{place} instead of {b[tuple(at)]:.6g}')


def brief(
    value: Any,  # a number, a tensor, a record, or a list, tuple or dict of such
    digits: int = 3,  # number of digits that matter
) -> Any:
    "The same to be read: numbers with few digits, tensors as lists, no zero with a sign"
    if hasattr(value, 'tolist'):
        value = value.tolist()
    if isinstance(value, float):
        return float(f'{value:.{digits}g}') + 0.0
    if isinstance(value, dict):
        return {k: brief(v, digits) for k, v in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        own = [f.name for f in fields(value)]
        return replace(value, **{k: brief(getattr(value, k), digits) for k in own})
    if isinstance(value, (list, tuple)):
        return getattr(value, '_make', type(value))(brief(v, digits) for v in value)
    return value


def show_settings(
    config: type[Any],  # a dataclass of settings
    *names: str,  # those that the lesson has explained so far; none = all
) -> 'Markdown':
    "Settings of one part of a run, with their defaults and ranges"
    from IPython.display import Markdown

    from compassrl.config import TrainConfig
    from course.pages import settings_table

    run = vars(TrainConfig())
    at = next((f'{name}.' for name, part in run.items() if type(part) is config), '')
    return Markdown(settings_table(config(), at, names))


def show_source(
    *objects: type[Any] | Callable[..., Any],  # classes and functions
) -> 'Markdown':
    "The code that the next cells use"
    from IPython.display import Markdown

    code = '\n\n'.join(map(inspect.getsource, objects))
    return Markdown(f'```python\n{code}```')
