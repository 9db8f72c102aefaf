"""Prompts are asked as vLLM asks them, for ten public shapes of templates

The oracle is the path of its server from a request to token ids, without an engine."""

import asyncio
from copy import deepcopy
from types import SimpleNamespace

import pytest

from compassrl.data.rows import BadRow, row_prompt
from compassrl.data.tokenizer import load_tokenizer, prompt_ids
from compassrl.model.hf_config import write_config
from compassrl.model.policy import PolicyConfig
from compassrl.rollout.vllm.in_process import set_environment
from tests.data.test_chat import reading, saved
from tests.support.templates import SHAPES

set_environment()
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.offline_utils import OfflineInferenceMixin
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer

FUNCTION = dict(
    name='add', description='Sum', parameters=dict(type='object', properties=dict(a=dict()))
)
ADD = dict(type='function', function=FUNCTION)
BARE = dict(type='function', function=dict(name='add', parameters=dict(type='object')))
USER = dict(role='user', content=' 2+2= ')
BRIEF = dict(role='system', content='Be brief. ')
SAID = dict(role='assistant', content='<think>\nTwo.\n</think>\n\nIt is 4.')
CALL = dict(
    role='assistant',
    content=None,
    tool_calls=[
        dict(id='abcdefghi', type='function', function=dict(name='add', arguments='{"a": "é"}'))
    ],
)
RESULT = dict(role='tool', tool_call_id='abcdefghi', content='4')
PARTS = [dict(type='text', text=t) for t in ('2+ ', ' 2=')]
GOES_ON = dict(continue_final_message=True, add_generation_prompt=False)
ROWS = dict(  # name -> which shapes have it ('' = all), columns
    turn=('', dict(prompt=[USER])),
    system=('', dict(prompt=[BRIEF, USER])),
    developer=('', dict(prompt=[BRIEF | dict(role='developer'), USER])),
    history=('', dict(prompt=[BRIEF, USER, SAID, USER])),
    two_developers=(
        '',
        dict(prompt=[BRIEF, USER, SAID, dict(role='developer', content='Be long.'), USER]),
    ),
    parts=('', dict(prompt=[dict(role='user', content=PARTS), SAID, USER])),
    a_part=('', dict(prompt=[dict(role='system', content=PARTS[:1]), USER])),
    continued=(
        '',
        dict(prompt=[USER, SAID | dict(content='It is ')], chat_template_kwargs=GOES_ON),
    ),
    continued_thought=(
        '',
        dict(prompt=[USER, SAID | dict(content='<think>\nTwo')], chat_template_kwargs=GOES_ON),
    ),
    no_generation_prompt=(
        '',
        dict(prompt=[USER], chat_template_kwargs=dict(add_generation_prompt=False)),
    ),
    thinking=('thinking', dict(prompt=[USER], chat_template_kwargs=dict(enable_thinking=True))),
    no_thinking=('thinking', dict(prompt=[USER], chat_template_kwargs=dict(enable_thinking=False))),
    thought=(
        'thinking',
        dict(prompt=[USER, dict(role='assistant', content='4', reasoning_content='Two.'), USER]),
    ),
    tools=('tools', dict(prompt=[BRIEF, USER], tools=[ADD, ADD])),
    bare_tools=('tools', dict(prompt=[USER], tools=[BARE])),
    call=('calls one_call', dict(prompt=[USER, CALL, RESULT, SAID, USER])),
    call_and_text=('calls', dict(prompt=[USER, CALL | dict(content='So'), RESULT, RESULT])),
    only_a_call=(
        'calls',
        dict(prompt=[USER, {k: CALL[k] for k in ('role', 'tool_calls')}, RESULT]),
    ),
)


def cases():
    for shape, (_, kinds) in SHAPES.items():
        for row, (needs, _) in ROWS.items():
            if not needs or {*needs.split()} & {*kinds.split()}:
                yield shape, row


