"Tasksets of `verifiers` 0.4: their rows, and rewards as the library itself counts them"

import asyncio
import json
import sys

import pytest

from compassrl.judges.own_reward import RewardFunction
from compassrl.own_code import own_module
from compassrl.runs.taskset import _trace, from_taskset
from tests.runs.test_own_data_and_reward import problem, save_model


def test_without_the_library_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, 'verifiers', None)
    with pytest.raises(ValueError, match=r'`verifiers` 0\.4: pip install compassrl\[envs\]'):
        from_taskset('sums')


@pytest.fixture(scope='module')
def vf():
    pytest.importorskip('verifiers', reason='pip install compassrl[envs]')
    import verifiers.v1

    return verifiers.v1


def made(vf, *extra, data=(), cls=(), **config):
    "A taskset of three sums, with what a test adds to its task"

    class Sum(vf.TaskData):
        answer: str

    class Add(vf.Task[Sum]):
        @vf.reward(weight=2.0)
        async def right(self, trace) -> float:
            return float(trace.last_reply == self.data.answer)

        @vf.reward(weight=-0.5)
        async def long(self, task, trace) -> float:
            await asyncio.sleep(0)
            return len(trace.assistant_messages[-1].content) / 10 + (task.answer == '0')

        @vf.metric
        async def turns(self, trace) -> float:
            return trace.num_turns

    add = type('Add', (*extra, Add), dict(cls))

    class Sums(vf.Taskset[Add, vf.TasksetConfig]):
        def load(self):
            for i in range(3):
                given = dict(prompt=f'{i}+{i}=', system_prompt='Add.', answer=str(2 * i))
                yield add(Sum(**given | dict(data)), self.config.task)

    return Sums(vf.TasksetConfig(task=vf.TaskConfig(**config)))


