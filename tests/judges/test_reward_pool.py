"""Overlapped rewards are the serial ones: nothing lost, nothing doubled, whatever hangs,
dies or comes twice"""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from compassrl.data.tasks import verifiers
from compassrl.data.tokenizer import EOS_ID, build_tokenizer, encode, response_text
from compassrl.judges import genrm, genrm_judge
from compassrl.judges import reward_pool as pool_module
from compassrl.judges.genrm_judge import GenRMJudge, make_judge
from compassrl.judges.reward_pool import GRACE, RewardPool
from compassrl.judges.serial import RewardConfig, SerialJudge, judge_sample
from compassrl.records import Prompt, Sample, Verdict
from compassrl.runs.curves import plot_gantt, spans_of
from compassrl.sandbox import isolated
from tests.support import ROOT
from tests.support import misbehaving_verifiers as odd_verifiers
from tests.support.faults import planted

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = Tokenizer(
    models.BPE({c: i for i, c in enumerate(ALPHABET)} | {'<eos>': 256, '<odd>': 257}, [])
)
BYTES.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTES.decoder = decoders.ByteLevel()
BYTES.add_special_tokens(['<eos>', '<odd>'])
EOS = 256
# a crash under load takes .3 s of CPU
CFG = RewardConfig(workers=4, wall_s=4.0, cpu_s=1.0, memory_mb=600, retries=1)
NAMES = ('moody', 'digest', 'once', 'even')
FOLDER = 'set below'


@pytest.fixture(scope='module', autouse=True)
def register(tmp_path_factory):
    before = dict(verifiers)
    for n in NAMES:
        verifiers[n] = getattr(odd_verifiers, n)
    yield
    verifiers.clear()
    verifiers.update(before)


@pytest.fixture(scope='module')
def prompts(tmp_path_factory):
    folder = tmp_path_factory.mktemp('once')
    return [Prompt(n, 'odd', n, [65], str(folder), n) for n in NAMES] + [
        Prompt('unknown', 'odd', 'x', [65], '', 'no such verifier')
    ]


@pytest.fixture(scope='module')
def pool(prompts):
    pool = RewardPool(prompts, BYTES, EOS, CFG)
    pool.settle(moody('awake'))  # copies in `Shared` need not wait for the broker's first word
    yield pool
    pool.close()
    assert pool.broker.returncode is not None


def sample(prompt, ids, index=0):
    return Sample(prompt, index, [65], list(ids), torch.zeros(len(ids)), None, None, 'stop', 0)


def moody(*texts):
    return [sample('moody', BYTES.encode(t).ids + [EOS], i) for i, t in enumerate(texts)]


def copies(samples):
    return [replace(s, timings={}) for s in samples]


ODD = {  # what becomes of a verifier that misbehaves: status and evidence
    'hang': ('timeout', ''),
    'hang too': ('timeout', ''),
    'busy': ('timeout', ''),
    'crash': ('failed', 'killed by SIGSEGV'),
    'leave 3': ('failed', 'left with exit code 3'),
    'leave 0': ('failed', 'left with exit code 0'),
    'exit': ('failed', 'RuntimeError: it ended the program by SystemExit(enough)'),
    'raise': ('failed', 'RuntimeError: out of order'),
    'memory': ('failed', 'MemoryError: '),
}


def said(v):
    "Which of two clocks has ended it depends on the machine"
    return v.status, v.reward, '' if v.status == 'timeout' else v.evidence


def verdicts(judge, samples):
    judge.settle(samples)
    return [s.verdict for s in samples]


def descendants(pid):
    try:
        own = [int(p) for p in Path(f'/proc/{pid}/task/{pid}/children').read_text().split()]
    except OSError:
        return []
    return own + [d for p in own for d in descendants(p)]


def gone(pids, within=10.0):
    "Ended, if perhaps not yet reaped"

    def alive(p):
        try:
            return Path(f'/proc/{p}/stat').read_text().rsplit(')', 1)[1].split()[0] != 'Z'
        except OSError:
            return False

    until = time.monotonic() + within
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    return not any(map(alive, pids))


# ---- the law


