"""Longest first by prediction, on two real vLLM servers: how late is the last response, and how
long are slots idle?

    python benchmarks/scheduling.py [--quick] [--repeats 7]

Two servers of a tiny Qwen3-MoE (random weights, fp32, CPU build of vLLM) with a few slots each.
Lengths are heavy-tailed, belong to the prompt and vary within its group; the servers generate
exactly so many tokens, and the pool is not told (every request says the same `max_tokens`). Every
round runs five ways of giving the same requests out, in turn:

  round robin     dealt out before it starts: request i to server i % 2
  fifo            servers pull, in the order in which the requests come
  ours            servers pull, the longest by prediction first; the predictor has seen one earlier
                  step of the prompts, in which all lengths were drawn again
  cold            the same, by a predictor that has seen nothing: one probe of each prompt first
  oracle          servers pull, the truly longest first

Makespan: until the last answer. Idle: slot-seconds without a request until then. The bound is
max(slot-seconds of the oracle's run / slots, its longest request). A simulator, whose costs were
fitted to the runs of the first two kinds (what each server did, and how long it took), predicts the
makespans: `simulated` is its over the measured one.

Last line: one JSON object. `ratio` is ours over the oracle's makespan (goal: 1.05 or less),
`idle_cut` the share of round robin's idle time that ours saves (goal: .12 or more), `simulated_off`
how far the simulator is off, for the way it misses most (goal: .1 or less); medians over the rounds
of that round's ratio.
"""

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from dataclasses import replace
from unittest.mock import patch

os.environ.update(HF_HUB_OFFLINE='1', TRANSFORMERS_VERBOSITY='error', TQDM_DISABLE='1')
import torch

from compassrl.model.hf_config import write_config
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import hf_weights
from compassrl.records import Request, SamplingParams, derive_seed
from compassrl.rollout.pull_queue import PullQueue
from compassrl.rollout.rollout_settings import VllmConfig
from compassrl.rollout.schedule import LengthPredictor, Schedule, ScheduleConfig, prediction_error
from compassrl.rollout.vllm import dispatcher
from compassrl.rollout.vllm.pool import VllmPool
from course.simulator import Cluster, RoundRobin, fit_cost, idle_frac, makespan, work

LIMIT = 960


