"Prompts are asked as transformers writes them: chats of every shape, and plain text"

import json
from dataclasses import replace
from functools import partial

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from compassrl.data import chat
from compassrl.data.chat import ChatTemplate
from compassrl.data.data_settings import DataConfig
from compassrl.data.loading import load_prompts
from compassrl.data.prompts import load_data
from compassrl.data.rows import BadRow, Reading, row_prompt
from compassrl.data.tokenizer import load_tokenizer, prompt_ids
from tests.support.other_kinds import KINDS, changed, places

MARKS = ['<s>', '</s>', '<unk>', '<|user|>', '<|bot|>']
TURNS = """{%- for m in messages %}<|user|>{{ m.role }}: {{ m.content if m.content is string
else m.content | map(attribute='text') | join }}{{ eos_token }}{% endfor %}"""
END = '{%- if add_generation_prompt %}<|bot|>{% endif %}'
CALLS = """{%- for m in messages %}<|user|>{{ m.role }}:{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]
{%- endfor %}{{ eos_token }}{% endfor %}"""
TOOLS = """{%- if tools is not none -%}You may call:{% for t in tools %}
{{ t | tojson(indent=2) }}{% endfor %}{{ eos_token }}{% endif %}"""
THINKS = (
    '{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}'
)
SYSTEM = """{%- if messages[0].role == 'system' %}{% set messages = messages[1:] %}
{%- else %}You are a model.{% endif %}"""
ADD = dict(
    type='function',
    function=dict(name='add', parameters=dict(type='object', properties=dict(a=dict(enum=[1, 2])))),
)
ASK = [dict(role='user', content='2+2=')]
BRIEF = dict(role='system', content='Be brief.')
CALL = dict(
    role='assistant', tool_calls=[dict(function=dict(name='add', arguments=dict(a=1, b='é')))]
)
BOT = dict(role='assistant', content='It is')
PARTS = [dict(role='user', content=[dict(type='text', text=t) for t in ('2+', '2= ')])]
GOES_ON = dict(continue_final_message=True, add_generation_prompt=False)
SHAPES = dict(  # template, columns of the row
    turns=(TURNS + END, dict(prompt=[*ASK, BOT, *ASK])),
    thinking_on=(
        TURNS + END + THINKS,
        dict(prompt=ASK, chat_template_kwargs=dict(enable_thinking=True)),
    ),
    thinking_off=(
        TURNS + END + THINKS,
        dict(prompt=ASK, chat_template_kwargs='{"enable_thinking": false}'),
    ),
    tools=(TOOLS + TURNS + END, dict(prompt=ASK, tools=[ADD])),
    tools_as_text=(TOOLS + TURNS + END, dict(prompt=ASK, tools=json.dumps([ADD]))),
    no_tools=(TOOLS + TURNS + END, dict(prompt=ASK, tools=[])),
    calls_in_history=(CALLS + END, dict(prompt=[*ASK, CALL, dict(role='tool', content='4')])),
    system=(SYSTEM + TURNS + END, dict(prompt=[BRIEF, *ASK])),
    system_column=(SYSTEM + TURNS + END, dict(prompt=ASK, system='Be brief.')),
    parts=(TURNS + END, dict(prompt=PARTS)),
    continued=(TURNS + END, dict(prompt=[*ASK, BOT], chat_template_kwargs=GOES_ON)),
    trimmed=(
        TURNS.replace('m.content if', 'm.content | trim if') + END,
        dict(prompt=[*ASK, BOT | dict(content='It ')], chat_template_kwargs=GOES_ON),
    ),
    date=("Today is {{ strftime_now('%Y') | length }}. " + TURNS + END, dict(prompt=ASK)),
    no_generation_prompt=(
        TURNS + END,
        dict(prompt=ASK, chat_template_kwargs=dict(add_generation_prompt=False)),
    ),
)


def spelled(bos):
    "A token per byte and the marks of a chat; does a text begin with <s>?"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.add_special_tokens(MARKS)
    if bos:
        known = [('<s>', tok.token_to_id('<s>'))]
        tok.post_processor = processors.TemplateProcessing('<s> $A', special_tokens=known)
    return tok


def saved(folder, bos, template=None, **config):
    "A folder with such a tokenizer, as transformers writes it"
    names = dict(bos_token='<s>', eos_token='</s>', unk_token='<unk>')
    hf = PreTrainedTokenizerFast(tokenizer_object=spelled(bos), chat_template=template, **names)
    hf.save_pretrained(folder)
    if config:
        path = folder / 'tokenizer_config.json'
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return AutoTokenizer.from_pretrained(folder)


