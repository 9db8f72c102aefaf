"Merging against naive steps on whole vectors, against peft, and on the command line"

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from compassrl.model.merge import (
    MergeConfig,
    elect,
    is_router,
    kth_largest,
    merge_checkpoints,
    merge_tensor,
)
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import from_pretrained, hf_weights, save_pretrained
from compassrl.runs.cli import main

SHAPE = PolicyConfig(hidden_size=16, head_dim=8, num_hidden_layers=2, num_experts=4)


@pytest.fixture(scope='module')
def home(tmp_path_factory):
    "A base, and three models that began with it; each in several shards"
    home = tmp_path_factory.mktemp('merge')
    torch.manual_seed(0)
    base = Policy(SHAPE)
    save_pretrained(base, home / 'base', 20_000)
    for name in 'abc':
        model = Policy(SHAPE)
        model.load_state_dict(base.state_dict())
        with torch.no_grad():
            for p in model.parameters():
                p += 0.01 * torch.randn_like(p) ** 3
        save_pretrained(model, home / name, 30_000 if name == 'a' else 4 << 30)
    return home


def vector(folder):
    return torch.cat([t.double().flatten() for _, t in hf_weights(from_pretrained(folder))])


def naive(base, models, weights, density, scale=1.0):
    "The three steps in fp64, weight by weight"
    out, trimmed = [], []
    for m in models:
        tau = (m.float() - base.float()).double()  # what fp32 files say
        kept = tau.abs().argsort(descending=True, stable=True)[: int(density * len(tau))]
        trimmed.append(torch.zeros_like(tau).index_copy(0, kept, tau[kept]))
    for i in range(len(base)):
        column = [(w, t[i].item()) for w, t in zip(weights, trimmed)]
        sign = 1 if sum(w * x for w, x in column) >= 0 else -1
        agree = [(w, x) for w, x in column if w and x * sign > 0]
        mean = sum(w * x for w, x in agree) / sum(w for w, _ in agree) if agree else 0.0
        out.append(base[i].item() + scale * mean)
    return torch.tensor(out, dtype=torch.double)


@pytest.mark.parametrize('weights', [(1, 1, 1), (0.5, 0.3, 0.2), (0, 2, 1)])
@pytest.mark.parametrize('density, scale', [(0.2, 1.0), (0.6, 0.7), (1.0, 1.0)])
def test_ties_of_files_is_ties_of_vectors(home, tmp_path, weights, density, scale):
    cfg = MergeConfig(weights=tuple(map(float, weights)), density=density, scale=scale)
    merge_checkpoints([home / n for n in 'abc'], tmp_path / 'out', cfg, home / 'base')
    want = naive(vector(home / 'base'), [vector(home / n) for n in 'abc'], weights, density, scale)
    torch.testing.assert_close(vector(tmp_path / 'out'), want, rtol=0, atol=1e-6)


def test_ties_of_tensors_is_that_of_peft():
    found = find_spec('peft')
    if not found:
        pytest.skip('needs peft: pip install peft')
    # this file alone: the package takes many seconds to import
    file = Path(found.origin).parent / 'utils' / 'merge_utils.py'
    ties = run_path(str(file))['ties']
    torch.manual_seed(0)
    taus = torch.randn(3, 40, 25) ** 3
    for density in (0.1, 0.5, 0.99):
        want = ties(list(taus), torch.ones(3), density)
        got = merge_tensor(torch.zeros(40, 25), taus, MergeConfig(density=density))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_a_tensor_is_trimmed_by_itself_if_asked(home, tmp_path):
    cfg = MergeConfig(density_of='tensor', density=0.5)
    merge_checkpoints([home / 'a', home / 'b'], tmp_path / 'out', cfg, home / 'base')
    got, base, a, b = (
        dict(hf_weights(from_pretrained(f)))
        for f in (tmp_path / 'out', home / 'base', home / 'a', home / 'b')
    )
    for name in base:
        x, y, z = (t[name].double().flatten() for t in (base, a, b))
        want = naive(x, [y, z], (1, 1), 0.5).view_as(base[name])
        torch.testing.assert_close(got[name].double(), want, rtol=0, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=9), min_size=1, max_size=5),
    st.floats(0.01, 1),
)
def test_threshold_is_the_kth_largest(parts, density):
    parts = [torch.tensor(p) for p in parts]
    whole = torch.cat(parts).abs().sort(descending=True).values
    keep = int(density * len(whole))
    want = whole[keep - 1].item() if keep else torch.inf
    assert kth_largest(lambda: parts, density) == want


