"What people bring: their own data and their own reward, case by case, with what they should get"

import json
import os
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compassrl.data.prompts import DataConfig
from compassrl.data.rows import BadRow, Reading, row_prompt, worked_answer
from compassrl.data.tasks import verifier, verifiers, verify
from compassrl.data.tokenizer import build_tokenizer, encode
from compassrl.judges.genrm_judge import make_judge
from compassrl.judges.own_reward import own_reward
from compassrl.judges.serial import RewardConfig
from compassrl.records import Prompt, Sample
from compassrl.runs.cli import main, parse_train
from compassrl.runs.factory import check_engines
from compassrl.runs.presets import presets
from compassrl.runs.run_data import Data, drop_unsolved, load, resolve, unsolved
from compassrl.sandbox.isolated import best_isolation, verdict_budget
from tests.runs.test_run import cli, rows, same_model

FRUIT = ('apples', 'pears', 'plums', 'figs')
MODEL = 'smoke-cpu --init-from model --data.max-prompt-tokens 256 --prompts-per-step 4'.split()
TOY = 'smoke-cpu --cold-start.steps 0 --prompts-per-step 4'.split()


def problem(i):
    a, b = 3 + i % 40, 1000 + 7 * i
    what = FRUIT[i % 4]
    return f'Ann has {a} {what} and buys {b} more. How many {what} has she?', f'{a + b:,}'


def write(name, found):
    Path(name).write_text('\n'.join(json.dumps(row) for row in found) + '\n')


def gsm8k(i):
    question, answer = problem(i)
    return dict(question=question, answer=f'She adds them up.\n#### {answer}')


def verl(i):
    question, answer = problem(i)
    return dict(
        data_source='own/fruit',
        prompt=[dict(role='user', content=question)],
        ability='math',
        reward_model=dict(style='rule', ground_truth=answer.replace(',', '')),
        extra_info=dict(split='train', index=i),
    )


CODE = dict(prompt='Write add(a, b).', tests=['assert add(1, 2) == 3', 'assert add(0, 0) == 1'])
TEMPLATE = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""


def save_model(folder, texts):
    "A tiny Qwen3-MoE with a byte-level BPE and a chat template, as transformers writes it"
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    from compassrl.model.policy import Policy, PolicyConfig
    from compassrl.model.pretrained import save_pretrained

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts, 400, special_tokens=['<|endoftext|>', '<|im_start|>', '<|im_end|>']
    )
    hf = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        eos_token='<|im_end|>',
        pad_token='<|endoftext|>',
        chat_template=TEMPLATE,
    )
    size = dict(vocab_size=512, max_position_embeddings=512, eos_token_id=2)
    save_pretrained(Policy(PolicyConfig(**size), 0), folder)
    hf.save_pretrained(folder)
    return hf


@pytest.fixture(scope='module')
def home(tmp_path_factory):
    "A folder with all that people bring"
    import datasets

    folder, before, paths = tmp_path_factory.mktemp('own'), os.getcwd(), [*sys.path]
    os.chdir(folder)
    questions = [problem(i) for i in range(60)]
    write('gsm8k.jsonl', map(gsm8k, range(60)))
    write('test.jsonl', map(gsm8k, range(60, 70)))
    write('verl.jsonl', map(verl, range(60)))
    Path('plain.json').write_text(json.dumps([dict(prompt=q, answer=a) for q, a in questions]))
    Path('plain.csv').write_text('prompt,answer\n' + ''.join(f'"{q}",7\n' for q, _ in questions))
    write('numbers.jsonl', [dict(prompt=q, answer=i + 0.0) for i, (q, _) in enumerate(questions)])
    write('chat.jsonl', [dict(messages=verl(i)['prompt'], answer=str(i)) for i in range(60)])
    write('code.jsonl', [CODE | dict(prompt=f'{i}: {CODE["prompt"]}') for i in range(60)])
    write('twice.jsonl', [dict(prompt='1+1=', answer=2), dict(prompt='1+1=', answer=2)] * 30)
    write('other.jsonl', [dict(q=q, a=a) for q, a in questions])
    table = datasets.Dataset.from_list([verl(i) for i in range(60)])
    table.save_to_disk('saved')
    table.to_parquet('verl.parquet')
    save_model('model', [q for q, _ in questions])
    yield folder
    os.chdir(before)
    sys.path[:] = paths  # the folder of a reward's file is among them


def loaded(*args):
    "What a run with these flags would ask"
    return load(resolve(parse_train([str(a) for a in args])))


