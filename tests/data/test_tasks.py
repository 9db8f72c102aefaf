"Problems, verifiers, the split, the tokenizer and the loader"

import ast
import itertools
import json
import random
import socket
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compassrl.data import loading, rows
from compassrl.data import prompts as tasks
from compassrl.data import tasks as problems
from compassrl.data.loading import load_prompts
from compassrl.data.prompts import DataConfig, levels_of, load_data, make_prompts, split_of
from compassrl.data.rows import Reading
from compassrl.data.tasks import as_verdict, num_problems, problem, verifier, verifiers, verify
from compassrl.data.tokenizer import (
    EOS_ID,
    PAD_ID,
    UNK_ID,
    build_tokenizer,
    encode,
    load_tokenizer,
    response_text,
    save_tokenizer,
)
from compassrl.records import Prompt, Verdict

tok = build_tokenizer()
printable = st.text(alphabet=st.sampled_from(['\n', *map(chr, range(32, 127))]))


def prompt(answer, verifier, text='q'):
    return Prompt('id', 'd', text, encode(tok, text), answer, verifier)


# tokenizer


@pytest.fixture(scope='module')
def hf(tmp_path_factory):
    "The tokenizer as transformers loads it from a checkpoint's folder"
    from transformers import AutoTokenizer

    d = tmp_path_factory.mktemp('tokenizer')
    save_tokenizer(tok, d)
    (d / 'config.json').write_text(
        json.dumps(dict(model_type='qwen3_moe', architectures=['Qwen3MoeForCausalLM']))
    )
    return d, AutoTokenizer.from_pretrained(d)


@settings(deadline=None)
@given(printable)
def test_round_trip(text):
    ids = encode(tok, text)
    assert len(ids) == len(text) and not {PAD_ID, EOS_ID, UNK_ID} & set(ids)
    assert response_text(tok, ids) == response_text(tok, ids + [EOS_ID]) == text


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        printable,
        st.text(),
        st.sampled_from(['<eos>', 'a<pad> <unk>', "it 's , ok ?", ' ', '\r\n\t', 'é漢', 'a\u0301']),
    )
)
def test_transformers_agrees(hf, text):
    d, auto = hf
    ids = encode(tok, text)
    assert auto(text)['input_ids'] == ids == encode(load_tokenizer(d), text)
    assert auto.decode(ids) == response_text(tok, ids)
    if all(c == '\n' or ' ' <= c <= '~' for c in text):
        assert auto.decode(ids + [EOS_ID], skip_special_tokens=True) == text


def test_tokenizer_specials(hf):
    _, auto = hf
    assert (
        (auto.pad_token_id, auto.eos_token_id, auto.unk_token_id)
        == (PAD_ID, EOS_ID, UNK_ID)
        == (0, 1, 2)
    )
    assert len(auto) == tok.get_vocab_size() == 99
    assert EOS_ID not in encode(tok, 'x<eos>y')  # nothing in a text ends a response
    assert response_text(tok, [*encode(tok, '#7'), PAD_ID, *encode(tok, '5'), EOS_ID]) == '#7<pad>5'
    assert response_text(tok, [EOS_ID, EOS_ID]) == '<eos>' and response_text(tok, []) == ''


def test_tokenizer_files_missing_or_torn(tmp_path):
    with pytest.raises(ValueError, match='does not exist'):
        load_tokenizer(tmp_path)
    (tmp_path / 'tokenizer.json').write_text('{"torn": ')
    with pytest.raises(ValueError, match='is no tokenizer'):
        load_tokenizer(tmp_path)


# problems and verifiers


@pytest.mark.parametrize('domain', ['arithmetic', 'countdown', 'strings'])
@pytest.mark.parametrize('level', range(5))
def test_solutions_are_right(domain, level):
    rng, size = random.Random(level), num_problems(domain, level)
    for i in range(size) if size < 3000 else [rng.randrange(size) for _ in range(500)]:
        if (p := problem(domain, level, i)) is None:
            continue
        assert verify(prompt(p.answer, p.verifier), p.solution).correct, p
        assert len(p.text) <= 24 and (level > 2 or len(p.solution) <= 48), p
        assert UNK_ID not in encode(tok, p.text + p.solution)
        if domain == 'arithmetic':
            assert int(p.answer) == eval(p.text[:-1]) >= 0


