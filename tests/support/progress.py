"""What a run of the suite is doing: a line every now and then, and every failure at once.

It works with and without workers (`-n 2`) and writes plain lines, so a log reads like a terminal.
With -v pytest speaks itself.
"""

import threading
import time

import pytest

BEAT = 15  # seconds between two lines


def part(nodeid):
    "tests/algo/test_losses.py::test_x[y] -> algo/test_losses; a notebook is named itself"
    path, _, rest = nodeid.partition('::')
    if path.endswith('test_notebooks.py') and '[' in rest:
        return 'notebook ' + rest.partition('[')[2].rstrip(']')
    return path.removeprefix('tests/').removesuffix('.py')


def clock(seconds):
    return f'{int(seconds) // 60:2d}:{int(seconds) % 60:02d}'


class Progress:
    def __init__(self, write, now=time.monotonic):
        self.write, self.now, self.start = write, now, now()
        self.total, self.done, self.failed = 0, 0, 0
        self.running = {}  # test -> when it started
        self.over = threading.Event()

    def line(self):
        "One line: time, how far, and what is running for how long"
        now = self.now()
        if not self.total:
            return f'{clock(now - self.start)}  collecting'
        share = f'{100 * self.done // self.total:3d} %  {self.done} of {self.total}'
        if self.failed:
            share += f', {self.failed} failed'
        doing = [f'{part(n)} ({now - t:.0f} s)' for n, t in list(self.running.items())]
        return f'{clock(now - self.start)}  {share}  {", ".join(doing)}'

    def beat(self):
        while not self.over.wait(BEAT):
            self.write(self.line())

    def pytest_sessionstart(self):
        threading.Thread(target=self.beat, daemon=True).start()

    def pytest_collection_finish(self, session):
        self.total = self.total or len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self.total = len(ids)

    def pytest_runtest_logstart(self, nodeid):
        self.running[nodeid] = self.now()

    def pytest_runtest_logfinish(self, nodeid):
        self.running.pop(nodeid, None)
        self.done += 1

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed += 1
            self.write(f'{clock(self.now() - self.start)}  FAILED {report.nodeid}')

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report):
        "Counted, without a letter for each test"
        if hasattr(report, 'wasxfail'):
            return None
        if report.when == 'call' or report.outcome != 'passed':
            kind = 'error' if report.failed and report.when != 'call' else report.outcome
            return kind, '', ''

    def pytest_sessionfinish(self):
        self.over.set()


def register(config):
    "For the process that a person sees, unless it was asked to say more or less"
    worker = hasattr(config, 'workerinput')
    if worker or config.option.verbose or config.option.collectonly:
        return
    terminal = config.pluginmanager.get_plugin('terminalreporter')
    if terminal:
        config.pluginmanager.register(Progress(terminal.write_line), 'progress')
