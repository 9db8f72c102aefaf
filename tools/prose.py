"""Checks the rules for prose that a program can check.

    python tools/prose.py [ROOM ...]     # prints each fault of these rooms, then all counts

It reads the text of notebooks; comments, docstrings and messages (code of notebooks, tests, tools,
course, benchmarks); the YAML files in nbs/, README and CONTRIBUTING. Comment lines that follow one
another are one comment.
"""

import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FRAGMENT = re.compile(r'(of|that|as|who|whose)\b')  # first word of a comment
CLAUSE = re.compile(r'(of|that|as|who|whose|what|where|when|how|which)\b', re.I)  # of a setting
ENGLISH = {  # what a sentence must not contain -> what to write
    r'(^|[.!;:]\s+)(Who|Whose)\s[^?]*$': 'name the subject: "Readers who", "If you"',
    r'\banew\b': 'again',
    r'\b(may|can|could) (not )?be had\b': 'can be, is available',
    r'\b(not|cannot) (to )?be told from\b': 'does not differ measurably from',
    r'\bbeside\b': 'next to, with, or name the relation',
    r'\b(has|have|had) no say\b': 'must not count',
    r'\b(is|are|was|were) to (?!(the|an?|each|its|one|say)\b)[a-z]+\b': 'should, must, will',
    r'\bas (often|many|much) again\b': 'twice, 50 % more',
    r', too([.;:!?)]|$)': 'also',
}


class Fault(NamedTuple):
    room: str  # folder of the notebook, or 'tests', 'tools', ...
    where: str  # file, and line or cell
    rule: str  # 'fragment', 'setting' or 'english'
    text: str


def english(text: str) -> str:
    "The advice for the first rule that a text breaks; '' for none"
    plain = re.sub(r'`[^`]*`|"[^"]*"', '', text)  # names and quotations
    return next((fix for rule, fix in ENGLISH.items() if re.search(rule, plain, re.M)), '')


def comments(code: str) -> Iterator[tuple[int, str]]:
    "Line and text of each comment; lines of their own that follow one another are one comment"
    last, line, text = -2, 0, ''
    for t in tokenize.generate_tokens(io.StringIO(code).readline):
        if t.type != tokenize.COMMENT or re.match(r'#(!|\||\s*%%)', t.string):
            continue
        alone = not t.line[: t.start[1]].strip()
        words = t.string.lstrip('#').strip()
        if alone and t.start[0] == last + 1:
            text += ' ' + words
        else:
            if text:
                yield line, text
            line, text = t.start[0], words
        last = t.start[0] if alone else -2
    if text:
        yield line, text


def strings(code: str) -> Iterator[tuple[int, str]]:
    "Line and text of each string with words in it: docstrings, messages, help"
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ' ' in node.value:
            yield node.lineno, node.value


def settings(code: str) -> Iterator[tuple[int, str]]:
    "Line and text of the comments on the fields of each `*Config`: what `--help` prints"
    found = list(comments(code))
    for node in ast.parse(code).body:
        if isinstance(node, ast.ClassDef) and node.name.endswith('Config'):
            ends = [n.end_lineno or 0 for n in node.body if isinstance(n, ast.AnnAssign)]
            last = max(ends, default=0)
            yield from ((line, text) for line, text in found if node.lineno < line <= last)


def of_code(room: str, where: str, code: str, texts: bool = True) -> Iterator[Fault]:
    "Faults of Python source; magics of notebooks are left out"
    code = re.sub(r'^([%!].*)$', r'pass  # \1', code, flags=re.M)
    try:
        ast.parse(code)
    except SyntaxError:
        return
    found = list(comments(code))
    for line, text in found:
        if FRAGMENT.match(text):
            yield Fault(room, f'{where}:{line}', 'fragment', text)
    for line, text in [*found, *(strings(code) if texts else ())]:
        if fix := english(text):
            yield Fault(room, f'{where}:{line}', 'english', f'{text.strip()[:200]}  -> {fix}')


def of_text(room: str, where: str, text: str) -> Iterator[Fault]:
    "Faults of the prose of a notebook, sentence by sentence; examples of code are left out"
    for sentence in re.split(r'\n|(?<=[.!?]) +', re.sub(r'```.*?```', '', text, flags=re.S)):
        if fix := english(sentence):
            yield Fault(room, where, 'english', f'{sentence.strip()[:200]}  -> {fix}')


def faults(root: Path = ROOT) -> Iterator[Fault]:
    "Every fault of the repository"
    for path in sorted((root / 'nbs').rglob('*.ipynb')):
        if '.ipynb_checkpoints' in path.parts:
            continue
        name = path.relative_to(root / 'nbs')
        room = name.parts[0] if len(name.parts) > 1 else 'root'
        for cell in json.loads(path.read_text())['cells']:
            where, code = f'nbs/{name} {cell["id"]}', ''.join(cell['source'])
            if cell['cell_type'] == 'markdown':
                yield from of_text(room, where, code)
            if cell['cell_type'] == 'code':
                yield from of_code(room, where, code)
                if '@dataclass' in code and 'Config' in code and '#| export' in code:
                    for _, text in settings(code):
                        if CLAUSE.match(text):
                            yield Fault(room, where, 'setting', text)
    for folder in ('tests', 'tools', 'course', 'benchmarks'):
        for path in sorted((root / folder).rglob('*.py')):
            where = str(path.relative_to(root))
            if where != 'tools/prose.py':
                yield from of_code(folder, where, path.read_text(), texts=folder != 'tests')
    for path in [*(root / 'nbs').glob('*.yml'), root / 'README.md', root / 'CONTRIBUTING.md']:
        for line, text in enumerate(path.read_text().split('\n'), 1):
            if fix := english(text):
                yield Fault(
                    path.name, f'{path.name}:{line}', 'english', f'{text.strip()[:200]}  -> {fix}'
                )


def counts(found: list[Fault]) -> dict[str, dict[str, int]]:
    "Rule -> room -> number of faults"
    out: dict[str, Counter[str]] = {}
    for f in found:
        out.setdefault(f.rule, Counter())[f.room] += 1
    return {rule: dict(sorted(c.items())) for rule, c in sorted(out.items())}


if __name__ == '__main__':
    all_ = list(faults())
    for f in all_:
        if not sys.argv[1:] or f.room in sys.argv[1:]:
            print(f'{f.where} [{f.rule}] {f.text}')
    print(counts(all_))