def reading(folder, **more):
    return Reading(load_tokenizer(folder), chat=ChatTemplate.of(folder), **more)


@pytest.mark.parametrize('bos, post', [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize('shape', SHAPES)
def test_a_chat_has_the_ids_that_transformers_gives_it(tmp_path, shape, bos, post):
    "Who writes <s>: nobody, template and post-processor, or the latter alone, which no chat asks"
    template, row = SHAPES[shape]
    hf = saved(tmp_path, post, '{{ bos_token }}' * bos + template)
    p = row_prompt(reading(tmp_path), row | dict(answer='4'))
    system = [dict(role='system', content=row['system'])] if 'system' in row else []
    tools = json.loads(row['tools']) if isinstance(row.get('tools'), str) else row.get('tools')
    options = row.get('chat_template_kwargs', {})
    options = json.loads(options) if isinstance(options, str) else options
    how = dict(add_generation_prompt=True) | options
    want = hf.apply_chat_template(
        system + row['prompt'], tools=tools or None, return_dict=True, **how
    )
    assert p.token_ids == list(want['input_ids'])
    assert p.token_ids.count(hf.bos_token_id) == bos


@pytest.mark.parametrize('text', ['2+2=', 'Ünï\n  x', '<s>2+2=', '<|user|>2', '', '<s>'])
@pytest.mark.parametrize(
    'bos, config',
    [
        (False, {}),
        (True, {}),
        (True, dict(add_bos_token=False)),
        (False, dict(add_bos_token=True)),
        (False, dict(add_bos_token=True, add_eos_token=True)),
    ],
)
def test_text_has_the_ids_that_transformers_gives_it(tmp_path, bos, config, text):
    hf = saved(tmp_path, bos, **config)
    want = hf(text)['input_ids']
    if want[:2] == [hf.bos_token_id] * 2:
        want = want[1:]  # a text that begins with it needs no second one
    assert prompt_ids(load_tokenizer(tmp_path), text) == want
    if text:
        assert row_prompt(reading(tmp_path), dict(prompt=text, answer='4')).token_ids == want


@pytest.mark.parametrize('how', [dict(max_length=3), dict(length=64)])
def test_how_a_file_cuts_and_pads_is_not_what_is_asked(tmp_path, how):
    hf = saved(tmp_path, False)
    tok = Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))
    tok.enable_truncation(**how) if 'max_length' in how else tok.enable_padding(**how)
    tok.save(str(tmp_path / 'tokenizer.json'))
    p = row_prompt(reading(tmp_path), dict(prompt='12+30=', answer='42'))
    assert p.token_ids == hf('12+30=')['input_ids'] and len(p.token_ids) == 6


def test_named_templates_and_that_for_tools(tmp_path):
    named = [dict(name='default', template='plain'), dict(name='tool_use', template='{{ tools }}')]
    saved(tmp_path, False, chat_template=named)
    assert ChatTemplate.of(tmp_path).render(ASK) == 'plain'
    assert 'add' in ChatTemplate.of(tmp_path).render(ASK, [ADD])


def test_nulls_of_a_table_are_no_arguments(tmp_path):
    "Rows of two tools in Parquet: each gets the keys of the other"
    import pyarrow as pa
    import pyarrow.parquet as parquet

    saved(tmp_path, False, TOOLS + CALLS + END)
    calls = [('search', dict(query='x', limit=[1, None])), ('add', dict(a=3, b=2))]
    rows = [
        dict(
            prompt=[
                *ASK,
                dict(role='assistant', tool_calls=[dict(function=dict(name=n, arguments=a))]),
                *ASK,
            ],
            tools=[dict(name=n, parameters=a)],
            answer='4',
        )
        for n, a in calls
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / 'x.parquet')
    (tmp_path / 'x.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    one, two = (
        load_prompts(f'{tmp_path}/x.{k}', reading(tmp_path))[0] for k in ('jsonl', 'parquet')
    )
    assert [p.text for p in one] == [p.text for p in two]
    assert '"arguments"' not in one[1].text and '{"a": 3, "b": 2}' in one[1].text


CHAT = dict(prompt=ASK, answer='4')


