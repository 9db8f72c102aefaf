"""Paired learning runs: tasks x arms x seeds, each from the cold start of its seed, each until it
has generated the same number of response tokens.

Every trial is a file in `benchmarks/studies/.runs/NAME`: a study that was ended goes on with the
trials that are missing. What a trial reports is in `trial`.
"""

import hashlib
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import torch
from _evidence import allowed, interval, library, one_version
from tokenizers import Tokenizer, decoders, models, trainers
from tqdm import tqdm

from compassrl.algo.zero_variance import ZeroVarianceConfig
from compassrl.config import TrainConfig
from compassrl.data.prompts import make_prompts
from compassrl.data.tokenizer import build_tokenizer, encode
from compassrl.loop import Stop, fit
from compassrl.model.policy import Policy
from compassrl.records import Batch, derive_seed
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.runs.evaluate import evaluate
from compassrl.runs.log import write_json
from compassrl.runs.presets import tiny_cpu
from compassrl.train.sft import cold_start
from compassrl.train.torch_train import TorchTrain

# silent groups add nothing, and rewards are the task's alone
OFF = ZeroVarianceConfig('uniform', length_weight=0, repetition_weight=0, zvp_alpha=0)
RUNS = Path(__file__).parent / '.runs'
Mix = tuple[tuple[str, float, float], ...]  # domain, difficulty, share
# most groups are silent: easy, and mostly too hard
SILENT: Mix = (('arithmetic', 1.0, 0.25), ('arithmetic', 2.0, 0.25), ('arithmetic', 3.0, 0.5))
Change = Callable[[TrainConfig], TrainConfig]


@dataclass(frozen=True)
class Study:
    "What is compared"

    name: str
    tasks: dict[str, Mix]
    arms: dict[str, Change]  # what each changes in `preset`
    learning_rates: dict[str, float]  # arm -> learning rate
    seeds: tuple[int, ...]
    budget: int  # response tokens of a trial
    marks: int = 5  # evaluations on the way, the last one at the end
    pool: int = 4096  # prompts of a trial, solutions of a cold start
    num_heldout: int = 512
    eval_k: int = 8
    cold_steps: int = 1200
    cold: Mix = (('arithmetic', 1.25, 1.0),)  # what the cold start shows
    cold_seed: int | None = None  # seed of one cold start for all seeds; None = each its own
    shape: dict[str, int] = field(default_factory=dict)  # what its policy has of its own
    # what an arm is trained on, one mix after the other, each for as many tokens; else the task
    stages: dict[str, tuple[Mix, ...]] = field(default_factory=dict)
    look: Callable[[Batch], dict[str, float]] | None = None  # what is kept of every step
    ways: dict[str, Callable] = field(default_factory=dict)  # code for arms that `run` cannot do
    device: str = 'cpu'  # where policy and rollout compute
    runs: Path = RUNS

    def __post_init__(self):
        allowed(self.seeds)

    @property
    def folder(self):
        return self.runs / self.name

    def preset(self, seed):
        "With growth, prompts in turn, a constant learning rate; an arm may change all"
        base = common()
        more = dict(optim=replace(base.optim, final_lr_frac=1.0))
        more |= dict(zero_variance=ZeroVarianceConfig(), data=replace(base.data, select_by='turn'))
        return replace(base, seed=seed, policy=replace(base.policy, **self.shape), **more)

    @property
    def tokenizer(self):
        "Of characters, or with as many merged pairs as the vocabulary has room for"
        size = self.shape.get('vocab_size')
        return merged_tokenizer(size, self.cold) if size else build_tokenizer()

    def prompts(self, mix, num, seed, split):
        found = prompts_of(mix, num, seed, split)
        if 'vocab_size' not in self.shape:
            return found
        return [replace(p, token_ids=encode(self.tokenizer, p.text)) for p in found]

    def config(self, arm, seed, lr=None):
        cfg = replace(self.preset(seed), steps=10**6)
        cfg = replace(cfg, cold_start=replace(cfg.cold_start, steps=self.cold_steps))
        lr = self.learning_rates[arm] if lr is None else lr
        return self.arms[arm](replace(cfg, optim=replace(cfg.optim, lr=lr)))

    def mixes(self, task, arm):
        return self.stages.get(arm, (self.tasks[task],))

    def settings(self, task, arm, seed, lr):
        "What a trial depends on"
        found = self.config(arm, seed, lr), self.tasks[task], self.budget, self.marks
        found += self.num_heldout, self.eval_k
        own = self.stages.get(arm), self.shown, code_of(self.ways.get(arm)), self.shape, self.fewer
        return found + tuple(x for x in own if x)

    @property
    def fewer(self):
        return () if self.pool == Study.pool else (self.pool,)

    @property
    def shown(self):
        return self.cold if self.cold != Study.cold else ()


