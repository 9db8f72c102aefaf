"Episodes: token for token what the model read, alone or among others, and nobody learns answers"

import io
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compassrl.algo.losses import LossConfig, PolicyLoss
from compassrl.algo.losses.espo import EspoConfig
from compassrl.config import TrainConfig
from compassrl.data.data_settings import tool_functions
from compassrl.data.prompts import make_prompts
from compassrl.data.tasks import verify
from compassrl.data.tokenizer import EOS_ID, StopStrings, build_tokenizer, encode
from compassrl.data.tools import ToolConfig, ToolUser
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import hf_weights
from compassrl.records import (
    Prompt,
    Request,
    RolloutEngine,
    Sample,
    SamplingParams,
    collate,
    derive_seed,
)
from compassrl.rollout import slots
from compassrl.rollout.episodes import Episodes, Turns
from compassrl.rollout.partial import PartialResponses, drawn_mask
from compassrl.rollout.schedule import ScheduleConfig
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.train.routes import validate_routes
from compassrl.train.sft import sft_loss, solution_batch
from compassrl.train.torch_train import (
    OptimConfig,
    TorchTrain,
    accumulate_grads,
    response_log_probs,
)
from course.gradients import hf_gradients
from tests.support.engine_samples import Echo
from tests.support.growing import Growing, key, law_requests_that_grow

SHAPE = PolicyConfig(
    vocab_size=10, hidden_size=32, head_dim=8, moe_intermediate_size=32, max_position_embeddings=64
)
STOP, CALL = 1, 2


class ReadsAll(TorchRollout):
    "An engine that does not ask again: all requests at once"

    def generate(self, requests, whole_groups=False):
        return super().generate(list(requests), whole_groups)


