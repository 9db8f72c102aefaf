"Real vLLM servers: exact after every sync; lost ones cost no sample and count none twice"

import asyncio
import functools
import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import patch
from urllib.parse import urlsplit

import psutil
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM

from compassrl.data.tokenizer import StopStrings
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import hf_weights, load_hf_weights, save_pretrained
from compassrl.records import Request, SamplingParams, collate, derive_seed
from compassrl.rollout.episodes import Episodes, Turns
from compassrl.rollout.fp8 import fp8_weights
from compassrl.rollout.partial import PartialResponses
from compassrl.rollout.rollout_settings import VllmConfig
from compassrl.rollout.schedule import LengthPredictor, ScheduleConfig, prediction_error
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.rollout.vllm import dispatcher, replica, replica_manager, server
from compassrl.rollout.vllm import pool as vllm_pool
from compassrl.rollout.vllm.dispatcher import from_body
from compassrl.rollout.vllm.messages import shared_folder
from compassrl.rollout.vllm.pool import VllmPool
from compassrl.rollout.vllm.replica import Replica
from compassrl.rollout.vllm.server import ServerProcess, flags, server_env
from tests.support import vllm_fork_server as vllm_forks
from tests.support.engine_samples import Echo

CONFIG = PolicyConfig(
    vocab_size=99,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    moe_intermediate_size=32,
    mlp_only_layers=(0,),
    num_hidden_layers=3,
    max_position_embeddings=1024,
)


def lively(seed):
    p = Policy(CONFIG, seed)
    with torch.no_grad():
        for w in p.parameters():
            w.mul_(8 if w.dim() > 1 else 1)
    return p


POLICIES = [lively(0), lively(1)]


