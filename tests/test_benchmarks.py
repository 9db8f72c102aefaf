"Every benchmark runs, in a small case, and ends with one JSON line that `make bench` can keep"

import importlib
import json
import math
import os
import runpy
import sys
import traceback
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from compassrl.algo.losses import LossConfig
from compassrl.data.prompts import make_prompts
from compassrl.data.tasks import verifiers
from compassrl.data.tokenizer import build_tokenizer
from compassrl.experience import in_order
from compassrl.loop import Stop, loss_of
from compassrl.model.policy import Policy
from compassrl.records import Sample, collate
from compassrl.rollout.requests import requests_of
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.runs.presets import smoke_cpu, tiny_cpu
from compassrl.train.torch_train import TorchTrain, accumulate_grads
from tests.support import ROOT
from tests.support import fork_server as forked
from tests.support import vllm_fork_server as vllm_forks
from tests.support.whole_runs import command, nothing

SCRIPTS = sorted(p for d in ('', 'studies') for p in (ROOT / 'benchmarks' / d).glob('[!_]*.py'))


def spawned(path, argv, env):
    "As `posix_spawn` of `python -m compassrl`, by a fork: to import it again takes six seconds"
    assert argv[:3] == [path, '-m', 'compassrl'] and env == os.environ
    if pid := os.fork():
        return pid
    code = 1
    try:
        command(argv[3:], nothing)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def quick(script):  # `python SCRIPT --quick`
    os.posix_spawn = spawned
    sys.argv = [str(script), '--quick']
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name='__main__')


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda p: p.stem)
def test_quick(script, tmp_path):
    run = vllm_forks.run if 'compassrl.rollout.vllm' in script.read_text() else forked.run
    r = run(tmp_path / 'log', quick, script, timeout=300)
    assert r.returncode == 0, r.stderr[-2000:]
    result = json.loads(r.stdout.splitlines()[-1])
    assert {'name', 'ratio', 'units', 'settings', 'machine'} <= result.keys()
    assert result['name'] == script.stem and isinstance(result['units'], str)
    assert isinstance(result['ratio'], (int, float)) and math.isfinite(result['ratio'])
    assert result['settings'] and {'cpu', 'threads', 'torch'} <= result['machine'].keys()
    assert str(ROOT) not in r.stdout.splitlines()[-1], 'no paths of this machine'


def spread_of_groups(policy, batch, loss):
    "Variance of a sum, from one gradient per group, a group whose advantages alone are not 0"
    rows = []
    for g in batch.group.unique():
        own = batch.advantages * (batch.group == g)[:, None]
        accumulate_grads(policy, replace(batch, advantages=own), loss, 10**6)
        rows.append(
            torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
        )
    return float(len(rows) * torch.stack(rows).var(0).sum())


def test_the_study_of_the_recipe_compares_the_default_of_tiny_cpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'benchmarks' / 'studies'))
    study = importlib.import_module('recipe')
    stored = json.loads((ROOT / 'benchmarks' / 'results' / 'recipe.json').read_text())
    rates = {arm: row['lr'] for arm, row in stored['table']['default'].items()}
    assert {arm: study.lowest(row) for arm, row in stored['rates'].items()} == rates
    assert set(rates) == set(study.ARMS)
    compared = replace(study.STUDY, learning_rates=rates).config('recipe', 0)
    default = replace(tiny_cpu(), steps=compared.steps)
    assert compared == default, 'what make train does'
    assert replace(study.STUDY, learning_rates=rates).config('growth', 0) != default


def test_a_race_goes_to_the_rate_that_trl_ends_with(monkeypatch, capsys):
    "By hand: one seed where TRL ends at 30 %, one that begins above the first goal of the other"
    monkeypatch.syspath_prepend(str(ROOT / 'benchmarks'))
    race = importlib.import_module('time_to_accuracy')

    def curve(each, *rates):  # evaluations, so many CPU seconds apart
        return [
            dict(steps=i, cpu_seconds=each * i, seconds=each * i, tokens=i, avg=r)
            for i, r in enumerate(rates, 1)
        ]

    trl = curve(2, 0.1, 0.15, 0.29, 0.31, 0.3, 0.28, 0.32)  # the last five: 30 %
    first = dict(default=curve(1, 0.2, 0.24, 0.31), TRL=trl)
    second = dict(default=curve(1, 0.5, 0.55, 0.59), TRL=curve(2, *[0.6] * 5))
    seeds = [dict(seed=i, before=b, curves=c) for i, b, c in ((0, 0.1, first), (1, 0.5, second))]
    found = race.summary(seeds, race.TASKS['silent'])
    levels = found['levels'].values()
    needs = {k: [level['needs'][k]['cpu_seconds'] for level in levels] for k in first}
    assert needs == dict(default=[1 + 2, 3 + 3, 3 + 3, 3 + 3], TRL=[6 + 2, 6 + 2, 6 + 2, 8 + 2])
    assert [level['needs']['default']['missed'] for level in levels] == [0, 0, 0, 1]
    assert found['ratio'] == pytest.approx(10 / 6) and found['to'] == "100% of TRL's gain"
    assert '> ' in capsys.readouterr().out

    easy = race.by_level(seeds, race.TASKS['default'])
    assert easy['50%']['needs']['TRL'] == dict(cpu_seconds=14, seconds=14, tokens=7, missed=1)
    assert easy['55%']['needs']['TRL']['cpu_seconds'] == 14 + 2, 'the second begins below 55 %'


