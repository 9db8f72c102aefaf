"The command as people type it: pages of help, files, completion, what is said while it runs"

import io
import json
import os
import pty
import subprocess
import sys
import termios
from contextlib import redirect_stderr, suppress
from pathlib import Path

import pytest

from compassrl.algo.loss_registry import policy_losses
from compassrl.config import TrainConfig
from compassrl.runs.cli import main, parse_resume, parse_train
from compassrl.runs.log import Progress, progress_bar, set_level
from compassrl.runs.presets import flag, presets, settings_of, tiny_cpu

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT), 'COLUMNS': '100'}
PAGES = [
    [],
    ['--help'],
    ['--version'],
    ['train', '--help'],
    ['train', 'tiny-cpu', '--help'],
    ['train', 'one-node', '--help-all'],
    ['resume', '--help'],
]
HEAVY = 'torch', 'tokenizers', 'safetensors', 'numpy', 'compassrl.sandbox.isolated'


def process(code, *args):
    return subprocess.run(
        [sys.executable, '-c', code, *args], env=ENV, capture_output=True, text=True, timeout=600
    )


def here(args, capsys, monkeypatch):
    "What a page says with torch itself"
    monkeypatch.setenv('COLUMNS', '100')
    try:
        main(args)
    except SystemExit as e:
        assert not e.code
    return capsys.readouterr().out


NOTHING_HEAVY = """
import contextlib, io, json, sys
import compassrl.config
loaded, pages = [[m for m in {heavy} if m in sys.modules]], []
from compassrl.__main__ import main
for args in json.loads(sys.argv[1]):
    sys.argv, out = ['compassrl', *args], io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main()
    pages.append(out.getvalue())
    loaded.append([m for m in {heavy} if m in sys.modules])
print(json.dumps([pages, loaded]))
"""


def test_settings_and_pages_of_help_import_nothing_heavy():
    "Neither torch nor tokenizers nor the sandbox, by the entry point as it is installed"
    r = process(NOTHING_HEAVY.format(heavy=HEAVY), json.dumps(PAGES))
    assert not r.returncode, r.stderr
    pages, loaded = json.loads(r.stdout)
    assert all(pages) and loaded == [[]] * (1 + len(PAGES)), loaded


def test_completion_knows_every_command_and_flag():
    r = process('from compassrl.__main__ import main; main()', '--tyro-print-completion', 'bash')
    assert not r.returncode, r.stderr
    for word in ('train', 'resume', 'report', 'merge', 'pipeline', '--optim.lr', '--until'):
        assert word in r.stdout, word


@pytest.mark.parametrize('preset', presets)
def test_short_help_has_the_defaults_of_its_preset(preset, capsys, monkeypatch):
    page = here(['train', preset, '--help'], capsys, monkeypatch)
    values = settings_of(presets[preset]())
    lines = {x.split()[0]: x for x in page.splitlines() if x.startswith('  --')}
    assert 15 < len(lines) < 30
    for name, line in lines.items():
        value = values[name[2:].replace('-', '_')]
        told = ' '.join(value) if isinstance(value, tuple) else str(value) or "''"
        assert line.endswith(f'default: {told})'), line
    assert f'{len(values) - len(lines)} more settings' in page


def test_help_shows_the_choices_of_a_loss(capsys, monkeypatch):
    names = ', '.join(policy_losses)
    for args in (['train', 'tiny-cpu', '--help'], ['train', 'tiny-cpu', '--help-all']):
        page = ' '.join(here(args, capsys, monkeypatch).replace('│', ' ').split())
        assert f'(one of {names}; default: espo)' in page


def test_resume_help_has_the_values_of_the_run(tmp_path, capsys, monkeypatch):
    (tmp_path / 'config.json').write_text(json.dumps(dict(steps=77, vllm=dict(num_replicas=5))))
    page = ' '.join(here(['resume', str(tmp_path), '--help-all'], capsys, monkeypatch).split())
    assert 'default: 77)' in page and 'default: 5)' in page
    page = here(['resume', '--help'], capsys, monkeypatch)
    assert '--steps' in page and 'default' not in page


# ---- files


FILES = {
    'a.json': '{"steps": 3, "router_replay": "off", "optim": {"lr": 2e-4}, '
    '"loss": {"name": "dapo"}}',
    'a.yaml': 'steps: 3\nrouter_replay: off\noptim: {lr: 2e-4}\nloss:\n  name: dapo\n',
    'a.yml': '# mine\nsteps: 3\nrouter_replay: "off"\noptim:\n  lr: 0.0002\nloss: {name: dapo}\n',
    'a.toml': 'steps = 3\nrouter_replay = "off"\nloss.name = "dapo"\n[optim]\nlr = 2e-4\n',
}