def library_trace(vf, task, reply):
    "A chat as the library records and scores it"
    from verifiers.v1.graph import prepare_turn

    named = dict(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    trace = vf.Trace(task=vf.TraceTask(**named), agent=vf.AgentInfo(config=vf.AgentConfig()))
    asked = [
        vf.SystemMessage(content=task.data.system_prompt),
        vf.UserMessage(content=task.data.prompt),
    ]
    said = dict(id='0', created=0, model='m', finish_reason='stop')
    prepare_turn(trace, asked).commit(vf.Response(message=reply, **said))
    asyncio.run(task.score(trace))
    return trace


class Letters:
    "A tokenizer of the library's parser: one token for each character"

    def decode(self, ids, skip_special_tokens=False):
        return ''.join(map(chr, ids))

    def encode(self, text, add_special_tokens=False):
        return [ord(c) for c in text]


@pytest.mark.parametrize(
    'text',
    ['2', ' 2 \n', '<think>1+1</think>2', '\n<think>1\n</think>\n\n2', '<think>2', '2<think>']
    + ['1+1</think>\n\n2', '<think>a</think>b</think>2', '<think></think>2', ''],
)
def test_a_reward_is_the_librarys(vf, text):
    from renderers.parsing import parse_qwen3

    prefilled = '</think>' in text and '<think>' not in text  # the chat template opened it
    options = dict(stop_ids=set(), tool_call_id=-1, tool_call_end_id=-2)
    parsed = parse_qwen3(Letters(), [*map(ord, text)], prefilled_thinking=prefilled, **options)
    reply = vf.AssistantMessage(content=parsed.content, reasoning_content=parsed.reasoning_content)
    taskset = made(vf)
    rows, reward = from_taskset(taskset)
    assert [r['prompt'][1]['content'] for r in rows] == ['0+0=', '1+1=', '2+2=']
    assert rows[1]['prompt'][0] == dict(role='system', content='Add.')
    for task, row in zip(taskset, json.loads(json.dumps(rows))):
        want = library_trace(vf, task, reply)
        made_here = _trace(vf, task, text)
        assert made_here.messages == want.messages and made_here.num_turns == want.num_turns == 1
        [got] = RewardFunction('reward', reward, 1.0).verdicts([dict(text=text, task=row['task'])])
        assert got.reward == want.reward and got.correct == (want.reward >= 1)
        assert got.parts == {k: r.score for k, r in want.rewards.items()} and len(got.parts) == 2
    assert got.evidence.count(' x ') == 2


def test_the_weights_of_the_config_count(vf):
    _, reward = from_taskset(made(vf, rewards=dict(long=dict(weight=0))), correct_at=2.0)
    rows, plain = from_taskset(made(vf))
    verdicts = [asyncio.run(f('2', rows[1]['task'])) for f in (reward, plain)]
    assert [v.reward for v in verdicts] == [2.0, pytest.approx(1.95)]
    assert verdicts[0].correct and verdicts[0].status == 'ok'


def test_what_a_method_raises_is_the_evidence(vf):
    async def right(self, trace) -> float:
        raise ConnectionError('the judge does not answer')

    rows, reward = from_taskset(made(vf, cls=dict(right=vf.reward(right))))
    function = RewardFunction('reward', reward, 1.0)
    asked = [dict(text='2', task=rows[1]['task']), dict(text='2', task='another')]
    failed, unknown = function.verdicts(asked)
    assert failed.status == unknown.status == 'failed'
    assert 'ConnectionError: the judge does not answer' in failed.evidence
    assert "no task has the hash 'another'" in unknown.evidence


async def act(self, trace, runtime) -> float:
    return 1.0


def tools_of(vf):
    class Search(vf.Toolset[vf.ToolsetConfig]):
        @vf.tool
        async def find(self, word: str) -> str:
            "Finds a word"
            return word

    return classmethod(lambda cls, config: [Search(vf.ToolsetConfig())])


def stop_of(vf):
    async def seen(self, request: vf.Request) -> bool:
        return False

    return vf.stop(seen)


def boxed_reward(vf):
    async def passed(self, trace, runtime) -> float:
        return 1.0

    return vf.reward(passed)


REFUSED = {  # words of the refusal, what a task has
    'it has tools': lambda vf: dict(cls=dict(toolsets=tools_of(vf))),
    'setup of Add may use a runtime': lambda vf: dict(cls=dict(setup=act)),
    'finalize of Add may use a runtime': lambda vf: dict(cls=dict(finalize=act)),
    'passed of Add may use a runtime': lambda vf: dict(cls=dict(passed=boxed_reward(vf))),
    'seen of Add act between turns': lambda vf: dict(cls=dict(seen=stop_of(vf))),
    'its config names judges': lambda vf: dict(judges=[dict(id='reference')]),
    'it needs a container or files': lambda vf: dict(data=dict(image='python:3.11')),
    'it has no prompt': lambda vf: dict(data=dict(prompt=None)),
    'its prompt holds more than text': lambda vf: dict(
        data=dict(prompt=[vf.ToolMessage(tool_call_id='0', content='4')])
    ),
    'it has no reward': lambda vf: dict(cls=dict(right=None, long=None)),
}


@pytest.mark.parametrize('why', REFUSED)
def test_what_needs_more_than_one_response_is_refused(vf, why):
    with pytest.raises(ValueError, match=f'^task 0 of Add: {why}'):
        from_taskset(made(vf, **REFUSED[why](vf)))


def test_a_taskset_without_end_must_be_cut(vf):
    taskset = made(vf)
    type(taskset).INFINITE = True
    with pytest.raises(ValueError, match=r'has no end: give taskset.take\(1000\)'):
        from_taskset(taskset)
    assert len(from_taskset(taskset.take(2))[0]) == 2
    with pytest.raises(ValueError, match='taskset is a list'):
        from_taskset([taskset])


SOURCE = """
import verifiers.v1 as vf
from compassrl.runs.taskset import from_taskset

class Digits(vf.Task[vf.TaskData]):
    @vf.reward
    async def digits(self, trace) -> float:
        return sum(c.isdigit() for c in trace.last_reply) / 10

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return 1 / (1 + len(trace.last_reply))

class Sums(vf.Taskset[Digits, vf.TasksetConfig]):
    def load(self):
        for i in range(40):
            yield Digits(vf.TaskData(prompt=f'{i}+{i}=', system_prompt='Add.'))

rows, reward = from_taskset(Sums(vf.TasksetConfig()))
"""


def test_an_installed_taskset_is_taken_by_its_id(vf, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / 'plain_sums.py').write_text(SOURCE + "__all__ = ['Sums']")
    duel = "class Duel(vf.SingleAgentEnv): ...\n__all__ = ['Sums', 'Duel']"
    (tmp_path / 'duel_sums.py').write_text(SOURCE + duel)
    assert len(from_taskset('owner/plain-sums')[0]) == 40
    with pytest.raises(ValueError, match="'duel-sums' has an environment or a harness of its own"):
        from_taskset('duel-sums')
    with pytest.raises(ValueError, match="'no-sums' cannot be loaded: taskset 'no-sums' not found"):
        from_taskset('no-sums')


def test_a_taskset_trains_a_model(vf, tmp_path, monkeypatch):
    from compassrl import train_policy

    monkeypatch.chdir(tmp_path)
    (tmp_path / 'sums.py').write_text(SOURCE)
    save_model(tmp_path / 'model', [problem(i)[0] for i in range(40)])
    rows = own_module('sums.py:reward', 'rewards.function', SOURCE.encode()).rows
    out = train_policy(
        'model',
        rows,
        'sums.py:reward',
        preset='smoke-cpu',
        steps=2,
        prompts_per_step=4,
        rollout=dict(max_tokens=6),
        trace_every=1,
        run_dir='run',
    )
    steps = [json.loads(line) for line in (out.folder / 'metrics.jsonl').read_text().splitlines()]
    assert len(steps) == 2 and all(s['failed_frac'] == 0 for s in steps)
    assert 0 < steps[0]['reward_mean'] <= 1.5
    assert [p.name for p in (out.folder / 'rewards').iterdir()] == ['sums.py']