def common():
    "`tiny-cpu` with the step of all studies but the recipe's: 16 prompts of 8 responses"
    base = tiny_cpu()
    optim = replace(base.optim, warmup_steps=10)
    return replace(base, prompts_per_step=16, group_size=8, optim=optim)


def code_of(way):
    """What an arm calls: a function by its name, since its place in memory differs from process to
    process; an object as it says itself, with its settings"""
    if isinstance(way, partial):
        return code_of(way.func), way.args, way.keywords
    return getattr(way, '__qualname__', way)


def digest(*settings, of=None):
    "Files of other settings, or of another library, have other names"
    of = library() if of is None else of
    return hashlib.sha256(f'{settings} {of}'.encode()).hexdigest()[:8]


# ---- prompts and the cold start


@cache
def prompts_of(mix, num, seed, split):
    "A mix in random order"
    tok = build_tokenizer()
    parts = [make_prompts(d, round(num * share), hard, seed, split, tok) for d, hard, share in mix]
    return sorted((p for part in parts for p in part), key=lambda p: derive_seed(seed, p.id))


@cache
def merged_tokenizer(vocab_size, mix):
    "Characters, and the pairs of tokens that are most frequent in 4,096 questions and solutions"
    characters = build_tokenizer()
    specials = [characters.id_to_token(i) for i in range(3)]
    letters = sorted(set(characters.get_vocab()) - set(specials))
    tok = Tokenizer(models.BPE(unk_token='<unk>'))
    shown = [text for p in prompts_of(mix, 4096, 0, 'train') for text in (p.text, p.solution)]
    tok.train_from_iterator(
        shown,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=specials,
            initial_alphabet=letters,
            show_progress=False,
        ),
    )
    tok.decoder = decoders.Fuse()
    tok.encode_special_tokens = True
    if tok.get_vocab_size() != vocab_size:
        raise ValueError(f'{vocab_size} tokens: these texts have only {tok.get_vocab_size()}')
    return tok


def cold_started(study, seed):
    "The weights that all trials of a seed begin with, made once"
    seed = seed if study.cold_seed is None else study.cold_seed
    study.folder.mkdir(parents=True, exist_ok=True)
    cfg = study.preset(seed)
    sft = replace(cfg.cold_start, steps=study.cold_steps)
    named = cfg.policy, cfg.data, sft, *study.shown, *study.fewer
    path = study.folder / f'cold-{seed}-{digest(*named)}.pt'
    if not path.exists():
        torch.set_num_threads(1)
        train = study.prompts(study.cold, study.pool, seed, 'train')
        policy = Policy(cfg.policy, seed).to(study.device)
        optim = replace(cfg.optim, lr=sft.lr, num_mini_batches=1)
        engine = TorchTrain(policy, optim, replay='off')
        for _ in cold_start(engine, train, sft, study.tokenizer, seed):
            pass
        torch.save(policy.state_dict(), path.with_suffix('.tmp'))
        path.with_suffix('.tmp').replace(path)
    return torch.load(path, weights_only=True)


class Paced(TorchTrain):
    "Its learning rate falls with the tokens that are spent: how many steps a trial has shows later"

    done = 0.0  # share of the trial's tokens

    def update(self, batch, loss, lr=None):
        return super().update(batch, loss, self.config.lr_at(self.num_steps, self.done))


