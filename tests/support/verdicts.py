"Sixty verdicts by every verifier, as one JSON line: run by the Python of an installation"

import json
import os
import sys
from pathlib import Path

from compassrl.data.tasks import verifiers, verify
from compassrl.judges.own_reward import OwnReward, read_reward_file
from compassrl.judges.verifiers import warm_up
from compassrl.records import Prompt

OWN = """
def score(text, answer):
    import sympy
    from prices import of
    return 1.0 if sympy.sympify(text) == of(answer) else 0.0
"""
PRICES = """
import sympy

def of(text):
    return sympy.Rational(text)
"""
MATHS = [  # answer, right, wrong: most make sympy import what a first verdict has not
    ('42', '\\boxed{42}', '\\boxed{43}'),
    ('\\frac{1}{2}', '\\boxed{0.5}', '\\boxed{2}'),
    ('\\sqrt{8}', '\\boxed{2\\sqrt{2}}', '\\boxed{4}'),
    ('x^2-1', '\\boxed{(x-1)(x+1)}', '\\boxed{(x-1)^2}'),
    ('\\sin(x)\\cos(x)', '\\boxed{\\frac{\\sin(2x)}{2}}', '\\boxed{\\sin(2x)}'),
    ('[0,1)', '\\boxed{[0, 1)}', '\\boxed{(0, 1)}'),
    ('\\{1,2\\}', '\\boxed{\\{2,1\\}}', '\\boxed{\\{1,3\\}}'),
    ('(1,2)', '\\boxed{(1, 2)}', '\\boxed{(2, 1)}'),
    ('\\begin{pmatrix}1&0\\\\0&1\\end{pmatrix}',)
    + ('\\boxed{\\begin{pmatrix}1&0\\\\0&1\\end{pmatrix}}',)
    + ('\\boxed{\\begin{pmatrix}1&0\\\\0&2\\end{pmatrix}}',),
    ('\\pi', '\\boxed{\\pi}', '\\boxed{3}'),
    ('2i', '\\boxed{2i}', '\\boxed{-2i}'),
    ('\\log_2 8', '\\boxed{3}', '\\boxed{2}'),
    ('10!', '\\boxed{3628800}', '\\boxed{3628801}'),
    ('x=3', '\\boxed{x = 3}', '\\boxed{x = 4}'),
]
CODE = 'n = int(input())\n{}'
SUITE = json.dumps(dict(tests=[dict(stdin='4', stdout='24')], wall_s=20.0, cpu_s=10.0))


def fenced(body):
    return f'```python\n{CODE.format(body)}\n```'


CALL = json.dumps(dict(f=dict(a=[1])))
WORDS = json.dumps([dict(check='keyword', word='sun', at_least=1), dict(check='no_comma')])
CASES = [
    ('maths', a, text, right) for a, *both in MATHS for text, right in zip(both, (True, False))
]
CASES += [
    ('code', SUITE, fenced('import math\nprint(math.factorial(n))'), True),
    (
        'code',
        SUITE,
        fenced('import itertools\nprint(len([*itertools.permutations(range(n))]))'),
        True,
    ),
    ('code', SUITE, fenced('import decimal, fractions, statistics\nprint(6 * n)'), True),
    ('code', SUITE, fenced('import numpy\nprint(24)'), False),
    ('code', SUITE, fenced('print(n)'), False),
    ('code', SUITE, fenced('raise SystemExit(3)'), False),
    ('code', SUITE, fenced('import socket\nprint(socket.create_connection(("::1", 80)))'), False),
    ('code', SUITE, 'no program', False),
    ('instructions', WORDS, 'the sun rises', True),
    ('instructions', WORDS, 'the sun, rises', False),
    ('instructions', WORDS, 'the moon rises', False),
    ('instructions', json.dumps([dict(check='json_format')]), '{"a": 1}', True),
    ('instructions', json.dumps([dict(check='json_format')]), '{a: 1}', False),
    ('tool_call', CALL, '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', True),
    ('tool_call', CALL, '<tool_call>{"name": "f", "arguments": {"a": 2}}</tool_call>', False),
    ('tool_call', CALL, '<tool_call>{"name": "g", "arguments": {"a": 1}}</tool_call>', False),
    ('tool_call', CALL, 'f(1)', False),
    ('numeric', json.dumps(dict(value=42, within=1, unit='m')), '42.5 m', True),
    ('numeric', json.dumps(dict(value=42, within=1, unit='m')), '44 m', False),
    ('set_match', json.dumps(['a', 'b']), 'b, a', True),
    ('set_match', json.dumps(['a', 'b']), 'a', False),
    ('exact', '42', '42', True),
    ('exact', '42', '43', False),
    ('final', '42', 'so #42', True),
    ('final', '42', 'so #43', False),
    ('countdown_expression', '1 2 3 to 6', '#1+2+3', True),
    ('countdown_expression', '1 2 3 to 6', '#1+2', False),
    ('own', '3', '6/2', True),
    ('own', '3', '7/2', False),
    ('own', '1/2', '2**-1', True),
    ('own', '1/2', '2', False),
]


def main(folder):
    "Prints [verifier, text, right by design, status, reward, evidence] of each case"
    Path(folder, 'reward.py').write_text(OWN)
    Path(folder, 'prices.py').write_text(
        'import sympy\n\ndef of(text):\n    return sympy.Rational(text)\n'
    )
    os.chdir(folder)
    own = OwnReward([read_reward_file('reward.py:score')], (), 1.0)
    verifiers['own'] = own
    warm_up({name for name, *_ in CASES} - {'own'})
    out = []
    for name, answer, text, right in CASES:
        v = verify(Prompt('p', 'd', '', [2], answer, name), text)
        out.append([name, text, right, v.correct, v.status, v.reward, v.evidence])
    print(json.dumps(out))


if __name__ == '__main__':
    main(sys.argv[1])