def test_a_thousand_samples(pool, prompts):
    "Overlapped equals serial, with timeouts, crashes of every kind and duplicates among them"
    rng = random.Random(0)
    odd = list(ODD)
    texts = [f'slow {rng.randrange(10**4)}' for _ in range(600)]
    texts += [rng.choice(texts) for _ in range(391)] + odd  # many come twice
    rng.shuffle(texts)
    samples = moody(*texts)
    for s in rng.sample(samples, 1000):
        pool.start(s)
    got = verdicts(pool, samples)

    plain = SerialJudge(prompts, BYTES, EOS)
    mild = [i for i, t in enumerate(texts) if t not in odd]
    assert len(mild) == 991
    assert [got[i] for i in mild] == verdicts(plain, copies([samples[i] for i in mild]))
    for t in odd:
        status, evidence = ODD[t]
        found = said(got[texts.index(t)])
        assert found[:2] == (status, 0.0) and found[2].startswith(evidence), found
    statuses = Counter(v.status for v in got)
    assert (statuses['timeout'], statuses['failed']) == (3, 6)
    assert all(s.reward == s.verdict.reward for s in samples) and not pool.jobs

    judged = [s for s in samples if s.timings['reward_end'] > s.timings['reward_start']]
    assert len(judged) == len(set(texts)), 'duplicates are judged once'
    assert len({s.timings['worker'] for s in judged}) > 1


FORMS = st.sampled_from(['a', 'bb', 'slow 1', 'slow 22', 'crash', 'leave 3', 'exit', 'raise', 'a'])


