"vLLM in this process: against transformers, exact syncs, seeds, frequencies, refusals, mutants"

import json
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from compassrl.algo.engine_gap import discrepancy
from compassrl.algo.losses import LossConfig, PolicyLoss
from compassrl.algo.ratios import tis_weights
from compassrl.data.tokenizer import StopStrings
from compassrl.model.hf_config import write_config
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import (
    checked_weights,
    hf_weights,
    load_hf_weights,
    save_pretrained,
    weight_parts,
)
from compassrl.records import Request, SamplingParams, collate, derive_seed
from compassrl.rollout.episodes import Episodes, Turns
from compassrl.rollout.fp8 import fp8_weights
from compassrl.rollout.rollout_settings import VllmConfig
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.rollout.vllm import in_process as vllm
from compassrl.rollout.vllm import messages
from compassrl.rollout.vllm.in_process import VllmRollout, set_environment
from compassrl.rollout.vllm.messages import (
    can_cache_fp8,
    check_vllm,
    engine_args,
    file_parts,
    head_sizes,
    read_routes,
    shared_folder,
    to_sample,
    weight_sync,
)
from compassrl.rollout.vllm.server import machine_prefix, sweep
from compassrl.train.routes import routes_agreement, validate_routes
from compassrl.train.torch_train import OptimConfig, TorchTrain, response_log_probs
from tests.support import ROOT
from tests.support.engine_samples import Echo
from tests.support.faults import planted
from tests.support.growing import law_requests_that_grow

set_environment()
from compassrl.rollout.vllm import transfer as vllm_transfer  # imports vLLM

CONFIG = PolicyConfig(
    vocab_size=70,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_experts=6,
    num_experts_per_tok=2,
    mlp_only_layers=(0,),
    max_position_embeddings=160,
)  # the first layer is dense
CLOSE = 1e-6  # mean |difference| of fp32 log-probs


