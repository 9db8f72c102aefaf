"The loop: order, restarts, engines and judges do not change what it computes"
import inspect
import itertools
import math
import random
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from compassrl import trainer
from compassrl.advantages import AdvantageConfig
from compassrl.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from compassrl.losses import LossConfig
from compassrl.policy import Policy, PolicyConfig
from compassrl.records import Prompt, Sample, Verdict
from compassrl.rollout import RolloutConfig, TorchRollout
from compassrl.tasks import EOS_ID, DataConfig, build_tokenizer, encode, verifiers
from compassrl.train_engine import OptimConfig, TorchTrain
from compassrl.trainer import TrainConfig, assemble, fit, judge_sample, prompts_of_step, requests_of, rollout_gap

torch.set_num_threads(1)
TOKENIZER = build_tokenizer()
SHAPE = PolicyConfig(hidden_size=32, head_dim=8, moe_intermediate_size=32, max_position_embeddings=32)
CFG = TrainConfig(steps=4, prompts_per_step=4, group_size=4, policy=SHAPE, data=DataConfig(max_prompt_tokens=16), rollout=RolloutConfig(max_tokens=6),
    optim=OptimConfig(lr=1e-3, num_mini_batches=2, warmup_steps=2))


def even(text, answer):
    "An untrained policy is right about half of the time"
    right = bool(text) and ord(text[0]) % 2 == 0
    return Verdict(float(right), right, 'ok' if right else 'wrong', text[:1])


def crash(text, answer): raise RuntimeError('out of order')


def sometimes(text, answer): return crash(text, answer) if ord(text[-1:] or 'a') % 3 == 0 else even(text, answer)


def slow(text, answer): return replace(even(text, answer), reward=0., status='timeout')


@pytest.fixture(autouse=True)
def judges(monkeypatch):
    for fn in (even, crash, sometimes, slow): monkeypatch.setitem(verifiers, fn.__name__, fn)


def questions(n, verifier='even'):
    return [Prompt(f'p{i}', 'test', f'{i}+1=', encode(TOKENIZER, f'{i}+1='), '', verifier) for i in range(n)]


PROMPTS = questions(10)


class Log(list):
    "Hooks that keep everything"
    def on_step(self, step, metrics, samples, batch): self.append((step, metrics, samples, batch))
    def __getattr__(self, key): return [m[key] for _, m, _, _ in self]


def engines(cfg=CFG):
    engine = TorchTrain(Policy(SHAPE, seed=1), cfg.optim, cfg.rollout.temperature, cfg.router_replay)
    rollout = TorchRollout(SHAPE, 32)
    rollout.load_weights(engine.weights(), 0)
    return rollout, engine


def run(cfg=CFG, prompts=PROMPTS, start=0, state=None, wrap=lambda r: r, reference=None):
    rollout, engine = engines(cfg)
    if state is not None:
        engine.load_state_dict(state)
        rollout.load_weights(engine.weights(), start)
    log = Log()
    fit(cfg, prompts, wrap(rollout), engine, TOKENIZER, log, EOS_ID, start, reference)
    return engine, log


def same(a, b): return all(torch.equal(x, y) for (_, x), (_, y) in zip(a.weights(), b.weights(), strict=True))


def no_clock(metrics): return {k: v for k, v in metrics.items() if not k.startswith('time_')}


@pytest.fixture(scope='module')
def whole():
    verifiers['even'] = even
    try: return run()
    finally: del verifiers['even']


# ---- the loop

