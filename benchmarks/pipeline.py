"""The whole recipe on two cores: every stage of `compassrl pipeline tiny-cpu`, timed, and what each
has done to all domains.

Last line: one JSON object. `ratio` is the mean rate after the last stage over that after the cold
start. A phase's gain is paired by prompt: mean and standard error over the held-out prompts.
usage: python benchmarks/pipeline.py [--folder FOLDER] [--seed 0] [--quick]
"""

import argparse
import json
import resource
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from compassrl.files import read_data
from compassrl.runs.pipeline import difference, forgetting, run_pipeline, scores
from compassrl.runs.stages import pipeline_presets, stage_folders
from compassrl.runs.summary import machine_info


def rounded(values):
    return [round(v, 5) for v in values]


def table(by_stage):
    "Stage -> domain -> rate and its 95 % interval"
    return {n: {d: rounded(s[:3]) for d, s in row.items()} for n, row in by_stage.items()}


def gains(by_stage, stage, before):
    "Domain -> what a stage has won, paired by prompt: mean, standard error"
    a, b = by_stage[before], by_stage[stage]
    return {d: rounded(difference(b[d], a[d])) for d in a}


def mean(row):
    return statistics.fmean(s.avg for s in row.values())


def measure(a):
    p = pipeline_presets()['smoke-cpu' if a.quick else 'tiny-cpu']
    fewer = dict(cold_start=dict(steps=10)) if a.quick else {}
    p = replace(p, settings=p.settings | dict(seed=a.seed) | fewer)
    run_pipeline(p, a.folder)
    folders = stage_folders(p, a.folder)
    by_stage = {n: found for n, f in folders.items() if (found := scores(f))}
    phases = {'reasoning-rl': 'merge', 'domain-rl': 'reasoning-rl'}
    seconds = read_data(Path(a.folder) / 'seconds.json')
    judge = folders.get('judge', Path()) / 'model/judge.json'
    who = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return dict(
        name='pipeline',
        ratio=round(mean(by_stage['domain-rl']) / max(mean(by_stage['base']), 1e-9), 3),
        units='mean held-out rate of all domains, last stage / first cold start',
        table=table(by_stage),
        gains={n: gains(by_stage, n, before) for n, before in phases.items()},
        forgetting=[[d, best, *rounded(x)] for d, best, *x in forgetting(by_stage)],
        seconds=seconds | dict(all=round(sum(seconds.values()), 1)),
        peak_mb=round(max(resource.getrusage(w).ru_maxrss for w in who) / 1024),
        judge=read_data(judge) if judge.exists() else None,
        settings=dict(seed=a.seed, quick=a.quick),
        machine=machine_info(),
    )


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--folder', default='', help='where it goes, or goes on; empty = thrown away')
    p.add_argument('--seed', type=int, default=0)
    p.add_argument('--quick', action='store_true', help='a small case, to see that it runs')
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        a.folder = a.folder or f'{tmp}/pipeline'
        print(json.dumps(measure(a)))


if __name__ == '__main__':
    main()
