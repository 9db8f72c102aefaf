"""Labels, both orders, references, verdicts: laws and the faults they catch;
the client against a server that misbehaves"""

import json
import math
import re
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from compassrl.algo.advantages import group_advantages
from compassrl.judges import genrm
from compassrl.judges.genrm import (
    GenRMConfig,
    PairOrder,
    Question,
    Reply,
    bt_loss,
    combine_labels,
    compare,
    judge_prompt,
    judge_samples,
    label_rewards,
    pair_order,
    parse_label,
    reference_texts,
)
from compassrl.judges.genrm_client import GenRM
from compassrl.records import Prompt, Sample, Verdict
from tests.runs.test_run import cli

# mutants need no smallest example
random = settings(
    deadline=None,
    max_examples=50,
    derandomize=True,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.generate],
)
LABELS = ['Better', 'Tie', 'Worse']
SWAPPED = dict(zip(LABELS, LABELS[::-1]))


# ---- a judge whose opinion and habits are known: texts are 'quality:words' -----------------------


def opinion(first, second, bias=0.0, band=0.0):
    # what stands first gains `bias`
    gap = float(first.split(':')[0]) - float(second.split(':')[0]) + bias
    return 'Tie' if abs(gap) <= band else 'Better' if gap > 0 else 'Worse'


def says(label):
    return Reply(f'It is close, or Worse.\nVerdict: {label}', num_tokens=7)


def judge_of(bias=0.0, band=0.0, mute=lambda q: False):
    def judge(questions):
        return [
            Reply('I cannot say') if mute(q) else says(opinion(q.first, q.second, bias, band))
            for q in questions
        ]

    return judge


def sample(prompt, index, verdict=None):
    return Sample(prompt, index, [1], [1], torch.zeros(1), None, None, 'stop', 0, verdict=verdict)


def prompts_of(samples, answer=''):
    return {s.prompt_id: Prompt(s.prompt_id, 'd', 'why?', [1], answer, 'genrm') for s in samples}


texts_of = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99)), min_size=1, max_size=12).map(
    lambda pairs: [f'{q}:{w}' for q, w in pairs]
)


@st.composite
def batches(draw):
    "Groups of any size, in any order, with or without reference answers"
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    samples = draw(
        st.permutations([sample(f'p{g}', i) for g, n in enumerate(sizes) for i in range(n)])
    )
    texts = [f'{draw(st.integers(0, 5))}:{draw(st.integers(0, 3))}' for _ in samples]
    return samples, prompts_of(samples, draw(st.sampled_from(['', '3:ref']))), texts


# ---- laws: each takes (judge, samples, prompts, texts) -> verdicts -------------------------------


def ask(judge, answer, reference):
    s = [sample('p', 0)]
    return judge_samples(s, prompts_of(s, reference), [answer], judge)[0][0]


def law_oracle(fn):
    "A loop that knows the opinion: believed where both orders say the same"

    @random
    @given(batches(), st.floats(-3, 3), st.floats(0, 2))
    def check(batch, bias, band):
        samples, prompts, texts = batch
        refs = reference_texts(samples, prompts, texts)
        for v, text, ref in zip(fn(judge_of(bias, band), *batch), texts, refs):
            once, again = opinion(text, ref, bias, band), SWAPPED[opinion(ref, text, bias, band)]
            want = once if once == again and text != ref else 'Tie'
            assert (v.reward, v.correct) == (
                dict(Better=1.0, Tie=0.5, Worse=0.0)[want],
                want == 'Better',
            )
            assert v.status == ('wrong' if want == 'Worse' else 'ok')

    check()


def law_mirror(fn):
    "Answer and reference exchanged: rewards sum to 1, whatever the judge's habit"

    @random
    @given(texts_of, texts_of, st.floats(-3, 3))
    def check(a, b, bias):
        for x, y in zip(a, b):
            s = [sample('p', 0)]
            there, back = (
                fn(judge_of(bias), s, prompts_of(s, r), [t])[0] for t, r in ((x, y), (y, x))
            )
            assert there.reward + back.reward == 1

    check()


def law_habit(fn):
    "A judge that looks at the place alone gives nobody an advantage"

    @random
    @given(batches(), st.sampled_from(LABELS))
    def check(batch, label):
        assert {v.reward for v in fn(lambda qs: [says(label)] * len(qs), *batch)} == {0.5}

    check()