LOST = 'parts_alone', 'two_developers'  # vLLM writes no text there
CASES = [case for case in cases() if case != LOST]


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    "A checkpoint for each shape, its tokenizer as transformers reads it, and vLLM's own reader"
    out = {}
    for shape, (template, _) in SHAPES.items():
        folder = tmp_path_factory.mktemp(shape)
        begins = shape in ('dated', 'plain')  # its tokenizer adds <s> to what is no chat
        hf = saved(folder, begins, template)
        write_config(PolicyConfig(512, head_dim=32, max_position_embeddings=2048), folder)
        config = EngineArgs(model=str(folder), max_model_len=2048).create_engine_config()
        server = OnlineRenderer(
            config.model_config,
            renderer_from_config(config),
            request_logger=None,
            chat_template=None,
            chat_template_content_format='auto',
        )
        out[shape] = folder, hf, server
    return out


def asked(row):
    "Messages, tools, options of the request, options of the template"
    options = dict(row.get('chat_template_kwargs', {}))
    own = {k: options.pop(k) for k in GOES_ON if k in options}
    return deepcopy(row['prompt']), row.get('tools'), own, options or None


def by_server(server, row):
    messages, tools, own, options = asked(row)
    more = dict(tools=tools, tool_choice='none') if tools else {}
    request = ChatCompletionRequest(
        model='m', messages=messages, chat_template_kwargs=options, **own, **more
    )
    _, [found] = asyncio.run(server.render_chat(request))
    return found['prompt_token_ids']


def by_engine(server, row):
    "As `LLM.chat` does"
    messages, tools, own, options = asked(row)
    engine = SimpleNamespace(renderer=server.renderer, model_config=server.model_config)
    [found] = OfflineInferenceMixin._preprocess_chat(
        engine, [messages], tools=tools, chat_template_kwargs=options, **own
    )
    return found['prompt_token_ids']


@pytest.mark.parametrize('shape, row', CASES)
def test_a_chat_has_the_ids_that_vllm_gives_it(folders, shape, row):
    folder, hf, server = folders[shape]
    columns = ROWS[row][1]
    found = row_prompt(reading(folder), columns | dict(answer='4')).token_ids
    # vLLM's server writes `"description": null` into such tools, its engine does not
    want = (by_engine if row == 'bare_tools' else by_server)(server, columns)
    assert found == want, (hf.decode(found), hf.decode(want))
    assert found.count(hf.bos_token_id) == (shape in BEGIN)


BEGIN = (
    *('dated', 'system_last', 'text_or_parts', 'thinks_first', 'arguments_in_turn'),
    'marks_what_trains',
)


@pytest.mark.parametrize('shape', ['dated', 'system_last'])
@pytest.mark.parametrize('text', ['2+2=', 'Ünï\n  x', '<|user|>2', ' ', 'a</s>b', '<s>2'])
def test_text_has_the_ids_that_vllm_gives_it(folders, shape, text):
    folder, hf, server = folders[shape]
    request = CompletionRequest(model='m', prompt=text)
    [found] = asyncio.run(server.preprocess_completion(request, text, None))
    want = found['prompt_token_ids']
    if want[:2] == [hf.bos_token_id] * 2:
        want = want[1:]  # vLLM begins a text twice that begins itself
    assert prompt_ids(load_tokenizer(folder), text) == want


def test_what_vllm_leaves_out_is_kept_or_refused(folders):
    "A tool, the second part of a system message, and what two developers say"
    folder, hf, server = folders['plain']
    row = dict(prompt=[USER], tools=[ADD], answer='4')
    assert 'add' not in hf.decode(by_server(server, row)).replace(' ', '')
    with pytest.raises(BadRow, match='does not read'):
        row_prompt(reading(folder), row)
    folder, hf, server = folders['text_or_parts']
    told = [dict(type='text', text=t) for t in ('Be brief.', 'Be kind.')]
    row = dict(prompt=[dict(role='system', content=told), USER], answer='4')
    assert 'kind' not in hf.decode(by_server(server, row)).replace(' ', '')
    assert 'Be brief.\nBe kind.' in row_prompt(reading(folder), row).text
    folder, hf, server = folders[LOST[0]]
    row = ROWS[LOST[1]][1]
    assert 'brief' not in hf.decode(by_server(server, row)).replace(' ', '')
    text = row_prompt(reading(folder), row | dict(answer='4')).text
    assert text.startswith('System: Be brief. \n\nBe long.</s>')