@pytest.mark.parametrize('name', FILES)
def test_a_config_in_any_language(tmp_path, name):
    (tmp_path / name).write_text(FILES[name])
    cfg = parse_train([str(tmp_path / name)])
    assert (cfg.steps, cfg.router_replay, cfg.optim.lr, cfg.loss.name) == (3, 'off', 2e-4, 'dapo')
    changed = parse_train([str(tmp_path / name), '--steps', '9', '--optim.betas', '0.5', '0.6'])
    assert (changed.steps, changed.optim.betas, changed.loss.name) == (9, (0.5, 0.6), 'dapo')


@pytest.mark.parametrize('name', presets)
def test_a_preset_survives_yaml(tmp_path, name):
    import dataclasses

    import yaml

    cfg = presets[name]()
    plain = json.loads(json.dumps(dataclasses.asdict(cfg)))
    (tmp_path / 'a.yaml').write_text(yaml.safe_dump(plain))
    assert parse_train([str(tmp_path / 'a.yaml')]) == cfg


def test_words_for_a_run_that_goes_on(tmp_path):
    (tmp_path / 'config.json').write_text(json.dumps(dict(steps=7, seed=3)))
    folder, cfg = parse_resume([str(tmp_path), '--steps', '9', '--quiet', '--parallel.ep', '2'])
    assert folder == str(tmp_path) and (cfg.steps, cfg.seed, cfg.parallel.ep) == (9, 3, 2)
    assert parse_resume([str(tmp_path)])[1].steps == 7


def test_a_preset_by_either_spelling():
    assert parse_train(['tiny_cpu', '--seed', '4']).seed == 4
    assert (
        parse_train(['tiny_cpu']) == parse_train(['tiny-cpu', '--log-level', 'debug']) == tiny_cpu()
    )


# ---- completion


