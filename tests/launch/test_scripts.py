"Scripts that bash reads as meant, servers that answer"

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from shutil import copytree, rmtree
from unittest.mock import patch

import psutil
import pytest

from compassrl.config import read_run_config
from compassrl.launch.scripts import node_script, serve_rollout, slurm_script
from compassrl.model.policy import PolicyConfig
from compassrl.rollout.rollout_settings import VllmConfig
from compassrl.rollout.vllm.server import free_port
from compassrl.runs import cli
from compassrl.runs.cli import parse_resume, parse_train
from compassrl.runs.presets import presets, smoke_cpu
from compassrl.train.megatron.parallel import ParallelConfig
from tests.launch.test_machines import BIG, Q30, TWO
from tests.support import fork_server as forked

BIN = Path(sys.executable).parent
SECRET = dict(COMPASSRL_SECRET='a secret for the tests')


@pytest.mark.parametrize('name', presets)
def test_every_preset_has_a_script(name):
    "Those of one shape only take that of Qwen3-30B-A3B; all fit the machines that they name"
    on = {'one-node': (1, 8, 'B200'), 'multi-node': (4, 8, 'H100')}
    on |= {'paper-base': (24, 8, 'H100')}
    nodes, per_node, gpu = on.get(name, (1, 0, ''))
    cfg = presets[name]()
    if name in ('one-node', 'multi-node'):
        cfg = replace(cfg, policy=Q30)
    scripts = [node_script(cfg, nodes, per_node, gpu=gpu)]
    if nodes > 1:
        scripts.append(slurm_script(cfg, nodes, per_node, gpu=gpu))
    for text in scripts:
        subprocess.run(['bash', '-n'], input=text, text=True, check=True)


# ---- scripts, run with commands that only say how they were called

STUB = """#!/bin/bash
# one write: servers start side by side
printf '%s\\0' "$(basename "$0")" "CUDA=${CUDA_VISIBLE_DEVICES:-}" "$@" END >> "$CALLS"
begun() { tr '\\0' ' ' < "$CALLS" | grep -o 'python CUDA=' | wc -l; }  # as a server says it
case $(basename "$0") in
    scontrol) printf 'n%s\\n' 0 1 2 3 4 5;;
    hostname) echo "$HOST";;
    curl) # a server answers when it has begun
          for _ in {1..2000}; do [ "$(begun)" -ge "$SERVERS" ] && break; sleep 0.02; done
          grep -q 'Bearer [0-9a-f]\\{64\\}"$';;
    srun) while [ "${1#--}" != "$1" ]; do [ "$1" = --nodelist ] && shift; shift; done
          [ "${1#n}" = "$1" ] || shift
          "$@";;
esac
"""


def run_script(text, tmp_path, *args, host='n0', servers=0):
    """What each command of a script was called with; the script must end well

    It ends its servers: `servers` of them answer no earlier than all have begun."""
    folder = tmp_path / 'bin'
    if not folder.exists():  # a server of an earlier call may still be read
        folder.mkdir()
        for name in ('scontrol', 'srun', 'torchrun', 'python', 'curl', 'hostname'):
            (folder / name).write_text(STUB)
            (folder / name).chmod(0o755)
    calls = tmp_path / 'calls'
    calls.write_text('')
    subprocess.run(['bash', '-n'], input=text, text=True, check=True)
    (tmp_path / 'script').write_text(text)
    env = dict(
        os.environ,
        PATH=f'{folder}:{os.environ["PATH"]}',
        CALLS=str(calls),
        SLURM_JOB_NODELIST='n[0-5]',
        HOST=host,
        SERVERS=str(servers),
    )
    subprocess.run(
        ['bash', tmp_path / 'script', *args],
        cwd=tmp_path,
        env=env,
        check=True,
        timeout=60,
        capture_output=True,
    )
    return [call.split('\0')[:-1] for call in calls.read_text().split('END\0') if call]


URLS = ['http://n4:8100', 'http://n4:8101', 'http://n5:8100']


def check_training(words, config, cfg=BIG, sync_dir=''):
    "What torchrun got: 4 nodes meet on the first, the config as meant, the servers by URL"
    at = words.index('-m')
    assert words[2:at] == [
        '--nnodes=4',
        '--nproc-per-node=8',
        '--max-restarts=0',
        '--rdzv-backend=c10d',
        '--rdzv-endpoint=n0:29500',
        '--rdzv-id=compassrl',
    ]
    assert words[at + 1 : at + 4] == ['compassrl', 'train', 'my config.json']
    want = replace(cfg, vllm=replace(cfg.vllm, urls=tuple(URLS), sync_dir=sync_dir))
    assert parse_train([config, *words[at + 4 :]]) == want


@pytest.fixture
def config(tmp_path):
    (tmp_path / 'my config.json').write_text(json.dumps(asdict(BIG)))
    return str(tmp_path / 'my config.json')


