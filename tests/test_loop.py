"The loop: order, restarts, engines and judges do not change what it computes"

import inspect
import itertools
import math
import random
import time
from dataclasses import replace

import pytest
import torch

from compassrl import loop as trainer
from compassrl.algo.advantages import AdvantageConfig
from compassrl.algo.losses import LossConfig
from compassrl.algo.losses.espo import EspoConfig
from compassrl.algo.zero_variance import ZeroVarianceConfig
from compassrl.config import TrainConfig
from compassrl.data.prompts import DataConfig
from compassrl.data.selection import prompts_of_step
from compassrl.data.tasks import verifiers
from compassrl.data.tokenizer import EOS_ID, build_tokenizer, encode
from compassrl.judges import serial
from compassrl.judges.reward_pool import RewardPool
from compassrl.judges.serial import RewardConfig, SerialJudge
from compassrl.loop import fit
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.records import Prompt, RolloutEngine, Sample, Verdict
from compassrl.rollout.torch_rollout import RolloutConfig, TorchRollout
from compassrl.train.checkpoint import load_checkpoint, save_checkpoint
from compassrl.train.guards import GuardConfig, RunFailed
from compassrl.train.torch_train import OptimConfig, TorchTrain
from course.checkpoints import latest_checkpoint
from tests.support import misbehaving_verifiers as odd_verifiers

torch.set_num_threads(1)
TOKENIZER = build_tokenizer()
SHAPE = PolicyConfig(
    hidden_size=32, head_dim=8, moe_intermediate_size=32, max_position_embeddings=32
)
NOTHING = ZeroVarianceConfig('uniform', length_weight=0, repetition_weight=0, zvp_alpha=0)
RECIPE = TrainConfig(
    steps=4,
    prompts_per_step=4,
    group_size=4,
    policy=SHAPE,
    data=DataConfig(max_prompt_tokens=16),
    rollout=RolloutConfig(max_tokens=6),
    optim=OptimConfig(lr=1e-3, num_mini_batches=2, warmup_steps=2),
)
CFG = replace(RECIPE, loss=LossConfig('grpo'), zero_variance=NOTHING)  # simple enough for oracles
UNGUARDED = GuardConfig(max_lost_steps=0, max_failed_frac=1.0)


def even(text, answer):
    "An untrained policy is right about half of the time"
    right = bool(text) and ord(text[0]) % 2 == 0
    return Verdict(float(right), right, 'ok' if right else 'wrong', text[:1])


def crash(text, answer):
    raise RuntimeError('out of order')


def sometimes(text, answer):
    return crash(text, answer) if ord(text[-1:] or 'a') % 3 == 0 else even(text, answer)


def slow(text, answer):
    return replace(even(text, answer), reward=0.0, status='timeout')


@pytest.fixture(autouse=True)
def judges(monkeypatch):
    for fn in (even, crash, sometimes, slow):
        monkeypatch.setitem(verifiers, fn.__name__, fn)


def questions(n, verifier='even'):
    return [
        Prompt(f'p{i}', 'test', f'{i}+1=', encode(TOKENIZER, f'{i}+1='), '', verifier)
        for i in range(n)
    ]


PROMPTS = questions(10)


class Log(list):
    "Hooks that keep everything"

    def on_step(self, step, metrics, samples, batch):
        self.append((step, metrics, samples, batch))

    def __getattr__(self, key):
        return [m[key] for _, m, _, _ in self]


def engines(cfg=CFG):
    engine = TorchTrain(
        Policy(SHAPE, seed=1), cfg.optim, cfg.rollout.temperature, cfg.router_replay
    )
    rollout = TorchRollout(SHAPE, 32)
    rollout.load_weights(engine.weights(), 0)
    return rollout, engine


def run(
    cfg=CFG, prompts=PROMPTS, start=0, state=None, wrap=lambda r: r, reference=None, judge=None
):
    rollout, engine = engines(cfg)
    if state is not None:
        engine.load_state_dict(state)
        rollout.load_weights(engine.weights(), start)
    log = Log()
    fit(cfg, prompts, wrap(rollout), engine, TOKENIZER, log, EOS_ID, start, reference, judge)
    return engine, log


def same(a, b):
    return all(torch.equal(x, y) for (_, x), (_, y) in zip(a.weights(), b.weights(), strict=True))


def no_clock(metrics):
    return {k: v for k, v in metrics.items() if not k.startswith('time_')}


def test_learning_rate_of_a_run_falls_with_its_steps():
    optim = OptimConfig(lr=0.01, warmup_steps=3, final_lr_frac=0.5, num_mini_batches=2)
    _, log = run(replace(CFG, steps=3, optim=optim))
    learns = [not m['skipped_frac'] for _, m, _, _ in log]
    warm, left = (1 / 4, 3 / 4, 1), (1, 5 / 6, 4 / 6)  # after 0, 2 and 4 of 6 updates
    expected = [0.01 * w * x for w, x in zip(warm, left)]
    assert sum(learns) >= 2, 'steps that learn'
    assert log.lr == pytest.approx([r * on for r, on in zip(expected, learns)])