def test_it_is_short_and_knows_only_the_interfaces():
    assert len(inspect.getsource(fit).splitlines()) < 100
    assert 'Torch' not in inspect.getsource(trainer), 'no engine by name'

    class Spy:
        def __init__(self, inner, names, calls): self.inner, self.names, self.calls = inner, names, calls
        def __getattr__(self, name):
            assert name in self.names, f'{name} is not part of the interface'
            def call(*args):
                self.calls.append((name, args[1:]))
                return getattr(self.inner, name)(*args)
            return call

    calls, log = [], Log()
    rollout, engine = engines()
    fit(CFG, PROMPTS, Spy(rollout, ('generate', 'load_weights'), calls), Spy(engine, ('log_probs', 'update', 'weights'), calls), TOKENIZER, log, EOS_ID)
    assert [n for n, _ in calls] == ['generate', 'log_probs', 'update', 'weights', 'load_weights']*4
    assert [a for n, a in calls if n == 'load_weights'] == [(1,), (2,), (3,), (4,)]
    assert [{s.weight_version for s in samples} for _, _, samples, _ in log] == [{0}, {1}, {2}, {3}]


def test_what_the_hooks_get(whole):
    _, log = whole
    assert [step for step, *_ in log] == [1, 2, 3, 4] == log.step
    for step, m, samples, batch in log:
        requests = requests_of(prompts_of_step(PROMPTS, step-1, 4, 0), step-1, CFG, EOS_ID)
        assert [(s.prompt_id, s.index) for s in samples] == [(r.prompt_id, r.index) for r in requests], 'in the order of the requests'
        for i, s in enumerate(samples):
            ids = batch.token_ids[i][batch.response_mask[i]].tolist()
            assert ids == s.response_ids and batch.rewards[i] == s.reward == float(s.verdict.correct)
        assert all(math.isfinite(v) for v in m.values())
        phases = sum(m[f'time_{p}_s'] for p in ('rollout', 'reward', 'log_probs', 'update', 'sync'))
        assert 0 < phases <= m['time_step_s'] and m['time_rollout_s'] > 0
        assert m['tokens'] == batch.response_mask.sum() and m['reward_mean'] == pytest.approx(m['correct_frac'])
        assert m['skipped_frac'] == 0


def test_both_engines_see_the_same_policy(whole):
    assert max(whole[1].rollout_train_gap_max) < 1e-5
    _, warm = run(replace(CFG, rollout=RolloutConfig(max_tokens=6, temperature=.7)))
    assert max(warm.rollout_train_gap_max) < 1e-5, 'with a temperature, too'


def test_the_gap_counts_response_tokens_only(whole):
    batch = whole[1][0][3]
    moved = replace(batch, old_log_probs=batch.rollout_log_probs.clone(), entropy=batch.response_mask.float()*2)
    moved.old_log_probs[~batch.response_mask] = 9.
    assert rollout_gap(moved) == dict(rollout_train_gap=0., rollout_train_gap_max=0., entropy=2.)
    i, j = batch.response_mask.nonzero()[0].tolist()
    moved.old_log_probs[i, j] -= .5
    m = rollout_gap(moved)
    assert m['rollout_train_gap_max'] == pytest.approx(.5) and m['rollout_train_gap'] == pytest.approx(.5/int(batch.response_mask.sum()))


def test_judging_is_not_counted_as_rollout(monkeypatch):
    def thoughtful(text, answer): time.sleep(.004); return even(text, answer)
    monkeypatch.setitem(verifiers, 'thoughtful', thoughtful)
    _, log = run(replace(CFG, steps=1, prompts_per_step=8, group_size=8), questions(10, 'thoughtful'))
    assert log.time_reward_s[0] > 64*.004 and log.time_rollout_s[0] < log.time_reward_s[0]
    assert log.time_rollout_s[0]+log.time_reward_s[0] < log.time_step_s[0]


def test_first_loss_is_zero_and_its_gradient_is_not():
    _, log = run(replace(CFG, optim=OptimConfig(lr=1e-3)))
    assert all(abs(v) < 1e-6 for v in log.loss) and min(log.grad_norm) > 1e-2 and max(log.clip_frac) == 0


