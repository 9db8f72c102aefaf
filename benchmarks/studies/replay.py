"""What do router replay and TIS change while a policy learns, with rollouts in bfloat16 and in FP8?

A policy of 3 layers with 16 experts, 4 per token, learns sums of two digits by GRPO: 8
prompts of 8 responses and 4 updates a step, equal steps in all arms. The trainer computes in
float32. FP8: weights 128x128, activations 1x128, emulated; the rest in bfloat16. An arm is named by
rollout (bfloat16, fp8), replay (off, R3, R2: what the trainer's own routers chose before the
updates) and TIS (off, truncate), as in fp8-R3-off. Eight arms with one or eight updates a step have
their number at the end, as in bfloat16-R3-off-8.

Rollouts by the real vLLM, in bfloat16, are the arms vllm-... On a CPU it wants experts whose widths
are multiples of 32, so these arms have a wider policy with a cold start of its own, and the arms
wide-... next to them: the same policy, rollouts by the embedded engine in bfloat16.

All runs of a policy begin with the weights of one cold start; a seed draws prompts and responses.
Every tenth step is looked at twice before its updates, with live routers and with the rollout's
routes, whatever the arm trains with. Held-out rates are those of the trained weights in float32.
The learning rate is the first that was tried, on seed 100, which is not among those compared.
Last line: one JSON object; `ratio` is the mean gap of FP8 runs without replay over that with R3.
usage: make study NAME=replay, python benchmarks/studies/replay.py [--quick]
"""

import json
import math
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from _runner import OFF, RUNS, common, digest, interval, prompts_of, rounded
from _tables import flags
from tqdm import tqdm

from compassrl.algo.engine_gap import discrepancy
from compassrl.algo.losses import LossConfig
from compassrl.data.tokenizer import build_tokenizer
from compassrl.loop import fit
from compassrl.model.hf_config import write_config
from compassrl.model.policy import Policy
from compassrl.model.shape import PolicyConfig
from compassrl.records import micro_batches, select
from compassrl.rollout.fp8 import Fp8Rollout
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.runs.evaluate import evaluate
from compassrl.runs.log import write_json
from compassrl.runs.summary import machine_info
from compassrl.train.routes import routes_agreement
from compassrl.train.sft import cold_start
from compassrl.train.torch_train import TorchTrain, packed_states, score_response

ARMS = tuple(  # rollout, replay, TIS
    f'{rollout}-{mode}-{tis}'
    for rollout in ('bfloat16', 'fp8')
    for tis in ('off', 'truncate')
    for mode in ('off', 'R3', 'R2')
)
ARMS += tuple(
    f'{rollout}-{mode}-{tis}'
    for rollout in ('wide', 'vllm')
    for tis in ('off', 'truncate')
    for mode in ('off', 'R3')
)
ARMS += tuple(
    f'{rollout}-{mode}-off-{updates}'
    for rollout in ('bfloat16', 'fp8')
    for updates in (1, 8)
    for mode in ('off', 'R3')
)
FEW = 'fp8-off-off', 'fp8-R3-off', 'fp8-off-truncate', 'bfloat16-off-off'
PARTS = (  # name, place in the name of an arm, without it, with it
    ('fp8', 0, 'bfloat16', 'fp8'),
    ('vllm', 0, 'wide', 'vllm'),
    ('replay', 1, 'off', 'R3'),
    ('r2', 1, 'off', 'R2'),
    ('tis', 2, 'off', 'truncate'),
)
MIX = (('arithmetic', 1.0, 1.0),)
BLOCK = 10  # steps whose means are kept
GAPS = 'gap', 'k3', 'f2'
KEPT = dict(
    gap='rollout_train_gap',
    k3='rollout_train_k3',
    f2='rollout_train_f2',
    reward='reward_mean',
    clip='clip_frac',
    grad='grad_norm',
    tokens='tokens',
)


@dataclass(frozen=True)
class Study:
    seeds: tuple[int, ...] = tuple(range(6))
    steps: int = 150
    lr: float = 2e-4
    cold_steps: int = 1200
    wide_cold_steps: int = 1000  # both policies begin with a held-out rate of about 71 %
    num_heldout: int = 512
    eval_k: int = 2
    room: int = 48  # tokens of a response
    pool: int = 4096  # prompts of a trial, solutions of a cold start
    arms: tuple[str, ...] = ARMS


def config(study, arm, seed):
    rollout, mode, tis, *updates = arm.split('-')
    base = common()
    shape = dict(num_hidden_layers=3, num_experts=16, num_experts_per_tok=4, hidden_size=48)
    shape |= dict(moe_intermediate_size=24, num_attention_heads=2, num_key_value_heads=1)
    cold_steps = study.cold_steps
    if rollout in ('wide', 'vllm'):
        shape |= dict(hidden_size=64, moe_intermediate_size=32)
        cold_steps = study.wide_cold_steps
    more = dict(policy=PolicyConfig(max_position_embeddings=128, head_dim=32, **shape))
    more |= dict(cold_start=replace(base.cold_start, steps=cold_steps))
    more |= dict(prompts_per_step=8, zero_variance=OFF, loss=LossConfig('grpo', tis=tis))
    optim = replace(base.optim, lr=study.lr, final_lr_frac=1.0)
    optim = replace(optim, num_mini_batches=int(updates[0]) if updates else 4)
    more |= dict(optim=optim, router_replay=mode)
    more |= dict(
        rollout=replace(base.rollout, dtype='bfloat16', num_slots=64, max_tokens=study.room)
    )
    more |= dict(data=replace(base.data, select_by='turn'))
    more['rollout'] = replace(more['rollout'], quantization='fp8' if rollout == 'fp8' else '')
    more['rollout_engine'] = 'vllm' if rollout == 'vllm' else 'torch'
    return replace(base, seed=seed, steps=study.steps, **more)


