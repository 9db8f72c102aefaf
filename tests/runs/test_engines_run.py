"A whole run on the real engines: two Megatron-Core ranks, two vLLM servers; kills on the way"

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip('vllm')
pytest.importorskip('megatron.core')

from compassrl.model.pretrained import from_pretrained  # noqa: E402
from course.checkpoints import latest_sharded  # noqa: E402
from tests.support.labs import expect_the_logged_losses  # noqa: E402

STEPS = 7
# learned within a few steps, by a policy that knows next to nothing: no long cold start
REWARD = """
def low(text, answer):
    return sum(c in '01234' for c in text) / max(1, len(text))
"""
TORCHRUN = [
    Path(sys.executable).parent / 'torchrun',
    '--nproc-per-node',
    '2',
    '--rdzv-backend',
    'c10d',
    '--rdzv-endpoint',
    'localhost:0',
    '-m',
    'compassrl',
]


def start(log, *args):
    "A process group of its own; what it prints goes to `log`"
    with open(log, 'ab') as f:
        return subprocess.Popen(
            list(map(str, [*TORCHRUN, *args])),
            stdout=f,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | dict(TQDM_DISABLE='1', OMP_NUM_THREADS='1'),
        )


def rows(folder):
    path = folder / 'metrics.jsonl'
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def until(what, p, log, seconds=600):
    deadline = time.monotonic() + seconds
    while not what():
        assert p.poll() is None, f'the run ended with {p.returncode}:\n{log.read_text()[-4000:]}'
        assert time.monotonic() < deadline, f'nothing for {seconds} s:\n{log.read_text()[-4000:]}'
        time.sleep(0.2)


def is_back(folder):
    "A checkpoint knows of the loss, and the step after it began with all servers"
    lost = [m['step'] for m in rows(folder) if m['replicas_lost']]
    kept = latest_sharded(folder / 'checkpoints')
    return lost and kept and int(kept.name[-6:]) >= lost[0] < len(rows(folder))


def servers(p):
    "Children of supervisors"

    def supervises(c):
        try:
            return 'supervise_command' in ' '.join(c.cmdline())
        except psutil.Error:
            return False

    found = family(p)
    supervisors = {c.pid for c in found if supervises(c)}
    return [c for c in found if c.ppid() in supervisors]


def family(p):
    return psutil.Process(p.pid).children(recursive=True)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    "One server killed, then everything; resumed to its end. The folder, and what was seen"
    home = tmp_path_factory.mktemp('engines')
    folder, log, reward = home / 'run', home / 'log.txt', home / 'reward.py'
    reward.write_text(REWARD)
    p = start(
        log,
        'train',
        'engines-cpu',
        '--steps',
        STEPS,
        '--save-every',
        2,
        '--cold-start.steps',
        60,
        '--cold-start.num-solutions',
        512,
        '--rewards.function',
        f'{reward}:low',
        '--optim.lr',
        '1e-3',
        '--optim.warmup-steps',
        2,
        '--eval-k',
        4,
        '--trace-every',
        3,
        '--run-dir',
        folder,
    )
    everyone = []
    try:
        until(lambda: rows(folder), p, log)
        first = servers(p)
        first[0].send_signal(signal.SIGKILL)
        until(lambda: is_back(folder), p, log)
        again, everyone = servers(p), family(p)
        for c in (p, *everyone):  # torchrun, ranks, servers: all at once
            try:
                os.kill(c.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        p.wait()
        done = len(rows(folder))
        p = start(log, 'resume', folder)
        p.wait(900)
        assert p.returncode == 0, log.read_text()[-6000:]
    finally:
        for c in everyone + (family(p) if p.poll() is None else []):
            try:
                c.kill()
            except psutil.Error:
                pass
        p.kill()
    return dict(folder=folder, log=log.read_text(), first=first, again=again, done=done)


def test_two_servers_and_one_came_back(run):
    assert len(run['first']) == len(run['again']) == 2
    assert run['first'][0].pid not in {c.pid for c in run['again']}


def test_every_step_is_there_once(run):
    "Across the kills; each step has all of its samples"
    found = rows(run['folder'])
    assert [m['step'] for m in found] == list(range(1, STEPS + 1)) and run['done'] < STEPS
    assert all(m['samples'] >= 32 * 8 and m['skipped_frac'] == 0 for m in found)


def test_it_learned(run):
    "From less than 0.4 to 0.64 and more: three seeds on the embedded engines, one on these"
    before, after = (
        json.loads((run['folder'] / f'eval_{w}.json').read_text())['reward_mean']
        for w in ('before', 'after')
    )
    assert after > before + 0.1, (before, after)


def test_the_engines_agree(run):
    "vLLM and Megatron-Core in fp32: the same log-probs to rounding, the same routes"
    for m in rows(run['folder']):
        assert m['sync_bytes'] > 10**5 and 0 < m['time_sync_s'] < m['time_step_s']
        assert (
            m['rollout_train_gap'] < 1e-5
            and m['routes_valid_frac'] == 1
            and m['tokens_agree_frac'] > 0.999
        )


def test_the_trace_recomputes_the_logged_loss(run):
    "Before the kills and after them, of what two ranks have added up"
    assert expect_the_logged_losses(run['folder']) == 3


def test_lengths_were_predicted(run):
    "The error is in every step's metrics; the history is kept and goes on after the kill"
    found = rows(run['folder'])
    assert all(
        -1 <= m['length_spearman'] <= 1 and m['length_log_error'] < 3 for m in found
    ) and any(m['replicas_lost'] == 1 for m in found)
    learned = json.loads((run['folder'] / 'rollout.json').read_text())
    history = learned[f'step-{STEPS:06}']['lengths']['history']
    assert len(history) > 32 * (STEPS - 1) * 0.9, 'prompts of all steps, before and after'


def test_who_did_what(run):
    timings = json.loads((run['folder'] / 'timings.json').read_text())
    assert {t['replica'] for t in timings['samples']} == {0, 1} and (
        run['folder'] / 'gantt.png'
    ).exists()
    assert 'gantt.png' in (run['folder'] / 'report.md').read_text()


def test_what_it_leaves(run):
    "A model that opens, a report, and no process"
    from_pretrained(run['folder'] / 'model')
    assert (run['folder'] / 'report.md').exists() and (run['folder'] / 'curves.png').exists()
    alive = [
        c
        for c in psutil.process_iter(['cmdline'])
        if str(run['folder'].parent) in ' '.join(c.info['cmdline'] or [])
    ]
    assert alive == []
