"What a teacher said becomes data: only what is right, each once, with where it came from"

import asyncio
import hashlib
import json
import re
import threading
from collections import Counter
from contextlib import contextmanager

import pytest
from aiohttp import web

from compassrl.config import TrainConfig
from compassrl.data.prompts import DataConfig
from compassrl.data.tokenizer import build_tokenizer, save_tokenizer
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import save_pretrained
from compassrl.runs import distill
from compassrl.runs.cli import main
from compassrl.runs.run_data import load
from compassrl.runs.teachers import EngineTeacher, weights_name
from compassrl.train.sft import SFTConfig, cold_start

PROMPTS = [
    dict(prompt=f'{a}+1=', answer=str(a + 1), verifier='final', note='theirs') for a in range(10)
]
RIGHT, AGAIN, WRONG, LONG, THOUGHT = range(5)  # what the server says, by the number of the answer


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def answer(question, n):
    "Of the n-th request with these words"
    right = f'#{int(question.split("+")[0]) + 1}'
    message = [
        dict(content=f'easy {right}'),
        dict(content=f'easy  {right}'),
        dict(content='#999'),
        dict(content=right),
        dict(content=right, reasoning_content='hm'),
    ][n]
    choice = dict(index=0, message=dict(role='assistant') | message)
    choice['finish_reason'] = 'length' if n == LONG else 'stop'
    return dict(id='x', object='chat.completion', created=0, model='m', choices=[choice]) | dict(
        usage=dict(prompt_tokens=1, completion_tokens=7 + n, total_tokens=8 + n)
    )


@contextmanager
def serving(fails=lambda n: False):
    "Its address, and the requests that it got"
    loop, there, got, runs = asyncio.new_event_loop(), threading.Event(), [], []

    async def chat(request):
        body = await request.json()
        got.append(body)
        if fails(len(got)):
            return web.json_response(dict(error='down'), status=403)
        question = body['messages'][0]['content']
        told[question] += 1
        return web.json_response(answer(question, told[question] - 1))

    async def models(request):
        data = [dict(id='big', object='model', created=0, owned_by='me')]
        return web.json_response(dict(object='list', data=data))

    async def start():
        app = web.Application()
        app.router.add_post('/v1/chat/completions', chat)
        app.router.add_get('/v1/models', models)
        runs.append(web.AppRunner(app, access_log=None))
        await runs[0].setup()
        site = web.TCPSite(runs[0], '127.0.0.1', 0)
        await site.start()
        got.append(site._server.sockets[0].getsockname()[1])
        there.set()

    told = Counter()
    thread = threading.Thread(
        target=lambda: (loop.run_until_complete(start()), loop.run_forever()), daemon=True
    )
    thread.start()
    assert there.wait(30)
    try:
        yield f'http://127.0.0.1:{got.pop()}/v1', got
    finally:
        asyncio.run_coroutine_threadsafe(runs[0].cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)


@pytest.fixture
def home(tmp_path):
    (tmp_path / 'p.jsonl').write_text('\n'.join(map(json.dumps, PROMPTS)))
    return tmp_path


def words(home, *more):
    common = f'--out {home}/out.jsonl --data.path {home}/p.jsonl --data.num-heldout 2'.split()
    return ['distill', *more, *common]


def asked(home):
    "The training prompts, as somebody else reads them"
    split = DataConfig(path=str(home / 'p.jsonl'), num_heldout=2)
    return load(TrainConfig(data=split, prompts_per_step=2, cold_start=SFTConfig(steps=0))).train


