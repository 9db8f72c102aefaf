"""What it costs to record routes and to replay them, on a whole step of training.

    python benchmarks/router_replay.py [--quick] [--repeats 25] [--threads 1]

A step is: sample 8 responses of 32 tokens to each of 8 prompts, collate, log-probs and entropies
of the train engine, one update of two mini-batches, and the metrics of the discrepancy. Three
contenders with the same policy, seeds and tokens take turns in one process, in an order that
rotates: `off` records nothing and replays nothing, `R2` records in the log-prob pass, `R3` in
the rollout. Validators are on. Every round starts from the same weights, so that all three do
the same work. Times are CPU seconds of the process, which other programs disturb less; with one
thread on an idle machine they are the time on the clock. A ratio is the median over the rounds
of that round's ratio.

Last line: one JSON object. `ratio` is the time of R3 over off (goal: 1.05 or less), `ratio_r2`
that of R2, `ratio_fastest` that of the fastest steps of R3 and off.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from dataclasses import replace

import torch

from compassrl.algo.engine_gap import discrepancy
from compassrl.algo.losses import LossConfig, PolicyLoss
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import hf_weights
from compassrl.records import Request, SamplingParams, collate, derive_seed
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.runs.summary import machine_info
from compassrl.train.torch_train import OptimConfig, TorchTrain


class Step:
    "One contender; its clock runs per phase"

    def __init__(self, mode, policy, requests):
        self.mode, self.requests, self.times = mode, requests, defaultdict(list)
        self.policy = Policy(policy.config)
        self.start = {k: v.clone() for k, v in policy.state_dict().items()}
        self.rollout = TorchRollout(policy.config, len(requests), return_routes=mode == 'R3')
        self.loss = PolicyLoss(LossConfig())

    def reset(self):
        self.policy.load_state_dict(self.start)
        self.engine = TorchTrain(
            self.policy, OptimConfig(lr=1e-5, num_mini_batches=2), replay=self.mode
        )
        self.rollout.load_weights(hf_weights(self.policy), 0)

    def __call__(self):
        self.reset()
        clock = [time.process_time()]
        samples = sorted(self.rollout.generate(self.requests), key=lambda s: (s.prompt_id, s.index))
        clock.append(time.process_time())
        batch = collate(samples)
        advantages = batch.response_mask * torch.linspace(-1, 1, len(batch))[:, None]
        batch = replace(batch, advantages=advantages)
        clock.append(time.process_time())
        batch = replace(batch, **self.engine.score(batch))
        clock.append(time.process_time())
        self.engine.update(batch, self.loss)
        clock.append(time.process_time())
        found = discrepancy(batch)
        clock.append(time.process_time())
        for name, a, b in zip(
            ('rollout', 'collate', 'log_probs', 'update', 'metrics'), clock, clock[1:]
        ):
            self.times[name].append(b - a)
        self.times['step'].append(clock[-1] - clock[0])
        return batch, found


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--repeats', type=int, default=25, help='interleaved steps of each contender')
    p.add_argument('--threads', type=int, default=1, help='CPU threads')
    p.add_argument('--quick', action='store_true', help='a small case, to see that it runs')
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    prompts, group, new, repeats = (4, 4, 8, 2) if a.quick else (8, 8, 32, a.repeats)
    c = PolicyConfig(
        vocab_size=64,
        hidden_size=128,
        num_hidden_layers=4,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
    )
    policy = Policy(c, seed=0)
    with torch.no_grad():
        for w in policy.parameters():
            if w.dim() > 1:
                w.mul_(3)  # a next-token distribution that is not flat
    ids = torch.randint(2, 64, (prompts, 16), generator=torch.Generator().manual_seed(0)).tolist()
    requests = [
        Request(f'p{i:02}', tuple(ids[i]), k, derive_seed(i, k), SamplingParams(new))
        for i in range(prompts)
        for k in range(group)
    ]
    steps = {m: Step(m, policy, requests) for m in ('off', 'R2', 'R3')}
    batches = {m: s()[0] for m, s in steps.items()}  # warm-up, and: all do the same
    for m in ('R2', 'R3'):
        assert torch.equal(batches[m].token_ids, batches['off'].token_ids)
        apart = (batches[m].old_log_probs - batches['off'].old_log_probs).abs()
        assert apart.mean() < 1e-3, 'a tie of the router may fall the other way, no more'
    assert steps['R3']()[1]['routes_valid_frac'] == 1
    for s in steps.values():
        s.times.clear()
    order = list(steps)
    for i in range(repeats):
        for m in order[i % 3 :] + order[: i % 3]:
            steps[m]()

    def ratio(m, phase='step'):
        return round(
            statistics.median(
                x / y for x, y in zip(steps[m].times[phase], steps['off'].times[phase])
            ),
            4,
        )

    print(f'medians of {repeats} interleaved steps, {a.threads} thread(s), ms')
    print(f'{"":10}' + ''.join(f'{m:>10}' for m in steps) + '   R2/off   R3/off')
    for phase in ('rollout', 'collate', 'log_probs', 'update', 'metrics', 'step'):
        ms = [1000 * statistics.median(s.times[phase]) for s in steps.values()]
        print(
            f'{phase:10}'
            + ''.join(f'{t:10.1f}' for t in ms)
            + f'{ratio("R2", phase):9.3f}{ratio("R3", phase):9.3f}'
        )

    def fastest(m):
        return min(steps[m].times['step']) / min(steps['off'].times['step'])

    settings = dict(
        prompts=prompts,
        group_size=group,
        new_tokens=new,
        layers=4,
        experts=16,
        experts_per_token=4,
        width=128,
        mini_batches=2,
        quick=a.quick,
        repeats=repeats,
    )
    print(
        json.dumps(
            dict(
                name='router_replay',
                ratio=ratio('R3'),
                ratio_r2=ratio('R2'),
                ratio_fastest=round(fastest('R3'), 4),
                units='time of a step with routes recorded in the rollout and replayed / without',
                settings=settings,
                machine=machine_info(),
            )
        )
    )


if __name__ == '__main__':
    main()
