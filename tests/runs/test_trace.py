"Traces: the logged loss from the file alone; nothing lost in the text; damage is named"

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compassrl.algo.advantages import AdvantageConfig
from compassrl.algo.loss_registry import policy_loss, policy_losses
from compassrl.algo.losses import LossConfig
from compassrl.algo.zero_variance import ZeroVarianceConfig
from compassrl.config import TrainConfig
from compassrl.data.prompts import DataConfig
from compassrl.data.tasks import verifiers
from compassrl.data.tokenizer import EOS_ID, build_tokenizer, encode
from compassrl.loop import fit, loss_of
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.records import Prompt, Verdict
from compassrl.rollout.torch_rollout import RolloutConfig, TorchRollout
from compassrl.runs.trace import TRACE_VERSION, trace_rows
from compassrl.train.torch_train import OptimConfig, TorchTrain
from course.pages import microscope, recompute_loss
from course.trace import read_trace

torch.set_num_threads(1)
TOKENIZER = build_tokenizer()
SHAPE = PolicyConfig(
    hidden_size=32, head_dim=8, moe_intermediate_size=32, max_position_embeddings=32
)
CFG = TrainConfig(
    steps=3,
    prompts_per_step=3,
    group_size=4,
    policy=SHAPE,
    data=DataConfig(max_prompt_tokens=16),
    rollout=RolloutConfig(max_tokens=5),
    optim=OptimConfig(lr=3e-3, num_mini_batches=2),
    loss=LossConfig('grpo'),
    zero_variance=ZeroVarianceConfig('uniform', length_weight=0, repetition_weight=0, zvp_alpha=0),
)


def even(text, answer):
    "An untrained policy is right about half of the time"
    right = bool(text) and ord(text[0]) % 2 == 0
    return Verdict(float(right), right, 'ok' if right else 'wrong', text[:1])


class Keep(list):
    def on_step(self, *args):
        self.append(args)


def run(cfg=CFG, replay='R3', verifier='even', answer='', **kw):
    def engine(mode='R3'):
        return TorchTrain(Policy(SHAPE, seed=1), cfg.optim, replay=mode)

    prompts = [
        Prompt(f'p{i}', 'test', f'{i}+1=', encode(TOKENIZER, f'{i}+1='), answer, verifier)
        for i in range(6)
    ]
    trainer, kept = engine(replay), Keep()
    rollout = TorchRollout(SHAPE, 32, return_routes=replay != 'off', **kw)
    rollout.load_weights(trainer.weights(), 0)
    verifiers['even'] = even
    try:
        fit(cfg, prompts, rollout, trainer, TOKENIZER, kept, EOS_ID, reference=engine('off'))
    finally:
        del verifiers['even']
    return kept


def write(path, kept, num_mini_batches=2):
    path.write_text(
        ''.join(
            json.dumps(row) + '\n' for args in kept for row in trace_rows(*args, num_mini_batches)
        )
    )
    return path


@pytest.fixture(scope='module')
def kept():
    return run()


@pytest.fixture
def path(kept, tmp_path):
    return write(tmp_path / 'trace.jsonl', kept)


# ---- the loss


@pytest.mark.parametrize('num', [1, 2, 3, 4, 5, 12])
def test_the_logged_loss(tmp_path, num):
    kept = run(replace(CFG, optim=OptimConfig(lr=3e-3, num_mini_batches=num)))
    steps = list(read_trace(write(tmp_path / 't', kept, num)))
    assert [h['step'] for h, _ in steps] == [1, 2, 3]
    for head, rows in steps:
        assert recompute_loss(head, rows, CFG) == pytest.approx(head['metrics']['loss'], abs=1e-6)


LOSSES = [
    LossConfig('espo'),
    LossConfig('gspo'),
    LossConfig('gmpo'),
    LossConfig('cispo'),
    LossConfig('grpo', tis='mask'),
    LossConfig('grpo', aggregation='token-mean', clip_eps_high=0.28),
    LossConfig('grpo', aggregation='seq-mean-token-sum-norm', max_response_tokens=5),
    *(LossConfig('grpo', kl_coef=0.5, kl_estimator=k) for k in ('k1', 'k2', 'k3')),
]


