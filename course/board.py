"""The scoreboard's rules: what a row of nbs/scoreboard.yml measured, and the verdict on its claim.

A row holds no measured number. It names a stored result of benchmarks/results, the value that it
is compared with, and the side of that value on which the claim wants it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

if TYPE_CHECKING:
    from IPython.display import Markdown

__all__ = [
    'HOLDS',
    'REVERSE',
    'MISSED',
    'UNSEEN',
    'UNSURE',
    'BUILT',
    'NO',
    'NEVER',
    'SEEN',
    'SURE',
    'LOOKS',
    'evidence',
    'read_board',
    'stored',
    'effect',
    'than',
    'trials',
    'judged',
    'verdict',
    'chances',
    'sure',
    'in_unit',
    'said',
    'result',
    'measured',
    'open_to',
    'theirs',
    'Axis',
    'axis',
    'drawings',
    'lesson',
    'table',
    'verdicts',
]

ROOT = Path(__file__).resolve().parents[1]
RESULTS, STUDIES = ROOT / 'benchmarks' / 'results', ROOT / 'benchmarks' / 'studies'
NBS, PAGE = ROOT / 'nbs', 'studies/scoreboard.ipynb'
HOLDS, REVERSE, MISSED = 'holds here', 'the reverse here', 'not reached here'
UNSEEN, UNSURE, BUILT = 'not seen here', 'cannot tell', 'by construction'
NO, NEVER = 'not measured yet', 'not testable on a CPU'
SEEN = '†'  # after a result whose seeds have shaped a default
SURE = '★'  # after a verdict that also stands after the correction for chance
EDGE = 10  # points of accuracy; an arrow leads to what lies farther from zero
LOOKS = {HOLDS: 'good', REVERSE: 'bad', MISSED: 'bad', UNSEEN: 'unseen', UNSURE: 'unsure'}
POINTS = 'accuracy', 'tokens', 'groups', 'pairs'  # percentage points of these
LEVELS = dict(factor='a factor of {}', share='a share of {}', percent='{} %')
OURS = 'our reading', 'our question'  # sources of claims that are not in the paper's words
LEARNS = 'accuracy', 'quality'  # units of what a policy has learned
KEYS = {  # what stands below a small table, by what its cells say
    HOLDS: 'Holds: the whole interval is on the side of the claim.',
    REVERSE: 'The reverse: the whole interval is on the other side.',
    UNSEEN: 'Not seen: there may be no effect; a large one for the claim is ruled out.',
    UNSURE: 'Cannot tell: there may be no effect, and there may be a large one for the claim.',
    'no interval': 'No interval: there is one number, and it cannot confirm a claim.',
    BUILT: 'By construction: a correct program could not have come out otherwise.',
    MISSED: 'Not reached: what was measured stays below the amount that is claimed.',
    'excludes': '“Excludes x”: the interval rules out x and more.',
    'would see': '“Would see x”: four of five such studies would see an effect of x.',
    'fresh seeds': 'Fresh seeds: nobody had looked at them before.',
    'one learning rate': 'One learning rate: both sides had the same.',
}

Row = dict[str, Any]  # a claim in nbs/scoreboard.yml
Found = tuple[float, float | None, float | None]  # mean, low, high of the 95 % interval


# ---- what is stored


@cache
def evidence() -> Any:  # the module benchmarks/studies/_evidence.py
    "Rules that all studies share: Student's t, power, Holm's correction, the ledger of seeds"
    spec = spec_from_file_location('_evidence', STUDIES / '_evidence.py')
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def _shaped() -> frozenset[str]:
    return frozenset(evidence().ledger()['shaped'])


@cache
def _result(name: str) -> dict[str, Any]:
    path = RESULTS / f'{name}.json'
    return json.loads(path.read_text()) if path.exists() else {}


def stored(
    name: str,  # a file in benchmarks/results, without '.json'
    where: str,  # keys with dots between: 'contrasts.espo_gspo.points'
) -> Any:
    "One value of a benchmark's result; None where there is none yet"
    found: Any = _result(name)
    for key in where.split('.'):
        if not isinstance(found, dict) or key not in found:
            return None
        found = found[key]
    return found


def read_board() -> list[dict[str, Any]]:  # groups, each with a `name` and its `rows`
    "nbs/scoreboard.yml; what is not stored yet is replaced by what stands for it"
    board = yaml.safe_load((NBS / 'scoreboard.yml').read_text())
    for row in (row for group in board['groups'] for row in group['rows']):
        if 'until' in row and stored(*row['effect']) is None:
            row |= row['until']
            row.pop('control', None)
        if 'effect' in row:
            row.setdefault('size', board['size'])
            row.setdefault('unit', board['unit'])
    return board['groups']


# ---- the rule


def effect(row: Row) -> Found | None:
    "Mean, low and high; low and high are None for a result without an interval"
    value = stored(*row['effect'])
    if value is None:
        return None
    mean, low, high = value if isinstance(value, list) else (value, None, None)
    if not row.get('flip'):
        return mean, low, high
    return -mean, None if high is None else -high, None if low is None else -low


def than(row: Row) -> float:
    "What a claim is compared with: a number, or another stored result"
    value = row.get('reach', row.get('than', 0))
    return stored(*value['key']) if isinstance(value, dict) else value


def trials(row: Row) -> int:
    "How many trials the interval is of"
    name, where = row['effect']
    own = stored(name, f'{where.rpartition(".")[0]}.n')
    return own or row.get('n') or len(stored(name, 'settings.seeds'))


def judged(
    found: Found,
    side: str,  # 'above' or 'below': where the claim wants it
    than: float = 0,  # the value that it is compared with
    amount: bool = False,  # is `than` the amount that is claimed?
    size: float = 0,  # an effect is large from here on
) -> str:
    "A verdict in words, from mean, low and high alone"
    sign = 1 if side == 'above' else -1
    mean, *ends = (sign * (x - than) for x in found if x is not None)
    if not ends:  # one number: it can stay behind, it cannot hold
        return MISSED if amount and mean < 0 else UNSURE
    if min(ends) > 0:
        return HOLDS
    if max(ends) < 0:
        return MISSED if amount else REVERSE
    return UNSEEN if not amount and max(ends) < size else UNSURE


def verdict(row: Row) -> str:
    "The verdict on a row's claim, one of eight"
    if 'cannot' in row:
        return NEVER
    value = None if 'missing' in row else effect(row)
    if value is None or 'control' in row and min(stored(*row['control'])) <= 0:
        return NO
    if 'built' in row:
        return BUILT
    return judged(value, row['side'], than(row), 'reach' in row, row['size'])


# ---- how sure a verdict is


def chances(rows: Iterable[Row]) -> list[tuple[Row, float]]:
    "The differences between seeds that could go either way; each with its two-sided p"
    may_err = {HOLDS, REVERSE, UNSEEN, UNSURE}
    found = []
    for row in rows:
        value = effect(row) if 'effect' in row and 'n' not in row else None
        if value and value[1] is not None and verdict(row) in may_err:
            away = [x - than(row) for x in value if x is not None]
            found.append((row, evidence().chance(away, trials(row))))
    return found


def sure(rows: Iterable[Row]) -> list[Row]:
    "The rows whose verdict also stands after Holm's correction for chance"
    tested = chances(rows)
    return [tested[i][0] for i in sorted(evidence().holm([p for _, p in tested]))]


# ---- the words


def in_unit(
    row: Row,
    x: float,  # an effect: a distance from `than` to the claim's side
) -> str:
    "An effect with its unit; in units of LEVELS the value that it leads to"
    unit = row['unit']
    level = than(row) + (x if row['side'] == 'above' else -x)
    value = format(level if unit in LEVELS else x, row['form'].replace('+', ''))
    if unit in LEVELS:
        return LEVELS[unit].format(value)
    return f'{value} {"points" if unit in POINTS else f"of {unit}"}'


def said(row: Row) -> str:
    "The verdict in bold, and what it leaves open"
    word = verdict(row)
    value = effect(row) if word in (UNSEEN, UNSURE) else None
    if value is None:
        return f'**{word}**'
    _, low, high = value
    if low is None or high is None:
        return f'**{word}** (no interval)'
    if word == UNSEEN:
        most = high - than(row) if row['side'] == 'above' else than(row) - low
        return f'**{word}** (excludes {in_unit(row, most)})'
    if 'reach' in row:
        return f'**{word}** (whether it reaches {in_unit(row, 0)})'
    least = evidence().would_see((high - low) / 2, trials(row))
    return f'**{word}** (would see {in_unit(row, least)})'


def result(row: Row) -> str:
    "What was found, with the numbers of the stored result"
    value = effect(row) if 'effect' in row else None
    if value is None:
        return row.get('cannot') or row.get('missing') or 'The result is not stored yet.'
    mean, low, high = (None if x is None else format(x, row['form']) for x in value)
    value = mean if low is None else f'{mean} [{low}, {high}]'
    text = row['measured'].format(effect=value, than=format(than(row), row['form']))
    if 'control' in row and verdict(row) == NO:
        control = [format(x, row['form']) for x in stored(*row['control'])]
        text += '; but the control is at {} [{}, {}]'.format(*control)
    return text


def measured(row: Row) -> str:
    "What was found and of what; marked where the seeds have shaped a default"
    if 'effect' not in row or effect(row) is None:
        return result(row)
    mark = f' {SEEN}' * (row['effect'][0] in _shaped())
    return f'{result(row)}{mark} ({row["scale"]})'


def open_to(row: Row) -> str:
    "What would have made a claim fail that holds; why nothing could; or why it cannot hold"
    word = verdict(row)
    if word != BUILT:
        return row['fails'] if word == HOLDS else ''
    value = effect(row)
    away = value[0] - than(row) if value else 0
    against = away < 0 if row['side'] == 'above' else away > 0
    return f'{"it cannot hold" if against else "nothing"}: {row["built"]}'


def theirs(row: Row) -> str:
    "The paper's number and where it is from; for a claim without one whose words it is"
    if 'theirs' in row:
        return f'{row["theirs"]} ({row["source"]})'
    return row['source'] if row['source'] in OURS else f'no number ({row["source"]})'


# ---- the drawings: a line with the result on it, the same line for all rows of a unit


class Axis(NamedTuple):
    low: float
    high: float
    log: bool

    def at(self, x: float) -> float:
        "Percent of the way from the left end"
        low, high, x = map(math.log, (self.low, self.high, x)) if self.log else (*self[:2], x)
        return 100 * (x - low) / (high - low)


def axis(
    rows: list[Row],  # all have one unit and a result
) -> Axis:
    "From a round number below to one above all results and what they are compared with"
    values = [x for row in rows for x in (than(row), *(effect(row) or ())) if x is not None]
    low, high = min(values), max(values)
    if rows[0]['unit'] == 'factor':
        round_ones = [m * 10.0**k for k in range(-3, 4) for m in (1, 1.5, 2, 3, 5, 7)]
        ends = max(x for x in round_ones if x <= low), min(x for x in round_ones if x >= high)
        return Axis(*ends, log=True)
    if rows[0]['unit'] == 'accuracy':
        low, high = max(low, -EDGE), min(high, EDGE)
    width = (high - low) / 6
    step = next(m * 10.0**k for k in range(-4, 4) for m in (1, 2, 5) if m * 10.0**k >= width)
    return Axis(step * math.floor(low / step), step * math.ceil(high / step), log=False)


def _mark(row: Row, x: float) -> str:
    "A number on the axis of a row"
    sign = '+' if '+' in row['form'] and x else ''
    share = row['unit'] == 'share'
    return f'{100 * x if share else x:{sign}.3g}' + '%' * (share or row['unit'] == 'percent')


def _labels(row: Row, on: Axis) -> str:
    "Both ends and the value that a result is compared with, which counts more"
    middle = on.at(than(row))
    ends = [(p, x) for p, x in ((0, on.low), (100, on.high)) if abs(p - middle) > 16]
    return ''.join(
        f'<i data-says="{_mark(row, x)}" style="--at:{p:.1f}%"></i>'
        for p, x in [(middle, than(row)), *ends]
    )


def _drawing(row: Row, on: Axis) -> str:
    "The result of a row on an axis; all its numbers stand next to it, so it holds no text"
    value, (mean, *ends) = on.at(than(row)), (x for x in effect(row) or () if x is not None)
    left, right = (value, 100) if row['side'] == 'above' else (0, value)
    parts = [f'<rect class="side" x="{left:.1f}%" width="{right - left:.1f}%" height="100%"/>']
    lines = [('axis', 0, 100, '50%', '50%'), ('value', value, value, '0', '100%')]
    if ends:
        low, high = (min(max(on.at(x), 0), 100) for x in ends)
        lines.append(('range', low, high, '50%', '50%'))
    parts += [
        f'<line class="{name}" x1="{a:.1f}%" x2="{b:.1f}%" y1="{y}" y2="{z}"/>'
        for name, a, b, y, z in lines
    ]
    if 0 <= on.at(mean) <= 100:
        parts.append(f'<circle cx="{on.at(mean):.1f}%" cy="50%" r="3"/>')
    for at, path, beyond in (
        (0, 'M0 1L-7 8L0 15Z', min([mean, *ends]) < on.low),
        (100, 'M0 1L7 8L0 15Z', max([mean, *ends]) > on.high),
    ):
        if beyond:
            parts.append(
                f'<svg class="more drawing" x="{at}%" overflow="visible"><path d="{path}"/></svg>'
            )
    return (
        f'<span class="interval {LOOKS[verdict(row)]}" aria-hidden="true">'
        f'<svg class="drawing">{"".join(parts)}</svg>{_labels(row, on)}</span>'
    )


def drawings(
    rows: list[Row],  # a chapter
) -> list[str]:  # HTML; '' where nothing was tested
    "The result of each row; rows of one unit share an axis"
    drawn = [row for row in rows if verdict(row) in LOOKS]
    units = {row['unit'] for row in drawn}
    axes = {unit: axis([row for row in drawn if row['unit'] == unit]) for unit in units}
    return [_drawing(row, axes[row['unit']]) if row in drawn else '' for row in rows]


# ---- tables


def _title(page: str) -> str:
    cells = json.loads((NBS / page).read_text())['cells']
    return ''.join(cells[0]['source']).splitlines()[0].removeprefix('# ')


def lesson(
    row: Row,
    here: str = 'studies',  # folder in nbs of the page that shows it
) -> str:
    "A link to the notebook of a row; '' for a row without one"
    if 'lesson' not in row:
        return ''
    page = f'{row["lesson"]}.ipynb'
    return f'[{_title(page)}]({os.path.relpath(page, here or ".")})'


def table(cells: Iterable[Iterable[str]]) -> str:
    "Lines of cells as a Markdown table; the first line is its head"
    head, *body = map(list, cells)
    return '\n'.join(f'| {" | ".join(c)} |' for c in [head, ['---'] * len(head), *body])


def verdicts(
    step: str,  # a notebook as nbs/course.yml names it: 'algo/zero_variance'
) -> Markdown:  # a small table and a link to the scoreboard, for the last line of a cell
    "Whether an idea paid here: what was learned first. Raises ValueError for an unknown step"
    from IPython.display import Markdown

    rows = [row for group in read_board() for row in group['rows'] if 'step' in row]
    mine = [row for row in rows if row['step'] == step]
    if not mine:
        known = sorted({row['step'] for row in rows})
        raise ValueError(f'step={step!r}: no row of nbs/scoreboard.yml has it, use one of {known}')
    mine.sort(key=lambda row: (row.get('unit') not in LEARNS, 'reach' in row))
    cells = [(row['claim'], theirs(row), measured(row), said(row)) for row in mine]
    text = table([('claim', 'what the paper says', 'what we measured', 'verdict'), *cells])
    board = os.path.relpath(PAGE, os.path.dirname(step) or '.')
    key = [says for mark, says in KEYS.items() if re.search(rf'[(* ]{re.escape(mark)}[* ),]', text)]
    first = 'The brackets are 95 % intervals: about 19 of 20 such intervals hold the true value.'
    if SEEN in text:
        first += f' {SEEN}: seeds seen before a setting was chosen, so trust it less.'
    means = '\n'.join(f'- {line}' for line in key)
    return Markdown(
        f'{text}\n\n{first} The [scoreboard]({board}) has all claims of the paper, and how a '
        'verdict is made.\n\n<details><summary>What the verdicts mean</summary>\n\n'
        f'{means}\n\n</details>'
    )