def requests(num, tokens=24, temperature=0.8, salt=0):
    params = SamplingParams(tokens, temperature, stop_ids=(1,))
    return [
        Request(f'p{i // 4}', (5 + i // 4, 6, 7), i % 4, derive_seed(salt, i), params)
        for i in range(num)
    ]


def key(s):
    return s.prompt_id, s.index


def tokens(samples):
    return {key(s): s.response_ids for s in samples}


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp('model')
    save_pretrained(POLICIES[0], folder)
    return folder


@pytest.fixture(scope='module')
def pool(model):
    vllm_forks.adopt(model / 'forks.log')
    pool = VllmPool(model, VllmConfig(num_replicas=2), num_slots=8)
    pool.load_weights(hf_weights(POLICIES[0]), 0)
    yield pool
    pool.close()
    assert all(not r.server.alive for r in pool.replicas.values())
    assert not [p for p in shared_folder().glob(f'compassrl-*-{os.getpid()}-*')]


@pytest.fixture(scope='module')
def reference(pool):
    return tokens(pool.generate(requests(48)))


def agrees(samples, policy, temperature=0.8):
    "Log-probs of the sampled tokens, and every route, are those of this policy"
    b = collate(samples)
    logits = torch.zeros(*b.token_ids.shape, CONFIG.vocab_size)
    with torch.no_grad():
        hidden, routes = policy(b.token_ids, b.token_mask)
        logits[b.token_mask] = policy.logits(hidden)
    own = (
        (logits / temperature).log_softmax(-1)[:, :-1].gather(-1, b.token_ids[:, 1:, None])[..., 0]
    )
    gap = (own - b.rollout_log_probs[:, 1:])[b.response_mask[:, 1:]].abs()
    full = torch.zeros(*b.token_ids.shape, *routes.shape[1:], dtype=torch.long)
    full[b.token_mask] = routes
    same = (full.sort(-1)[0] == b.routed_experts.long().sort(-1)[0]).all(-1).all(-1)[b.fed_mask]
    return (
        float(gap.max()) < 1e-4
        and float(gap.mean()) < 2e-6
        and float(same.float().mean()) > 0.99
        and bool(b.routes_valid[b.fed_mask].all())
    )


def each_replica(pool, rs):
    "The samples of every replica alone"
    out = {}
    for name in pool.replicas:
        others = [r for n, r in pool.replicas.items() if n != name]
        for r in others:
            r.up = False
        out[name] = list(pool.generate(rs))
        assert {s.replica for s in pool.spans} == {name}
        for r in others:
            r.up = True
    return out


# ---- what it needs


def test_a_pool_needs_no_vllm():
    "Only its servers do: importing vLLM takes many seconds"
    code = (
        'import sys, compassrl.rollout.vllm.pool, compassrl.runs.factory; '
        'assert "vllm" not in sys.modules'
    )
    subprocess.run([sys.executable, '-c', code], check=True)


def imported(statement):
    "Top-level names of all that a fresh process has after it"
    code = f'import sys; {statement}; print(*sys.modules)'
    said = subprocess.check_output([sys.executable, '-c', code], text=True)
    return {name.partition('.')[0] for name in said.split()}


def test_a_supervisor_needs_the_standard_library_alone():
    "There is one beside every server"
    new = imported('import compassrl.rollout.vllm.server') - imported('pass')
    assert new - {'compassrl', '__mp_main__'} <= sys.stdlib_module_names


# ---- what it computes


def test_log_probs_of_transformers(pool, model):
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for s in pool.generate(requests(8, temperature=0.7)):
        with torch.no_grad():
            logits = hf(torch.tensor([s.prompt_ids + s.response_ids])).logits[0]
        own = (logits / 0.7).log_softmax(-1)[len(s.prompt_ids) - 1 : -1]
        own = own[torch.arange(len(s.response_ids)), s.response_ids]
        torch.testing.assert_close(s.rollout_log_probs, own, rtol=0, atol=1e-4)


def test_samples_are_complete(pool):
    "Both replicas work; stop tokens stay, routes of dense layers are 0, greedy is certain"
    rs = requests(24)
    out = list(pool.generate(rs))
    assert agrees(out, POLICIES[0]) and Counter(map(key, out)) == Counter(map(key, rs))
    assert {s.replica for s in pool.spans} == {'replica 0', 'replica 1'}
    assert all(r.losses == 0 for r in pool.replicas.values())
    assert {s.index for s in pool.spans} == set(range(24))
    assert {s.outcome for s in pool.spans} == {'done'}
    for s in out:
        assert s.weight_version == 0 and s.finish_reason == (
            'stop' if s.response_ids[-1] == 1 else 'length'
        )
        assert s.routed_experts.dtype == torch.uint8 and not s.routed_experts[:, 0].any()
        assert s.timings['rollout_start'] < s.timings['rollout_end']
    greedy = list(pool.generate(requests(4, temperature=0)))
    assert (
        all(not s.rollout_log_probs.any() for s in greedy)
        and len({tuple(s.response_ids) for s in greedy}) == 1
    )


def test_seeds(pool, reference):
    "Equal seeds give equal tokens on either replica, in any order, alone or in company"
    rs = requests(48)
    for out in each_replica(pool, rs[:12]).values():
        assert tokens(out).items() <= reference.items()
    assert tokens(pool.generate(rs[::-1])) == reference
    assert tokens(pool.generate(rs[5:6])).items() <= reference.items()
    assert tokens(pool.generate(requests(48, salt=1))) != reference


def test_responses_in_parts(pool):
    "A server goes on with what was drawn: log-probs and routes are those of one pass"
    partial_responses = PartialResponses(7)
    partial_responses.begin(requests(24))
    while partial_responses.running:
        for s in pool.generate(partial_responses.parts()):
            partial_responses.take(s)
    _, out = partial_responses.whole_groups()
    assert agrees(out, POLICIES[0]) and Counter(map(key, out)) == Counter(map(key, requests(24)))
    assert max(len(s.response_ids) for s in out) == 24


def calls(pool, rs):
    "The token that is drawn most often, as the end of a call"
    drawn = Counter(i for s in pool.generate(rs) for i in s.response_ids if i != 1)
    return Echo(drawn.most_common(1)[0][0])


def test_turns_of_episodes(pool):
    "The same as alone; where slots are free, each turn is drawn where its prefix was read"
    rs = requests(24, 90)
    tool, where = calls(pool, rs), {}
    alone = {key(s): s for r in rs[::3] for s in Episodes(pool, tool).generate([r])}
    found = list(Episodes(pool, tool).generate(rs))
    assert len(found) == 24 and agrees(found, POLICIES[0])
    assert len(alone) == 8 and tokens(alone.values()).items() <= tokens(found).items()
    lengths = Counter(len(s.response_ids) for s in found)
    assert Counter(n for g in pool.predictor.group.values() for n in g) == lengths
    turns = Turns(rs[:12], tool)  # The two servers have 16 slots
    for s in pool.generate(turns):
        where.setdefault(key(s), []).append(s.timings['replica'])
        turns.take(s)
    assert all(len(set(w)) == 1 for w in where.values()) and max(map(len, where.values())) > 2
    assert {w[0] for w in where.values()} == {0, 1}


def texts_of_four():
    "Tokens of one to four letters: a text may lie within one, or across several"
    words = [''.join(w) for n in range(1, 5) for w in product('abc', repeat=n)]
    tok = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words[: CONFIG.vocab_size])}))
    tok.decoder = decoders.Fuse()
    return tok