def law_monotone(fn):
    "Without habit and error a better answer never gets less; a better label never does"

    @random
    @given(texts_of, st.floats(0, 3))
    def check(texts, band):
        samples = [sample('p', i) for i in range(len(texts))]
        rewards = [
            v.reward for v in fn(judge_of(0.0, band), samples, prompts_of(samples, '4:ref'), texts)
        ]
        rows = sorted(zip([float(t.split(':')[0]) for t in texts], rewards))
        assert all(a[1] <= b[1] for a, b in zip(rows, rows[1:]))
        assert all(r == (q > 4) + 0.5 * (q == 4) for q, r in rows) or band

    check()


def law_mute(fn):
    "No label in either order: no verdict, advantage 0, siblings as if it did not exist"

    @random
    @given(batches(), st.integers(0, 3), st.booleans())
    def check(batch, word, forward):
        samples, prompts, texts = batch
        pairs = list(zip(texts, reference_texts(samples, prompts, texts)))
        hit = {(t, r) for t, r in pairs if t != r and t.endswith(f':{word}')}

        def mute(q):
            return ((q.first, q.second) if forward else (q.second, q.first)) in hit

        heard = fn(judge_of(), *batch)
        for v, w, (t, r) in zip(fn(judge_of(mute=mute), *batch), heard, pairs):
            # the same question is asked the other way round as well
            lost = (t, r) in hit or (r, t) in hit
            assert (v.status, v.reward) == ('failed', 0) if lost else v == w

    check()


LAWS = [law_oracle, law_mirror, law_habit, law_monotone, law_mute]


def library(judge, samples, prompts, texts):
    return judge_samples(samples, prompts, texts, judge)[0]


@pytest.mark.parametrize('law', LAWS, ids=lambda f: f.__name__)
def test_law(law):
    law(library)


# ---- mutants: one name of the module replaced while it runs --------------------------------------


def mutated(**names):
    def fn(*args):
        with patch.multiple(genrm, **names):
            return library(*args)

    return fn


def first_order(replies):
    return OUTCOME([replies[0], says(SWAPPED[parse_label(replies[0].text) or 'Tie'])])


OUTCOME, REFERENCES = genrm._outcome, genrm.reference_texts
MUTANTS = dict(
    not_swapped_back=mutated(combine_labels=lambda a, b: a if a == b else 'Tie'),
    tie_as_worse=mutated(label_rewards=dict(Better=1.0, Tie=0.0, Worse=0.0)),
    unreadable_as_worse=mutated(parse_label=lambda text: parse_label(text) or 'Worse'),
    unreadable_as_tie=mutated(parse_label=lambda text: parse_label(text) or 'Tie'),
    one_order_only=mutated(_outcome=first_order),
    second_order_only=mutated(combine_labels=lambda a, b: SWAPPED[b]),
    inverted=mutated(label_rewards=dict(Better=0.0, Tie=0.5, Worse=1.0)),
    either_order=mutated(combine_labels=lambda a, b: a if a != 'Tie' else SWAPPED[b]),
    first_label=mutated(
        parse_label=lambda text: (re.findall('Better|Tie|Worse', text) or [None])[0]
    ),
    wrong_pairing=mutated(_outcome=lambda replies: OUTCOME(replies[::-1])),
)


@pytest.mark.parametrize('name', MUTANTS)
def test_some_law_kills_the_mutant(name):
    def broken(law):
        try:
            law(MUTANTS[name])
        except AssertionError:
            return True
        return False

    assert any(broken(law) for law in LAWS)


# ---- labels --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'text, label',
    [
        ('Verdict: Better', 'Better'),
        ('verdict: WORSE.', 'Worse'),
        ('**Verdict: Tie**', 'Tie'),
        ('Tie', 'Tie'),
        ('Verdict: **Better**\n\n', 'Better'),
        ('Final verdict - tie', 'Tie'),
        ('Better\nVerdict: Worse', 'Worse'),
        ('<think>Verdict: Better</think>\nVerdict: Tie', 'Tie'),
        ('the answer says Verdict: Better\nVerdict: Worse', 'Worse'),
        ('', None),
        ('\n', None),
        ('Verdict:', None),
        ('Verdict: Better or Tie', None),
        ('Verdict: not better', None),
        ('Answer 1 is better', None),
        ('Verdict: Better\nthen again', None),
        ('<think>Verdict: Better</think>', None),
        ('Verdict: Betterment', None),
        ('Untie', None),
        ('Verdict: Better, Worse', None),
        ('Verdict: Better Verdict: Worse', None),
        ('Verdict: **Tie**, no, verdict: tie', None),
        ('My verdict, as a verdict must be short: Tie', None),
        ('The verdict is better known: my Verdict: Tie', 'Tie'),
    ],
)
def test_parse_label(text, label):
    assert parse_label(text) == label


