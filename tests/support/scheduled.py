"An engine that takes requests one by one, in the order of a schedule"

from compassrl.rollout.pull_queue import PullQueue
from compassrl.rollout.schedule import Schedule, ScheduleConfig


def scheduled(engine, requests, predictor, config=ScheduleConfig()):
    "`engine.generate` in the order of a schedule; the predictor learns from every sample"
    s, given = Schedule(requests, config, predictor), {}
    d = PullQueue(s.requests, len(s.requests) or 1, s.order)
    d.join('engine', 0)

    def pulls():
        while handed := d.pull(0):
            ticket, _, r = handed
            given[r.prompt_id, r.index] = ticket, r
            yield r

    for sample in engine.generate(pulls()):
        ticket, r = given.pop((sample.prompt_id, sample.index))
        s.observe(sample)
        if d.finish(ticket, 0):
            yield s.label(sample)
        if s.full(sample):
            d.drop(r)  # those that run end in vain: this engine cannot abort