@pytest.fixture(scope='module')
def whole():
    verifiers['even'] = even
    try:
        return run()
    finally:
        del verifiers['even']


# ---- the loop


def test_it_is_short_and_knows_only_the_interfaces():
    assert len(inspect.getsource(fit).splitlines()) < 100
    assert 'Torch' not in inspect.getsource(trainer), 'no engine by name'

    class Spy:
        def __init__(self, inner, names, calls):
            self.inner, self.names, self.calls = inner, names, calls

        def __getattr__(self, name):
            assert name in self.names, f'{name} is not part of the interface'

            def call(*args):
                self.calls.append((name, args[1:]))
                return getattr(self.inner, name)(*args)

            return call

    calls, log = [], Log()
    rollout, engine = engines()
    fit(
        CFG,
        PROMPTS,
        Spy(rollout, ('generate', 'load_weights'), calls),
        Spy(engine, ('score', 'update', 'weights'), calls),
        TOKENIZER,
        log,
        EOS_ID,
    )
    assert [n for n, _ in calls] == ['generate', 'score', 'update', 'weights', 'load_weights'] * 4
    assert [a for n, a in calls if n == 'load_weights'] == [(1,), (2,), (3,), (4,)]
    assert [{s.weight_version for s in samples} for _, _, samples, _ in log] == [{0}, {1}, {2}, {3}]


def test_what_the_hooks_get(whole):
    _, log = whole
    assert [step for step, *_ in log] == [1, 2, 3, 4] == log.step
    for step, m, samples, batch in log:
        prompts = prompts_of_step(PROMPTS, step - 1, 4, 0)
        assert [(s.prompt_id, s.index) for s in samples] == [
            (p.id, i) for p in prompts for i in range(4)
        ], 'in the order of the requests'
        for i, s in enumerate(samples):
            ids = batch.token_ids[i][batch.response_mask[i]].tolist()
            assert ids == s.response_ids and batch.rewards[i] == s.reward == float(
                s.verdict.correct
            )
        assert all(math.isfinite(v) for v in m.values())
        phases = sum(m[f'time_{p}_s'] for p in ('rollout', 'reward', 'log_probs', 'update', 'sync'))
        assert 0 < phases <= m['time_step_s'] and m['time_rollout_s'] > 0
        assert m['tokens'] == batch.response_mask.sum() and m['reward_mean'] == pytest.approx(
            m['correct_frac']
        )
        assert m['skipped_frac'] == 0
        assert m['entropy'] == pytest.approx(batch.entropy[batch.response_mask].mean().item())
        assert not batch.response_mask.all(), 'a mean over columns would be another'
        moved = (batch.log_probs - batch.old_log_probs).abs().amax(1)
        assert moved[:8].max() < 1e-5 < moved[8:].max(), 'what each of two mini-batches saw'
        assert m['sync_bytes'] == sum(t.nbytes for _, t in whole[0].weights())


def test_both_engines_see_the_same_policy(whole):
    assert max(whole[1].rollout_train_gap_max) < 1e-5
    _, warm = run(replace(CFG, rollout=RolloutConfig(max_tokens=6, temperature=0.7)))
    assert max(warm.rollout_train_gap_max) < 1e-5, 'with a temperature, too'


def test_judging_is_not_counted_as_rollout(monkeypatch):
    def thoughtful(text, answer):
        time.sleep(0.004)
        return even(text, answer)

    monkeypatch.setitem(verifiers, 'thoughtful', thoughtful)
    _, log = run(
        replace(CFG, steps=1, prompts_per_step=8, group_size=8), questions(10, 'thoughtful')
    )
    assert log.time_reward_s[0] > 64 * 0.004 and log.time_reward_busy_s[0] > 64 * 0.004
    assert all(s.timings['reward_start'] >= log.time_reward_at[0] for s in log[0][2])
    assert log.time_rollout_s[0] + log.time_reward_s[0] < log.time_step_s[0]


# ---- judges


@pytest.fixture(scope='module')
def pool():
    verifiers['even'] = odd_verifiers.even  # the same function, in a module that workers can import
    try:
        pool = RewardPool(PROMPTS, TOKENIZER, EOS_ID, RewardConfig(workers=2))
    finally:
        del verifiers['even']
    yield pool
    pool.close()


@pytest.mark.parametrize(
    'zv',
    [NOTHING, ZeroVarianceConfig(), ZeroVarianceConfig('refill')],
    ids=['uniform', 'adaptive', 'refill'],
)
def test_overlapped_rewards_change_nothing(pool, zv):
    "Samples, verdicts, metrics, weights: to the last bit"
    cfg = replace(CFG, steps=3, zero_variance=zv)
    (a, serial), (b, beside) = (
        run(cfg, judge=SerialJudge(PROMPTS, TOKENIZER, EOS_ID)),
        run(cfg, judge=pool),
    )
    assert same(a, b) and [no_clock(m) for _, m, _, _ in serial] == [
        no_clock(m) for _, m, _, _ in beside
    ]
    for (_, _, x, p), (_, _, y, q) in zip(serial, beside):
        assert [(s.prompt_id, s.index, s.response_ids, s.verdict, s.reward) for s in x] == [
            (s.prompt_id, s.index, s.response_ids, s.verdict, s.reward) for s in y
        ]
        assert torch.equal(p.advantages, q.advantages) and torch.equal(p.rewards, q.rewards)
    assert {s.timings['worker'] for _, _, samples, _ in beside for s in samples} <= {1, 2} and min(
        beside.time_reward_busy_s
    ) > 0


