"What PyPI would show and a user installs: the wheel, its README, its extras, tested versions"

import configparser
import email
import re
import subprocess
import sys
import tomllib
import zipfile
from html.parser import HTMLParser

import pytest
import yaml
from packaging.requirements import Requirement

from tests.support import ROOT

PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
EXTRAS = PROJECT['optional-dependencies']
REPOSITORY = PROJECT['urls']['Repository']


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    pytest.importorskip('hatchling', reason='make .venv/.dev')
    folder = tmp_path_factory.mktemp('dist')
    command = [sys.executable, '-m', 'hatchling', 'build', '-t', 'wheel', '-d', str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.iterdir()
    return zipfile.ZipFile(path)


def named(wheel, end):
    (name,) = (n for n in wheel.namelist() if n.endswith(end))
    return wheel.read(name).decode()


@pytest.fixture(scope='module')
def metadata(wheel):
    return email.message_from_string(named(wheel, '/METADATA'))


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / 'compassrl').rglob('*.py')}
    held = {n for n in wheel.namelist() if '.dist-info/' not in n}
    assert modules | {'compassrl/py.typed'} <= held  # which tells type checkers to look
    templates = {p.relative_to(ROOT).as_posix() for p in (ROOT / 'compassrl').rglob('*.j2')}
    assert len(templates) >= 5 and templates <= held  # job scripts are made from them
    assert {n.split('/')[0] for n in held} == {'compassrl'}
    assert not [n for n in held if '__pycache__' in n]


def test_the_wheel_has_the_command_and_the_plugin_of_vllm(wheel):
    entries = configparser.ConfigParser()
    entries.read_string(named(wheel, '/entry_points.txt'))
    assert entries['console_scripts']['compassrl'] == 'compassrl.__main__:main'
    assert entries['vllm.general_plugins']['compassrl'].endswith(':register')