@settings(max_examples=15, deadline=None)
@given(
    st.lists(FORMS, max_size=12), st.lists(FORMS, max_size=12), st.randoms(use_true_random=False)
)
def test_any_mixture_in_any_order(pool, early, late, rng):
    "Started or not, settled in two parts that share samples"

    def expected(t):
        if t == 'crash':
            return 'failed', 'killed by SIGSEGV'
        if t == 'leave 3':
            return 'failed', 'left with exit code 3'
        if t == 'exit':
            said = 'it ended the program by SystemExit(enough)'
            return 'failed', f'RuntimeError: {said}: return a value, or raise ValueError'
        if t == 'raise':
            return 'failed', 'RuntimeError: out of order'
        return ('wrong' if len(t) % 2 else 'ok'), t

    samples = moody(*early, *late)
    for s in rng.sample(samples, len(early)):
        pool.start(s)
    first = samples[: len(samples) // 2 + 1]
    pool.settle(first)
    assert all(s.verdict for s in first)
    pool.settle(samples)
    # where it was raised is told behind the evidence
    got = [(s.verdict.status, s.verdict.evidence.partition(' (misbehaving')[0]) for s in samples]
    assert got == [expected(t) for t in early + late]


def test_nobody_waits_for_a_verdict_of_a_later_step(pool):
    """Settled are those that are asked for; what else is judged goes on,
    and is there when it is asked for"""
    hangs, *quick = moody('hang', *(f'slow {i}' for i in range(20)))
    equal = moody('hang')[0]
    for s in (hangs, *quick):
        pool.start(s)
    pool.settle(quick)
    assert all(s.verdict for s in quick) and hangs.verdict is None
    pool.start(equal)
    assert len(pool.jobs) == 1, 'a duplicate of what is under way is not judged twice'
    pool.settle([hangs, equal])
    assert hangs.verdict.status == equal.verdict.status == 'timeout' and not pool.jobs


SPECIALS = [
    [],
    [EOS],
    [EOS, EOS],
    [257],
    [65, EOS, 66],
    [0xC3],
    [0xE2, 0x82],
    [195, 188, EOS],
    list(range(258)),
]


def test_bytes_are_those_of_a_serial_decode(pool):
    rng = random.Random(1)
    ids = SPECIALS + [[rng.randrange(258) for _ in range(rng.randrange(60))] for _ in range(300)]
    got = [v.evidence for v in verdicts(pool, [sample('digest', i, k) for k, i in enumerate(ids)])]
    assert got == [odd_verifiers.digest(response_text(BYTES, i, EOS), '').evidence for i in ids]
    assert len(set(got)) > 290


def test_our_tokenizer_and_its_specials_too():
    tok = build_tokenizer()
    prompts = [Prompt('digest', 'odd', 'x', [65], '', 'digest')]
    rng, judge = random.Random(2), RewardPool(prompts, tok, EOS_ID, RewardConfig(workers=1))
    try:
        ids = [[rng.randrange(99) for _ in range(rng.randrange(40))] for _ in range(200)] + [
            [0],
            [1],
            [2],
            [1, 1],
            encode(tok, 'x<eos>y'),
        ]
        got = [
            v.evidence for v in verdicts(judge, [sample('digest', i, k) for k, i in enumerate(ids)])
        ]
        assert got == [odd_verifiers.digest(response_text(tok, i), '').evidence for i in ids]
    finally:
        judge.close()


# ---- what a pool does about trouble


def test_a_crash_is_tried_again_and_a_timeout_is_not(pool, tmp_path):
    "What a hanging verifier started ends with it"
    word = f'{random.SystemRandom().randrange(10**5, 10**6)}.25'
    s, *late = sample('once', BYTES.encode('first').ids), *moody(f'note {tmp_path}/tries')
    late += moody(f'spawn {word}')
    (dead,) = moody(f'die {tmp_path}/ends')
    pool.settle([s, dead, *late])  # they hang at the same time
    assert (tmp_path / 'ends').read_text() == 'tried ' * (1 + CFG.retries)
    assert dead.verdict.status == 'failed'
    assert s.verdict == Verdict(1.0, True, 'ok', s.verdict.evidence)
    assert [t.verdict.status for t in late] == ['timeout'] * 2
    assert (tmp_path / 'tries').read_text() == 'tried '

    def there(p):
        try:
            return word.encode() in (p / 'cmdline').read_bytes().split(b'\0')
        except OSError:
            return False

    assert gone([p.name for p in Path('/proc').glob('[0-9]*') if there(p)])


def test_start_never_waits(pool):
    hanging, quick = (
        moody(*[f'{x} {i}' for i in range(n)]) for x, n in (('hang', CFG.workers), ('slow', 300))
    )
    start = time.monotonic()
    for s in hanging + quick:
        pool.start(s)
    # all workers are taken: if it did, the end of one that hangs would be in it
    assert time.monotonic() - start < CFG.wall_s + GRACE
    assert {v.status for v in verdicts(pool, hanging)} == {'timeout'}
    pool.settle(quick)
    assert not pool.jobs


def test_an_unknown_verifier_says_the_same(pool, prompts):
    a, b = sample('unknown', [66]), sample('unknown', [66])
    pool.start(a)
    assert (
        verdicts(pool, [a]) == verdicts(SerialJudge(prompts, BYTES, EOS), [b])
        and a.verdict.status == 'failed'
    )


def test_a_lost_broker_is_a_clear_error(prompts):
    judge = RewardPool(prompts, BYTES, EOS, replace(CFG, workers=1))
    pids = [judge.broker.pid]
    try:
        judge.settle(moody('a'))
        pids += descendants(judge.broker.pid)
        os.kill(judge.broker.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match='broker is gone'):
            for _ in range(3):
                judge.settle(moody('b'))
        assert gone(pids), 'its workers went with it'
    finally:
        judge.close()


def test_a_stopped_broker_is_named(prompts, monkeypatch):
    "It would be silent until all verdicts that are due might have timed out"
    assert pool_module._stopped_s <= 60
    monkeypatch.setattr(pool_module, '_stopped_s', 1.0)
    pool = RewardPool(prompts, BYTES, EOS, replace(CFG, wall_s=120.0))
    try:
        pool.broker.send_signal(signal.SIGSTOP)
        with pytest.raises(RuntimeError, match='their broker is stopped, 1 verdicts are due'):
            pool.settle(moody('awake'))
    finally:
        pool.broker.kill()
        pool.close()


def test_a_killed_trainer_leaves_nothing():
    "With a verifier that hangs, and a sandbox under way"
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import json, torch
from tests.support import misbehaving_verifiers as odd_verifiers
from compassrl.judges.reward_pool import GRACE, RewardPool
from compassrl.judges.serial import RewardConfig
from compassrl.records import Prompt, Sample
from compassrl.data.tasks import verifiers
from compassrl.data.tokenizer import build_tokenizer, encode
verifiers['moody'] = odd_verifiers.moody
tok = build_tokenizer()
slow = json.dumps(dict(tests=['import time; time.sleep(60)'], wall_s=60))
prompts = [Prompt('m', 'odd', 'x', [5], '', 'moody'), Prompt('c', 'odd', 'x', [5], slow, 'code')]
pool = RewardPool(prompts, tok, 1, RewardConfig(workers=2, wall_s=60, unsafe=True))
def sample(p, t):
    return Sample(p, 0, [5], encode(tok, t), torch.zeros(len(t)), None, None, 'stop', 0)
pool.settle([sample('m', 'fine')])
for s in (sample('m', 'hang'), sample('c', 'x = 1')): pool.start(s)
print('started', flush=True)
pool.settle([sample('m', 'more')])
"""
    trainer = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout.readline() == 'started\n'
        until = time.monotonic() + 30
        while len(below := descendants(trainer.pid)) < 5 and time.monotonic() < until:
            time.sleep(0.02)
        assert len(below) >= 5, 'broker, two workers, supervisor, program'
    finally:
        trainer.kill()
        trainer.wait()
    assert gone(below)


def test_close_twice_and_without_work(prompts):
    judge = make_judge(prompts[:1], BYTES, EOS, RewardConfig(workers=1))
    judge.settle([])
    judge.close()
    judge.close()
    assert judge.broker.returncode is not None
    assert isinstance(make_judge(prompts, BYTES, EOS, RewardConfig()), SerialJudge)


# ---- bad input


@pytest.mark.parametrize(
    'kw, message',
    [
        (dict(workers=-1), 'workers=-1: use at least 0'),
        (dict(retries=-2), 'retries=-2'),
        (dict(wall_s=0), 'wall_s=0'),
        (dict(cpu_s=-1.0), 'cpu_s=-1'),
        (dict(memory_mb=0), 'memory_mb=0'),
        (dict(wall_s=float('nan')), 'wall_s=nan'),
    ],
)
def test_bad_config(kw, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig(**kw)


def test_verifiers_without_a_module(monkeypatch, prompts):
    monkeypatch.setitem(verifiers, 'mine', lambda text, answer: Verdict(1.0, True))
    with pytest.raises(ValueError, match="verifier='mine': workers cannot import it"):
        RewardPool([replace(prompts[0], verifier='mine')], BYTES, EOS, CFG)
    with pytest.raises(ValueError, match='workers=0: use at least 1'):
        RewardPool(prompts, BYTES, EOS, RewardConfig())


# ---- planted faults, on the trainer's side


def duplicates(make):
    a = moody('same', 'same', 'other', 'slow x')
    judge = make()
    for s in a:
        judge.start(s)
    judge.settle(a)
    assert [s.verdict and s.verdict.evidence for s in a] == ['same', 'same', 'other', 'slow x']
    assert sum(s.timings['reward_end'] > s.timings['reward_start'] for s in a) == 3
    b = moody('never started')
    judge.settle(b)
    assert b[0].verdict.evidence == 'never started' and b[0].reward == b[0].verdict.reward


class Shared(RewardPool):
    "One broker for all mutants, each of which has numbers of its own"

    firsts = itertools.count(10**6, 10**3)

    def __init__(self, pool):
        self.first = next(self.firsts)
        vars(self).update(
            vars(pool), jobs={}, known={}, backlog=type(pool.backlog)(), count=self.first
        )

    def _recv(self):
        "Without the answers that an earlier one has left behind"
        found = super()._recv()
        while isinstance(found, tuple) and found[0] < self.first:
            found = super()._recv()
        return found


@pytest.fixture(scope='module')
def spoiled(prompts):
    "A pool for mutants: what they leave behind is nobody else's"
    own = RewardPool(prompts, BYTES, EOS, replace(CFG, workers=1))
    own.settle(moody('awake'))
    yield own
    own.close()


def mutant(pool, module):
    judge = Shared(pool)
    judge.__class__ = type(
        'Mutant',
        (Shared,),
        {
            k: v
            for k, v in vars(module.RewardPool).items()
            if callable(v) and k not in ('__init__', '_recv')
        },
    )
    return judge


def test_duplicates(pool):
    duplicates(lambda: Shared(pool))


@pytest.mark.parametrize(
    'old, new',
    [
        (
            'if key in self.known: self.jobs[self.known[key]].append(sample); return',
            'if key in self.known: return',
        ),
        ('if key in self.known: self.jobs[self.known[key]].append(sample); return', 'pass'),
        ('key = sample.prompt_id, tuple(sample.response_ids)', 'key = sample.prompt_id'),
        ('            if i not in started: self.start(s)', '            pass'),
        (
            'for s in equals: record_verdict(s, verdict, again)',
            'for s in equals[1:]: record_verdict(s, verdict, again)',
        ),
    ],
)
def test_planted_faults(spoiled, old, new):
    module = planted(pool_module, old, new)
    with pytest.raises((AssertionError, KeyError, AttributeError)):
        duplicates(lambda: mutant(spoiled, module))
    duplicates(lambda: Shared(spoiled))  # it was the fault, not what others have left behind


# ---- one judge or the other


def leaves(text, answer):
    raise SystemExit(0)


def test_a_verifier_that_leaves_ends_no_run(monkeypatch):
    monkeypatch.setitem(verifiers, 'leaves', leaves)
    lone = sample('p', [65])
    SerialJudge([Prompt('p', 'odd', 'x', [65], '', 'leaves')], BYTES, EOS).settle([lone])
    assert lone.verdict.status == 'failed' and 'SystemExit(0)' in lone.verdict.evidence


def test_a_verdict_is_bounded_whatever_its_tests_are():
    "Twenty tests that sleep, each with a limit of its own, and a bound over all of them"
    tests = json.dumps(dict(tests=['assert f()'] * 20, wall_s=9.0))
    program = 'import time\ndef f(): time.sleep(5)'
    lone = sample('p', BYTES.encode(program).ids)
    cfg = RewardConfig(wall_s=1.0, unsafe=True)
    SerialJudge([Prompt('p', 'c', 'x', [65], tests, 'code')], BYTES, EOS, cfg).settle([lone])
    t = lone.timings
    assert lone.reward == 0 and t['reward_end'] - t['reward_start'] < 60  # not a hundred


def test_programs_need_isolation_or_unsafe(monkeypatch):
    "Of every judge, when it is made"
    prompts = [Prompt('c', 'c', 'x', [65], '["assert f(1)"]', 'code')]
    monkeypatch.setattr(isolated, 'best_isolation', lambda: ('', 'a container'))
    for cfg in (RewardConfig(), RewardConfig(workers=1)):
        with pytest.raises(
            ValueError, match=r'isolates no program \(a container\).*rewards.unsafe'
        ):
            make_judge(prompts, BYTES, EOS, cfg)
    for cfg in (RewardConfig(unsafe=True), RewardConfig(workers=1, unsafe=True)):
        make_judge(prompts, BYTES, EOS, cfg).close()
    make_judge([replace(prompts[0], verifier='maths')], BYTES, EOS, RewardConfig()).close()


def test_a_killed_worker_leaves_no_folder(tmp_path, monkeypatch):
    "Nor a process: the program under way goes with it"
    monkeypatch.setenv('TMPDIR', str(tmp_path))
    word = f'{random.SystemRandom().randrange(10**5, 10**6)}.25'
    tests = json.dumps(dict(tests=['assert f()'], wall_s=60))
    program = f"import os\nos.execvp('sleep', ['sleep', '{word}'])"
    prompts = [Prompt('c', 'c', 'x', [65], tests, 'code')]
    pool = RewardPool(prompts, BYTES, EOS, RewardConfig(workers=1, wall_s=60, unsafe=True))
    try:
        pool.start(sample('c', BYTES.encode(program).ids))
        assert pool.conn.poll(180)  # the broker imports
        pool._send()
        until(lambda: named(word))
        [worker] = [p for p in descendants(pool.broker.pid) if p in children_of(pool.broker.pid)]
        os.kill(worker, signal.SIGKILL)
        until(lambda: not named(word) or worker not in descendants(pool.broker.pid))
    finally:
        pool.close()
    until(lambda: not named(word) and not list(tmp_path.glob('compassrl-sandbox-*')))


def children_of(pid):
    return [int(p) for p in Path(f'/proc/{pid}/task/{pid}/children').read_text().split()]


def named(word):
    def has(p):
        try:
            return word.encode() in (p / 'cmdline').read_bytes().split(b'\0')
        except OSError:
            return False

    return [p.name for p in Path('/proc').glob('[0-9]*') if has(p)]


def test_serial_judge_waits_until_asked(prompts):
    judge, s = SerialJudge(prompts, BYTES, EOS), moody('aa', 'b')
    for x in s:
        judge.start(x)
    assert [x.verdict for x in s] == [None, None]
    judge.settle(s[:1])
    assert s[0].verdict and s[1].verdict is None
    before = dict(s[0].timings)
    judge.settle(s)
    assert s[0].timings == before and s[1].reward == 0.0
    assert judge_sample(moody('aa')[0], prompts[0], BYTES, EOS).verdict == s[0].verdict


@pytest.mark.parametrize('answer', ['reference', ''])
def test_genrm_beside_the_rollout(answer):
    """The verdicts of one call for all, in fewer and larger requests than one per sample,
    two at a time"""
    busy, most, sizes, gate = [], [0], [], threading.Event()

    def ask(questions):
        busy.append(1)
        most[0] = max(most[0], len(busy))
        sizes.append(len(questions))
        gate.wait(30)
        busy.pop()
        return [
            genrm.Reply('Verdict: ' + ('Better' if q.first < q.second else 'Worse'))
            for q in questions
        ]

    prompts = [Prompt(f'p{i}', 'g', 'x', [65], answer, 'none') for i in range(3)]
    samples = [sample(f'p{i % 3}', BYTES.encode(f't{i % 17}').ids, i) for i in range(60)]
    judge = GenRMJudge(prompts, BYTES, EOS, ask, batches=2)
    for n, s in enumerate(samples):
        judge.start(s)
        if answer and n < 2:  # both ask; whatever comes next waits, and goes together
            until(lambda: len(sizes) == n + 1)
    gate.set()
    judge.settle(samples)
    judge.settle(samples)
    judge.close()
    want, _ = genrm.judge_samples(
        [replace(s, verdict=None) for s in samples],
        {p.id: p for p in prompts},
        [BYTES.decode(s.response_ids) for s in samples],
        ask,
    )
    assert [s.verdict for s in samples] == want and all(
        s.reward == s.verdict.reward for s in samples
    )
    assert most[0] == (2 if answer else 1) and len(sizes[:-1]) <= (4 if answer else 1), sizes


def test_a_genrm_that_raises_is_heard():
    def broken(questions):
        raise MemoryError

    judge = GenRMJudge([Prompt('p', 'g', 'x', [65], 'ref', 'none')], BYTES, EOS, broken)
    s = sample('p', [65])
    judge.start(s)
    with pytest.raises(MemoryError):
        judge.settle([s])
    judge.close()


def test_a_later_question_keeps_nobody_waiting():
    "What is due has come; a question of a later step is still out"
    out = threading.Event()

    def ask(questions):
        if any('late' in q for q in questions):
            out.wait(30)
        return [
            genrm.Reply('Verdict: ' + ('Better' if q.second == 'ref' else 'Worse'))
            for q in questions
        ]

    judge = GenRMJudge([Prompt('p', 'g', 'x', [65], 'ref', 'genrm')], BYTES, EOS, ask, batches=2)
    late, due = (sample('p', BYTES.encode(t).ids, i) for i, t in enumerate(['late', 'due']))
    judge.start(late)
    until(lambda: not judge.waiting)
    judge.start(due)
    judge.settle([due])
    assert due.verdict.correct and due.reward == 1 and late.verdict is None
    out.set()
    judge.settle([late])
    assert late.verdict.correct
    judge.close()


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_each_prompt_has_its_judge():
    "By its verifier; whoever settles gets both kinds, and the model's counts"
    prompts = [
        Prompt('a', 'g', 'x', [65], 'ref', 'genrm'),
        Prompt('b', 'g', 'x', [65], 'hi', 'exact'),
    ]

    def ask(questions):
        return [
            genrm.Reply('Verdict: ' + ('Better' if q.second == 'ref' else 'Worse'), num_tokens=3)
            for q in questions
        ]

    with patch.object(genrm_judge, 'open_genrm', lambda cfg: ask):
        judge = make_judge(prompts, BYTES, EOS, RewardConfig(genrm=genrm.GenRMConfig('judge')))
    samples = [
        sample(id, BYTES.encode(t).ids, i)
        for i, (id, t) in enumerate([('a', 'hi'), ('b', 'hi'), ('a', 'ref'), ('b', 'no')])
    ]
    for x in samples:
        judge.start(x)
    judge.settle(samples)
    assert [x.reward for x in samples] == [1, 1, 0.5, 0]  # what equals its reference is a tie
    assert judge.measured() == dict(
        genrm_calls=2.0,
        genrm_tokens=6.0,
        genrm_failed_frac=0.0,
        genrm_tie_frac=0.5,
        genrm_disagree_frac=0.0,
    )
    assert judge.measured()['genrm_calls'] == 0
    judge.close()


def test_a_model_that_is_not_named_is_missed():
    prompts = [Prompt('a', 'g', 'x', [65], 'ref', 'genrm')]
    with pytest.raises(ValueError, match='name the model'):
        make_judge(prompts, BYTES, EOS, RewardConfig())
    lone = sample('a', [65])
    SerialJudge(prompts, BYTES, EOS).settle([lone])
    assert lone.verdict.status == 'failed' and 'rewards.genrm.model' in lone.verdict.evidence


def test_gantt_has_a_row_per_replica():
    import matplotlib

    matplotlib.use('Agg')
    timings = [
        dict(
            rollout_start=float(i // 2),
            rollout_end=i // 2 + 1.5,
            replica=float(i % 2),
            reward_start=3.0,
            reward_end=4.0,
            detokenise=0.1,
            worker=i + 9,
        )
        for i in range(4)
    ]
    timings += [
        dict(
            rollout_start=0.0,
            rollout_end=1.0,
            reward_start=2.0,
            reward_end=3.0,
            detokenise=0.0,
            genrm=1.0,
        )
    ]
    ax = plot_gantt(spans_of(timings, dict(time_update_at=4.0, time_update_s=1.0)))
    assert [t.get_text() for t in ax.get_yticklabels()] == [
        'rollout',
        'replica 0',
        'replica 1',
        'worker 9',
        'worker 10',
        'worker 11',
        'worker 12',
        'genrm',
        'trainer',
    ]
    bars = [b for b in ax.patches if b.get_facecolor()[:3] == matplotlib.colors.to_rgb('#0f766e')]
    boxes = [
        (b.get_x(), b.get_x() + b.get_width(), b.get_y(), b.get_y() + b.get_height()) for b in bars
    ]
    assert len(boxes) == 5 and not any(
        a < d - 1e-9 and c < b - 1e-9 and e < h - 1e-9 and g < f - 1e-9
        for i, (a, b, e, f) in enumerate(boxes)
        for c, d, g, h in boxes[:i]
    ), 'no two bars cover each other'


def test_timings_and_gantt(pool):
    import matplotlib

    matplotlib.use('Agg')
    s = moody('slow 123', 'slow 77')
    for x in s:
        x.timings = dict(rollout_start=time.perf_counter(), rollout_end=time.perf_counter() + 0.001)
        pool.start(x)
    pool.settle(s)
    for x in s:
        t = x.timings
        assert t['rollout_start'] < t['reward_start'] <= t['reward_start'] + t['detokenise'] <= t[
            'reward_end'
        ] < time.perf_counter() and t['worker'] in (1, 2, 3, 4)
    now = time.perf_counter()
    spans = spans_of(
        [json.loads(json.dumps(x.timings)) for x in s],
        dict(time_step_at=now, time_step_s=1.0, time_update_at=now, time_update_s=0.5, loss=0.0),
    )
    assert Counter(x.phase for x in spans) == dict(rollout=2, detokenise=2, reward=2, update=1)
    assert all(x.end >= x.start for x in spans) and {x.row for x in spans} >= {'rollout', 'trainer'}
    ax = plot_gantt(spans)
    assert [t.get_text() for t in ax.get_yticklabels()][0] == 'rollout' and len(ax.patches) >= len(
        spans
    )