def test_the_log_probs_come_before_the_verdicts():
    "Nothing waits for a reward that it does not need"
    order = []

    class Noting(SerialJudge):
        def start(self, sample):
            order.append('start')

        def settle(self, samples):
            order.append('settle')
            super().settle(samples)

    rollout, engine = engines()

    def note(name, fn):
        def call(*args):
            order.append(name)
            return fn(*args)

        return call

    engine.score, engine.update = note('score', engine.score), note('update', engine.update)
    log = Log()
    fit(
        replace(CFG, steps=1),
        PROMPTS,
        rollout,
        engine,
        TOKENIZER,
        log,
        EOS_ID,
        judge=Noting(PROMPTS, TOKENIZER, EOS_ID),
    )
    assert order == ['start'] * 16 + ['score', 'settle', 'update']
    m = log[0][1]
    at = [m[f'time_{p}_at'] for p in ('step', 'rollout', 'log_probs', 'reward', 'update', 'sync')]
    assert (
        at == sorted(at)
        and m['time_sync_at'] + m['time_sync_s'] <= m['time_step_at'] + m['time_step_s']
    )


def test_first_loss_is_zero_and_its_gradient_is_not():
    _, log = run(replace(CFG, optim=OptimConfig(lr=1e-3)))
    assert (
        all(abs(v) < 1e-6 for v in log.loss)
        and min(log.grad_norm) > 1e-2
        and max(log.clip_frac) == 0
    )


def test_advantages_against_a_loop_over_dictionaries(whole):
    for _, m, samples, batch in whole[1]:
        groups = {}
        for s in samples:
            groups.setdefault(s.prompt_id, []).append(s.reward)
        for i, s in enumerate(samples):
            r = groups[s.prompt_id]
            mean = sum(r) / len(r)
            std = math.sqrt(sum((x - mean) ** 2 for x in r) / (len(r) - 1))
            want = (s.reward - mean) / (std + 1e-6) if std else 0.0
            row = batch.advantages[i]
            assert row[batch.response_mask[i]].tolist() == pytest.approx(
                [want] * len(s.response_ids), abs=1e-5
            )
            assert not row[~batch.response_mask[i]].any()
        assert m['zero_variance_frac'] == pytest.approx(
            sum(len(set(r)) == 1 for r in groups.values()) / len(groups)
        )


# ---- order and restarts


class Reordered(RolloutEngine):
    "Yields in an order of its own, and as late as it likes"

    def __init__(self, rollout, order):
        self.rollout, self.order, self.load_weights = rollout, order, rollout.load_weights

    def generate(self, requests, whole_groups=False):
        samples = list(self.rollout.generate(requests))
        self.order(samples)
        yield from samples


@pytest.mark.parametrize(
    'order',
    [
        list.reverse,
        random.Random(0).shuffle,
        random.Random(1).shuffle,
        lambda x: x.sort(key=lambda s: s.response_ids),
    ],
)
def test_what_finishes_first_does_not_matter(whole, order):
    engine, log = run(wrap=lambda r: Reordered(r, order))
    assert same(engine, whole[0])
    assert [no_clock(m) for _, m, _, _ in log] == [no_clock(m) for _, m, _, _ in whole[1]]


@pytest.mark.parametrize('done', [1, 2, 3])
def test_resume_is_exact(whole, tmp_path, done):
    "Through a checkpoint on the disk; the second half starts from another policy and random state"
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
    torch.manual_seed(99)
    random.seed(99)
    before = torch.get_rng_state(), random.getstate()
    fit(CFG, PROMPTS, rollout, engine, TOKENIZER, Log(), EOS_ID)
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert same(engine, whole[0])


def test_another_seed_is_another_run(whole):
    assert not same(run(replace(CFG, seed=1))[0], whole[0])


def test_hooks_that_raise_leave_engines_that_work(whole):
    class Stop(Exception):
        pass

    class Stopping(Log):
        def on_step(self, step, *args):
            if step == 2:
                raise Stop

    rollout, engine = engines()
    with pytest.raises(Stop):
        fit(CFG, PROMPTS, rollout, engine, TOKENIZER, Stopping(), EOS_ID)
    fit(CFG, PROMPTS, rollout, engine, TOKENIZER, Log(), EOS_ID, start=2)
    assert same(engine, whole[0])


def test_a_crash_in_the_middle_of_a_rollout_leaves_an_engine_that_works(whole, monkeypatch):
    def broken(*args):
        raise MemoryError

    rollout, engine = engines()
    with monkeypatch.context() as m:
        m.setattr(serial, 'verify', broken)
        with pytest.raises(MemoryError):
            fit(CFG, PROMPTS, rollout, engine, TOKENIZER, Log(), EOS_ID)
    fit(CFG, PROMPTS, rollout, engine, TOKENIZER, Log(), EOS_ID)
    assert same(engine, whole[0])