@pytest.fixture(scope='module')
def greedy(pool):
    "What an embedded engine draws, and servers as well; nothing ends it"
    asked = [replace(r, params=SamplingParams(60, 0.0)) for r in requests(24)[::3]]
    embedded = TorchRollout(CONFIG, 8)
    embedded.load_weights(hf_weights(POLICIES[0]), 0)
    whole = tokens(embedded.generate(asked))
    assert tokens(pool.generate(asked)) == whole
    return asked, embedded, whole


@pytest.mark.parametrize('how', ['within a token', 'across tokens', 'several'])
def test_a_text_ends_responses_where_the_embedded_engine_ends_them(pool, greedy, how):
    asked, embedded, whole = greedy
    tok, ended = texts_of_four(), 0
    drawn = [[tok.decode([i]) for i in ids] for ids in whole.values()]
    within = next(t[1:3] for t in drawn[0][20:] if len(t) == 4)
    across = drawn[1][9][-1] + drawn[1][10] + drawn[1][11][0]
    texts = {'within a token': (within,), 'across tokens': (across,)}.get(
        how, (across, 'bbbb', within)
    )
    stopped = [replace(r, params=replace(r.params, stop=texts)) for r in asked]
    mine, served = (
        {key(s): s for s in Episodes(e, stops=StopStrings(tok)).generate(stopped)}
        for e in (embedded, pool)
    )
    assert len(served) == len(asked) and agrees([*served.values()], POLICIES[0], 1e-6)
    for k, s in served.items():
        said = [tok.decode(whole[k][:n]) for n in range(61)]
        end = next((n for n, t in enumerate(said) if any(x in t for x in texts)), None)
        assert s.response_ids == whole[k][:end] == mine[k].response_ids
        assert s.finish_reason == mine[k].finish_reason == ('stop' if end else 'length')
        assert len(s.rollout_log_probs) == len(s.response_ids)
        fed = len(s.prompt_ids) + len(s.response_ids) - 1
        assert len(s.routed_experts) == len(s.routes_valid) == fed and s.routes_valid.all()
        ended += bool(end)
    assert ended >= 2


def test_a_port_is_given_once(monkeypatch):
    "A server that is still loading has not bound its own"
    first, second = server.free_port(), server.free_port()
    drawn = [first, first, second]
    monkeypatch.setattr(server, '_given', deque())
    monkeypatch.setattr(server.random, 'randrange', lambda *_: drawn.pop(0))
    assert [server.free_port(), server.free_port()] == [first, second]


def held(max_tokens, until):
    "Answers to requests for so many tokens come after all that `until` waits for, on any machine"

    async def call(self, method, path, body=None, *more, call=Replica.call, **kw):
        answer = await call(self, method, path, body, *more, **kw)
        if body and body.get('sampling_params', {}).get('max_tokens') == max_tokens:
            start = time.monotonic()
            while not until():
                assert time.monotonic() < start + 300, 'nobody gets what has come'
                await asyncio.sleep(0.01)
        return answer

    return call


def test_yields_as_they_finish(pool):
    "A short response does not wait for a long one that began before it"
    long, short, came = requests(1, 120)[0], requests(8, 2)[4:], []
    long = replace(long, params=replace(long.params, stop_ids=()))
    with patch.object(Replica, 'call', held(120, lambda: len(came) == 4)):
        for s in pool.generate([long, *short]):
            came.append(key(s))
    assert len(came) == 5 and came[-1] == key(long)