def cold_started(study, folder, arm='bfloat16-off-off'):
    "The weights that all trials of a policy begin with, made once"
    cfg = config(study, arm, 0)
    path = folder / f'cold-{digest(cfg.policy, cfg.cold_start, MIX)}.pt'
    if not path.exists():
        policy = Policy(cfg.policy, 0)
        optim = replace(cfg.optim, lr=cfg.cold_start.lr, num_mini_batches=1)
        engine = TorchTrain(policy, optim, replay='off')
        train = prompts_of(MIX, study.pool, 0, 'train')
        for _ in cold_start(engine, train, cfg.cold_start, build_tokenizer(), 0):
            pass
        torch.save(policy.state_dict(), path.with_suffix('.tmp'))
        path.with_suffix('.tmp').replace(path)
    return torch.load(path, weights_only=True)


class Probed(TorchTrain):
    "Looks at every tenth batch with live routers and with the rollout's routes, before it learns"

    def __init__(self, *args):
        super().__init__(*args)
        self.scored, self.probes = 0, []

    @torch.no_grad()
    def score(self, batch):
        if self.scored % BLOCK == 0:
            self.probes.append(self.looked_at(batch))
        self.scored += 1
        return super().score(batch)

    def looked_at(self, batch):
        out = {}
        for name, replayed in (('live', False), ('replayed', True)):
            old, agree = torch.zeros_like(batch.rollout_log_probs), []
            for rows in micro_batches(batch, self.config.micro_batch_tokens):
                part = select(batch, rows)
                hidden, own = packed_states(self.policy, part, replayed)
                value, _ = score_response(self.policy, hidden, part, self.temperature)
                old[rows, : value.shape[1]] = value
                same = routes_agreement(
                    own, part.routed_experts[part.token_mask], self.policy.config
                )
                agree.append(same[part.routes_valid[part.token_mask]])
            found = discrepancy(replace(batch, old_log_probs=old))
            agree = torch.cat(agree)
            out[name] = {k: found[KEPT[k]] for k in GAPS}
            out[name] |= dict(agree=float(agree.mean()), whole=float((agree == 1).float().mean()))
        return out


class Rows(list):
    def on_step(self, step, metrics, samples, batch):
        self.append(metrics)


def rollout_of(cfg):
    "Of either engine; it records the routes, whatever the arm trains with"
    slots = cfg.rollout.num_slots
    if cfg.rollout_engine == 'vllm':
        from compassrl.rollout.vllm.in_process import VllmRollout  # seconds

        with tempfile.TemporaryDirectory() as folder:
            write_config(cfg.policy, folder)
            return VllmRollout(folder, dtype=torch.bfloat16, num_slots=slots)
    kind = Fp8Rollout if cfg.rollout.quantization else TorchRollout
    return kind(cfg.policy, slots, torch.bfloat16)


def trial(study, arm, seed, weights):
    torch.set_num_threads(1)
    cfg, tok = config(study, arm, seed), build_tokenizer()
    policy = Policy(cfg.policy, seed)
    policy.load_state_dict(weights)
    engine = Probed(policy, cfg.optim, cfg.rollout.temperature, cfg.router_replay)
    rollout = rollout_of(cfg)
    rollout.load_weights(engine.weights(), 0)
    heldout = prompts_of(MIX, study.num_heldout, seed, 'heldout')

    def rate():
        plain = TorchRollout(cfg.policy, 256)
        plain.load_weights(engine.weights(), 0)
        params = cfg.rollout.params(cfg.policy.eos_ids)
        return evaluate(plain, heldout, study.eval_k, params, tok, seed).avg

    evals, rows = [rate()], Rows()
    train = prompts_of(MIX, study.pool, seed, 'train')
    fit(cfg, train, rollout, engine, tok, rows, cfg.policy.eos_ids)
    evals.append(rate())
    rollout.close()
    blocks = range(0, len(rows), BLOCK)
    series = {
        k: [fmean(m[v] for m in rows[i : i + BLOCK]) for i in blocks] for k, v in KEPT.items()
    }
    probes = {
        name: {k: [p[name][k] for p in engine.probes] for k in engine.probes[0][name]}
        for name in engine.probes[0]
    }
    return rounded(dict(arm=arm, seed=seed, evals=evals, series=series, probes=probes))