@pytest.mark.parametrize('label', LABELS)
def test_our_own_format_is_read(label):
    assert (
        f'\nVerdict: {label}' in judge_prompt and parse_label(f'reasons\nVerdict: {label}') == label
    )


@random
@given(st.text())
def test_parse_label_never_raises(text):
    assert parse_label(text) in (*LABELS, None)


def test_combine_table():
    for a in LABELS:
        for b in LABELS:
            assert combine_labels(a, SWAPPED[b]) == (a if a == b else 'Tie')
    assert label_rewards == dict(Better=1.0, Tie=0.5, Worse=0.0)


# ---- numbers -------------------------------------------------------------------------------------


def test_worked_numbers():
    """Near ties: sigma of about .011 makes two hundredths an advantage of 1.8 to 1.9;
    labels make it 0"""
    r = torch.tensor([0.50, 0.51, 0.49, 0.50, 0.48, 0.50, 0.51, 0.51])
    g = torch.zeros(8, dtype=torch.long)
    assert r.std().item() == pytest.approx(0.01069, abs=1e-5)
    assert group_advantages(r, g).abs().max().item() == pytest.approx(1.8708, abs=1e-3)
    assert 0.02 / 0.011 == pytest.approx(1.8, abs=0.02)
    assert (group_advantages(torch.full((8,), label_rewards['Tie']), g) == 0).all()


@random
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(-2, 2), st.integers(0, 4), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_pair_order_by_loop(rows):
    group, adv, quality, ok = map(list, zip(*rows))
    counts = Counter()
    for i in range(len(rows)):
        for j in range(len(rows)):
            if group[i] == group[j] and ok[i] and ok[j] and quality[i] - quality[j] > 1:
                counts[(adv[i] > adv[j]) - (adv[i] < adv[j])] += 1
    args = (
        torch.tensor(adv).float(),
        torch.tensor(quality).float(),
        torch.tensor(group),
        torch.tensor(ok),
        1.0,
    )
    if not counts:
        with pytest.raises(ValueError, match='no pair'):
            pair_order(*args)
    else:
        assert pair_order(*args) == pytest.approx(
            PairOrder(*(counts[k] / counts.total() for k in (1, 0, -1)))
        )


# ---- references, growth, cost --------------------------------------------------------------------


@random
@given(batches(), st.randoms(use_true_random=False), st.integers(0, 5))
def test_verdicts_follow_their_samples(batch, rnd, seed):
    samples, prompts, texts = batch
    perm = list(range(len(samples)))
    rnd.shuffle(perm)
    want, _ = judge_samples(samples, prompts, texts, judge_of(0.5, 1.0), seed)
    got, _ = judge_samples(
        [samples[i] for i in perm], prompts, [texts[i] for i in perm], judge_of(0.5, 1.0), seed
    )
    assert got == [want[i] for i in perm]


@random
@given(batches(), st.integers(0, 5))
def test_a_reference_belongs_to_the_group(batch, seed):
    samples, prompts, texts = batch
    refs = reference_texts(samples, prompts, texts, seed)
    for s, ref in zip(samples, refs):
        mine = {t for o, t in zip(samples, texts) if o.prompt_id == s.prompt_id}
        assert ref == prompts[s.prompt_id].answer or not prompts[s.prompt_id].answer and ref in mine
    assert len({(s.prompt_id, r) for s, r in zip(samples, refs)}) == len(prompts)


def test_every_response_may_become_the_reference():
    samples = [sample('p', i) for i in range(4)]
    texts = [f'{i}:x' for i in range(4)]
    drawn = Counter(
        reference_texts(samples, prompts_of(samples), texts, seed)[0] for seed in range(400)
    )
    assert set(drawn) == set(texts) and min(drawn.values()) > 60


