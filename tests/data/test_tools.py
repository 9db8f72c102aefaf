"Tools: one's own by its place, an environment, and calls in the format of the model"

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from compassrl.config import TrainConfig
from compassrl.data.chat import ChatTemplate
from compassrl.data.data_settings import ToolConfig
from compassrl.data.rows import BadRow, Reading, row_prompt
from compassrl.data.tokenizer import StopStrings, build_tokenizer, byte_tokenizer, encode
from compassrl.data.tools import ToolUser, own_tools, tool_schema
from compassrl.records import Prompt, derive_seed
from compassrl.runs.run_data import tool_of
from tests.support import ROOT

TOK = build_tokenizer()
TOOLS = b'''
import sys, time

def add(a: int, b: int = 1) -> int:
    """Sum of two numbers

    Args:
        a: The first one
        b: The other one
    """
    return a + b

def shout(text: str) -> str:
    """In capitals

    Args:
        text: Anything
    """
    return text.upper()

def ends(text): sys.exit(3)
def slow(text): time.sleep(60)
def late(text):
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            pass

class Game:
    def reset(self, answer, hint='none'): self.left, self.hint = int(answer), hint
    def step(self, text):
        self.left -= int(text)
        return (self.hint, True) if self.left <= 0 else str(self.left)

class Speaks(Game):
    def reset(self): return 'hello'

class Needs(Game):
    def reset(self, planet): pass

class Lacks:
    def step(self, text): return ''

def game() -> Game:
    return Game()
'''


def user(name, **kw):
    return ToolUser(ToolConfig(f't.py:{name}', **kw), TOK, TOOLS)


def answer(user, text, prompt_id=''):
    ids, done = user.begin(prompt_id)(encode(user.tokenizer, text))
    return user.tokenizer.decode(ids, skip_special_tokens=False), done


PROMPTS = [Prompt('p', 'd', 'Take away', [5], '7', 'exact', columns=dict(hint='bye', answer='no'))]


@pytest.mark.parametrize(
    'name, call, said',
    [
        ('shout', '<a b>', '=A B;'),
        ('add', '<3>', '=error: TypeError: can only concatenate str (not "int") to str;'),
        ('ends', '<3>', '=error: RuntimeError: it ended the program by SystemExit(3)'),
        ('slow', '<3>', '=error: TimeoutError: still running after 0.2 s;'),
        ('late', '<3>', '=error: TimeoutError: still running after 0.2 s;'),
    ],
)
def test_a_function_by_its_place(name, call, said):
    assert answer(user(name, wall_s=0.2), call)[0].startswith(said)


@pytest.mark.parametrize('name', ['Game', 'game'])
def test_an_environment_per_response(name):
    "A class, or a function that says what it makes; the row's columns are there, and its answer"
    u = user(name)
    u.check(PROMPTS)
    first, other = u.begin('p'), u.begin('p', [encode(TOK, '<2>'), encode(TOK, '<x>')])
    for begun, call, said in (
        (first, '<3>', ('=4;', False)),
        (other, '<3>', ('=2;', False)),
        (first, '<1>', ('=3;', False)),
        (other, '<9>', ('=bye;', True)),
        (first, '<9>', ('=bye;', True)),
    ):
        ids, done = begun(encode(TOK, call))
        assert (TOK.decode(ids), done) == said
    assert u.play('<3><4>#7', 'p')[0] == encode(TOK, '<3>=4;<4>#7'), 'no answer after the end'


@pytest.mark.parametrize(
    'name, why',
    [
        ('nothing', "has no function 'nothing'"),
        ('Lacks', 'it has `reset` and `step`'),
        ('Speaks', "it returned 'hello'"),
        ('Needs', "missing 1 required positional argument: 'planet'"),
    ],
)
def test_places_that_are_refused(name, why):
    with pytest.raises(ValueError, match=f"tools.name='t.py:{name}'.*{why}"):
        user(name).check(PROMPTS)


def test_settings_that_are_refused():
    for wrong, why in (
        (dict(name='t.py:add,shout'), "only in format='hermes'"),
        (dict(name='abacus'), 'FILE.py:NAME'),
        (dict(wall_s=0), 'wall_s=0'),
        (dict(format='json'), 'format='),
    ):
        with pytest.raises(ValueError, match=why):
            ToolConfig(**wrong)
    with pytest.raises(ValueError, match='stands alone'):
        own_tools('t.py:Game,add', TOOLS)
    cfg = TrainConfig(tools=ToolConfig('t.py:add', format='hermes'))
    with pytest.raises(ValueError, match="'t.py:add': t.py does not exist"):
        tool_of(cfg, TOK, None)


