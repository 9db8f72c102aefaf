"The panel without a browser: what the form says, what the buttons do"

import base64
import json
from dataclasses import replace

import pytest

from compassrl.algo.losses import policy_losses
from compassrl.launch.background import status
from compassrl.launch.panel import Attached, panel, with_value
from compassrl.runs.presets import presets, smoke_cpu
from compassrl.runs.run import start_run
from compassrl.train.sft import SFTConfig
from tests.launch.test_background import until


def quick(folder):
    "A panel whose run learns little before its first step"
    few = {'steps': 400, 'eval_every': 0, 'data.num_heldout': 2, 'cold_start.steps': 6}
    p = panel(list(few), 'smoke-cpu', folder)
    for key, value in few.items():
        p.form.fields[key].value = value
    return p


def test_with_value():
    cfg = smoke_cpu()
    assert (
        with_value(cfg, 'optim.lr', 0.5) == replace(cfg, optim=replace(cfg.optim, lr=0.5))
        and cfg == smoke_cpu()
    )
    with pytest.raises(ValueError, match='group_size=1'):
        with_value(cfg, 'group_size', 1)
    with pytest.raises((TypeError, AttributeError)):
        with_value(cfg, 'optim.speed', 1)


@pytest.mark.parametrize('name', presets)
def test_form_says_the_preset(name):
    p = panel(preset=name)
    assert p.form.config() == presets[name]()
    # it cuts 4 key-value heads, those of the checkpoint that `init_from` gives
    assert ('ready' in p.status.value) == (name != 'multi-node'), p.status.value
    assert p.buttons['launch'].disabled == (name == 'multi-node')
    assert (
        p.form.preset.value == name and p.buttons['stop'].disabled and p.buttons['resume'].disabled
    )


def test_form():
    "Choosing a preset fills the fields; a bad value is said, and nothing is launched"
    p = panel()
    assert p.form.preset.value == 'tiny-cpu'
    p.form.preset.value = 'smoke-cpu'
    assert p.form.config() == smoke_cpu() and p.form.fields['steps'].value == 4
    p.form.fields['optim.lr'].value = 1e-3
    assert p.form.config() == with_value(smoke_cpu(), 'optim.lr', 1e-3)
    p.form.fields['group_size'].value = 1
    assert 'group_size=1' in p.status.value and p.buttons['launch'].disabled
    p.buttons['launch'].click()
    assert p.run is None and 'group_size=1' in p.status.value
    p.form.fields['group_size'].value = 4
    assert 'ready' in p.status.value and not p.buttons['launch'].disabled
    for words in ('estimate for 1 x CPU', 'python -m compassrl '):
        assert words in p.cluster.value


def test_a_setting_with_choices_is_a_list(tmp_path):
    "Of a registry, or of a few words; what is typed freely has a field of its kind"
    keys = ['loss.name', 'router_replay', 'data.path', 'init_from', 'schedule.partial_tokens']
    p = panel(keys, folder=tmp_path)
    kinds = {k: type(f).__name__ for k, f in p.form.fields.items()}
    assert kinds == dict(zip(keys, ['Dropdown', 'Dropdown', 'Text', 'Text', 'IntText']))
    assert p.form.fields['loss.name'].options == tuple(policy_losses)
    assert p.form.fields['router_replay'].options == ('off', 'R2', 'R3', 'R3-gates')
    p.form.fields['loss.name'].value = 'gspo'
    assert p.form.config().loss.name == 'gspo' and 'ready' in p.status.value
    form = panel(folder=tmp_path).form
    assert {'loss.name', 'data.path', 'data.eval_path', 'rewards.function'} <= set(form.fields)
    form.fields['rewards.function'].value = 'maths exact'
    assert form.config().rewards.function == ('maths', 'exact')


def test_two_panels_launch_follow_stop_and_resume_a_run(tmp_path):
    """The buttons, without a browser. A second panel finds the run that the first has started,
    follows it and stops it; the first is not disturbed, resumes it, stops it and resumes it"""
    first = quick(tmp_path)
    first.buttons['launch'].click()
    assert first.buttons['launch'].disabled and not first.buttons['stop'].disabled
    until(lambda: first.run.metrics())
    folder = first.run.run_dir
    p = quick(tmp_path)
    assert p.runs.value == folder.name and p.run.poll() is None
    assert p.buttons['launch'].disabled and not p.buttons['stop'].disabled
    until(lambda: 'step' in p.status.value)
    p.buttons['stop'].click()
    p.thread.join(300)
    assert 'stopped: step' in p.status.value and not p.buttons['resume'].disabled
    first.thread.join(300)
    assert first.run.poll() == 130
    later = quick(tmp_path)
    assert later.run is None and later.runs.value == ''  # it runs no more
    later.runs.value = folder.name
    later.thread.join(300)
    assert 'stopped: step' in later.status.value and not later.buttons['resume'].disabled

    done = len(first.run.metrics())
    first.buttons['resume'].click()
    until(lambda: len(first.run.metrics()) > done)
    first.buttons['stop'].click()
    first.thread.join(300)
    assert first.run.was_stopped() and 'stopped' in first.status.value
    assert not first.buttons['resume'].disabled
    end = first.run.metrics()[-1]['step'] + 2
    config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps(config | dict(steps=end)))
    first.buttons['resume'].click()
    first.thread.join(300)
    assert first.run.run_dir == folder and f'finished: step {end} of {end}' in first.status.value
    shown = first.report.outputs
    assert [o['output_type'] for o in shown] == ['display_data'] * 5
    pictures = [base64.b64decode(o['data']['image/png']) for o in shown if 'image/png' in o['data']]
    assert len(pictures) == 2 and all(png.startswith(b'\x89PNG') for png in pictures), (
        'curves and Gantt chart'
    )
    assert first.buttons['resume'].disabled and not first.buttons['launch'].disabled


def test_a_run_by_its_folder(tmp_path):
    "Finished, stopped or failed, from what stands in it"
    folder = tmp_path / 'run'
    cold_start = SFTConfig(steps=2, num_solutions=10)
    start_run(replace(smoke_cpu(), steps=0, cold_start=cold_start, run_dir=str(folder)))
    run = Attached(folder)
    assert run.poll() == 0 and status(run).startswith('finished') and run.wait(1) == folder
    (folder / 'eval_after.json').unlink()
    assert run.poll() == 1 and run.was_stopped() and run.wait(1) == folder
    (folder / 'failed.json').write_text('{"why": "nothing is learned"}')
    with pytest.raises(RuntimeError, match='nothing is learned'):
        run.wait(1)
    with pytest.raises(ValueError, match='nowhere'):
        Attached(tmp_path / 'nowhere')


def test_panel_says_why_a_run_failed(tmp_path):
    p = panel(keys=['data.path'], preset='smoke-cpu', folder=tmp_path)
    p.form.fields['data.path'].value = 'nowhere.jsonl'
    p.buttons['launch'].click()
    p.thread.join(300)
    assert (
        'nowhere' in p.status.value
        and 'exit code 1' in p.status.value
        and not p.buttons['launch'].disabled
    )