# ---- replay


def test_replay_changes_nothing_in_fp32_with_one_update_per_batch():
    one = replace(CFG, optim=OptimConfig(lr=1e-3))
    (a, on), (b, off) = run(one), run(replace(one, router_replay='off'))
    for key in ('loss', 'grad_norm', 'entropy', 'reward_mean', 'rollout_train_gap'):
        assert getattr(on, key) == pytest.approx(getattr(off, key), abs=1e-5), key
    assert all(torch.allclose(x, y, atol=1e-5) for (_, x), (_, y) in zip(a.weights(), b.weights()))


def test_an_engine_without_routes_works():
    rollout, engine = engines()
    rollout.return_routes = False
    log = Log()
    fit(CFG, PROMPTS, rollout, engine, TOKENIZER, log, EOS_ID)
    assert log[0][3].routed_experts is None and max(log.rollout_train_gap_max) < 1e-5


# ---- nothing to learn, or no verdict


def test_more_prompts_per_step_than_there_are():
    "A prompt that comes twice has one group of twice the size"
    _, log = run(replace(CFG, prompts_per_step=7), questions(3))
    for _, _, samples, batch in log:
        assert batch.group.bincount().tolist() in ([12, 8, 8], [8, 12, 8], [8, 8, 12])
        assert len({(s.prompt_id, s.index) for s in samples}) == 28


def test_a_silent_step_is_skipped_and_counted():
    engine, log = run(prompts=[replace(p, verifier='exact', answer='never') for p in PROMPTS])
    assert log.skipped_frac == [1.0] * 4 == log.zero_variance_frac and log.reward_mean == [0.0] * 4
    assert log.loss == [0.0] * 4 == log.grad_norm and log.sync_bytes == [0.0] * 4 == log.lr
    assert engine.num_steps == 0 and same(engine, engines()[1])


def test_a_run_goes_on_after_a_silent_step():
    "Silent first, then not: the weights that sample are the ones that learn"
    mixed = [
        replace(p, verifier='exact', answer='never')
        if p in prompts_of_step(PROMPTS, 0, 4, 0)
        else p
        for p in PROMPTS
    ]
    _, log = run(prompts=mixed)
    assert log.skipped_frac[0] == 1 and 0.0 in log.skipped_frac[1:]
    assert max(log.rollout_train_gap_max) < 1e-5


def silent_at_first(verifier='even'):
    "Nothing can be learned from the prompts of the first step"
    first = {p.id for p in prompts_of_step(PROMPTS, 0, 4, 0)}
    never = dict(verifier='exact', answer='never')
    return [replace(p, **never) if p.id in first else p for p in questions(10, verifier)]


@pytest.mark.parametrize(
    'cfg',
    [
        CFG,
        replace(CFG, router_replay='off'),
        replace(CFG, router_replay='R2', optim=OptimConfig(lr=1e-3)),
        replace(CFG, zero_variance=replace(NOTHING, sampling='adaptive')),
        replace(CFG, zero_variance=replace(NOTHING, sampling='refill')),
        *(
            replace(CFG, loss=LossConfig(name, tis=tis))
            for name in ('dapo', 'gspo', 'cispo', 'espo')
            for tis in ('off', 'mask')
        ),
        replace(RECIPE, zero_variance=replace(RECIPE.zero_variance, zvp_alpha=0.0)),
    ],
    ids=lambda c: f'{c.loss.name}-{c.loss.tis}-{c.router_replay}-{c.zero_variance.sampling}',
)
def test_every_step_has_the_same_metrics(cfg):
    "Silent ones too, also where the first one is silent"
    _, log = run(cfg, prompts=silent_at_first())
    _, loud = run(cfg)
    assert len({frozenset(m) for _, m, _, _ in log + loud}) == 1
    assert all(math.isfinite(v) for _, m, _, _ in log for v in m.values())


def test_a_silent_step_says_what_its_update_would_have_said():
    cfg = replace(CFG, steps=1, loss=LossConfig('espo'), optim=OptimConfig())
    engine, log = run(cfg, prompts=[replace(p, verifier='exact', answer='x') for p in PROMPTS])
    _, m, _, batch = log[0]
    said, _ = engine.update(batch, trainer.loss_of(cfg, batch))
    assert m['skipped_frac'] == 1 and m['lr'] == 0.0
    del said['skipped_frac'], said['lr'], said['weights_finite']
    assert {k: m[k] for k in said} == pytest.approx(said, abs=1e-6)


@pytest.mark.parametrize('verifier', ['crash', 'slow', 'no such verifier'])
def test_without_any_verdict_nothing_is_learned(verifier):
    engine, log = run(replace(CFG, guards=UNGUARDED), questions(10, verifier))
    assert log.failed_frac == [1.0] * 4 == log.skipped_frac and engine.num_steps == 0


