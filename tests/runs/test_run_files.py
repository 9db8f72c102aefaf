"Whatever a file of a run holds: one line names it, and nothing else in the folder changes"

import json
import random
import shutil
from contextlib import suppress

import pytest

from compassrl.config import read_run_config
from compassrl.launch.background import status
from compassrl.launch.panel import Attached
from compassrl.runs import report, resume
from compassrl.runs.report import write_report
from tests.runs.test_run import cli
from tests.support.other_kinds import KINDS, changed, places

FLAGS = (
    'smoke-cpu --trace-every 1 --zero-variance.screen-samples 4 --save-every 1 --steps 2'.split()
)
NAMES = 'config origin written machine eval_before eval_after screen rollout timings failed'.split()
ROWS = 'metrics', 'cold_start', 'trace'
PER_FILE = 8  # a second or so for each file and reader


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    home = tmp_path_factory.mktemp('files')
    r = cli('train', *FLAGS, '--run-dir', 'run', cwd=home)
    assert r.returncode == 0, r.stderr
    (home / 'run/failed.json').write_text('{"why": "it failed"}')
    (home / 'run/rollout.json').write_text('{"step-000002": {"lengths": [1, 2]}}')
    return home / 'run'


def resumes(folder):
    "What a resume reads before an engine starts, and what it learned"
    cfg = read_run_config(folder)
    resume.check_files(folder)
    resume.check_origin(folder, cfg)
    resume.check_source(folder, cfg)


def shows(folder):
    run = Attached(folder)
    status(run)
    with suppress(RuntimeError):
        run.wait()


def content(folder):
    return {p: p.read_bytes() for p in folder.rglob('*') if p.is_file() and p.name != '.lock'}


def damaged(path, rng):
    "Other texts of a file: a value of another kind, or half of the file"
    text = path.read_text()
    lines = text.splitlines(True) if path.suffix == '.jsonl' else [text]
    yield text[: len(text) // 2]
    for _ in range(PER_FILE):
        i = rng.randrange(len(lines))
        d = json.loads(lines[i])
        at = rng.choice([*places(d)])
        new = json.dumps(changed(d, at, rng.choice(KINDS))) + '\n'
        yield ''.join([*lines[:i], new, *lines[i + 1 :]])


@pytest.mark.parametrize('name', [*(f'{n}.json' for n in NAMES), *(f'{n}.jsonl' for n in ROWS)])
@pytest.mark.parametrize('read', [resumes, shows, write_report], ids=lambda f: f.__name__)
def test_one_line_names_the_file(run, tmp_path, monkeypatch, name, read):
    monkeypatch.setattr(report, 'find_spec', lambda module: None)  # pictures would take a minute
    folder = shutil.copytree(run, tmp_path / 'run', ignore=shutil.ignore_patterns('tensorboard'))
    path, faults = folder / name, []
    for text in damaged(path, random.Random(name)):
        path.write_text(text)
        before = content(folder)
        try:
            read(folder)
            continue
        except ValueError as e:
            said = str(e)
        except Exception as e:
            faults.append((text[-200:], f'{type(e).__name__}: {e}'))
            continue
        told = path.stem in said or name == 'origin.json' and 'is not made of what' in said
        assert told and '\n' not in said, (said, text[:200])
        assert content(folder) == before, said
    assert not faults, (len(faults), faults[0])
