"The command as a user runs it: a whole run, kills and resumes, Ctrl-C, and bad input"

import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from compassrl import loop
from compassrl.config import TrainConfig
from compassrl.runs.cli import main
from compassrl.runs.report import write_report
from compassrl.runs.run import _say_rate
from compassrl.train.torch_train import OptimConfig
from tests.support import fork_server as forked
from tests.support.labs import expect_the_logged_losses

SMOKE = ['smoke-cpu', '--steps', '6', '--save-every', '2', '--trace-every', '1']
SMOKE += ['--cold-start.steps', '20']
ENV = {**os.environ, 'OMP_NUM_THREADS': '1'}


def command(args, cwd):
    os.chdir(cwd)
    main(args)


def cli(*args, cwd='.', timeout=600):
    with tempfile.TemporaryDirectory() as folder:
        return forked.run(
            Path(folder) / 'log', command, list(map(str, args)), cwd, env=ENV, timeout=timeout
        )


def start(*args):
    return subprocess.Popen(
        [sys.executable, '-m', 'compassrl', *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENV,
    )


def rows(folder, name):
    "Rows without what depends on the clock"

    def clean(d):
        return {
            k: clean(v) if isinstance(v, dict) else v
            for k, v in d.items()
            if not k.startswith('time') and k != 'timings'
        }

    return [clean(json.loads(line)) for line in (folder / name).read_text().splitlines()]


def same_model(a, b):
    return (a / 'model/model.safetensors').read_bytes() == (
        b / 'model/model.safetensors'
    ).read_bytes()


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "One run that nobody disturbed"
    folder = tmp_path_factory.mktemp('runs') / 'whole'
    with patch.dict(ENV, PICTURES='1'):
        r = cli('train', *SMOKE, '--run-dir', folder)
    assert r.returncode == 0, r.stderr
    assert r.stdout.splitlines()[-1] == str(folder)
    return folder


def test_a_run_leaves_everything(whole):
    for name in (
        'config.json',
        'metrics.jsonl',
        'trace.jsonl',
        'timings.json',
        'curves.png',
        'gantt.png',
        'report.md',
        'report.json',
        'eval_before.json',
        'eval_after.json',
        'cold_start.jsonl',
        'model/config.json',
        'model/tokenizer.json',
        'checkpoints/step-000006/manifest.json',
    ):
        assert (whole / name).stat().st_size > 0, name
    assert any((whole / 'tensorboard').iterdir())
    metrics = rows(whole, 'metrics.jsonl')
    assert [m['step'] for m in metrics] == [1, 2, 3, 4, 5, 6]
    assert all(m['rollout_train_gap'] < 1e-5 for m in metrics), (
        'the embedded engines compute the same log-probs'
    )
    assert any(m['grad_norm'] > 0 for m in metrics)


def expect_the_best(folder):
    "The earliest of the best evaluations; of steps 4 and 6, whichever it is"
    average = json.loads((folder / 'eval_after.json').read_text())['avg']
    middle = rows(folder, 'metrics.jsonl')[3]['eval_avg']
    step = 6 if average > middle else 4
    assert f'`best` is the model of step {step}: ' in (folder / 'report.md').read_text()
    best = (folder / 'best/model.safetensors').read_bytes()
    assert (best == (folder / 'model/model.safetensors').read_bytes()) == (step == 6)
    assert (folder / 'best/tokenizer.json').exists() and not (folder / '.best.tmp').exists()


def test_a_longer_plan_says_what_it_does_to_the_learning_rate(capsys):
    "A rate that falls to a tenth is stretched; one that stays is not worth a word"
    cfg = TrainConfig(steps=8, optim=OptimConfig(lr=1e-4, final_lr_frac=0.1))
    _say_rate(cfg, 4, 4)
    said = capsys.readouterr().out
    assert '5.5e-05 at step 5' in said and 'the old plan had 2.8e-05' in said
    _say_rate(cfg, 8, 4)
    _say_rate(replace(cfg, optim=OptimConfig(lr=1e-4)), 4, 4)
    assert capsys.readouterr().out == ''


def test_every_row_has_the_same_keys(whole, tmp_path):
    "Whatever a step did: evaluated or not, saved or not; what was not measured is null"
    folder = tmp_path / 'evaluated'
    r = cli('train', *SMOKE, '--run-dir', folder, '--eval-every', '4', '--keep-best')
    assert r.returncode == 0, r.stderr
    said = [line.split(':')[0] for line in r.stdout.splitlines() if ': held-out avg@2 ' in line]
    assert said == ['before RL', 'step 4', 'step 6'], 'an evaluation is said when it happens'
    assert 'may fall while held-out answers get better' in r.stdout
    expect_the_best(folder)
    for run in (whole, folder):
        kept = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
        assert len({frozenset(m) for m in kept}) == 1
        assert [m['time_checkpoint_s'] > 0 for m in kept] == [m['step'] % 2 == 1 for m in kept]
    assert [m['eval_avg'] is not None for m in kept] == [m['step'] == 4 for m in kept]


def test_the_model_opens_in_transformers(whole):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tok = AutoTokenizer.from_pretrained(whole / 'model')
    model = AutoModelForCausalLM.from_pretrained(whole / 'model')
    assert (
        tok.decode(tok('12+3=').input_ids) == '12+3='
        and model(**tok('12+3=', return_tensors='pt')).logits.shape[-1] == 99
    )


def test_the_trace_recomputes_the_logged_loss(whole):
    assert expect_the_logged_losses(whole) > 1


def test_resume_equals_an_uninterrupted_run(whole, tmp_path):
    "Promise 1: 3 steps, then 3 more, are the 6 steps bit for bit"
    folder = tmp_path / 'half'
    assert cli('train', *SMOKE, '--run-dir', folder, '--steps', '3').returncode == 0
    r = cli('resume', folder, '--steps', '6')
    assert r.returncode == 0, r.stderr
    assert r.stdout.splitlines()[-1] == str(folder)
    assert same_model(whole, folder)
    for name in ('metrics.jsonl', 'trace.jsonl'):
        assert rows(folder, name)[-1] == rows(whole, name)[-1]
    assert [m['step'] for m in rows(folder, 'metrics.jsonl')] == [1, 2, 3, 4, 5, 6]


PARTS = ['--schedule.partial-tokens', '5', '--zero-variance.sampling', 'uniform']
PARTS += ['--data.select-by', 'length', '--data.difficulty', '0.5']  # what else is kept


@pytest.fixture(scope='module')
def in_parts(tmp_path_factory):
    "One run of partial rollouts, with prompts by what became of their like"
    folder = tmp_path_factory.mktemp('runs') / 'parts'
    assert cli('train', *SMOKE, *PARTS, '--run-dir', folder).returncode == 0
    assert any(m['stale_frac'] > 0 for m in rows(folder, 'metrics.jsonl')), (
        'some responses take two steps'
    )
    assert any(m['prompts_skipped'] > 0 for m in rows(folder, 'metrics.jsonl'))
    return folder


@pytest.mark.parametrize('seed, flags', [(0, []), (1, PARTS)], ids=['whole', 'in_parts'])
def test_kill_at_any_point(tmp_path, seed, flags, request):
    "SIGKILL at random moments after the first checkpoint, mid-save included; then the same result"
    folder, rng, whole = (
        tmp_path / 'killed',
        random.Random(seed),
        request.getfixturevalue('in_parts' if flags else 'whole'),
    )
    args = 'train', *SMOKE, *flags, '--save-every', '1', '--run-dir', str(folder)
    p = forked.start(tmp_path / 'log', command, args, '.', env=ENV)
    for _ in range(3):
        deadline = time.monotonic() + 60
        while (
            p.exitcode is None
            and not list(folder.glob('checkpoints/step-*'))
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        p.join(rng.uniform(0, 0.5) if rng.random() < 0.5 else rng.uniform(0.5, 3))
        p.kill()
        p.join()
        p = forked.start(tmp_path / 'log', command, ['resume', str(folder)], '.', env=ENV)
    p.join(120)
    assert p.exitcode == 0, (tmp_path / 'log.err').read_text()
    assert same_model(whole, folder)
    assert rows(whole, 'metrics.jsonl') == rows(folder, 'metrics.jsonl')


def test_resume_from_an_older_checkpoint_in_parts(in_parts, tmp_path):
    "The newest checkpoint is lost: what was kept beside it goes back with the weights"
    folder = shutil.copytree(in_parts, tmp_path / 'run')
    shutil.rmtree(folder / 'checkpoints/step-000006')
    r = cli('resume', folder)
    assert r.returncode == 0 and 'after step 4' in r.stdout, r.stderr
    assert same_model(in_parts, folder) and rows(in_parts, 'metrics.jsonl') == rows(
        folder, 'metrics.jsonl'
    )
    for name in ('partial_responses', 'selection'):
        assert sorted(p.name for p in (folder / name).glob('step-*'))[-1] == 'step-000006'


def test_a_run_whose_selection_is_lost_does_not_go_on(in_parts, tmp_path):
    "Without it the rest would ask other prompts"
    folder = shutil.copytree(in_parts, tmp_path / 'run')
    shutil.rmtree(folder / 'selection')
    r = cli('resume', folder, '--steps', '8')
    assert r.returncode and 'selection/step-000006: missing' in r.stdout, r.stdout
    assert 'no valid checkpoint' in r.stderr


def test_ctrl_c_saves_and_says_how_to_go_on(whole, tmp_path):
    folder = tmp_path / 'stopped'
    p = start('train', *SMOKE, '--steps', '500', '--save-every', '0', '--run-dir', folder)
    while (
        p.poll() is None
        and len(
            (folder / 'metrics.jsonl').read_text().splitlines()
            if (folder / 'metrics.jsonl').exists()
            else []
        )
        < 2
    ):
        time.sleep(0.02)
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=60)
    assert p.returncode == 130, err
    assert f'compassrl resume {folder}' in out
    done = len(rows(folder, 'metrics.jsonl'))
    r = cli('resume', folder, '--steps', done + 1)
    assert r.returncode == 0, r.stderr
    assert f'after step {done}' in r.stdout


def one_line(r, *words):
    assert r.returncode not in (0, 1) or (r.returncode == 1 and 'Traceback' not in r.stderr), (
        r.stderr
    )
    assert 'Traceback' not in r.stderr
    assert all(w in r.stderr + r.stdout for w in words), r.stderr + r.stdout


@pytest.mark.parametrize(
    'args, words',
    [
        (['train', 'tiny-gpu'], ['tiny-gpu', 'tiny-cpu']),
        (['train', 'tiny-cpu', '--steps', '-3'], ['-3']),
        (['train', 'tiny-cpu', '--optim.lr', 'fast'], ['fast']),
        (['train', 'tiny-cpu', '--optim.lr', '0'], ['lr=0']),
        (['train', 'tiny-cpu', '--optim.lr', 'nan'], ['lr=nan']),
        (['train', 'tiny-cpu', '--optim.lr', 'inf'], ['lr=inf', 'finite']),
        (['train', 'tiny-cpu', '--optim.weight-decay', 'inf'], ['weight_decay=inf', 'finite']),
        (['train', 'tiny-cpu', '--cold-start.lr', 'inf'], ['lr=inf', 'finite']),
        (['train', 'tiny-cpu', '--rollout.temperature', 'inf'], ['temperature=inf', 'finite']),
        (['train', 'tiny-cpu', '--guards.max-failed-frac', '2'], ['max_failed_frac=2']),
        (['train', 'tiny-cpu', '--group-size', '1'], ['group_size=1', 'at least 2']),
        (['train', 'tiny-cpu', '--speed', '3'], ['--speed']),
        (['train', 'tiny-cpu', '--data.path', 'nowhere.jsonl'], ['nowhere.jsonl']),
        (['train', 'tiny-cpu', '--init-from', 'nowhere'], ['nowhere']),
        (['train', 'tiny-cpu', '--policy.vocab-size', '7'], ['vocab_size=7', '99']),
        (
            ['train', 'tiny-cpu', '--rollout.max-tokens', '100', '--data.max-prompt-tokens', '64'],
            ['max_position_embeddings=128'],
        ),
        (['train', 'tiny-cpu', '--loss.name', 'gpso'], ["name='gpso'", 'gspo']),
        (
            ['train', 'tiny-cpu', '--loss.clip-eps-high', '0.3'],
            ['loss.clip_eps_high=0.3', 'espo.alpha'],
        ),
        (['train', 'tiny-cpu', '--zero-variance.length-weight', '0.6'], ['length_weight=0.6']),
        (['train', 'tiny-cpu', '--espo.top-frac', '0'], ['top_frac=0']),
        (['train', 'tiny-cpu', '--router-replay', 'R4'], ['R4', 'R3']),
        (['train', 'nowhere.json'], ['nowhere.json']),
        (['resume', 'nowhere'], ['nowhere']),
        (['fly'], ['fly']),
    ],
)
def test_bad_input_is_refused_in_one_line(args, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match='^compassrl: ') as e:
        main(args)  # `test_bad_files` does the same by processes
    assert '\n' not in str(e.value) and all(w in str(e.value) for w in words)
    assert not (tmp_path / 'runs').exists(), 'refused before anything was written'


def test_bad_files(whole, tmp_path):
    empty = tmp_path / 'empty.jsonl'
    empty.write_text('')
    one_line(cli('train', 'tiny-cpu', '--data.path', empty, cwd=tmp_path), 'empty.jsonl')
    bad = tmp_path / 'bad.jsonl'
    bad.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2="}\n')
    one_line(cli('train', 'tiny-cpu', '--data.path', bad, cwd=tmp_path), 'bad.jsonl:2', 'answer')
    config = json.loads((whole / 'config.json').read_text())
    config['optim']['momentum'] = 0.9
    wrong = tmp_path / 'wrong.json'
    wrong.write_text(json.dumps(config))
    one_line(cli('train', wrong, cwd=tmp_path), 'optim.momentum')
    model = tmp_path / 'model'
    shutil.copytree(whole / 'model', model)
    weights = (model / 'model.safetensors').read_bytes()
    (model / 'model.safetensors').write_bytes(weights[: len(weights) // 2])
    one_line(cli('train', 'tiny-cpu', '--init-from', model, cwd=tmp_path), 'model.safetensors')
    one_line(cli('train', 'smoke-cpu', '--run-dir', whole), 'not empty')
    useless = tmp_path / 'useless.jsonl'
    for verifier, answer, words in (
        ('code', 'assert f(1) == 1', 'no JSON'),
        ('countdown_expression', '7', "'7' is not like"),
    ):
        useless.write_text(json.dumps(dict(prompt='f', answer=answer, verifier=verifier)))
        one_line(cli('train', 'tiny-cpu', '--data.path', useless), 'useless.jsonl:1', words)
    tensors = load_file(whole / 'model/model.safetensors')
    tensors['model.norm.weight'][3] = float('nan')
    save_file(tensors, model / 'model.safetensors', dict(format='pt'))
    flags = '--init-from', model, '--policy.max-position-embeddings', '128'
    r = cli('train', 'smoke-cpu', *flags, cwd=tmp_path)
    one_line(r, 'model.norm.weight is not finite')


def test_a_run_that_cannot_learn_says_so_and_names_the_last_good_checkpoint(tmp_path):
    "A learning rate that destroys the weights: nothing of that is kept"
    folder = tmp_path / 'run'
    warm = '--optim.lr', '9e18', '--optim.warmup-steps', '0', '--optim.grad-clip', '0'
    r = cli('train', *SMOKE, '--run-dir', folder, *warm)
    one_line(r, 'step 1: the update', 'not finite', f'{folder}/checkpoints/step-000000')
    assert (folder / 'metrics.jsonl').read_text() == ''
    assert not (folder / 'model').exists()
    assert [p.name for p in (folder / 'checkpoints').glob('step-*')] == ['step-000000']
    for path in folder.rglob('*.safetensors'):
        assert all(t.isfinite().all() for t in load_file(path).values() if t.is_floating_point())
    r = cli('train', *SMOKE, '--run-dir', tmp_path / 'cold', '--cold-start.lr', '9e18')
    one_line(r, 'cold start step 1: the update with lr=', 'not finite')
    assert not (tmp_path / 'cold/start/model.safetensors').exists()


def test_a_run_that_breaks_later_names_the_checkpoint_before(tmp_path, monkeypatch):
    "From the fourth step on the loss is infinite; checkpoints are of steps 0, 2 and 4"
    loss_of, steps = loop.loss_of, itertools.count(1)

    def spoiled(cfg, batch):
        good, bad = loss_of(cfg, batch), next(steps) >= 4

        def loss(*args):
            value, metrics = good(*args)
            value = value + math.inf if bad else value
            return value, metrics | dict(loss=value.detach())

        return loss

    monkeypatch.setattr(loop, 'loss_of', spoiled)
    folder = tmp_path / 'run'
    flags = '--run-dir', folder, '--keep-checkpoints', '9', '--guards.max-lost-steps', '2'
    with pytest.raises(SystemExit) as e:
        main(['train', *SMOKE, *map(str, flags)])
    said = str(e.value)
    assert said.startswith('compassrl: step 5: the loss or its gradient is not finite')
    assert said.endswith(f'the last good checkpoint is {folder}/checkpoints/step-000002')
    assert '\n' not in said and 'max_lost_steps' in said
    kept = [strict(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    assert [m['loss'] is None for m in kept] == [m['num_not_finite'] > 0 for m in kept]
    assert [m['loss'] is None for m in kept] == [False, False, False, True, True]
    assert said.endswith(write_report(folder)['failed'])
    assert 'has ended by itself: `step 5: the loss' in (folder / 'report.md').read_text()
    monkeypatch.undo()
    main(['resume', str(folder)])
    assert not (folder / 'failed.json').exists(), 'it went on'
    assert 'ended by itself' not in (folder / 'report.md').read_text()


def multiply_weights(monkeypatch, after, factor):
    "When so many updates have been made and this one, too"
    update = loop._update

    def also_multiply(cfg, step, engine, *args):
        out = update(cfg, step, engine, *args)
        if step == after:
            with torch.no_grad():
                torch._foreach_mul_([*engine.policy.parameters()], factor)
        return out

    monkeypatch.setattr(loop, '_update', also_multiply)


@pytest.mark.parametrize('keep, named', [(1, 'start'), (9, 'checkpoints/step-000002')])
def test_weights_that_overflow_name_what_is_good_and_there(tmp_path, monkeypatch, keep, named):
    "The third update makes them too large; its checkpoint is written, and may be the only one"
    multiply_weights(monkeypatch, 2, 1e10)
    folder = tmp_path / 'run'
    flags = '--run-dir', folder, '--save-every', '1', '--keep-checkpoints', keep
    with pytest.raises(SystemExit) as e:
        main(['train', *SMOKE, *map(str, flags)])
    said = str(e.value)
    assert said.startswith('compassrl: step 4: all ') and 'overflowed' in said and '\n' not in said
    paths = [Path(w.strip(',')) for w in said.split() if w.startswith(str(folder))]
    assert paths == [folder / named] and paths[0].is_dir()
    assert said.endswith(write_report(folder)['failed'])


@pytest.mark.parametrize(
    'flags, named',
    [
        (('--keep-best', '--eval-every', '1'), 'best'),
        (('--eval-every', '1', '--keep-checkpoints', '9'), 'checkpoints/step-000002'),
        (('--eval-every', '1', '--keep-checkpoints', '1'), 'start'),
        (('--eval-every', '0'), 'start'),
    ],
)
def test_a_policy_that_is_destroyed_and_finite_names_what_to_go_back_to(
    tmp_path, monkeypatch, capsys, flags, named
):
    "Three steps of hardly any learning, one that leaves every weight finite and the policy useless"
    multiply_weights(monkeypatch, 3, -3.0)

    def train(*flags):
        main(['train', *SMOKE, '--optim.lr', '1e-12', *map(str, flags)])
        (said,) = (x for x in capsys.readouterr().out.splitlines() if 'worse than before RL' in x)
        return said, (flags[1] / 'report.md').read_text()

    folder, worse = tmp_path / 'run', '**The policy is worse than at the start**: go back to '
    said, page = train('--run-dir', folder, '--cold-start.steps', '120', *flags)
    assert f': go back to {folder / named}, lower optim.lr' in said and (folder / named).is_dir()
    assert f'{worse}`{named}`.' in page
    if '0' in flags:
        begun = '--init-from', folder / 'start', '--cold-start.steps', '0', *flags
        said, page = train('--run-dir', tmp_path / 'again', *begun)
        assert f': go back to {folder}/start, lower' in said
        assert f'{worse}the model of `init_from`.' in page


def strict(text):
    def refuse(word):
        raise AssertionError(f'{word} is not JSON')

    return json.loads(text, parse_constant=refuse)


def test_verdicts_that_all_fail_end_a_run_with_what_the_verifier_said(tmp_path):
    "Answers that no mathematics can be read from"
    data, folder = tmp_path / 'data.jsonl', tmp_path / 'run'
    rows = [dict(prompt=f'{i}+1=', answer='\\boxed{}', verifier='maths') for i in range(24)]
    data.write_text('\n'.join(json.dumps(r) for r in rows))
    flags = '--run-dir', folder, '--data.path', data, '--cold-start.steps', '0', '--eval-k', '1'
    small = '--prompts-per-step', '2', '--group-size', '2', '--rollout.max-tokens', '4'
    small += '--rewards.wall-s', '120'  # the first verdict waits for its sandbox
    r = cli('train', *SMOKE, *flags, *small)
    one_line(r, "evaluation 'heldout': ", 'responses have no verdict', 'is no mathematics')
    assert not (folder / 'eval_before.json').exists(), 'no average of 0 that says nothing'


def test_bad_checkpoints(whole, tmp_path):
    folder = tmp_path / 'run'
    shutil.copytree(whole, folder)
    newest = folder / 'checkpoints/step-000006'
    victim = max(newest.glob('*.safetensors'), key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-9])
    r = cli('resume', folder, '--steps', '7')
    assert r.returncode == 0 and 'torn' in r.stdout and 'after step 4' in r.stdout, (
        r.stdout + r.stderr
    )
    shutil.rmtree(folder / 'checkpoints')
    one_line(cli('resume', folder), 'metrics.jsonl has steps', 'no checkpoint')


def test_the_screen_drops_prompts_and_a_resume_remembers(tmp_path):
    "Before RL: prompts that are always or never solved go; the rest is what is asked"
    folder = tmp_path / 'screened'
    args = [
        'smoke-cpu',
        '--steps',
        '2',
        '--save-every',
        '1',
        '--trace-every',
        '1',
        '--zero-variance.screen-samples',
        '8',
        '--prompts-per-step',
        '12',
        '--run-dir',
        folder,
    ]
    r = cli('train', *args)
    assert r.returncode == 0, r.stderr
    kept = json.loads((folder / 'screen.json').read_text())
    assert f'{len(kept)} of 60' in r.stdout and 12 <= len(kept) == len(set(kept)) < 60
    assert cli('resume', folder, '--steps', '4').returncode == 0
    asked = {t['prompt_id'] for t in rows(folder, 'trace.jsonl') if t['kind'] == 'sample'}
    assert (
        asked <= set(kept)
        and len(asked) > 30
        and [m['step'] for m in rows(folder, 'metrics.jsonl')] == [1, 2, 3, 4]
    )
    strict = '--prompts-per-step', '60', '--cold-start.steps', '10'
    r = cli('train', *args[:-1], tmp_path / 'strict', *strict)
    one_line(r, 'screen_samples=8', 'prompts_per_step=60')