def test_failed_samples_have_advantage_zero_and_do_not_touch_their_siblings():
    _, log = run(
        replace(CFG, steps=2, group_size=8, prompts_per_step=8), questions(10, 'sometimes')
    )
    mixed = 0
    for _, m, samples, batch in log:
        failed = torch.tensor([s.verdict.status == 'failed' for s in samples])
        assert 0 < m['failed_frac'] == pytest.approx(failed.float().mean().item())
        assert not batch.advantages[failed].any()
        for g in batch.group.unique():
            rows = (batch.group == g) & ~failed
            r = batch.rewards[rows]
            if len(r) < 2 or r.max() == r.min():
                continue
            mixed += 1
            assert torch.allclose(
                batch.advantages[rows].sum(1) / batch.response_mask[rows].sum(1),
                (r - r.mean()) / (r.std() + 1e-6),
                atol=1e-5,
            )
    said = {s.verdict.evidence for _, _, samples, _ in log for s in samples}
    assert mixed and any(s.startswith('RuntimeError: out of order (test_loop.py:') for s in said)


@pytest.mark.parametrize('harm', ['lose', 'repeat', 'swap', 'foreign'])
def test_a_rollout_engine_may_not_lose_or_repeat(harm):
    def hurt(samples):
        if harm == 'lose':
            samples.pop()
        if harm == 'repeat':
            samples.append(samples[0])
        if harm == 'swap':
            samples[-1] = samples[0]  # the right number of samples, and one twice
        if harm == 'foreign':
            samples[-1].index = 77

    with pytest.raises(AssertionError, match='lost, repeated or not asked for'):
        run(wrap=lambda r: Reordered(r, hurt))


# ---- what the loss is told of the step


ONE_UPDATE = replace(CFG, loss=LossConfig('espo'), optim=OptimConfig(lr=1e-3))


def test_the_clip_of_espo_is_relative_to_the_largest_entropy_of_the_vocabulary():
    "Equation 8: without a floor the mean range is alpha times the mean entropy over log V"
    _, log = run(replace(ONE_UPDATE, espo=EspoConfig(alpha=0.5, eps_min=0.0)))
    assert SHAPE.vocab_size != SHAPE.hidden_size
    for eps, entropy in zip(log.clip_eps, log.entropy):
        assert eps == pytest.approx(0.5 * entropy / math.log(SHAPE.vocab_size), rel=1e-5)


def test_the_quantile_of_espo_is_that_of_the_whole_step():
    _, log = run(replace(ONE_UPDATE, espo=EspoConfig(groups='batch_quantile')))
    for _, m, _, batch in log:
        n = int(batch.response_mask.sum())
        assert m['high_entropy_frac'] == pytest.approx(math.ceil(0.2 * n - 1e-9) / n)


def test_the_first_wave_counts_raw_rewards():
    "Of a single wave: penalties make groups differ that are flat in what was judged"
    zv = ZeroVarianceConfig('uniform', repetition_weight=0.3, ngram=1)
    never = [replace(p, verifier='exact', answer='never') for p in PROMPTS]
    _, log = run(replace(CFG, zero_variance=zv), never)
    for _, m, _, _ in log:
        assert m['zero_variance_first_frac'] == m['zero_variance_raw_frac']
    assert any(m['zero_variance_raw_frac'] > m['zero_variance_frac'] for _, m, _, _ in log)


# ---- guards


def spoiled(loss_of, when):
    "`loss_of`, whose value is infinite in the steps (from 0) that `when` names"
    calls = itertools.count()

    def make(cfg, batch):
        good, bad = loss_of(cfg, batch), next(calls) in when

        def loss(*args):
            value, metrics = good(*args)
            return value + float('inf') if bad else value, metrics

        return loss

    return make


@pytest.mark.parametrize(
    'bad, lost, end',
    [(range(99), 3, 3), ({0, 1, 3, 4}, 3, None), ({1, 2}, 2, 3), (range(99), 0, None)],
)
def test_updates_that_are_skipped_in_a_row_end_a_run(monkeypatch, bad, lost, end):
    "An infinite loss has a finite gradient here: the loss itself is what is not finite"
    monkeypatch.setattr(trainer, 'loss_of', spoiled(trainer.loss_of, bad))
    cfg = replace(CFG, steps=6, guards=GuardConfig(max_lost_steps=lost))
    rollout, engine = engines(cfg)
    log = Log()
    try:
        fit(cfg, PROMPTS, rollout, engine, TOKENIZER, log, EOS_ID)
        assert end is None
    except RunFailed as e:
        assert f'step {end}: ' in str(e) and f'{lost} steps in a row' in str(e)
        assert '\n' not in str(e) and e.good == end - lost
    assert len(log) == (end or 6), 'the steps that were lost are on file'
    assert [m == 1 for m in log.skipped_frac] == [i in bad for i in range(len(log))]
    if 0 in bad and 1 in bad and end == 3:
        assert same(engine, engines()[1]), 'nothing of it reached the weights'


def test_a_run_shorter_than_its_patience_may_not_end_with_nothing(monkeypatch):
    monkeypatch.setattr(trainer, 'loss_of', spoiled(trainer.loss_of, range(99)))
    with pytest.raises(RunFailed, match='^step 4: .* 4 steps in a row') as e:
        run(CFG)
    assert CFG.guards.max_lost_steps > CFG.steps == 4 and e.value.good == 0