def test_order(pool):
    "The longest by prediction begin first, on both; the predictor learns from every answer"

    class Known(LengthPredictor):
        def link(self, prompt_id, num_tokens):
            return 'own', 24 * 0.7 ** (9 - int(prompt_id[1:]))

    rs, before = requests(40), pool.predictor
    pool.predictor = Known()
    try:
        out = list(pool.generate(rs))
        began = sorted(pool.spans, key=lambda s: s.start)
        assert {s.index for s in began[:16]} == set(range(24, 40))
        first = {s.replica: s.index for s in reversed(began)}  # with what each of them began
        assert len(first) == 2 and min(first.values()) >= 24
        lengths = {
            p: sorted(len(s.response_ids) for s in out if s.prompt_id == p)
            for p in {s.prompt_id for s in out}
        }
        assert {p: sorted(n) for p, n in pool.predictor.group.items()} == lengths and len(
            pool.predictor.pairs
        ) == 40
        assert {s.timings['replica'] for s in out} == {0.0, 1.0}
        said = pool.measured()
        assert said['replicas_lost'] == sum(r.losses for r in pool.replicas.values())
        error = prediction_error(*zip(*pool.predictor.pairs))
        assert (said['length_log_error'], said['length_spearman']) == (
            error['log_error'],
            error['spearman'],
        )
    finally:
        pool.predictor = before


def test_sixteen_tokens_are_sixteen(pool):
    "vLLM's default for max_tokens, which it leaves out: the server must not make no limit of it"
    out = list(pool.generate([replace(r, params=SamplingParams(16)) for r in requests(4)]))
    assert [len(s.response_ids) for s in out] == [16] * 4