def test_a_server_teaches_what_it_got_right(home, capsys):
    more = '--model big --k 5 --concurrency 1 --rollout.max-tokens 30 --rollout.temperature 0.7'
    with serving() as (url, got):
        main(words(home, url, *more.split()))
    line = 'asked 40, right 32, too long 8, too short 0, duplicates 8 and nearly 0, kept 16 for 8 '
    assert line + 'of 8 prompts, 2.0 each' in capsys.readouterr().out
    prompts = {p.text: p for p in asked(home)}
    assert {b['messages'][0]['content'] for b in got} == {*prompts}, 'held-out prompts stay apart'
    assert {(b['temperature'], b['max_tokens']) for b in got} == {(0.7, 30)}
    assert len({b['seed'] for b in got}) == 40, 'each response has a seed of its own'
    found = rows(home / 'out.jsonl')
    for row in found:
        right = prompts[row['prompt']].answer
        assert row['answer'] == right and row['verifier'] == 'final'
        assert row['solution'] in (f'easy #{right}', f'<think>\nhm\n</think>\n\n#{right}')
        lineage = row['lineage']
        assert lineage['teacher'] == dict(model='big', url=url)
        assert lineage['tokens'] in (7, 11) and lineage['verdict']['correct']
        assert lineage['sampling']['temperature'] == 0.7 and lineage['seed'] == 0
    assert len(rows(home / 'out.samples.jsonl')) == 40, 'what was wrong is on file, too'


def test_other_lengths_choose_again_and_ask_nobody(home, capsys):
    with serving() as (url, got):
        main(words(home, url, '--model', 'big', '--k', '5', '--concurrency', '1'))
        (home / 'out.jsonl').unlink()
        more = '--model big --k 5 --min-tokens 8 --max-tokens 10'.split()
        main(words(home, url, *more))
        assert len(got) == 40
    assert 'too long 16, too short 8, duplicates 0' in capsys.readouterr().out
    assert {r['lineage']['tokens'] for r in rows(home / 'out.jsonl')} == {8}


def test_a_killed_one_goes_on_with_what_was_not_answered(home, capsys):
    "The server breaks off after 13 answers; a line is torn as well"
    more = '--model', 'big', '--k', '2', '--concurrency', '2'
    with serving(fails=lambda n: 13 < n <= 30) as (url, got):
        with pytest.raises(SystemExit, match='3 requests got no answer .*the same command goes on'):
            main(words(home, url, *more))
        kept = home / 'out.samples.jsonl'
        assert len(rows(kept)) == 13 and not (home / 'out.jsonl').exists()
        kept.write_bytes(kept.read_bytes()[:-9])
        got.extend([{}] * 30)
        before = len(got)
        main(words(home, url, *more))
        assert len(got) - before == 16 - 12
    found = rows(kept)
    assert len(found) == 16 == len({(r['prompt_id'], r['index']) for r in found})
    with serving() as (url, _), pytest.raises(SystemExit, match='out.jsonl exists'):
        main(words(home, url, *more))
    (home / 'out.jsonl').unlink()
    with serving() as (url, _), pytest.raises(SystemExit, match='seed=3, but .* was drawn with 0'):
        (home / 'out.settings.json').write_text(
            re.sub(r'http://[^"]*', url, (home / 'out.settings.json').read_text())
        )
        main(words(home, url, *more, '--seed', '3'))


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    "A tiny policy that has learned nothing, and says a digit by accident"
    folder = tmp_path_factory.mktemp('teacher')
    save_pretrained(Policy(PolicyConfig(max_position_embeddings=64)), folder)
    save_tokenizer(build_tokenizer(), folder)
    return folder


REWARD = 'def digit(text):\n    return float(any(c.isdigit() for c in text))\n'


def test_a_checkpoint_and_what_interrupts_it(home, model, monkeypatch):
    "The same samples whether or not it was killed, and the weights by their SHA-256"
    (home / 'reward.py').write_text(REWARD)
    more = f'--k 4 --rollout.max-tokens 50 --rollout.num-slots 4 --rewards.function {home}/'
    more += 'reward.py:digit'
    main(words(home, str(model), *more.split()))
    found = rows(home / 'out.jsonl')
    file = hashlib.sha256((model / 'model.safetensors').read_bytes())
    assert weights_name(model) == dict(sha256=hashlib.sha256(file.digest()).hexdigest())
    for row in found:
        assert any(c.isdigit() for c in row['solution']) and row['note'] == 'theirs'
        assert row['lineage']['teacher']['sha256'] == weights_name(model)['sha256']
        assert row['lineage']['tokens'] <= 50 and row['lineage']['verdict']['correct']
    once = (home / 'out.samples.jsonl').read_text()
    for path in home.glob('out.*'):
        path.unlink()
    draw = EngineTeacher.draw

    def dies(self, requests, prompts):
        yield from draw(self, requests, prompts)
        monkeypatch.setattr(EngineTeacher, 'draw', killed)

    def killed(self, requests, prompts):
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineTeacher, 'draw', dies)
    with pytest.raises(SystemExit):
        main(words(home, str(model), *more.split()))
    assert 0 < len(rows(home / 'out.samples.jsonl')) < 32
    monkeypatch.setattr(EngineTeacher, 'draw', draw)
    main(words(home, str(model), *more.split()))

    def timeless(text):
        said = [dict(json.loads(line), when='') for line in text.splitlines()]
        return sorted(said, key=lambda r: (r['prompt_id'], r['index']))

    assert timeless((home / 'out.samples.jsonl').read_text()) == timeless(once)


