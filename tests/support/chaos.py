"""How much is tried, by which seed, and the table of what came of it

`make test` makes the short form of every trial. `make chaos` makes the long form, prints a table
and writes it to tests/chaos/RESULTS.md."""

import os
import random
from dataclasses import dataclass

import pytest

from tests.support import ROOT

SHARE = float(os.environ.get('CHAOS', 0))  # Share of the long form; 0 = the short form
SEED = int(os.environ.get('SEED', 0))
TABLE = ROOT / 'tests/chaos/RESULTS.md'
KINDS = (
    'random kills, one process',
    'random kills, judge workers',
    'random kills, two ranks',
    'random kills, torchrun',
    'random kills, two servers',
    'random kills, one process ahead',
    'random kills, two ranks ahead',
    'random kills, two servers ahead',
    'random kills, one process in rounds',
    'random kills, two servers in rounds',
    'kills at file events, one process',
    'kills at file events, two ranks',
    'kills at file events, two servers',
    'kills at random moments, one source changed',
    'a rank at work is killed, stopped or hangs',
    'full disks',
    'clock jumps',
    'flipped bits, whole checkpoints',
    'flipped bits, sharded checkpoints',
    'lying, hanging and slow servers',
    'hostile programs',
    'hostile strings',
    'bad input',
)
HEAD = 'kind', 'tests', 'failed', 'trials', 'lost or doubled', 'differences', 'slowest (s)'
COUNTED = HEAD[3:6]


def trials(short: int, long: int) -> int:
    "How many are made"
    return max(short, round(SHARE * long))


def draw(*what) -> random.Random:
    "The numbers of one trial, the same for the same seed"
    return random.Random(' '.join(map(str, (SEED, *what))))


def kind(name):
    "Marks the tests of one row of the table"
    assert name in KINDS, name
    return pytest.mark.chaos(name)


@dataclass
class Row:
    "What is known of one kind"

    tests: int = 0
    failed: int = 0
    found: dict = None

    def add(self, failed, properties):
        self.tests, self.failed = self.tests + 1, self.failed + failed
        self.found = self.found or dict.fromkeys(HEAD[3:], None)
        for k, x in ({HEAD[3]: 1} | properties).items():  # a test is one trial, or says how many
            if k in COUNTED:
                self.found[k] = (self.found[k] or 0) + x
        if (s := properties.get(HEAD[6])) is not None:
            self.found[HEAD[6]] = max(self.found[HEAD[6]] or 0, s)

    def cells(self, name):
        found = dict(self.found)
        seconds = found[HEAD[6]]
        found[HEAD[6]] = None if seconds is None else f'{seconds:.1f}'
        return [name, self.tests, self.failed, *('' if x is None else x for x in found.values())]


def table(rows):
    lines = [HEAD, ['---'] * len(HEAD)] + [rows[k].cells(k) for k in KINDS if k in rows]
    return ''.join(f'| {" | ".join(map(str, line))} |\n' for line in lines)


class Results:
    "Hears every report; the process that a person sees has those of all workers"

    def __init__(self, config):
        self.config, self.rows, self.broken = config, {}, []

    def pytest_runtest_logreport(self, report):
        properties = dict(report.user_properties)
        over = report.when == 'call' or report.failed  # also before the call
        if 'chaos' not in properties or not over or report.skipped:
            return
        name = properties['chaos']
        self.rows.setdefault(name, Row()).add(report.failed, properties)
        if report.failed:
            self.broken.append(report.nodeid)

    def whole(self):
        "Was nothing left out?"
        by_path = self.config.args_source == pytest.Config.ArgsSource.ARGS
        return SHARE > 0 and not self.config.option.keyword and not by_path

    def pytest_terminal_summary(self, terminalreporter):
        if not SHARE or not self.rows:
            return
        terminalreporter.section(f'chaos, SEED={SEED}, CHAOS={SHARE:g}')
        terminalreporter.write(table(self.rows))
        for nodeid in self.broken:
            terminalreporter.write_line(
                f"again: make chaos SEED={SEED} CHAOS={SHARE:g} ARGS='{nodeid}'"
            )
        if self.whole():
            TABLE.write_text(page(self.rows))
            terminalreporter.write_line(f'written: {TABLE.relative_to(ROOT)}')


def page(rows):
    return (
        '# What `make chaos` found\n\n'
        f'Written by `make chaos SEED={SEED} CHAOS={SHARE:g}` from what it ran on {cores()} cores. '
        'CONTRIBUTING.md says what the rows are.\n\n' + table(rows)
    )


def cores():
    return len(os.sched_getaffinity(0))


def register(config):
    config.addinivalue_line('markers', 'chaos(kind): a row of tests/chaos/RESULTS.md')
    if not hasattr(config, 'workerinput'):
        config.pluginmanager.register(Results(config), 'chaos')


def setup(item):
    "A report knows its row"
    if mark := item.get_closest_marker('chaos'):
        item.user_properties.append(('chaos', mark.args[0]))