def refused(*args):
    with pytest.raises(ValueError) as e:
        loaded(*args)
    return str(e.value)


# data


def test_gsm8k_trains_as_it_is(home, capsys):
    "question and `#### 1,010`: the number is the answer, maths judges, the whole is a solution"
    data = loaded(*MODEL, '--data.path', 'gsm8k.jsonl')
    p = data.train[0]
    i = int(p.text.split()[2]) - 3  # Ann has 3 + i
    assert p.text == gsm8k(i)['question'] and p.answer == problem(i)[1].replace(',', '')
    assert p.verifier == 'maths' and p.solution == gsm8k(i)['answer']
    assert verify(p, f'It is {p.answer}.').correct and verify(p, p.solution).correct
    assert not verify(p, 'It is 12.').correct
    assert len(data.train) + len(data.heldout) == 60


@pytest.mark.parametrize('name', ['exact', 'final'])
def test_a_worked_solution_is_never_compared_whole(home, name):
    "A reward that nobody can earn: `exact` against two sentences"
    p = loaded(*MODEL, '--data.path', 'gsm8k.jsonl', '--data.verifier', name).train[0]
    assert verify(p, {'exact': p.answer, 'final': f'#{p.answer}'}[name]).correct


@pytest.mark.parametrize(
    'text, answer',
    [
        ('so\n#### 42', '42'),
        ('so #### 1,234.5 ', '1234.5'),
        ('so\n#### -3', '-3'),
        ('so\n#### $1,000', '1000'),
        ('so\n#### x = 2', 'x = 2'),
        ('#### Title\nno answer', None),
        ('42', None),
        ('a ##### 3', None),
        ('so\n#### 1,2', '1,2'),  # no thousands: it stays what it is
    ],
)
def test_worked_answers(text, answer):
    assert worked_answer(text) == answer


@pytest.mark.parametrize('path', ['verl.jsonl', 'verl.parquet', 'saved'])
def test_verl_trains_as_it_is(home, path):
    data = loaded(*MODEL, '--data.path', path)
    p = data.train[0]
    assert p.text.startswith('<|im_start|>user\nAnn has') and p.domain == 'own/fruit'
    assert p.answer.isdigit() and p.verifier == 'maths'


def test_a_chat_is_written_as_transformers_writes_it(home):
    "Text and tokens, the generation prompt at the end"
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained('model')
    for p in loaded(*MODEL, '--data.path', 'chat.jsonl').train[:5]:
        question = p.text.split('\n')[1].removesuffix('<|im_end|>')
        messages = [dict(role='user', content=question)]
        want = hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        assert p.token_ids == list(want['input_ids']) and p.text.endswith('assistant\n')
        assert p.token_ids.count(2) == 1  # <|im_end|> is one token, not seven characters


def test_text_becomes_a_chat_only_if_asked(home):
    plain = loaded(*MODEL, '--data.path', 'gsm8k.jsonl').train[0]
    chat = loaded(*MODEL, '--data.path', 'gsm8k.jsonl', '--data.apply-chat-template').train[0]
    assert chat.text == f'<|im_start|>user\n{plain.text}<|im_end|>\n<|im_start|>assistant\n'
    said = refused(*TOY, '--data.path', 'gsm8k.jsonl', '--data.apply-chat-template')
    assert 'no chat template' in said and '--init-from' in said


@pytest.mark.parametrize('path', ['plain.json', 'plain.csv', 'gsm8k.jsonl'])
def test_kinds_of_files_hold_the_same_questions(home, path):
    data = loaded(*MODEL, '--data.path', path)
    assert {p.text for p in data.prompts} == {problem(i)[0] for i in range(60)}


def test_numbers_are_answers(home):
    data = loaded(*MODEL, '--data.path', 'numbers.jsonl')
    assert {p.answer for p in data.prompts} == {str(i) for i in range(60)}  # and not 3.0
    assert verify(data.train[0], data.train[0].answer).correct


def test_a_list_of_tests_is_what_the_verifier_code_reads(home):
    flags = '--data.path code.jsonl --data.columns answer tests'.split()
    p = loaded(*MODEL, *flags, '--data.verifier', 'code', '--rewards.unsafe').train[0]
    with verdict_budget(60.0, unsafe=True):
        v = verify(p, '```python\ndef add(a, b):\n    return a + b\n```')
    assert (v.reward, v.correct) == (0.5, False)
    assert '--data.verifier code' in refused(*MODEL, *flags)