def test_slurm_script(tmp_path, config):
    "Servers on the last nodes, each with its GPUs and port; training on the others; logs"
    text = slurm_script(BIG, 6, 8, 'my config.json', 'H200')
    for line in ('#SBATCH --nodes=6', '#SBATCH --gpus-per-node=8'):
        assert line in text.splitlines()
    assert text.startswith('#!/bin/bash\n') and '(not run on GPU)' in text
    calls = run_script(text, tmp_path, servers=3)
    sruns = [c for c in calls if c[0] == 'srun']
    assert sorted(c[c.index('--nodelist') + 1] for c in sruns) == ['n0,n1,n2,n3', 'n4', 'n4', 'n5']
    servers = sorted(c[1:] for c in calls if c[0] == 'python')
    assert servers == sorted(
        [f'CUDA={g}', '-m', 'compassrl.launch.scripts', 'my config.json', port, '0.0.0.0']
        for g, port in (('0,1,2,3', '8100'), ('4,5,6,7', '8101'), ('0,1,2,3', '8100'))
    )
    assert [c[-1] for c in calls if c[0] == 'curl'] == [f'{u}/health' for u in URLS]
    check_training(next(c for c in calls if c[0] == 'torchrun'), config)
    found = sorted(p.name for p in (tmp_path / 'my runs').iterdir())
    assert found == ['a.logs', 'a.secret']  # NCCL needs no folder


def test_weights_by_file_go_through_a_folder_beside_the_run(tmp_path, config):
    cfg = replace(BIG, vllm=replace(BIG.vllm, sync='file'))
    Path(config).write_text(json.dumps(asdict(cfg)))
    calls = run_script(slurm_script(cfg, 6, 8, 'my config.json', 'H200'), tmp_path)
    check_training(next(c for c in calls if c[0] == 'torchrun'), config, cfg, 'my runs/a.sync')
    assert sorted(p.name for p in (tmp_path / 'my runs').iterdir()) == [
        'a.logs',
        'a.secret',
        'a.sync',
    ]


@pytest.mark.parametrize(
    'device, sync, backend',
    [('cuda', 'auto', 'nccl'), ('cuda', 'file', 'compassrl'), ('cpu', 'auto', 'compassrl')],
)
def test_a_server_expects_the_weights_as_they_will_come(tmp_path, device, sync, backend):
    cfg = replace(
        BIG,
        device=device,
        vllm=VllmConfig(2, sync=sync),
        rollout=replace(BIG.rollout, dtype='bfloat16'),
    )
    (tmp_path / 'config.json').write_text(json.dumps(asdict(cfg)))
    with pytest.raises(ValueError, match='COMPASSRL_SECRET has 0 characters: export'):
        serve_rollout(tmp_path / 'config.json', 8100)
    with patch.object(os, 'execve') as became, patch.dict(os.environ, SECRET):
        serve_rollout(tmp_path / 'config.json', 8100)
    command = became.call_args[0][1]
    assert command[command.index('--host') + 1] == '127.0.0.1'
    assert not [word for word in command if SECRET['COMPASSRL_SECRET'] in word]
    assert json.loads(command[command.index('--weight-transfer-config') + 1]) == dict(
        backend=backend
    )


@pytest.mark.parametrize('host', ['n0', 'n3', 'n4', 'n5'])
def test_node_script(host, tmp_path, config):
    "The same script on every node does what is that node's to do"
    hosts = [f'n{i}' for i in range(6)]
    calls = run_script(
        node_script(BIG, 6, 8, 'my config.json', 'H200'), tmp_path, *hosts, host=host
    )
    served = [c[-2] for c in calls if c[0] == 'python']
    assert sorted(served) == dict(n4=['8100', '8101'], n5=['8100']).get(host, [])
    trained = [c for c in calls if c[0] == 'torchrun']
    assert len(trained) == (host in ('n0', 'n3'))
    if trained:
        check_training(trained[0], config)
    with pytest.raises(subprocess.CalledProcessError):
        run_script(node_script(BIG, 6, 8, gpu='H200'), tmp_path, 'n0', host=host)


@pytest.mark.parametrize('script', [slurm_script, node_script])
def test_a_job_that_is_started_again_goes_on(script, tmp_path, config, monkeypatch):
    (tmp_path / 'my runs/a').mkdir(parents=True)  # killed before its first checkpoint
    (tmp_path / 'my runs/a/config.json').write_text(json.dumps(asdict(BIG)))
    calls = run_script(
        script(BIG, 6, 8, 'my config.json', 'H200'),
        tmp_path,
        *(f'n{i}' for i in range(6 * (script is node_script))),
    )
    words = next(c for c in calls if c[0] == 'torchrun')
    assert words[words.index('-m') + 1 :] == [
        'compassrl',
        'resume',
        'my runs/a',
        '--vllm.urls',
        *URLS,
    ]
    monkeypatch.chdir(tmp_path)
    run, cfg = parse_resume(words[words.index('resume') + 1 :])
    assert run == 'my runs/a' and cfg == replace(BIG, vllm=replace(BIG.vllm, urls=tuple(URLS)))