def test_advantages_against_a_loop_over_dictionaries(whole):
    for _, m, samples, batch in whole[1]:
        groups = {}
        for s in samples: groups.setdefault(s.prompt_id, []).append(s.reward)
        for i, s in enumerate(samples):
            r = groups[s.prompt_id]
            mean = sum(r)/len(r)
            std = math.sqrt(sum((x-mean)**2 for x in r)/(len(r)-1))
            want = (s.reward-mean)/(std+1e-6) if std else 0.
            row = batch.advantages[i]
            assert row[batch.response_mask[i]].tolist() == pytest.approx([want]*len(s.response_ids), abs=1e-5)
            assert not row[~batch.response_mask[i]].any()
        assert m['zero_variance_frac'] == pytest.approx(sum(len(set(r)) == 1 for r in groups.values())/len(groups))


# ---- order and restarts

class Reordered:
    "Yields in an order of its own, and as late as it likes"
    def __init__(self, rollout, order): self.rollout, self.order, self.load_weights = rollout, order, rollout.load_weights
    def generate(self, requests):
        samples = list(self.rollout.generate(requests))
        self.order(samples)
        yield from samples


@pytest.mark.parametrize('order', [list.reverse, random.Random(0).shuffle, random.Random(1).shuffle, lambda x: x.sort(key=lambda s: s.response_ids)])
def test_what_finishes_first_does_not_matter(whole, order):
    engine, log = run(wrap=lambda r: Reordered(r, order))
    assert same(engine, whole[0])
    assert [no_clock(m) for _, m, _, _ in log] == [no_clock(m) for _, m, _, _ in whole[1]]


@pytest.mark.parametrize('done', [1, 2, 3])
def test_resume_is_exact(whole, tmp_path, done):
    "Through a checkpoint on the disk; the second half starts from another policy and another random state"
    first, _ = run(replace(CFG, steps=done))
    save_checkpoint(tmp_path, done, first.state_dict())
    torch.manual_seed(done)
    step, state = load_checkpoint(latest_checkpoint(tmp_path))
    engine, log = run(start=step, state=state)
    assert same(engine, whole[0])
    assert [no_clock(m) for _, m, _, _ in log] == [no_clock(m) for _, m, _, _ in whole[1][done:]]
    a, b = (e.optimizer.state_dict()['state'] for e in (engine, whole[0]))
    assert all(torch.equal(a[i][k], b[i][k]) for i in a for k in a[i])


def test_no_hidden_random_state(whole):
    "The loop draws from no global generator"
    rollout, engine = engines()
    torch.manual_seed(99); random.seed(99)
    before = torch.get_rng_state(), random.getstate()
    fit(CFG, PROMPTS, rollout, engine, TOKENIZER, Log(), EOS_ID)
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert same(engine, whole[0])


def test_another_seed_is_another_run(whole):
    assert not same(run(replace(CFG, seed=1))[0], whole[0])


def test_hooks_that_raise_leave_engines_that_work(whole):
    class Stop(Exception): pass
    class Stopping(Log):
        def on_step(self, step, *args):
            if step == 2: raise Stop
    rollout, engine = engines()
    with pytest.raises(Stop): fit(CFG, PROMPTS, rollout, engine, TOKENIZER, Stopping(), EOS_ID)
    fit(CFG, PROMPTS, rollout, engine, TOKENIZER, Log(), EOS_ID, start=2)
    assert same(engine, whole[0])


def test_a_crash_in_the_middle_of_a_rollout_leaves_an_engine_that_works(whole, monkeypatch):
    def broken(*args): raise MemoryError
    rollout, engine = engines()
    with monkeypatch.context() as m:
        m.setattr(trainer, 'judge_sample', broken)
        with pytest.raises(MemoryError): fit(CFG, PROMPTS, rollout, engine, TOKENIZER, Log(), EOS_ID)
    fit(CFG, PROMPTS, rollout, engine, TOKENIZER, Log(), EOS_ID)
    assert same(engine, whole[0])


