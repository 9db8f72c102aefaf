"""The paper's ladder of speed-ups, rung by rung, on whole training steps with real vLLM servers and
real sandboxes.

    python benchmarks/ladder.py [--quick] [--rounds 5]

Two servers of a tiny Qwen3-MoE (random weights, fp32, CPU build of vLLM) roll out, the embedded
engine trains, weights are synced: `trainer.fit`, one step at a time. Lengths are heavy-tailed,
belong to the prompt and vary within its group; the servers generate exactly so many tokens, and the
pool is not told. The reward of a response is a program run in an isolated process
(`compassrl.sandbox.isolated`): nine of ten compute for a moment, the tenth waits for something.
Every round runs the same step at every rung, in turn:

  serial      dealt out round robin before the rollout starts;
              when it has ended, detokenise and judge one by one
  parallel    + detokenise and judge in four processes, when the rollout has ended
              (the paper's parallel detokenisation)
  overlap     + each response as soon as it ends
  scheduling  + servers pull, the longest by prediction first
  FP8         not run: it needs a GPU (benchmarks/fp8.py)

Last line: one JSON object. `ratio` is the time of a serial step over one with all rungs (goal: 1.28
or more, the paper's without FP8: 1.16 x 1.009 x 1.092), the median over the rounds of that round's
ratio; `rungs` has each rung's. Its `detokenise` is the part of judging that turns tokens into text,
summed over processes: with this small vocabulary it is next to nothing, so that the rung `parallel`
is a gain of judging.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import random
import statistics
import tempfile
from unittest.mock import patch

os.environ.update(HF_HUB_OFFLINE='1', TRANSFORMERS_VERBOSITY='error', TQDM_DISABLE='1')
import torch

from compassrl.algo.zero_variance import ZeroVarianceConfig
from compassrl.config import TrainConfig
from compassrl.data.tasks import judge, verifier
from compassrl.data.tokenizer import build_tokenizer, encode
from compassrl.judges.reward_pool import RewardPool
from compassrl.judges.serial import RewardConfig, SerialJudge
from compassrl.loop import fit
from compassrl.model.hf_config import write_config
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import hf_weights
from compassrl.records import Prompt
from compassrl.rollout.pull_queue import PullQueue
from compassrl.rollout.rollout_settings import VllmConfig
from compassrl.rollout.schedule import ScheduleConfig
from compassrl.rollout.torch_rollout import RolloutConfig
from compassrl.rollout.vllm import dispatcher
from compassrl.rollout.vllm.pool import VllmPool
from compassrl.sandbox.isolated import Limits, run_python
from compassrl.train.torch_train import OptimConfig, TorchTrain
from course.simulator import RoundRobin, idle_frac

LIMIT = 960
# cumulative; FP8 before scheduling
PAPER = dict(parallel=1.16, overlap=1.17, FP8=1.52, scheduling=1.66)
COMPUTE = 'print(sum(i*i for i in range(200_000)))'
WAIT = 'import time; time.sleep(.5); print(0)'


@verifier
def sandbox(text, answer):
    "A program in an isolated process; which one, the text decides"
    number = int(hashlib.sha256(text.encode()).hexdigest(), 16)
    argv = ['python', '-I', '-S', '-c', WAIT if number % 10 == 0 else COMPUTE]
    start = f'import os, sys; os.execv(sys.executable, {argv!r})'  # an interpreter of its own
    o = run_python(start, limits=Limits(wall_s=10.0))
    assert o.status == 'ok', o
    return judge(number % 7 < 3, o.stdout.strip())


def cpu_model():
    try:
        return next(
            line.split(':')[1].strip()
            for line in open('/proc/cpuinfo')
            if line.startswith('model name')
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def length(r):
    "Tokens of a response: typical of its prompt, times noise of its own"
    typical = random.Random(r.prompt_id).paretovariate(0.9)
    noise = random.Random(r.seed).lognormvariate(0, 0.3)
    return max(1, round(min(LIMIT, min(LIMIT / 2, 60 * typical) * noise)))


class RoundRobin(RoundRobin):
    def __init__(self, rs, slots, order):
        super().__init__(rs, slots, [range(0, len(rs), 2), range(1, len(rs), 2)])


class Late(RewardPool):
    "Begins when the rollout has ended"

    def start(self, sample):
        super().start(sample) if self.settling else None

    settling = False

    def settle(self, samples):
        self.settling = True
        try:
            super().settle(samples)
        finally:
            self.settling = False


class Rows:
    "The hooks of the loop: keeps the last step's metrics, with the seconds of detokenising"

    def on_step(self, step, metrics, samples, batch):
        self.metrics = metrics | dict(
            time_detokenise_s=sum(s.timings['detokenise'] for s in samples)
        )


def said(r, body=dispatcher.to_body):
    d = body(r)
    return d | dict(
        sampling_params=d['sampling_params'] | dict(max_tokens=length(r), stop_token_ids=[])
    )


def read(r, ids, reason, config):
    "A response ends where `said` told it to, which its request does not know"
    return ids


def one_step(rung, step, cfg, prompts, pool, engine, tokenizer, judges):
    "Metrics of a step at a rung, and the share of slot-seconds without a request"
    pulls, hooks = rung == 'scheduling', Rows()
    pool.schedule = ScheduleConfig('longest' if pulls else 'fifo')
    cfg = TrainConfig(**{**cfg, 'steps': step + 1})
    queue = PullQueue if pulls else RoundRobin
    with patch.multiple(dispatcher, to_body=said, check_ids=read, PullQueue=queue):
        fit(
            cfg,
            prompts,
            pool,
            engine,
            tokenizer,
            hooks,
            cfg.policy.eos_token_id,
            start=step,
            judge=judges[rung],
        )
    begun = min(s.start for s in pool.spans)
    spans = [dataclasses.replace(s, start=s.start - begun, end=s.end - begun) for s in pool.spans]
    return hooks.metrics | dict(idle_frac=idle_frac(spans, 2 * pool.num_slots))


def main():
    global LIMIT
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        '--rounds', type=int, default=5, help='in each of which every rung runs the same step'
    )
    p.add_argument('--slots', type=int, default=4, help='requests that one server runs at a time')
    p.add_argument('--quick', action='store_true', help='a small case, to see that it runs')
    a = p.parse_args()
    num_prompts, group, workers = (2, 2, 1) if a.quick else (16, 4, 4)
    if a.quick:
        a.rounds, LIMIT = 1, 16
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    policy = PolicyConfig(
        vocab_size=99,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        moe_intermediate_size=32,
        max_position_embeddings=1024,
    )
    cfg = dict(
        prompts_per_step=num_prompts,
        group_size=group,
        policy=policy,
        rollout=RolloutConfig(max_tokens=LIMIT),
        optim=OptimConfig(lr=1e-5),
        zero_variance=ZeroVarianceConfig(sampling='uniform'),
    )
    texts = [f'{i:03}' for i in range(num_prompts)]
    prompts = [Prompt(f'bench-{t}', 'bench', t, encode(tokenizer, t), '', 'sandbox') for t in texts]
    engine, of = (
        TorchTrain(Policy(policy, seed=0), TrainConfig(**cfg).optim),
        (prompts, tokenizer, policy.eos_token_id),
    )
    judges = dict(serial=SerialJudge(*of), parallel=Late(*of, RewardConfig(workers=workers)))
    judges['overlap'] = judges['scheduling'] = RewardPool(*of, RewardConfig(workers=workers))
    rows = {r: [] for r in judges}
    with tempfile.TemporaryDirectory() as folder:
        write_config(policy, folder)
        pool = VllmPool(folder, VllmConfig(num_replicas=2), num_slots=a.slots)
        try:
            pool.load_weights(hf_weights(engine.policy), 0)
            one_step(
                'scheduling', 0, cfg, prompts, pool, engine, tokenizer, judges
            )  # warms up, and teaches lengths
            for k in range(a.rounds):
                for rung in list(judges)[k % len(judges) :] + list(judges)[: k % len(judges)]:
                    rows[rung].append(
                        one_step(rung, k + 1, cfg, prompts, pool, engine, tokenizer, judges)
                    )
                print(
                    f'  round {k}: '
                    + '  '.join(f'{r} {rows[r][-1]["time_step_s"]:.2f} s' for r in judges),
                    flush=True,
                )
        finally:
            pool.close()
            for j in judges.values():
                j.close()

    table = {}
    for r in judges:
        ratios = [s['time_step_s'] / m['time_step_s'] for s, m in zip(rows['serial'], rows[r])]
        cumulative = statistics.median(ratios)
        middle = {
            k: round(statistics.median(m.get(f'time_{k}_s', 0.0) for m in rows[r]), 3)
            for k in ('step', 'rollout', 'reward', 'log_probs', 'update', 'sync', 'detokenise')
        }
        table[r] = dict(
            cumulative=round(cumulative, 3),
            spread=[round(min(ratios), 3), round(max(ratios), 3)],
            # contains the median of five or more rounds with 94 % or more
            interval=[round(x, 3) for x in (cumulative, min(ratios), max(ratios))],
            rounds=[round(m['time_step_s'], 4) for m in rows[r]],
            paper=PAPER.get(r),
            idle_frac=round(statistics.median(m['idle_frac'] for m in rows[r]), 3),
            seconds=middle,
        )
        print(
            f'{r:12}{cumulative:6.2f} x ({min(ratios):.2f} to {max(ratios):.2f}; '
            f'the paper: {PAPER.get(r, 1.0)})  {middle}'
        )
    table['FP8'] = dict(cumulative=None, paper=PAPER['FP8'], why='not run: it needs a GPU')
    result = dict(
        name='ladder',
        ratio=table['scheduling']['cumulative'],
        units='time of a serial step / with all rungs but FP8',
        rungs=table,
        rounds=a.rounds,
        text_frac=table['serial']['seconds']['detokenise'] / table['serial']['seconds']['step'],
        settings=dict(
            servers=2,
            slots=a.slots,
            prompts=num_prompts,
            samples=group,
            limit=LIMIT,
            reward_workers=workers,
            waits_frac=0.1,
            quick=a.quick,
        ),
        machine=dict(
            cpu=cpu_model(),
            cores=os.cpu_count(),
            threads=1,
            torch=torch.__version__,
            load=round(os.getloadavg()[0], 1),
        ),
    )
    print(f'all rungs but FP8: {result["ratio"]:.2f} x (goal 1.28)')
    print(json.dumps(result))


if __name__ == '__main__':
    import ladder  # by its name: workers that judge import the verifier from there

    ladder.main()