def hostile_names():
    "What a person may call a run, and bash would take for more than a name"
    return [
        '-x',
        '--run-dir',
        '-rf /x',
        'runs/a b',
        "it's",
        'a "b"',
        'a b',
        '$(touch owned)',
        '`touch owned`',
        'a;touch owned',
        'a&touch owned',
        'a|touch owned',
        '*',
        '[a-z]',
        '~root',
        '${HOME}',
        'a\\',
        '{a,b}',
        '!!',
        '#a',
        'é ü',
        'a%sb',
    ]


@pytest.mark.parametrize('name', hostile_names())
@pytest.mark.parametrize('script', [slurm_script, node_script])
def test_hostile_names(script, name, tmp_path):
    "The run goes where it was told, and goes on from there; nothing else happens"
    cfg, hosts = replace(BIG, run_dir=name), [f'n{i}' for i in range(6)]
    text = script(cfg, 6, 8, f'{name}.json', 'H200')
    args = hosts if script is node_script else ()
    safe = f'./{name}' if name.startswith('-') else name

    def words():
        calls = run_script(text, tmp_path, *args)
        w = next(c for c in calls if c[0] == 'torchrun')
        return w[w.index('compassrl') + 1 :]

    assert words()[:4] == ['train', f'{safe}.json', '--run-dir', safe]
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / 'config.json').write_text('{}')
    again = words()
    assert again[:2] == ['resume', safe] and parse_args_of(again) == safe
    assert not list(tmp_path.rglob('owned'))
    found = {f'{p.relative_to(tmp_path)}' for p in tmp_path.rglob('*')}
    assert {name, f'{name}.logs', f'{name}.secret'} <= found
    ours = {'bin', 'calls', 'script', Path(name).parts[0], f'{name}.logs', f'{name}.secret'}
    assert {p.name for p in tmp_path.iterdir()} <= ours


@pytest.mark.parametrize('name', ['a\ntouch owned', 'a\r', 'a\x1b[2J', 'a\u202eb'])
@pytest.mark.parametrize('script', [slurm_script, node_script])
def test_names_that_nobody_can_read_are_refused(script, name):
    "A line of its own, say, or one that erases the screen"
    with pytest.raises(ValueError, match='characters that cannot be seen: use another name'):
        script(replace(BIG, run_dir=name), 6, 8, gpu='H200')
    with pytest.raises(ValueError, match='characters that cannot be seen: use another name'):
        script(BIG, 6, 8, f'{name}.json', 'H200')


@pytest.mark.parametrize('script', [slurm_script, node_script])
def test_what_lies_beside_a_run_is_not_in_it(script, tmp_path):
    "A folder that is not empty could not be started"
    text = script(replace(BIG, run_dir='runs/a/'), 6, 8, gpu='H200')
    run_script(text, tmp_path, *([f'n{i}' for i in range(6)] * (script is node_script)))
    assert sorted(p.name for p in (tmp_path / 'runs').iterdir()) == ['a.logs', 'a.secret']


def parse_args_of(words):
    "The run directory, as the command line understands it"
    with patch.object(cli, 'read_run_config', lambda folder: BIG):
        return parse_resume(words[1:])[0]


def test_a_secret_is_made_once_and_nobody_else_can_read_it(tmp_path):
    "Machines that start at the same time agree; no command line has it"
    text = slurm_script(replace(BIG, run_dir='run'), 6, 8, 'config.json', 'H200')
    calls = run_script(text, tmp_path)
    path = tmp_path / 'run.secret'
    secret = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600 and len(secret) == 64
    assert not [c for c in calls for word in c if secret in word] and secret not in text
    run_script(text, tmp_path)
    assert path.read_text() == secret
    assert not list(tmp_path.glob('run.secret.*'))


def test_one_process_needs_no_torchrun(tmp_path):
    calls = run_script(node_script(smoke_cpu()), tmp_path)
    assert [c[0] for c in calls] == ['python'] and calls[0][2:] == [
        '-m',
        'compassrl',
        'train',
        'config.json',
        '--run-dir',
        'runs/cluster',
    ]


# ---- for real, without a GPU