def test_a_run_that_goes_on_has_learned_before(monkeypatch):
    "One lost step at its end is no reason: it has had good ones"
    monkeypatch.setattr(trainer, 'loss_of', spoiled(trainer.loss_of, range(99)))
    rollout, engine = engines(CFG)
    log = Log()
    fit(CFG, PROMPTS, rollout, engine, TOKENIZER, log, EOS_ID, start=CFG.steps - 1)
    assert log.skipped_frac == [1.0]


class Untouched(RolloutEngine):
    "Notes which versions it was given"

    def __init__(self, rollout):
        self.rollout, self.versions, self.generate = rollout, [], rollout.generate

    def load_weights(self, weights, version):
        self.versions.append(version)
        self.rollout.load_weights(weights, version)


def test_weights_that_an_update_has_blown_up_go_nowhere():
    "Not to the rollout engine, not to the hooks, which save"
    cfg = replace(CFG, optim=OptimConfig(lr=9e18))
    rollout, engine = engines(cfg)
    rollout, log = Untouched(rollout), Log()
    with pytest.raises(RunFailed, match=r'^step 1: .*lr=9e\+18.*not finite') as e:
        fit(cfg, PROMPTS, rollout, engine, TOKENIZER, log, EOS_ID)
    assert e.value.good == 0 and not rollout.versions and not log


@pytest.mark.parametrize('bad', [math.nan, -math.inf])
def test_one_token_that_was_impossible_ends_the_run_before_anything_is_learned(bad):
    class Mute(Reordered):
        def generate(self, requests, whole_groups=False):
            for i, s in enumerate(self.rollout.generate(requests)):
                if i == 3:
                    s.rollout_log_probs[-1] = bad
                yield s

    log = Log()
    rollout, engine = engines()
    with pytest.raises(RunFailed, match=r'^step 1: 1 of \d+ sampled tokens have no finite') as e:
        fit(CFG, PROMPTS, Mute(rollout, None), engine, TOKENIZER, log, EOS_ID)
    assert e.value.good == -1 and not log and same(engine, engines()[1])


@pytest.mark.parametrize(
    'scale, said',
    [(1e10, r'all \d+ .* are equally likely'), (1e16, r'(\d+) of \1 .* no finite log-prob')],
)
def test_weights_that_are_finite_and_overflow_end_the_run(scale, said):
    "Their squares are finite; what is computed from them is not, or is 0 behind a norm"
    rollout, engine = engines()
    update, log = engine.update, Log()

    def blow_up(*args):
        out = update(*args)
        if len(log) == 1:  # in the second step
            with torch.no_grad():
                torch._foreach_mul_([*engine.policy.parameters()], scale)
        return out

    engine.update = blow_up
    with pytest.raises(RunFailed, match=rf'^step 3: {said}.* overflowed: lower the') as e:
        fit(CFG, PROMPTS, rollout, engine, TOKENIZER, log, EOS_ID)
    assert all(t.square().isfinite().all() for _, t in engine.weights())
    assert e.value.good == 1 and log.skipped_frac == [0.0, 0.0]


def test_verdicts_that_mostly_fail_end_the_run_in_the_first_step():
    with pytest.raises(RunFailed) as e:
        run(prompts=questions(10, 'crash'))
    first = prompts_of_step(PROMPTS, 0, 4, 0)[0].id
    assert str(e.value).startswith('step 1: 16 of 16 responses have no verdict')
    assert f'to prompt {first}: RuntimeError: out of order' in str(e.value)


def test_a_judge_that_dies_later_is_given_a_few_steps(monkeypatch):
    "It may come back; where it does not, the row of the last step is written before the end"
    dead = itertools.chain([False, True, True, False], itertools.repeat(True))

    class Mortal(SerialJudge):
        def settle(self, samples):
            monkeypatch.setitem(verifiers, 'even', crash if next(dead) else even)
            super().settle(samples)

    log, cfg = Log(), replace(CFG, steps=20, guards=GuardConfig(max_lost_steps=3))
    rollout, engine = engines(cfg)
    with pytest.raises(RunFailed, match='^step 7: .*3 steps in a row') as e:
        fit(
            cfg,
            PROMPTS,
            rollout,
            engine,
            TOKENIZER,
            log,
            EOS_ID,
            judge=Mortal(PROMPTS, TOKENIZER, EOS_ID),
        )
    assert e.value.good == 4 and log.failed_frac == [0, 1, 1, 0, 1, 1, 1]


def test_silent_steps_are_no_lost_steps():
    cfg = replace(CFG, steps=8, guards=GuardConfig(max_lost_steps=1, max_failed_frac=0.0))
    _, log = run(cfg, [replace(p, verifier='exact', answer='never') for p in PROMPTS])
    assert log.skipped_frac == [1.0] * 8


@pytest.mark.parametrize('error', [SystemExit, GeneratorExit, RecursionError])
def test_a_verifier_cannot_end_the_run(monkeypatch, error):
    def leave(text, answer):
        if ord(text[-1:] or 'a') % 3 == 0:
            raise error('enough')
        return even(text, answer)

    monkeypatch.setitem(verifiers, 'leave', leave)
    _, log = run(replace(CFG, guards=UNGUARDED), questions(10, 'leave'))
    assert len(log) == 4 and 0 < max(log.failed_frac) < 1


