"""Make or complete the project's environment, .venv.

    python tools/setup_env.py [extra ...]     # no extra = the package alone; e.g. dev engines-cpu

Standard library only. uv does the installing; where uv cannot (no access to an index that pip is
configured for) pip does. On Linux without a GPU the CPU build of torch is wanted, 0.2 GB instead of
several; uv knows where it is.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / '.venv'
PYTHON = VENV / 'bin' / 'python'
TORCH = 'torch==2.13.0'
UV = 'uv==0.13.8'


def run(*cmd, quiet=False, **env):
    cmd = [str(c) for c in cmd]
    return (
        subprocess.run(cmd, cwd=ROOT, env={**os.environ, **env}, capture_output=quiet).returncode
        == 0
    )


def must(ok, what):
    if not ok:
        sys.exit(
            f'{what} failed: see the messages above. To start afresh: make clean-env, then again'
        )


def python(code, **kw):
    return run(PYTHON, '-c', 'import importlib.util, sys; sys.exit(not (' + code + '))', **kw)


def has(module):
    return python(f'importlib.util.find_spec({module!r})')


def has_gpu():
    return bool(shutil.which('nvidia-smi')) and run('nvidia-smi', '-L', quiet=True)


def say(what):
    print(f'setup: {what}', flush=True)


def make_venv():
    "An environment whose Python is new enough and has pip and uv"
    if not PYTHON.exists():
        must(
            run(sys.executable, '-m', 'venv', VENV),
            'python -m venv (Debian and Ubuntu: apt install python3-venv)',
        )
    if not python('sys.version_info >= (3, 11)'):
        sys.exit(f'{VENV} was made with an older Python: make clean-env, then again')
    if not has('uv'):
        must(pip(UV), f'pip install {UV}')


def uv(*args, **kw):
    return run(
        PYTHON,
        '-m',
        'uv',
        '--quiet',
        'pip',
        'install',
        '--compile-bytecode',
        '--python',
        PYTHON,
        *args,
        **kw,
    )


def pip(*args):
    return run(PYTHON, '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check', *args)


def install_torch():
    "torch comes first: whatever build is there when the rest is resolved is kept"
    if has('torch'):
        return
    if sys.platform == 'linux' and not has_gpu():
        if uv(
            '--torch-backend', 'cpu', TORCH, quiet=True, UV_HTTP_RETRIES='1', UV_HTTP_TIMEOUT='20'
        ):
            return
        say("uv cannot reach PyTorch's CPU builds; pip looks where it is configured to")
    must(pip(TORCH), f'pip install {TORCH}')


def runs_engines():
    "Are there builds of the engines for this machine?"
    if sys.platform == 'linux' and platform.machine() == 'x86_64' and not has_gpu():
        return True
    say(
        'engines-cpu is for Linux on x86-64 without a GPU: left out, '
        'tests and notebooks that need it are skipped'
    )


def main(extras):
    if 'engines-cpu' in extras and not runs_engines():
        extras = [e for e in extras if e != 'engines-cpu']
    say(f'{VENV} for the package' + (f' and {", ".join(extras)}' if extras else ''))
    make_venv()
    install_torch()
    package = '.' + (f'[{",".join(extras)}]' if extras else '')
    without_cuda = (
        ['--override', ROOT / 'tools' / 'overrides-cpu.txt'] if 'engines-cpu' in extras else []
    )
    ok = uv(*without_cuda, '--editable', package) or (
        not without_cuda and pip('--editable', package)
    )
    must(ok, f'installing {package}')


if __name__ == '__main__':
    main(sys.argv[1:])
