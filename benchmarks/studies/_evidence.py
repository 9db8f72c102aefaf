"""Rules that all studies share: which seeds may judge, how many are needed, what an interval is,
and which version of the library made a trial."""

import ast
import hashlib
import json
import math
import statistics
import subprocess
from bisect import bisect_left
from datetime import UTC, datetime
from functools import cache
from itertools import accumulate, pairwise, takewhile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
LEDGER = Path(__file__).with_name('seeds.yml')
# what decides a trial; the command line, plans, reports and the sandbox do not
ROOMS = 'records.py config.py settings.py experience.py loop.py algo data model rollout train'
RESERVED = range(400, 500)  # they judge the project from outside


# ---- seeds


def ledger():
    "What `seeds.yml` says: who used which seeds for what"
    return yaml.safe_load(LEDGER.read_text())


def seeds_of(text):
    "`0-5, 9` as a set"
    found = set()
    for part in str(text).split(','):
        low, _, high = part.strip().partition('-')
        found |= set(range(int(low), int(high or low) + 1))
    return found


def allowed(seeds):
    "The seeds of a study, as a tuple. Raises ValueError for one that is kept for judging"
    kept = sorted(set(seeds) & set(RESERVED))
    if kept:
        raise ValueError(f'seed {kept[0]}: 400 to 499 judge from outside; no run may use them')
    return tuple(seeds)


# ---- intervals and power


@cache
def _angles(df, num=20_000):
    """Student's t is sqrt(df) tan(x) with the density cos(x)^(df-1) over the angle x: the share of
    all between 0 and each of `num` angles up to a right one, by trapezes"""
    width = math.pi / 2 / num
    heights = [math.cos(i * width) ** (df - 1) for i in range(num + 1)]
    sums = list(accumulate((a + b) / 2 for a, b in pairwise(heights)))
    return width, [0.0] + [x / sums[-1] for x in sums]


def t_quantile(p, df):
    "Of Student's t, p from 0.5 up to below 1"
    width, shares = _angles(df)
    i = bisect_left(shares, want := 2 * p - 1)
    part = (want - shares[i - 1]) / (shares[i] - shares[i - 1]) if i else 0.0
    return df**0.5 * math.tan((i - 1 + part) * width) if i else 0.0


def p_value(t, df):
    "Two-sided"
    width, shares = _angles(df)
    return 1 - shares[min(round(math.atan(abs(t) / df**0.5) / width), len(shares) - 1)]


def holm(p_values, level=0.05):
    "Which of several tests reject together (Holm, 1979)"
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    kept = takewhile(lambda k: p_values[order[k]] <= level / (len(order) - k), range(len(order)))
    return {order[k] for k in kept}


def half_width(sd, n):
    "Of the 95 % interval of a mean over n seeds"
    return t_quantile(0.975, n - 1) * sd / n**0.5


def interval(values):
    "Mean and 95 % interval by Student's t: a bootstrap of so few is too narrow"
    mean, half = statistics.fmean(values), half_width(statistics.stdev(values), len(values))
    return [mean, mean - half, mean + half]


def chance(found, n):
    "Two-sided p of 0 for the mean of n values, from the mean and its 95 % interval"
    mean, low, high = found
    t = mean / ((high - low) / 2 or 1) * t_quantile(0.975, n - 1)
    return p_value(t, n - 1)


def adjusted(values, known):
    """Mean and 95 % interval of values once a line through what was known before is taken off: the
    same mean, a narrower interval where the line explains some of the spread; and its slope"""
    n = len(values)
    line = statistics.linear_regression(known, values)
    rest = [v - line.slope * k - line.intercept for v, k in zip(values, known)]
    spread = (sum(x * x for x in rest) / (n - 2)) ** 0.5
    mean, half = statistics.fmean(values), t_quantile(0.975, n - 2) * spread / n**0.5
    return dict(points=[mean, mean - half, mean + half], half=half, slope=line.slope, n=n)


def would_see(half, n):
    "The smallest effect that such a design sees with 80 % power at 5 %, from its half-width"
    return half * (1 + t_quantile(0.8, n - 1) / t_quantile(0.975, n - 1))


def seeds_needed(sd, half):
    "The fewest seeds whose interval is expected to be no wider, said before a study runs"
    return next(n for n in range(2, 10_000) if half_width(sd, n) <= half)


# ---- versions


@cache
def library(root=ROOT):
    "Hash of the code that decides a trial; comments and docstrings do not count"
    found = hashlib.sha256()
    for room in ROOMS.split():
        at = root / 'compassrl' / room
        for path in sorted(at.rglob('*.py')) if at.is_dir() else [at] * at.exists():
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):
                body = getattr(node, 'body', None)
                if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
                    if isinstance(body[0].value, ast.Constant):
                        node.body = body[1:]
            found.update(f'{path.relative_to(root)} {ast.dump(tree)}'.encode())
    return found.hexdigest()[:8]


def version(result):
    "What a stored result is of: commit, day, library, and a hash of its settings"
    call = ['git', '-C', str(ROOT), 'rev-parse', '--short=8', 'HEAD']
    commit = subprocess.run(call, capture_output=True, text=True).stdout.strip()
    settings = json.dumps(result.get('settings'), sort_keys=True)
    config = hashlib.sha256(settings.encode()).hexdigest()[:8]
    of = {r.get('library') for r in result.get('runs', ()) if isinstance(r, dict)}
    if len(of) > 1:
        raise SystemExit(f'{result["name"]}: trials of {len(of)} versions of the library, not kept')
    date = datetime.now(UTC).date().isoformat()
    return dict(commit=commit, date=date, library=next(iter(of), None) or library(), config=config)


def one_version(folder, names):
    "Ends a study that holds trials of another version of the library under the same settings"
    others = {p.stem.rpartition('-') for p in folder.glob('*-*-*-*.json')}
    found = sorted({v for name, _, v in others if name in names and v != library()})
    if found:
        raise SystemExit(
            f'{folder}: trials of library {", ".join(found)}, this is {library()}: move the folder '
            'away to start over, or check out the commit that made them'
        )