def lively(seed=0, config=CONFIG, scale=4.0):
    "Random weights that have opinions; norms that are not all 1"
    p, g = Policy(config, seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for w in p.parameters():
            w.mul_(scale) if w.dim() > 1 else w.add_(0.2 * torch.randn(w.shape, generator=g))
    return p


def rollout(folder, config=CONFIG, policy=None, **kw):
    write_config(config, folder)
    e = VllmRollout(folder, **dict(num_slots=16) | kw)
    e.load_weights(hf_weights(policy or lively(config=config)), 0)
    return e


def torch_rollout(policy, **kw):
    e = TorchRollout(policy.config, 16, **kw)
    e.load_weights(hf_weights(policy), 0)
    return e


def requests(num=12, group=3, length=5, seed=0, config=CONFIG, **kw):
    g, params = torch.Generator().manual_seed(seed), SamplingParams(**dict(max_tokens=12) | kw)
    ids = [
        tuple(torch.randint(2, config.vocab_size, (length + i,), generator=g).tolist())
        for i in range(num // group)
    ]
    return [
        Request(f'p{i // group:03}', ids[i // group], i % group, derive_seed(seed, i), params)
        for i in range(num)
    ]


def ordered(samples):
    return sorted(samples, key=lambda s: (s.prompt_id, s.index))


@torch.no_grad()
def gaps(policy, samples, temperature=1.0, replay=False):
    "|log-prob - what the policy gives| of every response token"
    b = collate(samples)
    return (response_log_probs(policy, b, temperature, replay)[0] - b.rollout_log_probs)[
        b.response_mask
    ].abs()


def transfer_engine(e):
    return e.engine.model_executor.driver_worker.worker.weight_transfer_engine


@pytest.fixture(scope='module')
def engine(tmp_path_factory):
    e = rollout(tmp_path_factory.mktemp('model'))
    yield e
    e.close()


@pytest.fixture
def fresh(engine):
    "The engine with the weights of seed 0"
    engine.load_weights(hf_weights(lively()), 0)
    return engine


# ---- against transformers -----------------------------------------------------------------------


def of_transformers(folder, policy, samples):
    "Log-probs and the experts of each sparse layer, from one pass per sample"
    save_pretrained(policy, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for s in samples:
        ids = torch.tensor([s.prompt_ids + s.response_ids])
        with torch.no_grad():
            out = model(ids, output_router_logits=True)
        at = slice(len(s.prompt_ids) - 1, -1)
        log_probs = (
            out.logits[0, at].log_softmax(-1).gather(-1, ids[0, len(s.prompt_ids) :, None])[:, 0]
        )
        yield log_probs, torch.stack([x.topk(2, -1).indices for x in out.router_logits], 1)[:-1]


def test_every_sync_is_exact(engine, tmp_path):
    "Log-probs and routes after each of six updates: tensors and files, one part and many"
    for version in range(6):
        policy = lively(version)
        engine.as_files = version % 2 == 1
        max_bytes = 10_000 if version > 2 else 1 << 30
        small = partial(vllm_transfer.transfer, max_bytes=max_bytes)
        told = []
        rpc = engine.engine.collective_rpc

        def call(method, rpc=rpc, told=told, **kwargs):
            told.append(method)
            return rpc(method, **kwargs)

        with (
            patch.object(vllm_transfer, 'transfer', small),
            patch.object(engine.engine, 'collective_rpc', call),
        ):
            engine.load_weights(hf_weights(policy), version)
        samples = ordered(engine.generate(requests()))
        gap, num = torch.zeros(()), 0
        for s, (log_probs, experts) in zip(samples, of_transformers(tmp_path, policy, samples)):
            gap, num = gap + (log_probs - s.rollout_log_probs).abs().sum(), num + len(log_probs)
            assert (
                s.routed_experts[:, 1:].int().sort(-1)[0] == experts.sort(-1)[0]
            ).all() and s.routes_valid.all()
            assert s.weight_version == version and (s.routed_experts[:, 0] == 0).all()
        assert gap / num < CLOSE
        assert (told.count('update_weights') > 1) == (version > 2)
    engine.as_files = False


@pytest.mark.parametrize(
    'old,new',
    [
        ('method.moe_kernel = None', 'pass'),  # expert weights are packed once, for good
        ('info.loaded_weights.clear(); info.load_numel = 0', 'pass'),
    ],
)  # what an update that failed left is mixed in
def test_faults_in_the_transfer_show(fresh, old, new):
    mutant, receiver = planted(vllm_transfer, old, new), transfer_engine(fresh)

    def sync(policy, version):
        part = list(hf_weights(lively(7)))[:4]  # the queries and keys of a layer, not its values
        receiver.start_weight_update()  # an update that breaks off
        receiver.update_weights(dict(weights=part))
        fresh.load_weights(hf_weights(policy), version)
        return gaps(policy, list(fresh.generate(requests()))).mean()

    assert sync(lively(1), 1) < CLOSE
    receiver.__class__ = mutant.PartTransfer
    try:
        assert sync(lively(2), 2) > 0.01
    except AttributeError:
        pass  # vLLM stumbles over its own half-made layer
    finally:
        receiver.__class__ = vllm_transfer.PartTransfer
    assert sync(lively(3), 3) < CLOSE


def test_stale_prefixes_show(fresh):
    "Prompts of two cached blocks; without the reset their keys and values are the old ones"

    def sync(load, version):
        load(fresh, hf_weights(lively(version)), version)
        return gaps(lively(version), list(fresh.generate(requests(6, length=80)))).mean()

    assert sync(VllmRollout.load_weights, 1) < CLOSE
    mutant = planted(vllm, 'if not self.engine.reset_prefix_cache()', 'if False')
    assert sync(mutant.VllmRollout.load_weights, 2) > 0.01
    assert sync(VllmRollout.load_weights, 3) < CLOSE


@pytest.mark.parametrize(
    'changes',
    [
        dict(tie_word_embeddings=True),
        dict(
            norm_topk_prob=False,
            head_dim=64,
            num_experts=9,
            num_experts_per_tok=3,
            mlp_only_layers=(),
        ),
        dict(decoder_sparse_step=2, rope_theta=500.0),
    ],
    ids=str,
)
def test_other_shapes(tmp_path, changes):
    config = replace(CONFIG, **changes)
    e = rollout(tmp_path, config)
    try:
        for version in range(3):
            policy = lively(version, config)
            e.load_weights(hf_weights(policy), version)
            samples = list(e.generate(requests()))
            assert gaps(policy, samples).mean() < CLOSE
            validate_routes(collate(samples), config)
        if config.tie_word_embeddings:  # the head packs weights of its own
            mutant = planted(vllm_transfer, 'if isinstance(m, VocabParallelEmbedding)', 'if 0')
            transfer_engine(e).__class__ = mutant.PartTransfer
            e.load_weights(hf_weights(lively(9, config)), 9)
            assert gaps(lively(9, config), list(e.generate(requests()))).mean() > 0.01
    finally:
        e.close()


# ---- an update that fails -----------------------------------------------------------------------


def broken(kind):
    weights = list(hf_weights(lively(1)))
    if kind == 'missing':
        del weights[20]
    elif kind == 'twice':
        weights.append(weights[3])
    elif kind == 'shape':
        weights[20] = weights[20][0], weights[20][1][:-1]
    elif kind == 'unknown':
        weights.insert(20, ('model.layers.9.mlp.gate.weight', torch.zeros(2)))
    yield from weights[:25]
    if kind == 'dies':
        raise OSError('the trainer is gone')
    yield from weights[25:]


@pytest.mark.parametrize('as_files', [False, True])
@pytest.mark.parametrize(
    'kind,message',
    [
        ('missing', '1 weights are missing, first'),
        ('twice', 'came twice'),
        ('shape', 'this policy needs'),
        ('unknown', 'model.layers.9.mlp.gate.weight is not a weight'),
        ('dies', 'the trainer is gone'),
    ],
)
def test_broken_updates(fresh, kind, message, as_files):
    "Refused by name; nothing is sampled from half an update; the next is exact; no file stays"
    before = set(shared_folder().iterdir())
    fresh.as_files = as_files
    small = partial(vllm_transfer.transfer, max_bytes=20_000)
    with (
        patch.object(vllm_transfer, 'transfer', small),
        pytest.raises((ValueError, OSError), match=message),
    ):
        fresh.load_weights(broken(kind), 1)
    fresh.as_files = False
    with pytest.raises(RuntimeError, match='no weights'):
        next(fresh.generate(requests()))
    fresh.load_weights(hf_weights(lively(2)), 2)
    assert gaps(lively(2), list(fresh.generate(requests()))).mean() < CLOSE
    mine = f'{machine_prefix()}{os.getpid()}'
    assert not [p for p in set(shared_folder().iterdir()) - before if p.name.startswith(mine)]


def test_names_of_tied_policies():
    config = replace(CONFIG, tie_word_embeddings=True)
    weights = dict(hf_weights(lively(config=config)))
    extra = weights | {'lm_head.weight': torch.zeros(1)}  # some exporters write it all the same
    assert dict(checked_weights(extra.items(), config)).keys() == weights.keys()


# ---- files --------------------------------------------------------------------------------------


def test_parts():
    "Every tensor once, in order, no part above its size unless one tensor is"
    weights = list(hf_weights(lively()))
    for size in (1, 5000, 30_000, 1 << 30):
        parts = list(weight_parts(iter(weights), size))
        assert [n for p in parts for n, _ in p] == [n for n, _ in weights] and all(parts)
        assert all(sum(t.nbytes for _, t in p) <= size or len(p) == 1 for p in parts)
    assert len(parts) == 1 and not list(weight_parts([]))


def test_files_come_and_go(tmp_path):
    from safetensors.torch import load_file

    weights, seen = dict(hf_weights(lively())), {}
    parts = file_parts(iter(weights.items()), tmp_path, 30_000)
    for path in parts:
        assert list(tmp_path.iterdir()) == [path]  # one at a time, no temporary name next to it
        seen |= load_file(path)
    assert not list(tmp_path.iterdir())
    assert seen.keys() == weights.keys() and all((seen[k] == weights[k]).all() for k in weights)
    parts = file_parts(iter(weights.items()), tmp_path, 30_000)
    other = file_parts(iter(weights.items()), tmp_path)
    assert next(parts) != next(other)  # two senders of one process
    parts.close()
    other.close()
    assert not list(tmp_path.iterdir())


def test_leftovers_of_the_dead(tmp_path):
    child = subprocess.Popen(['sleep', '60'])
    name = machine_prefix()
    files = {
        k: tmp_path / k
        for k in (
            f'{name}{child.pid}-0.safetensors',
            f'{name}{os.getpid()}-3.tmp',
            f'compassrl-elsewhere-{child.pid}-0.safetensors',
            'other.safetensors',
        )
    }
    for p in files.values():
        p.write_text('')
    assert sweep(tmp_path) == []
    child.kill()
    child.wait()
    assert sweep(tmp_path) == [tmp_path / f'{name}{child.pid}-0.safetensors']
    assert len(list(tmp_path.iterdir())) == 3


# ---- against the embedded engine ----------------------------------------------------------------


def test_greedy_equals_embedded(fresh):
    a, b = (
        ordered(e.generate(requests(temperature=0.0))) for e in (fresh, torch_rollout(lively()))
    )
    for x, y in zip(a, b):
        for k in ('prompt_id', 'index', 'prompt_ids', 'response_ids'):
            assert getattr(x, k) == getattr(y, k)
        assert (
            x.rollout_log_probs == 0
        ).all() and x.rollout_log_probs.dtype == y.rollout_log_probs.dtype
        assert (
            x.routed_experts.dtype == y.routed_experts.dtype
            and x.routed_experts.shape == y.routed_experts.shape
        )
        assert (x.routed_experts.sort(-1)[0] == y.routed_experts.sort(-1)[0]).all()
        assert (
            x.timings.keys() == y.timings.keys()
            and x.timings['rollout_start'] < x.timings['rollout_end']
        )


class Said:
    "A rollout engine that is made to say the tokens of `samples`: its own log-probs for them"

    def __init__(self, policy, temperature, top_p, top_k=0, min_p=0.0):
        self.policy, self.temperature, self.top_p = policy, temperature, top_p
        self.top_k, self.min_p = top_k, min_p

    @torch.no_grad()
    def __call__(self, s):
        ids = torch.tensor([s.prompt_ids + s.response_ids])
        logits = self.policy.logits(self.policy(ids, torch.ones_like(ids, dtype=torch.bool))[0])
        p = (logits.double() / self.temperature).softmax(-1)
        ranked, order = p.sort(-1, descending=True)
        out = ranked < self.min_p * ranked[..., :1]
        out[..., self.top_k or ranked.shape[-1] :] = True
        ranked = ranked.masked_fill(out, 0)
        ranked = ranked / ranked.sum(-1, keepdim=True)
        out |= ranked.cumsum(-1) - ranked >= self.top_p
        p = p.masked_fill(torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, out), 0)
        p = (p / p.sum(-1, keepdim=True))[len(s.prompt_ids) - 1 : -1]
        return p.gather(-1, ids[0, len(s.prompt_ids) :, None])[:, 0].log()


@pytest.mark.parametrize('kind', [VllmRollout, TorchRollout])
@pytest.mark.parametrize(
    'temperature,top_p,top_k,min_p',
    [
        (0.7, 1.0, 0, 0.0),
        (1.6, 1.0, 0, 0.0),
        (1.0, 0.6, 0, 0.0),
        (0.8, 0.9, 0, 0.0),
        (1.0, 1.0, 3, 0.0),
        (1.3, 1.0, 0, 0.2),
        (1.0, 0.8, 4, 0.1),
    ],
)
def test_log_probs_are_of_what_was_drawn(fresh, kind, temperature, top_p, top_k, min_p):
    "After temperature and truncation, also in a batch in which others are greedy"
    cut = dict(top_p=top_p, top_k=top_k, min_p=min_p)
    mixed = requests(temperature=temperature, **cut) + requests(seed=5, temperature=0.0)
    engine = fresh if kind is VllmRollout else torch_rollout(lively())
    samples = list(engine.generate(mixed[::2] + mixed[1::2]))
    drawn = [s for s in samples if s.rollout_log_probs.any()]
    assert len(drawn) == 12 and len(samples) == 24
    said = Said(lively(), temperature, **cut)
    gap = torch.cat([(said(s) - s.rollout_log_probs).abs() for s in drawn])
    assert gap.mean() < CLOSE and gap.max() < 1e-4


def test_raw_log_probs_would_show(tmp_path):
    "vLLM's default forgets the temperature"
    mutant = planted(messages, "'processed_logprobs'", "'raw_logprobs'")
    with patch.object(vllm, 'engine_args', mutant.engine_args):
        e = rollout(tmp_path)
    try:
        assert gaps(lively(), list(e.generate(requests())), 1.0).mean() < CLOSE
        assert gaps(lively(), list(e.generate(requests(temperature=0.7))), 0.7).mean() > 0.1
    finally:
        e.close()


@pytest.mark.parametrize('temperature,top_p', [(1.0, 1.0), (1.5, 1.0), (1.0, 0.7)])
def test_frequencies(tiny, temperature, top_p):
    "All 25 responses of two tokens: chi-square of 3000 draws against the exact probabilities"
    e, policy = tiny
    r = requests(1, 1, 3, config=policy.config, max_tokens=2, temperature=temperature, top_p=top_p)[
        0
    ]
    rs = [replace(r, index=i, seed=derive_seed('draw', i)) for i in range(3000)]
    drawn = list(e.generate(rs))
    counts, exact = Counter(tuple(s.response_ids) for s in drawn), {}
    said = Said(policy, temperature, top_p)
    for a in range(5):
        for b in range(5):
            s = replace(drawn[0], response_ids=[a, b])
            exact[a, b] = float(said(s).sum().exp())
    assert sum(p for p in exact.values() if p == p) == pytest.approx(1)
    never = [k for k, p in exact.items() if not p > 0]
    assert not any(counts[k] for k in never) and bool(never) == (top_p < 1)
    kept = [k for k in exact if k not in never]
    chi2 = sum((counts[k] - 3000 * exact[k]) ** 2 / (3000 * exact[k]) for k in kept)
    assert chi2 < len(kept) - 1 + 4 * (2 * (len(kept) - 1)) ** 0.5


@pytest.fixture(scope='module')
def tiny(tmp_path_factory):
    config = replace(CONFIG, vocab_size=5, num_hidden_layers=2)
    policy = lively(3, config, 2.0)
    e = rollout(tmp_path_factory.mktemp('tiny'), config, policy, num_slots=256)
    yield e, policy
    e.close()


def test_seeds(fresh):
    "Equal seeds, equal tokens: alone, in a batch, in another order; other seeds, other tokens"
    rs = requests(24, 4)
    whole = {(s.prompt_id, s.index): s.response_ids for s in fresh.generate(rs)}
    assert {(s.prompt_id, s.index): s.response_ids for s in fresh.generate(rs[::-1])} == whole
    for r in rs[::5]:
        assert next(fresh.generate([r])).response_ids == whole[r.prompt_id, r.index]
    assert len(set(map(tuple, whole.values()))) == len(whole)
    twin, ends = replace(rs[0], index=9), (-1, -1 << 63, (1 << 63) - 2)
    assert next(fresh.generate([twin])).response_ids == whole['p000', 0]
    again = [
        [next(fresh.generate([replace(rs[0], seed=x)])).response_ids for x in ends]
        for _ in range(2)
    ]
    assert again[0] == again[1] and len(set(map(tuple, again[0]))) == 3


# ---- requests and samples -----------------------------------------------------------------------


def test_stop_tokens(fresh):
    "The first stop token ends a response and stays in it; the checkpoint's own eos ends nothing"
    free = {(s.prompt_id, s.index): s for s in fresh.generate(requests(48, 4, max_tokens=40))}
    assert all(s.finish_reason == 'length' and len(s.response_ids) == 40 for s in free.values())
    assert any(CONFIG.eos_token_id in s.response_ids for s in free.values())
    stop = (3, 17, 40)
    for s in fresh.generate(requests(48, 4, max_tokens=40, stop_ids=stop)):
        whole = free[s.prompt_id, s.index].response_ids
        end = next((i + 1 for i, t in enumerate(whole) if t in stop), None)
        assert s.response_ids == whole[:end] and s.finish_reason == (
            'length' if end is None else 'stop'
        )
        if end:
            last = s
    r = next(r for r in requests(48, 4) if (r.prompt_id, r.index) == (last.prompt_id, last.index))
    r = replace(
        r, params=SamplingParams(len(last.response_ids), stop_ids=stop)
    )  # both ends at once
    (s,) = fresh.generate([r])
    assert s.response_ids == last.response_ids and s.finish_reason == 'stop'


def test_yields_as_they_finish(fresh):
    "Short responses overtake long ones; requests are taken from the iterator as slots get free"
    limits = [30, 2, 4, 3] * 12
    rs = [replace(r, params=SamplingParams(n)) for r, n in zip(requests(48, 4), limits)]
    pulled = []

    def stream():
        for r in rs:
            pulled.append(r)
            yield r

    done, ahead = [], []
    for s in fresh.generate(stream()):
        done.append(s)
        ahead.append(len(pulled) - len(done))
    assert max(ahead) <= fresh.num_slots and len(done) == 48
    assert [len(s.response_ids) for s in done[:4]] == [2] * 4 and len(done[-1].response_ids) == 30
    assert Counter((s.prompt_id, s.index) for s in done) == Counter(
        (r.prompt_id, r.index) for r in rs
    )
    assert gaps(lively(), done).mean() < CLOSE


def test_requests_that_grow(fresh):
    law_requests_that_grow(fresh, requests(24, 2))


def test_a_text_ends_responses(fresh):
    "The token that completes it is the last one; all before is what is drawn without it"
    letters = {chr(48 + i): i for i in range(CONFIG.vocab_size)}
    tok = Tokenizer(models.WordLevel(letters, unk_token='0'))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.Split('', 'isolated'), decoders.Fuse()
    plain = ordered(fresh.generate(requests(temperature=0.0, max_tokens=40)))
    texts = tuple(tok.decode(s.response_ids[5:7]) for s in plain[::4])
    asked = requests(temperature=0.0, max_tokens=40, stop=texts)
    found = ordered(Episodes(fresh, stops=StopStrings(tok)).generate(asked))
    ended = 0
    for s, whole in zip(found, plain, strict=True):
        ends = [n for n in range(41) if any(t in tok.decode(whole.response_ids[:n]) for t in texts)]
        assert s.response_ids == whole.response_ids[: ends[0] if ends else 40]
        assert s.finish_reason == ('stop' if ends else 'length')
        assert len(s.routes_valid) == len(s.prompt_ids) + len(s.response_ids) - 1
        ended += bool(ends)
    assert ended > 2


def test_prefix_cache(fresh):
    "Groups with long prompts share their blocks, and still every row has its route"
    seen = []

    def spy(self, o, harvest=VllmRollout.harvest):
        seen.append(o.num_cached_tokens)
        return harvest(self, o)

    with patch.object(VllmRollout, 'harvest', spy):
        samples = list(fresh.generate(requests(20, 4, length=90)))
    assert sum(n >= 64 for n in seen) >= 15, seen
    b = collate(samples)
    validate_routes(b, CONFIG)
    assert (b.routes_valid == b.fed_mask).all() and gaps(lively(), samples).mean() < CLOSE
    _, own = lively()(b.token_ids, b.token_mask)
    assert (
        routes_agreement(own, b.routed_experts[b.token_mask], CONFIG)[
            b.fed_mask[b.token_mask]
        ].min()
        == 1
    )


def test_a_later_turn_finds_its_prefix(fresh):
    "All whole blocks of what was read and drawn before; routes and log-probs are those of one pass"
    rs = requests(8, 2, length=20, max_tokens=100)
    drawn = Counter(i for s in fresh.generate(rs) for i in s.response_ids)
    turns, fed, seen, found = Turns(rs, Echo(drawn.most_common(1)[0][0])), {}, [], []

    def spy(self, o, harvest=VllmRollout.harvest):
        s = harvest(self, o)
        if known := fed.get((s.prompt_id, s.index), 0):
            seen.append((o.num_cached_tokens, known // messages.block * messages.block))
        fed[s.prompt_id, s.index] = len(s.prompt_ids) + len(s.response_ids) - 1
        return s

    with patch.object(VllmRollout, 'harvest', spy):
        for s in fresh.generate(turns):
            if whole := turns.take(s):
                found.append(whole)
    assert len(found) == 8 and len(seen) > 8
    assert [a for a, _ in seen] == [b for _, b in seen] and max(b for _, b in seen) >= 64
    b = collate(found)
    assert (b.routes_valid == b.fed_mask).all() and gaps(lively(), found).max() < 1e-5
    _, own = lively()(b.token_ids, b.token_mask)
    agree = routes_agreement(own, b.routed_experts[b.token_mask], CONFIG)
    assert agree[b.fed_mask[b.token_mask]].min() == 1


def test_every_slot_fills_without_recomputation(fresh):
    "Keys and values of all slots at full length have room"
    scheduler = fresh.engine.engine_core.engine_core.scheduler
    with patch.object(scheduler, '_preempt_request', side_effect=AssertionError('preempted')):
        samples = list(fresh.generate(requests(32, 1, length=20, max_tokens=100)))
    assert len(samples) == 32 and gaps(lively(), samples).mean() < CLOSE


def test_one_thing_at_a_time(fresh):
    running = fresh.generate(requests() + requests(3, seed=1, max_tokens=30))
    next(running)
    with pytest.raises(RuntimeError, match='requests are running: finish or close'):
        fresh.load_weights([], 1)
    with pytest.raises(RuntimeError, match='one `generate` at a time'):
        next(fresh.generate(requests()))
    running.close()
    assert not fresh.engine.has_unfinished_requests()
    assert len(list(fresh.generate(requests()))) == 12
    fresh.load_weights(hf_weights(lively(1)), 1)
    assert gaps(lively(1), list(fresh.generate(requests()))).mean() < CLOSE


BAD = dict(
    empty=dict(prompt_ids=()),
    long=dict(prompt_ids=(3,) * 150),
    vocabulary=dict(prompt_ids=(3, 70)),
    stop=dict(params=SamplingParams(5, stop_ids=(-1,))),
    seed=dict(seed=1 << 63),
)


@pytest.mark.parametrize('change', BAD.values(), ids=BAD)
def test_bad_requests_fail_as_in_the_embedded_engine(fresh, change):
    bad = [replace(requests()[0], **change)]
    with pytest.raises(ValueError) as ours:
        list(fresh.generate(bad))
    with pytest.raises(ValueError) as theirs:
        list(torch_rollout(lively()).generate(bad))
    assert str(ours.value) == str(theirs.value)
    assert len(list(fresh.generate(requests(3)))) == 3  # nothing of it stays behind


def test_temperatures_that_vllm_would_change(fresh):
    with pytest.raises(ValueError, match='vLLM takes 0.01 instead'):
        list(fresh.generate(requests(temperature=0.005)))
    assert gaps(lively(), list(fresh.generate(requests(temperature=0.01))), 0.01).mean() < 1e-4


def test_the_process_stays_as_it_was(tmp_path):
    "vLLM seeds the generators and disables `set_num_threads`"
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    rollout(tmp_path).close()
    drawn = random.random(), np.random.rand(), torch.rand(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    assert drawn == (random.random(), np.random.rand(), torch.rand(1))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


# ---- routes -------------------------------------------------------------------------------------


def test_rows_without_routes_are_found():
    routes = np.random.default_rng(0).permuted(
        np.tile(np.arange(6, dtype=np.uint8), (20, 3, 1)), axis=-1
    )[..., :2]
    routes[:, 0] = 0
    assert read_routes(routes, CONFIG)[1].all()
    routes[7, 1:] = 0
    routes[9, 2] = 0
    ids, valid = read_routes(routes, CONFIG)
    assert valid.logical_not().nonzero()[:, 0].tolist() == [7, 9] and ids.dtype == torch.uint8
    with pytest.raises(ValueError, match="vllm.moe_backend='triton'"):
        read_routes(np.zeros_like(routes), CONFIG)


def test_one_expert_per_token_and_many_experts():
    one = replace(CONFIG, num_experts_per_tok=1)
    with pytest.raises(ValueError, match='expert 0'):
        read_routes(np.zeros((9, 3, 1), np.uint8), one)
    assert read_routes(np.zeros((5, 3, 1), np.uint8), one)[
        1
    ].all()  # so few tokens may all want expert 0
    many = replace(CONFIG, num_experts=300)
    ids, valid = read_routes(np.full((4, 3, 2), 299, np.uint16) - np.array([0, 1], np.uint16), many)
    assert ids.dtype == torch.int16 and ids.max() == 299 and valid.all()
    with pytest.raises(ValueError, match='rows'):  # one row too many is not hidden
        collate(
            [
                to_sample(
                    requests()[0],
                    [4],
                    [-1.0],
                    np.tile(np.arange(2, dtype=np.uint8), (9, 3, 1)),
                    CONFIG,
                    0,
                    0.0,
                )
            ]
        )


def test_without_routes(tmp_path):
    dense = replace(CONFIG, mlp_only_layers=(0, 1, 2))
    e = rollout(tmp_path, dense, return_routes=False)
    try:
        s = next(e.generate(requests()))
        assert s.routed_experts is None and s.routes_valid is None
        assert gaps(lively(config=dense), list(e.generate(requests()))).mean() < CLOSE
    finally:
        e.close()


ROUNDED = dict(bfloat16={}, weights=dict(quantization='fp8'), fp8=dict(kv_cache_dtype='fp8'))


@pytest.mark.parametrize('case', ROUNDED)
def test_replay_closes_the_gap(tmp_path, case):
    "Rollout in bfloat16, FP8 weights, FP8 KV cache; training in fp32, with replay and without"
    if case == 'fp8' and not can_cache_fp8():
        pytest.skip('FP8 KV cache: this CPU has neither AVX-512 nor AMX')
    policy = lively()
    write_config(CONFIG, tmp_path)
    e = VllmRollout(tmp_path, dtype=torch.bfloat16, num_slots=64, **ROUNDED[case])
    e.load_weights(hf_weights(policy), 0)
    try:
        samples = list(e.generate(requests(64, 4, max_tokens=40)))
    finally:
        e.close()
    gap = {}
    for mode in ('off', 'R3'):
        b = collate(samples)
        b = replace(b, **TorchTrain(policy, OptimConfig(), replay=mode).score(b))
        gap[mode] = discrepancy(b)
        weights, _ = tis_weights(b.old_log_probs, b.rollout_log_probs, b.response_mask, cap=2.0)
        assert weights.max() <= 2 and abs(weights[b.response_mask].mean() - 1) < 0.05
    assert 1e-4 < gap['R3']['rollout_train_gap'] < gap['off']['rollout_train_gap']
    assert gap['R3']['rollout_train_k3'] < gap['off']['rollout_train_k3']
    assert 0.5 < gap['R3']['tokens_agree_frac'] < 1 and gap['R3']['routes_valid_frac'] == 1
    assert (gap['R3']['rollout_train_gap'] > 0.02) == (case != 'bfloat16')


def test_fp8_on_a_cpu_is_a_sync_of_rounded_weights(tmp_path):
    "With quantization='fp8' vLLM is exactly the policy whose matrices were quantised, every time"
    write_config(CONFIG, tmp_path)
    e = VllmRollout(tmp_path, quantization='fp8', num_slots=16)
    try:
        for version in range(2):
            policy, rounded = lively(version), lively()
            e.load_weights(hf_weights(policy), version)
            load_hf_weights(rounded, fp8_weights(hf_weights(policy)))
            samples = list(e.generate(requests()))
            assert gaps(rounded, samples).mean() < CLOSE and gaps(policy, samples).mean() > 0.005
        bad = [(n, w * np.inf if n.endswith('o_proj.weight') else w) for n, w in hf_weights(policy)]
        with pytest.raises(ValueError, match='o_proj.weight has values that are not finite'):
            e.load_weights(bad, 2)
        with pytest.raises(RuntimeError, match='has no weights'):
            next(e.generate(requests()))
    finally:
        e.close()


def test_three_steps_with_either_engine(fresh):
    "Samples of vLLM train the policy; what vLLM then samples is what the trained policy gives"
    policy = lively()
    train, loss = TorchTrain(policy, OptimConfig(lr=0.01)), PolicyLoss(LossConfig(tis='off'))
    for step in range(3):
        b = collate(list(fresh.generate(requests(seed=step))))
        b = replace(b, **train.score(b))
        assert (b.old_log_probs - b.rollout_log_probs).abs().mean() < CLOSE
        advantages = torch.where(b.response_mask, torch.linspace(-1, 1, len(b))[:, None], 0.0)
        b = replace(b, advantages=advantages)
        train.update(b, loss)
        fresh.load_weights(train.weights(), step + 1)
    last = list(fresh.generate(requests(seed=9)))
    assert gaps(policy, last).mean() < CLOSE and gaps(lively(), last).mean() > 0.01


# ---- what is refused, and the plugin ------------------------------------------------------------

BF, FP = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    'changes,vllm_config,dtype,device,routes,message',
    [
        (
            dict(head_dim=16),
            {},
            FP,
            'cpu',
            True,
            r'head_dim=16: attention on a CPU needs one of \(32, 64',
        ),
        (
            dict(hidden_size=72),
            {},
            FP,
            'cpu',
            True,
            'hidden_size=72: experts on a CPU need a multiple of 32',
        ),
        (dict(moe_intermediate_size=48), {}, FP, 'cpu', False, 'moe_intermediate_size=48'),
        ({}, {}, torch.float64, 'cpu', True, "use 'float32'"),
        (dict(mlp_only_layers=(0, 1, 2)), {}, BF, 'cuda', True, "router_replay='off'"),
        ({}, dict(quantization='fp8'), FP, 'cuda', True, "from 'bfloat16'"),
        ({}, dict(tensor_parallel=2), FP, 'cpu', True, 'use a pool of servers'),
        (
            {},
            dict(tensor_parallel=2, expert_parallel=True),
            FP,
            'cpu',
            True,
            'expert_parallel=True on a CPU',
        ),
    ],
)
def test_refused(changes, vllm_config, dtype, device, routes, message):
    alone = 'expert_parallel' not in vllm_config
    with pytest.raises(ValueError, match=message):
        fp8 = {k: v for k, v in vllm_config.items() if k == 'quantization'}
        own = VllmConfig(**{k: v for k, v in vllm_config.items() if k not in fp8})
        check_vllm(replace(CONFIG, **changes), own, dtype, device, routes, alone, **fp8)


WAYS = [
    ({}, 'cpu', 1, 'file'),
    ({}, 'cuda', 1, 'nccl'),
    ({}, 'cuda', 8, 'nccl'),
    (dict(sync_dir='here'), 'cuda', 8, 'file'),
    (dict(sync='file'), 'cuda', 8, 'file'),
    (dict(colocated=True), 'cuda', 1, 'ipc'),
    (dict(colocated=True), 'cuda', 2, 'file'),
    (dict(colocated=True, num_replicas=2), 'cuda', 2, 'file'),
    (dict(colocated=True, sync='file'), 'cuda', 1, 'file'),
    (dict(urls=('http://node7:8000',)), 'cuda', 8, 'nccl'),
    (dict(urls=('http://localhost:8000',)), 'cpu', 1, 'file'),
    (dict(urls=('http://node7:8000',), sync_dir='here'), 'cpu', 1, 'file'),
]


@pytest.mark.parametrize('config,device,num_ranks,way', WAYS)
def test_how_weights_travel(config, device, num_ranks, way):
    "The fastest that can be had; what was chosen is a choice that stands"
    assert weight_sync(VllmConfig(**config), device, num_ranks) == way
    assert weight_sync(VllmConfig(**config | dict(sync=way)), device, num_ranks) == way


@pytest.mark.parametrize(
    'config,device,num_ranks,says',
    [
        (dict(sync='nccl'), 'cpu', 1, "vllm.sync='nccl' on a CPU"),
        (dict(sync='ipc'), 'cpu', 1, "vllm.sync='ipc' on a CPU"),
        (dict(sync='nccl', colocated=True), 'cuda', 1, 'one process per GPU'),
        (dict(sync='ipc'), 'cuda', 1, 'one colocated server'),
        (dict(sync='ipc', colocated=True, num_replicas=2), 'cuda', 2, 'one colocated server'),
        (dict(sync='ipc', colocated=True), 'cuda', 2, 'the one GPU that trains'),
        (
            dict(urls=('http://node7:8000',)),
            'cpu',
            1,
            'node7:8000 is on another machine.*give vllm.sync_dir',
        ),
        (dict(urls=('http://node7:8000',), sync='file'), 'cuda', 1, 'give vllm.sync_dir'),
    ],
)
def test_ways_that_cannot_be_had(config, device, num_ranks, says):
    with pytest.raises(ValueError, match=says):
        weight_sync(VllmConfig(**config), device, num_ranks)


@pytest.mark.parametrize('avx512,amx', [(False, False), (True, False), (False, True)])
def test_fp8_kv_cache_of_a_cpu(avx512, amx):
    "Refused before vLLM starts, where it would die of it; servers elsewhere have other CPUs"

    def check(**kw):
        check_vllm(CONFIG, VllmConfig(**kw), BF, 'cpu', True, False, kv_cache_dtype='fp8')

    with (
        patch.object(torch.cpu, '_is_avx512_supported', lambda: avx512),
        patch.object(torch.cpu, '_is_amx_tile_supported', lambda: amx),
    ):
        if avx512 or amx:
            return check()
        with pytest.raises(
            ValueError, match="kv_cache_dtype='fp8' on this CPU: vLLM needs AVX-512 or AMX"
        ):
            check()
        check(urls=('http://other:8000',))


def test_accepted():
    big, odd = VllmConfig(tensor_parallel=8), replace(CONFIG, head_dim=16, hidden_size=72)
    check_vllm(odd, big, BF, 'cuda', True, True, quantization='fp8')
    check_vllm(
        replace(CONFIG, mlp_only_layers=(0, 1, 2), hidden_size=72),
        VllmConfig(),
        FP,
        'cpu',
        False,
        True,
    )
    check_vllm(CONFIG, VllmConfig(tensor_parallel=2), FP, 'cpu', True, one_process=False)
    for dtype in (FP, BF):
        check_vllm(CONFIG, VllmConfig(), dtype, 'cpu', True, True, quantization='fp8')


def test_heads_are_those_of_vllm():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(head_sizes) == CPUAttentionBackend.get_supported_head_sizes()


def test_a_server_hears_what_an_engine_hears():
    "The same parameters from JSON; without a stream the server asks for whole outputs by itself"
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
    from vllm.sampling_params import RequestOutputKind

    from compassrl.rollout.vllm.dispatcher import to_body

    for kw in (
        dict(temperature=0.0),
        dict(temperature=0.7, top_p=0.9, stop_ids=(1, 2)),
        dict(max_tokens=16),
    ):
        r = replace(requests(1, 1, **kw)[0], seed=-1)
        heard = GenerateRequest.model_validate(json.loads(json.dumps(to_body(r))))
        assert (
            heard.is_sampling_param_provided('max_tokens')
            and not heard.stream
            and heard.token_ids == list(r.prompt_ids)
        )
        heard.sampling_params.output_kind = RequestOutputKind.FINAL_ONLY
        assert heard.sampling_params == vllm.sampling_params(r)


def test_sleep_needs_a_gpu(tmp_path):
    write_config(CONFIG, tmp_path)
    with pytest.raises(ValueError, match='colocated=True on a CPU'):
        VllmRollout(tmp_path, VllmConfig(colocated=True))


def test_gpu_arguments():
    "What a server or an engine on a GPU is given (not run there)"

    def args(quantization='', **kw):
        return engine_args('m', CONFIG, VllmConfig(**kw), BF, 160, 16, True, 'cuda', quantization)

    assert args()['moe_backend'] == 'auto' and args(moe_backend='triton')['moe_backend'] == 'triton'
    assert 'quantization' not in args() and 'enforce_eager' not in args()
    fp8 = args(quantization='fp8', expert_parallel=True, tensor_parallel=4)
    assert fp8['quantization'] == 'fp8_per_block' and fp8['quantization_config'] == dict(
        ignore=['*.mlp.gate']
    )
    assert fp8['enable_expert_parallel'] and fp8['tensor_parallel_size'] == 4


def test_part_of_a_job_of_several_processes(tmp_path, monkeypatch):
    write_config(CONFIG, tmp_path)
    monkeypatch.setenv('WORLD_SIZE', '2')
    with pytest.raises(RuntimeError, match='one of 2 processes.*use a pool'):
        VllmRollout(tmp_path)


def test_in_a_process_of_its_own(tmp_path):
    "vLLM is imported late and finds the backend by itself; a closed engine harms no other"
    write_config(CONFIG, tmp_path)
    code = 'import sys; from tests.support import engine_samples as e; e.late_vllm(sys.argv[1])'
    command = [sys.executable, '-c', code, str(tmp_path)]
    r = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert r.returncode == 0 and r.stdout.split()[-2:] == ['all', '2.0'], (
        r.stdout[-500:] + r.stderr[-2000:]
    )


def test_a_colocated_engine_sleeps_when_it_has_nothing_to_do(fresh):
    calls = []
    with (
        patch.multiple(
            fresh.engine,
            sleep=lambda level: calls.append(f'sleep {level}'),
            wake_up=lambda tags: calls.append(f'wake {tags}'),
        ),
        patch.object(fresh, 'colocated', True),
    ):
        one = ordered(fresh.generate(requests()))
        again = ordered(fresh.generate(requests()))
        fresh.load_weights(hf_weights(lively(1)), 1)
        assert not fresh.is_asleep
    # the cache comes back after the weights, so that both versions never stand there together
    after = ["wake ['weights']", "wake ['kv_cache']"]
    assert calls == ['sleep 1', 'wake None', 'sleep 1', *after]
    assert [s.response_ids for s in one] == [s.response_ids for s in again]


def test_a_colocated_engine_leaves_the_gpu_to_the_trainer_at_once(tmp_path):
    "Its first weights are worth nothing, so they are dropped; the plugin needs no installation"
    write_config(CONFIG, tmp_path)
    calls = []

    class Recorded(VllmRollout):
        def start(self, args):
            assert args['enable_sleep_mode']
            calls.append('start')

        def sleep(self, level=1):
            calls.append(f'sleep {level}')

    with patch('compassrl.rollout.vllm.in_process.check_vllm', lambda *a, **k: None):
        Recorded(tmp_path, VllmConfig(colocated=True))
    assert calls == ['start', 'sleep 2']


SHAPES = [  # vocabulary, width: Qwen3-0.6B, Qwen3-30B-A3B, DeepSeek-V3
    (151936, 1024),
    (151936, 2048),
    (129280, 7168),
]


@pytest.mark.parametrize('vocab_size, width', SHAPES)
def test_every_tensor_fits_into_a_message_of_cuda_ipc(vocab_size, width):
    "vLLM's own sender, which refuses one that does not, on tensors without numbers"
    from vllm.distributed.weight_transfer import packed_tensor

    from compassrl.model.pretrained import hf_shapes
    from compassrl.rollout.vllm.transfer import pack_bytes

    config, empty = replace(CONFIG, vocab_size=vocab_size, hidden_size=width), torch.empty
    shapes = hf_shapes(config)
    plain = [(n, empty(s, dtype=torch.bfloat16, device='meta')) for n, s in shapes.items()]

    def send(size):
        with (
            patch.object(packed_tensor, 'reduce_tensor', lambda t: (None, ())),
            patch('torch.empty', lambda n, dtype, device: empty(n, dtype=dtype, device='meta')),
            patch('torch.cuda.current_stream'),
        ):
            parts = packed_tensor.packed_ipc_producer(iter(plain), 'gpu', lambda x: x[1], size)
            return [n for part in parts for n in part.names]

    assert send(pack_bytes(config, torch.bfloat16)) == list(shapes)
    with pytest.raises(ValueError, match='exceeds buffer_size_bytes'):
        send(256 << 20)
