"""What sets the factor by which router replay divides the gap: depth, or the size of one flip?

Mixtures of L layers, E experts, top-k. `untrained`: random weights times four, so experts differ
much. `trained`: a cold start on sums and strings together, looked at on held-out ones. Weights are
rounded to bfloat16 once, so rollout and trainer hold the same ones: a trainer with float32
masters would add the rounding of the weights, which no replay removes.
The rollout runs in bfloat16 and records routes;
trainers look again in float32 and in bfloat16, with their own routes and with those of the
rollout. `floor` is a float32 rollout: what is left where no choice can flip.
`swap` is what one flip weighs: mean |change of the log-prob| of a token where the last of its k
experts of the middle layer is another one, by lot.

The law to test: a flip changes a share of about 1/k, so the gap's factor falls with k and k3's with
its square, both rise with `swap`, and neither grows with L once it is above 4.
Last line: one JSON object; `ratio` is the largest factor of k3 among trained mixtures, or of all
where none was trained.
usage: make study NAME=flip_size          on a CPU, about five minutes on two cores
       python benchmarks/studies/flip_size.py --gpu   the larger grid, about four minutes on an H100
                                                      (not run on GPU)
       python benchmarks/studies/flip_size.py --tiny  a small case, to see that it runs
"""

import argparse
import json
import math
import statistics
from dataclasses import dataclass, replace

import torch
from _evidence import allowed, interval, library
from _runner import prompts_of, rounded

from compassrl.algo.engine_gap import discrepancy
from compassrl.data.tokenizer import build_tokenizer
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.records import Request, SamplingParams, collate, derive_seed
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.runs.presets import tiny_cpu
from compassrl.runs.summary import machine_info
from compassrl.train.sft import cold_start
from compassrl.train.torch_train import TorchTrain
from compassrl.train.train_settings import OptimConfig

SHOWN = (('arithmetic', 1.25, 0.5), ('strings', 1.5, 0.5))


@dataclass(frozen=True)
class Grid:
    "What is measured on a machine"

    untrained: tuple[tuple[int, int, int], ...]  # layers, experts, top-k
    trained: tuple[tuple[int, int, int], ...]
    width: int = 64
    expert: int = 32
    prompts: int = 64
    tokens: int = 32
    steps: int = 600  # a cold start's
    seeds: tuple[int, ...] = (1200, 1201, 1202)
    device: str = 'cpu'


DEPTHS = (1, 16, 2), (4, 16, 2), (8, 16, 2)
WIDTHS = (4, 16, 1), (4, 16, 4), (4, 16, 8)
LARGE = tuple((n, *ek) for n in (4, 8, 16) for ek in ((16, 1), (16, 2), (16, 4), (64, 4), (128, 8)))
GRIDS = dict(
    cpu=Grid(DEPTHS + WIDTHS, ((2, 8, 1), (2, 8, 2), (2, 8, 4))),
    gpu=Grid(LARGE, LARGE[5:10], 512, 256, 512, 128, 400, device='cuda'),
    tiny=Grid(((1, 4, 2),), ((1, 4, 1),), 16, 8, 4, 4, 2, (1200, 1201)),
)


def policy_of(grid, shape, seed, trained):
    "Weights that bfloat16 can hold, in float32"
    layers, experts, top_k = shape
    cfg = PolicyConfig(
        vocab_size=tiny_cpu().policy.vocab_size,
        num_hidden_layers=layers,
        hidden_size=grid.width,
        num_experts=experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=grid.expert,
    )
    policy = Policy(cfg, seed).to(grid.device)
    if trained:
        tok, sft = build_tokenizer(), replace(tiny_cpu().cold_start, steps=grid.steps)
        optim = replace(tiny_cpu().optim, lr=sft.lr, num_mini_batches=1)
        shown = prompts_of(SHOWN, 4096, seed, 'train')
        for _ in cold_start(TorchTrain(policy, optim, replay='off'), shown, sft, tok, seed):
            pass
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(4 if p.dim() > 1 and not trained else 1).copy_(p.bfloat16().float())
    return policy


def rolled(grid, policy, seed, dtype, trained):
    "Responses, with log-probs and routes of the rollout"
    rollout = TorchRollout(policy.config, grid.prompts, dtype, grid.device)
    engine = TorchTrain(policy, OptimConfig(), replay='off')
    rollout.load_weights(engine.weights(), 0)
    lot = torch.Generator().manual_seed(seed)
    vocab, num = policy.config.vocab_size, grid.prompts
    ids = torch.randint(3, vocab, (num, 6), generator=lot).tolist()
    if trained:
        ids = [p.token_ids for p in prompts_of(SHOWN, num, seed, 'heldout')]
    params = SamplingParams(grid.tokens, stop_ids=policy.config.eos_ids if trained else ())
    asked = [
        Request(f'p{i:03}', tuple(x), 0, derive_seed(seed, i), params) for i, x in enumerate(ids)
    ]
    return collate(sorted(rollout.generate(asked), key=lambda s: s.prompt_id))


def seen(policy, batch, mode):
    scored = TorchTrain(policy, OptimConfig(), replay=mode).score(batch)
    return replace(batch, **scored)


