"""Whole runs that are killed, stopped and asked to end, at random moments and at operations on the
disk: started again until they have ended, they end where the undisturbed run does"""

import signal
import time
from functools import cache, partial

import psutil
import pytest

from tests.support import chaos
from tests.support.file_events import Killer
from tests.support.whole_runs import BOUND_S, differences, start, whole_run


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "The undisturbed run of a kind; each is made once"
    return cache(lambda kind: whole_run(kind, tmp_path_factory.mktemp('whole')))


# ---- strikes


def send(processes, *signals):
    for p in processes:
        try:
            for s in signals:
                p.send_signal(s)
        except psutil.Error:
            pass  # it has ended


def one(choose):
    "A strike at one process of some"

    def strike(job, rng):
        there = choose(job)
        send([rng.choice(there)] if there else [], signal.SIGKILL)
        return bool(there)

    return strike


def killed(job, rng):
    send(job.own(), signal.SIGKILL)
    return True


def interrupted(job, rng):
    send(job.own(), signal.SIGINT)
    return True


def terminated(job, rng):
    send(job.own(), signal.SIGTERM, signal.SIGTERM)
    return True


def paused(job, rng):
    "All of it stands still for a while: a laptop that was closed"
    there = job.family()
    send(there, signal.SIGSTOP)
    time.sleep(2)
    send(there, signal.SIGCONT)
    return True


def slowed(job, rng):
    "Servers that run for one part in ten of the time"
    there = job.servers()
    for _ in range(20):
        send(there, signal.SIGSTOP)
        time.sleep(0.18)
        send(there, signal.SIGCONT)
        time.sleep(0.02)
    return bool(there)


def a_rank(job):
    return job.own()


def a_helper(job):
    return job.helpers()


def a_server(job):
    return job.servers()


a_rank_killed, a_judge_killed, a_server_killed = one(a_rank), one(a_helper), one(a_server)
ALL = [killed, killed, interrupted, terminated, paused]
STRIKES = {
    'one process': ALL,
    'judge workers': [a_judge_killed, a_judge_killed, killed],
    'two ranks': [*ALL, a_rank_killed, a_rank_killed, a_rank_killed],
    'two servers': [*ALL, a_server_killed, a_server_killed, slowed],
}
GOES_ON = paused, slowed  # nothing has ended


# ---- trials


def gone(processes):
    "Waits until none of them is there; the seconds that it took"
    began = time.monotonic()
    left = psutil.wait_procs(processes, BOUND_S)[1]
    return time.monotonic() - began, left


def as_torchrun(job):
    "Its agent ends the ranks of a machine where one has crashed; before they meet, nobody else can"
    others = job.own()
    send(others, signal.SIGTERM)
    send(psutil.wait_procs(others, 30)[1], signal.SIGKILL)


def strike(job, way, moment, rng):
    "(did it land?, seconds until all had ended, if it was to end)"
    job.wait(moment)
    there = job.family()
    if job.ended() or not way(job, rng):
        return False, None
    if way is a_rank_killed:
        as_torchrun(job)
    if way not in (killed, terminated, a_rank_killed):
        return True, None
    seconds, left = gone(there)
    assert not left, (way.__name__, left, job.said())
    return True, seconds


def endure(kind, folder, home, whole, rng, most):
    "Struck up to `most` times, started again until its end: (strikes, slowest end in seconds)"
    landed, slowest = [], 0.0
    for attempt in range(most + 20):
        job = start(kind, folder, home)
        try:
            way = rng.choice(STRIKES[kind])
            if attempt < most:
                hit, seconds = strike(job, way, rng.uniform(0, whole.seconds), rng)
                landed += [way.__name__] * hit
                slowest = max(slowest, seconds or 0)
            codes = job.wait(300)
            assert None not in codes, f'{landed}: it hangs\n{job.said()}'
            if not any(codes):
                return landed, slowest
            disturbed = attempt < most and hit and way not in GOES_ON
            # asked to stop, it ends after its step; all else was nobody's wish
            assert disturbed, f'{landed}: it ended by itself with {codes}\n{job.said()}'
            gone(job.family())
        finally:
            job.kill()
    raise AssertionError(f'{landed}: it never came to its end\n{job.said()}')


def noted(note, folder, whole, num, seconds):
    "In the table, then as an assertion"
    lost, differ = differences(folder, whole.folder)
    found = {'trials': num, 'lost or doubled': lost, 'differences': len(differ)}
    for k, v in (found | ({'slowest (s)': seconds} if seconds else {})).items():
        note(k, v)
    assert lost == 0 and not differ, (lost, differ)


def cases(name, apart=True, **numbers):
    "(kind, number of the trial), each with the mark of its row; `apart`: each kind has its own"
    for kind, (short, long) in numbers.items():
        kind = kind.replace('_', ' ')
        for n in range(chaos.trials(short, long)):
            mark = chaos.kind(f'{name}, {kind}' if apart else name)
            yield pytest.param(kind, n, marks=mark, id=f'{kind}-{n}'.replace(' ', '-'))


RUNS = dict(one_process=(1, 26), judge_workers=(0, 8), two_ranks=(1, 26), two_servers=(0, 14))


@pytest.mark.parametrize('kind, number', list(cases('random kills', **RUNS)))
def test_struck_at_random_moments(kind, number, whole, tmp_path, record_property):
    whole, rng = whole(kind), chaos.draw('random', kind, number)
    most = 3 if chaos.SHARE else 1
    folder = tmp_path / 'run'
    landed, seconds = endure(kind, folder, tmp_path / 'home', whole, rng, most)
    print(landed)
    noted(record_property, folder, whole, len(landed), seconds)


OPERATIONS = dict(one_process=(2, 50), two_ranks=(1, 36), two_servers=(0, 14))


@pytest.mark.parametrize('kind, number', list(cases('kills at file events', **OPERATIONS)))
def test_killed_at_an_operation_on_the_disk(kind, number, whole, tmp_path, record_property):
    "One kill, then a resume; the first operations are those before the first checkpoint"
    whole, rng = whole(kind), chaos.draw('operations', kind, number)
    rank = rng.randrange(len(whole.operations))
    n, half = rng.randint(1, whole.operations[rank]), rng.random() < 0.5
    folder, home = tmp_path / 'run', tmp_path / 'home'
    job = start(kind, folder, home, partial(Killer, n, half, under=folder), rank)
    try:
        codes = job.wait(300)
        assert any(codes), (n, codes, job.said())
        seconds, left = gone(job.family())
        assert not left, (n, left, job.said())
        job = start(kind, folder, home)
        assert not any(job.wait(300)), (n, job.said())
    finally:
        job.kill()
    noted(record_property, folder, whole, 1, seconds)
