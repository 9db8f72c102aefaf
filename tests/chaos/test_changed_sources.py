"""A run that is killed at a random moment. If one of its sources is another then, a resume refuses
and names it; put back, or if nothing changed, the run comes to the end of the undisturbed one"""

import os
import re
import shutil
import signal
import time

import psutil
import pytest

from tests.chaos.test_kills import noted
from tests.runs.test_identity import FLAGS, write_sources
from tests.runs.test_run import command
from tests.support import chaos
from tests.support import fork_server as forked
from tests.support.whole_runs import ENV, Whole

STEPS = ['--steps', '6', '--trace-every', '1', '--cold-start.steps', '20', '--group-size', '2']
STEPS += ['--zero-variance.screen-samples', '4', '--rewards.correct-at', '0.4']
END = 'model/model.safetensors'  # what comes after it, the report, is made again
SOURCES = (  # without the reward's own file: the run has a copy of it, which is one source more
    *('train.jsonl', 'test.jsonl', 'run/rewards/reward.py', 'prices.py', 'tables/eggs.json'),
    *('loss.py', 'words.json', 'model/tokenizer.json', 'model/chat_template.jinja'),
    *('model/tokenizer_config.json', 'model/config.json', 'model/model.safetensors'),
    *('run/config.json', 'run/start/tokenizer.json', 'run/start/model.safetensors'),
    *('run/start/config.json', 'run/cold_start.jsonl', 'run/metrics.jsonl', 'run/trace.jsonl'),
    *('run/eval_before.json', 'run/screen.json'),
)
SETTING = rb'"(?:lr|seed|temperature|max_tokens|correct_at)": (.)'  # steps may change


def alone(words, home):
    "A process group of its own, as a shell gives it to a command"
    os.setpgid(0, 0)
    command(words, home)


def begun(home, *words):
    log = home / f'log-{time.monotonic_ns()}'
    return forked.start(log, alone, list(words), home, env=ENV), log


def ended(home, *words):
    "Its exit code, and what it said"
    p, log = begun(home, *words)
    p.join(300)
    return p.exitcode, log.read_text() + log.with_suffix('.err').read_text()


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "The sources, an undisturbed run, and the CPU seconds from its settings to its end"
    home = tmp_path_factory.mktemp('whole')
    write_sources(home)
    shutil.copytree(home, clean := tmp_path_factory.mktemp('sources') / 'home')
    p, log = begun(home, 'train', *FLAGS, *STEPS, '--run-dir', 'run')
    first, last = 0.0, 0.0
    while p.exitcode is None:
        if not (home / 'run' / END).exists():
            last = cpu_s(p) or last
            first = first if (home / 'run/config.json').exists() else last
        time.sleep(0.01)
    assert p.exitcode == 0, log.with_suffix('.err').read_text()
    return clean, Whole(home / 'run', [], {}), last - first


def cpu_s(p):
    try:
        return sum(psutil.Process(p.pid).cpu_times()[:2])
    except psutil.Error:
        return None


def killed(clean, home, after_s):
    """SIGKILL of the whole group, so many CPU seconds after its settings were written. A run needs
    fewer of them where less is at work beside it: if it has ended, it is killed anew and sooner"""
    while True:
        shutil.copytree(clean, home)
        p, log = begun(home, 'train', *FLAGS, *STEPS, '--run-dir', 'run')
        while p.exitcode is None and not (home / 'run/config.json').exists():
            time.sleep(0.002)
        first = cpu_s(p) or 0
        while p.exitcode is None and (cpu_s(p) or 0) < first + after_s:
            time.sleep(0.002)
        if p.exitcode is None:
            os.killpg(p.pid, signal.SIGKILL)
            return p.join()
        assert p.exitcode == 0, log.with_suffix('.err').read_text()
        shutil.rmtree(home)
        after_s *= 0.7


def times(folder):
    found = (p for p in folder.rglob('*') if p.is_file() and p.name != '.lock')
    return {p: p.stat().st_mtime_ns for p in found}


def changed(home, rng):
    "One byte of one source: its name and what it was. Of a file that grows, a row that counts"
    there = [n for n in SOURCES if (home / n).is_file() and (home / n).stat().st_size]
    done = sorted((home / 'run/checkpoints').glob('step-*[1-9]'))
    taught = sorted((home / 'run/cold_start').glob('step-*'))
    counts = dict.fromkeys(('run/metrics.jsonl', 'run/trace.jsonl'), done)
    counts['run/cold_start.jsonl'] = taught or (home / 'run/start').exists()
    name = rng.choice([n for n in there if counts.get(n, True)])
    path, was = home / name, (home / name).read_bytes()
    at = rng.randrange(len(was.split(b'\n')[0]) if name in counts else len(was))
    if name == 'run/config.json':  # a digit that counts
        at = rng.choice([m.start(1) for m in re.finditer(SETTING, was)])
    path.write_bytes(was[:at] + bytes([was[at] ^ 1 << rng.randrange(7)]) + was[at + 1 :])
    return path, was


@chaos.kind('kills at random moments, one source changed')
@pytest.mark.parametrize('number', range(chaos.trials(0, 200)))
def test_a_source_changed_after_a_kill(number, whole, tmp_path, record_property):
    "Every second one changes nothing"
    (clean, run, seconds), rng = whole, chaos.draw('sources', number)
    killed(clean, home := tmp_path / 'home', rng.uniform(0, seconds))
    if number % 2 == 0:
        path, was = changed(home, rng)
        before = times(home / 'run')
        code, said = ended(home, 'resume', 'run')
        assert code == 1 and path.name in said and 'Traceback' not in said, (path, said)
        assert before == times(home / 'run'), 'a refusal leaves all as it is'
        path.write_bytes(was)
    code, said = ended(home, 'resume', 'run')
    assert code == 0, said
    assert number % 2 or 'same data, same code, same model' in said, said
    noted(record_property, home / 'run', run, 1, None)