def completed(script, *words):
    "What bash offers for the last word"
    line = ' '.join(words)
    code = (
        f'source {script}\nCOMP_WORDS=({line!s} ""); COMP_WORDS[{len(words) - 1}]={words[-1]!r}\n'
        f'COMP_CWORD={len(words) - 1}; COMP_LINE={line!r}; COMP_POINT={len(line)}\n'
        '_tyro_compassrl compassrl; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    r = subprocess.run(['bash', '-c', code], capture_output=True, text=True, timeout=60)
    return set(r.stdout.split())


def test_bash_completes_commands_presets_and_flags(tmp_path, capsys, monkeypatch):
    script = tmp_path / 'compassrl.bash'
    script.write_text(here(['--tyro-print-completion', 'bash'], capsys, monkeypatch))
    assert {'resume', 'report'} & completed(script, 'compassrl', 're') == {'resume', 'report'}
    assert 'tiny-cpu' in completed(script, 'compassrl', 'train', 'ti')
    assert '--steps' in completed(script, 'compassrl', 'train', 'tiny-cpu', '--ste')
    flags = completed(script, 'compassrl', 'train', 'tiny-cpu', '--optim.')
    assert {'--optim.lr', '--optim.betas'} <= flags


# ---- who reads


def test_a_pipe_that_is_closed_is_no_error():
    code = (
        f'{sys.executable} -m compassrl train tiny-cpu --help-all | true; echo ${{PIPESTATUS[0]}}'
    )
    r = subprocess.run(['bash', '-c', code], env=ENV, capture_output=True, text=True, timeout=600)
    assert r.stderr == '' and r.stdout.strip() in ('0', '141')


def lines(total, done=0, **kw):
    file = io.StringIO()
    with redirect_stderr(file):
        progress = Progress(total, 'RL', done, **kw)
        for i in range(done, total):
            progress.step(f'reward {i}')
        progress.close()
    return file.getvalue().splitlines()


THEIRS = {  # TRL, verl, OpenRLHF and slime
    '--num-generations': '--group-size',
    '--model': '--init-from',
    '--model_name_or_path': '--init-from',
    '--learning-rate': '--optim.lr',
    '--per-device-train-batch-size': '--prompts-per-step',
    '--max_completion_length': '--rollout.max-tokens',
    '--beta': '--loss.kl-coef',
    'data.train_files=x': '--data.path',
    'data.max_prompt_length=9': '--data.max-prompt-tokens',
    'actor_rollout_ref.rollout.n=8': '--group-size',
    'actor_rollout_ref.model.path=x': '--init-from',
    'actor_rollout_ref.actor.optim.lr=1e-6': '--optim.lr',
    'trainer.test_freq=5': '--eval-every',
    '--n_samples_per_prompt': '--group-size',
    '--rollout-max-response-len': '--rollout.max-tokens',
    '--algorithm.adv_estimator': '--advantages.estimator',
    'algorithm.adv_estimator=grpo': '--advantages.estimator',
    '--actor_rollout_ref.rollout.n': '--group-size',
    '--data.train_batch_size': '--prompts-per-step',
    '--algorithm.kl_ctrl.kl_coef': '--loss.kl-coef',
    '--trainer.total_epochs': '--steps',
    '--epsilon_high': '--loss.clip-eps-high',
    '--loss_type': '--loss.name or --loss.aggregation',
    '--actor_rollout_ref.actor.loss_agg_mode': '--loss.aggregation',
    '--actor_rollout_ref.rollout.temperature': '--rollout.temperature',
    '--actor_rollout_ref.rollout.name': '--rollout-engine',
    '--rollout.tensor_model_parallel_size': '--parallel.tp or --vllm.tensor-parallel',
    '--num_iterations': '--optim.num-mini-batches',
    '--lr_scheduler_type': '--optim.final-lr-frac',
}
NONE = {  # what has no setting, and why
    '--critic.optim.lr': 'there is no critic',
    '--algorithm.use_kl_in_reward': 'a term of the loss, by --loss.kl-coef',
    'actor_rollout_ref.actor.entropy_coeff=0': 'no bonus for entropy',
    '--trainer.n_gpus_per_node': 'torchrun --nproc-per-node',
}


@pytest.mark.parametrize('word, ours', THEIRS.items())
def test_the_word_of_another_trainer_is_answered_with_ours(word, ours):
    with pytest.raises(ValueError, match=f'did you mean {ours}[?]'):
        parse_train(['smoke-cpu', word])


@pytest.mark.parametrize('word, why', NONE.items())
def test_what_no_setting_does_is_said(word, why):
    with pytest.raises(ValueError, match=why) as e:
        parse_train(['smoke-cpu', word, '1'])
    assert 'did you mean' not in str(e.value) and '\n' not in str(e.value)


def test_each_word_of_another_trainer_leads_to_a_setting():
    from compassrl.runs.cli import _theirs

    ours, none = _theirs()
    known = {*map(flag, settings_of(TrainConfig()))}
    assert {f for flags in ours.values() for f in flags} <= known and not {*ours} & {*none}
    said = {w.rstrip(',;') for why in none.values() for w in why.split() if w.startswith('--')}
    assert {w for w in said if w not in ('--nproc-per-node', '--nnodes')} <= known


def test_the_short_help_names_what_a_user_brings(capsys):
    with pytest.raises(SystemExit):
        main(['train', 'tiny-cpu', '--help'])
    page = capsys.readouterr().out
    for name in ('--rewards.function', '--data.eval-path', '--data.columns', '--data.path'):
        assert f'  {name} ' in page


def test_progress_in_a_file_is_plain_lines(monkeypatch):
    monkeypatch.delenv('TQDM_DISABLE')
    assert lines(3) == ['RL 1/3: reward 0', 'RL 2/3: reward 1', 'RL 3/3: reward 2']
    assert lines(5, done=3) == ['RL 4/5: reward 3', 'RL 5/5: reward 4']
    assert [x.split(':')[0] for x in lines(1001, lines=10)][-2:] == ['RL 909/1001', 'RL 1001/1001']
    assert len(lines(1001, lines=10)) <= 10
    set_level('warning')
    try:
        assert lines(3) == []
    finally:
        set_level('info')


def test_a_merge_draws_no_bar_into_a_file(monkeypatch):
    monkeypatch.delenv('TQDM_DISABLE')
    with redirect_stderr(io.StringIO()) as err:
        tick = progress_bar(8)
        for _ in range(8):
            tick()
    assert err.getvalue() == 'merge 2/8\nmerge 4/8\nmerge 6/8\nmerge 8/8\n'


def test_progress_in_a_terminal_is_a_bar(monkeypatch):
    monkeypatch.delenv('TQDM_DISABLE')
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with os.fdopen(theirs, 'w') as terminal, redirect_stderr(terminal):
        progress = Progress(2, 'RL')
        progress.step('reward 1')
        progress.step('reward 2')
        progress.close()
    said = b''
    with suppress(OSError):  # at the end of what was written
        while more := os.read(ours, 10_000):
            said += more
    os.close(ours)
    said = said.decode()
    assert '2/2' in said and '\r' in said and 'reward 2' in said


@pytest.mark.parametrize('words, told', [(['--quiet'], 0), ([], 3), (['--log-level', 'debug'], 5)])
def test_how_much_a_run_says(tmp_path, monkeypatch, capsys, words, told):
    "Steps on standard error; the run directory is the last line of standard output"
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('TQDM_DISABLE')
    size = ['--cold-start.steps', '1', '--steps', '2', '--eval-every', '0', *words]
    try:
        main(['train', 'smoke-cpu', '--run-dir', 'run', *size])
    finally:
        set_level('info')
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == 'run' and '\r' not in err
    steps = [x for x in err.splitlines() if x.startswith(('RL ', 'cold start '))]
    rows = [x for x in out.splitlines() if x.startswith('{"')]
    assert len(steps) == min(told, 3) and len(rows) == max(0, told - 3), (out, err)
    assert ('held-out' in out) == bool(told)