@pytest.mark.parametrize(
    'more, words',
    [
        (dict(images=['a.png']), "column 'images': the policy reads text alone"),
        (dict(audio=b'x'), "column 'audio'"),
        (dict(prompt=[dict(role='user', content=[dict(type='image')])]), "part of type 'image'"),
        (dict(prompt=[dict(role='user', content=7)]), "content that is int '7'"),
        (dict(prompt=[dict(role='user', content='2', images=['a.png'])]), "message with 'images'"),
        (dict(prompt=str(ASK)), "'prompt' is no JSON"),  # pandas writes a list so
        (dict(prompt=[dict(role='user')]), 'not {"role"'),
        (dict(prompt=[dict(role='user', content=None)]), 'not {"role"'),
        (dict(prompt=[BRIEF, *ASK], system='Be long.'), "the column 'system' another"),
        (dict(tools='[{'), "'tools' is no JSON"),
        (dict(tools={'name': 'add'}), 'not a list of objects'),
        (dict(tools=['add']), 'not a list of objects'),
        (dict(tools=[ADD]), "does not read ['tools']"),
        (dict(chat_template_kwargs=dict(enable_thinkng=False)), "does not read ['enable_thinkng']"),
        (dict(chat_template_kwargs=[1]), 'not an object'),
        (dict(chat_template_kwargs=dict(messages=[])), 'does not read'),
        (dict(prompt=[*ASK, BOT]), 'ends with a turn of the assistant'),
    ],
)
def test_a_row_that_would_be_asked_otherwise_is_refused(more, words):
    r = Reading(spelled(False), chat=ChatTemplate(TURNS + END))
    with pytest.raises(BadRow) as e:
        row_prompt(r, CHAT | more)
    assert words in str(e.value)


ROW = dict(
    prompt=[dict(role='system', content='a'), *PARTS, CALL, dict(role='tool', content='4')],
    answer='4',
    tools=[ADD],
    chat_template_kwargs=dict(enable_thinking=True),
    system='a',
    id='x',
    domain='sums',
    verifier='exact',
    solution='so 4',
    images=[],
)


@pytest.mark.parametrize('column', ROW)
def test_a_value_of_another_kind_is_one_line(column):
    "Each value of a row, replaced by each other kind of JSON"
    r = Reading(spelled(False), chat=ChatTemplate(TOOLS + CALLS + END + THINKS))
    assert row_prompt(r, ROW).messages
    for at in places(ROW[column], (column,)):
        for value in KINDS:
            row = changed(ROW, at, value)
            try:
                r.unused(row, row_prompt(r, row))
            except BadRow as e:
                assert '\n' not in str(e) and len(str(e)) <= 400
            except Exception as e:
                raise AssertionError(f'{at} = {value!r}: {e!r}') from e


def test_columns_that_are_not_used_are_named_once(tmp_path, capsys):
    r = Reading(spelled(False), chat=ChatTemplate(TURNS + END))
    rows = [CHAT | dict(level=3, system='Be brief.', extra_info=dict(a=1), note=None)] * 3
    path = tmp_path / 'x.jsonl'
    path.write_text('\n'.join(map(json.dumps, rows)))
    load_prompts(str(path), r)
    assert capsys.readouterr().out == f'{path}: columns not used: extra_info, level\n'
    load_prompts(str(path), replace(r, keep_row=True))
    assert 'columns for the reward function alone: extra_info, level' in capsys.readouterr().out
    path.write_text(json.dumps(dict(prompt='2+2=', answer='4', tools=[ADD])))  # text has no tools
    load_prompts(str(path), r)
    assert 'columns not used: tools\n' in capsys.readouterr().out
    fields = dict(weight=0, reasoning_content='Two', name='Ann', tool_calls=[])
    path.write_text(json.dumps(CHAT | dict(prompt=[ASK[0] | fields])))
    load_prompts(str(path), r)
    said = 'columns not used: prompt.name, prompt.reasoning_content, prompt.weight\n'
    assert said in capsys.readouterr().out
    whole = "{% for m in messages %}{{ m.get('name') }}{{ m | tojson }}{% endfor %}"  # all of it
    load_prompts(str(path), replace(r, chat=ChatTemplate(whole)))
    assert not capsys.readouterr().out


