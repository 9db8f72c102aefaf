"The panel without a browser: what the form says, what the buttons do"

import base64
from dataclasses import replace

import pytest

from compassrl.launch.panel import panel, with_value
from compassrl.runs.presets import presets, smoke_cpu
from tests.launch.test_process import until


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
    assert (
        p.form.preset.value == name
        and not p.buttons['launch'].disabled
        and p.buttons['stop'].disabled
        and p.buttons['resume'].disabled
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
    assert 'group_size=1' in p.status.value
    p.buttons['launch'].click()
    assert p.run is None and 'group_size=1' in p.status.value
    p.form.fields['group_size'].value = 4
    assert 'ready' in p.status.value
    for words in ('estimate for 1 x CPU', 'python -m compassrl '):
        assert words in p.cluster.value


def test_panel_launches_stops_and_resumes(tmp_path):
    "The buttons, without a browser"
    p = panel(preset='smoke-cpu', folder=tmp_path / 'runs')
    p.form.fields['steps'].value = 8
    p.buttons['launch'].click()
    assert p.buttons['launch'].disabled and not p.buttons['stop'].disabled
    until(lambda: p.run.metrics())
    p.buttons['stop'].click()
    p.thread.join(60)
    assert p.run.was_stopped() and 'stopped' in p.status.value and not p.buttons['resume'].disabled
    first = p.run.run_dir
    p.buttons['resume'].click()
    p.thread.join(60)
    assert p.run.run_dir == first and 'finished: step 8 of 8' in p.status.value
    assert [o['output_type'] for o in p.report.outputs] == ['display_data'] * 5
    pictures = [
        base64.b64decode(o['data']['image/png'])
        for o in p.report.outputs
        if 'image/png' in o['data']
    ]
    assert len(pictures) == 2 and all(png.startswith(b'\x89PNG') for png in pictures), (
        'curves and Gantt chart'
    )
    assert p.buttons['resume'].disabled and not p.buttons['launch'].disabled


def test_panel_says_why_a_run_failed(tmp_path):
    p = panel(keys=['init_from'], preset='smoke-cpu', folder=tmp_path)
    p.form.fields['init_from'].value = 'nowhere'
    p.buttons['launch'].click()
    p.thread.join(60)
    assert (
        'nowhere' in p.status.value
        and 'exit code 1' in p.status.value
        and not p.buttons['launch'].disabled
    )