@pytest.mark.parametrize('group', [2, 8], ids=['each group on one server', 'one group on both'])
def test_over_provision(pool, group):
    "Groups are whole, under their own indices; what was not needed is aborted, and short ones win"
    long, short = SamplingParams(150, 0.8), SamplingParams(2, 0.8)
    rs = [
        Request(
            f'p{i // group}',
            (5 + i // group, 6, 7),
            i % group,
            derive_seed(0, i),
            (long, short)[i % 2],
        )
        for i in range(8)
    ]
    before, pool.schedule = pool.schedule, ScheduleConfig('fifo', over_provision=1.0)
    try:
        with patch.object(Replica, 'call', held(150, lambda: False)):
            out = list(pool.generate(rs))  # all 16 begin at once
    finally:
        pool.schedule = before
    assert Counter(map(key, out)) == Counter(map(key, rs)) and agrees(out, POLICIES[0])
    assert {len(s.response_ids) for s in out} == {2}  # each group took its short ones
    assert Counter(s.outcome for s in pool.spans) == dict(done=8, dropped=8)
    assert Counter(s.replica for s in pool.spans) == {'replica 0': 8, 'replica 1': 8}, (
        'each span where it ran'
    )
    assert sorted(len(s.response_ids) for s in pool.generate(rs)) == [2] * 4 + [150] * 4


def test_fp8_weights_without_kernels(pool, reference):
    "On a CPU the weights that are synced are those of FP8, and nothing else changes"
    fp8 = Policy(CONFIG, 0)
    load_hf_weights(fp8, fp8_weights(hf_weights(POLICIES[0])))
    pool.quantization = 'fp8'
    try:
        pool.load_weights(hf_weights(POLICIES[0]), 0)
        out = list(pool.generate(requests(8)))
        assert agrees(out, fp8) and not agrees(out, POLICIES[0])
    finally:
        pool.quantization = ''
        pool.load_weights(hf_weights(POLICIES[0]), 0)
    assert tokens(pool.generate(requests(8))).items() <= reference.items()


def test_routes_that_get_lost_on_the_way(pool, reference, monkeypatch):
    "A gateway that strips them is named; the pool goes on to work"

    def stripped(*args):
        s = from_body(*args)
        s.routed_experts = s.routes_valid = None
        return s

    with monkeypatch.context() as m:
        m.setattr(dispatcher, 'from_body', stripped)
        with pytest.raises(ValueError, match='sent no routes'):
            list(pool.generate(requests(4)))
    assert tokens(pool.generate(requests(48))) == reference


def test_leaving_early(pool, reference):
    "Whoever closes the generator can load weights and go on"
    stream = pool.generate(requests(48))
    next(stream)
    with pytest.raises(RuntimeError, match='one `generate` at a time'):
        next(pool.generate(requests(1)))
    with pytest.raises(RuntimeError, match='before loading weights'):
        pool.load_weights([], 1)
    stream.close()
    pool.load_weights(hf_weights(POLICIES[0]), 0)
    assert tokens(pool.generate(requests(48))) == reference


def test_no_connection_is_left_idle(pool):
    "A server closes it when it likes: a request on its way there looked like a lost server"
    list(pool.generate(requests(8)))
    ports = {urlsplit(r.url).port for r in pool.replicas.values()}

    def idle():
        return [
            c
            for c in psutil.Process().net_connections('tcp')
            if c.raddr and c.raddr.port in ports and c.status == 'ESTABLISHED'
        ]

    for _ in range(100):
        if not idle():
            return
        time.sleep(0.1)
    assert not idle()


@pytest.mark.parametrize(
    'bad, says',
    [
        (dict(prompt_ids=(5, 99)), 'token id 99 is outside 0..98'),
        (dict(prompt_ids=()), 'empty'),
        (dict(prompt_ids=(5,) * 1020), 'exceed the context of 1024'),
    ],
)
def test_bad_requests_reach_no_server(pool, bad, says):
    with pytest.raises(ValueError, match=says):
        list(pool.generate([*requests(3), replace(requests(1)[0], **bad)]))
    assert all(r.up for r in pool.replicas.values())


# ---- weights


def test_sync_is_exact_on_every_replica(pool):
    "The same prompts, long enough for the prefix cache: nothing of the old weights is left"
    rs = [replace(r, prompt_ids=r.prompt_ids + tuple(range(8, 72))) for r in requests(8)]
    for version in (1, 2, 3):
        policy = POLICIES[version % 2]
        small = functools.partial(vllm_pool.file_parts, max_bytes=100_000)
        with patch.object(vllm_pool, 'file_parts', small):
            pool.load_weights(hf_weights(policy), version)
        for out in each_replica(pool, rs).values():
            assert agrees(out, policy) and not agrees(out, POLICIES[1 - version % 2])
            assert {s.weight_version for s in out} == {version}
        assert len(pool.servers.parts) > 3
        size = sum(path.stat().st_size for path in pool.servers.parts)
        assert size > sum(w.nbytes for _, w in hf_weights(policy))
        assert sorted(shared_folder().glob(f'compassrl-*-{os.getpid()}-*')) == sorted(
            pool.servers.parts
        )


def test_a_sync_that_breaks_off(pool, reference):
    weights = list(hf_weights(POLICIES[1]))
    small = functools.partial(vllm_pool.file_parts, max_bytes=100_000)
    with (
        patch.object(vllm_pool, 'file_parts', small),
        pytest.raises(ValueError, match='1 weights are missing'),
    ):
        pool.load_weights(weights[:-1], 4)
    with pytest.raises(RuntimeError, match='no weights: call `load_weights` first'):
        next(pool.generate(requests(1)))
    pool.load_weights(hf_weights(POLICIES[0]), 5)
    assert tokens(pool.generate(requests(48))) == reference
    assert all(agrees(out, POLICIES[0]) for out in each_replica(pool, requests(8)).values())


def test_a_colocated_pool_sleeps_when_it_has_nothing_to_do(pool):
    calls = []

    def note(what):
        async def step(r, *how):
            calls.append(' '.join([what, *how]))

        return step

    shared = replace(pool.servers.vllm, colocated=True)
    with (
        patch.multiple(Replica, sleep=note('sleep'), wake=note('wake')),
        patch.object(pool.servers, 'vllm', shared),
    ):
        assert len(list(pool.generate(requests(8)))) == 8
        assert calls == ['wake'] * 2 + ['sleep'] * 2
        pool.load_weights(hf_weights(POLICIES[0]), 0)
    assert calls[4:] == ['wake weights'] * 2 + ['wake kv_cache'] * 2


# ---- replicas that fail; the order matters: what one test breaks, the next finds coming back


def hurt(pool, name, sig):
    pool.replicas[name].server.signal(sig)


def test_killed_in_mid_generation(pool, reference):
    "All samples arrive exactly once, with the tokens that they would have had"
    out = []
    for s in pool.generate(requests(48)):
        out.append(s)
        if len(out) == 5:
            hurt(pool, 'replica 0', signal.SIGKILL)
    assert len(out) == 48 and tokens(out) == reference and agrees(out, POLICIES[0])
    assert Counter(s.index for s in pool.spans if s.outcome == 'done') == Counter(range(48))
    assert {s.replica for s in pool.spans if s.outcome == 'lost'} == {'replica 0'}
    assert [r.losses for r in pool.replicas.values()] == [1, 0]


def test_hangs_in_mid_generation(pool, reference):
    "The other one hangs before the first is back: the queue waits, nothing is lost or doubled"
    out, before = [], pool.servers.vllm
    pool.servers.vllm = replace(before, timeout_s=15.0)
    try:
        for s in pool.generate(requests(48)):
            out.append(s)
            if len(out) == 5:
                hurt(pool, 'replica 1', signal.SIGSTOP)
    finally:
        pool.servers.vllm = before
    assert len(out) == 48 and tokens(out) == reference and agrees(out, POLICIES[0])
    assert {s.replica for s in pool.spans if s.outcome == 'lost'} >= {'replica 1'}
    assert 'gave nothing for 15 s' in pool.replicas['replica 1'].why


def test_back_with_the_present_weights(pool):
    pool.servers.submit(pool.servers.settle()).result()
    assert all(r.up and r.server.alive and r.losses == 1 for r in pool.replicas.values())
    assert all(agrees(out, POLICIES[0]) for out in each_replica(pool, requests(8)).values())
    pool.load_weights(hf_weights(POLICIES[1]), 6)
    assert all(agrees(out, POLICIES[1]) for out in each_replica(pool, requests(8)).values())


def test_servers_by_url(pool, model, capsys, monkeypatch):
    "Servers of somebody else: synced again when they have changed, dropped when they stay away"
    urls = tuple(r.url for r in pool.replicas.values())
    with pytest.raises(ValueError, match='COMPASSRL_SECRET has to be the same'):
        VllmPool(model, VllmConfig(urls=urls), num_slots=4)
    monkeypatch.setenv('COMPASSRL_SECRET', pool.servers.secret)
    other = VllmPool(model, VllmConfig(urls=urls), num_slots=4)
    try:
        other.load_weights(hf_weights(POLICIES[0]), 7)
        good = tokens(other.generate(requests(16)))
        pool.load_weights(hf_weights(POLICIES[1]), 8)  # behind the back of the other pool
        out = list(other.generate(requests(16)))
        assert tokens(out) == good and agrees(out, POLICIES[0])
        other.servers.submit(
            other.servers.settle()
        ).result()  # one may have drawn all while the other came back
        assert {u: (r.losses, r.up) for u, r in other.replicas.items()} == dict.fromkeys(
            urls, (1, True)
        )
        assert all("has weights '8' instead of '7'" in r.why for r in other.replicas.values())
        other.servers.vllm = replace(other.servers.vllm, timeout_s=10.0)
        n = 0
        for _ in other.generate(requests(64)):  # so many that it is killed in the middle
            n += 1
            if n == 2:
                hurt(pool, 'replica 0', signal.SIGKILL)
        assert n == 64 and other.replicas[urls[1]].up
        other.servers.submit(other.servers.settle()).result()
        assert other.replicas[urls[0]].gone and f'{urls[0]} is dropped: ' in capsys.readouterr().out
        other.load_weights(hf_weights(POLICIES[1]), 9)
        assert agrees(list(other.generate(requests(4))), POLICIES[1])
        hurt(pool, 'replica 1', signal.SIGKILL)
        with pytest.raises(RuntimeError, match='no vLLM server is left: http'):
            list(other.generate(requests(4)))
    finally:
        other.close()


def test_restarts_are_bounded(pool):
    "A server that cannot be kept alive ends the run, by name, with its log"
    pool.servers.vllm = replace(
        pool.servers.vllm, max_restarts=1
    )  # each was lost once, and is dead again
    with pytest.raises(
        RuntimeError,
        match=r'replica \d was lost 2 times within an hour, more than max_restarts=1. The last',
    ):
        list(pool.generate(requests(4)))
    with pytest.raises(RuntimeError, match='more than max_restarts=1'):
        pool.load_weights(hf_weights(POLICIES[0]), 9)


def test_losses_of_long_ago_do_not_count(pool):
    "A run of a month may lose a server now and then"
    with patch.object(replica, 'window_s', 0.0):
        pool.load_weights(hf_weights(POLICIES[0]), 10)
        assert all(agrees(out, POLICIES[0]) for out in each_replica(pool, requests(8)).values())


def test_killed_between_turns(pool):
    "What was read there is read again elsewhere: the same episodes"
    rs = requests(24, 90)
    tool = calls(pool, rs)
    want, out = tokens(Episodes(pool, tool).generate(rs)), []
    with patch.object(replica, 'window_s', 0.0):
        for s in Episodes(pool, tool).generate(rs):
            out.append(s)
            if len(out) == 3:
                hurt(pool, 'replica 0', signal.SIGKILL)
    assert len(out) == 24 and tokens(out) == want and agrees(out, POLICIES[0])
    assert any(s.policy_mask is not None for s in out)
    assert {s.replica for s in pool.spans if s.outcome == 'lost'} == {'replica 0'}


def test_a_server_of_two_workers(model):
    "Tensor parallel inside a server: every worker takes its part of the weights, at every sync"
    pool = VllmPool(model, VllmConfig(num_replicas=1, tensor_parallel=2), num_slots=8)
    try:
        for version, policy in enumerate(POLICIES):
            pool.load_weights(hf_weights(policy), version)
            out = list(pool.generate(requests(12)))
            assert agrees(out, policy) and {s.weight_version for s in out} == {version}
        shared = server.group_memory(pool.replicas['replica 0'].server.pid)
        assert shared and all((server.shared_memory / name).exists() for name in shared)
    finally:
        pool.close()
    assert not [name for name in shared if (server.shared_memory / name).exists()]


# ---- before anything runs


def test_refusals(model, tmp_path):
    with pytest.raises(ValueError, match='node7:8000 is on another machine.*give vllm.sync_dir'):
        VllmPool(model, VllmConfig(urls=('http://node7:8000',)))
    with pytest.raises(ValueError, match="vllm.sync='nccl' on a CPU"):
        VllmPool(model, VllmConfig(sync='nccl'))
    with pytest.raises(ValueError, match='float64'):
        VllmPool(model, dtype=torch.float64)
    with pytest.raises(ValueError, match='config.json does not exist'):
        VllmPool(tmp_path)
    with pytest.raises(
        ValueError, match=r'127.0.0.1:9 was not ready after 1 s \(/health: ClientConnectorError'
    ):
        VllmPool(model, VllmConfig(urls=('http://127.0.0.1:9',), timeout_s=1.0))


def test_a_server_that_does_not_start(model, tmp_path):
    "The error shows the end of its log"

    def start(options, device, log, gpus, secret):
        return ServerProcess(
            [sys.executable, '-c', 'exit("no room")'], server_env(device), log
        ), 'http://127.0.0.1:9'

    says = r'replica \d ended while it started:\nno room'
    with (
        patch.object(replica_manager, 'start_server', start),
        pytest.raises(RuntimeError, match=says),
    ):
        VllmPool(model, VllmConfig(num_replicas=2), log_dir=tmp_path)


# ---- from GPU to GPU: what needs no GPU


def test_everyone_has_a_number():
    "Rank offsets of servers with several GPUs; pausing and versions stay with the pool"
    from compassrl.rollout.vllm.transfer import AllServers  # it imports vLLM

    said = []
    e = AllServers(lambda path, bodies: said.append((path, bodies)), 3, 2)
    e.init_weight_transfer_engine(dict(rank_offset=1, world_size=7))
    e.start_weight_update()
    e.update_weights(dict(names=['a']))
    e.finish_weight_update('3')
    (init, bodies), (update, infos) = said
    assert (init, update) == ('/init_weight_transfer_engine', '/update_weights')
    assert [b['init_info'] for b in bodies] == [
        dict(rank_offset=o, world_size=7) for o in (1, 3, 5)
    ]
    assert infos == [dict(update_info=dict(names=['a']))] * 3


def test_weights_come_as_announced():
    from compassrl.rollout.vllm.transfer import HfSource

    s = HfSource(CONFIG, torch.bfloat16, 'cpu')
    s.weights = list(hf_weights(POLICIES[0]))
    want = [(n, tuple(w.shape)) for n, w in hf_weights(POLICIES[0])]
    assert [(m.name, m.shape) for m in s.metadata()] == want == [(n, tuple(t.shape)) for n, t in s]
    assert {m.dtype for m in s.metadata()} == {t.dtype for _, t in s} == {torch.bfloat16}
    bias = 'model.layers.0.mlp.gate.e_score_correction_bias'
    assert s.dtype_of(bias) == torch.float32, "vLLM's own type of it"
    s.weights = list(hf_weights(POLICIES[0]))[1:]
    with pytest.raises(ValueError, match='1 weights are missing'):
        list(s)


# ---- the process


def gone_now(pid):
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] == 'Z'
    except OSError:
        return True


