"Runs launched from a notebook: real processes that are watched, stopped, resumed, and that fail"

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from compassrl.config import flat, read_run_config
from compassrl.launch import background as module
from compassrl.launch.background import (
    follow_run,
    launch,
    launch_on,
    report_parts,
    resume,
    status,
    watch_run,
)
from compassrl.rollout.rollout_settings import VllmConfig
from compassrl.runs import report
from compassrl.runs.presets import one_gpu, presets, smoke_cpu
from compassrl.train.megatron.parallel import ParallelConfig
from compassrl.train.sft import SFTConfig
from tests.support import ROOT
from tests.support import fork_server as forked

SMOKE = replace(
    smoke_cpu(), steps=6, save_every=0, cold_start=SFTConfig(steps=45, lr=5e-3, num_solutions=60)
)
# soon at its first step, which it cannot end before somebody looks
LONG = replace(
    SMOKE, steps=400, eval_every=0, trace_every=0, cold_start=SFTConfig(steps=4, num_solutions=10)
)
TWO = replace(LONG, train_engine='megatron', parallel=ParallelConfig(ep=2))


def until(condition, seconds=300, every=0.02):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, 'waited too long'
        time.sleep(every)


def weights(folder):
    return (folder / 'model' / 'model.safetensors').read_bytes()


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "One run that nobody disturbed, looked at from start to end"
    run = launch(SMOKE, tmp_path_factory.mktemp('runs') / 'whole run')  # a blank in the name
    seen = list(follow_run(run, 0.05))
    assert run.wait() == run.run_dir
    return run, seen


def test_a_launched_run_is_the_command(whole):
    "The config arrives whole, the run leaves what `compassrl train` leaves, its output is kept"
    run, _ = whole
    assert read_run_config(run.run_dir) == replace(SMOKE, run_dir=str(run.run_dir))
    assert [m['step'] for m in run.metrics()] == [1, 2, 3, 4, 5, 6]
    assert (run.run_dir / 'report.md').exists() and weights(run.run_dir)
    assert run.log.parent == run.run_dir.parent and run.log_tail(1) == str(run.run_dir), (
        'the last line is the run directory'
    )


def test_it_was_live(whole):
    "Status and curves changed while it ran, and a picture came only with new rows"
    run, seen = whole
    lines, pictures = [line for line, _ in seen], [png for _, png in seen if png]
    assert lines[0] == 'starting' and lines[-1].startswith('finished: step 6 of 6')
    assert any(line.startswith('cold start, step') for line in lines)
    assert 1 <= len(pictures) <= 12 and all(png.startswith(b'\x89PNG') for png in pictures), (
        'a row is written again with the time of its checkpoint'
    )
    assert len(pictures) < len(seen)


def test_report_is_shown_whole(whole):
    parts = report_parts(whole[0].run_dir)
    pictures, text = ([p.data for p in parts if isinstance(p.data, kind)] for kind in (bytes, str))
    assert (
        len(pictures) == 2
        and all(p.startswith(b'\x89PNG') for p in pictures)
        and '.png' not in ''.join(text)
    )
    for words in ('Before and after', 'who did what', 'Samples', 'Settings'):
        assert words in ''.join(text)


def test_stop_and_resume(whole, tmp_path):
    """Stopped after its first steps, resumed by another process: as the run that was left alone.
    A second process that wants the same folder is refused while the first is there"""
    run = launch(replace(SMOKE, steps=400), tmp_path / 'stopped')  # it cannot end before
    until(lambda: run.metrics())
    run.process.send_signal(signal.SIGSTOP)  # no steps meanwhile
    second = resume(run.run_dir)
    try:
        with pytest.raises(RuntimeError, match='in use by another process'):
            second.wait(300)
        run.stop()
        run.stop()  # a second click changes nothing: the first has not been answered yet
    finally:
        second.process.kill()
        run.process.send_signal(signal.SIGCONT)
    run.wait(300)
    assert run.was_stopped() and re.match(r'stopped: step \d+ of 400', status(run)), run.log_tail()
    assert 'compassrl resume' in run.log_tail()
    end = max(6, run.metrics()[-1]['step'])  # a busy machine may stop it late
    again = resume(run.run_dir, '--steps', end)
    again.wait(300)
    assert status(again).startswith(f'finished: step {end} of {end}')
    alone = whole[0]
    if end > 6:
        alone = launch(replace(SMOKE, steps=end), tmp_path / 'alone')
        alone.wait(300)
    assert weights(run.run_dir) == weights(alone.run_dir)
    rewards = [[m['reward_mean'] for m in r.metrics()] for r in (again, alone)]
    assert rewards[0] == rewards[1]
    assert again.metrics()[-1]['step'] == read_run_config(run.run_dir).steps == end


