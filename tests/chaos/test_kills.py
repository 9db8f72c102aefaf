"""Whole runs that are killed, stopped and asked to end, at random moments and at operations on the
disk: started again until they have ended, they end where the undisturbed run does"""

import signal
import time
from functools import cache, partial

import psutil
import pytest

from tests.support import chaos
from tests.support.file_events import Killer
from tests.support.whole_runs import BOUND_S, Job, differences, start, whole_run


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "The undisturbed run of a kind; each is made once"
    return cache(lambda kind: whole_run(kind, tmp_path_factory.mktemp('whole')))


# ---- strikes


def send(processes, *signals):
    "Was one of them alive?"
    hit = False
    for p in processes:
        try:
            alive = p.status() != psutil.STATUS_ZOMBIE
            for s in signals:
                p.send_signal(s)
            hit |= alive
        except psutil.Error:
            pass  # it has ended
    return hit


def one(choose):
    "A strike at one process of some"

    def strike(job, rng):
        there = choose(job)
        return send([rng.choice(there)] if there else [], signal.SIGKILL)

    strike.__name__ = f'one of {choose.__name__} killed'
    return strike


def killed(job, rng):
    return send(job.own(), signal.SIGKILL)


def all_killed(job, rng):
    return send([*job.own(), *job.helpers()], signal.SIGKILL)


def interrupted(job, rng):
    return send(job.own(), signal.SIGINT)


def terminated(job, rng):
    return send(job.own(), signal.SIGTERM, signal.SIGTERM)


def asked_once(job, rng):
    return send(job.own(), signal.SIGTERM)


def paused(job, rng):
    "All of it stands still for a while: a laptop that was closed"
    there = job.family()
    send(there, signal.SIGSTOP)
    time.sleep(2)
    return send(there, signal.SIGCONT)


def slowed(job, rng):
    "Servers that run for one part in ten of the time"
    there = job.servers()
    for _ in range(20):
        send(there, signal.SIGSTOP)
        time.sleep(0.18)
        send(there, signal.SIGCONT)
        time.sleep(0.02)
    return bool(there)


a_rank_killed, a_judge_killed, a_server_killed = one(Job.own), one(Job.helpers), one(Job.servers)
the_sampler_killed = one(Job.helpers)  # without it the run ends
a_rank_of_torchrun_killed = one(Job.ranks)
ALL = [killed, killed, interrupted, terminated, paused]
STRIKES = {
    'one process': ALL,
    'one process ahead': [*ALL, the_sampler_killed, the_sampler_killed],  # its sampler
    'two ranks ahead': [*ALL, a_rank_killed],
    'two servers ahead': [*ALL, a_server_killed],
    'one process in rounds': [*ALL, the_sampler_killed],
    'two servers in rounds': [*ALL, a_server_killed],
    'judge workers': [a_judge_killed, a_judge_killed, killed],
    'two ranks': [*ALL, a_rank_killed, a_rank_killed, a_rank_killed],
    'two servers': [*ALL, a_server_killed, a_server_killed, slowed],
    # `killed`: torchrun alone, its ranks are left
    'torchrun': [killed, a_rank_of_torchrun_killed, all_killed, asked_once],
}
GOES_ON = paused, slowed  # nothing has ended: they count as no kill
REPLACED = a_judge_killed, a_server_killed  # the run may go on without it


# ---- trials


def gone(job, processes):
    "Waits until none of them is there; the seconds that it took"
    began = time.monotonic()
    job.wait(BOUND_S)  # first: psutil would take the exit code of a child, and keep it
    left = psutil.wait_procs(processes, max(0, began + BOUND_S - time.monotonic()))[1]
    return time.monotonic() - began, left


def as_torchrun(job):
    "Its agent ends the ranks of a machine where one has crashed; before they meet, nobody else can"
    others = job.own()
    send(others, signal.SIGTERM)
    send(psutil.wait_procs(others, 30)[1], signal.SIGKILL)