def engines(cfg, weights, device='cpu'):
    policy = Policy(cfg.policy, cfg.seed).to(device)
    policy.load_state_dict(weights)
    engine = Paced(policy, cfg.optim, cfg.rollout.temperature, cfg.router_replay)
    rollout = TorchRollout(cfg.policy, cfg.rollout.num_slots, device=device)
    rollout.load_weights(engine.weights(), 0)
    return engine, rollout


def run(cfg, pools, rollout, engine, curve):
    "One pool of prompts after the other, each until its share of the tokens is spent"
    for i, train in enumerate(pools, 1):
        curve.until, start = curve.study.budget * i / len(pools), len(curve.rows)
        try:
            tok, ends = curve.study.tokenizer, cfg.policy.eos_ids
            fit(cfg, train, rollout, engine, tok, curve, ends, start)
        except Stop:
            pass


# ---- one trial


class Curve:
    "Counts tokens, evaluates at marks, stops at the budget"

    def __init__(self, study, cfg, rollout, engine, heldout):
        self.study, self.cfg, self.rollout, self.heldout = study, cfg, rollout, heldout
        self.engine = engine
        self.rows, self.evals, self.tokens, self.paused = [], [], 0, 0.0
        self.by_length = {}
        self.until = study.budget  # response tokens

    def evaluate(self):
        began, k = time.perf_counter(), self.study.eval_k
        params = self.cfg.rollout.params(self.cfg.policy.eos_ids)
        tok, seed = self.study.tokenizer, self.cfg.seed
        found = evaluate(self.rollout, self.heldout, k, params, tok, seed)
        self.evals.append((self.tokens, found.avg))
        right = {}  # length of the prompt, which tells how hard it is -> verdicts
        for x in found.samples:
            right.setdefault(len(x.prompt), []).append(x.correct)
        self.by_length = {n: statistics.fmean(v) for n, v in sorted(right.items())}
        self.paused += time.perf_counter() - began

    def on_step(self, step, metrics, samples, batch):
        seen = self.study.look(batch) if self.study.look else {}
        self.rows.append(metrics | dict(seen=seen))
        self.tokens += int(metrics['tokens'])
        self.engine.done = min(self.tokens / self.study.budget, 1.0)
        over = self.tokens >= self.study.budget
        mark = self.study.budget / self.study.marks * len(self.evals)
        if self.tokens >= mark or over:
            self.evaluate()
        if self.tokens >= self.until:
            raise Stop


STARTS = {}  # what this process has evaluated


def begin(curve, task):
    "The held-out rate of a seed's cold start, which its arms share"
    study, cfg = curve.study, curve.cfg
    same = study.folder, study.tasks[task], study.cold_steps, study.cold_seed, study.cold
    key = digest(*same, study.num_heldout, study.eval_k, cfg.seed, cfg.policy, cfg.rollout)
    if key not in STARTS:
        curve.evaluate()
        STARTS[key] = curve.evals[0]
    curve.evals = [STARTS[key]]


KEPT = (  # means over the steps of a trial
    'zero_variance_first_frac',
    'zero_variance_raw_frac',
    'zero_variance_frac',
    'zero_variance_residual_frac',
    'gradient_token_frac',
    'group_size_mean',
    'response_tokens_mean',
    'truncated_frac',
    'clip_frac',
    'clip_eps',
    'entropy',
    'tokens',
    'gradient_noise',
    'rollout_train_gap',
    'rollout_train_ess',
    'tis_clip_frac',
)


