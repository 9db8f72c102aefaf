"Every benchmark runs, in a small case, and ends with one JSON line that `make bench` can keep"

import importlib
import itertools
import json
import math
import os
import runpy
import sys
import traceback
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from compassrl.algo.losses import LossConfig
from compassrl.data.prompts import make_prompts
from compassrl.data.tasks import verifiers
from compassrl.data.tokenizer import build_tokenizer
from compassrl.experience import in_order
from compassrl.loop import Stop, loss_of
from compassrl.model.merge import MergeConfig, merge_checkpoints
from compassrl.model.policy import Policy
from compassrl.model.pretrained import from_pretrained, hf_weights, save_pretrained
from compassrl.records import Sample, Verdict, collate
from compassrl.rollout.requests import requests_of
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.runs.presets import smoke_cpu, tiny_cpu
from compassrl.train.sft import solution_batch
from compassrl.train.torch_train import OptimConfig, TorchTrain, accumulate_grads
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


def test_by_the_clock_the_faster_trl_counts(monkeypatch, capsys):
    "By hand: two threads take 6 s to TRL's 8 s; ours, evaluated up to its goal, takes 2 s"
    monkeypatch.syspath_prepend(str(ROOT / 'benchmarks'))
    clock = importlib.import_module('two_cores')

    def curve(each, cores, *rates):
        return [
            dict(steps=i, cpu_seconds=cores * each * i, seconds=each * i, tokens=i, avg=r)
            for i, r in enumerate(rates, 1)
        ]

    kept = [
        ({k: v for k, v in row.items() if k != 'avg'}, row['avg'])
        for row in curve(1, 1.5, 0.2, 0.31, 0.25, 0.4)
    ]
    ahead = clock.evaluated(SimpleNamespace(accuracy=float), kept, 0.31)
    assert ahead == curve(1, 1.5, 0.2, 0.31), 'no evaluation after the goal'
    trl = 0.1, 0.15, 0.29, 0.31, 0.31, 0.31, 0.33  # the last five: 31 %
    curves = {'TRL': curve(2, 1, *trl), clock.THREADS: curve(1.5, 2, *trl), clock.AHEAD: ahead}
    seeds = [
        dict(seed=i, before=0.1, curves=curves | {'default': curve(each, 1, 0.2, 0.32)})
        for i, each in enumerate((1.5, 2.5))
    ]
    found = clock.summary(seeds, clock.TASKS['silent'])
    assert found['ratio'] == pytest.approx(6 / 2)
    factors = {k: v[0] for k, v in found['factors'].items()}
    assert factors == pytest.approx(dict(both=4, threads=3, one_core=math.sqrt(1.5 * 2.5)))
    assert found['levels'][found['to']]['ratios'][clock.AHEAD] == pytest.approx(8 / 2)
    assert '3.00 times as fast by the clock (goal 5)' in capsys.readouterr().out


def test_beta2_reaches_trl_and_what_its_optimiser_has_is_looked_at(monkeypatch, tmp_path):
    "test_quick asks TRL itself. Here: what is sent, and what an optimiser with other betas gives"
    monkeypatch.syspath_prepend(str(ROOT / 'benchmarks'))
    race = importlib.import_module('time_to_accuracy')
    for task in race.TASKS.values():
        found = {k: race.grpo_arguments(peer)[1] for k, peer in task.peers().items()}
        betas = {k: arguments.pop('adam_beta2') for k, arguments in found.items()}
        assert betas == {'TRL': 0.95, race.OTHER: 0.999}
        assert found['TRL'] == found[race.OTHER], 'nothing else differs'
        optim = race.same_recipe(tiny_cpu(), task.peers()['TRL']).optim
        assert (optim.betas, optim.lr) == ((0.9, betas['TRL']), task.rate)
    assert tiny_cpu().optim.betas[1] == 0.95, 'what the other one stands for'

    sent = {}
    monkeypatch.setattr(race.Trl, '__init__', lambda self, script, spec, *_: sent.update(spec))
    data = SimpleNamespace(train=[], eos_id=(1,))
    start = SimpleNamespace(cfg=tiny_cpu(), data=data, model='m', folder=tmp_path)
    start.responses = lambda num: []
    monkeypatch.setattr(race, 'prompts_of_step', lambda *_: [])
    monkeypatch.setattr(race, 'read_shards', lambda path: 'the weights')
    peer = race.Peer(start, task.peers()['TRL'])
    assert sent['grpo_args']['adam_beta2'] == 0.95
    monkeypatch.setattr(peer, 'ask', lambda _: dict(saved=True, betas=[[0.9, 0.95]]))
    assert peer.weights() == 'the weights'
    monkeypatch.setattr(peer, 'ask', lambda _: dict(saved=True, betas=[[0.9, 0.999]]))
    with pytest.raises(AssertionError, match='0.999'):
        peer.weights()


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


