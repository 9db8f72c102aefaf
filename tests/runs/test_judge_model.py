"A judge is made stage by stage: stopped anywhere, it ends with the same folder"

import json
import shutil
from dataclasses import replace

import pytest

from compassrl.judges.genrm import Question
from compassrl.judges.genrm_client import LocalGenRM
from compassrl.model.pretrained import read_shards
from compassrl.runs.judge_model import JudgeModelConfig, make_judge_model, open_judge

SMALL = JudgeModelConfig(num_pairs=48, num_heldout=8, sft_steps=3, rl_steps=1)


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    return make_judge_model(tmp_path_factory.mktemp('made') / 'judge', SMALL)


def same(a, b):
    weights = [dict(read_shards(f)) for f in (a, b)]
    assert all((weights[0][k] == weights[1][k]).all() for k in weights[0])
    assert (a / 'judge.json').read_text() == (b / 'judge.json').read_text()


def test_a_folder_that_runs_open(made):
    found = json.loads((made / 'judge.json').read_text())
    assert set(found) == {'sft', 'rl'} and found['rl']['num_pairs'] == 8
    ask = open_judge(made)
    assert isinstance(ask, LocalGenRM) and ask.prompt == '1 {first}\n2 {second}\n{prompt}\n'
    q = Question('red M cap to 5: A tan M 8, B red S 4, C red M 5?', 'A', 'B')
    assert ask([q]) == open_judge(made / 'run' / 'model', made / 'judge_prompt.txt')([q])


@pytest.mark.parametrize('lost', [['judge.json'], ['judge.json', 'run/report.md'], ['run']])
def test_it_goes_on_where_it_was_stopped(made, tmp_path, lost):
    folder = tmp_path / 'judge'
    shutil.copytree(made, folder)
    if lost == ['run']:  # killed while it wrote its data
        shutil.rmtree(folder)
        folder.mkdir()
        shutil.copy(made / 'settings.json', folder)
    else:
        for name in lost:
            (folder / name).unlink()
        if 'run/report.md' in lost:  # its paths are in its config
            text = (folder / 'run/config.json').read_text()
            for file in ('config', 'origin'):
                path = folder / f'run/{file}.json'
                path.write_text(path.read_text().replace(str(made), str(folder)))
            assert str(made) in text
    same(make_judge_model(folder, SMALL), made)


def test_other_settings_are_refused(made):
    with pytest.raises(ValueError, match='settings.json: begun with other settings'):
        make_judge_model(made, replace(SMALL, seed=1))
