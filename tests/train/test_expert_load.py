"Load of experts: counted as a loop does, balanced as Megatron-Core does; it ends no run"

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from compassrl.config import TrainConfig
from compassrl.model.policy import PolicyConfig
from compassrl.model.pretrained import hf_weights
from compassrl.records import Request, SamplingParams, collate, derive_seed
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.runs.factory import check_engines
from compassrl.train.routes import (
    balance_slopes,
    balanced,
    expert_counts,
    expert_load,
    move_expert_bias,
    sparse_layers,
)
from compassrl.train.torch_train import OptimConfig, TorchTrain, accumulate_grads
from tests.support.ranks import lively

CONFIG = PolicyConfig(
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=32,
    moe_intermediate_size=16,
    num_experts=6,
    mlp_only_layers=(0,),
    max_position_embeddings=64,
)


def sampled(policy, n=12):
    rollout = TorchRollout(policy.config, n, torch.float)
    rollout.load_weights(hf_weights(policy), 0)
    params = SamplingParams(12, stop_ids=(1,))
    requests = [Request(f'p{i}', (2 + i // 4, 3, 4), 0, derive_seed(i), params) for i in range(n)]
    b = collate(sorted(rollout.generate(requests), key=lambda s: int(s.prompt_id[1:])))
    return replace(b, advantages=b.response_mask * torch.linspace(-1, 1, n)[:, None])


def nothing(log_probs, batch, num_tokens, num_samples):
    return 0 * log_probs.sum(), {}


POLICY = lively(CONFIG)
BATCH = sampled(POLICY)


def test_counts_are_those_of_a_loop():
    counts = torch.zeros(3, 6)
    for i, row in enumerate(BATCH.routed_experts.tolist()):
        for t, layers in enumerate(row):
            for layer in (1, 2) if BATCH.routes_valid[i, t] else ():
                for e in layers[layer]:
                    counts[layer, e] += 1
    assert torch.equal(expert_counts(BATCH, CONFIG), counts)
    found = expert_load(BATCH, CONFIG)
    share = counts[2] / counts[2].sum()
    assert found['expert_busiest_frac/2'] == pytest.approx(2 * share.max().item())
    assert found['expert_busiest_frac'] == max(found[f'expert_busiest_frac/{i}'] for i in (1, 2))
    assert found['experts_idle_frac'] == (counts[1:] == 0).float().mean().item()


def test_even_collapsed_and_dense():
    T = BATCH.token_ids.shape[1]
    places = torch.arange(BATCH.token_ids.numel()).view(-1, T, 1, 1)
    ways = (places + torch.tensor([0, 3])) % 6
    even = replace(BATCH, routed_experts=ways.expand(-1, -1, 3, -1).contiguous())
    even = replace(even, routes_valid=torch.ones_like(BATCH.routes_valid))
    assert expert_load(even, CONFIG)['expert_entropy'] == pytest.approx(1, abs=1e-2)
    one = replace(BATCH, routed_experts=BATCH.routed_experts * 0 + torch.tensor([2, 5]))
    found = expert_load(one, CONFIG)
    assert found['expert_busiest_frac'] == 1 and found['experts_idle_frac'] == pytest.approx(4 / 6)
    assert expert_load(BATCH, replace(CONFIG, mlp_only_layers=(0, 1, 2))) == {}
    assert expert_load(replace(BATCH, routed_experts=None), CONFIG) == {}


def router_gradients(policy, batch, coef, max_tokens):
    with balanced(policy, batch, coef):
        accumulate_grads(policy, batch, nothing, max_tokens)
    return [mlp.router.grad.clone() for _, mlp in sparse_layers(policy)]


@pytest.mark.parametrize('max_tokens', [1, 40, 10**6])
def test_gradient_is_that_of_megatron_core(max_tokens):
    "Its own function on all probabilities at once; shared prompts and micro-batches change nothing"
    from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func

    seen, total = {}, torch.zeros(())
    for i, mlp in sparse_layers(POLICY):
        mlp.register_forward_hook(
            lambda m, x, y, i=i: seen.update({i: (x[0] @ m.router.T).softmax(-1)})
        )
    POLICY(BATCH.token_ids, BATCH.token_mask, BATCH.routed_experts, BATCH.routes_valid)
    for i, mlp in sparse_layers(POLICY):
        mlp._forward_hooks.clear()
        counts = expert_counts(BATCH, CONFIG)[i]
        # tokens without a route, the last of each response, are in no count
        counts = counts * len(seen[i]) / (counts.sum() / 2)
        total = total + switch_load_balancing_loss_func(seen[i], counts, len(seen[i]), 2, 6, 0.3)
    want = torch.autograd.grad(total, [mlp.router for _, mlp in sparse_layers(POLICY)])
    for got, w in zip(router_gradients(POLICY, BATCH, 0.3, max_tokens), want, strict=True):
        torch.testing.assert_close(got, w, rtol=1e-4, atol=1e-7)
    assert all(mlp.slopes is None for _, mlp in sparse_layers(POLICY))


def test_the_loss_is_smallest_where_probabilities_are_even():
    "Slopes favour whoever has few tokens"
    slopes, counts = balance_slopes(BATCH, CONFIG, 1.0), expert_counts(BATCH, CONFIG)
    assert torch.equal(slopes[1:].argsort(), counts[1:].argsort()) and not slopes[0].any()


def test_bias_moves_as_in_megatron_core():
    import megatron.core.transformer.moe.moe_utils as moe_utils

    policy = lively(replace(CONFIG, router_score='sigmoid'))
    batch = sampled(policy)
    before = {i: mlp.correction.clone() for i, mlp in sparse_layers(policy)}
    move_expert_bias(policy, batch, 0.01)
    counts = expert_counts(batch, policy.config)
    with (  # one process has no group to sum over
        patch.object(torch.distributed, 'all_reduce'),
        patch.object(moe_utils.parallel_state, 'get_tensor_and_data_parallel_group'),
    ):
        for i, mlp in sparse_layers(policy):
            want = moe_utils.get_updated_expert_bias(counts[i].clone(), before[i], 0.01)
            torch.testing.assert_close(mlp.correction, want)
    with pytest.raises(ValueError, match='no bias, use aux_loss_coef'):
        move_expert_bias(POLICY, BATCH, 0.01)


def test_bias_is_handed_over_with_the_weights():
    policy = lively(replace(CONFIG, router_score='sigmoid'))
    engine = TorchTrain(policy, OptimConfig(expert_bias_rate=0.01))
    batch = sampled(policy)
    batch = replace(batch, **engine.score(batch))
    engine.update(batch, nothing)
    biases = [v for k, v in engine.weights() if k.endswith('e_score_correction_bias')]
    assert len(biases) == 2 and all(b.any() for b in biases)


@pytest.mark.parametrize('K, norm', [(1, False), (2, True)])
def test_routers_of_zeros_train_on(K, norm):
    "As after upcycling: every token takes the first experts"
    policy = lively(replace(CONFIG, num_experts_per_tok=K, norm_topk_prob=norm))
    with torch.no_grad():
        for _, mlp in sparse_layers(policy):
            mlp.router.zero_()
    batch = sampled(policy)
    for replay in ('R2', 'R3'):
        engine = TorchTrain(policy, OptimConfig(lr=1e-3), replay=replay)
        b = replace(batch, **engine.score(batch))
        metrics, _ = engine.update(b, nothing)
        assert expert_load(b, policy.config)['expert_busiest_frac'] == 1 and metrics['loss'] == 0


@pytest.mark.parametrize(
    'optim, policy, message',
    [
        (dict(expert_bias_rate=0.1), {}, 'softmax routers have no bias'),
        (dict(aux_loss_coef=0.1), dict(mlp_only_layers=tuple(range(9))), 'has no experts'),
    ],
)
def test_what_cannot_be_balanced_is_refused(optim, policy, message):
    cfg = TrainConfig()
    cfg = replace(cfg, optim=OptimConfig(**optim), policy=replace(cfg.policy, **policy))
    with pytest.raises(ValueError, match=message):
        check_engines(cfg, 1)
    with pytest.raises(ValueError, match='counts recorded routes'):
        replace(cfg, router_replay='off')