def test_equal_questions_are_kept_with_ids_of_their_own(home):
    flags = '--data.path twice.jsonl --data.eval-path test.jsonl --data.num-heldout None'.split()
    data = loaded(*MODEL, *flags)
    assert len(data.train) == len({p.id for p in data.train}) == 60


@pytest.mark.parametrize(
    'flags, words',
    [
        (
            'other.jsonl',
            ['none of the 60 rows', 'other.jsonl:1', "['a', 'q']", '--data.columns prompt NAME'],
        ),
        ('other.jsonl --data.columns prompt q', ["no column 'answer'", '--data.columns answer']),
        (
            'gsm8k.jsonl --data.max-prompt-tokens 3',
            ['none of the 60 rows', '--data.max-prompt-tokens'],
        ),
        ('bad.jsonl', ['2 bad rows of 62', 'bad.jsonl:3: ', 'bad.jsonl:62', '--data.on-bad-row']),
        ('assistant.jsonl', ['ends with a turn of the assistant']),
        ('x.xlsx', ["'.xlsx'", '.csv']),
    ],
)
def test_refusals_name_the_place_and_the_flag(home, flags, words):
    write('bad.jsonl', [*map(gsm8k, range(2)), dict(question=''), *map(gsm8k, range(2, 60))])
    Path('bad.jsonl').open('a').write('{"question": 3\n')
    turn = dict(role='assistant', content='3')
    write('assistant.jsonl', [dict(messages=[turn], answer='3')] * 60)
    Path('x.xlsx').touch()
    said = refused(*MODEL, '--data.path', *flags.split())
    assert all(w in said for w in words), said


def test_the_flag_that_is_named_is_enough(home):
    columns = '--data.columns prompt q answer a'.split()
    assert len(loaded(*MODEL, '--data.path', 'other.jsonl', *columns).prompts) == 60
    too_long = refused(*MODEL, '--data.path', 'gsm8k.jsonl', '--data.max-prompt-tokens', '3')
    num = next(w for w in too_long.split() if w.endswith(',') and w[:-1].isdigit())[:-1]
    loaded(*MODEL, '--data.path', 'gsm8k.jsonl', '--data.max-prompt-tokens', num)


def test_own_text_in_a_preset_of_its_own_problems(home):
    "One message says everything: length, context, cold start, unknown letters; its flags help"
    write('plain.jsonl', [dict(prompt=f'Café {i}? ' * 9, answer=i) for i in range(100, 170)])
    said = refused('tiny-cpu', '--data.path', 'plain.jsonl')
    flags = ['--data.max-prompt-tokens', '--policy.max-position-embeddings', '--cold-start.steps']
    assert all(f in said for f in flags) and "'é' in plain.jsonl:1" in said
    given = [w.strip(',') for w in said.split()]
    pairs = [w for f in flags for w in (f, given[given.index(f) + 1])]
    data = loaded('tiny-cpu', '--data.path', 'plain.jsonl', *pairs, '--prompts-per-step', '8')
    assert len(data.prompts) == 70


def test_unknown_text_is_said(home, capsys):
    write('accents.jsonl', [dict(prompt=f'{i} é', answer='1') for i in range(30)])
    loaded(*TOY, '--data.path', 'accents.jsonl')
    out = capsys.readouterr().out
    assert "30 of 30 prompts hold text that the tokenizer does not know, the first is 'é'" in out


@pytest.mark.parametrize('num', [1, 4, 30])
def test_num_heldout_is_honoured(home, num):
    data = loaded(*MODEL, '--data.path', 'gsm8k.jsonl', '--data.num-heldout', num)
    assert (len(data.train), len(data.heldout)) == (60 - num, num)


def test_evaluation_sets_have_names(home, capsys):
    flags = '--data.eval-path test.jsonl again=gsm8k.jsonl --data.num-heldout None'.split()
    data = loaded(*MODEL, '--data.path', 'gsm8k.jsonl', *flags)
    assert {n: len(s) for n, s in data.eval_sets.items()} == dict(test=10, again=60)
    assert len(data.train) == 60  # nothing is taken away from training
    assert len({p.id for p in data.prompts}) == 130
    assert "60 of 60 prompts of 'again' are also trained on" in capsys.readouterr().out
    said = refused(*MODEL, '--data.eval-path', 'a=test.jsonl', 'a=gsm8k.jsonl')
    assert 'each name once' in said


# rewards

