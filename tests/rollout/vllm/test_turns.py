"Episodes over a pool: turns join those that run, and a server that is lost takes none with it"

import asyncio
from dataclasses import replace

import pytest
import torch
from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from compassrl.data.tokenizer import StopStrings
from compassrl.model.hf_config import write_config
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import hf_weights
from compassrl.records import Request, RolloutEngine, SamplingParams, derive_seed
from compassrl.rollout.episodes import Episodes
from compassrl.rollout.partial import drawn_mask
from compassrl.rollout.rollout_settings import VllmConfig
from compassrl.rollout.vllm.dispatcher import from_body, to_body
from compassrl.rollout.vllm.pool import VllmPool
from tests.support.engine_samples import Echo
from tests.support.growing import law_requests_that_grow
from tests.support.liar import GENERATE, Server, honest, says, serving

CONFIG = PolicyConfig(vocab_size=12, head_dim=32, max_position_embeddings=256)
TOOL = Echo(7, max_calls=3)


class Same(RolloutEngine):
    "What an honest server answers, without one"

    def generate(self, requests, whole_groups=False):
        for r in requests:
            yield from_body(r, honest(to_body(r), CONFIG), CONFIG, 3, 0.0)


def requests(num=24, tokens=60):
    params = SamplingParams(tokens, stop_ids=(1,))
    return [
        Request(f'p{i // 4}', (2, 3, 4 + i // 4), i % 4, derive_seed(1, i), params)
        for i in range(num)
    ]


def told(samples):
    return {
        (s.prompt_id, s.index): (s.response_ids, drawn_mask(s).tolist(), s.finish_reason)
        for s in samples
    }


@pytest.fixture(scope='module')
def want():
    found = told(Episodes(Same(), TOOL).generate(requests()))
    assert {reason for *_, reason in found.values()} == {'length', 'call'}
    assert sum(not all(own) for _, own, _ in found.values()) > 20
    return found


@pytest.fixture
def model(tmp_path):
    write_config(CONFIG, tmp_path, torch.float32)
    return tmp_path


def episodes(model, *servers):
    "All of them, and the pool's memory of lengths"
    with serving(*servers) as urls:
        pool = VllmPool(model, VllmConfig(urls=tuple(urls), timeout_s=60.0), num_slots=3)
        try:
            pool.load_weights(hf_weights(Policy(CONFIG, 0)), 3)
            return told(Episodes(pool, TOOL).generate(requests())), pool
        finally:
            pool.close()


def test_requests_that_grow(model):
    "Where every server is idle and nothing is ready, the pool waits for what the caller adds"
    with serving(Server(CONFIG), Server(CONFIG)) as urls:
        pool = VllmPool(model, VllmConfig(urls=tuple(urls), timeout_s=60.0), num_slots=3)
        try:
            pool.load_weights(hf_weights(Policy(CONFIG, 0)), 3)
            law_requests_that_grow(pool, requests())
            law_requests_that_grow(pool, requests(8), more=1)
        finally:
            pool.close()


def test_a_text_ends_responses(model):
    "The pool's servers know no text: what they draw ends where one of the texts is whole"
    tok = Tokenizer(models.WordLevel({chr(97 + i): i for i in range(12)}, unk_token='a'))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.Split('', 'isolated'), decoders.Fuse()
    texts = ('gd', 'lb', 'fff')
    asked = [replace(r, params=replace(r.params, stop=texts)) for r in requests()]
    with serving(Server(CONFIG), Server(CONFIG)) as urls:
        pool = VllmPool(model, VllmConfig(urls=tuple(urls), timeout_s=60.0), num_slots=3)
        try:
            pool.load_weights(hf_weights(Policy(CONFIG, 0)), 3)
            found = list(Episodes(pool, stops=StopStrings(tok)).generate(asked))
        finally:
            pool.close()
    assert told(found) == told(Episodes(Same(), stops=StopStrings(tok)).generate(asked))
    ended = 0
    for s in found:
        said = tok.decode(s.response_ids)
        assert not any(t in said[:-1] for t in texts)
        ended += said.endswith(texts)
        assert (s.finish_reason == 'stop') == (said.endswith(texts) or s.response_ids[-1] == 1)
    assert ended > 2


class Waits:
    "The first request is answered after so many later turns of others: no wave could do that"

    def __init__(self, num):
        self.num, self.later, self.first, self.there = num, 0, True, asyncio.Event()

    def __call__(self, path, number, body):
        if path != GENERATE:
            return None
        self.later += len(body['token_ids']) > 3
        if self.later >= self.num:
            self.there.set()
        self.first, first = False, self.first
        return self.hold if first else None

    async def hold(self, server, request, body):
        await self.there.wait()
        return web.json_response(honest(body, CONFIG))


def test_no_turn_waits_for_all_others(model, want):
    "The first request is held back until thirty later turns of others have come"
    found, pool = episodes(model, Server(CONFIG, Waits(30)))
    assert found == want
    lengths = {p: sorted(len(v[0]) for k, v in want.items() if k[0] == p) for p, _ in want}
    assert {p: sorted(v) for p, v in pool.predictor.group.items()} == lengths


def test_a_server_that_is_lost_takes_no_turn_with_it(model, want):
    def fails(path, number, body):
        later = path == GENERATE and len(body['token_ids']) > 3
        return says(b'no', 500) if later else None

    found, pool = episodes(model, Server(CONFIG, fails), Server(CONFIG))
    assert found == want
    assert 'lost' in {s.outcome for s in pool.spans}
