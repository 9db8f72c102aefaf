"Requests of which more become ready with each sample, and what every engine has to do with them"

from collections import Counter, deque

from compassrl.records import Requests


class Growing(Requests):
    "One is ready at first; each sample makes `more` others ready; every poll is written down"

    def __init__(self, requests, more=2):
        super().__init__()
        self.later, self.more, self.polls = deque(requests), more, []
        self.ready.append(self.later.popleft())

    @property
    def done(self):
        return not self.later and not self.ready

    def poll(self, num=None):
        out = super().poll(num)
        self.polls.append((num, len(out)))
        return out

    def take(self, sample):
        for _ in range(min(self.more, len(self.later))):
            self.ready.append(self.later.popleft())


def key(s):
    return s.prompt_id, s.index


def law_requests_that_grow(engine, requests, calls=1, more=2):
    "Each is answered once, with the tokens of a plain list; later ones in the same call"
    want = {key(s): s.response_ids for s in engine.generate(requests)}
    source, out, num = Growing(requests, more), [], 0
    while not source.done:
        num += 1
        for s in engine.generate(source):
            out.append(s)
            source.take(s)
    assert Counter(map(key, out)) == Counter(map(key, requests))
    assert {key(s): s.response_ids for s in out} == want
    assert num == calls, f'{num} calls of generate'
    assert (0 in [n for _, n in source.polls]) and source.poll() == []
    assert list(engine.generate(source)) == []  # once too often is no fault