@random
@given(st.integers(1, 4), st.integers(5, 8), st.integers(0, 9))
def test_growth_keeps_reference_and_verdicts(small, large, seed):
    samples = [sample('p', i) for i in range(large)]
    texts = [f'{(7 * i) % 5}:{i}' for i in range(large)]
    prompts = prompts_of(samples)
    whole, cost = judge_samples(samples, prompts, texts, judge_of(), seed, small)
    first, before = judge_samples(samples[:small], prompts, texts[:small], judge_of(), seed, small)
    for s, v in zip(samples, first):
        s.verdict = v
    again, after = judge_samples(samples, prompts, texts, judge_of(), seed, small)
    assert again == whole and before['genrm_calls'] + after['genrm_calls'] == cost['genrm_calls']
    with pytest.raises(ValueError, match='pass the whole group'):
        judge_samples(samples[small:], prompts, texts[small:], judge_of(), seed, small)


def test_cost_and_metrics():
    """2 calls per distinct comparison; equal texts cost nothing;
    fractions are of what was judged now"""
    samples = [sample('p', i) for i in range(5)] + [sample('q', 0, Verdict(1.0, True))]
    texts = ['9:a', '9:a', '3:ref', '1:c', '3:d', 'whatever']
    asked = []

    def judge(questions):
        asked.extend(questions)
        return judge_of(bias=0.5, mute=lambda q: '1:c' in q)(questions)

    verdicts, m = judge_samples(samples, prompts_of(samples, '3:ref'), texts, judge)
    assert [v.reward for v in verdicts] == [1, 1, 0.5, 0, 0.5, 1] and [v.status for v in verdicts][
        3
    ] == 'failed'
    assert len(asked) == len(set(asked)) == 6 and m == dict(
        genrm_calls=6,
        genrm_tokens=28,
        genrm_failed_frac=0.2,
        genrm_tie_frac=0.4,
        genrm_disagree_frac=0.2,
    )
    assert judge_samples([], {}, [], judge_of())[0] == [] and len(asked) == 6


def test_a_failed_call_keeps_its_reason():
    done, _ = compare(
        lambda qs: [Reply('', 'timeout', 'too slow'), says('Better')], [Question('p', 'a', 'b')]
    )
    assert (done[0].label, done[0].status, done[0].evidence) == (None, 'timeout', 'too slow')


# ---- the client, over real sockets ---------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.send(
            200, dict(object='list', data=[dict(id='m', object='model', created=0, owned_by='me')])
        )

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        srv, prompt = self.server, body['messages'][0]['content']
        first, second = (
            re.search(f'<{k}>(.*)</{k}>', prompt, flags=re.S)[1] for k in ('answer_1', 'answer_2')
        )
        with srv.lock:
            srv.bodies.append(body)
            srv.tries[prompt] += 1
            srv.busy += 1
            srv.most_busy = max(srv.most_busy, srv.busy)
        fault = srv.fault(first, second, srv.tries[prompt]) or 'ok'
        try:
            self.reply(fault, '' if fault.startswith('say') else opinion(first, second, srv.bias))
        except OSError:
            pass  # the client gave up
        finally:
            with srv.lock:
                srv.busy -= 1

    def reply(self, fault, label):
        kind, _, arg = (fault or 'ok').partition(' ')
        if kind == 'slow':
            time.sleep(float(arg))
        if kind == 'close':
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        if kind == 'status':
            return self.send(int(arg), dict(error=dict(message=f'status {arg}')))
        if kind == 'junk':
            return self.send_bytes(200, arg.encode())
        if kind == 'drip':
            self.send_response(200)
            self.send_header('Content-Type', 'application/json')
            self.send_header('Content-Length', '1000')
            self.end_headers()
            while not self.server.over.wait(0.05):
                self.wfile.write(b' ')
                self.wfile.flush()
            return
        text = arg if kind == 'say' else f'Reasons.\nVerdict: {label}'
        message = dict(role='assistant', content=None if kind == 'none' else text)
        choice = dict(
            index=0, finish_reason='length' if kind == 'long' else 'stop', message=message
        )
        self.send(
            200,
            dict(
                id='1',
                object='chat.completion',
                created=0,
                model='m',
                choices=[choice],
                usage=dict(prompt_tokens=6, completion_tokens=4, total_tokens=10),
            ),
        )

    def send(self, code, body):
        self.send_bytes(code, json.dumps(body).encode())

    def send_bytes(self, code, body):
        self.send_response(code)
        for k, v in {
            'Content-Type': 'application/json',
            'retry-after-ms': '5',
            'Content-Length': len(body),
        }.items():
            self.send_header(k, str(v))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    request_queue_size, daemon_threads, block_on_close = 128, True, False

    def handle_error(self, *args):
        pass


