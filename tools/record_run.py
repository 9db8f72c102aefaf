"""A whole run of the default preset, as the launch lab shows it: `compassrl train tiny-cpu`.

    python tools/record_run.py [--out nbs/labs/run.json] [--quick]

The run is the preset's own. Only the held-out prompts are asked more often, which draws from seeds
of its own and changes no weight. The file holds what every step measured and, at each of the
evaluations, the eight responses to a few prompts: the first as text, of the others whether they
are right. It takes two minutes of one core.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

from compassrl.runs.log import read_step_rows
from compassrl.runs.presets import smoke_cpu, tiny_cpu
from compassrl.runs.run import Run, start_run

OUT = Path(__file__).resolve().parent.parent / 'nbs' / 'labs' / 'run.json'
EVERY, SHOWN = 10, 6  # steps from one evaluation to the next; prompts whose responses are kept


def of_prompts(found):
    "Prompt -> answer, first response, and for each of the responses whether it is right"
    out = {}
    for s in found['samples']:
        row = out.setdefault(s['prompt'], dict(answer=s['answer'], says=s['response'], right=''))
        row['right'] += '01'[s['correct']]
    return out


def recorded(cfg, folder):
    "The run in a folder: its steps, its evaluations, and the settings that the lab says"
    asked, evaluate, drawn, on_step = [], Run.evaluate, [], Run.on_step

    def kept(run, when):
        asked.append(evaluate(run, when))
        return asked[-1]

    def seen(run, step, metrics, samples, batch):
        drawn.append(fmean(len(s.prompt_ids) for s in samples))
        on_step(run, step, metrics, samples, batch)

    with patch.object(Run, 'evaluate', kept), patch.object(Run, 'on_step', seen):
        start_run(replace(cfg, run_dir=str(folder), eval_every=min(EVERY, cfg.eval_every)))
    rows = read_step_rows(folder / 'metrics.jsonl')
    exams = [of_prompts(found) for found in asked]
    # evenly from short to long ones, whatever RL makes of them
    names = sorted(exams[0], key=lambda p: (len(p), p))
    names = names[:: max(1, len(names) // SHOWN)][:SHOWN]
    at = [0, *(r['step'] for r in rows if r.get('eval_avg') is not None), rows[-1]['step']]
    shown = [[[exam[n]['says'], exam[n]['right']] for n in names] for exam in exams]
    return dict(
        steps=cfg.steps,
        save_every=cfg.save_every,
        seed=cfg.seed,
        prompts=[dict(prompt=n, answer=exams[0][n]['answer']) for n in names],
        correct=[round(r['correct_frac'], 3) for r in rows],
        prompt_tokens=[round(n, 2) for n in drawn],
        seconds=[round(r['time_step_s'], 2) for r in rows],
        exams=[
            dict(step=step, right=round(found['avg'], 4), says=says)
            for step, found, says in zip(at, asked, shown, strict=True)
        ],
    )


def record():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, default=OUT)
    parser.add_argument('--quick', action='store_true', help='the smoke preset, in seconds')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = recorded(smoke_cpu() if args.quick else tiny_cpu(), Path(work) / 'run')
    args.out.write_text(json.dumps(found, separators=(',', ':'), ensure_ascii=False) + '\n')


if __name__ == '__main__':
    record()
