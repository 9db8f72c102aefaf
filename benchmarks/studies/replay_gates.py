"""What do replayed gates add to replayed experts, in a policy that has been trained, and what do
they cost?

The policies and their answers are made as in `replay_gap`. The trainer looks again in float32: with
its own routes ('off'), with the rollout's experts ('R3'), with its gates as well ('R3-gates').
`gradient` is that of a policy loss with random advantages, in bfloat16: the routers' share of its
norm ('R3'); and how far it is from that with replayed gates, whose gradient is that of the
trainer's own gates ('straight') or that are constants ('constant'), for routers and other weights.
Last line: one JSON object; `ratio` is the mean gap with 'R3' over that with 'R3-gates', bfloat16.
usage: make study NAME=replay_gates, python benchmarks/studies/replay_gates.py [--quick]
"""

import json
from dataclasses import replace

import torch
from _runner import interval, rounded
from _tables import flags
from replay_gap import MIX, STUDY, factor, policies

from compassrl.algo.losses import LossConfig, PolicyLoss
from compassrl.model.policy import MoE
from compassrl.runs.summary import machine_info
from compassrl.train.routes import sparse_layers
from compassrl.train.torch_train import accumulate_grads

MODES = 'off', 'R3', 'R3-gates'


def gradient(policy, batch, constant=False):
    "Of the routers, and of all other weights: two vectors"
    mixtures = [mlp for _, mlp in sparse_layers(policy)] if constant else []
    for mlp in mixtures:
        mlp.gates = lambda *args, m=mlp: MoE.gates(m, *args).detach()
    accumulate_grads(policy, batch, PolicyLoss(LossConfig('grpo')), 16_384)
    for mlp in mixtures:
        del mlp.gates
    parts = {True: [], False: []}
    for name, p in policy.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        parts[name.endswith('router')].append(grad.double().flatten())
    return torch.cat(parts[True]), torch.cat(parts[False])


def gradients(engines, batch, seed):
    "What replayed gates do to them"
    engine = engines['R3-gates']
    draw = torch.randn(len(batch), 1, generator=torch.Generator().manual_seed(seed))
    batch = replace(batch, advantages=draw * batch.response_mask)
    batch = replace(batch, **engine.score(batch))
    want = gradient(engine.policy, replace(batch, routed_gates=None))
    found = dict(router_share=float(want[0].norm() / torch.cat(want).norm()))
    for how in ('straight', 'constant'):
        got = gradient(engine.policy, batch, how == 'constant')
        far = [float((a - b).norm() / b.norm()) for a, b in zip(got, want)]
        found |= {f'{how}_{part}': x for part, x in zip(('routers', 'others'), far)}
    assert found['constant_routers'] == 1, 'constants leave the routers no gradient'
    return dict(gradient=found)


def summed_up(runs, name):
    "A row of the table"
    out = {
        part: {k: interval([r[name][part][k] for r in runs])[0] for k in runs[0][name][part]}
        for part in (*MODES, 'gradient')
    }
    for what, before, after in (('experts', 'off', 'R3'), ('gates', 'R3', 'R3-gates')):
        out[what] = {k: factor(runs, name, k, before, after) for k in ('gap', 'k3')}
    return out


def main():
    quick = flags(__doc__).quick
    torch.set_num_threads(1)
    runs = policies(quick, MODES, gradients, return_gates=True)
    table = {name: summed_up(runs, name) for name in runs[0]}
    for name, row in table.items():
        gap = '{:.3f} [{:.3f}, {:.3f}]'.format(*row['gates']['gap'])
        print(f'{name:9} gates: gap / {gap}', rounded(row['gradient']))
    units = 'mean |gap| of log-probs in bfloat16 with replayed experts / with gates as well'
    found = dict(name='replay_gates', ratio=round(table['bfloat16']['gates']['gap'][0], 3))
    found |= dict(units=units, table=rounded(table), runs=runs)
    settings = dict(prompts=64, samples=8, task=MIX, quick=quick)
    settings |= dict(seeds=list(STUDY.seeds[: len(runs)]))
    print(json.dumps(found | dict(settings=settings, machine=machine_info())))


if __name__ == '__main__':
    main()