@pytest.mark.parametrize('loss', LOSSES, ids=str)
def test_the_logged_loss_of_every_kind(tmp_path, loss):
    kept = run(replace(CFG, loss=loss, advantages=AdvantageConfig('dr_grpo')))
    for head, rows in read_trace(write(tmp_path / 't', kept)):
        assert recompute_loss(head, rows, replace(CFG, loss=loss)) == pytest.approx(
            head['metrics']['loss'], abs=1e-6
        )
        other = LossConfig(
            'grpo',
            aggregation='seq-mean-token-sum-norm',
            max_response_tokens=50,
            kl_coef=loss.kl_coef,
        )
        assert ('ref_log_probs' in rows[0]) == (loss.kl_coef > 0)
    assert (
        abs(recompute_loss(head, rows, replace(CFG, loss=other)) - head['metrics']['loss']) > 1e-6
    ), 'another config is found out'


def test_a_loss_that_needs_more_than_log_probs(tmp_path, monkeypatch):
    "Entropy, say: whatever a registered loss asks for and the trace has"

    def by_entropy(log_probs, old_log_probs, advantages, mask, cfg, entropy):
        return -advantages * entropy * (log_probs - old_log_probs).exp(), {}

    monkeypatch.setattr(policy_losses, 'functions', dict(policy_losses.functions))
    policy_loss('entropy')(by_entropy)
    loss = LossConfig(name='by_entropy')
    for head, rows in read_trace(write(tmp_path / 't', run(replace(CFG, loss=loss)))):
        assert recompute_loss(head, rows, replace(CFG, loss=loss)) == pytest.approx(
            head['metrics']['loss'], abs=1e-6
        )


def test_the_loss_needs_what_the_update_saw(path):
    "With two mini-batches the log-probs during the update are not the ones before it"
    far = [
        abs(
            recompute_loss(h, [r | dict(log_probs=r['old_log_probs']) for r in rows], CFG)
            - h['metrics']['loss']
        )
        for h, rows in read_trace(path)
    ]
    assert max(far) > 1e-4


def test_with_replayed_gates(tmp_path):
    "The loss follows from log-probs; gates, four bytes each, are not written"
    kept = run(replay='R3-gates', return_gates=True, dtype=torch.bfloat16)
    assert all(batch.routed_gates is not None for *_, batch in kept)
    plain = run(dtype=torch.bfloat16)
    assert not torch.equal(kept[0][3].old_log_probs, plain[0][3].old_log_probs), 'they were used'
    for head, rows in read_trace(write(tmp_path / 't', kept)):
        assert 'routed_experts' in rows[0] and 'routed_gates' not in rows[0]
        assert recompute_loss(head, rows, CFG) == pytest.approx(head['metrics']['loss'], abs=1e-6)
        assert microscope(rows, TOKENIZER)


def test_without_routes(tmp_path):
    for head, rows in read_trace(write(tmp_path / 't', run(replay='off'))):
        assert not {'routed_experts', 'routes_agree'} & rows[0].keys()
        assert recompute_loss(head, rows, CFG) == pytest.approx(head['metrics']['loss'], abs=1e-6)


@pytest.mark.parametrize('silent', [range(6), range(6, 12), [0, 3, 7]], ids=str)
def test_responses_of_which_the_policy_drew_nothing(kept, tmp_path, silent):
    "A mini-batch of such responses alone is no step of the engine"
    step, _, samples, batch = kept[0]
    mask = batch.response_mask.clone()
    mask[silent] = False
    samples = [
        replace(s, policy_mask=mask[i, len(s.prompt_ids) :][: len(s.response_ids)])
        for i, s in enumerate(samples)
    ]
    batch, engine = replace(batch, response_mask=mask), TorchTrain(Policy(SHAPE), CFG.optim)
    batch = replace(batch, **engine.score(batch))
    metrics, seen = engine.update(batch, loss_of(CFG, batch))
    assert engine.num_steps == (2 if silent == [0, 3, 7] else 1)
    written = write(tmp_path / 't', [(step, metrics, samples, replace(batch, **seen))])
    for head, rows in read_trace(written):
        assert recompute_loss(head, rows, CFG) == pytest.approx(metrics['loss'], abs=1e-6)


def test_a_trace_from_before_the_agreement_of_routes(path):
    "Reads, recomputes and shows as it did"
    now = list(read_trace(path))
    old = [{k: v for k, v in json.loads(r).items() if k != 'routes_agree'} for r in lines_of(path)]
    path.write_text(''.join(json.dumps(r) + '\n' for r in old))
    for (head, rows), (_, same) in zip(read_trace(path), now, strict=True):
        assert recompute_loss(head, rows, CFG) == pytest.approx(head['metrics']['loss'], abs=1e-6)
        assert microscope(rows, TOKENIZER) == microscope(same, TOKENIZER)


