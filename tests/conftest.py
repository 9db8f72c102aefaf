"One thread per process, no network: set before torch is imported"

import os
import sys

import pytest

import tests.support.light_imports  # noqa: F401
from tests.support import busy, chaos, fork_server, progress, selection
from tests.support.browser import chromium

for name in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS', 'OPENBLAS_NUM_THREADS'):
    os.environ.setdefault(name, '1')
os.environ.update(
    TOKENIZERS_PARALLELISM='false', HF_HUB_OFFLINE='1', TQDM_DISABLE='1', MPLBACKEND='agg'
)


@pytest.hookimpl(trylast=True)  # the terminal is there
def pytest_configure(config):
    progress.register(config)
    busy.start(config)
    chaos.register(config)
    fork_server.share(config)


def pytest_unconfigure(config):
    busy.stop(config)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput['fork_servers'] = node.config.fork_servers.name


def pytest_collection_finish():
    if 'torch' in sys.modules:  # which a report needs
        import tests.support.no_pictures  # noqa: F401
    import tests.support.gc_frozen  # noqa: F401


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from tests.support.scheduler import ByFile  # needs xdist, which a run of one test does not

    return ByFile(config, log)


def pytest_ignore_collect(collection_path, config):
    return selection.ignore(collection_path, config)


def pytest_runtest_setup(item):
    chaos.setup(item)


@pytest.fixture(scope='module', autouse=True)
def own_rewards():
    "Functions of a user's file are registered for a whole process: they end with their test file"
    yield
    if registries := sys.modules.get('compassrl.data.data_settings'):
        for name in [n for n in registries.verifiers if ':' in n]:
            del registries.verifiers[name]


@pytest.fixture(scope='module')
def browser():
    "A headless Chromium, if one is installed"
    with chromium() as started:
        yield started