# ---- KL


def test_kl_needs_a_reference():
    with pytest.raises(ValueError, match='kl_coef=0.1.*reference'):
        run(replace(CFG, loss=LossConfig('grpo', kl_coef=0.1)))


@pytest.mark.parametrize('kind', ['k1', 'k2', 'k3'])
def test_kl_with_a_reference(kind):
    cfg = replace(
        CFG, loss=LossConfig('grpo', kl_coef=0.1, kl_estimator=kind), optim=OptimConfig(lr=1e-3)
    )
    reference = engines()[1]
    engine, log = run(cfg, reference=reference)
    assert (
        abs(log.kl[0]) < 1e-5
        and log[0][3].ref_log_probs is not None
        and min(log.time_ref_log_probs_s) > 0
    )
    assert torch.allclose(log[0][3].ref_log_probs, log[0][3].old_log_probs, atol=1e-5), (
        'the reference is the start'
    )
    assert abs(log.kl[-1]) > 1e-5 and same(reference, engines()[1]), 'and it stays there'


def test_silent_groups_still_learn_through_the_kl():
    "From a policy that has moved, back towards the reference"
    cfg = replace(
        CFG,
        steps=30,
        loss=LossConfig('grpo', kl_coef=1.0, kl_estimator='k2'),
        optim=OptimConfig(lr=3e-3),
    )
    reference, moved = engines()[1], TorchTrain(Policy(SHAPE, seed=1), cfg.optim)
    gen = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in moved.policy.parameters():
            p += 2 * p.std().nan_to_num() * torch.randn(p.shape, generator=gen)
    silent = [replace(p, verifier='exact', answer='never') for p in PROMPTS]
    rollout, log = TorchRollout(SHAPE, 32), Log()
    rollout.load_weights(moved.weights(), 0)
    fit(cfg, silent, rollout, moved, TOKENIZER, log, EOS_ID, 0, reference)
    assert log.skipped_frac == [0.0] * 30
    assert log.kl[0] > 0.01 and sum(log.kl[-5:]) < 0.5 * sum(log.kl[:5]), log.kl


# ---- an oracle: engines whose policy is a table


class TableRollout(RolloutEngine):
    def load_weights(self, weights, version):
        self.log_probs, self.version = dict(weights)['theta'].log_softmax(1), version

    def generate(self, requests, whole_groups=False):
        for r in requests:
            row = self.log_probs[r.prompt_ids[0]]
            d = int(
                torch.multinomial(row.exp(), 1, generator=torch.Generator().manual_seed(r.seed))
            )
            yield Sample(
                r.prompt_id,
                r.index,
                list(r.prompt_ids),
                [DIGITS[d]],
                row[d : d + 1].float(),
                None,
                None,
                'stop',
                self.version,
            )


class TableTrain:
    def __init__(self, num, lr):
        self.theta, self.lr = torch.zeros(num, 10, dtype=torch.double, requires_grad=True), lr

    def weights(self):
        yield 'theta', self.theta.detach().clone()

    def rows(self, batch):
        table = self.theta[batch.token_ids[:, 0]].log_softmax(1)
        chosen = table.gather(1, batch.token_ids[:, 1:] - DIGITS[0])
        return torch.cat([0 * chosen, chosen], 1)

    def score(self, batch):
        entropy = torch.zeros_like(batch.rollout_log_probs)
        return dict(old_log_probs=self.rows(batch).detach(), entropy=entropy)

    def update(self, batch, loss, lr=None):
        value, metrics = loss(self.rows(batch), batch, len(batch), len(batch))
        self.theta.data -= self.lr * torch.autograd.grad(value, self.theta)[0]
        return {k: float(v) for k, v in metrics.items()}, {}


DIGITS = encode(TOKENIZER, '0123456789')
QUIZ = [Prompt(f'q{i}', 'quiz', f'q{i}', [i], str(i), 'exact') for i in range(6)]


def table_run(steps, lr=3.0, **kw):
    cfg = TrainConfig(
        steps=steps,
        prompts_per_step=6,
        group_size=8,
        loss=LossConfig('grpo'),
        zero_variance=NOTHING,
        **kw,
    )
    rollout, engine, log = TableRollout(), TableTrain(6, lr), Log()
    rollout.load_weights(engine.weights(), 0)
    fit(cfg, QUIZ, rollout, engine, TOKENIZER, log, EOS_ID)
    return engine, log


@pytest.mark.parametrize('estimator', ['grpo', 'dr_grpo'])
def test_one_step_against_the_formula(estimator):
    "theta + lr mean_i A_i (onehot - p), written out"
    engine, log = table_run(1, lr=0.5, advantages=AdvantageConfig(estimator))
    want, rewards = torch.zeros(6, 10, dtype=torch.double), {}
    for s in log[0][2]:
        rewards.setdefault(s.prompt_id, []).append(s.reward)
    for s in log[0][2]:
        r = torch.tensor(rewards[s.prompt_id], dtype=torch.double)
        a = (s.reward - r.mean()) / (r.std() + 1e-6 if estimator == 'grpo' else 1)
        want[s.prompt_ids[0]] += (
            0.5
            * a
            * (torch.nn.functional.one_hot(torch.tensor(s.response_ids[0] - DIGITS[0]), 10) - 0.1)
            / 48
        )
    assert torch.allclose(engine.theta.detach(), want, atol=1e-6) and want.any()


