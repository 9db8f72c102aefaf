"A run whose responses call a tool: judged, traced, resumed, and told from the outside"

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch

from compassrl.algo.losses import LossConfig
from compassrl.algo.zero_variance import ZeroVarianceConfig
from compassrl.config import TrainConfig, read_run_config
from compassrl.data.prompts import DataConfig
from compassrl.data.tokenizer import build_tokenizer
from compassrl.data.tools import ToolConfig
from compassrl.judges.serial import RewardConfig
from compassrl.model.policy import PolicyConfig
from compassrl.model.pretrained import from_pretrained, hf_weights
from compassrl.records import Sample
from compassrl.rollout.partial import drawn_mask
from compassrl.rollout.schedule import ScheduleConfig
from compassrl.rollout.torch_rollout import RolloutConfig
from compassrl.runs.eval_sets import eval_command
from compassrl.runs.presets import presets
from compassrl.runs.run import resume_run, start_run
from compassrl.train.checkpoint import load_checkpoint
from compassrl.train.sft import SFTConfig
from compassrl.train.torch_train import OptimConfig
from course.trace import read_trace
from tests.support.labs import expect_the_logged_losses

CFG = TrainConfig(
    steps=4,
    prompts_per_step=4,
    group_size=4,
    save_every=2,
    trace_every=1,
    eval_k=1,
    trackers=(),
    policy=PolicyConfig(
        hidden_size=32, head_dim=16, moe_intermediate_size=32, max_position_embeddings=64
    ),
    data=DataConfig(
        domains=('calculation',), difficulty=0, num_train=64, num_heldout=4, max_prompt_tokens=16
    ),
    cold_start=SFTConfig(steps=70, lr=1e-2, batch_size=32, num_solutions=64, hasty_frac=0.3),
    rollout=RolloutConfig(max_tokens=36),
    tools=ToolConfig('calculator', max_calls=2),
    rewards=RewardConfig(workers=1),
    optim=OptimConfig(lr=1e-3, num_mini_batches=2),
)

TOKENIZER = build_tokenizer()


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    return start_run(replace(CFG, run_dir=str(tmp_path_factory.mktemp('run') / 'whole')))


@pytest.fixture(scope='module')
def in_parts(tmp_path_factory):
    "At most four tokens of a response in one step: fewer than a call and an answer have"
    cfg = replace(
        CFG,
        prompts_per_step=8,
        schedule=ScheduleConfig(partial_tokens=4),
        zero_variance=ZeroVarianceConfig('uniform'),
        loss=LossConfig('grpo', tis='truncate'),
    )
    return start_run(replace(cfg, run_dir=str(tmp_path_factory.mktemp('run') / 'in_parts')))


def rows(folder):
    return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


def check_equation(said):
    "`...<7*6>=42`"
    call, answer = said.rsplit('<', 1)[-1].split('>=')
    plain = re.sub(r'\b0+(?=\d)', '', call)  # 007 is no number of the language
    assert answer == '?' or eval(plain) == int(answer)


def test_the_trace_holds_answers(whole):
    calls = 0
    assert read_run_config(whole).tools == CFG.tools
    for (_, samples), row in zip(read_trace(whole / 'trace.jsonl'), rows(whole)):
        tokens = 0
        for s in samples:
            own = s.get('policy_mask', [1] * len(s['response_ids']))
            tokens += sum(own)
            calls += own.count(0)
            for k in 'rollout_log_probs', 'advantages', 'old_log_probs', 'entropy':
                assert len(s[k]) == len(own) == len(s['response_ids'])
                assert not any(x for x, o in zip(s[k], own) if not o)
            assert sum(s['routes_valid']) == len(s['prompt_ids']) + len(own) - 1
        mean = pytest.approx(tokens / row['samples'])
        assert tokens == row['tokens'] and row['response_tokens_mean'] == mean
    assert calls > 50


@pytest.mark.parametrize('how', ['whole', 'in_parts'])
def test_the_trace_recomputes_the_logged_loss(how, request):
    "No loss sees what the tool wrote"
    assert expect_the_logged_losses(request.getfixturevalue(how)) > 1


def test_a_response_in_parts_reads_its_answers(in_parts):
    "And what is counted of them is what the policy drew"
    answers, drawn = 0, 0
    for (_, samples), row in zip(read_trace(in_parts / 'trace.jsonl'), rows(in_parts)):
        versions = []
        for s in samples:
            own = s.get('policy_mask', [1] * len(s['response_ids']))
            said = TOKENIZER.decode(s['response_ids']).split(';')[:-1]
            answered = ''.join(map(str, own)).count('10')
            assert answered == len(said) <= CFG.tools.max_calls
            for part in said:
                check_equation(part)
            answers += answered
            versions += [v for v, o in zip(s['token_versions'], own) if o]
            for k in 'rollout_log_probs', 'advantages', 'old_log_probs', 'entropy':
                assert not any(x for x, o in zip(s[k], own) if not o)
            assert sum(s['routes_valid']) == len(s['prompt_ids']) + len(own) - 1
        stale = sum(v < row['step'] - 1 for v in versions) / len(versions)
        assert row['stale_frac'] == pytest.approx(stale, abs=1e-6)
        drawn += len(versions)
    _, state = load_checkpoint(in_parts / 'partial_responses' / 'step-000004')
    drawn += sum(int(drawn_mask(Sample(**d)).sum()) for d in state['drawn'])
    assert sum(row['tokens'] for row in rows(in_parts)) == drawn
    assert answers > 5 and max(row['stale_frac'] for row in rows(in_parts)) > 0.1


@pytest.mark.parametrize('how', ['whole', 'in_parts'])
def test_a_resume_equals_the_run(how, request, tmp_path):
    whole, half = request.getfixturevalue(how), tmp_path / 'half'
    shutil.copytree(whole, half)
    shutil.rmtree(half / 'checkpoints' / 'step-000004')
    resume_run(half)
    for a, b in zip(rows(whole), rows(half), strict=True):
        told = a.keys() - {k for k in a if k.startswith(('time_', 'memory'))}
        assert {k: a[k] for k in told} == {k: b[k] for k in told}
    weights = (dict(hf_weights(from_pretrained(f / 'model'))) for f in (whole, half))
    a, b = weights
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_a_finished_run_is_evaluated_with_its_tool(whole, tmp_path):
    out = eval_command([str(whole), '--k', '2', '--out', str(tmp_path / 'e.json')], presets)
    found = json.loads(out.read_text())['sets']['heldout']['samples']
    assert any('>=' in s['response'] and ';' in s['response'] for s in found)
    for s in found:  # each answer stands behind its call
        for said in s['response'].split(';')[:-1]:
            check_equation(said)
