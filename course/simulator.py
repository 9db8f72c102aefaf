"""The pull queue in virtual time, with replicas that die or hang on command. Costs are measured for
one engine and assumed for many."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from math import ceil, inf, sqrt
from typing import Any

import torch

from compassrl.records import Request, Sample
from compassrl.rollout.pull_queue import Attempt, PullQueue
from compassrl.rollout.schedule import Schedule

__all__ = [
    'Fault',
    'Simulation',
    'simulate',
    'StepCost',
    'Cluster',
    'RoundRobin',
    'makespan',
    'idle_frac',
    'lower_bound',
    'work',
    'fit_cost',
    'rewards_done',
    'steps_ahead',
]


@dataclass(frozen=True)
class Fault:
    "What happens to a replica in a simulation"

    replica: str
    at: float  # seconds
    back: float = inf  # seconds until it takes requests again; inf = never
    # None: it dies, and answers nothing more; else it hangs, and answers so much later
    late: float | None = None


class Simulation:
    "A queue at work, in virtual time"

    def __init__(
        self,
        queue: PullQueue,
        seconds: Callable[[Request, str], float],  # a request takes on a replica
        replicas: Iterable[str],
        faults: Iterable[Fault] = (),
        timeout_s: float = inf,  # a replica that owes answers and gives none for so long is lost
        max_restarts: int = 3,  # restarts of one replica
    ) -> None:
        self.d: PullQueue = queue
        self.seconds: Callable[[Request, str], float] = seconds
        self.timeout_s: float = timeout_s
        self.max_restarts: int = max_restarts
        self.spans: list[Attempt] = []
        self.events: list[tuple[float, int, str, Any]] = []  # heap of second, number, what, who
        self.number: count[int] = count()
        self.given: dict[int, tuple[str, int, float]] = {}  # ticket -> replica, request, start
        self.hung: dict[str, Fault] = {}
        self.gone: set[int] = set()  # tickets of the dead
        self.losses: Counter[str] = Counter()
        for r in replicas:
            self.join(r, 0)
        for f in faults:
            self.at(f.at, 'fault', f)

    def at(self, time: float, what: str, who: object = None) -> None:
        heapq.heappush(self.events, (time, next(self.number), what, who))

    def span(self, ticket: int, now: float, outcome: str) -> None:
        self.spans.append(Attempt(*self.given[ticket], now, outcome))

    def watch(self, now: float) -> None:
        "Look again when it would have been silent for too long"
        if self.timeout_s < inf:
            self.at(now + self.timeout_s, 'look')

    def join(self, r: str, now: float) -> None:
        self.d.join(r, now)

    def begin(self, ticket: int, r: str, request: Request, now: float) -> None:
        self.at(now + self.seconds(request, r), 'answer', ticket)

    def finish(self, ticket: int, now: float) -> bool:
        return self.d.finish(ticket, now)

    def give(self, now: float) -> None:
        while handed := self.d.pull(now):
            ticket, r, request = handed
            self.given[ticket] = r, self.d.out[ticket][1], now
            self.begin(ticket, r, request, now)
            self.watch(now)

    def lose(self, r: str, now: float, back: float) -> None:
        for t in sorted(self.d.busy[r]):
            self.span(t, now, 'lost')
        self.d.leave(r)
        self.losses[r] += 1
        if self.losses[r] <= self.max_restarts and back < inf:
            self.at(now + back, 'join', r)

    def answer(self, ticket: int, now: float) -> None:
        if ticket in self.gone:
            return
        f = self.hung.get(self.given[ticket][0])
        late = f.late if f and ticket in self.d.out else None
        if f and late is not None and now < f.at + late:
            return self.at(now + late, 'answer', ticket)
        self.span(ticket, now, 'done' if self.finish(ticket, now) else 'late')
        self.watch(now)

    def fault(self, f: Fault, now: float) -> None:
        if f.replica not in self.d.busy:
            return
        if f.late is not None:
            self.hung[f.replica] = f
            return
        self.gone |= self.d.busy[f.replica]  # the dead do not answer
        self.lose(f.replica, now, f.back)

    def look(self, _: object, now: float) -> None:
        "Who has been silent for too long?"
        for r in self.d.silent(now, self.timeout_s):
            f = self.hung.pop(r, None)
            self.lose(r, now, f.back if f else 0)

    def run(self) -> list[Attempt]:
        "Raises RuntimeError if no replica is left and none comes back"
        self.give(0)
        while self.d.left:
            if not self.events or not self.d.busy and not any(e[2] == 'join' for e in self.events):
                raise RuntimeError(f'{self.d.left} requests wait and no replica is left')
            now, _, what, who = heapq.heappop(self.events)
            getattr(self, what)(who, now)
            self.give(now)
        return self.spans


def simulate(
    requests: Sequence[Request],
    seconds: Callable[[Request, str], float],  # a request takes on a replica
    replicas: Iterable[str],
    slots: int,
    *args: Any,
    order: Callable[[Request], Any] = lambda r: 0,
    **kwargs: Any,
) -> list[Attempt]:
    "Runs a `Simulation` of these requests"
    return Simulation(PullQueue(requests, slots, order), seconds, replicas, *args, **kwargs).run()


@dataclass(frozen=True)
class StepCost:
    "Seconds of a replica, whose every step draws one token for each running request"

    base: float  # a step, whoever runs: weights are read, kernels are launched
    request: float  # further, for each running request
    cached: float = 0.0  # further, for each cached token that attention reads
    prefill: float = 0.0  # a token of a prompt that this replica has not read yet
    admit: float = 0.0  # further, whenever requests begin: nobody decodes meanwhile

    def steps(
        self,
        num: int,  # steps
        running: int,  # requests, all the time
        cached: int,  # tokens at the first step; every step adds one for each
    ) -> float:  # seconds
        mean = cached + running * (num - 1) / 2
        return num * (self.base + self.request * running + self.cached * mean)

    def steps_by(self, seconds: float, running: int, cached: int) -> int:
        "Steps until so much time has passed"
        a = self.cached * running / 2
        b = self.base + self.request * running + self.cached * cached - a
        if a < 1e-9 * b:  # the cache costs nothing: all steps are equal
            return ceil(seconds / b - 1e-9)
        return ceil((sqrt(b * b + 4 * a * seconds) - b) / (2 * a) - 1e-9)


class _Replica:  # its batch at second t
    def __init__(self, name: str, t: float) -> None:
        self.name, self.t = name, t
        self.step = self.cached = self.turn = 0
        self.ends: list[tuple[int, int]] = []  # a heap: (last step, ticket) of each running request
        self.new: list[int] = []  # tickets of those that begin
        self.read: set[object] = set()  # prompts that it knows
        self.dropped: set[int] = set()  # tickets


class Cluster(Simulation):
    "A queue and replicas that decode in batches: the more requests run, the longer a step takes"

    def __init__(
        self,
        dispatcher: PullQueue,
        lengths: Sequence[int],  # response tokens of each of its requests
        cost: StepCost,
        replicas: Iterable[str],
        faults: Iterable[Fault] = (),
        timeout_s: float = inf,  # see `Simulation`
        max_restarts: int = 3,
        plan: Schedule | None = None,  # learns from the answers, may drop what a group can spare
    ) -> None:
        self.lengths: Sequence[int] = lengths
        self.cost: StepCost = cost
        self.plan: Schedule | None = plan
        self.at_work: dict[str, _Replica] = {}  # name -> _Replica
        self.moved: dict[str, None] = {}  # names of replicas whose batch has changed, in order
        super().__init__(dispatcher, self._apart, replicas, faults, timeout_s, max_restarts)

    def _apart(self, request: Request, replica: str) -> float:
        raise NotImplementedError('replicas decode in batches: no request has seconds of its own')

    def join(self, r: str, now: float) -> None:
        super().join(r, now)
        self.at_work[r] = _Replica(r, now)

    def lose(self, r: str, now: float, back: float) -> None:
        del self.at_work[r]
        super().lose(r, now, back)

    def begin(self, ticket: int, r: str, request: Request, now: float) -> None:
        self.at_work[r].new.append(ticket)
        self.moved[r] = None

    def give(self, now: float) -> None:
        super().give(now)
        for r in self.moved:
            if r in self.at_work:
                self.go(self.at_work[r], now)
        self.moved.clear()

    def go(self, s: _Replica, now: float) -> None:
        "Who has come or gone joins at the end of a step; when does the next one finish?"
        if s.ends and now > s.t:
            begun = self.cost.steps_by(now - s.t, len(s.ends), s.cached)
            k = min(begun, s.ends[0][0] - s.step)
            self.run_steps(s, k, s.t + self.cost.steps(k, len(s.ends), s.cached))
        s.t = max(s.t, now)
        self._remove_dropped(s)
        self._admit_new(s)
        s.turn += 1
        if s.ends:
            k = s.ends[0][0] - s.step
            self.at(s.t + self.cost.steps(k, len(s.ends), s.cached), 'turn', (s, s.turn, k))

    def _remove_dropped(self, s: _Replica) -> None:
        kept = []
        for end, ticket in s.ends:
            if ticket in s.dropped:
                s.cached -= self.size(ticket) - (end - s.step)  # what it has cached so far
            else:
                kept.append((end, ticket))
        heapq.heapify(kept)
        s.ends = kept
        s.dropped.clear()

    def _admit_new(self, s: _Replica) -> None:
        if s.new:
            s.t += self.cost.admit
        for ticket in s.new:
            i = self.given[ticket][1]
            group, num = self.d.group[i], len(self.d.requests[i].prompt_ids)
            if group not in s.read:
                s.t += self.cost.prefill * num
            s.read.add(group)
            s.cached += num
            # the prompt's logits give the first token
            heapq.heappush(s.ends, (s.step + self.lengths[i] - 1, ticket))
        s.new.clear()

    def size(self, ticket: int) -> int:  # cached tokens at its end
        i = self.given[ticket][1]
        return len(self.d.requests[i].prompt_ids) + self.lengths[i] - 1

    def run_steps(self, s: _Replica, k: int, t: float) -> None:
        s.t, s.step, s.cached = t, s.step + k, s.cached + k * len(s.ends)

    def turn(self, who: tuple[_Replica, int, int], now: float) -> None:  # its shortest request ends
        s, turn, k = who
        if self.at_work.get(s.name) is not s or turn != s.turn:
            return
        self.run_steps(s, k, now)
        while s.ends and s.ends[0][0] <= s.step:
            _, ticket = heapq.heappop(s.ends)
            s.cached -= self.size(ticket)
            self.answer(ticket, now)
        self.moved[s.name] = None

    def finish(self, ticket: int, now: float) -> bool:
        if not self.plan or ticket not in self.d.out:
            return super().finish(ticket, now)
        i = self.given[ticket][1]
        r = self.d.requests[i]
        ids: Any = range(self.lengths[i])  # only its length counts
        nothing: Any = None
        prompt = list(r.prompt_ids)
        sample = Sample(r.prompt_id, r.index, prompt, ids, nothing, None, None, 'stop', 0)
        self.plan.observe(sample)
        counts = super().finish(ticket, now)
        self.plan.label(sample)
        if self.plan.full(sample):
            for dropped in self.d.drop(r):
                self._drop(dropped, now)
        return counts

    def _drop(self, ticket: int, now: float) -> None:
        self.span(ticket, now, 'dropped')
        s = self.at_work[self.given[ticket][0]]
        s.dropped.add(ticket)
        self.moved[s.name] = None


class RoundRobin(PullQueue):
    "Not a queue: every request was given to one replica before anything began"

    def __init__(
        self,
        requests: Iterable[Request],
        slots: int,
        shares: Sequence[Sequence[int]],  # requests of each replica, in the order of joining
    ) -> None:
        super().__init__(requests, slots)
        self.shares: list[deque[int]] = list(map(deque, shares))
        self.mine: dict[str, deque[int]] = {}

    def join(self, replica: str, now: float) -> None:
        self.mine[replica] = self.shares[len(self.mine)]
        super().join(replica, now)

    def leave(self, replica: str) -> list[Request]:
        raise NotImplementedError(f'{replica} is lost, and what was dealt to it with it')

    def _fits(self, load: int, replica: str) -> bool:
        return super()._fits(load, replica) and bool(self.mine[replica])

    def _next(self, replica: str) -> tuple[str, int]:
        i = self.mine[replica].popleft()
        self.group[i].waiting.remove(i)
        self._file(self.group[i])
        return replica, i


def makespan(spans: Iterable[Attempt]) -> float:  # seconds
    return max(s.end for s in spans if s.outcome == 'done')


def idle_frac(
    spans: Sequence[Attempt],
    num_slots: int,  # slots of all replicas together
) -> float:  # slot-seconds without a request until the last answer, as a share of all
    busy = sum(s.end - s.start for s in spans if s.outcome != 'late')
    return 1 - busy / (num_slots * makespan(spans))


def lower_bound(
    requests: Sequence[Request],
    lengths: Sequence[int],
    cost: StepCost,
    num_replicas: int,
    slots: int,
) -> dict[str, float]:  # seconds: the even share of full batches; the longest, alone
    "What no schedule can beat: max(total/m, longest)"

    def alone(c: StepCost) -> list[float]:  # seconds of each request without company
        return [c.steps(n - 1, 1, len(r.prompt_ids)) for r, n in zip(requests, lengths)]

    full = replace(cost, base=cost.base / slots)
    read = cost.prefill * sum(map(len, {tuple(r.prompt_ids) for r in requests}))
    total = read + sum(alone(full))
    longest = max(cost.prefill * len(r.prompt_ids) + s for r, s in zip(requests, alone(cost)))
    return dict(even=total / num_replicas, longest=cost.admit + longest)


def work(
    requests: Sequence[Request], lengths: Sequence[int], slots: int
) -> list[float]:  # how much of each field of `StepCost` one replica spends
    "What one replica does depends on lengths alone, and its seconds are linear in these numbers"
    zero = StepCost(0, 0)

    def spent(name: str) -> float:
        cost = replace(zero, **{name: 1.0})
        return makespan(Cluster(PullQueue(requests, slots), lengths, cost, ['a']).run())

    return [spent(f.name) for f in fields(StepCost)]


def fit_cost(
    rows: Sequence[Sequence[float]],  # `work` of each run
    seconds: Sequence[float],  # what it took
) -> StepCost:  # none is negative
    "Least squares of relative errors; a cost that would be negative is 0"
    y = torch.tensor(seconds).double()
    X, ones = torch.tensor(rows).double() / y[:, None], torch.ones_like(y)[:, None]
    on = list(range(len(rows[0])))  # columns whose cost is not 0
    while True:
        scale = X[:, on].amax(0).clamp(min=1e-30)  # columns of very different sizes
        found = torch.linalg.lstsq(X[:, on] / scale, ones, driver='gelsd').solution[:, 0]
        costs = found / scale
        if bool((costs >= 0).all()):
            break
        on.pop(int(costs.argmin()))
    names = [f.name for f in fields(StepCost)]
    return StepCost(**dict.fromkeys(names, 0.0) | {names[i]: float(c) for i, c in zip(on, costs)})


def rewards_done(
    spans: Sequence[Attempt],
    seconds: Callable[[int], float],  # the reward of a request takes
    workers: int,
    overlap: bool = True,  # each begins when its sample ends; else all after the last one
) -> float:  # second at which the last reward is there
    "Rewards wait for a free worker, in the order in which samples end"
    free = [0.0] * workers
    end = makespan(spans)
    for s in sorted((s for s in spans if s.outcome == 'done'), key=lambda s: s.end):
        heapq.heapreplace(free, max(free[0], s.end if overlap else end) + seconds(s.index))
    return max(*free, end)


def steps_ahead(
    sampling: Sequence[float],  # seconds in which each step is drawn and judged
    training: Sequence[float],  # seconds of all else in each step
    k: int,  # `schedule.max_staleness`
) -> list[tuple[float, float, float, float]]:  # seconds: drawn from, to; trained from, to
    "When each step is drawn and trained, if both have machines of their own"
    found: list[tuple[float, float, float, float]] = []
    drawn = trained = 0.0
    for t, (draw_s, train_s) in enumerate(zip(sampling, training, strict=True)):
        asked = 0.0 if t < k else found[t - k][2] if k else trained
        start = max(drawn, asked)
        drawn = start + draw_s
        begin = max(drawn, trained)
        trained = begin + train_s
        found.append((start, drawn, begin, trained))
    return found