def test_a_skipped_step_has_no_loss(tmp_path):
    kept = run(verifier='exact', answer='never')
    for head, rows in read_trace(write(tmp_path / 't', kept)):
        assert head['metrics']['skipped_frac'] == 1 and 'old_log_probs' in rows[0]
        with pytest.raises(ValueError, match=f'step {head["step"]} has no log_probs: no update'):
            recompute_loss(head, rows, CFG)


def test_kl_without_its_reference_is_refused(path):
    head, rows = next(read_trace(path))
    with pytest.raises(ValueError, match='ref_log_probs is None'):
        recompute_loss(head, rows, replace(CFG, loss=LossConfig('grpo', kl_coef=0.1)))


# ---- what is in it

SAMPLE = {
    'version',
    'kind',
    'step',
    'prompt_id',
    'index',
    'group',
    'prompt_ids',
    'response_ids',
    'reward',
    'task_reward',
    'correct',
    'status',
    'evidence',
    'finish_reason',
    'weight_version',
    'timings',
    'rollout_log_probs',
    'old_log_probs',
    'log_probs',
    'entropy',
    'advantages',
    'routes_agree',
    'routed_experts',
    'routes_valid',
}


def test_schema_of_version_1(path):
    "If a key goes or says something else, TRACE_VERSION has to change; not for a new key"
    assert TRACE_VERSION == 1
    for head, rows in read_trace(path):
        assert head.keys() == {
            'version',
            'kind',
            'step',
            'num_samples',
            'num_mini_batches',
            'metrics',
        }
        assert all(r.keys() == SAMPLE for r in rows) and len(rows) == head['num_samples'] == 12


def test_every_bit_survives(kept, path):
    for (head, rows), (step, metrics, samples, batch) in zip(read_trace(path), kept, strict=True):
        assert head['metrics'] == metrics and head['step'] == step
        for i, (r, s) in enumerate(zip(rows, samples, strict=True)):
            for key in (
                'rollout_log_probs',
                'old_log_probs',
                'log_probs',
                'entropy',
                'advantages',
                'routes_agree',
            ):
                assert torch.equal(
                    torch.tensor(r[key]), getattr(batch, key)[i][batch.response_mask[i]]
                ), key
                assert len(r[key]) == len(r['response_ids'])
            assert (r['prompt_id'], r['index'], r['prompt_ids'], r['response_ids']) == (
                s.prompt_id,
                s.index,
                s.prompt_ids,
                s.response_ids,
            )
            assert (r['reward'], r['correct'], r['status'], r['evidence']) == (
                s.reward,
                s.verdict.correct,
                s.verdict.status,
                s.verdict.evidence,
            )
            assert torch.equal(
                torch.tensor(r['routed_experts'], dtype=torch.uint8), s.routed_experts
            ) and r['routes_valid'] == [1] * len(s.routes_valid)
            assert r['group'] == batch.group[i] and r['weight_version'] == step - 1


# ---- cut, damaged, foreign


def test_cut_at_any_byte(path, tmp_path):
    "As a kill leaves it: whole steps before the cut are there, nothing else is, and nothing raises"
    raw, whole, half = path.read_bytes(), list(read_trace(path)), tmp_path / 'half'
    ends = [i + 1 for i, b in enumerate(raw) if b == 10]
    cuts = {*range(0, len(raw), 131), *(e + d for e in ends for d in (-1, 0, 1))}
    for n in sorted(c for c in cuts if c <= len(raw)):
        half.write_bytes(raw[:n])
        got = list(read_trace(half))
        assert got == whole[: sum(n >= ends[13 * (i + 1) - 1] for i in range(3))], n


def lines_of(path):
    return path.read_text().splitlines(keepends=True)