def struck(job, kind, rng):
    "The way that was drawn; another one if that finds nobody; None where all has ended"
    ways = rng.sample(STRIKES[kind], len(STRIKES[kind]))
    return next((way for way in ways if not job.ended() and way(job, rng)), None)


def disturb(job, kind, cpu_s, most, rng):
    """Strikes at moments within so many CPU seconds, until the run has to end: the kills that hit a
    run which then did not come to its end, or whom they hit, and seconds until all had ended"""
    landed = []
    while len(landed) < most and (now := job.cpu_s()) < cpu_s:
        job.wait_cpu(rng.triangular(now, cpu_s, now))  # a late one may miss: it is rarer
        there = job.family()
        way = struck(job, kind, rng)
        print(f'{way and way.__name__}, at {now:.1f} s or later of {cpu_s:.1f} CPU seconds')
        if way is None:
            break
        if way in GOES_ON:
            continue
        if way in REPLACED:
            landed.append(way.__name__)
            continue
        if way is a_rank_killed:
            as_torchrun(job)
        took = None
        if way is not interrupted:
            took, alive = gone(job, there)
            assert not alive, (way.__name__, alive, job.said())
        return landed + [way.__name__] * any(job.wait(300)), took
    return landed, None


def endure(kind, folder, home, whole, rng, most):
    "Struck up to `most` times, started again until its end: (kills, slowest end in seconds)"
    landed, slowest = [], 0.0
    for _ in range(most + 20):
        left = 0.9 * whole.left(folder)
        job = start(kind, folder, home)
        try:
            kills, seconds = disturb(job, kind, left, most - len(landed), rng)
            landed += kills
            slowest = max(slowest, seconds or 0)
            codes = job.wait(300)
            assert None not in codes, f'{landed}: it hangs\n{job.said()}'
            if not any(codes):
                return landed, slowest
            # asked to stop, it ends after its step; all else was nobody's wish
            assert kills, f'{landed}: it ended by itself with {codes}\n{job.said()}'
            gone(job, job.family())
        finally:
            job.kill()
    raise AssertionError(f'{landed}: it never came to its end\n{job.said()}')


def noted(note, folder, whole, num, seconds):
    "In the table, then as an assertion"
    note_all(note, *differences(folder, whole.folder), num, seconds)


def note_all(note, lost, differ, num, seconds):
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


RUNS = dict(one_process=(0, 18), judge_workers=(0, 8), two_ranks=(0, 8), two_servers=(0, 8))
RUNS |= dict(torchrun=(0, 10), one_process_ahead=(1, 12), two_ranks_ahead=(0, 12))
RUNS |= dict(two_servers_ahead=(0, 12), one_process_in_rounds=(0, 12))
RUNS |= dict(two_servers_in_rounds=(0, 12))


@pytest.mark.parametrize('kind, number', list(cases('random kills', **RUNS)))
def test_struck_at_random_moments(kind, number, whole, tmp_path, record_property):
    whole, rng = whole(kind), chaos.draw('random', kind, number)
    most = 1 if not chaos.SHARE else 3 if kind == 'torchrun' else 5
    landed, slowest, lost, differ = [], 0.0, 0, []
    for n in range(most + 20):  # a run that came to its end too early is followed by another one
        folder, home = tmp_path / f'run{n}', tmp_path / f'home{n}'
        kills, seconds = endure(kind, folder, home, whole, rng, most - len(landed))
        landed, slowest = landed + kills, max(slowest, seconds)
        here = differences(folder, whole.folder)
        lost, differ = lost + here[0], differ + here[1]
        if len(landed) >= most:
            break
    print(landed)
    note_all(record_property, lost, differ, len(landed), slowest)


OPERATIONS = dict(one_process=(2, 60), two_ranks=(1, 26), two_servers=(0, 14))


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
        seconds, left = gone(job, job.family())
        assert not left, (n, left, job.said())
        job = start(kind, folder, home)
        assert not any(job.wait(300)), (n, job.said())
    finally:
        job.kill()
    noted(record_property, folder, whole, 1, seconds)