def gone(pid):
    "Has it ended within a minute?"
    for _ in range(600):
        if gone_now(pid):
            return True
        time.sleep(0.1)


CHILD = (
    'import subprocess, time; p = subprocess.Popen(["sleep", "600"]); '
    'print(p.pid, flush=True); time.sleep(600)'
)


def grandchild(server):
    while not (text := server.log.read_text()):
        time.sleep(0.05)
    return int(text)


def test_kill_takes_the_whole_group(tmp_path):
    s = ServerProcess([sys.executable, '-c', CHILD], dict(os.environ), tmp_path / 'log')
    pid = grandchild(s)
    s.kill()
    assert gone(pid) and not s.alive


OWNER = (
    'import os, sys, time; from compassrl.rollout.vllm.server import *; {start}\n'
    'while not s.pid or not s.log.read_text(): time.sleep(.05)\n'
    'print(s.pid, *more(), flush=True); time.sleep(600)'
)


def parent(pid):
    return int(Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1])


def owner(start):
    "Another owner of a server, and the pids that it prints"
    p = subprocess.Popen(
        [sys.executable, '-c', OWNER.format(start=start)], stdout=subprocess.PIPE, text=True
    )
    return p, list(map(int, p.stdout.readline().split()))


@pytest.mark.parametrize('sig', [signal.SIGCONT, signal.SIGSTOP])
def test_no_server_outlives_its_owner(tmp_path, sig):
    "Killed without a chance to clean up, also if the server is stopped"
    p, (pid, child) = owner(
        f"s = ServerProcess([sys.executable, '-c', {CHILD!r}], dict(os.environ), "
        f'{str(tmp_path / "log")!r}); more = lambda: s.log.read_text().split()'
    )
    os.killpg(pid, sig)
    p.kill()
    p.wait()
    assert gone(pid) and gone(child)


