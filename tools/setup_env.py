"""Make or complete the project's environment, .venv, with the versions of constraints.txt.

    python tools/setup_env.py [extra ...]    # none = the package alone; e.g. dev engines-cpu
    python tools/setup_env.py --lock [option ...]    # rewrites both lists, by uv pip compile

Standard library only. uv does the installing, with constraints.lock: the versions of
constraints.txt with the hashes of their files, so that no index can hand out another file. Both
name versions and no addresses, so they serve every index. On Linux without a GPU the CPU build of
torch is wanted, 0.2 GB instead of several: uv knows where it is, and pip looks where it is
configured to.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / '.venv'
PYTHON = VENV / 'bin' / 'python'
TESTED = ROOT / 'constraints.txt'  # for pip, which takes no hashes if a name has no version
HASHED = ROOT / 'constraints.lock'  # for uv, which does
WITHOUT_CUDA = '--override', ROOT / 'tools' / 'overrides-cpu.txt'
LOCKED = (
    'dev',
    'docs',
    'engines-cpu',
)  # what the tests ran with; these name all other extras but gpu
HEAD = """\
# What the tests ran with, on Linux without a GPU: pip install -c constraints.txt compassrl
# Written by `make lock`.
"""
HEAD_HASHED = """\
# constraints.txt with the hashes of the files: uv pip install -c constraints.lock compassrl
# Written by `make lock`. torch has none: its builds for a CPU have hashes of their own, on an index
# of their own, for each Python and processor.
"""


def run(*cmd, quiet=False, **env):
    cmd, env = [str(c) for c in cmd], {**os.environ, **env}
    return subprocess.run(cmd, cwd=ROOT, env=env, capture_output=quiet).returncode == 0


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
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / 'uv.txt'
            file.write_text(re.search(r'^uv==(.*\\\n)+.*\n', HASHED.read_text(), re.M)[0])
            must(pip('--require-hashes', '-r', file), 'pip install uv')


def uv(*args, **kw):
    return run(PYTHON, '-m', 'uv', '--quiet', 'pip', *args, **kw)


def install(*args, **kw):
    "Into the environment, no version but the tested one"
    return uv('install', '--compile-bytecode', '-p', PYTHON, '-c', HASHED, *args, **kw)


def pip(*args):
    quiet = '--quiet', '--disable-pip-version-check'
    return run(PYTHON, '-m', 'pip', 'install', *quiet, *args)


def install_torch():
    "torch comes first: whatever build is there when the rest is resolved is kept"
    if has('torch'):
        return
    if sys.platform == 'linux' and not has_gpu():
        once = dict(UV_HTTP_RETRIES='1', UV_HTTP_TIMEOUT='20')
        if install('--torch-backend', 'cpu', 'torch', quiet=True, **once):
            return
        say("uv cannot reach PyTorch's CPU builds; pip looks where it is configured to")
    must(pip('-c', TESTED, 'torch'), 'pip install torch')


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
    more = WITHOUT_CUDA if 'engines-cpu' in extras else ()
    must(install(*more, '--editable', package), f'installing {package}')


def lock(options):
    "Pins that are there stay if they can: `--upgrade` looks for newer ones"
    make_venv()
    look = [*options, *([] if '--find-links' in options else ['--torch-backend', 'cpu'])]
    extras = [f'--extra={e}' for e in LOCKED]
    plain = '--no-annotate', '--no-header', '--no-emit-index-url', '--no-emit-find-links'
    what = 'pyproject.toml', *extras, *WITHOUT_CUDA, *plain, '--generate-hashes'
    must(uv('compile', *what, '--output-file', HASHED, *look), 'uv pip compile')
    pins = re.sub(r'^#.*\n', '', HASHED.read_text(), flags=re.M)
    pins = re.sub(r'^torch==([^+ ]+).*\n( .*\n)*', r'torch==\1\n', pins, flags=re.M)  # 2.13.0+cpu
    HASHED.write_text(HEAD_HASHED + pins)
    TESTED.write_text(HEAD + re.sub(r'( \\)?\n( .*\n)*', '\n', pins))


if __name__ == '__main__':
    if sys.argv[1:2] == ['--lock']:
        lock(sys.argv[2:])
    else:
        main(sys.argv[1:])