def swapped(policy, batch, seed):
    "Mean change of a log-prob where a layer's last expert of each token is another one"
    cfg, routes = policy.config, batch.routed_experts.clone()
    if cfg.num_experts_per_tok == cfg.num_experts:
        return 0.0
    layer, lot = cfg.num_hidden_layers // 2, torch.Generator().manual_seed(seed)
    here = routes[:, :, layer].long()
    free = torch.ones(*here.shape[:2], cfg.num_experts).scatter(2, here, 0.0)
    other = torch.multinomial(free.flatten(0, 1), 1, generator=lot).view(here.shape[:2])
    routes[:, :, layer, -1] = other.to(routes.dtype)
    before = seen(policy, batch, 'R3').old_log_probs
    after = seen(policy, replace(batch, routed_experts=routes), 'R3').old_log_probs
    return float((after - before)[batch.response_mask].abs().mean())


KEYS = dict(gap='rollout_train_gap', k3='rollout_train_k3', f2='rollout_train_f2')


def measured(grid, shape, seed, trained):
    "One mixture: gaps of either trainer, agreement, floor and the size of a flip"
    policy = policy_of(grid, shape, seed, trained)
    batch = rolled(grid, policy, seed, torch.bfloat16, trained)
    row = dict(zip(('layers', 'experts', 'top_k'), shape)) | dict(seed=seed, trained=trained)
    low = Policy(policy.config).to(grid.device, torch.bfloat16)
    low.load_state_dict(policy.state_dict())
    for name, trainer in dict(float32=policy, bfloat16=low).items():
        for mode in ('off', 'R3'):
            found = discrepancy(seen(trainer, batch, mode))
            row[f'{name}_{mode}'] = {k: found[v] for k, v in KEYS.items()}
    row['agree'] = found['routes_agree_frac']
    plain = rolled(grid, policy, seed, torch.float32, trained)
    row['floor'] = discrepancy(seen(policy, plain, 'off'))['rollout_train_gap']
    return row | dict(swap=swapped(policy, batch, seed), library=library())


def factor(rows, key, trainer='float32'):
    "Off over R3: geometric mean over seeds and its 95 % interval"
    logs = [math.log(r[f'{trainer}_off'][key] / r[f'{trainer}_R3'][key]) for r in rows]
    return [math.exp(x) for x in interval(logs)]


def cells(rows):
    "A line for each kind of mixture"
    out = []
    for key in dict.fromkeys((r['trained'], r['layers'], r['experts'], r['top_k']) for r in rows):
        mine = [r for r in rows if (r['trained'], r['layers'], r['experts'], r['top_k']) == key]
        cell = dict(zip(('trained', 'layers', 'experts', 'top_k'), key))
        cell |= {k: factor(mine, k) for k in ('gap', 'k3')}
        cell |= dict(k3_bfloat16=factor(mine, 'k3', 'bfloat16'))
        means = {k: statistics.fmean(r[k] for r in mine) for k in ('agree', 'swap', 'floor')}
        out.append(cell | means)
    return out


def slope(found, x, y):
    "Of log y over log x, over cells, with its 95 % interval by leaving out one cell at a time"
    points = [(math.log(x(c)), math.log(y(c))) for c in found if x(c) > 0 and y(c) > 0]
    if len({a for a, _ in points}) < 3:
        return None
    full = statistics.linear_regression(*zip(*points)).slope
    n = len(points)
    parts = [
        statistics.linear_regression(*zip(*(points[:i] + points[i + 1 :]))).slope for i in range(n)
    ]
    return interval([n * full - (n - 1) * p for p in parts])  # the jackknife's pseudo-values


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--gpu', action='store_true', help='the larger grid, on CUDA')
    p.add_argument('--tiny', '--quick', action='store_true', help='a small case on a CPU')
    a = p.parse_args()
    name = 'tiny' if a.tiny else 'gpu' if a.gpu else 'cpu'
    grid, rows = GRIDS[name], []
    torch.set_num_threads(1)
    asked = [(s, False) for s in grid.untrained] + [(s, True) for s in grid.trained]
    for shape, trained in asked:
        for seed in allowed(grid.seeds):
            rows.append(measured(grid, shape, seed, trained))
        c = cells(rows[-len(grid.seeds) :])[0]
        print(
            shape, 'trained' * trained, 'gap / {:.2f}, k3 / {:.1f}'.format(c['gap'][0], c['k3'][0])
        )
    table = cells(rows)
    best = max((c for c in table if c['trained']), key=lambda c: c['k3'][0])
    slopes = dict(k3_over_swap=slope(table, lambda c: c['swap'], lambda c: c['k3'][0]))
    same = [c for c in table if not c['trained'] and c['experts'] == 16 and c['layers'] == 4]
    slopes |= dict(k3_over_k=slope(same, lambda c: c['top_k'], lambda c: c['k3'][0]))
    slopes |= dict(gap_over_k=slope(same, lambda c: c['top_k'], lambda c: c['gap'][0]))
    found = dict(name='flip_size', ratio=round(best['k3'][0], 3))
    found |= dict(units='largest factor of k3 in a trained mixture')
    settings = dict(grid=name, seeds=grid.seeds, width=grid.width, steps=grid.steps)
    by_shape = {
        '{layers}x{experts}_{top_k}'.format(**c) + '_trained' * c['trained']: c for c in table
    }
    found |= dict(by_shape=rounded(by_shape), slopes=slopes, runs=rounded(rows), settings=settings)
    found |= dict(gpu='' if a.gpu else 'not run on GPU')
    print(json.dumps(found | dict(machine=machine_info())))


if __name__ == '__main__':
    main()