def test_linear_and_task_arithmetic(home, tmp_path):
    base, a, b = (vector(home / n) for n in ('base', 'a', 'b'))
    two = [home / 'a', home / 'b']
    cfg = MergeConfig(method='linear', weights=(3.0, 1.0))
    merge_checkpoints(two, tmp_path / 'linear', cfg)
    torch.testing.assert_close(vector(tmp_path / 'linear'), 0.75 * a + 0.25 * b, rtol=0, atol=1e-6)
    cfg = MergeConfig(method='task_arithmetic', weights=(0.5, 0.25), scale=2.0)
    merge_checkpoints(two, tmp_path / 'sum', cfg, home / 'base')
    want = base + (a - base) + 0.5 * (b - base)
    torch.testing.assert_close(vector(tmp_path / 'sum'), want, rtol=0, atol=1e-6)


def test_fp64_is_merged_in_fp64(home, tmp_path):
    "Changes of 1e-12 are no changes in fp32"
    gen = torch.Generator().manual_seed(0)
    for name in 'xyz':
        policy = from_pretrained(home / 'base', torch.float64)
        with torch.no_grad():
            for p in policy.parameters():
                p += 1e-12 * torch.randn(p.shape, generator=gen, dtype=p.dtype)
        save_pretrained(policy, tmp_path / name)
    a, b, base = (dict(hf_weights(from_pretrained(tmp_path / n, torch.float64))) for n in 'xyz')
    cfg, two = MergeConfig(density=0.3, weights=(0.7, 0.3)), [tmp_path / 'x', tmp_path / 'y']
    merge_checkpoints(two, tmp_path / 'out', cfg, tmp_path / 'z')
    got = dict(hf_weights(from_pretrained(tmp_path / 'out', torch.float64)))
    changed, kept = 0, []
    for m in (a, b):
        size = torch.cat([(m[n] - base[n]).abs().flatten() for n in base]).sort(descending=True)
        kept.append(size.values[int(0.3 * len(size.values)) - 1])
    for n, root in base.items():
        x, y = (torch.where((m[n] - root).abs() >= t, m[n] - root, 0) for m, t in zip((a, b), kept))
        sign = torch.where(0.7 * x + 0.3 * y >= 0, 1, -1)
        wx, wy = 0.7 * (x * sign > 0), 0.3 * (y * sign > 0)
        want = root + (wx * x + wy * y) / (wx + wy).clamp(min=1e-9)
        torch.testing.assert_close(got[n], want, rtol=0, atol=1e-15)
        changed += int((got[n] != root).sum())
    assert changed > 1000
    values = [torch.rand(50, generator=gen, dtype=torch.float64) - 0.5 for _ in range(3)]
    assert kth_largest(lambda: values, 0.5) == torch.cat(values).abs().sort().values[-75].item()


def test_models_that_pull_with_equal_force_go_up():
    "Plus wins, as in peft and mergekit"
    pull = torch.tensor([[0.5, -0.25], [-0.5, 0.25]])
    assert elect(pull, torch.ones(2)).tolist() == [1, 1]
    merged = merge_tensor(torch.zeros(2), pull, MergeConfig(density=1.0))
    assert merged.tolist() == [0.5, 0.25]
    assert elect(pull, torch.tensor([1.0, 2.0])).tolist() == [-1, 1]