def test_several_solutions_are_one_prompt_and_all_are_shown(home):
    tok = build_tokenizer()
    data = [
        dict(prompt='1+1=', answer='2', solution='a #2', lineage=dict(index=0)),
        dict(prompt='1+1=', answer='2', solution='b #2', lineage=dict(index=1)),
        dict(prompt='1+1=', answer='3', solution='c #3'),  # another question
        dict(prompt='2+1=', answer='3', solution='d #3'),
        dict(prompt='1+1=', answer='2', solution='e #2', lineage=dict(index=2)),
        *(dict(prompt=f'{i}+5=', answer=str(i + 5), solution='f') for i in range(4)),
    ]
    (home / 'd.jsonl').write_text('\n'.join(map(json.dumps, data)))
    (home / 'e.jsonl').write_text(json.dumps(dict(prompt='9+9=', answer='18')))
    split = DataConfig(path=str(home / 'd.jsonl'), eval_path=(f'e={home}/e.jsonl',))
    cfg = TrainConfig(data=split, prompts_per_step=2, cold_start=SFTConfig(steps=3, batch_size=9))
    train = load(cfg).train
    assert [(p.text, p.solution, p.more_solutions) for p in train[:3]] == [
        ('1+1=', 'a #2', ('b #2', 'e #2')),
        ('1+1=', 'c #3', ()),
        ('2+1=', 'd #3', ()),
    ]
    assert len(train) == 7 == len({p.id for p in train})

    class Recorder:
        seen = Counter()

        def update(self, batch, loss, lr=None):
            texts = (
                tok.decode(r[m].tolist()[:-1]) for r, m in zip(batch.token_ids, batch.response_mask)
            )
            self.seen.update(texts)
            return dict(loss=1.0), {}

    list(cold_start(Recorder(), train, cfg.cold_start, tok))
    want = Counter(r['solution'] for r in data)
    assert Recorder.seen == Counter({k: 3 * n for k, n in want.items()})


@pytest.mark.parametrize(
    'args, says',
    [
        ([], 'distill needs a teacher first'),
        (['nowhere', '--out', 'x.jsonl'], 'nowhere holds neither a run nor a model'),
        (['{model}', '--out', 'x.jsonl'], 'name the prompts: --data.path FILE'),
        (['{model}', '--data.domains', 'arithmetic'], "out='': name a .jsonl file by --out"),
        (['{model}', '--k', '0'], 'k=0'),
        (['{model}', '--min-tokens', '9', '--max-tokens', '3'], 'min_tokens=9 is more than'),
        (['{model}', '--alike', '0.2'], 'alike=0.2'),
        (['{model}', '--kk', '2'], 'did you mean --k'),
        (
            [
                'http://127.0.0.1:9/v1',
                '--model',
                'm',
                '--data.domains',
                'arithmetic',
                '--out',
                'x.jsonl',
            ],
            'base_url=http://127.0.0.1:9/v1',
        ),
        (['http://h/v1', '--data.domains', 'arithmetic', '--out', 'x.jsonl'], "model='': name"),
    ],
)
def test_refused_before_any_work(args, says, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as e:
        main(['distill', *(a.format(model=model) for a in args)])
    assert says in str(e.value) and '\n' not in str(e.value)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith('x')]


def test_a_damaged_sample_is_named(tmp_path):
    (tmp_path / 'o.samples.jsonl').write_text('{"prompt_id": 1}\n')
    with pytest.raises(ValueError, match='o.samples.jsonl line 1 is damaged'):
        distill.known_samples(tmp_path / 'o.jsonl')
