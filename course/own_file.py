"""The reader's own trainer: a function from each step of the spine, read from saved notebooks.

    python -m course.own_file [my_trainer.py]

What is not written yet, the page's solution stands in for; each function says which it is.
"""

import argparse
import json
import re
from pathlib import Path

import yaml

__all__ = ['own_file']

HEAD = """\"My own trainer: one function from each step\"

from __future__ import annotations

import math
import re
from dataclasses import replace
from math import inf, log

import torch
from torch import Tensor

# what the functions ask the library for
from compassrl.algo.advantages import per_token
from compassrl.algo.losses import PolicyLoss
from compassrl.data.tasks import verify
from compassrl.data.tokenizer import EOS_ID, build_tokenizer, response_text
from compassrl.judges.genrm import Question, parse_label
from compassrl.records import Request, Verdict, collate, derive_seed
from compassrl.rollout.rollout_settings import RolloutConfig

tokenizer = build_tokenizer()
"""


def exercise(
    path: Path,  # a notebook
    anchor: str,  # anchor of the exercise's heading
) -> tuple[str, str]:  # the reader's cell, and the solution's
    "The first cell of code below a heading, and the first one that is called a solution"
    cells = json.loads(path.read_text())['cells']
    inside, code = False, []
    for c in cells:
        text = ''.join(c['source'])
        if c['cell_type'] == 'markdown':
            slugs = re.findall(r'^#+ (.+)$', text, flags=re.M)
            inside |= anchor in {
                re.sub(r'[^\w\- ]', '', s.lower()).replace(' ', '-') for s in slugs
            }
        elif inside:
            code.append(text)
    return code[0], next(t for t in code if '# Solution' in t)


def plain(text):  # without directives, checks and the name of a solution
    text = re.sub(r'^(#\||# Solution|assert |test_eq).*\n?', '', text, flags=re.M)
    return text.replace('_solution', '').strip()


def own_file(
    root: Path,  # folder of the repository
) -> str:  # Python: imports, then the functions of each step
    "The reader's functions where they are written, solutions where they are not"
    parts = [HEAD]
    for step, entry in enumerate(
        yaml.safe_load((root / 'nbs' / 'course.yml').read_text())['spine']
    ):
        if 'writes' in entry:
            page, _, anchor = entry['writes'].partition('#')
            mine, solution = exercise(root / 'nbs' / f'{page}.ipynb', anchor)
            todo = 'your turn' in mine
            who = 'the solution stands in' if todo else 'yours'
            parts.append(f'# Step {step}, {page}: {who}\n{plain(solution if todo else mine)}\n')
    return '\n\n'.join(parts)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('out', nargs='?', type=Path, default=Path('my_trainer.py'))
    out = parser.parse_args().out
    out.write_text(own_file(Path(__file__).resolve().parents[1]))
    print(f'{out}: {out.read_text().count(": yours")} steps are yours')