# ---- replay

def test_replay_changes_nothing_in_fp32_with_one_update_per_batch():
    one = replace(CFG, optim=OptimConfig(lr=1e-3))
    (a, on), (b, off) = run(one), run(replace(one, router_replay=False))
    for key in ('loss', 'grad_norm', 'entropy', 'reward_mean', 'rollout_train_gap'): assert getattr(on, key) == pytest.approx(getattr(off, key), abs=1e-5), key
    assert all(torch.allclose(x, y, atol=1e-5) for (_, x), (_, y) in zip(a.weights(), b.weights()))


def test_an_engine_without_routes_works():
    rollout, engine = engines()
    rollout.return_routes = False
    log = Log()
    fit(CFG, PROMPTS, rollout, engine, TOKENIZER, log, EOS_ID)
    assert log[0][3].routed_experts is None and max(log.rollout_train_gap_max) < 1e-5


# ---- which prompts

sizes = dict(n=st.integers(1, 40), num=st.integers(1, 50), seed=st.integers(0, 5))


@settings(max_examples=100, deadline=None)
@given(**sizes, steps=st.integers(1, 12))
def test_every_prompt_once_per_epoch(n, num, seed, steps):
    prompts = questions(n)
    stream = [p.id for s in range(steps) for p in prompts_of_step(prompts, s, num, seed)]
    assert len(stream) == num*steps
    epochs = [stream[i:i+n] for i in range(0, len(stream), n)]
    for e in epochs: assert len(set(e)) == len(e)
    if n > 12 and len(epochs) > 2: assert epochs[0] != epochs[1], 'each epoch has an order of its own'


@settings(max_examples=60, deadline=None)
@given(**sizes, order=st.permutations(range(6)))
def test_prompts_are_a_pure_function_of_the_step(n, num, seed, order):
    prompts = questions(n)
    first = {s: prompts_of_step(prompts, s, num, seed) for s in range(6)}
    torch.manual_seed(seed+1); random.seed(seed)
    assert {s: prompts_of_step(prompts, s, num, seed) for s in order} == first
    one_by_one = [prompts_of_step(prompts, s, 1, seed)[0] for s in range(6*num)] if num < 8 else None
    if one_by_one: assert one_by_one == [p for s in range(6) for p in first[s]], 'nor of how the stream is cut into steps'


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 6), num=st.integers(1, 12), G=st.integers(2, 5), step=st.integers(0, 50))
def test_requests(n, num, G, step):
    cfg = replace(CFG, group_size=G)
    prompts = prompts_of_step(questions(n), step, num, 0)
    requests = requests_of(prompts, step, cfg, EOS_ID)
    assert [r.prompt_id for r in requests] == [p.id for p in prompts for _ in range(G)], 'side by side'
    assert len({(r.prompt_id, r.index) for r in requests}) == len({r.seed for r in requests}) == num*G
    for id in {p.id for p in prompts}:
        assert [r.index for r in requests if r.prompt_id == id] == list(range(G*sum(p.id == id for p in prompts)))
    assert all(r.params.stop_ids == (EOS_ID,) and r.params.max_tokens == 6 for r in requests)


def test_seeds_differ_between_steps_and_runs():
    seeds = [r.seed for s, run_seed in itertools.product(range(20), range(3)) for r in requests_of(PROMPTS[:4], s, replace(CFG, seed=run_seed), EOS_ID)]
    assert len(set(seeds)) == len(seeds) == 20*3*16


def test_runs_with_other_seeds_see_other_orders():
    assert len({tuple(p.id for p in prompts_of_step(PROMPTS, 0, 10, seed)) for seed in range(8)}) == 8


def test_more_prompts_per_step_than_there_are():
    "A prompt that comes twice has one group of twice the size"
    _, log = run(replace(CFG, prompts_per_step=7), questions(3))
    for _, _, samples, batch in log:
        assert batch.group.bincount().tolist() in ([12, 8, 8], [8, 12, 8], [8, 8, 12])
        assert len({(s.prompt_id, s.index) for s in samples}) == 28