def oracle(expr, nums, target):
    "Python's own evaluation and counting"
    return eval(expr) == target and not Counter(
        map(int, ''.join(c if c.isdigit() else ' ' for c in expr).split())
    ) - Counter(nums)


def test_countdown_against_enumeration():
    nums, agree = [2, 3, 12], 0
    for n in (1, 2, 3):
        for chosen in itertools.product([2, 3, 12, 7], repeat=n):
            for ops in itertools.product('+-*', repeat=n - 1):
                flat = str(chosen[0]) + ''.join(o + str(c) for o, c in zip(ops, chosen[1:]))
                for expr in (
                    flat,
                    f'{chosen[0]}{ops[0]}({chosen[1]}{ops[1]}{chosen[2]})'
                    if n == 3
                    else f'({flat})',
                ):
                    for target in (5, 9, 14, 30):
                        assert verifiers['countdown_expression'](
                            '#' + expr, f'2 3 12 to {target}'
                        ).correct == oracle(expr, nums, target), expr
                        agree += 1
    assert agree > 3000


@pytest.mark.parametrize(
    'text',
    [
        '',
        '#',
        '9',
        '#9',
        '#3*3',
        '#(8-5)*3 ',
        '# (8-5)*3',
        '#(8-5)*3#',
        '#(8-5)*3\n',
        '#--3*3',
        '#+9',
        '#8**5',
        '#8/5',
        '#1_0-1',
        '#0x9',
        '#(8-5)(3)',
        '#[9][0]',
        '#9 if 1 else 0',
        '#__import__("os").getcwd()',
        '#' + '(' * 150 + '9' + ')' * 150,
        '#' + '9' * 5000,
        '#٣*(٨-٥)',
        '#3*(8-5',
        '#3*(08-5)',
        '#True*9',
    ],
)
def test_countdown_rejects(text):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        v = verify(prompt('3 5 8 to 9', 'countdown_expression'), text)
    assert (v.reward, v.status) == (0, 'wrong') and '\n' not in v.evidence and len(v.evidence) < 200


def test_final_is_strict():
    for text in (
        '75',
        '#075',
        '#75 ',
        '# 75',
        '#75\n',
        '#75#',
        '#7#5',
        '##75',
        '#75 or 76',
        '#75.0',
        '#7<pad>5',
        '#',
    ):
        assert not verify(prompt('75', 'final'), text).correct, text
    assert verify(prompt('75', 'final'), 'any working #75').correct


@pytest.mark.parametrize('name', ['exact', 'final', 'countdown_expression', 'no such verifier'])
@settings(deadline=None)
@given(text=st.text(), answer=st.text())
def test_verify_never_raises(name, text, answer):
    v = verify(prompt(answer, name), text)
    assert (
        isinstance(v, Verdict)
        and v.status in ('ok', 'wrong', 'failed')
        and v.evidence.isprintable()
    )
    assert v.correct == (v.status == 'ok') == (v.reward == 1)


def test_broken_verifiers_fail_not_lie():
    @verifier
    def raises(text, answer):
        raise RecursionError('too deep\nreally')

    @verifier
    def nonsense(text, answer):
        return 'yes'

    @verifier
    def not_a_number(text, answer):
        return Verdict(float('nan'), True)

    try:
        for name in ('raises', 'nonsense', 'not_a_number'):
            v = verify(prompt('1', name), '1')
            assert (v.status, v.reward, v.correct) == (
                'failed',
                0,
                False,
            ) and '\n' not in v.evidence
    finally:
        for name in ('raises', 'nonsense', 'not_a_number'):
            verifiers.pop(name)