def test_a_run_uses_its_copy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = TrainConfig(tools=ToolConfig('t.py:shout'))
    Path('t.py').write_bytes(TOOLS)
    tool, file = tool_of(cfg, TOK, None)
    assert file.source == TOOLS and answer(tool, '<a>')[0] == '=A;'
    (kept := Path('rewards')).mkdir()
    (kept / 't.py').write_bytes(TOOLS)
    Path('t.py').unlink()
    assert answer(tool_of(cfg, TOK, None, kept)[0], '<b>')[0] == '=B;'


# ---- the model's own format

TEMPLATE = """{%- if tools %}<|im_start|>system
# Tools{% for t in tools %}
{{ t | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}{% if m.content %}
{% endif %}<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MARKS = ['<|im_start|>', '<|im_end|>']


def bytes_and(marks):
    tok = byte_tokenizer()
    tok.add_special_tokens(marks)
    return tok


def published(name):
    "The chat template of a family, as TRL has it"
    folder = Path(find_spec('trl').origin).parent / 'chat_templates'
    return (folder / f'{name}.jinja').read_text()


@pytest.mark.parametrize('call_is_a_token', [True, False])
@pytest.mark.parametrize('family', ['', 'qwen2_5', 'qwen3'])
def test_a_call_in_the_format_of_the_model(family, call_is_a_token):
    "The policy reads what transformers writes of the same chat, of the tools and of the answer"
    marks = [*MARKS, *(['<tool_call>', '</tool_call>'] if call_is_a_token else [])]
    template = published(family) if family else TEMPLATE
    tok, chat = bytes_and(marks), ChatTemplate(template)
    u = ToolUser(ToolConfig('t.py:add,shout', format='hermes'), tok, TOOLS, chat)
    functions = own_tools('t.py:add,shout', TOOLS)
    given = dict(a=3, b=4)
    calls = [dict(type='function', function=dict(name='add', arguments=given))]
    asked = [dict(role='user', content='3+4?')]
    said = [dict(role='assistant', content='', tool_calls=calls), dict(role='tool', content='7')]
    hf = PreTrainedTokenizerFast(tokenizer_object=tok, chat_template=template)
    render = dict(tools=[*functions.values()], tokenize=False, add_generation_prompt=True)
    first, whole = (hf.apply_chat_template(m, **render) for m in (asked, asked + said))
    prompt = row_prompt(Reading(tok, chat=chat), dict(prompt=asked, answer='7'))
    assert prompt.text == first and prompt.chat_options['tools'] == u.schemas
    drawn = f'<tool_call>\n{json.dumps(calls[0]["function"])}\n</tool_call>'
    ids = encode(tok, drawn)
    ends = [n for n in range(1, len(ids) + 1) if ids[n - 1] in u.stop_ids and u.ends(ids[:n])]
    assert ends == [len(ids)]
    assert tok.decode(prompt.token_ids + ids + u(ids), skip_special_tokens=False) == whole


@pytest.mark.parametrize(
    'call, said',
    [
        ('{"name": "shout", "arguments": {"text": "a"}}', 'A'),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', '2'),
        ('{"name": "div", "arguments": {}}', "error: ValueError: no tool 'div', only ['add', "),
        ('{"name": "add", "arguments": {"c": 1}}', 'error: TypeError: add() got an unexpected'),
        ('{"name": "add"', 'error: JSONDecodeError'),
        ('3', 'error: TypeError'),
    ],
)
def test_calls_as_json(call, said):
    u = ToolUser(ToolConfig('t.py:add,shout', format='hermes'), TOK, TOOLS, ChatTemplate(TEMPLATE))
    text, _ = answer(u, f'<tool_call>{call}</tool_call>')
    assert text.partition('<tool_response>\n')[2].startswith(said)


@pytest.mark.parametrize('family', ['llama3_1', 'gemma', 'gptoss', 'deepseekv3', 'qwen3_5_think'])
def test_families_with_another_format_are_refused(family):
    with pytest.raises(ValueError, match='^the chat template (refuses it|writes no call)[^\n]*$'):
        ChatTemplate(published(family)).around_answer()


OTHERS = dict(
    marks=[('<tool_call>', '['), ('</tool_call>', ']')],
    quoted=[('m.content }}\n</', 'm.content | tojson }}\n</')],
    silent=[("m.role == 'tool'", 'false'), ('{{ m.content }}{%', '{%')],
)


@pytest.mark.parametrize('change', OTHERS.values(), ids=OTHERS)
def test_other_templates_are_refused(change):
    text = TEMPLATE
    for old, new in change:
        assert old in text
        text = text.replace(old, new)
    with pytest.raises(ValueError, match='the chat template writes no call as <tool_call>{JSON}'):
        ToolUser(ToolConfig('t.py:add', format='hermes'), TOK, TOOLS, ChatTemplate(text))


def test_the_tools_of_a_row_and_those_of_a_run():
    chat = ChatTemplate(TEMPLATE)
    u = ToolUser(ToolConfig('t.py:add,shout', format='hermes'), TOK, TOOLS, chat)
    read, asked = Reading(TOK, chat=chat), [dict(role='user', content='?')]
    one = row_prompt(read, dict(prompt=asked, answer='7', tools=u.schemas[1:]))
    assert '"shout"' in one.text and '"add"' not in one.text
    other = dict(type='function', function=dict(name='div'))
    with pytest.raises(BadRow, match=r"offers \['div'\], and tools.name has \['add', 'shout'\]"):
        row_prompt(read, dict(prompt=asked, answer='7', tools=[other]))
    with pytest.raises(BadRow, match='is text: .* tools.name are for chats'):
        row_prompt(read, dict(prompt='?', answer='7'))
    with pytest.raises(ValueError, match='no chat template'):
        ToolUser(u.cfg, TOK, TOOLS)


def test_schemas_are_those_of_transformers():
    for name, fn in own_tools('t.py:add', TOOLS).items():
        assert tool_schema(name, fn) == get_json_schema(fn)


# ---- stop strings


@pytest.mark.parametrize('text', ['</a>', '\n\n', ' the', 'é>', '—', 'a'])
def test_no_token_completes_a_text_unnoticed(text):
    "Pieces of words and of letters: the token that completes a text is one of its ids"
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    words = ['<a>the café> — </a>\n\n the end a>b', 'é>é> the\n\n\n</a></a>'] * 9
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(words, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    stops, drawn, seen = StopStrings(tok), sorted({*encode(tok, ''.join(words))}), 0
    assert len(stops.ids([text])) < (60 if text.isascii() else 140)
    pieces = sorted({*encode(tok, text), *byte_tokenizer().encode(text).ids, *drawn})
    for k in range(300):
        ids = [pieces[derive_seed(text, k, i) % len(pieces)] for i in range(40)]
        if k % 2:
            ids[20:20] = encode(tok, text)
        for n in range(1, len(ids) + 1):
            if stops.ended([text], ids[:n]):
                assert ids[n - 1] in stops.ids([text])
                seen += 1
                break
    assert seen > 140


# ---- the recipe of CONTRIBUTING

REVERSED = """

@tool
def reversed_text(call: str) -> str:
    "The call, backwards"
    return call[::-1]
"""
CALLED = """
from compassrl.data.data_settings import ToolConfig
from compassrl.data.tokenizer import build_tokenizer, encode
from compassrl.data.tools import ToolUser
tok = build_tokenizer()
print(tok.decode(ToolUser(ToolConfig('reversed_text'), tok)(encode(tok, '<abc>'))))
"""


def test_a_tool_is_a_function_and_its_name(tmp_path):
    "In a copy of the package, with nothing else changed"
    copy = tmp_path / 'compassrl'
    shutil.copytree(ROOT / 'compassrl', copy, ignore=shutil.ignore_patterns('__pycache__'))
    names, known = copy / 'data/data_settings.py', "('calculator', 'lookup')"
    assert names.read_text().count(known) == 1
    names.write_text(names.read_text().replace(known, f"{known[:-1]}, 'reversed_text')"))
    with open(copy / 'data/tools.py', 'a') as f:
        f.write(REVERSED)
    env = os.environ | dict(PYTHONPATH=str(tmp_path))
    r = subprocess.run(
        [sys.executable, '-c', CALLED], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert r.stdout == '=cba;\n', r.stderr