def test_stop_at_once(tmp_path):
    "Before the run has done anything"
    run = launch(SMOKE, tmp_path / 'early')
    run.stop()
    assert run.wait(300) == run.run_dir and run.was_stopped() and status(run).startswith('stopped')


def test_a_failure_shows_its_last_words(tmp_path):
    run = launch(replace(SMOKE, init_from='nowhere'), tmp_path / 'lost')
    with pytest.raises(
        RuntimeError, match=r'lost ended with exit code 1:\n.*nowhere.*give a folder'
    ):
        run.wait(300)
    assert status(run) == 'failed with exit code 1 before the first step'
    assert not run.was_stopped() and not run.run_dir.exists()
    with pytest.raises(RuntimeError, match='exit code 1'):
        watch_run(run)


def test_a_killed_run_is_a_failure(tmp_path):
    run = launch(SMOKE, tmp_path / 'killed')
    until(lambda: (run.run_dir / 'cold_start.jsonl').exists())
    os.kill(run.process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match='exit code -9'):
        run.wait(300)


def test_a_folder_that_holds_a_run_is_refused(whole):
    with pytest.raises(ValueError, match='is not empty'):
        launch(SMOKE, whole[0].run_dir)


def notebook(folder):
    os.setsid()
    cold_start = SFTConfig(steps=2, num_solutions=10)
    launch(replace(smoke_cpu(), steps=1, eval_every=0, cold_start=cold_start), folder)
    print('started', flush=True)
    time.sleep(300)


def test_it_outlives_its_notebook(tmp_path):
    "The notebook's process group is killed, as when a kernel restarts; the run goes on to its end"
    log = tmp_path / 'log'
    kernel = forked.start(log, notebook, tmp_path / 'orphan')
    until(lambda: log.exists() and 'started' in log.read_text() or kernel.exitcode is not None)
    assert kernel.exitcode is None, log.with_suffix('.err').read_text()
    os.killpg(kernel.pid, signal.SIGKILL)
    kernel.join()
    until(lambda: (tmp_path / 'orphan' / 'report.json').exists(), 120)


def test_log_tail(tmp_path):
    "A bar that was drawn again and again is one line"
    run = object.__new__(module.Launched)
    run.log = tmp_path / 'log'
    run.log.write_bytes(b'one\n\nRL: 0%\rRL: 50%\rRL: 100%\ntwo \xff\n')
    last = 'two \N{REPLACEMENT CHARACTER}'
    assert run.log_tail() == f'one\nRL: 100%\n{last}'
    assert run.log_tail(1) == last


def test_several_ranks_stop_and_go_on_and_one_dies(tmp_path):
    """Two ranks of Megatron-Core by torchrun: stopped between two steps, resumed, every step is
    there once; after kill -9 of one of them the run ends, and says which"""
    run = launch_on(TWO, run_dir=tmp_path / 'two')
    assert run.num_ranks == 2
    until(lambda: run.metrics() or run.poll() is not None, 300)
    run.stop()
    run.wait(300)
    assert run.was_stopped() and re.match(r'stopped: step \d+ of 400', status(run)), run.log_tail()
    done = len(run.metrics())
    again = resume(run.run_dir)
    until(lambda: len(again.metrics()) > done or again.poll() is not None, 300)
    assert again.num_ranks == 2
    main = again.process.pid
    for pid in Path(f'/proc/{main}/task/{main}/children').read_text().split():
        settings = Path(f'/proc/{pid}/environ').read_bytes().split(b'\0')
        if b'RANK=1' in settings:
            os.kill(int(pid), signal.SIGKILL)
    with pytest.raises(RuntimeError, match='two ended with exit code 1'):
        again.wait(300)
    log = again.log_tail(200)
    assert all(w in log for w in ('local_rank: 1', 'SIGKILL')), log
    assert status(again).startswith('failed')
    assert [m['step'] for m in again.metrics()] == [*range(1, len(again.metrics()) + 1)]


GPUS = replace(
    one_gpu(),
    train_engine='megatron',
    rollout_engine='pool',
    parallel=ParallelConfig(ep=2, dtype='bfloat16'),
    policy=replace(one_gpu().policy, num_hidden_layers=4),
    vllm=VllmConfig(num_replicas=2),
)


