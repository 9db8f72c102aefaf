"""Servers that hang, drip, flood, give garbage or lie: they are named, what was asked of them goes
elsewhere, and no answer of theirs is believed"""

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from compassrl.model.hf_config import write_config
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import hf_weights
from compassrl.records import Request, SamplingParams, derive_seed
from compassrl.rollout.rollout_settings import VllmConfig
from compassrl.rollout.vllm import replica
from compassrl.rollout.vllm.pool import VllmPool
from tests.support import chaos, liar
from tests.support.liar import GENERATE, PROGRESS, Server, says, serving, tokens_of, with_choice

pytestmark = chaos.kind('lying, hanging and slow servers')
CONFIG = PolicyConfig(vocab_size=99, head_dim=32, max_position_embeddings=128)
POLICY = Policy(CONFIG, 0)


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp('model')
    write_config(CONFIG, folder, torch.float32)
    return folder


def requests(num=12, tokens=8):
    params = SamplingParams(tokens, stop_ids=(1,))
    return [
        Request(f'p{i // 4}', (5 + i // 4, 6, 7), i % 4, derive_seed(0, i), params)
        for i in range(num)
    ]


def pool_of(model, urls, timeout_s=30.0):
    pool = VllmPool(model, VllmConfig(urls=tuple(urls), timeout_s=timeout_s), num_slots=4)
    try:
        pool.load_weights(hf_weights(POLICY), 3)
        return pool
    except BaseException:
        pool.close()
        raise


def check(samples):
    "Each request once, with the tokens, log-probs and routes of an honest server"
    found = {(s.prompt_id, s.index): s for s in samples}
    assert len(samples) == len(found) == len(requests())
    for r in requests():
        s = found[r.prompt_id, r.index]
        assert s.response_ids == tokens_of(r.seed % (1 << 64), 8)
        assert s.rollout_log_probs.tolist() == [-0.5] * 8
        shape = CONFIG.num_hidden_layers, CONFIG.num_experts, CONFIG.num_experts_per_tok
        want = liar.routes_of(len(s.prompt_ids) + 7, *shape)
        assert (s.routed_experts.numpy() == want).all()


def on(path, answer):
    return lambda asked, number, body: answer if asked == path else None


def put(**changes):
    return with_choice(lambda c: c.update(changes))


def log_probs(*values):
    return put(logprobs=dict(content=[dict(logprob=v) for v in values]))


def routes(array):
    return put(routed_experts=liar.packed(array))


SHAPE = 10, CONFIG.num_hidden_layers, CONFIG.num_experts_per_tok
IDS = [2, 3, 4, 5, 6, 7, 8, 9]
GARBAGE = {
    'HTML with status 200': (says(b'<html>hello</html>'), 'it answered .*html'),
    'an empty body': (says(b''), 'it answered .None'),
    'a list': (says(b'[]'), "where 'choices' should be"),
    'no choices': (says(b'{"choices": []}'), "where 'token_ids' should be"),
    'choices of another kind': (says(b'{"choices": {"a": 1}}'), "where 'choices' should be"),
    'deep nesting': (says(b'[' * 100_000), 'it answered'),
    'NaN in JSON': (says(b'{"choices": NaN}'), 'it answered'),
    'no UTF-8': (says(b'{"choices": "\xff\xfe"}'), 'it answered'),
    'status 500': (says(b'no', 500), 'HTTP 500 no'),
    'status 429': (says(b'slow down', 429), 'HTTP 429 slow down'),
    'another address': (says(b'', 302, Location='http://127.0.0.1:9/'), 'HTTP 302'),
    'compressed': (says(b'\x1f\x8b' + bytes(20), 200, **{'Content-Encoding': 'gzip'}), '.'),
    'half an answer': (liar.ends_in_the_middle, 'ClientPayloadError|ServerDisconnected|Connection'),
    'no tokens': (put(token_ids=[]), 'answered with 0 tokens'),
    'too many tokens': (put(token_ids=IDS * 2), 'answered with 16 tokens of 1 to 8'),
    'fewer tokens than were asked for': (put(token_ids=IDS[:5]), r'5 tokens'),
    'a token below 0': (put(token_ids=[-1, *IDS[1:]]), 'the token -1'),
    'a token beyond the vocabulary': (put(token_ids=[99, *IDS[1:]]), 'the token 99'),
    'a token that is text': (put(token_ids=['7', *IDS[1:]]), "the token '7'"),
    'a token that is a float': (put(token_ids=[7.0, *IDS[1:]]), 'the token 7.0'),
    'a token that is true': (put(token_ids=[True, *IDS[1:]]), 'the token True'),
    'a stop in the middle': (put(token_ids=[2, 1, *IDS[2:]]), 'the last is no end'),
    'a stop that is none': (put(finish_reason='stop'), r'the last is no end \(stop\)'),
    'aborted': (put(finish_reason='abort'), "finish_reason='abort'"),
    'no reason': (put(finish_reason=None), "where 'finish_reason' should be"),
    'too few log-probs': (log_probs(*[-0.5] * 7), '8 tokens with log-probs'),
    'a positive log-prob': (log_probs(0.5, *[-0.5] * 7), 'log-probs .0.5'),
    'an infinite log-prob': (log_probs(-1e999, *[-0.5] * 7), '.'),
    'a log-prob that is text': (log_probs('-0.5', *[-0.5] * 7), "where 'logprob' should be"),
    'no log-probs': (put(logprobs=None), "where 'logprobs' should be"),
    'routes that are text': (put(routed_experts='hello'), r'routes that are not \(10'),
    'routes of another shape': (routes(np.zeros((3, 3), 'u1')), r'not \(10.*uint8\(3, 3\)'),
    'routes that are floats': (routes(np.zeros(SHAPE)), 'not .*float64'),
    'routes that are a pickle': (routes(np.full(SHAPE, None)), 'not .*object'),
    'an expert that is none': (routes(np.full(SHAPE, 200, 'u1')), 'expert 200 of'),
}


@pytest.mark.parametrize('name', GARBAGE)
def test_garbage_is_lost_work(name, model):
    "The other server does it; nobody believes a word of the liar"
    answer, reason = GARBAGE[name]
    good, bad = Server(CONFIG), Server(CONFIG, on(GENERATE, answer))
    with serving(good, bad) as urls:
        pool = pool_of(model, urls)
        try:
            check(list(pool.generate(requests())))
            honest, false = pool.replicas.values()
        finally:
            pool.close()
    assert honest.losses == 0 and false.losses > 0
    assert re.search(reason, false.why), false.why


def test_an_answer_without_an_end_has_one(model):
    "The reply is cut off at a size that no answer has, long before memory is full"
    good, bad = Server(CONFIG), Server(CONFIG, on(GENERATE, liar.floods))
    with serving(good, bad) as urls:
        pool = pool_of(model, urls)
        try:
            check(list(pool.generate(requests())))
            false = pool.replicas[urls[1]]
        finally:
            pool.close()
    assert re.search(r'answered with more than \d+ bytes', false.why), false.why
    assert bad.sent < 64 << 20  # bytes of four requests, with what lies in buffers on the way


async def claims(server, request, body):
    "More and more tokens, which never come"
    server.sent += 10**6
    return await says(json.dumps(dict(tokens=server.sent, paused=False)).encode())(
        server, request, body
    )


async def wavers(server, request, body):
    server.sent = 1 - server.sent
    return await says(json.dumps(dict(tokens=server.sent, paused=False)).encode())(
        server, request, body
    )


HANGS = {
    'hangs': ({GENERATE: liar.hangs, PROGRESS: liar.hangs}, '.'),
    'drips': ({GENERATE: liar.drips}, 'gave nothing for 10 s'),
    'drips everywhere': ({GENERATE: liar.drips, PROGRESS: liar.drips}, '.'),
    'says that it runs': ({GENERATE: liar.hangs}, 'gave nothing for 10 s'),
    'is paused': (
        {GENERATE: liar.hangs, PROGRESS: says(b'{"paused": true, "tokens": 3}')},
        'it is paused',
    ),
    'claims what cannot be': ({GENERATE: liar.hangs, PROGRESS: claims}, 'runs .* tokens, of at'),
    'wavers': ({GENERATE: liar.hangs, PROGRESS: wavers}, 'gave nothing for 10 s'),
    'progress is garbage': ({GENERATE: liar.hangs, PROGRESS: says(b'<a>')}, 'it answered'),
}


@pytest.fixture(scope='module')
def waits(model):
    "Of each of them the samples that are drawn beside it, and the replicas: all wait at once"
    with ExitStack() as stack, ThreadPoolExecutor(len(HANGS)) as threads:
        pools = {}
        for name, (lies, _) in HANGS.items():
            bad = Server(CONFIG, lambda path, number, body, lies=lies: lies.get(path))
            urls = stack.enter_context(serving(Server(CONFIG), bad))
            pools[name] = pool_of(model, urls, timeout_s=10.0)
            stack.callback(pools[name].close)
        jobs = {k: threads.submit(list, p.generate(requests())) for k, p in pools.items()}
        wait(jobs.values())
        return {k: (jobs[k], p.replicas.values()) for k, p in pools.items()}


@pytest.mark.parametrize('name', HANGS)
def test_a_server_that_gives_nothing(name, waits):
    "Within the time that it is given, and not the longer the more it talks"
    job, (honest, false) = waits[name]
    reason = HANGS[name][1]
    check(job.result())
    assert honest.losses == 0 and false.losses > 0
    assert re.search(reason, false.why), false.why


def test_a_slow_server_is_left_in_peace(model):
    "Its answers take longer than it may be silent, but it has more and more tokens"

    async def steady(server, request, body):
        server.sent += 1
        told = dict(tokens=min(server.sent, 32), paused=False)
        return await says(json.dumps(told).encode())(server, request, body)

    slow = Server(CONFIG, on(PROGRESS, steady), slow_s=6.0)
    with serving(slow) as urls:
        pool = pool_of(model, urls, timeout_s=4.0)
        try:
            assert len(list(pool.generate(requests(4)))) == 4
            assert pool.replicas[urls[0]].losses == 0
        finally:
            pool.close()


CONTROL = {
    'another version': ('/weight_info', says(b'{"weight_version": "2"}'), "has weights '2'"),
    'no version': ('/weight_info', says(b'[]'), "where 'weight_version' should be"),
    'a version that is a number': ('/weight_info', says(b'{"weight_version": 3}'), 'should be'),
    'a cache that stays': ('/reset_prefix_cache', says(b'{"success": false}'), 'did not drop'),
    'a cache of garbage': ('/reset_prefix_cache', says(b'"yes"'), "where 'success' should be"),
    'weights refused': ('/update_weights', says(b'no room', 500), 'HTTP 500 no room'),
    'weights that hang': ('/update_weights', liar.hangs, 'TimeoutError'),
    'a flood': ('/pause', liar.floods, 'more than 1048576 bytes'),
    'an end that drips': ('/finish_weight_update', liar.drips, 'TimeoutError'),
}


@pytest.mark.parametrize('name', CONTROL)
def test_whoever_does_not_take_the_weights_gives_no_sample(name, model):
    path, answer, reason = CONTROL[name]
    good, bad = Server(CONFIG), Server(CONFIG, on(path, answer))
    with serving(good, bad) as urls:
        pool = pool_of(model, urls, timeout_s=3.0)
        try:
            check(list(pool.generate(requests())))
            assert {s.replica for s in pool.spans if s.outcome == 'done'} == {urls[0]}
            pool.servers.submit(pool.servers.settle()).result()
            honest, false = pool.replicas.values()
            assert honest.losses == 0 and honest.up and false.gone and not false.up
        finally:
            pool.close()
    assert re.search(reason, false.why), false.why


@pytest.mark.parametrize('path', ['/pause', '/update_weights', '/finish_weight_update', '/resume'])
def test_a_busy_hang_in_an_update_is_lost_long_before_the_time_of_a_call(path, model, monkeypatch):
    """It answers that it is well, and never ends: the bound follows from the bytes that it takes,
    not from `timeout_s`"""
    monkeypatch.setattr(replica, 'silence_s', 1.0)
    good, bad = Server(CONFIG), Server(CONFIG, on(path, liar.hangs))
    call = replica.Replica.call

    def patient(self, method, path, body=None, timeout_s=None, *more):
        if timeout_s and self.url == urls[0]:  # it may be held up: the liar alone has little time
            timeout_s = 60.0
        return call(self, method, path, body, timeout_s, *more)

    monkeypatch.setattr(replica.Replica, 'call', patient)
    with serving(good, bad) as urls:
        pool = pool_of(model, urls, timeout_s=600.0)
        try:
            honest, false = pool.replicas.values()
            assert honest.up and not false.up and path in false.why
        finally:
            pool.close()


def test_who_is_sent_much_has_longer(monkeypatch, tmp_path):
    monkeypatch.setattr(replica, 'silence_s', 0.2)
    monkeypatch.setattr(replica, 'slow_disk', 1000.0)
    given = {}

    async def call(self, method, path, body, limit_s):
        given[path] = limit_s

    monkeypatch.setattr(replica.Replica, 'call', call)
    (part := tmp_path / 'part').write_bytes(bytes(500))

    async def update():
        c = replica.Replica('a', None, 600.0)
        await c.begin()
        for _ in range(2):
            await c.send(part)
        with pytest.raises(replica.Lost):  # this answer has no field
            await c.end(1)

    asyncio.run(update())
    assert given['/pause'] == 0.2 and given['/update_weights'] == pytest.approx(0.7)
    assert given['/finish_weight_update'] == pytest.approx(1.2)


def test_nobody_honest_is_left(model):
    with serving(Server(CONFIG, on(GENERATE, says(b'[]')))) as urls:
        pool = pool_of(model, urls)
        try:
            says_so = f'no vLLM server is left: {urls[0]}: .*choices'
            with pytest.raises(RuntimeError, match=says_so):
                list(pool.generate(requests()))
        finally:
            pool.close()


@pytest.mark.parametrize('answer', [says(b'', 503), liar.hangs, liar.drips])
def test_a_server_that_is_never_ready_is_named(answer, model):
    with serving(Server(CONFIG, on('/health', answer))) as urls:
        with pytest.raises(RuntimeError, match=f'{urls[0]} was not ready after 1 s'):
            pool_of(model, urls, timeout_s=1.0)


@pytest.mark.parametrize('status', [401, 403])
def test_the_wrong_secret_ends_the_run(status, model):
    "Nothing is asked twice, and the variable is named"
    with serving(Server(CONFIG, on('/health', says(b'', status)))) as urls:
        with pytest.raises(ValueError, match='COMPASSRL_SECRET has to be the same'):
            pool_of(model, urls)