def test_mutants_are_caught():
    "The checks above notice the usual mistakes in a family or a verifier"

    def agrees(mark):  # with the oracle on a few expressions
        return all(
            mark('#' + e) == oracle(e, [3, 5, 8], 9)
            for e in ('(8-5)*3', '3*3', '8+1', '8-5', '3+8-5', '3*(8-5)')
        )

    def value(e):
        return problems._evaluate(ast.parse(e, mode='eval').body)

    assert agrees(lambda t: verifiers['countdown_expression'](t, '3 5 8 to 9').correct)
    assert not agrees(lambda t: value(t[1:])[0] == 9)  # reuses and invents numbers
    # each number any number of times
    assert not agrees(lambda t: set(value(t[1:])[1]) <= {3, 5, 8} and value(t[1:])[0] == 9)
    # wrong target
    assert not agrees(lambda t: value(t[1:])[1] == Counter([3, 5, 8]) and value(t[1:])[0] < 9)
    sums = [p for i in range(1000) if (p := problem('arithmetic', 1, i * 16)) and '+' in p.text]

    def forgets(p):
        return p.solution.replace('+1=', '+0=')

    assert any(forgets(p) != p.solution for p in sums)

    def columns(text):
        return all(
            eval(c.split('=')[0]) == int(c.split('=')[1]) for c in text.split(' #')[0].split()
        )

    assert all(columns(p.solution) for p in sums) and not all(columns(forgets(p)) for p in sums)


# train and held out

mixes = st.one_of(
    st.tuples(st.just('arithmetic'), st.floats(1, 4)),
    st.tuples(st.just('countdown'), st.floats(1, 2.5)),
    st.tuples(st.just('strings'), st.floats(0, 6)),
)


@settings(max_examples=25, deadline=None)
@given(st.tuples(mixes, st.integers(0, 2**40)), st.tuples(mixes, st.integers(0, 2**40)))
def test_train_and_heldout_are_disjoint(one, two):
    ((d1, f1), s1), ((d2, f2), s2) = one, two
    train = make_prompts(d1, 120, f1, s1, 'train', tok)
    heldout = make_prompts(d2, 60, f2, s2, 'heldout', tok)
    assert len({p.text for p in train}) == 120 and len({p.text for p in heldout}) == 60
    assert not {p.text for p in train} & {p.text for p in heldout}
    assert not {p.id for p in train} & {p.id for p in heldout}
    assert {split_of(p.text) for p in train} == {'train'} and {
        split_of(p.text) for p in heldout
    } == {'heldout'}


def test_both_sides_make_the_whole():
    for domain, level in (('arithmetic', 0), ('arithmetic', 1), ('countdown', 0), ('countdown', 1)):
        whole = {
            p.text for i in range(num_problems(domain, level)) if (p := problem(domain, level, i))
        }
        sides = []
        for split in ('train', 'heldout'):
            n = sum(split_of(t) == split for t in whole)
            sides.append({p.text for p in make_prompts(domain, n, level, 0, split, tok)})
            with pytest.raises(
                ValueError, match=f'level {level} of {domain} holds only {n} {split} prompts'
            ):
                make_prompts(domain, n + 1, level, 0, split, tok)
        assert set.union(*sides) == whole and not set.intersection(*sides)


GOLDEN = [
    '67+80=',
    '721+463=',
    '263+387=',
    '1 3 8 to 11:',
    '2 8 10 to 26:',
    'flip ghk:',
    'keep 2 isk:',
]


def test_prompts_do_not_change():
    "Golden values: a run that resumes in a later version asks the same questions"
    ps = (
        make_prompts('arithmetic', 3, 1.5, 7, 'train', tok)
        + make_prompts('countdown', 2, 1, 7, 'heldout', tok)
        + make_prompts('strings', 2, 0, 7, 'train', tok)
    )
    assert [p.text for p in ps] == GOLDEN
    assert (
        ps[0].id == tasks.prompt_id('arithmetic', ps[0].text)
        and ps == make_prompts('arithmetic', 3, 1.5, 7, 'train', tok) + ps[3:]
    )
    assert make_prompts('arithmetic', 9, 1, 7, 'train', tok) != make_prompts(
        'arithmetic', 9, 1, 8, 'train', tok
    )


def test_large_lists_are_sampled_evenly():
    # 1.6 million entries: drawn by number
    ps = make_prompts('arithmetic', 2000, 2, 0, 'train', tok)
    leading = Counter(p.text[0] for p in ps if '+' in p.text)
    n = sum(leading.values())
    assert 0.45 < n / 2000 < 0.55 and all(abs(leading[d] / n - 1 / 9) < 0.04 for d in '123456789')