# ---- nothing to learn, or no verdict

def test_a_silent_step_is_skipped_and_counted():
    engine, log = run(prompts=[replace(p, verifier='exact', answer='never') for p in PROMPTS])
    assert log.skipped_frac == [1.]*4 == log.zero_variance_frac and log.reward_mean == [0.]*4
    assert 'loss' not in log[0][1] and engine.num_steps == 0 and same(engine, engines()[1])


def test_a_run_goes_on_after_a_silent_step():
    "Silent first, then not: the weights that sample are the ones that learn"
    mixed = [replace(p, verifier='exact', answer='never') if p in prompts_of_step(PROMPTS, 0, 4, 0) else p for p in PROMPTS]
    _, log = run(prompts=mixed)
    assert log.skipped_frac[0] == 1 and 0. in log.skipped_frac[1:]
    assert max(log.rollout_train_gap_max) < 1e-5


@pytest.mark.parametrize('verifier', ['crash', 'slow', 'no such verifier'])
def test_without_any_verdict_nothing_is_learned(verifier):
    engine, log = run(prompts=questions(10, verifier))
    assert log.failed_frac == [1.]*4 == log.skipped_frac and engine.num_steps == 0


def test_a_group_with_one_verdict_is_silent():
    s = [Sample('p0', i, [5], encode(TOKENIZER, t)+[EOS_ID], torch.zeros(2), None, None, 'stop', 0) for i, t in enumerate('bca')]
    for x in s: judge_sample(x, PROMPTS[0], TOKENIZER, EOS_ID)
    for x in s[1:]: x.verdict = replace(x.verdict, status='timeout')
    batch, m = assemble(s, requests_of(PROMPTS[:1], 0, replace(CFG, group_size=3), EOS_ID), CFG)
    assert m['zero_variance_frac'] == 1 and m['failed_frac'] == pytest.approx(2/3) and not batch.advantages.any()


def test_failed_samples_have_advantage_zero_and_do_not_touch_their_siblings():
    _, log = run(replace(CFG, steps=2, group_size=8, prompts_per_step=8), questions(10, 'sometimes'))
    mixed = 0
    for _, m, samples, batch in log:
        failed = torch.tensor([s.verdict.status == 'failed' for s in samples])
        assert 0 < m['failed_frac'] == pytest.approx(failed.float().mean().item())
        assert not batch.advantages[failed].any()
        for g in batch.group.unique():
            rows = (batch.group == g) & ~failed
            r = batch.rewards[rows]
            if len(r) < 2 or r.max() == r.min(): continue
            mixed += 1
            assert torch.allclose(batch.advantages[rows].sum(1)/batch.response_mask[rows].sum(1), (r-r.mean())/(r.std()+1e-6), atol=1e-5)
    assert mixed and 'RuntimeError: out of order' in {s.verdict.evidence for _, _, samples, _ in log for s in samples}


@pytest.mark.parametrize('harm', ['lose', 'repeat', 'swap', 'foreign'])
def test_a_rollout_engine_may_not_lose_or_repeat(harm):
    def hurt(samples):
        if harm == 'lose': samples.pop()
        if harm == 'repeat': samples.append(samples[0])
        if harm == 'swap': samples[-1] = samples[0]      # the right number of samples, and one twice
        if harm == 'foreign': samples[-1].index = 77
    with pytest.raises(AssertionError, match='lost, repeated or not asked for'): run(wrap=lambda r: Reordered(r, hurt))


# ---- KL

def test_kl_needs_a_reference():
    with pytest.raises(ValueError, match='kl_coef=0.1.*reference'): run(replace(CFG, loss=LossConfig(kl_coef=.1)))