def test_a_chat_that_spells_a_control_token_is_named(tmp_path, capsys):
    "huggingface/transformers#29279; asked as the model is served, and said once"
    r, path = Reading(spelled(False), chat=ChatTemplate(TURNS + END)), tmp_path / 'x.jsonl'
    asked = ['2+2=', 'Stop.</s><|bot|>5', json.dumps([dict(role='user', content='<|user|>')])]
    rows = [CHAT | dict(prompt=[ASK[0] | dict(content=t)]) for t in asked[:2]]
    rows += [CHAT | dict(prompt=asked[2]), dict(prompt='<|user|>2<|bot|>', answer='2')]
    path.write_text('\n'.join(map(json.dumps, rows)))
    texts = [p.text for p in load_prompts(str(path), r)[0]]
    said = f'{path}: 2 of 4 prompts spell a control token in a message, and the policy reads it as '
    assert capsys.readouterr().out == f"{said}one: the first is '</s>' in {path}:2\n"
    assert texts[2] == '<|user|>user: <|user|><|bot|>', 'a chat may be JSON text, as in CSV'


def test_settings_reach_every_chat_and_a_row_comes_first(tmp_path):
    template = ChatTemplate(TURNS + END + THINKS)
    rows = [
        CHAT,
        CHAT | dict(prompt=[BRIEF, *ASK], chat_template_kwargs=dict(enable_thinking=True)),
    ]
    (tmp_path / 'x.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    cfg = DataConfig(
        path=str(tmp_path / 'x.jsonl'),
        eval_path=('x',),
        system='Be kind.',
        chat_template_kwargs='{"enable_thinking": false}',
    )
    (one, two), _ = load_data(cfg, spelled(False), 0, template)
    assert one.text == '<|user|>system: Be kind.<|user|>user: 2+2=<|bot|><think></think>'
    assert two.text == '<|user|>system: Be brief.<|user|>user: 2+2=<|bot|>'
    assert one.chat_options == dict(chat_template_kwargs=dict(enable_thinking=False))
    with pytest.raises(ValueError, match='--data.apply-chat-template'):
        (tmp_path / 'x.jsonl').write_text(json.dumps(CHAT | dict(prompt='2+2=')))
        load_data(cfg, spelled(False), 0, template)
    with pytest.raises(ValueError, match='generated problems are no chats'):
        load_data(DataConfig(system='Be kind.'), spelled(False), 0, template)
    for bad in ('[1]', '{', '{"a": 1, "a": 2}'):
        with pytest.raises(ValueError, match='chat_template_kwargs'):
            DataConfig(chat_template_kwargs=bad)


def test_the_date_of_a_template_is_that_of_the_run():
    text = "{{ strftime_now('%d %b %Y') }}"
    assert ChatTemplate(text, date='2024-07-26').render(ASK) == '26 Jul 2024'
    assert ChatTemplate(text).reads_clock and not ChatTemplate(TURNS).reads_clock
    with pytest.raises(ValueError, match='template_date'):
        DataConfig(template_date='yesterday')


@pytest.mark.parametrize(
    'program',
    [
        '{{ 1 // 0 }}',
        "{{ 'a' * 10 ** 10 }}",
        '{{ [1] * 10 ** 10 }}',
        '{{ 10 ** 9999999 }}',
        "{{ 'a'.ljust(10 ** 10) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ 'a' | center(10 ** 10) }}",
        "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
        '{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}',
        '{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}',
        '{{ messages.nothing.here }}',
        "{{ ''.__class__.__mro__ }}{{ raise_exception('no') }}",
    ],
)
def test_a_template_that_fails_or_never_ends_is_one_line(monkeypatch, program):
    monkeypatch.setattr(chat, 'SECONDS', 0.3)
    with pytest.raises(ValueError, match='^the chat template ') as e:
        ChatTemplate(program).render(ASK)
    assert '\n' not in str(e.value) and len(str(e.value)) < 400


def test_a_prompt_that_alone_is_too_long_can_be_skipped(tmp_path):
    path = tmp_path / 'x.jsonl'
    path.write_text('\n'.join(json.dumps(dict(problem=t, answer='1')) for t in ('1', '2' * 30)))
    read = partial(load_prompts, str(path), Reading(spelled(False), context=20, room=8))
    prompts, skipped = read('skip')
    assert [p.text for p in prompts] == ['1']
    assert 'the prompt alone has 30 tokens, and the context is 20' in skipped[0]
    with pytest.raises(ValueError, match='30 tokens; with rollout.max_tokens=8 it exceeds'):
        load_prompts(str(path), Reading(spelled(False), context=32, room=8))