@contextmanager
def serving(fault=lambda first, second, attempt: None, bias=0.0, **kw):
    "A judge at a free port of this machine, and a client of it"
    srv = Server(('127.0.0.1', 0), Handler)
    srv.fault = fault
    srv.bias = bias
    srv.lock = threading.Lock()
    srv.bodies = []
    srv.tries = Counter()
    srv.busy, srv.most_busy, srv.over = 0, 0, threading.Event()
    threading.Thread(target=srv.serve_forever, kwargs=dict(poll_interval=0.02), daemon=True).start()
    cfg = dict(
        model='m', base_url=f'http://127.0.0.1:{srv.server_port}/v1', timeout_s=60.0, concurrency=8
    )
    try:
        yield GenRM(GenRMConfig(**{**cfg, **kw})), srv
    finally:
        srv.over.set()
        srv.shutdown()
        srv.server_close()


QUESTIONS = [Question('why?', f'{i % 7}:{i}', f'{(3 * i) % 5}:ref') for i in range(40)]
WANT = [opinion(q.first, q.second) for q in QUESTIONS]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv('NO_PROXY', '127.0.0.1')


def got(replies):
    return [parse_label(r.text) for r in replies]


def test_replies_come_in_order_whatever_finishes_first():
    with serving(lambda a, b, n: f'slow {0.05 * (int(a.split(":")[1]) % 3)}') as (judge, srv):
        replies = judge(QUESTIONS)
    assert (
        got(replies) == WANT
        and {r.status for r in replies} == {'ok'}
        and {r.num_tokens for r in replies} == {10}
    )
    assert 2 <= srv.most_busy <= 8 and len(srv.bodies) == len(QUESTIONS)
    body = srv.bodies[0]
    assert (body['model'], body['temperature'], body['max_tokens'], len(body['messages'])) == (
        'm',
        0,
        4096,
        1,
    )


@pytest.mark.parametrize('fault', ['status 500', 'status 503', 'status 429', 'close'])
def test_transient_faults_are_retried(fault):
    with serving(lambda a, b, n: fault if n <= 1 and int(a.split(':')[1]) % 4 == 0 else None) as (
        judge,
        srv,
    ):
        replies = judge(QUESTIONS)
    assert got(replies) == WANT and len(srv.bodies) == len(QUESTIONS) + 10


@pytest.mark.parametrize(
    'fault, status, detail, tries',
    [
        ('status 500', 'failed', 'status 500', 2),
        ('status 400', 'failed', 'status 400', 1),
        ('status 404', 'failed', 'status 404', 1),
        ('junk {"a": 1}', 'failed', 'no completion', 1),
        ('junk {"choices": []}', 'failed', 'no completion', 1),
        ('junk <html>', 'failed', '', 1),
        ('junk 3', 'failed', '', 1),
        ('junk {"choices": [{}]}', 'failed', '', 1),
        ('long', 'failed', 'cut off at max_tokens', 1),
    ],
)
def test_lasting_faults_fail_with_a_reason(fault, status, detail, tries):
    "Only the question that they hit, and never as an exception"
    with serving(lambda a, b, n: fault if a == '3:3' else None, max_retries=1) as (judge, srv):
        replies = judge(QUESTIONS[:8])
    assert [r.status for r in replies] == ['ok'] * 3 + [status] + ['ok'] * 4
    assert detail in replies[3].detail and replies[3].detail and '\n' not in replies[3].detail
    assert len(srv.bodies) == 7 + tries


@pytest.mark.parametrize('fault', ['none', 'say Hard to tell', 'say Verdict: Better or Worse'])
def test_a_reply_without_a_label_is_a_failed_verdict(fault):
    samples = [sample('p', i) for i in range(3)]
    with serving(lambda a, b, n: fault if a == '9:a' else None) as (judge, _):
        verdicts, metrics = judge_samples(
            samples, prompts_of(samples, '2:ref'), ['9:a', '1:b', '5:c'], judge
        )
    assert [v.status for v in verdicts] == ['failed', 'wrong', 'ok'] and 'no label' in verdicts[
        0
    ].evidence
    assert metrics['genrm_failed_frac'] == pytest.approx(1 / 3)


@pytest.mark.parametrize('fault', ['slow 30', 'drip'])
def test_a_server_that_never_ends_is_a_timeout(fault):
    "Nothing for long, or for ever a byte now and then, which resets the timeout of a read"
    with serving(lambda a, b, n: fault if a == '3:3' else None, timeout_s=0.6, max_retries=1) as (
        judge,
        srv,
    ):
        assert [r.status for r in judge(QUESTIONS[3:4])] == ['timeout']
        patient = GenRM(replace(judge.cfg, timeout_s=60.0))
        assert {r.status for r in patient(QUESTIONS[:3])} == {'ok'}


