"The cluster in virtual time, against a loop, token by token; a real run; what must always hold"

import heapq
import math
import random as rnd
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compassrl.records import Request, SamplingParams
from compassrl.rollout.pull_queue import PullQueue
from compassrl.rollout.schedule import LengthPredictor, Schedule, ScheduleConfig
from course import simulator
from course.simulator import Fault
from tests.support.faults import noticed, planted
from tests.support.loss_laws import random

# no two events at one time
COSTS = dict(base=0.0123, request=0.00457, cached=1.9e-4, prefill=0.00211, admit=0.0317)


def requests(lengths, group=4):
    return [
        Request(f'q-{i // group}', (2, 3, 3 + i // group), i % group, i, SamplingParams(9999))
        for i in range(len(lengths))
    ]


def token_by_token(dispatcher, lengths, c, names):
    "When each request ends: every step of every replica is an event"
    now, running = dict.fromkeys(names, 0.0), {n: {} for n in names}
    read, ends = {n: set() for n in names}, {}
    for n in names:
        dispatcher.join(n, 0)
    steps = []

    def fill(at):
        new = {}
        while got := dispatcher.pull(at):
            new.setdefault(got[1], []).append(got)
        for name, came in new.items():
            assert not running[name] or now[name] == at  # only who has just answered gets more
            now[name] = at + c['admit']
            for ticket, _, r in came:
                if r.prompt_ids not in read[name]:
                    now[name] += c['prefill'] * len(r.prompt_ids)
                read[name].add(r.prompt_ids)
                i = dispatcher.out[ticket][1]
                running[name][ticket] = [i, len(r.prompt_ids), lengths[i] - 1]

    def due(name):  # its next step, or the end of what a prompt has answered already
        if not running[name]:
            return
        some = any(not left for _, _, left in running[name].values())
        cached = sum(n for _, n, _ in running[name].values())
        took = 0 if some else c['base'] + c['request'] * len(running[name]) + c['cached'] * cached
        heapq.heappush(steps, (now[name] + took, name))

    fill(0.0)
    for n in names:
        due(n)
    while steps:
        at, name = heapq.heappop(steps)
        if at > now[name]:
            for x in running[name].values():
                x[1] += 1
                x[2] -= 1
        now[name] = at
        for ticket in [t for t, x in running[name].items() if not x[2]]:
            ends[running[name].pop(ticket)[0]] = at
            dispatcher.finish(ticket, at)
        fill(at)
        due(name)
    return ends


# ---- laws: each takes the module


def exact(m):
    "Every end is that of the loop, for one replica or three"

    @random
    @given(
        st.lists(st.integers(1, 30), min_size=1, max_size=24),
        st.integers(1, 4),
        st.sampled_from(['a', 'abc']),
    )
    def check(lengths, slots, names):
        rs = requests(lengths)
        want = token_by_token(PullQueue(rs, slots), lengths, COSTS, names)
        spans = m.Cluster(PullQueue(rs, slots), lengths, m.StepCost(**COSTS), names).run()
        assert {s.index: s.end for s in spans} == pytest.approx(want)

    check()


def steps(m):
    @random
    @given(
        st.integers(1, 5000),
        st.integers(1, 64),
        st.integers(0, 10**6),
        st.sampled_from([0, 1e-9, 1e-4]),
    )
    def check(k, n, cached, per):
        c = m.StepCost(0.01, 0.001, per)
        took = c.steps(k, n, cached)
        assert took == pytest.approx(sum(c.steps(1, n, cached + n * i) for i in range(k)))
        assert c.steps_by(took, n, cached) == k
        assert c.steps_by(took - 0.4 * 0.01, n, cached) == k

    check()


def survives(m):
    "Deaths and hangs: every request once, at most the slots, the bound holds, runs are equal"
    faults = st.builds(
        Fault, st.sampled_from('ab'), st.floats(0, 3), st.floats(0, 2), st.none() | st.floats(1, 9)
    )

    @random
    @given(
        st.lists(st.integers(1, 60), min_size=1, max_size=30),
        st.lists(faults, max_size=4),
        st.integers(1, 3),
    )
    def check(lengths, events, slots):
        rs, c = requests(lengths), m.StepCost(**COSTS)

        def run():
            patience = dict(timeout_s=20, max_restarts=99)
            return m.Cluster(PullQueue(rs, slots), lengths, c, 'ab', events, **patience).run()

        spans = run()
        assert spans == run()
        assert sorted(s.index for s in spans if s.outcome == 'done') == list(range(len(rs)))
        assert m.makespan(spans) >= max(m.lower_bound(rs, lengths, c, 2, slots).values()) - 1e-9
        for name in 'ab':
            mine = [s for s in spans if s.replica == name and s.outcome != 'late']
            for t in {s.start for s in mine}:
                assert sum(s.start <= t < s.end for s in mine) <= slots

    check()


def bounded(m):
    "The bound is reached by one replica with full batches, and where one request is all there is"
    c = m.StepCost(0.01, 0.001)
    rs = requests([10] * 12)
    full = m.makespan(m.Cluster(PullQueue(rs, 4), [10] * 12, c, 'a').run())
    assert full == pytest.approx(m.lower_bound(rs, [10] * 12, c, 1, 4)['even'])
    one = m.makespan(m.Cluster(PullQueue(rs[:1], 4), [90], m.StepCost(**COSTS), 'ab').run())
    assert one == pytest.approx(m.lower_bound(rs[:1], [90], m.StepCost(**COSTS), 2, 4)['longest'])


def fitted(m):
    "Costs are found again from what runs took; none becomes negative"
    runs = [[4] * 9, [40] * 3, [5, 9, 2, 30, 7], [200, 1, 1], [64] * 8]
    c = m.StepCost(**COSTS)
    rows = [m.work(requests(n), n, 3) for n in runs]
    took = [m.makespan(m.Cluster(PullQueue(requests(n), 3), n, c, 'a').run()) for n in runs]
    assert [sum(a * b for a, b in zip(row, COSTS.values())) for row in rows] == pytest.approx(took)
    assert vars(m.fit_cost(rows, took)) == pytest.approx(COSTS, rel=1e-4)
    odd = m.fit_cost(rows, [t * (1 + 0.1 * (-1) ** i) for i, t in enumerate(took)])
    assert min(vars(odd).values()) >= 0


def dealt(m):
    "Each replica does its own share, in order, and nothing else"
    lengths = [5, 2, 2, 2, 9]
    queue = m.RoundRobin(requests(lengths), 1, [[0, 2], [1, 4, 3]])
    spans = m.Cluster(queue, lengths, m.StepCost(1, 0), 'ab').run()
    found = [(s.replica, s.index, s.end) for s in sorted(spans, key=lambda s: (s.replica, s.end))]
    assert found == [('a', 0, 4), ('a', 2, 5), ('b', 1, 1), ('b', 4, 9), ('b', 3, 10)]
    assert m.idle_frac(spans, 2) == pytest.approx(0.25)


def cut(m):
    "What is dropped frees its slot at once, and is not counted"
    lengths = [30, 2, 8, 40, 4, 9]
    plan = Schedule(
        requests(lengths[:4]), ScheduleConfig('fifo', over_provision=0.5), LengthPredictor()
    )
    spans = m.Cluster(PullQueue(plan.requests, 6), lengths, m.StepCost(1, 0), 'a', plan=plan).run()
    assert Counter(s.outcome for s in spans) == dict(done=4, dropped=2) and m.makespan(spans) == 8
    assert {s.index for s in spans if s.outcome == 'dropped'} == {0, 3}
    lengths = [3, 3, 3, 3, 11, 50, 50, 60]  # two steps of eight, then eight of two
    plan = Schedule(
        requests(lengths[:5]), ScheduleConfig('fifo', over_provision=0.5), LengthPredictor()
    )
    spans = m.Cluster(PullQueue(plan.requests, 8), lengths, m.StepCost(1, 1), 'a', plan=plan).run()
    assert m.makespan(spans) == 2 * 9 + 8 * 3


def joins(m):
    "A request of a dead replica joins a running batch at the end of its step, and slows it down"
    rs, fault = requests([3, 4], 1), [Fault('b', 1.0)]
    spans = m.Cluster(PullQueue(rs, 2), [3, 4], m.StepCost(1, 1), 'ab', fault).run()
    assert {s.index: s.end for s in spans if s.outcome == 'done'} == {0: 2 + 3, 1: 2 + 3 + 2 * 2}


def rewards(m):
    rs = requests([3, 6, 9])
    spans = m.Cluster(PullQueue(rs, 3), [3, 6, 9], m.StepCost(1, 0), 'a').run()
    ways = (1, True), (1, False), (3, True), (3, False)
    assert [m.rewards_done(spans, lambda i: 4.0, *way) for way in ways] == [14, 20, 12, 12]


LAWS = [exact, steps, survives, joins, bounded, fitted, dealt, cut, rewards]


@pytest.mark.parametrize('law', LAWS, ids=lambda law: law.__name__)
def test_law(law):
    law(simulator)


@pytest.mark.parametrize(
    'old, new',
    [
        ('cached+running*(num-1)/2', 'cached'),  # the cache does not grow
        ('self.request*running+self.cached*mean', 'self.request+self.cached*mean'),  # batch of one
        ('s.step+self.lengths[i]-1', 's.step+self.lengths[i]'),  # a step for the first token
        ('s.cached -= self.size(ticket)\nself.answer', 'self.answer'),  # the dead stay in the cache
        ('if group not in s.read:', 'if True:'),  # every request reads its prompt
        ('s.t += self.cost.admit', 'pass'),
        ('or turn!=s.turn', ''),  # events of an old batch
        ('full = replace(cost, base=cost.base/slots)', 'full = cost'),  # a bound that can be beaten
        ('if bool((costs>=0).all()): break', 'break'),
        (' and bool(self.mine[replica])', ''),  # takes what was dealt to others
        ('s.dropped.add(ticket)\nself.moved[s.name] = None', ''),  # the dropped go on
        ('s.end if overlap else end', 'end'),
    ],
)
def test_faults_are_noticed(old, new):
    assert noticed(
        LAWS,
        planted(simulator, old, new),
        KeyError,
        ValueError,
        TypeError,
        RuntimeError,
        AttributeError,
        IndexError,
    )


# ---- a real run, recorded: CPU seconds of the embedded engine, least of seven
# (tiny policy, 32 slots, fp32, one thread)


def recorded():
    "Lengths of the runs that are fitted and of those that are predicted, and what they took"
    rng = rnd.Random(1)

    def tail(n, s):
        return [max(1, min(220, round(rng.lognormvariate(3, s)))) for _ in range(n)]

    fit = [[48] * n for n in (1, 2, 4, 8, 16, 32)]
    fit += [[24] * 32, [120] * 4, [120] * 24]
    fit += [tail(64, 1) for _ in range(3)]
    # fmt: off
    took = [
        0.0595, 0.0642, 0.0587, 0.0597, 0.0689, 0.0728,
        0.0355, 0.1402, 0.2061,
        0.2305, 0.3644, 0.3691,
    ]
    # fmt: on
    return fit, took, [tail(96, 1.1) for _ in range(5)], [0.4806, 0.4728, 0.5252, 0.4684, 0.5285]


def test_a_real_run_is_predicted():
    "Makespans of heavy-tailed runs that were not fitted: each within 10%"
    fit, took, new, real = recorded()
    cost = simulator.fit_cost([simulator.work(requests(n), n, 32) for n in fit], took)
    for n, took_really in zip(new, real):
        spans = simulator.Cluster(PullQueue(requests(n), 32), n, cost, 'a').run()
        assert simulator.makespan(spans) == pytest.approx(took_really, rel=0.1)


def test_longest_first_at_256_replicas():
    "By prediction within 10% of the bound where the even share decides, less idle than round robin"
    rng, m = rnd.Random(0), 256
    usual = [rng.lognormvariate(math.log(300), 1) for _ in range(m * 32 // 8)]

    def draw():
        drawn = (usual[i // 8] * rng.lognormvariate(0, 0.35) for i in range(m * 32))
        return [max(1, min(4096, round(n))) for n in drawn]

    before, now, c = draw(), draw(), simulator.StepCost(0.012, 8e-5, 2e-9)
    rs, p = requests(now, 8), LengthPredictor()
    names = list(map(str, range(m)))
    for r, n in zip(rs, before):
        p.group.setdefault(r.prompt_id, []).append(n)
    plan = Schedule(rs, ScheduleConfig(), p)
    ours = simulator.Cluster(PullQueue(rs, 2, plan.order), now, c, names, plan=plan).run()
    queue = simulator.RoundRobin(rs, 2, [range(k, len(rs), m) for k in range(m)])
    robin = simulator.Cluster(queue, now, c, names).run()
    bound = simulator.lower_bound(rs, now, c, m, 2)
    assert bound['even'] > bound['longest'] and simulator.makespan(ours) < 1.1 * bound['even']
    assert simulator.idle_frac(ours, 2 * m) < 0.88 * simulator.idle_frac(robin, 2 * m)


def test_what_was_dealt_cannot_be_lost():
    with pytest.raises(NotImplementedError, match='a is lost'):
        simulator.RoundRobin(requests([1]), 1, [[0]]).leave('a')