REWARDS = """
import asyncio

def value(text):  # a plain number
    return len(text) / 10

def truth(completion, answer):
    return answer in completion

def trl(prompts, completions, answer, **kwargs):
    assert len(prompts) == len(completions) == len(answer) == len(kwargs["question"])
    return [float(a.endswith("9")) for a in answer]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(ground_truth.isdigit() and data_source == "data")}

async def slow(text):
    await asyncio.sleep(0.02)
    return -1.0

def sometimes(text):
    return None if text == "skip" else 2

def broken(text):
    number = int(text)
    return number

def wrong_type(text):
    return "good"

def endless(text):
    return float("nan")

def wants(text, colour):
    return 1

def few(completions):
    return [1.0]
"""


def line(text):
    "Where it stands in the file, as evidence names it"
    return f'(reward.py:{REWARDS[: REWARDS.index(text)].count(chr(10)) + 1})'


def function(*names, **more):
    Path('reward.py').write_text(REWARDS)
    specs = tuple(n if n in verifiers else f'reward.py:{n}' for n in names)
    own = own_reward(RewardConfig(function=specs, **more))
    row = dict(question='q', answer='7')
    return own, Prompt('p', 'data', 'q', [1], '7', own.name, columns=row)


@pytest.mark.parametrize(
    'names, more, text, reward, correct',
    [
        (['value'], {}, 'x' * 7, 0.7, False),
        (['value'], {}, 'x' * 30, 3.0, True),  # above 1
        (['value'], dict(correct_at=0.5), 'x' * 7, 0.7, True),
        (['slow'], {}, 'x', -1.0, False),  # below 0
        (['slow'], dict(correct_at=-1), 'x', -1.0, True),
        (['truth'], {}, 'it is 7', 1.0, True),
        (['truth'], {}, 'it is 8', 0.0, False),
        (['trl'], {}, 'x', 0.0, False),
        (['compute_score'], {}, 'x', 1.0, True),
        (['truth', 'value'], dict(weights=(1, 0.1)), '7', 1.01, True),
        (['value', 'truth'], dict(weights=(0.1, 1)), '7', 1.01, False),  # the first says
        (['maths', 'slow'], dict(weights=(1, 0.5)), '$7$', 0.5, True),
        (['sometimes', 'slow'], {}, 'skip', -1.0, False),  # None has no part in it
    ],
)
def test_what_a_function_may_be_and_return(home, names, more, text, reward, correct):
    own, prompt = function(*names, **more)
    own.check([prompt])
    v = own.judge_one(prompt, text)
    assert v.reward == pytest.approx(reward) and v.correct == correct, v
    assert v.status == ('ok' if correct else 'wrong')
    assert own.judge_many([prompt] * 3, [text] * 3) == [v] * 3


@pytest.mark.parametrize(
    'name, words',
    [
        ('broken', ['ValueError', "'seven'", line('int(text)')]),
        ('wrong_type', ['TypeError', "returned 'good'", line('def wrong_type')]),
        ('endless', ['below 1e18', line('def endless')]),
        ('few', ['returned 1 values for 2 responses', line('def few')]),
        ('sometimes', ['returned None']),
    ],
)
def test_a_failure_says_what_and_where(home, name, words):
    own, prompt = function(name)
    texts = ['skip', 'skip'] if name == 'sometimes' else ['seven', 'x']
    for v in own.judge_many([prompt] * 2, texts)[:1]:
        assert (v.status, v.reward, v.correct) == ('failed', 0.0, False)
        assert all(w in v.evidence for w in words), v.evidence


def test_asynchronous_calls_are_under_way_together(home):
    "Counted, not timed: all have begun before the first one ends"
    Path('together.py').write_text(
        'import asyncio\nrunning = [0]\nmost = [0]\n'
        'async def f(text):\n    running[0] += 1\n    most[0] = max(most[0], running[0])\n'
        '    await asyncio.sleep(0)\n    running[0] -= 1\n    return most[0]\n'
    )
    own = own_reward(RewardConfig(function=('together.py:f',)))
    prompt = Prompt('p', 'data', 'q', [1], '7', own.name)
    assert own.judge_many([prompt] * 50, ['x'] * 50)[-1].reward == 50


def test_chats_reach_a_function_as_trl_gives_them(home):
    Path('chatty.py').write_text(
        'def f(prompts, completions, **kwargs):\n'
        '    return [p[-1]["content"] == c[0]["content"] for p, c in zip(prompts, completions)]\n'
    )
    flags = '--data.path chat.jsonl --rewards.function chatty.py:f'.split()
    data = loaded(*MODEL, *flags)
    p = data.train[0]
    question = p.messages[-1]['content']
    assert verify(p, question).correct and not verify(p, 'no').correct