def test_a_prompt_that_stays_silent_is_asked_hotter_and_scored_at_its_temperature(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'benchmarks' / 'studies'))
    residual = importlib.import_module('residual')
    cfg, tok = smoke_cpu(), build_tokenizer()
    prompts = make_prompts('arithmetic', 3, 0.0, 0, 'train', tok)
    ids = [p.id for p in prompts]
    history = residual.Heated(None, prompts, cfg)
    assert {history.heat(p.token_ids) for p in prompts} == {1.0}
    heats = []
    for _ in range(4):
        history.took({ids[0]: True, ids[1]: False})
        heats.append([history.heat(p.token_ids) for p in prompts])
    assert [h[0] for h in heats] == pytest.approx([1.15, 1.3, 1.45, 1.45])
    assert {x for h in heats for x in h[1:]} == {1.0}
    history.took({ids[2]: True})
    policy = Policy(cfg.policy, 0)
    rollout = TorchRollout(cfg.policy, 32)
    engine = residual.ByPrompt(policy, replace(cfg.optim, num_mini_batches=1), history)
    rollout.load_weights(engine.weights(), 0)
    params = replace(cfg.rollout.params(cfg.policy.eos_ids), max_tokens=6)
    asked = requests_of(prompts, [2, 2, 2], Counter(), params)
    batch = collate(in_order(asked, list(residual.Scheduled(rollout, history).generate(asked))))
    assert engine.heat(batch).tolist() == pytest.approx([1.45] * 2 + [1.0] * 2 + [1.15] * 2)

    def gaps(found):
        return (found['old_log_probs'] - batch.rollout_log_probs).abs().amax(1)

    assert gaps(engine.score(batch)).max() < 1e-4
    cold = gaps(TorchTrain(policy, engine.config).score(batch))
    assert (cold > 1e-3).tolist() == [True] * 2 + [False] * 2 + [True] * 2
    history.took({ids[0]: False})
    assert history.heat(prompts[0].token_ids) == 1.0, 'a signal: back to 1'