@pytest.mark.parametrize(
    'change, words',
    [
        (lambda L: [L[0], L[1][:-40] + '\n', *L[2:]], ['line 2', 'not JSON', 'damaged']),
        (lambda L: [L[0], '\n', *L[1:]], ['line 2', 'not JSON']),
        (lambda L: [L[0], '[1, 2]\n', *L[1:]], ['line 2', 'no row of a trace']),
        (lambda L: ['null\n'], ['line 1', 'no row of a trace']),
        (lambda L: ['{"step": 1, "reward_mean": 0.5}\n'], ['line 1', 'no row of a trace']),
        (
            lambda L: [L[0].replace('"version": 1', '"version": 2')],
            ['line 1', 'version 2', 'reads 1'],
        ),
        (lambda L: [L[0].replace('"version": 1', '"version": "1"')], ["version '1'"]),
        (lambda L: [L[0].replace('"kind": "step"', '"kind": "stop"')], ["kind 'stop'"]),
        (lambda L: [L[0].replace('num_samples', 'samples')], ['num_samples']),
        (lambda L: [L[0], L[1].replace('response_ids', 'ids')], ['line 2', 'response_ids']),
        (lambda L: L[1:], ['line 1', 'no step announced']),
        (lambda L: L[:12] + L[13:], ['line 13', 'step 1 has 11 of 12']),
        (lambda L: L[:13] + L[12:], ['line 14', 'no step announced']),
        (lambda L: [L[0], *L[14:26], *L[1:13]], ['line 2', 'step 2']),
    ],
)
def test_damage_is_named_by_line(path, change, words):
    path.write_text(''.join(change(lines_of(path))))
    with pytest.raises(ValueError) as e:
        list(read_trace(path))
    assert '\n' not in str(e.value) and path.name in str(e.value)
    for w in words:
        assert w in str(e.value), str(e.value)


def test_steps_before_the_damage_are_read(path):
    L = lines_of(path)
    path.write_text(''.join([*L[:20], 'x\n', *L[20:]]))
    steps = read_trace(path)
    with pytest.raises(ValueError, match='line 21'):
        list(steps)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_damage_is_a_value_error_or_a_valid_trace(path, data):
    raw = path.read_bytes()
    i, j = (data.draw(st.integers(0, len(raw))) for _ in range(2))
    bad = path.with_name('bad')
    bad.write_bytes(raw[:i] + data.draw(st.binary(max_size=12)) + raw[j:])
    try:
        steps = list(read_trace(bad))
    except ValueError as e:
        assert 'bad line ' in str(e)
    else:
        assert all(len(rows) == head['num_samples'] for head, rows in steps)


@pytest.mark.parametrize(
    'content', [b'\x1f\x8b\x08\x00\n', b'\xff\xfe{\x00\n', bytes(range(256)) + b'\n']
)
def test_binary_files(tmp_path, content):
    (tmp_path / 't').write_bytes(content)
    with pytest.raises(ValueError, match='t line 1 is not JSON'):
        list(read_trace(tmp_path / 't'))


def test_no_steps_and_no_file(tmp_path):
    (tmp_path / 't').write_text('')
    assert list(read_trace(tmp_path / 't')) == []
    with pytest.raises(FileNotFoundError, match='nowhere'):
        list(read_trace(tmp_path / 'nowhere'))


def test_steps_come_one_by_one(path):
    "A long trace is not read at once"
    steps = read_trace(path)
    assert next(steps)[0]['step'] == 1
    path.write_bytes(b'')
    list(steps)


# ---- microscope


def test_microscope(path):
    head, rows = next(read_trace(path))
    for color in ('entropy', 'advantages', 'old_log_probs', 'log_probs', 'rollout_log_probs'):
        page = microscope(rows, TOKENIZER, color)
        assert page.count('<span title=') == sum(
            len(r['response_ids']) for r in rows
        ) and page.count('<div>') == len(rows)
    assert f'old_log_probs {rows[0]["old_log_probs"][0]:+.4f}' in page
    with pytest.raises(ValueError, match="color='beauty': use one of .*entropy"):
        microscope(rows, TOKENIZER, 'beauty')


def test_microscope_escapes_what_it_shows():
    evil = encode(TOKENIZER, '<script>"&\n')
    row = dict(prompt_ids=evil, response_ids=evil, reward=1.0, entropy=[0.0] * len(evil))
    page = microscope([row], TOKENIZER)
    assert (
        '<script' not in page
        and page.count('&lt;') == page.count('&gt;') == page.count('&amp;') == 2
    ), 'in the prompt and in the tokens'
    assert '\\n' in page and 'nan' not in page


def test_microscope_colours_by_sign():
    row = dict(prompt_ids=[20], response_ids=[21, 22, 23], reward=0.0, advantages=[1.0, -2.0, 0.0])
    page = microscope([row], TOKENIZER, 'advantages')
    assert [
        'rgba(15,118,110,0.375)' in page,
        'rgba(194,65,12,0.750)' in page,
        'rgba(194,65,12,0.000)' in page,
    ] == [True] * 3
