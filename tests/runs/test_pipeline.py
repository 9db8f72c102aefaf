"All stages by one command: killed anywhere it goes on, and what cannot be right never begins"

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from compassrl.config import read_run_config
from compassrl.model.merge import MergeConfig, merge_checkpoints
from compassrl.runs import pipeline
from compassrl.runs.cli import main
from compassrl.runs.pipeline import run_pipeline, scores
from compassrl.runs.run_data import load, with_replay
from compassrl.runs.run_process import locked
from compassrl.runs.stages import (
    Stage,
    check_complete,
    judge_config,
    pipeline_dict,
    pipeline_from_dict,
    pipeline_presets,
    stage_folders,
    train_config,
    with_setting,
)
from compassrl.train.guards import RunFailed
from tests.support import fork_server

pytestmark = pytest.mark.xdist_group('pipeline')


def short():
    d = pipeline_dict(pipeline_presets()['smoke-cpu'])
    for change in ('settings.cold_start.steps=20', 'settings.steps=2', 'settings.save_every=1'):
        d = with_setting(d, change)
    for stage in d['stages']:
        if stage['kind'] == 'train' and not stage['name'].endswith('-rl'):
            d = with_setting(d, f'{stage["name"]}.steps=0')
    return pipeline_from_dict(d)


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "One that nobody disturbed"
    folder = tmp_path_factory.mktemp('pipelines') / 'whole'
    run_pipeline(short(), folder)
    return folder


def models(folder):
    "Weights and verdicts of every stage"
    out = {}
    for name, place in stage_folders(short(), folder).items():
        verdicts = json.loads((place / 'evaluation.json').read_text())['sets']
        out[name] = (place / 'model/model.safetensors').read_bytes(), verdicts
    return out


def test_every_stage_leaves_a_model_and_verdicts(whole):
    report = (whole / 'report.md').read_text()
    for stage, place in zip(short().stages, stage_folders(short(), whole).values()):
        assert (place / 'model/model.safetensors').exists()
        assert set(scores(place)) == {'arithmetic', 'strings'}
        assert f'| {stage.name} |' in report
    assert (whole / 'domains.png').stat().st_size > 0


def test_the_next_stage_starts_where_the_last_one_ended(whole):
    after = scores(whole / '5-reasoning-rl')
    before = json.loads((whole / '6-domain-rl/eval_before.json').read_text())
    cfg = read_run_config(whole / '6-domain-rl')
    assert cfg.init_from == str(whole / '5-reasoning-rl/model')
    assert (whole / '4-merge/model/model.safetensors').read_bytes() != (
        whole / '5-reasoning-rl/model/model.safetensors'
    ).read_bytes()
    assert before['num_prompts'] == 8 and len(after['strings'].rates) == 8


def test_the_merge_is_that_of_the_command(whole, tmp_path):
    children = whole / '2-long-cot/model', whole / '3-domain/model'
    merge_checkpoints(children, tmp_path / 'again', MergeConfig(), whole / '1-base/model')
    for name in ('model.safetensors', 'config.json', 'tokenizer.json'):
        assert (tmp_path / 'again' / name).read_bytes() == (
            whole / '4-merge/model' / name
        ).read_bytes()


def test_what_is_asked_after_a_stage_was_never_trained_on(whole):
    found = json.loads((whole / '6-domain-rl/evaluation.json').read_text())['sets']['heldout']
    asked = {s['prompt'] for s in found['samples']}
    assert len(asked) == found['num_prompts'] == 16
    for stage in ('1-base', '2-long-cot', '3-domain', '5-reasoning-rl', '6-domain-rl'):
        cfg = read_run_config(whole / stage)
        assert not asked & {p.text for p in load(cfg).train}


def test_killed_in_every_stage_it_goes_on_as_if_nothing_had_happened(whole, tmp_path):
    folder, file = tmp_path / 'killed', tmp_path / 'pipeline.yaml'
    file.write_text(yaml.safe_dump(json.loads(json.dumps(pipeline_dict(short())))))
    what = str(file)
    cold = [f'{stage}/cold_start.jsonl' for stage in ('1-base', '2-long-cot', '3-domain')]
    rl = [f'{stage}/checkpoints/step-000001' for stage in ('5-reasoning-rl', '6-domain-rl')]
    for sign in (*cold, '4-merge', *rl):
        words = ['pipeline', what]
        words += ['--out', str(folder)] if what == str(file) else []
        log = tmp_path / 'log'
        run = fork_server.start(log, main, words, env={**os.environ, 'OMP_NUM_THREADS': '1'})
        while run.exitcode is None and not (folder / sign).exists():
            time.sleep(0.005)
        assert run.exitcode is None, f'it ended before {sign} was there: {log.read_text()}'
        run.kill()
        run.join()
        assert not (folder / Path(sign).parts[0] / 'evaluation.json').exists()
        what = str(folder)
    main(['pipeline', what])
    assert models(folder) == models(whole)


def test_one_that_is_done_does_nothing(whole, capsys):
    before = {p: p.stat().st_mtime_ns for p in whole.rglob('*') if 'model' in p.parts}
    main(['pipeline', str(whole)])
    assert capsys.readouterr().out.splitlines()[-1] == str(whole / 'report.md')
    assert before == {p: p.stat().st_mtime_ns for p in whole.rglob('*') if 'model' in p.parts}