@pytest.mark.parametrize('kind', ['k1', 'k2', 'k3'])
def test_kl_with_a_reference(kind):
    cfg = replace(CFG, loss=LossConfig(kl_coef=.1, kl_estimator=kind), optim=OptimConfig(lr=1e-3))
    reference = engines()[1]
    engine, log = run(cfg, reference=reference)
    assert abs(log.kl[0]) < 1e-5 and log[0][3].ref_log_probs is not None and min(log.time_ref_log_probs_s) > 0
    assert torch.allclose(log[0][3].ref_log_probs, log[0][3].old_log_probs, atol=1e-5), 'the reference is the start'
    assert abs(log.kl[-1]) > 1e-5 and same(reference, engines()[1]), 'and it stays there'


def test_silent_groups_still_learn_through_the_kl():
    "From a policy that has moved, back towards the reference"
    cfg = replace(CFG, steps=12, loss=LossConfig(kl_coef=1., kl_estimator='k2'), optim=OptimConfig(lr=1e-3))
    reference, moved = engines()[1], TorchTrain(Policy(SHAPE, seed=1), cfg.optim)
    gen = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in moved.policy.parameters(): p += 2*p.std().nan_to_num()*torch.randn(p.shape, generator=gen)
    silent = [replace(p, verifier='exact', answer='never') for p in PROMPTS]
    rollout, log = TorchRollout(SHAPE, 32), Log()
    rollout.load_weights(moved.weights(), 0)
    fit(cfg, silent, rollout, moved, TOKENIZER, log, EOS_ID, 0, reference)
    assert log.skipped_frac == [0.]*12
    assert log.kl[0] > .01 and sum(log.kl[-3:]) < .7*sum(log.kl[:3]), log.kl


# ---- an oracle: engines whose policy is a table

class TableRollout:
    def load_weights(self, weights, version): self.log_probs, self.version = dict(weights)['theta'].log_softmax(1), version
    def generate(self, requests):
        for r in requests:
            row = self.log_probs[r.prompt_ids[0]]
            d = int(torch.multinomial(row.exp(), 1, generator=torch.Generator().manual_seed(r.seed)))
            yield Sample(r.prompt_id, r.index, list(r.prompt_ids), [DIGITS[d]], row[d:d+1].float(), None, None, 'stop', self.version)


class TableTrain:
    def __init__(self, num, lr): self.theta, self.lr = torch.zeros(num, 10, dtype=torch.double, requires_grad=True), lr
    def weights(self): yield 'theta', self.theta.detach().clone()
    def rows(self, batch):
        table = self.theta[batch.token_ids[:, 0]].log_softmax(1)
        chosen = table.gather(1, batch.token_ids[:, 1:]-DIGITS[0])
        return torch.cat([0*chosen, chosen], 1)
    def log_probs(self, batch): return self.rows(batch).detach(), torch.zeros_like(batch.rollout_log_probs)
    def update(self, batch, loss):
        value, metrics = loss(self.rows(batch), batch, len(batch), len(batch))
        self.theta.data -= self.lr*torch.autograd.grad(value, self.theta)[0]
        return {k: float(v) for k, v in metrics.items()}


DIGITS = encode(TOKENIZER, '0123456789')
QUIZ = [Prompt(f'q{i}', 'quiz', f'q{i}', [i], str(i), 'exact') for i in range(6)]


def table_run(steps, lr=3., **kw):
    cfg = TrainConfig(steps=steps, prompts_per_step=6, group_size=8, **kw)
    rollout, engine, log = TableRollout(), TableTrain(6, lr), Log()
    rollout.load_weights(engine.weights(), 0)
    fit(cfg, QUIZ, rollout, engine, TOKENIZER, log, EOS_ID)
    return engine, log