def test_a_hanging_server_does_not_hold_every_question():
    "After `concurrency` silent questions in a row the rest of the batch is not asked"
    with serving(lambda a, b, n: 'slow 30', timeout_s=0.5, max_retries=0) as (judge, srv):
        replies = judge(QUESTIONS)
        assert len(srv.bodies) <= 16
    assert {r.status for r in replies} == {'timeout', 'failed'}
    assert 'not asked' in replies[-1].detail


def test_a_refusing_server_is_not_a_dead_one():
    with serving(
        lambda a, b, n: 'status 400' if a.split(':')[1] < '30' else None, concurrency=2
    ) as (judge, _):
        assert {r.status for r in judge(QUESTIONS)[30:]} == {'ok'}


def test_a_dead_endpoint():
    "Failed verdicts that are counted, at once; `check` says what to do; a new batch asks again"
    with serving(max_retries=1) as (judge, srv):
        judge.check()
        with pytest.raises(ValueError, match=r"model='other'.*serves \['m'\]"):
            GenRM(GenRMConfig(model='other', base_url=judge.cfg.base_url)).check()
    samples = [sample('p', i) for i in range(30)]
    texts = [f'{i}:x' for i in range(30)]
    verdicts, metrics = judge_samples(samples, prompts_of(samples, '2:ref'), texts, judge)
    assert {v.status for v in verdicts} == {'failed'} and metrics['genrm_failed_frac'] == 1
    assert 'not asked' in verdicts[-1].evidence, 'nor waited for'
    with pytest.raises(ValueError, match='vllm serve m'):
        judge.check()
    adv = group_advantages(
        torch.tensor([v.reward for v in verdicts]),
        torch.zeros(30, dtype=torch.long),
        torch.tensor([v.status == 'ok' for v in verdicts]),
    )
    assert (adv == 0).all()


