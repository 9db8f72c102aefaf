"""The pull queue: whatever replicas do, every request is answered exactly once, within a bounded
time"""

import itertools
import types
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compassrl.records import Request
from compassrl.rollout import pull_queue
from compassrl.rollout.pull_queue import PullQueue
from course import simulator
from course.simulator import Fault, simulate
from tests.support.faults import noticed, planted
from tests.support.loss_laws import random


def requests(num, group=4):
    return [Request(f'p{i // group}', (2, i // group), i % group) for i in range(num)]


def handed(d, now=0.0):
    "All that free slots take"
    return list(iter(lambda: d.pull(now), None))


# ---- laws: each takes the module, so that a faulty one can be shown to break them


def once(m):
    """Replicas join, leave, answer, answer twice, answer late, in any order: each request counts
    once, none is lost"""

    @random
    @given(
        st.integers(1, 12),
        st.integers(1, 3),
        st.booleans(),
        st.lists(st.tuples(st.sampled_from('jlaappp'), st.integers(0, 40)), max_size=60),
    )
    def check(num, slots, restless, events):
        asked = itertools.count()

        def order(r):
            return next(asked) * 7919 % 5 if restless else 0  # another answer every time

        d, given_out, counted = m.PullQueue(requests(num, 3), slots, order), [], Counter()

        def answer(ticket, request):
            if d.finish(ticket, 0):
                counted[request.prompt_id, request.index] += 1

        for what, k in events:
            name = 'abc'[k % 3]
            if what == 'j' and name not in d.busy:
                d.join(name, 0)
            if what == 'l':
                d.leave(name)
            if what == 'p' and (got := d.pull(0)):
                given_out.append((got[0], got[2]))
            if what == 'a' and given_out:
                answer(*given_out[k % len(given_out)])
            held = Counter(
                d.requests[i].index + 3 * int(d.requests[i].prompt_id[1:])
                for _, i in d.out.values()
            )
            waiting = Counter(i for p in d.prompts.values() for i in p.waiting)
            assert len(d.out) + sum(waiting.values()) + sum(
                counted.values()
            ) == num and d.left == num - sum(counted.values())
            assert max([*held.values(), *waiting.values(), *counted.values()], default=1) == 1
            assert all(len(b) <= slots for b in d.busy.values())
        for name in set('abc') - d.busy.keys():
            d.join(name, 0)
        for _ in range(num + 1):
            for t, (_, i) in list(d.out.items()):
                answer(t, d.requests[i])
            handed(d)
        assert not any(p.waiting for p in d.prompts.values())
        assert not d.left and not d.out and set(counted.values()) == {1}

    check()


faults = st.builds(
    Fault,
    st.sampled_from('ab'),
    st.integers(0, 30).map(float),
    st.integers(0, 9).map(float),
    st.none() | st.integers(1, 60).map(float),
)


def bounded(m):
    "Deaths, hangs and late answers in virtual time: all arrive, and the time has a bound"

    @random
    @given(st.integers(1, 30), st.integers(1, 4), st.lists(faults, max_size=6), st.integers(0, 99))
    def check(num, slots, events, salt):
        rs = requests(num)

        def took(r, name):
            return 1.0 + (r.index * 7 + int(r.prompt_id[1:]) * 3 + salt) % 5

        spans = m.simulate(rs, took, ['a', 'b'], slots, events, timeout_s=8, max_restarts=99)
        done = [s for s in spans if s.outcome == 'done']
        assert sorted(s.index for s in done) == list(range(num))
        assert (
            max(s.end for s in done)
            <= 5 * num + sum(8 + f.back + (f.late or 0) for f in events) + 30
        )
        for name in 'ab':  # never more than its slots
            mine = [s for s in spans if s.replica == name and s.outcome != 'late']
            for t in {s.start for s in mine}:
                assert sum(s.start <= t < s.end for s in mine) <= slots

    check()


def front(m):
    "What a lost replica held is next"
    d = m.PullQueue(requests(12), 2)
    d.join('a', 0), d.join('b', 0)
    first = {t: r for t, _, r in handed(d)}
    mine = [r for t, r in first.items() if d.out[t][0] == 'a']
    assert d.leave('a') == mine and len(mine) == 2
    d.join('c', 0)
    assert [r for _, _, r in handed(d)] == mine


def stale(m):
    "An answer of a replica that was given up does not count, neither before nor after the new one"
    d = m.PullQueue(requests(1), 1)
    d.join('a', 0)
    old = d.pull(0)[0]
    d.leave('a')
    assert not d.finish(old, 1)
    d.join('a', 2)
    new = d.pull(2)[0]
    assert (
        not d.finish(old, 3)
        and d.finish(new, 3)
        and not d.finish(new, 4)
        and not d.finish(old, 4)
        and d.left == 0
    )


def groups(m):
    "A prompt stays on one replica as long as another prompt is left for the others"
    spans = m.simulate(requests(64, 8), lambda r, name: 1 + r.index % 3, ['a', 'b'], 4)
    where = {}
    for s in spans:
        where.setdefault(s.index // 8, set()).add(s.replica)
    assert sum(len(w) > 1 for w in where.values()) <= 1


def spread(m):
    "Requests are spread evenly, and one prompt that is left over is shared"
    d = m.PullQueue(requests(8, 8), 8)
    for name in 'abcd':
        d.join(name, 0)
    handed(d)
    assert [len(d.busy[n]) for n in 'abcd'] == [2] * 4


def silence(m):
    "Only who owes an answer can be silent, from its last sign of life on"
    d = m.PullQueue(requests(3), 2)
    d.join('a', 0)
    assert d.silent(99, 5) == []
    t = d.pull(100)[0]
    d.pull(103)
    assert d.silent(104.9, 5) == [] and d.silent(105, 5) == ['a']
    d.finish(t, 104)
    assert d.silent(108, 5) == [] and d.silent(109, 5) == ['a']
    d.alive('a', 109), d.alive('nobody', 109)
    assert d.silent(113, 5) == [] and d.silent(114, 5) == ['a']


def ordered(m):
    "The order key decides; equal keys stay as they came"
    rs = requests(12)
    d = m.PullQueue(rs, 12, order=lambda r: -int(r.prompt_id[1:]))
    d.join('a', 0)
    assert [(r.prompt_id, r.index) for _, _, r in handed(d)] == [
        (f'p{k}', i) for k in (2, 1, 0) for i in range(4)
    ]


def ordered_within(m):
    "Also among the requests of one prompt"
    d = m.PullQueue(requests(4), 4, order=lambda r: -r.index)
    d.join('a', 0)
    assert [r.index for _, _, r in handed(d)] == [3, 2, 1, 0]


def learns(m):
    "The order is asked again when an answer has come, and when a request was handed out"
    known = {}
    d = m.PullQueue(requests(6, 2), 1, order=lambda r: known.get(r.prompt_id, 0))
    d.join('a', 0)
    first = d.pull(0)
    known['p0'] = 1
    d.finish(first[0], 1)
    told = []
    while got := d.pull(1):
        told.append((got[2].prompt_id, got[2].index))
        if told == [('p1', 0)]:
            known['p1'] = 2
        d.finish(got[0], 1)
    assert told == [('p1', 0), ('p2', 0), ('p2', 1), ('p0', 1), ('p1', 1)]


def stays_read(m):
    "Of what ties, a replica takes a prompt that it has read, even if it has read another since"
    d = m.PullQueue(requests(8, 2), 9, order=lambda r: r.index)  # one of each prompt, then the rest
    d.join('a', 0), d.join('b', 0)
    where = Counter((r.prompt_id, replica) for _, replica, r in handed(d))
    assert set(where.values()) == {2} and len(where) == 4


def drops(m):
    "What is dropped is neither waited for nor counted, and its slots are free"
    d = m.PullQueue(requests(8), 2)
    d.join('a', 0)
    (t, _, r), (other, _, _) = handed(d)
    assert d.finish(t, 0) and d.drop(r) == [other] and d.left == 4 and not d.finish(other, 1)
    assert [r.prompt_id for _, _, r in handed(d)] == ['p1'] * 2 and d.drop(r) == [] and d.left == 4


def counts_losses(m):
    "Who was there when replicas were lost"
    d = m.PullQueue(requests(2), 2)
    for _ in range(3):
        d.join('a', 0)
        handed(d)
        d.leave('a')
    assert d.lost == {0: 3, 1: 3}


def hangs(m):
    "A replica that hangs holds nobody up; a dead one gives no answers, a slow one too late"

    def run(*faults, seconds=5.0):
        return m.simulate(requests(8), lambda r, n: seconds, ['a', 'b'], 2, faults, timeout_s=8)

    spans = run(Fault('a', 1.0, back=2.0, late=99.0))
    assert (
        max(s.end for s in spans if s.outcome == 'done') < 40
        and sum(s.outcome == 'lost' for s in spans) == 2
    )
    assert {s.outcome for s in run(Fault('a', 1.0, back=2.0))} == {'done', 'lost'}
    slow = m.simulate(
        requests(2),
        lambda r, n: 12.0 if n == 'a' else 3.0,
        ['a', 'b'],
        1,
        timeout_s=8,
        max_restarts=0,
    )
    assert [(s.replica, s.outcome) for s in slow] == [('b', 'done'), ('a', 'lost'), ('b', 'done')]


LAWS = [
    once,
    bounded,
    hangs,
    front,
    stale,
    groups,
    spread,
    silence,
    ordered,
    ordered_within,
    learns,
    stays_read,
    drops,
    counts_losses,
]


@pytest.mark.parametrize('law', LAWS, ids=lambda law: law.__name__)
def test_law(law):
    law(types.SimpleNamespace(PullQueue=PullQueue, simulate=simulate))


@pytest.mark.parametrize(
    'old, new',
    [
        # a second answer counts
        ('if ticket not in self.out: return False', 'if False: return False'),
        # a late answer counts
        ('self.out.pop(t)[1] for t in sorted', 'self.out[t][1] for t in sorted'),
        # stay lost
        ('for i in reversed(lost): self.group[i].waiting.appendleft(i)\n', ''),
        ('(0, 0) if self.lost[first] else', '(0, 0) if False else'),  # they queue at the end
        ('for i in reversed(lost)', 'for i in lost'),  # the last comes first
        ('if load < self.slots', 'if load < 99'),  # no bound in flight
        ('len(self.busy[replica])==load', 'True'),  # old loads count
        ('if replica in homes', 'if False'),  # prompts are scattered
        # all work on one prompt
        (
            'elif None in homes: home = None\nelse: home = next(iter(homes))',
            'else: home = next(reversed(homes))',
        ),
        ('self._file(self.group[i])  # may know more now\n        return True', 'return True'),
        ('key=lambda i: order(self.requests[i])', 'key=lambda i: 0'),
        ('(1, self.order(self.requests[first]))', '(1, 0)'),  # no order among prompts
        ('        self.left -= len(running)\n', ''),  # the dropped are waited for
        ('            self.busy[replica].remove(t)\n', ''),  # they keep their slots
        ('if tickets and now-self.seen', 'if now-self.seen'),  # an idle one is silent
        # idle time counts as silence
        ('        if not self.busy[replica]: self.seen[replica] = now\n', ''),
        # an answer is no sign of life
        ('self.seen[replica] = now\n        self.left', 'self.left'),
        ('        self.lost.update(lost)\n', ''),
        # a hang is not noticed
        ('            self.lose(r, now, f.back if f else 0)\n', '            pass\n'),
        ('self.gone |= self.d.busy[f.replica]', 'self.gone |= set()'),  # the dead answer
    ],
)
def test_faults_are_noticed(old, new):
    assert noticed(
        LAWS,
        planted((pull_queue, simulator), old, new),
        KeyError,
        ValueError,
        TypeError,
        RuntimeError,
        AttributeError,
    )


def drew(slots):
    "Replica a drew the first turn of p0, and has another request since; b is idle"
    queue = PullQueue([replace(r, begun=()) for r in requests(2, 1)], slots)
    queue.join('a', 0)
    queue.join('b', 0)
    both = handed(queue)
    assert [(name, r.prompt_id) for _, name, r in both] == [('a', 'p0'), ('b', 'p1')]
    for ticket, *_ in both:
        queue.finish(ticket, 1)
    queue.add(Request('other', (9,)))
    assert queue.pull(1)[1] == 'a'
    return queue, replace(both[0][2], prompt_ids=(2, 0, 7, 8), begun=(True, False))


def test_a_next_turn_goes_home():
    "To the replica that drew the last one, if it has a slot; else to any, at once"
    queue, turn = drew(2)
    queue.add(turn)
    queue.add(replace(turn, prompt_id='p9'))  # the same text, whose first turn nobody drew
    assert queue.left == 3 and [name for _, name, _ in handed(queue)] == ['a', 'b']
    queue, turn = drew(1)
    queue.add(turn)
    ticket, name, r = queue.pull(2)
    assert (name, r, queue.left) == ('b', turn, 2), 'nobody waits for a cache'
    queue.finish(ticket, 3)
    queue.add(replace(turn, prompt_ids=(2, 0, 7, 8, 9), begun=(True, False, True)))
    assert queue.pull(4)[1] == 'b', 'its home is another now'
    queue, turn = drew(2)
    queue.leave('a')
    queue.add(turn)
    assert [r.prompt_id for _, name, r in handed(queue) if name == 'b'] == ['other', 'p0']


def test_no_replica_left():
    rs = requests(4)
    with pytest.raises(RuntimeError, match='4 requests wait and no replica is left'):
        simulate(rs, lambda r, n: 5.0, ['a', 'b'], 2, [Fault('a', 1.0), Fault('b', 2.0)])
    # slower than the timeout: bounded, no endless loop
    with pytest.raises(RuntimeError, match='no replica is left'):
        simulate(rs, lambda r, n: 50.0, ['a'], 2, timeout_s=10)


def test_misuse():
    with pytest.raises(ValueError, match='slots=0: use at least 1'):
        PullQueue([], 0)
    d = PullQueue([], 1)
    d.join('a', 0)
    with pytest.raises(ValueError, match='a has joined before'):
        d.join('a', 1)
    assert d.pull(0) is None and d.leave('nobody') == [] and not d.finish(7, 0)


def test_pull_beats_assignment_in_advance():
    """Uneven lengths: a pull queue ends within one longest request of the even share; requests
    dealt out do not"""

    def took(r, name):
        return 40.0 if r.index == 0 else 1.0

    rs = [Request(f'p{i}', (i,), i % 2) for i in range(40)]
    pull = max(s.end for s in simulate(rs, took, ['a', 'b'], 1))
    dealt = max(s.end for k, n in enumerate('ab') for s in simulate(rs[k::2], took, [n], 1))
    total = sum(took(r, 'a') for r in rs)
    assert pull <= total / 2 + 40 < dealt
    assert list(itertools.chain(*[[s.replica] for s in simulate(rs, took, ['a', 'b'], 1)])).count(
        'a'
    ) in range(15, 26)