def test_what_was_left_half_is_done_again(whole, tmp_path, monkeypatch):
    "A model without its report; an evaluation that has failed; two commands; a judge's seed"
    shutil.copytree(whole, again := tmp_path / 'again')
    last = again / '6-domain-rl'
    for name in ('report.md', 'evaluation.json'):
        (last / name).unlink()

    def fails(cfg, out, sets):
        out.write_text('{}')
        raise RunFailed('no verdicts', 0)

    with monkeypatch.context() as m, pytest.raises(RunFailed, match='no verdicts'):
        m.setattr(pipeline, 'evaluate_model', fails)
        run_pipeline(short(), again)
    assert (last / 'report.md').exists() and not (last / 'evaluation.json').exists()
    with locked(again), pytest.raises(ValueError, match='another process'):
        run_pipeline(short(), again)
    run_pipeline(short(), again)
    assert models(again) == models(whole)
    judge = Stage('judge', 'judge')
    for seed in (3, 4):
        assert judge_config(replace(short(), settings=dict(seed=seed)), judge, {}).seed == seed


def test_ranks_get_torchrun(tmp_path):
    "A stage of Megatron-Core on two ranks, from a new policy to a model that is asked"
    d = pipeline_dict(pipeline_presets()['smoke-cpu'])
    d |= dict(stages=d['stages'][:1])
    for change in (
        'base.train_engine=megatron',
        'base.parallel.ep=2',
        'base.steps=1',
        'settings.cold_start.steps=3',
    ):
        d = with_setting(d, change)
    run_pipeline(pipeline_from_dict(d), tmp_path / 'out')
    place = tmp_path / 'out/1-base'
    assert len((place / 'metrics.jsonl').read_text().splitlines()) == 1
    assert scores(place) and (place / 'checkpoints').is_dir()


def test_a_share_of_earlier_prompts(whole):
    cfg = read_run_config(whole / '6-domain-rl')
    mixed, earlier = load(cfg).train, load(read_run_config(whole / '5-reasoning-rl'))
    old = [p for p in mixed if p.domain == 'arithmetic']
    assert len(mixed) == 75 and len(old) == 15, 'a fifth of all, beside the 60 new ones'
    assert {p.text for p in old} <= {p.text for p in earlier.train}
    assert not {p.text for p in old} & {p.text for p in earlier.heldout}
    new = [p for p in mixed if p.domain == 'strings']
    with pytest.raises(ValueError, match=r'replay_frac=0\.9: the earlier run has 60 .* 540 are'):
        with_replay(new, earlier.train, 0.9)


WRONG = {
    ('nonsense',): "unknown pipeline 'nonsense': use one of",
    ('gone.yaml',): 'gone.yaml',
    ('smoke-cpu', '--set', 'merge.density=2'): 'stage merge: density=2',
    ('smoke-cpu', '--set', 'domain-rl.steps=x'): "stage domain-rl: steps='x'",
    ('smoke-cpu', '--set', 'domain-rl.stepz=1'): "stage domain-rl: config key 'stepz'",
    ('smoke-cpu', '--set', 'nobody.steps=1'): '--set',
    ('smoke-cpu', '--set', 'merge.models=[a]'): 'name at least two',
    ('smoke-cpu', '--set', 'evaluation.eval_k=0'): 'stage evaluation: eval_k=0',
    ('smoke-cpu', '--set', 'base.init_from=@merge/model'): '@merge is no earlier stage',
}


@pytest.mark.parametrize('words', WRONG)
def test_what_cannot_be_right_never_begins(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as e:
        main(['pipeline', *words, '--out', 'out'])
    assert WRONG[words] in str(e.value) and '\n' not in str(e.value)
    assert not list(tmp_path.iterdir())


def test_it_goes_on_only_as_it_began(whole, tmp_path):
    for words in (['--seed', '3'], ['--set', 'merge.density=0.5'], ['--out', str(tmp_path / 'x')]):
        with pytest.raises(SystemExit, match='goes on as it began'):
            main(['pipeline', str(whole), *words])
    with pytest.raises(ValueError, match='holds a pipeline with other settings'):
        run_pipeline(replace(short(), preset='tiny-cpu'), whole)
    (tmp_path / 'mine.txt').write_text('mine')
    with pytest.raises(ValueError, match='is not empty and holds no pipeline'):
        run_pipeline(short(), tmp_path)


def test_what_is_shown_is_a_file_that_means_the_same(capsys, tmp_path):
    main(['pipeline', 'smoke-cpu', '--seed', '3', '--set', 'domain-rl.optim.lr=1e-4', '--show'])
    d = yaml.safe_load(capsys.readouterr().out)
    p = pipeline_from_dict(json.loads(json.dumps(d)))
    assert p.settings['seed'] == 3
    cfg = train_config(p, p.stages[-1], stage_folders(p, 'out'))
    assert (cfg.optim.lr, cfg.seed) == (1e-4, 3)


@pytest.mark.parametrize('name', pipeline_presets())
def test_every_preset_can_be_shown_and_built(name):
    p = pipeline_presets()[name]
    folders = stage_folders(p, 'out')
    for stage in p.stages:
        if stage.kind == 'train':
            assert train_config(p, stage, folders).run_dir == str(folders[stage.name])
    if name.endswith('cpu'):
        check_complete(p)