def requests(num=24, max_tokens=40):
    params = SamplingParams(max_tokens, stop_ids=(STOP,))
    return [
        Request(f'p{i // 4}', (3 + i // 4, 4, 5), i % 4, derive_seed(i), params) for i in range(num)
    ]


def engine(policy, dtype=torch.float64, num_slots=8, kind=TorchRollout, **kwargs):
    e = kind(policy.config, num_slots, dtype, **kwargs)
    e.load_weights(hf_weights(policy), 0)
    return e


@pytest.fixture(scope='module')
def policy():
    return Policy(SHAPE, seed=3)


@pytest.fixture(scope='module')
def samples(policy):
    found = {
        (s.prompt_id, s.index): s for s in Episodes(engine(policy), Echo(CALL)).generate(requests())
    }
    assert len(found) == 24
    return found


def test_requests_that_grow(policy):
    "Turns are mixed with requests that come late; an engine that reads all it can needs more calls"
    law_requests_that_grow(Episodes(engine(policy, num_slots=3), Echo(CALL)), requests())
    source, out = Growing(requests()), []
    episodes = Episodes(engine(policy, num_slots=3, kind=ReadsAll), Echo(CALL))
    while not source.done:
        for s in episodes.generate(source):
            out.append(s)
            source.take(s)
    assert sorted(map(key, out)) == sorted(map(key, requests()))


def test_a_turn_knows_who_drew_every_token_before_it():
    "Those of earlier parts, too; what a tool wrote costs room, and no token that may be drawn"
    r = Request('p', (5, 6, 7), 0, 3, SamplingParams(8), left=20, begun=(True, False))
    first, later = (Turns([r]).turn(r, *x) for x in (((), ()), ((8, 9, 4), (True, False, True))))
    assert (first.begun, first.seed) == (r.begun, r.seed) and later.seed != r.seed
    assert later.begun == (True, False, True, False, True)
    assert (later.prompt_ids, later.params.max_tokens) == ((5, 6, 7, 8, 9, 4), 6)


def test_turns_are_done_when_every_response_has_ended(policy):
    queue, left = Turns(requests(4), Echo(CALL)), 4
    for s in engine(policy).generate(queue):
        assert not queue.done
        left -= queue.take(s) is not None
    assert queue.done and left == 0 and queue.poll() == []


def turns(s):
    "What the policy said between two answers, and the answers"
    said, read = [[]], []
    for token, own in zip(s.response_ids, s.policy_mask.tolist()):
        if own:
            said[-1].append(token)
            if token == CALL:
                read.append([])
                said.append([])
        else:
            read[-1].append(token)
    return said, read


def same(a, b):
    tensors = 'rollout_log_probs', 'routed_experts', 'routes_valid'
    assert a.response_ids == b.response_ids and a.finish_reason == b.finish_reason
    assert drawn_mask(a).equal(drawn_mask(b))
    for k in tensors:
        x, y = getattr(a, k), getattr(b, k)
        assert (x is None) == (y is None) and (x is None or x.equal(y)), k


def check_answers(samples):
    calls, reasons = [], set()
    for s in samples:
        reasons.add(s.finish_reason)
        assert (s.response_ids[-1] == STOP) == (s.finish_reason == 'stop')
        assert (s.response_ids[-1] == CALL) == (s.finish_reason == 'call')
        assert (len(s.response_ids) == 40) >= (s.finish_reason == 'length')
        assert len(s.response_ids) <= 40
        if s.policy_mask is None:
            assert CALL not in s.response_ids[:-1]
            continue
        said, read = turns(s)
        answers = [r for r in read if r]
        calls.append(len(answers))
        assert answers == [Echo(CALL)(ids) for ids in said[: len(answers)]]
        # a call that nobody answers ends it
        assert len(said) - 1 - len(answers) == (s.finish_reason == 'call')
        assert not s.rollout_log_probs[~s.policy_mask].any()
        assert (s.rollout_log_probs[s.policy_mask] < 0).all()
    return set(calls), reasons


def test_answers_stand_behind_their_calls(samples):
    assert check_answers(samples.values()) == ({1, 2, 3}, {'stop', 'length'})


@pytest.mark.parametrize('kind, num_slots', [(TorchRollout, 1), (TorchRollout, 24), (ReadsAll, 8)])
def test_the_same_alone_and_among_others(policy, samples, kind, num_slots):
    e = Episodes(engine(policy, num_slots=num_slots, kind=kind), Echo(CALL))
    found = list(e.generate(requests()[::-1]))
    assert len(found) == len(samples)
    for s in found:
        same(s, samples[s.prompt_id, s.index])


@pytest.mark.parametrize('longest', [0, 64])
def test_a_turn_goes_on_in_its_slot(policy, samples, longest, monkeypatch):
    "The same tokens, log-probs and routes as if each turn read all again, which it does not"
    monkeypatch.setattr(slots, 'most_given', longest)
    e, read = engine(policy, num_slots=8), []

    def prefill(prompts):
        read.extend(prompts)
        TorchRollout.prefill(e, prompts)

    e.prefill = prefill
    found = list(Episodes(e, Echo(CALL)).generate(requests()))
    assert len(found) == len(samples) and e.slots.num_running == 0
    for s in found:
        same(s, samples[s.prompt_id, s.index])
    turns = {
        (*s.prompt_ids, *s.response_ids[:end])
        for s in found
        for end in ((drawn_mask(s).int().diff() == 1).nonzero()[:, 0] + 1).tolist()
    }
    assert len(turns) > 9 and set(read) & turns == (set() if longest else turns)


def test_slots_grow_while_turns_are_read(policy):
    "Whoever runs beside it and whatever moves, a row reads its own answer"
    long = [replace(r, params=replace(r.params, max_tokens=58)) for r in requests(8)]
    mixed = [x for pair in zip(requests(24)[8:], long * 2) for x in pair]
    mixed = list({(r.prompt_id, r.index): r for r in mixed}.values())
    alone = {
        (r.prompt_id, r.index): s
        for r in mixed
        for s in Episodes(engine(policy), Echo(CALL, 9)).generate([r])
    }
    for s in Episodes(engine(policy, num_slots=3), Echo(CALL, 9)).generate(mixed):
        same(s, alone[s.prompt_id, s.index])


def test_a_longer_prompt_moves_nothing_that_is_read():
    "It comes while another row reads its answer, and needs more columns"
    rows, (r, *_) = slots.Slots(SHAPE, 3, torch.float64, 'cpu'), requests(1)
    logits = torch.zeros(3, SHAPE.vocab_size).log_softmax(-1)
    logits[:, 5] = 99  # what everybody draws
    first, L, K = rows.enter([r], 0.0), SHAPE.num_hidden_layers, SHAPE.num_experts_per_tok
    kv = torch.zeros(L, 2, SHAPE.num_key_value_heads, 3, SHAPE.head_dim)
    rows.copy_prompt(first, r.prompt_ids, kv, torch.zeros(3, L, K))
    rows.draw(first, logits[:1])
    read = (8, 7, STOP, 6)
    assert not rows.hand_over([0], [replace(r, prompt_ids=(3, 4, 5, 5, *read))], 0.0)
    seen = []
    for tick in range(5):
        if tick == 2:
            rows.draw(rows.enter([replace(r, prompt_ids=(3,) * 20)], 0.0), logits[1:2])
        logits[0, STOP] = 199 if tick < 4 else 0  # drawn instead of what is read: it counts nowhere
        assert not rows.draw(slice(0, rows.num_running), logits[: rows.num_running])
        seen.append(int(rows.tokens[0, rows.lengths[0] - 1]))
    assert seen == [*read, 5]


def test_without_a_call_it_is_the_response_of_the_engine(policy, samples):
    plain = {(s.prompt_id, s.index): s for s in engine(policy).generate(requests())}
    silent = [k for k, s in plain.items() if CALL not in s.response_ids]
    assert silent
    for k in silent:
        same(samples[k], plain[k])
    without = Episodes(engine(policy, return_routes=False), Echo(CALL)).generate(requests())
    assert all(s.routed_experts is None for s in without)


def test_log_probs_and_routes_are_those_of_the_train_engine(policy):
    sampler = engine(policy, torch.float32, return_gates=True)
    found = list(Episodes(sampler, Echo(CALL)).generate(requests()))
    assert sum(s.policy_mask is not None for s in found) > 5
    batch, train = collate(found), TorchTrain(policy, OptimConfig(), replay='R3-gates')
    validate_routes(batch, SHAPE)
    assert batch.routes_valid.equal(batch.fed_mask)
    scored = train.score(batch)
    mask = batch.response_mask
    assert mask.sum() == sum(
        int(s.policy_mask.sum()) if s.policy_mask is not None else len(s.response_ids)
        for s in found
    )
    gap = (scored['old_log_probs'] - batch.rollout_log_probs)[mask].abs().max()
    assert gap < 1e-5
    assert (scored['routes_agree'] == 1)[batch.fed_mask].float().mean() > 0.99
    assert not scored['old_log_probs'][~mask].any() and not scored['entropy'][~mask].any()


def gradients(policy, batch, loss):
    metrics, seen = accumulate_grads(policy, batch, loss, 300)
    return {k: v.clone() for k, v in hf_gradients(policy)}, metrics, seen


@pytest.mark.parametrize('name', ['grpo', 'gspo', 'cispo', 'espo'])
def test_answers_have_no_gradient(policy, samples, name):
    "Whatever is claimed about them: no loss, no gradient; without the mask there would be one"
    g = torch.Generator().manual_seed(0)

    def graded(batch, noise):
        batch = replace(batch, **TorchTrain(policy, OptimConfig()).score(batch))
        advantages = torch.linspace(-1, 1, len(batch))[:, None] * batch.response_mask
        odd = (~batch.response_mask).float() * noise
        return replace(
            batch,
            advantages=advantages + odd * torch.randn(odd.shape, generator=g),
            old_log_probs=batch.old_log_probs - odd,
            rollout_log_probs=batch.rollout_log_probs - 2 * odd,
            entropy=batch.entropy + 3 * odd,
        )

    some = [s for s in samples.values() if s.policy_mask is not None]
    cfg, espo = LossConfig(name, tis='truncate'), EspoConfig()
    found = []
    for noise in 0, 1:
        batch = graded(collate(some), noise)
        loss = PolicyLoss(cfg, espo.for_batch(batch, SHAPE.vocab_size))
        found.append(gradients(policy, batch, loss))
    (a, loss_a, _), (b, loss_b, _) = found
    assert all(a[k].equal(b[k]) for k in a) and any(v.any() for v in a.values())
    assert loss_a['loss'].equal(loss_b['loss'])
    batch = graded(collate([replace(s, policy_mask=None) for s in some]), 0)
    c, *_ = gradients(policy, batch, PolicyLoss(cfg, espo.for_batch(batch, SHAPE.vocab_size)))
    assert not all(a[k].allclose(c[k]) for k in a)


# ---- parts


class Hashing(RolloutEngine):
    "The next token is a hash of all that was read: how a response is cut cannot matter"

    def generate(self, requests, whole_groups=False):
        for r in requests:
            ids = list(r.prompt_ids)
            while len(ids) < len(r.prompt_ids) + r.params.max_tokens:
                ids.append(1 + derive_seed(r.prompt_id, r.index, ids) % 9)
                if ids[-1] in r.params.stop_ids:
                    break
            said = ids[len(r.prompt_ids) :]
            reason = 'stop' if said[-1] in r.params.stop_ids else 'length'
            log_probs = -torch.arange(len(r.prompt_ids), len(ids)).float()
            row = r.prompt_id, r.index, list(r.prompt_ids), said, log_probs
            yield Sample(*row, None, None, reason, 0)


class Says(Echo):
    "A tool whose answers have any length; a mark in them is no call"

    def __call__(self, ids):
        assert ids[-1] == CALL and CALL not in ids[:-1]
        return [CALL, *ids, CALL, STOP][: derive_seed(ids) % 5]


def in_parts(engine, tool, asked, tokens, saved=True):
    "Each response to its end; what is under way passes through a checkpoint after every step"
    engine, parts, seams = Episodes(engine, tool), PartialResponses(tokens), []
    parts.begin(asked)
    while parts.running:
        for s in engine.generate(parts.parts()):
            assert drawn_mask(s).sum() <= tokens
            if not parts.take(s):
                seams.append(bool(drawn_mask(s)[-1]))
        if saved:
            file = io.BytesIO()
            torch.save(parts.state_dict(), file)
            parts = PartialResponses(tokens)
            parts.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    return parts.whole_groups()[1], seams


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.integers(1, 12),
    limit=st.integers(1, 40),
    calls=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)
def test_how_a_response_is_cut_does_not_matter(tokens, limit, calls, seed):
    "Marks, answers, the number of calls, the budget, and why it ended are those of the whole"
    tool = Says(CALL, calls)
    asked = [replace(r, prompt_id=f'{seed}') for r in requests(4, limit)]
    whole = {s.index: s for s in Episodes(Hashing(), tool).generate(asked)}
    found, _ = in_parts(Hashing(), tool, asked, tokens)
    assert len(found) == len(whole) == 4
    for s in found:
        same(s, whole[s.index])


MEMORY = b"""
import hashlib

class Memory:
    "What it says depends on the row and on all calls so far"

    def reset(self, answer):
        self.seen = [answer]

    def step(self, text):
        self.seen.append(text)
        n = hashlib.sha256(repr(self.seen).encode()).digest()[0]
        if n % 7 == 0:
            raise ValueError('away')
        return str(n) * (n % 3), n % 5 == 0
"""


@pytest.mark.parametrize('end', ['#', '#"'], ids=['one token', 'two tokens'])
@pytest.mark.parametrize('tokens', [1, 4, 9])
def test_an_environment_is_rebuilt_by_its_calls(end, tokens):
    "A response in parts, through checkpoints, reads what it would have read in one piece"
    user = ToolUser(ToolConfig('m.py:Memory', begin='!', end=end, max_calls=3), TOKENIZER, MEMORY)
    user.check([Prompt(f'e{k}', '', '?', [4], str(k), 'exact') for k in range(20)])
    params = SamplingParams(100)
    asked = [Request(f'e{k}', (3, 4, 5), i, 0, params) for k in range(20) for i in range(2)]
    whole = {key(s): s for s in Episodes(Hashing(), user).generate(asked)}
    found, _ = in_parts(Hashing(), user, asked, tokens)
    for s in found:
        same(s, whole[key(s)])
    called = [TOKENIZER.decode(s.response_ids) for s in found if s.policy_mask is not None]
    assert len(found) == 40 and len(called) > 20 and any('ValueError' in t for t in called)
    ended = [s for s in found if s.finish_reason == 'stop']
    assert ended and all(TOKENIZER.decode(s.response_ids).endswith(end) for s in ended)
    last = {TOKENIZER.decode(s.response_ids).count(end) for s in found}
    assert max(last) > 2, 'state of several calls'


@pytest.mark.parametrize('texts', [('#',), ('!#',), ('%%', ' \n')], ids=str)
@pytest.mark.parametrize('tokens', [0, 1, 5])
def test_a_response_ends_with_a_text(texts, tokens):
    "It is what an engine without stop strings draws, up to the first token that completes one"
    params = SamplingParams(40, stop_ids=(STOP,), stop=texts)
    asked = [replace(r, params=params) for r in requests(40)]
    episodes = Episodes(Hashing(), stops=StopStrings(TOKENIZER))
    if tokens:
        parts = PartialResponses(tokens)
        parts.begin(asked)
        while parts.running:
            for s in episodes.generate(parts.parts()):
                parts.take(s)
        found = parts.whole_groups()[1]
    else:
        found = list(episodes.generate(asked))
    ended, text = 0, partial(TOKENIZER.decode, skip_special_tokens=False)
    plain = {key(s): s.response_ids for s in Hashing().generate(requests(40))}
    for s in found:
        ids = plain[key(s)]
        at = [n for n in range(1, len(ids)) if any(t in text(ids[:n]) for t in texts)]
        assert s.response_ids == ids[: at[0] if at else 40] and s.policy_mask is None
        assert s.finish_reason == ('stop' if at or ids[-1] == STOP else 'length')
        ended += bool(at)
    assert 2 < ended < 41


def test_a_text_ends_responses_of_an_engine(policy, monkeypatch):
    "In its slot, with nothing to read between two turns, as if each turn read all again"
    asked = [replace(r, params=replace(r.params, stop=('!#', '$'))) for r in requests()]
    both = []
    for most in 32, -1:
        monkeypatch.setattr(slots, 'most_given', most)
        e, read = engine(policy), []
        e.prefill = lambda prompts, e=e, read=read: (
            read.extend(prompts),
            TorchRollout.prefill(e, prompts),
        )
        found = Episodes(e, stops=StopStrings(TOKENIZER)).generate(asked)
        both.append(({key(s): s for s in found}, len(read)))
    (kept, few), (again, many) = both
    assert few == 6 < many and len(kept) == 24
    for k, s in kept.items():
        same(s, again[k])
        text = TOKENIZER.decode(s.response_ids[:-1])
        assert '$' not in text and '!#' not in text
    assert any(s.response_ids[-2:] == encode(TOKENIZER, '!#') for s in kept.values()) or any(
        s.response_ids[-1:] == encode(TOKENIZER, '$') for s in kept.values()
    )


@pytest.mark.parametrize('tokens', [1, 3, 8])
def test_parts_with_weights_that_stay(policy, tokens):
    "Answers behind calls, and the train engine agrees with what was drawn"
    e = engine(policy, torch.float32)
    found, seams = in_parts(e, Echo(CALL), requests(), tokens)
    assert check_answers(found)[0] >= {1, 2}
    assert set(seams) == {True, False}, 'a part ends in a turn, and behind the answer to a call'
    batch = collate(found)
    assert batch.routes_valid.equal(batch.fed_mask)
    scored = TorchTrain(policy, OptimConfig(), replay='R3').score(batch)
    gap = (scored['old_log_probs'] - batch.rollout_log_probs)[batch.response_mask]
    assert gap.abs().max() < 1e-5
    assert (scored['routes_agree'] == 1)[batch.fed_mask].float().mean() > 0.99


def test_each_token_of_a_part_has_its_owner(policy):
    "Weights change from step to step; a token's log-prob is that of the weights with its version"
    policies = [Policy(SHAPE, seed=k) for k in (3, 4, 5)]
    e, parts, tool = engine(policy, torch.float32), PartialResponses(6), Echo(CALL)
    parts.begin(requests())
    for k in range(40):
        e.load_weights(hf_weights(policies[k % 3]), k % 3)
        for s in Episodes(e, tool).generate(parts.parts()):
            parts.take(s)
        if not parts.running:
            break
    found = parts.whole_groups()[1]
    assert sum(s.policy_mask is not None for s in found) > 5
    batch = collate(found)
    with torch.no_grad():
        by = torch.stack([response_log_probs(p, batch, replay=False)[0] for p in policies])
    for i, s in enumerate(found):
        own, at = drawn_mask(s), len(s.prompt_ids)
        by_version = by[:, i, at : at + len(own)].gather(0, s.token_versions[None])[0]
        assert (by_version - s.rollout_log_probs)[own].abs().max() < 1e-5


TOKENIZER = build_tokenizer()
USER = ToolUser(ToolConfig('calculator'), TOKENIZER)


def test_a_table_is_looked_up(tmp_path):
    (path := tmp_path / 'table.yaml').write_text('fr: paris\n')
    user = ToolUser(ToolConfig('lookup', table=str(path)), TOKENIZER)
    for word, answer in ('fr', 'paris'), (' fr ', 'paris'), ('it', '?'), ('', '?'):
        assert TOKENIZER.decode(user(encode(TOKENIZER, f'<{word}>'))) == f'={answer};'
    with pytest.raises(ValueError, match="table='' with name='lookup'"):
        ToolConfig('lookup')
    with pytest.raises(ValueError, match="with name='calculator': a file is for lookup"):
        ToolConfig('calculator', table=str(path))
    path.write_text('- fr')
    with pytest.raises(ValueError, match='table.yaml holds no object'):
        ToolUser(ToolConfig('lookup', table=str(path)), TOKENIZER)
    with pytest.raises(ValueError, match='gone.json'):
        ToolUser(ToolConfig('lookup', table=str(tmp_path / 'gone.json')), TOKENIZER)


def test_a_cold_start_learns_calls_and_no_answers():
    prompts = make_prompts('calculation', 12, 1.5, 0, 'train', TOKENIZER)
    policy = Policy(replace(SHAPE, vocab_size=99, max_position_embeddings=96), seed=0).double()
    batch = solution_batch(prompts, TOKENIZER, tool=USER)
    total, num = 0.0, 0
    for i, p in enumerate(prompts):
        ids, own = USER.play(p.solution)
        text = TOKENIZER.decode(ids)
        assert verify(p, text).correct and text.count('<') == text.count(';') >= 2
        for equation in text.split(';')[:-1]:  # the language's own arithmetic is the oracle
            call, answer = equation.strip('<').split('>=')
            assert eval(call) == int(answer)
        whole = p.token_ids + ids + [EOS_ID]
        hidden, _ = policy(torch.tensor([whole]))
        log_probs = (hidden @ policy.head.T).log_softmax(-1)
        for t, learns in enumerate([*own, True], len(p.token_ids)):
            assert bool(batch.response_mask[i, t]) == learns
            if learns:
                total, num = total - log_probs[t - 1, whole[t]], num + 1
    found, *_ = accumulate_grads(policy, batch, sft_loss, 300)
    assert torch.isclose(found['loss'].double(), (total / num).detach().double(), rtol=1e-5)


def test_what_is_refused(policy):
    asked = [replace(r, params=replace(r.params, stop_ids=(CALL,))) for r in requests(1)]
    with pytest.raises(ValueError, match='token 2 ends a response and a call'):
        list(Episodes(engine(policy), Echo(CALL)).generate(asked))
    tools = ToolConfig('calculator')
    with pytest.raises(ValueError, match='schedule.over_provision=0.5'):
        TrainConfig(tools=tools, rollout_engine='pool', schedule=ScheduleConfig(over_provision=0.5))
    with pytest.raises(ValueError, match="name='abacus'"):
        ToolConfig('abacus')
    with pytest.raises(ValueError, match='Episodes needs a tokenizer'):
        stop = replace(requests(1)[0], params=SamplingParams(9, stop=('a',)))
        list(Episodes(engine(policy), Echo(CALL)).generate([stop]))
    with pytest.raises(ValueError, match='an engine reads no text'):
        list(engine(policy).generate([stop]))
    s = next(iter(Episodes(engine(policy), Echo(CALL)).generate(requests(1))))
    with pytest.raises(ValueError, match='policy_mask has 1 rows'):
        collate([replace(s, policy_mask=torch.ones(1, dtype=torch.bool))])


def test_an_answer_that_does_not_fit_is_not_read(policy):
    "The budget is of the whole response, answers included"
    for s in Episodes(engine(policy), Echo(CALL)).generate(requests(max_tokens=9)):
        assert len(s.response_ids) <= 9
        if s.policy_mask is not None:
            assert s.policy_mask[-1], 'an answer that nobody read'
    assert encode(TOKENIZER, '=1;') == USER(encode(TOKENIZER, '<3-2>'))


@pytest.mark.parametrize('body', ['import sys; sys.exit(0)', 'while True: pass'])
def test_a_tool_that_leaves_or_loops_is_an_error_that_the_policy_reads(body, monkeypatch):
    exec(f'def bad(call):\n    {body}\n', made := {})
    monkeypatch.setitem(tool_functions.functions, 'bad', made['bad'])
    user = ToolUser(ToolConfig('bad', wall_s=0.1), TOKENIZER)
    read = user(encode(TOKENIZER, '<1>'))
    said = TOKENIZER.decode(read, skip_special_tokens=False)
    assert 'RuntimeError' in said or 'TimeoutError' in said, said