def test_launch_on_gpus_that_are_here(tmp_path):
    "Two ranks and two servers need four GPUs"
    with patch.object(module, 'launch') as launched:
        with patch.object(torch.cuda, 'device_count', lambda: 4):
            launch_on(GPUS, 1, 4, run_dir=tmp_path / 'a')
        launched.assert_called_once_with(GPUS, tmp_path / 'a', 2)
        with patch.object(torch.cuda, 'device_count', lambda: 3):
            assert launch_on(GPUS, 1, 4, run_dir=tmp_path / 'a') == tmp_path / 'a.sh'
        launched.assert_called_once()


@pytest.mark.parametrize(
    'nodes, slurm, has',
    [(1, True, 'torchrun --nnodes=1'), (3, True, '#SBATCH --nodes=3'), (3, False, 'hosts=("$@")')],
)
def test_launch_on_machines_that_are_elsewhere(tmp_path, nodes, slurm, has, capsys):
    "A picture, an estimate, and a script that starts what was asked for; nothing runs"
    script = launch_on(GPUS, nodes, 4, 'H200', tmp_path / 'a', slurm)
    text = script.read_text()
    assert (
        has in text
        and 'not run on GPU' in text
        and f'run={tmp_path}/a' in text
        and 'GB' in capsys.readouterr().out
    )
    assert subprocess.run(['bash', '-n', script]).returncode == 0
    config = Path(re.search(r'config=(\S+)', text)[1])
    assert read_run_config(config) == replace(GPUS, run_dir=str(tmp_path / 'a')) and sorted(
        tmp_path.iterdir()
    ) == [config, script]


def test_launch_on_too_few_gpus(tmp_path):
    with pytest.raises(ValueError, match='leave none to train'):
        launch_on(GPUS, 1, 2, run_dir=tmp_path / 'a')
    assert list(tmp_path.iterdir()) == []


def test_too_many_ranks(tmp_path):
    "Refused before a process or a file exists"
    with pytest.raises(ValueError, match="2 processes: train_engine='torch' is one"):
        launch(SMOKE, tmp_path / 'a', num_ranks=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    'code, ranks, asked, stopped',
    [
        (130, 1, True, True),
        (130, 1, False, True),  # somebody else's Ctrl-C: another notebook, a terminal
        (1, 2, True, True),  # so says torchrun
        (1, 2, False, False),
        (1, 1, True, False),
        (0, 1, True, False),
    ],
)
def test_who_was_asked_to_stop_did_not_fail(code, ranks, asked, stopped):
    run = object.__new__(module.Launched)
    run.process, run.num_ranks = subprocess.Popen(['sh', '-c', f'exit {code}']), ranks
    run.process.wait()
    run.asked_to_stop = asked
    assert run.was_stopped() is stopped


def settings_of(text):
    "Section.name -> value, of a report's table of settings"
    rows = re.findall(r'^\| (\w[\w.]*) \| (`.*) \|$', text, flags=re.M)
    pairs = [
        (section, *x.partition('=')[::2])
        for section, cells in rows
        for x in re.findall('`([^`]*)`', cells)
    ]
    return {f'{section}.{name}': value for section, name, value in pairs}


@pytest.mark.parametrize(
    'page, cell, preset',
    [
        ('background', 'display(headline, *rest)', 'tiny-cpu'),
        ('scripts', "go('two ranks and two servers, on a CPU')", 'engines-cpu'),
    ],
)
def test_the_stored_runs_of_the_notebooks_are_those_of_todays_presets(page, cell, preset):
    "Each setting of the stored report has the preset's value; runs of other settings are run again"
    nb = json.loads((ROOT / 'nbs' / 'launch' / f'{page}.ipynb').read_text())
    (run,) = [c for c in nb['cells'] if ''.join(c['source']).endswith(cell)]
    said = '\n'.join(''.join(o.get('data', {}).get('text/markdown', '')) for o in run['outputs'])
    config = json.loads(json.dumps(asdict(presets[preset]())))
    assert config['parallel'].pop('dtype') == 'auto'  # float32 on a CPU, as stored
    rows = report._sections(flat(config)).items()
    want = settings_of('\n'.join(f'| {k} | {" ".join(map(report._code, v))} |' for k, v in rows))
    found = settings_of(said)
    same = {k for k in found if k in want and not k.endswith('run_dir')}
    assert len(same) > 100
    assert {k: found[k] for k in same} == {k: want[k] for k in same}