def test_it_learns():
    engine, log = table_run(60)
    assert engine.theta.detach().softmax(1)[range(6), range(6)].mean() > 0.85
    assert sum(log.reward_mean[:5]) / 5 < 0.3 < 0.8 < sum(log.reward_mean[-5:]) / 5


def test_edges_of_good_configs():
    TrainConfig(group_size=2, steps=0, eval_every=0, trace_every=0, save_every=0)
    TrainConfig(policy=PolicyConfig(max_position_embeddings=128))
    TrainConfig(
        policy=PolicyConfig(max_position_embeddings=8), init_from='a folder whose own config counts'
    )
    engine, log = run(replace(CFG, steps=0))
    assert not log and engine.num_steps == 0
    with pytest.raises(Exception, match='frozen|cannot assign'):
        CFG.steps = 3


# ---- the recipe of the paper


def test_the_recipe_is_the_default():
    assert (RECIPE.loss.name, RECIPE.zero_variance.sampling, RECIPE.router_replay) == (
        'espo',
        'adaptive',
        'R3',
    )


@pytest.mark.parametrize('sampling', ['adaptive', 'refill', 'uniform'])
def test_order_and_resume_hold_for_the_recipe(tmp_path, sampling):
    cfg = replace(RECIPE, steps=3, zero_variance=ZeroVarianceConfig(sampling, max_group_size=8))
    engine, log = run(cfg)
    assert same(engine, run(cfg, wrap=lambda r: Reordered(r, random.Random(0).shuffle))[0])
    first, _ = run(replace(cfg, steps=2))
    save_checkpoint(tmp_path, 2, first.state_dict())
    step, state = load_checkpoint(latest_checkpoint(tmp_path))
    again, rest = run(cfg, start=step, state=state)
    assert same(engine, again) and no_clock(rest[0][1]) == no_clock(log[2][1])


@pytest.mark.parametrize(
    'loss',
    [
        LossConfig('dr_grpo', max_response_tokens=6),
        *map(LossConfig, ('dapo', 'gspo', 'gmpo', 'cispo', 'espo')),
        LossConfig('espo', tis='mask'),
    ],
    ids=lambda c: f'{c.name}-{c.tis}',
)
@pytest.mark.parametrize('replay', ['off', 'R2', 'R3'])
def test_every_loss_trains_with_every_kind_of_replay(loss, replay):
    start, (engine, log) = (
        engines()[1],
        run(replace(RECIPE, steps=1, loss=loss, router_replay=replay)),
    )
    assert not same(engine, start) and all(math.isfinite(v) for v in log[0][1].values())
    assert log.routes_valid_frac == [float(replay != 'off' or log[0][3].routed_experts is not None)]


def test_every_part_can_be_switched_off_alone():
    "Each switch changes the weights, so none is dead"
    base = replace(RECIPE, steps=2, prompts_per_step=6)
    whole = run(base)[0]
    zv = base.zero_variance
    for change in (
        dict(loss=LossConfig('gspo')),
        dict(zero_variance=replace(zv, sampling='uniform')),
        dict(zero_variance=replace(zv, zvp_alpha=0.0)),
        dict(zero_variance=replace(zv, length_weight=0.0, repetition_weight=0.0)),
        dict(advantages=AdvantageConfig('dr_grpo')),
    ):
        prompts = [
            replace(p, verifier='exact', answer='never') if i % 2 else p
            for i, p in enumerate(PROMPTS)
        ]
        assert not same(run(replace(base, **change), prompts)[0], run(base, prompts)[0]), change
    assert whole.num_steps == 4


def test_groups_that_fail_everything_still_learn_with_the_recipe():
    "RL-ZVP and penalties: nothing is right, and no step is skipped"
    engine, log = run(
        RECIPE, prompts=[replace(p, verifier='exact', answer='never') for p in PROMPTS]
    )
    assert (
        log.skipped_frac == [0.0] * 4
        and log.zero_variance_raw_frac == [1.0] * 4
        and engine.num_steps == 8
    )
    assert min(log.gradient_token_frac) > 0.5


def test_task_rewards_and_penalties_are_told_apart():
    heavy = replace(
        RECIPE,
        zero_variance=ZeroVarianceConfig(
            'uniform', length_weight=0.3, overlong_frac=1.0, repetition_weight=0.1
        ),
    )
    _, log = run(heavy)
    for _, m, samples, batch in log:
        task = [s.verdict.reward for s in samples]
        assert m['reward_mean'] == pytest.approx(sum(task) / len(task)) and m['penalty_mean'] > 0
        assert m['reward_mean'] - m['penalty_mean'] == pytest.approx(
            sum(s.reward for s in samples) / len(samples), abs=1e-6
        )
        assert m['tokens'] == batch.response_mask.sum()
