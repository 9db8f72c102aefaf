"Every family and every column of the table in README, executed; the stored table says the same"

import json
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from compassrl.model.policy import MoE
from compassrl.model.pretrained import hf_weights
from compassrl.records import Request, SamplingParams, collate
from compassrl.rollout.fp8 import Fp8Rollout
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.train.routes import routes_agreement, validate_routes
from compassrl.train.torch_train import response_log_probs
from tests.support import ROOT, families
from tests.support import vllm_fork_server as vllm_forks
from tests.support.families import COLUMNS, FAMILIES, MIXTURES
from tests.support.gates import replay_gates

TABLE = json.loads((ROOT / 'benchmarks' / 'results' / 'families.json').read_text())


@pytest.fixture(scope='module', params=FAMILIES)
def family(request, tmp_path_factory):
    return request.param, *families.made(request.param, tmp_path_factory.mktemp('family'))


@pytest.fixture(scope='module')
def served(tmp_path_factory):
    home = tmp_path_factory.mktemp('served')
    made = {name: families.made(name, home / name) for name in FAMILIES}
    return families.served(made, home / 'log', vllm_forks.run)


@pytest.mark.parametrize('column', COLUMNS)
def test_the_table_says_what_is_so(family, column, request):
    name, model, policy, out = family
    by_vllm = column == 'serves in vLLM'
    if by_vllm and not find_spec('vllm'):
        pytest.skip('vLLM is not installed')
    served = request.getfixturevalue('served') if by_vllm else None
    assert TABLE[name][column] == families.claim(name, column, model, policy, out, served)


def test_the_table_is_whole():
    assert list(TABLE) == list(FAMILIES)
    assert all(list(row) == list(COLUMNS) for row in TABLE.values())


@pytest.mark.parametrize('fp8', [False, True])
def test_the_embedded_engine_samples_what_the_policy_says(family, fp8):
    "Log-probs and experts of its cache are those of a whole forward pass; FP8 is near"
    name, _, policy, _ = family
    c = policy.config
    engine = Fp8Rollout(c, 16) if fp8 else TorchRollout(c, 16)
    engine.load_weights(hf_weights(policy), 0)
    params = SamplingParams(30, stop_ids=c.eos_ids)
    asked = [Request(f'q{i}', tuple(range(5, 9 + i)), 0, i, params) for i in range(16)]
    b = collate(list(engine.generate(asked)))
    validate_routes(b, c)
    with torch.no_grad():
        log_probs = response_log_probs(policy, b, 1.0, fp8)[0]  # replayed, where rounding flips
        own = policy(b.token_ids, b.token_mask)[1]
    gap = (log_probs - b.rollout_log_probs)[b.response_mask].abs()
    assert 1e-4 < gap.mean() < 0.5 if fp8 else gap.max() < 1e-4
    if name in MIXTURES and not fp8:
        same = routes_agreement(own, b.routed_experts[b.token_mask], c)
        # Among thousands, a near tie may fall the other way
        assert (same[b.routes_valid[b.token_mask]] == 1).float().mean() > 0.99


def test_foreign_experts_get_live_gates(family):
    "The formula of each kind of router, for experts that it would not have chosen"
    name, _, policy, _ = family
    c = policy.config
    moe = next((b.mlp for b in policy.blocks if isinstance(b.mlp, MoE)), None)
    if moe is None:
        return
    x = torch.randn(9, c.hidden_size, generator=torch.Generator().manual_seed(0))
    logits = F.linear(x, moe.router)
    worst = logits.topk(c.num_experts_per_tok, largest=False).indices
    gates, ids, _ = moe.route(x, worst, torch.ones(9, dtype=torch.bool))
    want = replay_gates(logits, worst, c.router_score, c.norm_topk_prob, c.routed_scaling_factor)
    assert torch.equal(ids, worst)
    torch.testing.assert_close(gates, want)
    (up,) = torch.autograd.grad(gates[:, 0].sum(), moe.router)
    assert (up.abs().sum(1) > 0).any()


def test_a_layer_that_guesses_ahead_is_left_out(tmp_path):
    "GLM-4.5 is published with one more; neither file promises it afterwards"
    families.original('GLM-4-MoE', tmp_path / 'in')
    weights = load_file(tmp_path / 'in' / 'model.safetensors')
    weights |= {n.replace('layers.2.', 'layers.3.'): t.clone() for n, t in weights.items()}
    save_file(weights, tmp_path / 'in' / 'model.safetensors', metadata=dict(format='pt'))
    path = tmp_path / 'in' / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(num_nextn_predict_layers=1)))
    families.there_and_back(tmp_path / 'in', tmp_path / 'out')
    out = load_file(tmp_path / 'out' / 'model.safetensors')
    assert out.keys() == {n for n in weights if 'layers.3.' not in n}
    written = json.loads((tmp_path / 'out' / 'config.json').read_text())
    assert written['num_nextn_predict_layers'] == 0
    families.opened(tmp_path / 'out')