def test_the_same_judge_with_and_without_a_network():
    samples = [sample(f'p{i % 3}', i // 3) for i in range(18)]
    texts = [f'{(5 * i) % 7}:{i}' for i in range(18)]
    with serving(bias=1.5) as (judge, _):
        remote, m = judge_samples(samples, prompts_of(samples), texts, judge)
    local, n = judge_samples(samples, prompts_of(samples), texts, judge_of(1.5))
    assert remote == local and m['genrm_disagree_frac'] == n['genrm_disagree_frac'] > 0
    assert m['genrm_calls'] == 30 and m['genrm_tokens'] == 300


def test_inside_a_running_loop():
    import asyncio

    async def cell(judge):
        return judge(QUESTIONS[:4])

    with serving() as (judge, _):
        assert got(asyncio.run(cell(judge))) == WANT[:4]


def test_key_from_the_environment_and_own_prompt(tmp_path, monkeypatch):
    keys = []

    class Keyed(Handler):
        def do_POST(self):
            keys.append(self.headers['Authorization'])
            super().do_POST()

    file = tmp_path / 'prompt.txt'
    file.write_text(
        'Mine {{}}: {prompt} <answer_2>{second}</answer_2> <answer_1>{first}</answer_1>'
    )
    monkeypatch.setenv('JUDGE_KEY', 'sesame')
    with (
        patch(f'{__name__}.Handler', Keyed),
        serving(api_key_env='JUDGE_KEY', prompt_file=str(file)) as (judge, srv),
    ):
        assert got(judge(QUESTIONS[:3])) == WANT[:3]
    assert set(keys) == {'Bearer sesame'}
    assert 'Mine {}: why? <answer_2>' in srv.bodies[0]['messages'][0]['content']


def test_braces_in_answers_are_text():
    q = Question('{prompt} {0}', '3:{x} {', '1:}')
    with serving() as (judge, srv):
        assert got(judge([q])) == ['Better']
    assert '3:{x} {' in srv.bodies[0]['messages'][0]['content']


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'kw, message',
    [
        (dict(base_url='localhost:8000'), "base_url='localhost:8000'"),
        (dict(timeout_s=0.0), 'timeout_s=0'),
        (dict(timeout_s=float('nan')), 'timeout_s=nan'),
        (dict(timeout_s=float('inf')), 'timeout_s=inf'),
        (dict(concurrency=0), 'concurrency=0'),
        (dict(max_retries=-1), 'max_retries=-1'),
        (dict(max_tokens=0), 'max_tokens=0'),
        (dict(temperature=-1.0), 'temperature=-1'),
    ],
)
def test_bad_config(kw, message):
    with pytest.raises(ValueError, match=message):
        GenRMConfig(model='m', **kw)


@pytest.mark.parametrize(
    'text, message',
    [
        (None, 'cannot be used'),
        ('{first} {second}', 'each once'),
        ('{prompt} {first} {second} {score}', 'score'),
        ('{prompt} {first} {second} {', 'cannot be used'),
    ],
)
def test_bad_prompt_file(tmp_path, text, message):
    if text is not None:
        (tmp_path / 'p').write_text(text)
    with pytest.raises(ValueError, match=message):
        GenRM(GenRMConfig(model='m', prompt_file=str(tmp_path / 'p')))


def test_no_model_and_no_client():
    with pytest.raises(ValueError, match='name the model'):
        GenRM(GenRMConfig())
    with (
        patch.dict('sys.modules', openai=None),
        pytest.raises(ValueError, match=r'compassrl\[genrm\]'),
    ):
        GenRM(GenRMConfig(model='m'))


def test_a_judge_that_loses_replies_is_a_bug():
    with pytest.raises(AssertionError, match='2 questions, 0 replies'):
        compare(lambda qs: [], [Question('p', 'a', 'b')])


# ---- a real vLLM server: needs `python tools/setup_env.py engines-cpu` ---------------------------


@pytest.fixture
def vllm_server(tmp_path):
    "A tiny generative judge of digits up to 4, trained in seconds and served by vLLM on the CPU"
    pytest.importorskip('vllm')
    from compassrl.data.tokenizer import build_tokenizer, encode, save_tokenizer
    from compassrl.model.policy import Policy, PolicyConfig
    from compassrl.model.pretrained import save_pretrained
    from compassrl.rollout.vllm.server import ServerProcess, flags, free_port, server_env
    from compassrl.train.sft import SFTConfig, cold_start
    from compassrl.train.torch_train import OptimConfig, TorchTrain
    from tests.support import vllm_fork_server as vllm_forks

    tok, template = build_tokenizer(), tmp_path / 'template.jinja'

    def pair(a, b):
        text = f'{a}|{b}='
        said = f'{a} against {b}.\nVerdict: {opinion(str(a), str(b))}'
        return Prompt(text, 'd', text, encode(tok, text), 'x', 'exact', said)

    # vLLM's CPU attention has no head_dim 16
    policy = Policy(PolicyConfig(num_attention_heads=2, head_dim=32))
    cfg = SFTConfig(steps=140, lr=5e-3, batch_size=25)
    list(
        cold_start(
            TorchTrain(policy, OptimConfig()),
            [pair(a, b) for a in range(5) for b in range(5)],
            cfg,
            tok,
        )
    )
    save_pretrained(policy, tmp_path)
    save_tokenizer(tok, tmp_path)
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    (tmp_path / 'prompt').write_text('{prompt}{first}|{second}=')
    port = free_port()
    args = dict(
        model=tmp_path,
        host='127.0.0.1',
        port=port,
        max_model_len=128,
        max_num_seqs=16,
        dtype='float32',
        served_model_name='judge',
        chat_template=template,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 30,
    )
    command = [sys.executable, '-m', 'vllm.entrypoints.openai.api_server', *flags(args)]
    vllm_forks.adopt(tmp_path / 'forks.log')
    server = ServerProcess(command, server_env('cpu'), tmp_path / 'server.log')
    cfg = dict(
        model='judge',
        base_url=f'http://127.0.0.1:{port}/v1',
        prompt_file=str(tmp_path / 'prompt'),
        max_tokens=48,
    )
    try:
        yield GenRM(GenRMConfig(**cfg, concurrency=16, timeout_s=20.0, max_retries=1)), server
    finally:
        server.kill()


def test_a_vllm_server_judges_and_dies(vllm_server):
    judge, server = vllm_server
    for _ in range(150):
        try:
            judge.check()
        except ValueError:
            assert server.alive, server.tail()
            time.sleep(1)
        else:
            break
    asked = [Question('', str(a), str(b)) for a in range(5) for b in range(5)]
    replies = judge(asked)
    right = [parse_label(r.text) == opinion(q.first, q.second) for q, r in zip(asked, replies)]
    assert sum(right) > 22 and all(r.num_tokens > 20 for r in replies)
    server.kill()
    after = judge(asked * 50)
    assert {r.status for r in after} == {'failed'} and 'not asked' in after[-1].detail


# ---- in a run


def arithmetic(path):
    "Sums whose solution is their answer; every second one is judged by the model"

    def row(i):
        return dict(
            prompt=f'{i % 10}+{i // 10}=',
            answer=str(i % 10 + i // 10),
            solution=str(i % 10 + i // 10),
            verifier=['exact', 'genrm'][i % 2],
        )

    path.write_text(''.join(json.dumps(row(i)) + '\n' for i in range(72)))
    return ['--data.path', path, '--data.num-heldout', 8]


def shorter(first, second, attempt):
    return 'say Verdict: ' + (
        'Better' if len(first) < len(second) else 'Worse' if len(first) > len(second) else 'Tie'
    )


def test_a_run_asks_the_model(tmp_path):
    "Prompts choose their judge in training and evaluation; what the model cost is in the metrics"
    with serving(shorter) as (client, srv):
        r = cli(
            'train',
            'smoke-cpu',
            '--steps',
            2,
            '--run-dir',
            tmp_path / 'run',
            *arithmetic(tmp_path / 'sums.jsonl'),
            '--rewards.genrm.model',
            'm',
            '--rewards.genrm.base-url',
            client.cfg.base_url,
        )
        assert r.returncode == 0, r.stderr[-3000:]
    metrics = [
        json.loads(line) for line in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()
    ]
    assert all(
        m['genrm_calls'] > 0 and m['genrm_failed_frac'] == 0 and m['failed_frac'] == 0
        for m in metrics
    )
    evaluated = {
        s['prompt'].rstrip('='): s
        for s in json.loads((tmp_path / 'run/eval_after.json').read_text())['samples']
    }
    assert {'exact', 'genrm'} == {
        'genrm'
        if 'in the other order' in s['evidence'] or 'same text' in s['evidence']
        else 'exact'
        for s in evaluated.values()
    }


@pytest.mark.parametrize(
    'more, says',
    [
        ([], "asks for the verifier 'genrm': set rewards.genrm.model"),
        (
            [
                '--rewards.genrm.model',
                'm',
                '--rewards.genrm.base-url',
                'http://127.0.0.1:9/v1',
                '--rewards.genrm.max-retries',
                0,
            ],
            'Is `vllm serve m` up',
        ),
    ],
)
def test_a_run_without_its_model_is_refused(tmp_path, more, says):
    r = cli(
        'train',
        'smoke-cpu',
        '--run-dir',
        tmp_path / 'run',
        *arithmetic(tmp_path / 'sums.jsonl'),
        *more,
    )
    assert r.returncode == 1 and says in r.stderr and len(r.stderr.strip().splitlines()) == 1, (
        r.stderr
    )
    assert not (tmp_path / 'run').exists()


# ---- the loss of a score

comparisons = st.lists(
    st.tuples(st.floats(-8, 8), st.floats(-8, 8), st.sampled_from([0.0, 0.5, 1.0])),
    min_size=1,
    max_size=9,
)


def naive_bt(first, second, wins):
    out = 0.0
    for a, b, w in zip(first, second, wins):
        p = math.exp(a) / (math.exp(a) + math.exp(b))
        out -= w * math.log(p) + (1 - w) * math.log(1 - p)
    return out / len(wins)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(comparisons)
def test_loss_and_gradient(rows):
    a, b, w = ([r[i] for r in rows] for i in range(3))
    x, y = (torch.tensor(v, requires_grad=True) for v in (a, b))
    loss = bt_loss(x, y, torch.tensor(w))
    assert loss.item() == pytest.approx(naive_bt(a, b, w), rel=1e-4, abs=1e-5)
    loss.backward()
    slope = [(1 / (1 + math.exp(q - p)) - v) / len(w) for p, q, v in zip(a, b, w)]
    assert x.grad.tolist() == pytest.approx(slope, abs=1e-5)
    assert y.grad.tolist() == pytest.approx([-s for s in slope], abs=1e-5)


def test_a_tie_pulls_scores_together():
    x, y = torch.tensor([2.0], requires_grad=True), torch.tensor([0.0])
    bt_loss(x, y, torch.tensor([0.5])).backward()
    assert x.grad > 0
    assert bt_loss(y, y, torch.tensor([0.5])).item() == pytest.approx(math.log(2))