def test_an_ensemble_pays_silent_groups_alone_and_keeps_right_above_wrong(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'benchmarks' / 'studies'))
    ensemble = importlib.import_module('_ensemble')
    policy, zero = Policy(smoke_cpu().policy, 0), tiny_cpu().zero_variance
    right = [0, 0, 0, 1, 1, 1, 0, 1, 0]  # three groups: all wrong, all right, both
    lot = torch.Generator().manual_seed(0)
    samples = []
    for i, r in enumerate(right):
        ids = torch.randint(5, 60, (3 + i % 3,), generator=lot).tolist()
        said = Sample(str(i // 3), i % 3, [7, 8 + i // 3], ids, torch.zeros(len(ids)), *[None] * 2,
                      'stop', 0)  # fmt: skip
        said.verdict = Verdict(float(r), bool(r))
        samples.append(said)
    plain = ensemble.shape_rewards(samples, 48, zero)
    members = ensemble.Ensemble(policy, 'mean', 0)
    assert torch.equal(members.rewards(samples, 48, zero), plain), 'who knows nothing pays nothing'
    for _ in range(3):
        members.learn(samples)
    assert [len(m.shares) for m in members.members] == [27] * ensemble.MEMBERS
    assert len({tuple(m.shares.tolist()) for m in members.members}) == ensemble.MEMBERS
    for by in ('mean', 'spread'):
        members.by = by
        more = members.rewards(samples, 48, zero) - plain
        assert more[:6].abs().min() > 0 and not more[6:].any(), 'the third group has a signal'
        assert plain[3:6].min() + more[3:6].min() > plain[:3].max() + more[:3].max()
    said = ensemble.opinions(torch.tensor([[2.0, 0.0], [0.0, 2.0]]) * 99, torch.tensor([0, 0]))
    assert said.tolist() == [[1, -1], [-1, 1]] and not ensemble.paid(said, 'mean').any()
    assert ensemble.paid(said, 'spread').tolist() == pytest.approx([0.4, 0.4])
    assert ensemble.paid(said[:1], 'mean').tolist() == pytest.approx([0.2, -0.2])
    told = torch.tensor([3.0, 1.0, 1.0, 9.0])
    both = torch.tensor([True, False, True, False])
    assert ensemble.ordered_pairs(told, both, torch.tensor([0, 0, 0, 1])) == (2, 1.5)


def moved(policy, lot, size=0.05):
    "A copy in fp64 whose weights differ by multiples of 2^-10: sums of such have no rounding"
    out = Policy(policy.config).double()
    with torch.no_grad():
        for p, old in zip(out.parameters(), policy.parameters()):
            change = size * torch.randn(old.shape, generator=lot, dtype=torch.float64)
            p.copy_(((old + change) * 2**10).round() / 2**10)
    return out


@pytest.mark.parametrize('dense', [False, True])
def test_learned_coefficients_of_a_merge_have_the_gradient_of_differences(dense, monkeypatch):
    "Against central differences in fp64; (w, 1 - w) is the linear merge of files, bit for bit"
    monkeypatch.syspath_prepend(str(ROOT / 'benchmarks' / 'studies'))
    study, code = map(importlib.import_module, ('merge', '_merge_weights'))
    shape = replace(smoke_cpu().policy, max_position_embeddings=64)
    lot, tok = torch.Generator().manual_seed(0), build_tokenizer()
    base = moved(Policy(study.dense(shape) if dense else shape).double(), lot)
    children = [moved(base, lot) for _ in range(2)]
    blend = code.Blend(base, children)
    batch = solution_batch(make_prompts('arithmetic', 3, 1, 0, 'train', tok), tok)
    for what, shape in itertools.product(('loss', 'entropy'), ((2,), (2, len(blend.base)))):
        c = 0.5 + 0.1 * torch.randn(shape, generator=lot, dtype=torch.float64)
        c.requires_grad_()

        def value(c):
            return blend.measure(blend.weights(c), batch, what)

        (grad,) = torch.autograd.grad(value(c), c)
        for at in torch.randperm(c.numel(), generator=lot)[:6].tolist():
            step = torch.zeros(c.numel(), dtype=torch.float64)
            step[at] = 1e-5
            step = step.view(shape)
            with torch.no_grad():
                slope = (value(c + step) - value(c - step)).item() / 2e-5
            assert grad.flatten()[at].item() == pytest.approx(slope, rel=1e-6, abs=1e-9)
    policy = blend.policy(blend.weights(c.detach()))
    want = -TorchTrain(policy, OptimConfig()).score(batch)['old_log_probs'][batch.response_mask]
    loss = blend.measure(blend.weights(c), batch, 'loss')
    assert loss.item() == pytest.approx(want.mean().item(), rel=1e-6)


@pytest.mark.parametrize('weight', [0.0, 0.25, 1.0])
def test_coefficients_that_sum_to_one_are_the_linear_merge_of_files(weight, monkeypatch, tmp_path):
    "Bit for bit, as one pair for all tensors or repeated for each"
    monkeypatch.syspath_prepend(str(ROOT / 'benchmarks' / 'studies'))
    code = importlib.import_module('_merge_weights')
    lot = torch.Generator().manual_seed(1)
    base = moved(Policy(smoke_cpu().policy).double(), lot)
    children = [moved(base, lot) for _ in range(2)]
    folders = [tmp_path / str(i) for i in range(2)]
    for child, folder in zip(children, folders):
        save_pretrained(child, folder)
    cfg = MergeConfig(method='linear', weights=(weight, 1 - weight))
    merge_checkpoints(folders, tmp_path / 'out', cfg)
    wanted = dict(hf_weights(from_pretrained(tmp_path / 'out')))
    blend = code.Blend(base, children)
    c = code.FORMS['one weight'].coefficients(torch.tensor(weight).double())
    for each in (c, c[:, None].expand(2, len(blend.base))):
        found = dict(hf_weights(blend.policy(blend.weights(each))))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[n].double(), w.double()) for n, w in wanted.items())


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