def cpu_model():
    try:
        lines = open('/proc/cpuinfo')
        return next(s.split(':')[1].strip() for s in lines if s.startswith('model name'))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def draw(a, step):
    "Requests of one step and the lengths of their responses: typical of the prompt, times noise"
    rng, typical = random.Random(f'noise{step}'), random.Random('typical')
    requests, lengths = [], {}
    for p in range(a.prompts):
        n = min(LIMIT / 2, 30 * typical.paretovariate(0.9))
        ids = (5 + p // 90, 5 + p % 90, *range(20, 36))
        for k in range(a.samples):
            requests.append(
                Request(f'bench-{p}', ids, k, derive_seed(step, p, k), SamplingParams(LIMIT))
            )
            lengths[f'bench-{p}', k] = max(1, min(LIMIT, round(n * rng.lognormvariate(0, a.noise))))
    return requests, lengths


def run(pool, requests, lengths, way, predictor):
    "Seconds and spans of one way"

    class Oracle(Schedule):
        def order(self, r):
            return -lengths[r.prompt_id, r.index]

    class InTurn(RoundRobin):
        def __init__(self, rs, slots, order):
            super().__init__(rs, slots, [range(0, len(rs), 2), range(1, len(rs), 2)])

    said = dispatcher.to_body

    def body(r):
        return said(replace(r, params=replace(r.params, max_tokens=lengths[r.prompt_id, r.index])))

    pool.schedule, pool.predictor = (
        ScheduleConfig('longest' if way in ('ours', 'cold') else 'fifo'),
        predictor,
    )
    schedule, queue = (
        Oracle if way == 'oracle' else Schedule,
        InTurn if way == 'round robin' else PullQueue,
    )

    def read(r, ids, reason, config):  # it ends where `body` told it to
        return ids

    sent = dict(to_body=body, check_ids=read, Schedule=schedule, PullQueue=queue)
    with patch.multiple(dispatcher, **sent):
        start = time.perf_counter()
        samples = list(pool.generate(requests))
    got = {(s.prompt_id, s.index): len(s.response_ids) for s in samples}
    assert got == lengths and len(samples) == len(lengths), (
        f'{way}: not the lengths that were asked for'
    )
    return [replace(s, start=s.start - start, end=s.end - start) for s in pool.spans]


def rows_of(spans, requests, lengths, slots):
    "What each server did, in its order, and the seconds it took: what `fit_cost` fits"
    for name in sorted({s.replica for s in spans}):
        mine = sorted((s for s in spans if s.replica == name), key=lambda s: s.start)
        rs = [requests[s.index] for s in mine]
        yield work(rs, [lengths[r.prompt_id, r.index] for r in rs], slots), max(s.end for s in mine)


def simulated(requests, lengths, cost, slots, way, predictor):
    "Makespan that the simulator gives to a way of the benchmark"
    plan = Schedule(
        requests, ScheduleConfig('longest' if way in ('ours', 'cold') else 'fifo'), predictor
    )
    order = plan.order if way != 'oracle' else lambda r: -lengths[r.prompt_id, r.index]
    num = [lengths[r.prompt_id, r.index] for r in requests]
    return makespan(Cluster(PullQueue(requests, slots, order), num, cost, 'ab', plan=plan).run())


def learnt(state):
    "A predictor that has seen an earlier step; one that has seen nothing"
    p = LengthPredictor()
    if state:
        p.load_state_dict(state)
    return p


WAYS = ('round robin', 'fifo', 'ours', 'cold', 'oracle')


def measure(pool, a):
    """Spans of every way, round after round; requests and lengths of each round; the predictor's
    error and state"""
    earlier, lengths = draw(a, 'earlier')
    warm = LengthPredictor()
    run(pool, earlier, lengths, 'fifo', warm)
    state, rounds, errors = warm.state_dict(), [], []
    for k in range(a.repeats):
        requests, lengths = draw(a, k)
        spans = {}
        for way in WAYS[k % len(WAYS) :] + WAYS[: k % len(WAYS)]:
            predictor = learnt(state if way == 'ours' else None)
            spans[way] = run(pool, requests, lengths, way, predictor)
            if way == 'ours':
                errors.append(prediction_error(*zip(*predictor.pairs)))
        rounds.append((requests, lengths, spans))
        print(
            f'  round {k}: ' + '  '.join(f'{w} {makespan(spans[w]):.2f} s' for w in WAYS),
            flush=True,
        )
    return rounds, errors, state


def main():
    global LIMIT
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        '--repeats', type=int, default=7, help='rounds, in each of which every way runs once'
    )
    p.add_argument('--slots', type=int, default=4, help='requests that one server runs at a time')
    p.add_argument(
        '--noise',
        type=float,
        default=0.3,
        help='standard deviation of the log lengths within a group',
    )
    p.add_argument('--quick', action='store_true', help='a small case, to see that it runs')
    a = p.parse_args()
    a.prompts, a.samples = (4, 2) if a.quick else (32, 4)
    if a.quick:
        a.repeats, LIMIT = 1, 24
    torch.set_num_threads(1)
    config = PolicyConfig(
        vocab_size=99,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        moe_intermediate_size=32,
        max_position_embeddings=1024,
    )
    policy = Policy(config, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        write_config(config, folder)
        pool = VllmPool(folder, VllmConfig(num_replicas=2), num_slots=a.slots)
        try:
            pool.load_weights(hf_weights(policy), 0)
            rounds, errors, state = measure(pool, a)
        finally:
            pool.close()

    def med(f):
        return statistics.median(f(*r) for r in rounds)

    def idle(spans):
        return idle_frac(spans, 2 * a.slots) * makespan(spans) * 2 * a.slots

    rows = [
        x
        for requests, lengths, spans in rounds
        for way in ('round robin', 'fifo')
        for x in rows_of(spans[way], requests, lengths, a.slots)
    ]
    cost = fit_cost(*zip(*rows))
    table = {}
    for w in WAYS:

        def guess(requests, lengths, spans):
            sim = simulated(
                requests, lengths, cost, a.slots, w, learnt(state if w == 'ours' else None)
            )
            return sim / makespan(spans[w])

        def bound(requests, lengths, spans):
            oracle = spans['oracle']
            return max(
                sum(s.end - s.start for s in oracle) / (2 * a.slots),
                max(s.end - s.start for s in oracle),
            )

        table[w] = dict(
            makespan_s=round(med(lambda q, n, s: makespan(s[w])), 3),
            over_oracle=round(med(lambda q, n, s: makespan(s[w]) / makespan(s['oracle'])), 3),
            over_bound=round(med(lambda q, n, s: makespan(s[w]) / bound(q, n, s)), 3),
            idle_slot_s=round(med(lambda q, n, s: idle(s[w])), 2),
            idle_frac=round(med(lambda q, n, s: idle_frac(s[w], 2 * a.slots)), 3),
            simulated=None if w == 'round robin' else round(med(guess), 3),
        )
        print(f'{w:12}' + '  '.join(f'{k} {v}' for k, v in table[w].items()))
    cut = med(lambda q, n, s: 1 - idle(s['ours']) / idle(s['round robin']))
    off = max(abs(t['simulated'] - 1) for t in table.values() if t['simulated'])
    error = {k: round(statistics.median(e[k] for e in errors), 3) for k in errors[0]}
    result = dict(
        name='scheduling',
        ratio=table['ours']['over_oracle'],
        units="makespan of ours / of the oracle's longest first",
        idle_cut=round(cut, 3),
        simulated_off=round(off, 3),
        ways=table,
        predictor=error,
        repeats=a.repeats,
        settings=dict(
            servers=2,
            slots=a.slots,
            prompts=a.prompts,
            samples=a.samples,
            noise=a.noise,
            limit=LIMIT,
            quick=a.quick,
        ),
        machine=dict(
            cpu=cpu_model(),
            cores=os.cpu_count(),
            threads=1,
            torch=torch.__version__,
            load=round(os.getloadavg()[0], 1),
        ),
    )
    print(
        f'ours ends {result["ratio"]:.3f} times as late as the oracle (goal 1.05) and saves '
        f"{cut:.0%} of round robin's idle time (goal 12%)"
        f'; the simulator is off by at most {off:.1%} (goal 10%)'
    )
    print(json.dumps(result))


if __name__ == '__main__':
    main()