def test_the_learning_rate_of_a_study_falls_with_its_tokens(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'benchmarks' / 'studies'))
    runner = importlib.import_module('_runner')
    base = smoke_cpu()
    optim = replace(base.optim, lr=0.1, warmup_steps=0, num_mini_batches=1, final_lr_frac=0.2)
    policy = Policy(base.policy, 0)
    engine, _ = runner.engines(replace(base, optim=optim), policy.state_dict())
    study = runner.Study('falls', {}, {}, {}, (), budget=100, marks=1)
    curve = runner.Curve(study, base, None, engine, [])
    monkeypatch.setattr(curve, 'evaluate', lambda: curve.evals.append((curve.tokens, 0.0)))
    curve.evaluate()
    sample = Sample('p', 0, [5, 6], [7, 8], torch.zeros(2), None, None, 'stop', 0)
    batch, rates = collate([sample]), []
    for tokens in (50, 40, 30):
        metrics, _ = engine.update(batch, lambda log_probs, *_: (log_probs.sum(), {}))
        rates.append(metrics['lr'])
        with pytest.raises(Stop) if curve.tokens + tokens > 100 else nullcontext():
            curve.on_step(1, dict(tokens=tokens), [], batch)
    assert rates == pytest.approx([0.1, 0.1 * 0.6, 0.1 * 0.28]) and engine.done == 1


def test_gradients_of_groups_add_up_to_the_trainers_step(monkeypatch):
    "The study of silent groups adds them up itself; a hot second wave has log-probs of its own"
    monkeypatch.syspath_prepend(str(ROOT / 'benchmarks' / 'studies'))
    residual = importlib.import_module('residual')
    del verifiers['digits']  # which the study has registered for the whole process
    assert residual.digits('1+1 #1134', '1234').reward == 0.75
    assert not residual.digits('#1134', '1234').correct and residual.digits('#7', '7').correct
    cfg = replace(smoke_cpu(), zero_variance=residual.OFF, loss=LossConfig('grpo'))
    optim, tok = replace(cfg.optim, num_mini_batches=1), build_tokenizer()
    policies = [Policy(cfg.policy, 0) for _ in range(2)]
    plain = TorchTrain(policies[0], optim)
    rollout = TorchRollout(cfg.policy, 32)
    rollout.load_weights(plain.weights(), 0)
    prompts = make_prompts('arithmetic', 3, 0.0, 0, 'train', tok)
    params = replace(cfg.rollout.params(cfg.policy.eos_ids), max_tokens=6)
    asked = requests_of(prompts, [4, 4, 2], Counter(), params)
    for hot in (1.0, 1.5):
        mine = residual.ByGroup(policies[1], optim, 2, hot)
        samples = in_order(asked, list(residual.Hotter(rollout, 2, hot).generate(asked)))
        batch = collate(samples)
        batch = replace(batch, **mine.score(batch))
        gap = (batch.old_log_probs - batch.rollout_log_probs).abs().max()
        assert gap < 1e-4 and mine.late(batch).tolist() == [s.index >= 2 for s in samples]
        lot = torch.Generator().manual_seed(0)
        pull = torch.randn(len(batch), 1, generator=lot) * batch.response_mask
        batch = replace(batch, advantages=pull, rewards=torch.zeros(len(batch)))
        if hot == 1:
            loss = loss_of(cfg, batch)
            noise = spread_of_groups(policies[0], batch, loss)
            steps = [engine.update(batch, loss)[0] for engine in (plain, mine)]
            assert steps[0]['grad_norm'] == pytest.approx(steps[1]['grad_norm'], rel=1e-4)
            assert steps[1]['gradient_noise'] == pytest.approx(noise, rel=1e-3)
            rollout.load_weights(mine.weights(), 1)


def studies_with_code():
    "Each study of the folder that has code of its own for an arm"
    sys.path.insert(0, str(ROOT / 'benchmarks' / 'studies'))
    try:
        for script in SCRIPTS:
            if script.parent.name == 'studies' and 'ways=' in script.read_text():
                found = vars(importlib.import_module(script.stem)).values()
                yield from (x for x in found if getattr(x, 'ways', None))
    finally:
        del sys.path[0]


def test_a_trial_has_the_same_name_in_every_process():
    "Its file is found again, so a study that was ended goes on"
    seen, runner = 0, None
    for study in studies_with_code():
        runner = sys.modules['_runner']
        for arm in study.ways:
            said = str(study.settings(next(iter(study.tasks)), arm, study.seeds[0], 1e-4))
            assert ' at 0x' not in said, f'{study.name}, {arm}: {said[-200:]}'
            seen += 1
        ways = {str(runner.code_of(way)) for way in study.ways.values()}
        assert len(ways) == len({*map(repr, study.ways.values())}), 'two ways have one name'
    assert seen > 40