def test_routers_of_one_model(home, tmp_path):
    two = [home / 'a', home / 'b']
    merge_checkpoints(two, tmp_path / 'all', MergeConfig(density=1.0), home / 'base')
    merge_checkpoints(
        two, tmp_path / 'second', MergeConfig(density=1.0, router_from=2), home / 'base'
    )
    merged, taken, second = (
        dict(hf_weights(from_pretrained(f)))
        for f in (tmp_path / 'all', tmp_path / 'second', home / 'b')
    )
    routers = [name for name in merged if is_router(name)]
    assert len(routers) == SHAPE.num_hidden_layers
    for name in merged:
        same = second if name in routers else merged
        assert taken[name].equal(same[name])
    assert not any(merged[name].equal(second[name]) for name in routers)
    cfg = MergeConfig(density=0.2, router_from=2)
    merge_checkpoints(two, tmp_path / 'some', cfg, home / 'base')
    base, first, some = (
        dict(hf_weights(from_pretrained(f))) for f in (home / 'base', home / 'a', tmp_path / 'some')
    )
    rest = [name for name in base if name not in routers]  # they alone count for the threshold
    x, y, z = (torch.cat([t[n].flatten() for n in rest]) for t in (base, first, second))
    got = torch.cat([some[n].flatten() for n in rest]).double()
    want = naive(x.double(), [y.double(), z.double()], (1, 1), 0.2)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_type_and_other_files_are_those_of_the_first(home, tmp_path):
    for name in ('base', 'a', 'b'):
        policy = from_pretrained(home / name, torch.bfloat16)
        save_pretrained(policy, tmp_path / name)
        (tmp_path / name / 'vocab.json').write_text(json.dumps({'of': name}))
    two = [tmp_path / 'a', home / 'b']  # two types
    merge_checkpoints(two, tmp_path / 'out', base=tmp_path / 'base')
    weights = load_file(tmp_path / 'out' / 'model.safetensors')
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / 'out' / 'vocab.json').read_text()) == {'of': 'a'}
    assert json.loads((tmp_path / 'out' / 'config.json').read_text())['dtype'] == 'bfloat16'


def test_command(home, tmp_path, capsys):
    a, b, base, out = (str(p) for p in (home / 'a', home / 'b', home / 'base', tmp_path / 'out'))
    main(['merge', a, b, '--base', base, '--out', out, '--weights', '0.7', '0.3'])
    assert capsys.readouterr().out.splitlines()[-1] == out
    merge_checkpoints([a, b], tmp_path / 'same', MergeConfig(weights=(0.7, 0.3)), base)
    assert vector(out).equal(vector(tmp_path / 'same'))


def folder_of_nan(home, tmp_path):
    policy = from_pretrained(home / 'a')
    with torch.no_grad():
        policy.embed[0, 0] = torch.nan
    save_pretrained(policy, tmp_path / 'nan')
    return str(tmp_path / 'nan')


def folder_of_another_shape(home, tmp_path):
    save_pretrained(Policy(replace(SHAPE, num_experts=2, num_experts_per_tok=1)), tmp_path / 'two')
    return str(tmp_path / 'two')


def torn_folder(home, tmp_path):
    save_pretrained(from_pretrained(home / 'a'), tmp_path / 'torn')
    file = tmp_path / 'torn' / 'model.safetensors'
    file.write_bytes(file.read_bytes()[:-100])
    return str(tmp_path / 'torn')


WRONG = {
    'one': (['A', '--base', 'BASE'], 'at least two'),
    'no base': (['A', 'B'], '--base'),
    'weights': (['A', 'B', '--base', 'BASE', '--weights', '1'], 'weights=(1.0,)'),
    'no weight': (['A', 'B', '--base', 'BASE', '--weights', '0', '0'], 'not all of them 0'),
    'negative': (['A', 'B', '--base', 'BASE', '--weights', '-1', '1'], 'weights'),
    'density': (['A', 'B', '--base', 'BASE', '--density', '0'], 'density=0'),
    'router': (['A', 'B', '--base', 'BASE', '--router-from', '3'], 'router_from=3'),
    'nowhere': (['A', 'nowhere', '--base', 'BASE'], 'nowhere'),
    'nan': (['A', folder_of_nan, '--base', 'BASE'], 'not finite'),
    'shape': (['A', folder_of_another_shape, '--base', 'BASE'], 'different shapes'),
    'torn': (['A', torn_folder, '--base', 'BASE'], 'cannot be read'),
}


@pytest.mark.parametrize('name', WRONG)
def test_wrong_input_is_one_line(home, tmp_path, name):
    words, why = WRONG[name]
    names = dict(A=home / 'a', B=home / 'b', BASE=home / 'base')
    words = [w(home, tmp_path) if callable(w) else str(names.get(w, w)) for w in words]
    with pytest.raises(SystemExit) as e:
        main(['merge', *words, '--out', str(tmp_path / 'out')])
    assert str(e.value.code).startswith('compassrl: ') and why in e.value.code, e.value.code
    assert '\n' not in e.value.code
    assert not (tmp_path / 'out' / 'config.json').exists()
