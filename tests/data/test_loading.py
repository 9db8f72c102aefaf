"Which rows repeat another one, against a comparison of all pairs"

import gzip
import json
import os
import random
import re

import pytest

from compassrl.data.loading import repeats, shingles
from compassrl.data.sources import rows_of

WORDS = [f'w{i}' for i in range(40)]


def changed(rng, text, times):
    words = text.split()
    for _ in range(times):
        words[rng.randrange(len(words))] = rng.choice(WORDS)
    return ' '.join(words)


def rows(seed, num=120):
    "Long texts and light changes of them, under a few prompts"
    rng, out = random.Random(seed), []
    prompts = [' '.join(rng.choices(WORDS, k=30)) for _ in range(4)]
    for i in range(num):
        if i < 20:
            out.append((rng.choice(prompts), ' '.join(rng.choices(WORDS, k=rng.randrange(3, 90)))))
        else:
            prompt, text = rng.choice(out[:20])
            prompt = changed(rng, prompt, rng.choice([0, 0, 1, 9]))
            out.append((prompt, changed(rng, text, rng.choice([0, 1, 2, 30]))))
    return out


def grams(text):
    words = re.findall(r'\S+', text)
    return {tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4))}


def by_all_pairs(rows, threshold):
    kept, out = [], []
    for i, row in enumerate(rows):
        same = [j for j in kept if rows[j] == row]
        asked = [(j, grams(row[1]), grams(rows[j][1])) for j in kept if rows[j][0] == row[0]]
        alike = [j for j, a, b in asked if len(a & b) / len(a | b) >= threshold]
        out.append((same[0], True) if same else (alike[0], False) if alike else None)
        if out[-1] is None:
            kept.append(i)
    return out


@pytest.mark.parametrize('threshold', [0.7, 0.8, 0.9, 1.0])
def test_the_same_as_by_comparing_all_pairs(threshold):
    kinds = set()
    for seed in range(6):
        some = rows(seed)
        found = repeats(some, threshold)
        assert found == by_all_pairs(some, threshold), seed
        kinds |= {r and r[1] for r in found}
    assert kinds >= {None, True} and (threshold == 1 or False in kinds)


def test_both_prompt_and_response_have_to_repeat():
    long, other = (' '.join(f'{w}{i}' for i in range(50)) for w in 'ab')
    assert repeats([(long, 'yes'), (other, 'yes'), (long, 'no')]) == [None] * 3
    assert repeats([(long, other), (long, other + ' y')]) == [None, (0, False)]
    assert repeats([(long, ' a  b'), (long, 'a b\n')]) == [None, (0, True)]


def test_shingles():
    assert shingles('a b c', 2) == {'a b', 'b c'} and shingles('a', 2) == {'a'}


# sources

ROWS = [dict(problem=f'{i}+{i}=', answer=str(2 * i)) for i in range(6)]


def lines(rows):
    return '\n'.join(map(json.dumps, rows)).encode()


def found(source):
    return [row for _, row in rows_of(str(source))]


def test_shards_follow_each_other(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    (tmp_path / 'data').mkdir()
    (tmp_path / 'README.md').write_text('a card')
    (tmp_path / '.cache').mkdir()
    (tmp_path / '.cache' / 'x.json').write_text('[]')
    for i in (1, 0, 2):
        name = f'data/train-0000{i}-of-00003.parquet'
        parquet.write_table(pa.Table.from_pylist(ROWS[2 * i : 2 * i + 2]), tmp_path / name)
    assert found(tmp_path) == ROWS
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / 'data' / 'test-0.parquet')
    with pytest.raises(ValueError, match='several splits or kinds.*test-0.parquet.*name the files'):
        found(tmp_path)


def test_packed_files_tables_and_several_of_them(tmp_path):
    (tmp_path / 'a.jsonl.gz').write_bytes(gzip.compress(lines(ROWS[:2])))
    (tmp_path / 'b.json.gz').write_bytes(gzip.compress(json.dumps(ROWS[2:3]).encode()))
    (tmp_path / 'c.tsv').write_text('problem\tanswer\n3+3=\t6\n')
    table = '\ufeffproblem,answer\n4+4=,8\n5+5=,10\n'
    (tmp_path / 'd,e.csv.gz').write_bytes(gzip.compress(table.encode()))
    names = ['a.jsonl.gz', 'b.json.gz', 'c.tsv']
    assert found(', '.join(str(tmp_path / n) for n in names)) == ROWS[:4]
    assert found(tmp_path / 'd,e.csv.gz') == ROWS[4:]
    (tmp_path / 'torn.jsonl.gz').write_bytes(gzip.compress(lines(ROWS * 99))[:-40])
    (tmp_path / 'none.jsonl.gz').write_bytes(lines(ROWS))
    for name in ('torn', 'none'):
        with pytest.raises(ValueError, match=f'{name}.jsonl.gz cannot be read'):
            found(tmp_path / f'{name}.jsonl.gz')


def test_a_pipe_is_no_source(tmp_path):
    for kind in ('jsonl', 'json', 'csv', 'parquet'):
        os.mkfifo(tmp_path / f'x.{kind}')
        with pytest.raises(ValueError, match='no regular file'):
            found(tmp_path / f'x.{kind}')


def test_a_row_with_a_key_twice_is_bad(tmp_path):
    (tmp_path / 'x.jsonl').write_text('{"prompt": "1", "prompt": "2"}')
    assert found(tmp_path / 'x.jsonl') == ["invalid JSON (the key 'prompt' comes twice)"]
    (tmp_path / 'x.json').write_text('[{"prompt": "1", "prompt": "2"}]')
    with pytest.raises(ValueError, match="the key 'prompt' comes twice"):
        found(tmp_path / 'x.json')