def kept(study, arm, seed, folder):
    "A trial from its file, or made now"
    whole = digest(config(study, arm, seed), study.num_heldout, study.eval_k, MIX)
    path = folder / f'{arm}-{seed}-{whole}.json'
    if not path.exists():
        write_json(path, trial(study, arm, seed, cold_started(study, folder, arm)))
    return json.loads(path.read_text())


def run_all(study, folder, processes):
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for arm in study.arms:
        cold_started(study, folder, arm)
    trials = [(arm, seed) for seed in study.seeds for arm in study.arms]
    if not processes:
        return [kept(study, *t, folder) for t in trials]
    with ProcessPoolExecutor(processes, multiprocessing.get_context('spawn')) as pool:
        jobs = [pool.submit(kept, study, *t, folder) for t in trials]
        for _ in tqdm(as_completed(jobs), 'replay', len(jobs)):
            pass
        return [j.result() for j in jobs]


# ---- what they show


def collapsed(run):
    "Does the reward of ten steps fall below half of the best ten before them?"
    r = run['series']['reward']
    return any(x < max(r[:i]) / 2 for i, x in enumerate(r) if i)


def thirds(values):
    n = max(1, len(values) // 3)
    return values[:n], values[-n:]


def mean_factor(pairs):
    "Of paired numbers without and with replay: geometric mean over seeds and its interval"
    return [math.exp(x) for x in interval([math.log(a / b) for a, b in pairs])]


def tables(runs, seeds):
    "Of each arm, and of each pair of arms that differ by replay alone"
    of = {(r['arm'], r['seed']): r for r in runs}
    table = {arm: row_of([of[arm, s] for s in seeds]) for arm in dict.fromkeys(a for a, _ in of)}
    pairs = {}
    for r3 in [arm for arm in table if '-R3-' in arm]:
        both = [(of[r3.replace('R3', 'off'), s], of[r3, s]) for s in seeds]
        pairs[r3.replace('-R3', '')] = pair_of(both)
    return table, pairs


def differences(runs, seeds):
    "In held-out points, of arms that differ by one thing; `all` is their mean, seed by seed"
    ends = {(r['arm'], r['seed']): 100 * r['evals'][1] for r in runs}
    out = {}
    arms = dict.fromkeys(arm for arm, _ in ends)
    for name, i, base, other in PARTS:
        found = {}
        for arm in [a for a in arms if a.split('-')[i] == other]:
            parts = arm.split('-')
            without = '-'.join([*parts[:i], base, *parts[i + 1 :]])
            if without in arms:
                found[arm] = [ends[arm, s] - ends[without, s] for s in seeds]
        if found:
            found['all'] = [fmean(x) for x in zip(*found.values())]
            out[name] = {arm: interval(v) for arm, v in found.items()}
    return out


def row_of(mine):
    row = {
        k: interval([100 * r['evals'][i] for r in mine]) for i, k in enumerate(('before', 'after'))
    }
    row['gain'] = interval([100 * (r['evals'][1] - r['evals'][0]) for r in mine])
    row |= {k: fmean(fmean(r['series'][k]) for r in mine) for k in KEPT}
    row['collapses'] = sum(map(collapsed, mine))
    for i, when in enumerate(('early', 'late')):
        row[f'agree_{when}'] = fmean(fmean(thirds(r['probes']['live']['agree'])[i]) for r in mine)
    return row


def pair_of(both):
    "Gaps of one run over those of the other; of the R3 run, looked at both ways"
    row = {k: mean_factor([[fmean(r['series'][k]) for r in p] for p in both]) for k in GAPS[:2]}
    for k in GAPS[:2]:
        for i, when in enumerate(('early', 'late')):
            seen = [
                [fmean(thirds(r3['probes'][m][k])[i]) for m in ('live', 'replayed')]
                for _, r3 in both
            ]
            row[f'{k}_same_{when}'] = mean_factor(seen)
    return row


def main():
    a = flags(__doc__)
    study = Study()
    with tempfile.TemporaryDirectory() as folder:
        small = dict(cold_steps=4, wide_cold_steps=4, num_heldout=4, eval_k=1, room=16, pool=64)
        small = Study((0, 1), 2, **small, arms=FEW)
        path, study = (Path(folder), small) if a.quick else (RUNS / 'replay', study)
        runs = run_all(study, path, 0 if a.quick else a.processes)
    table, pairs = tables(runs, study.seeds)
    for arm, row in table.items():
        print(f'{arm:18} {row["before"][0]:5.1f} {row["after"][0]:5.1f} {row["gap"]:.2e}')
    found = dict(name='replay', ratio=round(pairs['fp8-off']['gap'][0], 3))
    found |= dict(units='mean gap of FP8 runs without replay / with R3', table=rounded(table))
    apart = differences(runs, study.seeds)
    found |= dict(pairs=rounded(pairs), differences=rounded(apart), runs=runs)
    cfg, settings = config(study, ARMS[0], 0), asdict(study)
    settings |= dict(prompts=cfg.prompts_per_step, group=cfg.group_size, task=MIX, block=BLOCK)
    settings |= dict(updates=cfg.optim.num_mini_batches, quick=a.quick)
    print(json.dumps(found | dict(settings=settings, machine=machine_info())))


if __name__ == '__main__':
    main()