def test_two_ranks_by_script(tmp_path):
    """torchrun starts two ranks of Megatron-Core; they train and leave what any run leaves. From a
    checkpoint of theirs one process goes on as they did"""
    cfg = replace(TWO, steps=3, save_every=1)
    (tmp_path / 'config.json').write_text(json.dumps(asdict(cfg)))
    (tmp_path / 'script').write_text(node_script(replace(cfg, run_dir='run')))
    env = dict(
        os.environ, PATH=f'{BIN}:{os.environ["PATH"]}', OMP_NUM_THREADS='1', PYTHONWARNINGS='ignore'
    )
    r = subprocess.run(
        ['bash', 'script'], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500
    )
    assert r.returncode == 0, r.stderr[-3000:]
    assert (
        r.stdout.splitlines()[-1] == 'run'
        and (tmp_path / 'run' / 'model' / 'model.safetensors').exists()
    )
    assert read_run_config(tmp_path / 'run').parallel == TWO.parallel

    def rows(run):
        return [
            json.loads(line) for line in (tmp_path / run / 'metrics.jsonl').read_text().splitlines()
        ]

    assert len(rows('run')) == 3
    other = copytree(tmp_path / 'run', tmp_path / 'other')
    rmtree(other / 'checkpoints/step-000003')
    words = ['resume', str(other), '--parallel.ep', '1']
    r = forked.run(tmp_path / 'log', cli.main, words, env=env, timeout=500)
    assert r.returncode == 0 and 'after step 2' in r.stdout, r.stdout + r.stderr
    same, alone = (rows(run)[-1] for run in ('run', 'other'))
    assert read_run_config(tmp_path / 'other').parallel == ParallelConfig()
    for k in ('loss', 'grad_norm', 'reward_mean', 'entropy'):
        assert same[k] == pytest.approx(alone[k], rel=1e-3), k


def test_a_server_of_a_script(tmp_path):
    """`python -m compassrl.launch.scripts` becomes a vLLM server that takes weights; killed, it
    leaves nothing that holds its port"""
    cfg = replace(
        TWO, rollout_engine='pool', policy=PolicyConfig(head_dim=32, max_position_embeddings=128)
    )
    (tmp_path / 'config.json').write_text(json.dumps(asdict(cfg)))
    port = free_port()
    env = dict(os.environ, **SECRET, OMP_NUM_THREADS='1')
    with (tmp_path / 'log').open('w') as log:
        server = subprocess.Popen(
            [sys.executable, '-m', 'compassrl.launch.scripts', 'config.json', str(port)],
            cwd=tmp_path,
            env=env,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def answer(path, secret=SECRET['COMPASSRL_SECRET']):
        shown = {'Authorization': f'Bearer {secret}'} if secret else {}
        asked = urllib.request.Request(f'http://127.0.0.1:{port}{path}', headers=shown)
        with urllib.request.urlopen(asked, timeout=60) as a:
            return a.read()

    def status(path, secret, method):
        shown = {'Authorization': f'Bearer {secret}'} if secret else {}
        url = f'http://127.0.0.1:{port}{path}'
        asked = urllib.request.Request(url, b'{}', shown, method=method.upper())
        try:
            with urllib.request.urlopen(asked, timeout=60) as a:
                return a.status
        except urllib.error.HTTPError as e:
            return e.code

    try:
        until = time.monotonic() + 400
        while True:
            assert server.poll() is None and time.monotonic() < until, (
                tmp_path / 'log'
            ).read_text()[-3000:]
            try:
                answer('/health')
                break
            except OSError:
                time.sleep(0.5)
        assert 'weight_version' in json.loads(answer('/weight_info'))
        assert json.loads(answer('/v1/models'))['data'][0]['id'] == 'policy'
        routes = json.loads(answer('/openapi.json'))['paths']
        assert {'/collective_rpc', '/pause', '/update_weights', '/health'} <= set(routes)
        asked = [(path, method) for path, methods in routes.items() for method in methods]
        asked += [('/metrics', 'get'), ('/docs', 'get'), ('/no_such_route', 'get')]
        asked += [('/health', 'options'), ('/compassrl/progress', 'get'), ('/openapi.json', 'get')]
        for secret in ('', 'wrong'):
            open_to_all = [a for a in asked if status(a[0], secret, a[1]) != 401]
            assert open_to_all == []
        told = json.loads(answer('/compassrl/progress'))
        assert told == dict(tokens=0, requests=0, paused=False)
        assert status('/collective_rpc', SECRET['COMPASSRL_SECRET'], 'post') == 404
        public = (Path(f'/proc/{server.pid}/cmdline').read_text(), (tmp_path / 'log').read_text())
        assert not [text for text in public if SECRET['COMPASSRL_SECRET'] in text]
        listens = psutil.Process(server.pid).net_connections('inet')
        assert {c.laddr.ip for c in listens if c.status == 'LISTEN'} == {'127.0.0.1'}
        engines = psutil.Process(server.pid).children(recursive=True)
        server.kill()
        assert engines and not psutil.wait_procs(engines, 60)[1], 'an engine outlives its server'
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(60)