# another module in place of vLLM's server
def web_server(log):
    command = [sys.executable, '-m', 'http.server', '0', '--bind', '127.0.0.1']
    return ServerProcess(command, vllm_forks.current.env, log)


def born(server):
    while not server.pid and server.alive:
        time.sleep(0.05)
    return server.pid


def forks(folder):
    "An owner has two forks of one process; then it is killed beside a server that is stopped"
    servers = [web_server(folder / f'log{i}') for i in range(2)]
    pids = list(map(born, servers))
    assert {parent(parent(p)) for p in pids} == {vllm_forks.current.pid}
    servers[0].kill()
    assert gone(pids[0]) and servers[1].alive
    (folder / 'pid').write_text(str(pids[1]))
    os.killpg(pids[1], signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)


def test_servers_of_the_tests_are_forks(tmp_path):
    "They end as other servers do: alone, or with their owner, also those that are stopped"
    r = vllm_forks.run(tmp_path / 'log', forks, tmp_path, timeout=400)
    assert r.returncode == -signal.SIGKILL, r.stderr[-3000:]
    assert gone(int((tmp_path / 'pid').read_text()))


def test_an_engine_ends_though_nobody_is_left_to_end_it(model, monkeypatch):
    "The supervisor and the server are killed, and the owner, which would clean up, is not asked"
    # a fork has read its plugins already, a command has not
    monkeypatch.setattr(server, 'start_supervisor', vllm_forks._by_command)
    alone = VllmPool(model, VllmConfig(), num_slots=2)
    (replica,) = alone.replicas.values()
    pid = replica.server.pid
    engines = [p.pid for p in psutil.Process(pid).children(recursive=True)]
    assert engines
    for p in parent(pid), pid:
        os.kill(p, signal.SIGKILL)
    assert all(map(gone, engines))
    alone.close()


def test_a_server_is_killed_before_it_is_there(tmp_path):
    start = time.monotonic()
    s = ServerProcess([sys.executable, '-c', CHILD], dict(os.environ), tmp_path / 'log')
    s.kill(5.0)
    assert not s.alive and s.supervisor.poll() is not None and time.monotonic() < start + 60
    time.sleep(1)
    assert not [
        p
        for p in psutil.process_iter(['cmdline'])
        if CHILD in (p.info['cmdline'] or []) and p.ppid() == s.supervisor.pid
    ]


def test_flags():
    assert flags(
        dict(max_len=3, eager=True, prefix_cache=False, quantization=None, transfer=dict(a=1))
    ) == ['--max-len', '3', '--eager', '--no-prefix-cache', '--transfer', '{"a": 1}']
    with patch.dict(os.environ, RANK='0', MASTER_ADDR='here', LOCAL_RANK='1', OTHER='1'):
        env = server_env('cpu')
    assert env['OTHER'] == '1' and not {'RANK', 'MASTER_ADDR', 'LOCAL_RANK'} & env.keys()
    env = server_env('cuda', '2,3')
    assert (env['CUDA_VISIBLE_DEVICES'], env[server.engine_ends]) == ('2,3', '1')