@settings(deadline=None)
@given(st.floats(0, 20), st.integers(0, 5000))
def test_levels(difficulty, num):
    got = levels_of(difficulty, num)
    assert sum(n for _, n in got) == num and all(n > 0 for _, n in got)
    if num:
        assert abs(sum(level * n for level, n in got) / num - difficulty) <= 0.5 / num + 1e-9


@pytest.mark.parametrize(
    'kw,message',
    [
        (dict(domain='poetry'), 'poetry'),
        (dict(difficulty=-0.1), 'difficulty=-0.1'),
        (dict(difficulty=float('nan')), 'difficulty=nan'),
        (dict(difficulty='hard'), 'hard'),
        (dict(split='test'), "'test'"),
        (dict(num=-1), 'num=-1'),
        (dict(num=1.5), 'num=1.5'),
    ],
)
def test_make_prompts_refuses(kw, message):
    with pytest.raises(ValueError, match=message):
        make_prompts(
            **dict(domain='arithmetic', num=3, difficulty=1, seed=0, split='train', tokenizer=tok)
            | kw
        )


@pytest.mark.parametrize(
    'kw,message',
    [
        (dict(domains=()), 'at least one'),
        (dict(domains=('arithmetic', 'arithmetic')), 'each once'),
        (dict(domains=('chess',)), "'chess'"),
        (dict(weights=(1.0, 2.0)), 'weights'),
        (dict(weights=(0.0,)), 'weights'),
        (dict(weights=(float('nan'),)), 'weights'),
        (dict(difficulty=float('nan')), 'difficulty=nan'),
        (dict(num_heldout=0), 'num_heldout=0'),
        (dict(heldout_frac=0.0), 'heldout_frac=0.0'),
        (dict(verifier='vibes'), "'vibes'"),
        (dict(on_bad_row='ignore'), "'ignore'"),
        (dict(columns=dict(question='q')), "'question' is no field"),
        (dict(max_prompt_tokens=0), 'max_prompt_tokens=0'),
    ],
)
def test_config_refuses(kw, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**kw)


def test_generated_data():
    cfg = DataConfig(
        domains=['arithmetic', 'countdown', 'strings'],
        weights=[1, 1, 2],
        difficulty=1.3,
        num_train=401,
        num_heldout=99,
    )
    train, heldout = load_data(cfg, tok, seed=5)
    assert (len(train), len(heldout)) == (401, 99) and (train, heldout) == load_data(
        cfg, tok, seed=5
    )
    assert len({p.id for p in train + heldout}) == 500
    assert abs(Counter(p.domain for p in train)['strings'] - 200) <= 1
    assert all(p.token_ids == encode(tok, p.text) and verify(p, p.solution).correct for p in train)
    with pytest.raises(ValueError, match='max_prompt_tokens=10'):
        load_data(DataConfig(domains=('strings',), max_prompt_tokens=10), tok, 0)


# loaded data


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*a, **k):
        raise AssertionError('the network was touched')

    for name in ('connect', 'connect_ex'):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, 'getaddrinfo', refuse)


def write(path, rows):
    path.write_text('\n'.join(r if isinstance(r, str) else json.dumps(r) for r in rows) + '\n')
    return str(path)


good = [dict(q=f'{i}+{i}=', a=str(2 * i), cot=f'#{2 * i}', key=f'k{i}') for i in range(40)]
columns = dict(prompt='q', answer='a', solution='cot', id='key')
by_columns = Reading(tok, columns)


def test_all_sources_agree(tmp_path, no_network):
    import datasets

    data = datasets.Dataset.from_list(good)
    data.to_parquet(tmp_path / 'x.parquet')
    data.save_to_disk(tmp_path / 'saved')
    (tmp_path / 'folder').mkdir()
    write(tmp_path / 'folder' / 'train.jsonl', good)
    jsonl = load_prompts(write(tmp_path / 'x.jsonl', good), Reading(tok, columns, 'final'))
    assert (
        jsonl[1] == []
        and len(jsonl[0]) == 40
        and jsonl[0][3] == Prompt('k3', 'data', '3+3=', encode(tok, '3+3='), '6', 'final', '#6')
    )
    for source in ('x.parquet', 'saved', 'folder'):
        assert (
            load_prompts(
                ('hf:' if source == 'folder' else '') + str(tmp_path / source),
                Reading(tok, columns, 'final'),
            )
            == jsonl
        ), source
    train, heldout = load_data(
        DataConfig(
            path=str(tmp_path / 'x.jsonl'), columns=columns, verifier='final', heldout_frac=0.3
        ),
        tok,
        0,
    )
    assert (
        len(train) + len(heldout) == 40
        and not {p.text for p in train} & {p.text for p in heldout}
        and all(verify(p, p.solution).correct for p in train)
    )