class Links(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.to = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.to += [v for k, v in attrs if k in ('href', 'src')]


def test_the_readme_renders_on_pypi_and_its_links_lead_into_the_repository(metadata):
    markdown = pytest.importorskip('readme_renderer.markdown', reason='make .venv/.dev')
    assert metadata['Description-Content-Type'] == 'text/markdown'
    html = markdown.render(metadata.get_payload())
    links = Links(html).to
    assert len(links) > 30 and '<table>' in html
    assert [to for to in links if not re.match(r'https?://|#', to)] == []
    inside = [to for to in links if to.startswith(REPOSITORY + '/')]
    files = {
        re.sub(rf'^{REPOSITORY}/(?:raw|blob)/main/', '', to).partition('#')[0] for to in inside
    }
    assert len(files) > 30 and [f for f in files if not (ROOT / f).is_file()] == []
    pictures = [to for to in links if re.search(r'\.(png|svg|gif)$', to)]
    assert pictures and all('/raw/main/' in to for to in pictures)


def test_readme_and_metadata_name_every_extra(metadata):
    (row,) = re.findall(r'^Extras: (.*)', (ROOT / 'README.md').read_text(), re.M)
    told = set(re.findall(r'`([\w-]+)`', row))
    assert EXTRAS.keys() <= told
    assert set(metadata.get_all('Provides-Extra')) == EXTRAS.keys()


def wanted(extras):
    "Requirements of the package with these extras"
    for line in [*PROJECT['dependencies'], *(r for e in extras for r in EXTRAS[e])]:
        r = Requirement(line)
        if r.name == PROJECT['name']:
            yield from wanted(r.extras)
        else:
            yield r


def test_the_tested_versions_are_versions_that_the_package_asks_for():
    "A changed requirement needs `make lock`"
    lines = (ROOT / 'constraints.txt').read_text().splitlines()
    tested = dict(line.split('==') for line in lines if not line.startswith('#'))
    tested = {re.sub(r'[-_.]+', '-', k).lower(): v for k, v in tested.items()}
    stale = [
        f'{r}: {tested.get(name)}'
        for r in wanted(['dev', 'docs', 'engines-cpu'])
        if (name := re.sub(r'[-_.]+', '-', r.name).lower()) not in tested
        or not r.specifier.contains(tested[name], prereleases=True)
    ]
    assert stale == []


def test_every_file_but_those_of_torch_has_a_hash():
    "constraints.lock is constraints.txt with hashes; uv refuses any other file"
    plain = (ROOT / 'constraints.txt').read_text()
    pins = re.sub(r'^#.*\n', '', (ROOT / 'constraints.lock').read_text(), flags=re.M)
    blocks = re.split(r'\n(?=\w)', pins.strip())
    assert [b.split()[0] for b in blocks] == [
        x for x in plain.split('\n') if x[:1] not in ('#', '')
    ]
    hashed = re.compile(r'\S+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+')
    assert [b.split('==')[0] for b in blocks if not hashed.fullmatch(b)] == ['torch']


def test_a_pull_request_runs_what_a_person_runs():
    jobs = yaml.safe_load((ROOT / '.github' / 'workflows' / 'ci.yml').read_text())['jobs']
    steps = {name: [s.get('run', '') for s in job['steps']] for name, job in jobs.items()}
    assert '${{ matrix.run }}' in steps['suite']
    user, root, busy = jobs['suite']['strategy']['matrix']['run']
    assert user == '.ci/run' and root.startswith('sudo ') and root.endswith(' .ci/run')
    assert busy.startswith('cp -r . /tmp/') and busy.endswith('SKEW=5 BUSY=1 .ci/run')
    (bwrap,) = (s for s in jobs['suite']['steps'] if 'install -y bubblewrap' in s.get('run', ''))
    assert bwrap['if'] == "${{ !contains(matrix.run, '/tmp') }}", 'with it, and without'
    assert jobs['suite']['steps'].index(bwrap) < steps['suite'].index('${{ matrix.run }}')
    assert any('-c constraints.lock .' in run for run in steps['core'])
    # without --strict a package that no list of holes knows is a warning, and the job passes
    assert any(re.match('pip-audit --strict .*-r constraints.txt', r) for r in steps['audit'])
    assert not any(job.get('if') or job.get('continue-on-error') for job in jobs.values())
    # types of the engines' calls are known where the engines are
    assert '\ncheck: .venv/.engines ' in (ROOT / 'Makefile').read_text()


def test_what_installs_without_hashes_is_named():
    "In the sentence of SECURITY.md: all that neither is `make` nor names the lock file"
    jobs = yaml.safe_load((ROOT / '.github' / 'workflows' / 'ci.yml').read_text())['jobs']
    runs = {n: ' '.join(s.get('run', '') for s in job['steps']) for n, job in jobs.items()}
    runs['suite'] += (ROOT / '.ci/run').read_text()
    by_hash = {n for n, run in runs.items() if re.search(r'make \w|-c constraints.lock', run)}
    said = (ROOT / 'SECURITY.md').read_text()
    with_hashes, without = re.search(r'hashes of (.*?)Without hashes: (.*?)\n', said).groups()
    jobs_of = re.compile(r'jobs? ((?:`\w+`(?:, | and )?)+)')
    names = [
        set(re.findall(r'\w+', x[1])) - {'and'} for x in map(jobs_of.search, (with_hashes, without))
    ]
    assert names == [by_hash, runs.keys() - by_hash]
    for kind, named in (('cpu', with_hashes), ('gpu', without)):
        text = (ROOT / f'docker/{kind}.Dockerfile').read_text()
        assert ('RUN make ' in text) == (kind == 'cpu') and f'image for {kind.upper()}s' in named


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / 'CITATION.cff').read_text())
    version = re.search(r"__version__ = '(.+)'", (ROOT / 'compassrl/__init__.py').read_text())[1]
    assert cited['version'] == version and cited['license'] == PROJECT['license']
    assert cited['repository-code'] == REPOSITORY


@pytest.mark.parametrize('file', sorted((ROOT / 'docker').iterdir()), ids=lambda p: p.name)
def test_an_image_installs_extras_and_presets_that_exist(file):
    from compassrl.runs.presets import presets

    text = file.read_text()
    extras = [e for found in re.findall(r'"\.\[([\w,-]+)\]"', text) for e in found.split(',')]
    targets = re.findall(r'make (\S+)', re.sub(r'install.*', '', text))
    assert set(extras) <= EXTRAS.keys() and (extras or targets)
    makefile = (ROOT / 'Makefile').read_text()
    assert all(f'\n{target}:' in makefile for target in targets)
    assert set(re.findall(r'train ([\w-]+)', text)) <= set(presets)
    assert text.startswith(dict(cpu='# BUILT AND RUN ONCE', gpu='# NOT BUILT HERE')[file.stem])
    flags = re.findall('--security-opt [a-z]+=unconfined', text)
    page = (ROOT / 'nbs/how_to/troubleshooting.ipynb').read_text()
    assert len(flags) == 3 and ' '.join(flags) in page
