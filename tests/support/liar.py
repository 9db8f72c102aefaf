"""A server with the routes that a rollout asks for: honest, or false in one way.

Its tokens follow from the seed of a request, so honest answers are known beforehand."""

import asyncio
import base64
import io
import json
import random
import threading
from contextlib import contextmanager
from itertools import count

import numpy as np
from aiohttp import web

GENERATE, PROGRESS = '/inference/v1/generate', '/compassrl/progress'


def tokens_of(seed, most, vocab=99):
    "Tokens without the stop token 1"
    return [random.Random(f'{seed} {i}').randrange(2, vocab) for i in range(most)]


def routes_of(num_tokens, layers, experts, top):
    one = np.arange(num_tokens * layers)[:, None] + np.arange(top)
    return (one % experts).reshape(num_tokens, layers, top).astype(np.uint8)


def packed(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=array.dtype == object)
    return base64.b64encode(file.getvalue()).decode()


def honest(body, c):
    "What a vLLM would answer"
    p = body['sampling_params']
    ids = tokens_of(p['seed'], p['max_tokens'], c.vocab_size)
    ends = [i for i, t in enumerate(ids) if t in p['stop_token_ids']]
    ids, reason = (ids[: ends[0] + 1], 'stop') if ends else (ids, 'length')
    num = len(body['token_ids']) + len(ids) - 1
    routes = routes_of(num, c.num_hidden_layers, c.num_experts, c.num_experts_per_tok)
    content = [dict(token='', logprob=-0.5) for _ in ids]
    choice = dict(token_ids=ids, finish_reason=reason, logprobs=dict(content=content))
    return dict(choices=[choice | dict(routed_experts=packed(routes))])


class Server:
    "Answers in a thread of its own; `lie(path, number of the call, body)` is the false answer"

    def __init__(self, config, lie=None, slow_s=0.0):
        self.config, self.lie, self.slow_s = config, lie, slow_s
        self.version, self.calls, self.sent = '0', count(), 0
        self.loop, self.there = asyncio.new_event_loop(), threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        assert self.there.wait(30)

    def run(self):
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self.start())
        self.loop.run_forever()

    async def start(self):
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route('*', '/{path:.*}', self.answer)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, '127.0.0.1', 0)
        await site.start()
        self.url = f'http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}'
        self.there.set()

    async def answer(self, request):
        text = await request.read()
        body = json.loads(text) if text else {}
        false = self.lie and self.lie(request.path, next(self.calls), body)
        if false:
            return await false(self, request, body)
        return web.json_response(await self.true(request.path, body))

    async def true(self, path, body):
        if path == GENERATE:
            await asyncio.sleep(self.slow_s)
            return honest(body, self.config)
        if path == '/finish_weight_update':
            self.version = body.get('weight_version', self.version)
        return {
            PROGRESS: dict(tokens=0, requests=0, paused=False),
            '/weight_info': dict(weight_version=self.version),
            '/reset_prefix_cache': dict(success=True),
        }.get(path, {})

    def close(self):
        async def end():
            await self.runner.cleanup()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            self.loop.stop()

        asyncio.run_coroutine_threadsafe(end(), self.loop)
        self.thread.join(30)
        self.loop.close()


@contextmanager
def serving(*servers):
    try:
        yield [s.url for s in servers]
    finally:
        for s in servers:
            s.close()


# ---- false answers: coroutines of the server, the request and its body


def says(text, status=200, **headers):
    async def answer(server, request, body):
        return web.Response(body=text, status=status, headers=headers)

    return answer


def with_choice(change):
    "An honest answer of which one part is another"

    async def answer(server, request, body):
        out = honest(body, server.config)
        change(out['choices'][0])
        return web.json_response(out)

    return answer


async def hangs(server, request, body):
    await asyncio.sleep(600)


async def ends_in_the_middle(server, request, body):
    out = web.StreamResponse(headers={'Content-Length': '1000'})
    await out.prepare(request)
    await out.write(b'{"choices": [')
    request.transport.close()
    return out


async def drips(server, request, body):
    "A byte now and then, and never an end"
    out = web.StreamResponse()
    await out.prepare(request)
    while True:
        await out.write(b' ')
        await asyncio.sleep(0.05)


async def floods(server, request, body):
    out = web.StreamResponse()
    await out.prepare(request)
    part = b' ' * (1 << 16)
    while True:
        await out.write(part)
        server.sent += len(part)