def test_every_bad_row_is_named(tmp_path, capsys):
    lines = [
        good[0],
        '{"q": "1+1=",',
        '[1, 2]',
        '"text"',
        dict(q='1+1='),
        dict(q='', a='2', cot='', key='x'),
        dict(q='  ', a='2', cot='', key='x'),
        dict(q='1', a=[2], cot='', key='x'),
        dict(q=None, a='2', cot='', key='x'),
        dict(q='1', a='', cot='', key='x'),
        dict(good[1], cot=['#2']),
        good[0],
        dict(good[2], verifier='vibes'),
        dict(q='1' * 99, a='1', cot='', key='y'),
        '{"q": "\\ud800", "a": "1", "cot": "", "key": "z"}',
        '',
        good[3],
    ]
    path = write(tmp_path / 'x.jsonl', lines)
    with pytest.raises(ValueError) as e:
        load_prompts(path, Reading(tok, columns, max_prompt_tokens=50))
    assert (
        '14 bad rows of 16' in str(e.value)
        and f'{path}:2: invalid JSON' in str(e.value)
        and str(e.value).count('x.jsonl:') == 5
    )
    prompts, skipped = load_prompts(path, Reading(tok, columns, max_prompt_tokens=50), 'skip')
    assert [p.id for p in prompts] == [
        'k0',
        'k3',
    ] and 'skipped 14 bad rows' in capsys.readouterr().out
    reasons = [
        'invalid JSON',
        'not an object but list',
        'not an object but str',
        "no column 'a'",
        "'q' is empty",
        "'q' is empty",
        "'a' is list '[2]'",
        "'q' is NoneType",
        "'a' is empty",
        "'cot' is list",
        "id 'k0' is taken by",
        "verifier 'vibes'",
        '99 tokens',
        'not valid Unicode',
    ]
    for n, reason, message in zip([*range(2, 16)], reasons, skipped, strict=True):
        assert message.startswith(f'{path}:{n}: ') and reason in message


def test_odd_files(tmp_path):
    (tmp_path / 'x.jsonl').write_bytes(
        b'\xef\xbb\xbf{"prompt": "1", "answer": "1"}\r\n\r\n'
        b'{"prompt": "2", "answer": "2"}\r\n'
        b'{"prompt": "\xff", "answer": "2"}\n'
        b'{"prompt": "\xe2\x80\xa8", "answer": ' + b'1' * 5000 + b'}\n'
    )
    prompts, skipped = load_prompts(tmp_path / 'x.jsonl', Reading(tok), on_bad_row='skip')
    assert (
        [p.text for p in prompts] == ['1', '2']
        and [s.split(':')[1] for s in skipped] == ['4', '5']
        and all("'utf-8' codec" in s or 'integer' in s or 'empty' in s for s in skipped)
    )
    assert encode(tok, 'x漢') == [*encode(tok, 'x'), UNK_ID]


def test_sources_that_cannot_be_used(tmp_path):
    (tmp_path / 'x.xlsx').write_text('a,b')
    (tmp_path / 'x.parquet').write_text('no')
    (tmp_path / 'empty.jsonl').write_text('\n')
    (tmp_path / 'dir').mkdir()
    for name, message in (
        ('none.jsonl', 'does not exist'),
        ('x.xlsx', "unknown kind '.xlsx'"),
        ('x.parquet', 'cannot be read'),
        ('empty.jsonl', 'no usable row'),
        ('dir', 'cannot be read'),
    ):
        with pytest.raises(ValueError, match=message):
            load_prompts(str(tmp_path / name), Reading(tok))
    import datasets

    datasets.DatasetDict(train=datasets.Dataset.from_list(good)).save_to_disk(tmp_path / 'splits')
    with pytest.raises(ValueError, match='several splits.*splits/train'):
        load_prompts(str(tmp_path / 'splits'), by_columns)
    assert len(load_prompts(str(tmp_path / 'splits' / 'train'), by_columns)[0]) == 40
    with pytest.raises(ValueError, match='1 rows give'):
        load_data(
            DataConfig(path=write(tmp_path / 'one.jsonl', [dict(prompt='1', answer='1')])), tok, 0
        )


