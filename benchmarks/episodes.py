"""Does a policy learn to call a tool? `compassrl train tool-cpu`, and what it can do afterwards.

A cold start shows some solutions that call a calculator and more that guess. Reported: held-out
avg@k before and after RL, calls per response, minutes; then questions that need one call, two,
three and four, asked of the same policy, though it was trained on one alone. Last line:
one JSON object; `ratio` is avg@k after RL over 70 %.
usage: python benchmarks/episodes.py [--seed 0] [--quick]
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from compassrl.data.prompts import make_prompts
from compassrl.data.tokenizer import build_tokenizer
from compassrl.data.tools import ToolUser
from compassrl.model.pretrained import from_pretrained, hf_weights
from compassrl.rollout.episodes import Episodes
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.runs.evaluate import evaluate
from compassrl.runs.presets import tool_cpu
from compassrl.runs.run import start_run
from compassrl.runs.summary import machine_info

PROMISED = 0.7


def calls(samples, end):
    "Calls per response"
    return sum(s['response'].count(end) for s in samples) / len(samples)


def by_calls(cfg, model, num, k):
    "avg@k of questions that need 1 to 4 calls"
    tokenizer, policy = build_tokenizer(), from_pretrained(model)
    engine = TorchRollout(policy.config, cfg.rollout.num_slots)
    engine.load_weights(hf_weights(policy), 0)
    episodes = Episodes(engine, ToolUser(cfg.tools, tokenizer))
    params = replace(cfg.rollout.params(policy.config.eos_ids), max_tokens=96)
    rows = []
    for level in range(4):
        prompts = make_prompts('calculation', num, level, cfg.seed, 'heldout', tokenizer)
        r = evaluate(episodes, prompts, k, params, tokenizer, cfg.seed)
        found = calls([dict(response=s.response) for s in r.samples], cfg.tools.end)
        rows.append(dict(needed=level + 1, avg=r.avg, stderr=r.avg_stderr, calls=found))
    return rows


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--seed', type=int, default=0)
    p.add_argument('--quick', action='store_true', help='a small case, to see that it runs')
    a = p.parse_args()
    cfg, num = replace(tool_cpu(), seed=a.seed, trackers=()), 64
    if a.quick:
        cold = replace(cfg.cold_start, steps=10)
        cfg = replace(cfg, steps=1, eval_every=0, eval_k=1, cold_start=cold)
        cfg, num = replace(cfg, data=replace(cfg.data, num_heldout=4)), 4
    with tempfile.TemporaryDirectory() as tmp:
        t = time.perf_counter()
        folder = start_run(replace(cfg, run_dir=str(Path(tmp) / 'run')))
        minutes = (time.perf_counter() - t) / 60
        told = {w: json.loads((folder / f'eval_{w}.json').read_text()) for w in ('before', 'after')}
        rows = by_calls(cfg, folder / 'model', num, cfg.eval_k)
    found = {w: dict(avg=d['avg'], calls=calls(d['samples'], '>')) for w, d in told.items()}
    for w, d in found.items():
        print(f'{w} RL: {d["avg"]:.1%} right, {d["calls"]:.2f} calls per response')
    for r in rows:
        print(f'{r["needed"]} calls needed: {r["avg"]:.1%} right, {r["calls"]:.2f} calls')
    settings = dict(preset='tool-cpu', seed=a.seed, steps=cfg.steps, eval_k=cfg.eval_k)
    print(
        json.dumps(
            dict(
                name='episodes',
                ratio=found['after']['avg'] / PROMISED,
                units=f'held-out avg@{cfg.eval_k} after RL over {PROMISED:.0%}',
                **found,
                minutes=minutes,
                by_calls=rows,
                settings=settings,
                machine=machine_info(),
            )
        )
    )


if __name__ == '__main__':
    main()