@pytest.mark.parametrize('norm_std', [True, False])
def test_one_step_against_the_formula(norm_std):
    "theta + lr mean_i A_i (onehot - p), written out"
    engine, log = table_run(1, lr=.5, advantages=AdvantageConfig(norm_std=norm_std))
    want, rewards = torch.zeros(6, 10, dtype=torch.double), {}
    for s in log[0][2]: rewards.setdefault(s.prompt_id, []).append(s.reward)
    for s in log[0][2]:
        r = torch.tensor(rewards[s.prompt_id], dtype=torch.double)
        a = (s.reward-r.mean())/(r.std()+1e-6 if norm_std else 1)
        want[s.prompt_ids[0]] += .5*a*(torch.nn.functional.one_hot(torch.tensor(s.response_ids[0]-DIGITS[0]), 10)-.1)/48
    assert torch.allclose(engine.theta.detach(), want, atol=1e-6) and want.any()


def test_it_learns():
    engine, log = table_run(60)
    assert engine.theta.detach().softmax(1)[range(6), range(6)].mean() > .85
    assert sum(log.reward_mean[:5])/5 < .3 < .8 < sum(log.reward_mean[-5:])/5


# ---- config

@pytest.mark.parametrize('kw, words', [
    (dict(group_size=1), ['group_size=1', 'at least 2']), (dict(group_size=0), ['group_size=0']),
    (dict(prompts_per_step=0), ['prompts_per_step=0', 'at least 1']), (dict(eval_k=0), ['eval_k=0']),
    (dict(keep_checkpoints=0), ['keep_checkpoints=0']), (dict(num_threads=0), ['num_threads=0']),
    (dict(steps=-1), ['steps=-1', '0 or more']), (dict(eval_every=-1), ['eval_every=-1']), (dict(trace_every=-1), ['trace_every=-1']),
    (dict(save_every=-1), ['save_every=-1']), (dict(seed=-1), ['seed=-1']),
    (dict(device='tpu'), ["device='tpu'", "'cpu' or 'cuda'"]),
    (dict(rollout=RolloutConfig(temperature=0)), ['temperature=0', 'more than 0']),
    (dict(policy=PolicyConfig(max_position_embeddings=127)), ['= 128', 'max_position_embeddings=127', 'shorten']),
])
def test_bad_configs(kw, words):
    with pytest.raises(ValueError) as e: TrainConfig(**kw)
    assert '\n' not in str(e.value)
    for w in words: assert w in str(e.value)


def test_edges_of_good_configs():
    TrainConfig(group_size=2, steps=0, eval_every=0, trace_every=0, save_every=0)
    TrainConfig(policy=PolicyConfig(max_position_embeddings=128))
    TrainConfig(policy=PolicyConfig(max_position_embeddings=8), init_from='a folder whose own config counts')
    engine, log = run(replace(CFG, steps=0))
    assert not log and engine.num_steps == 0
    with pytest.raises(Exception, match='frozen|cannot assign'): CFG.steps = 3


def test_judging_alone():
    s = Sample('p0', 0, [5], encode(TOKENIZER, 'bad')+[EOS_ID], torch.zeros(4), None, None, 'stop', 0)
    assert judge_sample(s, PROMPTS[0], TOKENIZER, EOS_ID) is s
    assert s.reward == 1 and s.verdict.evidence == 'b' and s.timings['reward'] >= 0
    other = replace(s, index=1, response_ids=encode(TOKENIZER, 'abc')+[EOS_ID], timings={})
    judge_sample(other, PROMPTS[0], TOKENIZER, EOS_ID)
    requests = requests_of(PROMPTS[:1], 0, replace(CFG, group_size=2), EOS_ID)
    batch, m = assemble([other, s], requests, CFG)
    assert batch.rewards.tolist() == [1., 0.] and batch.advantages.sum(1).tolist() == pytest.approx([4*.7071, -4*.7071], abs=1e-3)
    assert m['correct_frac'] == .5 and m['truncated_frac'] == 0 and m['response_tokens_mean'] == 4