def test_without_datasets(tmp_path, monkeypatch):
    path = write(tmp_path / 'x.jsonl', good)
    monkeypatch.setitem(sys.modules, 'datasets', None)
    assert len(load_prompts(path, by_columns)[0]) == 40  # JSON lines need nothing
    (tmp_path / 'x.parquet').write_text('')
    (tmp_path / 'saved').mkdir()
    for source in (str(tmp_path / 'x.parquet'), 'hf:some/name', str(tmp_path / 'saved')):
        with pytest.raises(ValueError, match=r'pip install compassrl\[data\]'):
            load_prompts(source, Reading(tok))


def test_hf_names(monkeypatch):
    import datasets

    asked = []
    monkeypatch.setattr(datasets, 'load_dataset', lambda *a, **k: asked.append((a, k)) or good)
    for source in ('hf:owner/name', 'hf:owner/name:test', 'hf:owner/name:main:test'):
        load_prompts(source, by_columns)
    assert asked == [
        (('owner/name',), dict(split='train')),
        (('owner/name',), dict(split='test')),
        (('owner/name', 'main'), dict(split='test')),
    ]


def test_import_needs_no_optional_package():
    src = ''.join(Path(m.__file__).read_text() for m in (tasks, problems, rows, loading))
    assert not [
        line
        for line in src.splitlines()
        if line.startswith(
            ('import datasets', 'from datasets', 'import transformers', 'import pyarrow')
        )
    ]


@pytest.mark.parametrize('reward', [1e300, -1e20, float('inf'), float('nan')])
def test_rewards_that_no_step_can_compare_are_refused(reward):
    with pytest.raises(ValueError, match='use a number below 1e18'):
        as_verdict(reward, 'mine')
    assert as_verdict(-1e17, 'mine').reward == -1e17


# Countdown with a search


def solved_by_brute_force(numbers, target):
    "Expressions of all three numbers that give the target, in any order and with any brackets"
    found = []
    for a, b, c in itertools.permutations(numbers):
        for x, y in itertools.product('+-*', repeat=2):
            found += [f'({a}{x}{b}){y}{c}', f'{a}{x}({b}{y}{c})']
    return [e for e in found if eval(e) == target]


@pytest.mark.parametrize('level', [0, 2])
def test_a_search_tells_the_truth_and_ends_at_the_first_way(level):
    rng, size, made = random.Random(level), num_problems('countdown_search', level), []
    while len(made) < 150:
        made += [p] if (p := problem('countdown_search', level, rng.randrange(size))) else []
    for p in made:
        numbers, target = [*map(int, p.text.split(' to ')[0].split())], int(p.text[:-1].split()[-1])
        assert max(numbers) <= 10 * (level + 1) and solved_by_brute_force(numbers, target)
        search, _, expr = p.solution.partition('!#')
        values = []
        for line in search.split(';'):
            pair, inner, rest, said = (
                ast.literal_eval(repr(line)).replace('=', ',').replace(':', ',').split(',')
            )
            inner, rest, said = int(inner), int(rest), said.split()
            assert eval(pair) == inner and sorted(
                [
                    *map(int, pair.replace('+', ' ').replace('-', ' ').replace('*', ' ').split()),
                    rest,
                ]
            ) == sorted(numbers)
            true = [inner + rest, abs(inner - rest), inner * rest][: len(said)]
            assert said == [str(v) if v < 100 else '.' for v in true]
            values += true
        assert values[-1] == target == eval(expr) and target not in values[:-1]


def test_a_guess_is_a_well_formed_answer_that_is_seldom_right():
    rng, size, right, num = random.Random(3), num_problems('countdown_search', 2), 0, 0
    while num < 400:
        if p := problem('countdown_search', 2, rng.randrange(size)):
            v = verify(prompt(p.answer, p.verifier), p.guess)
            assert v.correct or '=' in v.evidence, 'its numbers are the given ones'
            right, num = right + v.correct, num + 1
    assert 0.02 < right / num < 0.2