def test_rows_need_no_answer_where_a_function_judges(home):
    write('bare.jsonl', [dict(prompt=f'q{i}', colour='red') for i in range(40)])
    function('wants')
    data = loaded(*MODEL, '--data.path', 'bare.jsonl', '--rewards.function', 'reward.py:wants')
    assert verify(data.train[0], 'x').reward == 1 and data.own.name == 'reward.py:wants'


@pytest.mark.parametrize(
    'flags, words',
    [
        ('reward.py:nothing', ['nothing', 'compute_score']),
        ('gone.py:f', ['gone.py', 'does not exist']),
        ('torn.py:f', ['SyntaxError']),
        ('raises.py:f', ['ZeroDivisionError', 'raises.py:2']),
        ('no.such.module:f', ['no.such.module']),
        ('vibes', ["'vibes'", 'FILE.py:NAME', 'maths']),
        ('reward.py:value --rewards.weights 1 2', ['weights', '1 functions']),
        ('reward.py:value reward.py:value', ['once']),
        ('reward.py:wants', ["['colour']", "'question'"]),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_once(home, flags, words):
    Path('reward.py').write_text(REWARDS)
    Path('torn.py').write_text('def f(:\n')
    Path('raises.py').write_text('import math\nx = 1 / 0\n')
    said = refused(*MODEL, '--data.path', 'gsm8k.jsonl', '--rewards.function', *flags.split())
    assert all(w in said for w in words), said


@pytest.mark.parametrize(
    'fn', [lambda completions, **kw: [1.0], lambda text: 1.0], ids=['lists', 'no answer']
)
def test_what_cannot_be_a_verifier_is_refused_where_it_is_registered(fn):
    fn.__name__ = 'mine'
    with pytest.raises(ValueError, match='--rewards.function'):
        verifier(fn)
    assert 'mine' not in verifiers


def test_a_plain_number_from_a_registered_verifier_is_a_reward():
    def mine(text, answer):
        return 0.25 if text else True

    try:
        verifier(mine)
        prompt = Prompt('p', 'd', 'q', [1], '7', 'mine')
        found = [verify(prompt, t) for t in ('x', '')]
    finally:
        verifiers.pop('mine')
    assert [(v.reward, v.correct, v.status) for v in found] == [
        (0.25, False, 'wrong'),
        (1.0, True, 'ok'),
    ]


# whole runs

OWN_RUN = (
    '--data.path gsm8k.jsonl --data.apply-chat-template --data.num-heldout 4 '
    '--data.eval-path test.jsonl again=plain.csv --rewards.function mine.py:form mine.py:near '
    '--rewards.weights 1 0.5 --rewards.correct-at 0.5 --rollout.max-tokens 12 --save-every 1'
).split()
MINE = """
def form(completions, question, **kwargs):
    return [3.0 * sum(c.isalnum() for c in x[0]["content"]) / 12 - 1 for x in completions]

def near(text, answer):
    return -len(text) / 100
"""


@pytest.fixture(scope='module')
def own_run(home):
    "A model of one's own, its chat, GSM8K, two functions, two named sets"
    Path('mine.py').write_text(MINE)
    write('plain_test.jsonl', map(gsm8k, range(60, 70)))
    flags = [f.replace('plain.csv', 'plain_test.jsonl') for f in OWN_RUN]
    r = cli('train', *MODEL, *flags, '--steps', 3, '--run-dir', 'run', cwd=home)
    assert r.returncode == 0, r.stderr[-3000:]
    return home / 'run', r.stdout


def test_a_run_of_ones_own(own_run):
    folder, said = own_run
    metrics = rows(folder, 'metrics.jsonl')
    assert all(m['failed_frac'] == 0 for m in metrics)
    assert len({m['reward_mean'] for m in metrics}) == 3  # in units of their own
    before, after = (
        json.loads((folder / f'eval_{x}.json').read_text()) for x in ('before', 'after')
    )
    assert list(after['sets']) == ['test', 'again'] and after['num_prompts'] == 4
    assert after['reward_mean'] != after['avg']
    for name in ('held-out', 'test', 'again'):
        assert f'{name} avg@2' in said
    report = (folder / 'report.md').read_text()
    assert '`test`: avg@2' in report and '`again`: avg@2' in report
    sources = json.loads((folder / 'origin.json').read_text())['sources']
    assert 'rewards.function mine.py' in sources
    assert (folder / 'rewards/mine.py').read_text() == MINE


def test_a_resume_uses_the_function_with_which_the_run_began(own_run, home, tmp_path):
    "The file is edited meanwhile: 2 steps and 1 more are the 3 steps, bit for bit"
    flags = [f.replace('plain.csv', 'plain_test.jsonl') for f in OWN_RUN]
    half = tmp_path / 'half'
    assert cli('train', *MODEL, *flags, '--steps', 2, '--run-dir', half, cwd=home).returncode == 0
    Path('mine.py').write_text('def form(text):\n    return 0.0\n\nnear = form\n')
    r = cli('resume', half, '--steps', 3, cwd=home)
    Path('mine.py').write_text(MINE)
    assert r.returncode == 0, r.stderr[-3000:]
    assert same_model(half, own_run[0])
    assert rows(half, 'metrics.jsonl')[-1] == rows(own_run[0], 'metrics.jsonl')[-1]
    (half / 'rewards/mine.py').write_text('changed')
    r = cli('resume', half, '--steps', 4, cwd=home)
    assert r.returncode == 1 and 'rewards.function mine.py has changed' in r.stderr


def test_eval_of_a_run_and_of_a_model(own_run, home, capsys, monkeypatch):
    "The run's own sets, a named file, and a bare model, each in a line and in a file"
    monkeypatch.chdir(home)
    main(['eval', 'run', '--k', '2', '--out', 'own.json'])
    found = json.loads(Path('own.json').read_text())['sets']
    want = json.loads((own_run[0] / 'eval_after.json').read_text())
    assert list(found) == ['heldout', 'test', 'again']
    assert found['heldout']['samples'] == want['samples']  # the run saw the same
    assert found['test']['reward_mean'] == want['sets']['test']['reward_mean']
    main(['eval', 'run', '--data.path', 'test.jsonl', '--k', '1', '--out', 'one.json'])
    assert list(json.loads(Path('one.json').read_text())['sets']) == ['test']
    flags = '--data.path test.jsonl --rollout.max-tokens 4 --rollout.temperature 0 --k 2'.split()
    main(['eval', 'model', 'tiny-cpu', *flags, '--out', 'bare.json'])
    result = json.loads(Path('bare.json').read_text())['sets']['test']
    low, high = result['interval']
    assert result['num_prompts'] == 10 and low <= result['avg'] <= high and high - low > 0.1
    texts = [s['response'] for s in result['samples']]
    assert texts[::2] == texts[1::2]  # greedy
    out = capsys.readouterr().out
    assert 'test: pass@1 (avg@2)' in out and '95 % interval' in out and 'mean reward' in out


@pytest.mark.parametrize(
    'args, words',
    [
        (['eval'], ['compassrl eval MODEL_OR_RUN']),
        (['eval', 'nowhere'], ['nowhere', 'config.json']),
        (['eval', 'model'], ['--data.path']),
        (['eval', 'model', 'huge', '--data.path', 'test.jsonl'], ['huge', 'tiny-cpu']),
        (['eval', 'model', '--data.path', 'nothing.jsonl'], ['nothing.jsonl']),
    ],
)
def test_eval_refuses_in_one_line(home, args, words, monkeypatch):
    monkeypatch.chdir(home)
    with pytest.raises(SystemExit, match='^compassrl: ') as e:
        main(args)
    assert all(w in str(e.value) for w in words) and '\n' not in str(e.value)


# ---- a verifier and engines by their places

ENGINES = """import sys
import torch
from compassrl import RolloutEngine, TorchRollout, TorchTrain, from_pretrained

def samples(s, source, folder):
    dtype, routes = getattr(torch, s.rollout.dtype), s.replay != 'off'
    return TorchRollout(s.policy, s.rollout.num_slots, dtype, s.device, routes)

def trains(s, source):
    return TorchTrain(from_pretrained(source), s.optim, s.temperature, s.router_replay)

class Leaves(TorchRollout):
    def __init__(self, s, source, folder):
        super().__init__(s.policy, s.rollout.num_slots)

    def generate(self, requests, whole_groups=False):
        sys.exit(0)
        yield

class Answers:
    def __init__(self, *given):
        pass

def ends(text, answer):
    return text[-1:] == answer[-1]
"""


def test_engines_by_their_place_make_the_same_run(home):
    "Bit for bit; another text of the file is named by a resume, and an exit is an error"
    (home / 'mine.py').write_text(ENGINES)
    flags = '--steps 1 --cold-start.steps 2 --data.num-heldout 2 --group-size 2'.split()
    own = '--rollout-engine mine.py:samples --train-engine mine.py:trains'.split()
    for folder, more in dict(plain=[], own=own).items():
        r = cli('train', 'smoke-cpu', *flags, *more, '--run-dir', folder, cwd=home)
        assert r.returncode == 0, r.stderr[-2000:]
    assert same_model(home / 'own', home / 'plain')
    (home / 'mine.py').write_text(ENGINES + '# another\n')
    r = cli('resume', 'own', '--steps', 2, cwd=home)
    assert r.returncode == 1 and 'rollout_engine mine.py has changed' in r.stderr
    more = '--rollout-engine', 'mine.py:Leaves', '--router-replay', 'off', '--run-dir', 'left'
    r = cli('train', 'smoke-cpu', *flags, *more, cwd=home)
    assert r.returncode == 1 and 'it ended the program by SystemExit(0)' in r.stderr
    assert 'mine.py", line 17, in generate' in r.stderr


@pytest.mark.parametrize(
    'flags, words',
    [
        ('--rollout-engine gone.py:f', ['gone.py', 'No such file']),
        ('--rollout-engine mine.py:f', ["has no function 'f'", 'samples']),
        ('--rollout-engine mine.py:Answers', ["'generate'", 'derive it from RolloutEngine']),
        ('--train-engine mine.py:Answers', ["'update'", 'derive it from TrainEngine']),
        ('--rollout-engine vlm', ["'vllm'", "'pool'"]),
        ('--data.verifier mine.py:f', ['data.verifier', "has no function 'f'"]),
        ('--data.verifier mine.py:samples', ["asks for ['folder', 's', 'source']"]),
    ],
)
def test_what_is_no_engine_and_no_verifier_is_refused(home, flags, words):
    Path('mine.py').write_text(ENGINES)
    with pytest.raises(ValueError) as e:
        cfg = resolve(parse_train([*MODEL, '--data.path', 'gsm8k.jsonl', *flags.split()]))
        check_engines(cfg, 1)
        load(cfg)
    assert all(w in str(e.value) for w in words), e.value


@pytest.mark.parametrize('workers', [0, 1])
def test_a_verifier_by_its_place_judges_rows_that_name_none(home, workers):
    Path('mine.py').write_text(ENGINES)
    names = ['', '', 'exact', '']
    texts = [dict(prompt=f'{i}?', answer=f'{i}7', verifier=v) for i, v in enumerate(names)]
    Path('mixed.jsonl').write_text('\n'.join(map(json.dumps, texts)))
    cfg = replace(presets['smoke-cpu'](), prompts_per_step=2)
    data = DataConfig(path='mixed.jsonl', verifier='mine.py:ends', num_heldout=1)
    cfg = replace(cfg, data=data, cold_start=replace(cfg.cold_start, steps=0))
    found = load(cfg)
    rewards = replace(cfg.rewards, workers=workers)
    with closing(make_judge(found.prompts, found.tokenizer, found.eos_id, rewards)) as judge:
        said = [
            Sample(
                p.id,
                0,
                p.token_ids,
                encode(found.tokenizer, '97'),
                torch.zeros(2),
                None,
                None,
                '',
                0,
            )
            for p in found.prompts
        ]
        for s in said:
            judge.start(s)
        judge.settle(said)
    right = {p.text: s.verdict.correct for p, s in zip(found.prompts, said, strict=True)}
    assert right == {'0?': True, '1?': True, '2?': False, '3?': True}


def test_workers_import_a_function_by_its_file(home):
    "The same rewards as in the trainer's own process"
    Path('mine.py').write_text('def form(text, answer):\n    return len(text) - 3 * len(answer)\n')
    flags = '--data.path gsm8k.jsonl --rewards.function mine.py:form --rollout.max-tokens 8'.split()
    runs = []
    for workers in (0, 2):
        folder = home / f'workers-{workers}'
        more = ['--steps', 2, '--rewards.workers', workers, '--run-dir', folder]
        r = cli('train', *MODEL, *flags, *more, cwd=home)
        assert r.returncode == 0, r.stderr[-3000:]
        runs.append([m['reward_mean'] for m in rows(folder, 'metrics.jsonl')])
    assert runs[0] == runs[1] and len(set(runs[0])) == 2


def test_a_worker_says_where_a_function_failed(home):
    Path('mine.py').write_text('def form(text):\n    return int("x" + text)\n')
    flags = '--data.path gsm8k.jsonl --rewards.function mine.py:form --rollout.max-tokens 4'.split()
    more = '--rewards.workers 1 --steps 0 --run-dir failing'.split()
    r = cli('train', *MODEL, *flags, *more, cwd=home)
    assert r.returncode == 1 and 'ValueError: invalid literal' in r.stderr
    assert r.stderr.rstrip().endswith('(mine.py:2)')


def test_an_evaluation_without_verdicts_is_an_error(home, monkeypatch):
    "The file keeps what each response was told"
    monkeypatch.chdir(home)
    Path('mine.py').write_text('def form(text):\n    return int("x" + text)\n')
    flags = '--data.path test.jsonl --rewards.function mine.py:form --k 1 --out none.json'.split()
    with pytest.raises(SystemExit, match="^compassrl: evaluation 'test': 10 of 10 .*mine.py:2"):
        main(['eval', 'model', 'tiny-cpu', *flags, '--rollout.max-tokens', '4'])
    assert json.loads(Path('none.json').read_text())['sets']['test']['failed_frac'] == 1


@pytest.mark.parametrize(
    'verifier, answer, why',
    [
        ('countdown_expression', '7', "'7' is not like '3 5 8 to 9'"),
        ('countdown_expression', '3 5 8 to nine', 'is not like'),
        ('code', 'assert f(1) == 1', 'the tests are no JSON'),
        ('code', [], 'tests=[]'),
        ('code', dict(tests=[7]), 'use a list of assert lines'),
    ],
)
def test_an_answer_that_its_verifier_cannot_use(verifier, answer, why):
    "It would fail with every response; with reward functions nobody asks the verifier"
    reading = Reading(build_tokenizer())
    row = dict(prompt='1+1=', answer=answer, verifier=verifier)
    with pytest.raises(BadRow, match=f'^verifier {verifier!r} cannot use the answer: ') as e:
        row_prompt(reading, row)
    assert why in str(e.value)
    assert row_prompt(replace(reading, keep_row=True), row).verifier == verifier


def test_reading_is_checked_before_a_row_is_read():
    for bad in (dict(columns=dict(colour='c')), dict(verifier='vibes'), dict(always_chat=True)):
        with pytest.raises(ValueError):
            replace(Reading(build_tokenizer()), **bad)


POINT = 'class P:\n    def __init__(s, x): s.x = x\n    def __eq__(s, o): return s.x == o.x\n'
UNSOLVABLE = {  # a test that its own solution passes in plain Python, and cannot pass here
    'assert P(1) == P(1)': POINT,
    'assert sorted([P(2), P(1)])[0].x == 1': POINT + '    def __lt__(s, o): return s.x < o.x\n',
    'assert C.A == C(1)': 'from enum import Enum\nclass C(Enum):\n    A = 1\n',
    'assert (P(1) * 3).x == 3': POINT + '    def __mul__(s, k): return P(s.x * k)\n',
    'assert type(P(1)) is P': POINT,
}


@pytest.mark.skipif(not best_isolation()[0], reason='this machine isolates no program')
def test_rows_that_no_program_can_solve_are_named(capsys):
    "By the solution that they bring; without one nobody can know"
    for test, program in UNSOLVABLE.items():
        exec(f'{program}\n{test}', {})

    def row(id, test, program):
        return Prompt(id, 'programs', '?', (2,), json.dumps([test]), 'code', program)

    def data():
        solved = row('good', 'assert f(2) == 4', 'def f(x): return 2 * x')
        rows = [row(t, t, p) for t, p in UNSOLVABLE.items()]
        unknown = row('unknown', 'assert P(1) == P(1)', '')
        return Data(build_tokenizer(), (1,), [solved, unknown, *rows], [solved, rows[0]])

    assert list(unsolved(data().prompts)) == list(UNSOLVABLE)
    with pytest.raises(ValueError, match='5 rows fail their own solution, the first is assert P'):
        drop_unsolved(data(), 'raise', 1)
    left = data()
    drop_unsolved(left, 'skip', 1)
    assert [p.id for p in left.train] == ['good', 'unknown'] and len(left.heldout) == 1
    assert 'left out' in capsys.readouterr().out
    with pytest.raises(ValueError):
        drop_unsolved(data(), 'skip', 3)