def trial(study, task, arm, seed, lr=None):
    "One run; what it cost and the curve of held-out avg@k over response tokens"
    torch.set_num_threads(1)
    cfg = study.config(arm, seed, lr)
    pools = [study.prompts(mix, study.pool, seed, 'train') for mix in study.mixes(task, arm)]
    heldout = study.prompts(study.tasks[task], study.num_heldout, seed, 'heldout')
    engine, rollout = engines(cfg, cold_started(study, seed), study.device)
    curve = Curve(study, cfg, rollout, engine, heldout)
    begin(curve, task)
    curve.paused, began = 0.0, time.perf_counter()
    study.ways.get(arm, run)(cfg, pools, rollout, engine, curve)
    seconds, rows = time.perf_counter() - began - curve.paused, curve.rows
    means = {k: statistics.fmean(m[k] for m in rows if k in m) for k in KEPT if k in rows[0]}
    norms = [m['grad_norm'] for m in rows]
    means |= dict(grad_spike=max(norms) / max(statistics.median(norms), 1e-12))
    means |= dict(first_step={k: rows[0][k] for k in KEPT[:4]}, steps=len(rows))
    evals = [(n, round(v, 6)) for n, v in curve.evals]
    found = dict(task=task, arm=arm, seed=seed, lr=cfg.optim.lr, tokens=curve.tokens)
    found |= dict(groups=rounded(group_counts(rows)))
    if study.look:
        found |= dict(seen=rounded({k: [m['seen'][k] for m in rows] for k in rows[0]['seen']}))
    if len(curve.by_length) <= 8:  # sums; other prompts have many lengths
        found |= dict(by_length=rounded(curve.by_length))
    return found | dict(seconds=round(seconds, 1), evals=evals, means=rounded(means))


def group_counts(rows):
    "Groups of a run by what woke them; `first` counts the groups that were asked at first alone"
    sizes = [m['samples'] / m['group_size_mean'] for m in rows]

    def total(shares):
        return sum(n * x for n, x in zip(sizes, shares))

    first, raw, shaped, after = ([m[k] for m in rows] for k in KEPT[:4])
    woken = dict(more=(first, raw), penalties=(raw, shaped), zvp=(shaped, after))
    found = dict(asked=sum(m['prompts'] for m in rows), trained=sum(sizes))
    found |= dict(with_gradient=total([1 - x for x in after]))
    return found | {f'woken_{k}': total([a - b for a, b in zip(*v)]) for k, v in woken.items()}


def rounded(x):
    if isinstance(x, dict):
        return {k: rounded(v) for k, v in x.items()}
    if isinstance(x, list):
        return [rounded(v) for v in x]
    return float(f'{x:.5g}') if isinstance(x, float) else x


# ---- all of them


def name_of(study, task, arm, seed, lr=None):
    "Of a trial's file, without the version of the library"
    return f'{task}-{arm}-{seed}-{digest(*study.settings(task, arm, seed, lr), of="")}'


def kept(study, task, arm, seed, lr=None):
    "A trial from its file, or made now"
    path = study.folder / f'{name_of(study, task, arm, seed, lr)}-{library()}.json'
    if not path.exists():
        found = trial(study, task, arm, seed, lr) | dict(library=library())
        write_json(path, found)
    return json.loads(path.read_text())


def run_all(study, trials, processes=2):
    "Trials in order (task, arm, seed, learning rate); two at a time, each with one thread"
    torch.set_num_threads(1)
    one_version(study.folder, {name_of(study, *t) for t in trials})
    seeds = list(dict.fromkeys(t[2] for t in trials))
    out = {}
    if not processes:
        return [kept(study, *t) for t in trials]
    spawn = multiprocessing.get_context('spawn')
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        jobs = {pool.submit(cold_started, study, s): s for s in seeds}
        for _ in tqdm(as_completed(jobs), 'cold starts', len(jobs)):
            pass
        jobs = {pool.submit(kept, study, *t): t for t in trials}
        for job in (bar := tqdm(as_completed(jobs), study.name, len(jobs))):
            task, arm, seed = jobs[job][:3]
            out[jobs[job]] = r = job.result()
            bar.set_postfix_str(f'{task} {arm} {seed}: {r["evals"][-1][1]:.1%}')
    return [out[t] for t in trials]


# ---- what they show


def area(evals, budget):
    "Mean held-out rate over the response tokens of a trial: who learns earlier has more"
    total, (n, v) = 0.0, evals[0]
    for m, w in evals[1:]:
        if m > budget:
            w = v + (w - v) * (budget - n) / (m - n)
            m = budget
        total, n, v = total + (m - n) * (v + w) / 2, m, w
    return total / n


def against(trials, task, arm, other, measure):
    "Differences of two arms on the same seeds, in points, and their interval"
    found = {(r['arm'], r['seed']): measure(r) for r in trials if r['task'] == task}
    seeds = sorted(s for a, s in found if a == arm and (other, s) in found)
    return interval([100 * (found[arm, s] - found[other, s]) for s in seeds])
