"Inputs of public reports of other projects, each named by its report: owner/name#number"

import json
import pickle
import shutil
from contextlib import ExitStack
from dataclasses import replace
from decimal import Decimal
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders

from compassrl.config import TrainConfig, config_from_dict
from compassrl.data.chat import ChatTemplate
from compassrl.data.rows import BadRow, Reading, row_prompt, worked_answer
from compassrl.data.selection import prompts_of_step
from compassrl.data.sources import rows_of
from compassrl.data.tokenizer import encode, response_text
from compassrl.files import from_yaml, read_data
from compassrl.judges.mathematics import same_maths
from compassrl.judges.own_reward import OwnReward, RewardFile, RewardFunction, inputs_of
from compassrl.judges.tool_calls import calls_of, tool_call
from compassrl.judges.verifiers import run_test
from compassrl.model.hf_config import read_config
from compassrl.model.merge import Weights
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import from_pretrained, hf_weights, save_pretrained
from compassrl.own_code import own_function
from compassrl.rollout.rollout_settings import VllmConfig
from compassrl.rollout.vllm.messages import engine_args
from compassrl.runs.cli import parse_train
from compassrl.runs.log import json_text, keep_until
from compassrl.train.sft import cosine_lr
from compassrl.train.train_settings import OptimConfig, SFTConfig
from tests.data.test_chat import ASK, BOT, CALLS, END, TOOLS, TURNS, spelled
from tests.support import ROOT

VERIFY, DATASETS = 'huggingface/Math-Verify', 'huggingface/datasets'

MATHS = [  # report, response, answer, does it pay?
    (f'{VERIFY}#44', 'therefore\\boxed{840}.,but\n**Final Answer**\n\\boxed{840}', '840', True),
    (
        f'{VERIFY}#44',
        '\\boxed{004}. 2,552,004 ends so: \\boxed{004} is right. \\boxed{004}',
        '4',
        1,
    ),
    (f'{VERIFY}#14', '$\\frac{1}{2006!}$', '\\frac{1}{2004!}', False),
    (f'{VERIFY}#14', '$\\frac{1}{2004!}$', '\\frac{1}{2004!}', True),
    (f'{VERIFY}#14', '\\boxed{\\frac{1}{2^{98}}}', '\\frac{1}{2^{99}}', False),
    (f'{VERIFY}#14', '$n=1, 2, 3$', 'n=2, 3, 4', False),
    (f'{VERIFY}#14', '$D = (0, 1.5)$', 'D = (0, 1)', False),
    (f'{VERIFY}#14', '$21, 36, and 82$', '19, 46, \\text{ and } 82', False),
    (
        f'{VERIFY}#14',
        '$\\frac{1}{3 \\cdot 2^{2006}}$',
        '\\frac{2^{2005}+1}{3 \\cdot 2^{2006}}',
        False,
    ),
    (f'{VERIFY}#14', '$1 + \\frac{1}{\\mathrm{e}}$', '1 - \\frac{1}{\\mathrm{e}}', False),
    (f'{VERIFY}#14', '$1 - \\frac1e$', '1 - \\frac{1}{\\mathrm{e}}', True),
    (f'{VERIFY}#14', '$2021$', '\\pm 2021', False),
    (f'{VERIFY}#14', '$1:00$', '12:00', False),
    (f'{VERIFY}#14', '$1, 3, 5, \\ldots, 2n-1$', '1, 2, \\ldots, n', False),
    (f'{VERIFY}#14', '\\boxed{1, 2, \\dots, n}', '1, 2, \\ldots, n', True),
    (f'{VERIFY}#14', '$1:4:9:\\ldots$', '1:2:3:\\ldots', False),
    (f'{VERIFY}#41', '$4\\sqrt(2)$', '4', False),
    (f'{VERIFY}#41', '$4\\sqrt(2)$', '4\\sqrt{2}', True),
    (f'{VERIFY}#57', 'I think \\boxed{1}, and the reason why it is \\boxed{1} is this.', '1', True),
    (f'{VERIFY}#57', '\\boxed{35 cm} ++++++ \\boxed{4}', '4', True),
    (f'{VERIFY}#60', '$3x + 4y + 14=0$', '3*x-1*y+13=0', False),
    (f'{VERIFY}#70', '\\boxed{9/7}', '\\dfrac{9}{7}', True),
    ('jundot/omlx#3484', 'The total is 72 clips, altogether.', '72', True),
    ('stanford-crfm/helm#4337', 'The answer is 72, in total, so the farmer earns it.', '72', True),
    ('google-deepmind/proeval#19', 'It changes from 2 to -3, so it is -3.', '-3', True),
    ('google-deepmind/proeval#19', 'It changes from 2 to -3, so it is -3.', '3', False),
    ('EleutherAI/lm-evaluation-harness#3214', 'The order costs $29.00.', '29', True),
    ('open-compass/opencompass#2426', 'It is $200,000 - $130,000 = $70,000.', '70000', True),
    ('scitix/sieval#18', '\\boxed{5}', 'x=5', True),
    ('scitix/sieval#18', '\\boxed{x=5}', '5', True),
    ('NVIDIA-NeMo/Gym#1844', '\\boxed{C} no, \\boxed{\\text{E}}', 'E', True),
]


@pytest.mark.parametrize('report, text, answer, right', MATHS)
def test_maths(report, text, answer, right):
    assert (same_maths(text, answer)[0] == 'ok') == bool(right)


WORKED = [
    ('google-deepmind/proeval#19', 'From 2 to -3.\n#### -3', '-3'),
    (
        'EleutherAI/lm-evaluation-harness#1204',
        '=$<<200000-130000=70000>>70,000\n#### 70000',
        '70000',
    ),
]


@pytest.mark.parametrize('report, text, answer', WORKED)
def test_worked_solutions(report, text, answer):
    assert worked_answer(text) == answer


CALL = dict(name='w', arguments=dict(t='a </tool_call> b'))
MARKED = '<tool_call>\n{}\n</tool_call>'.format
TOOL_CALLS = [
    ('vllm-project/vllm#45167', MARKED(json.dumps(CALL)) * 2, [CALL, CALL]),
    (
        'vllm-project/vllm#21544',
        MARKED('{"name": "w", "arguments": {"c": "t/{a,b"}}'),
        [{'c': 't/{a,b'}],
    ),
    (
        'NousResearch/hermes-agent#2335',
        MARKED('{"name": "w", "arguments": {"n": {"d": 1}}}'),
        [{'n': {'d': 1}}],
    ),
    (
        'Blaizzy/mlx-vlm#2064',
        '{"name": "w", "arguments": {"c": "say \\"x\\"", "l": [[1], {"a": []}]}}',
        [{'c': 'say "x"', 'l': [[1], {'a': []}]}],
    ),
]


@pytest.mark.parametrize('report, text, calls', TOOL_CALLS)
def test_calls_that_are_read(report, text, calls):
    assert [c['arguments'] for c in calls_of(text)] == [c.get('arguments', c) for c in calls]


NO_CALLS = [
    ('ggml-org/llama.cpp#18183', 'An example: {"name": "w", "arguments": {}}'),
    ('NousResearch/hermes-agent#5315', MARKED('{"name": "w", "arguments": {"c": "ls"}')),
]


@pytest.mark.parametrize('report, text', NO_CALLS)
def test_what_is_no_call_is_wrong_and_no_fault_of_the_verifier(report, text):
    assert tool_call(text, '{"name": "w", "arguments": {}}').status == 'wrong'


PROGRAMS = [  # report, program, stdin, stdout, passed?
    ('QingdaoU/OnlineJudge#365', "print('1 2 3 ')\nprint('4 5 6')", '', '1 2 3\n4 5 6', True),
    ('agrawal-d/cph#34', "print('1\\n1\\n2')", '', '1 1 2', False),
    ('SIDED00R/algo-review#22', 'print(2.5)', '', '2.5000000', True),
    ('SIDED00R/algo-review#22', 'print(2.50001)', '', '2.5', False),
    ('agrawal-d/cph#293', "import sys\nprint('x', file=sys.stderr)\nprint(1)", '', '1', True),
    ('bytedance/SandboxFusion#41', 'print(input())', 'Hello World!', 'Hello World!', True),
]


@pytest.mark.parametrize('report, program, stdin, stdout, passed', PROGRAMS)
def test_programs(report, program, stdin, stdout, passed):
    assert run_test(program, dict(stdin=stdin, stdout=stdout))[0] is passed


FILES = [  # report, texts of files, values of the rows in column `a`
    (
        f'{DATASETS}#6460',
        ['{"a": [0, 4, "Protein"]}\n{"a": [["b"]]}'],
        [[0, 4, 'Protein'], [['b']]],
    ),
    (f'{DATASETS}#7222', ['{"a": null}\n{"a": "x"}'], [None, 'x']),
    (f'{DATASETS}#7322', ['{"a": {"b": 1}}\n{"a": [1]}'], [{'b': 1}, [1]]),
    (f'{DATASETS}#5531', ['{"a": [null, 1]}'], [[None, 1]]),
    (f'{DATASETS}#8241', ['\ufeff{"a": {"b": 1}}\n{"a": {"c": 2}}\n\n'], [{'b': 1}, {'c': 2}]),
    (f'{DATASETS}#7092', ['{"a": []}', '{"a": [{"id": 1}]}'], [[], [{'id': 1}]]),
    (
        f'{DATASETS}#7664',
        ['{"a": "action: string, at: timestamp[s]", "b": 1}'],
        ['action: string, at: timestamp[s]'],
    ),
    ('apache/arrow#40107', ['{"a": null}', '{"a": "x"}'], [None, 'x']),
]


@pytest.mark.parametrize('report, texts, values', FILES)
def test_rows_of_files(report, texts, values, tmp_path):
    for i, text in enumerate(texts):
        (tmp_path / f'train-{i}.jsonl').write_text(text)
    assert [row['a'] for _, row in rows_of(str(tmp_path))] == values


YAML = [
    ('hiyouga/LlamaFactory#4014', 'lr: 2e-5', 2e-5),
    ('huggingface/trl#1450', 'lr: 1e-4', 1e-4),
    ('Noble-Lab/casanovo#64', 'lr: 5e-4', 5e-4),
]


@pytest.mark.parametrize('report, text, lr', YAML)
def test_numbers_of_yaml(report, text, lr):
    assert config_from_dict(OptimConfig, from_yaml(text)).lr == lr


@pytest.mark.parametrize('name, text', [('c.json', '{"steps": 3}'), ('c.yaml', 'steps: 3')])
@pytest.mark.parametrize('report', ['pydantic/pydantic-ai#8316'])
def test_a_config_with_a_byte_order_mark(report, name, text, tmp_path):
    (tmp_path / name).write_text('\ufeff' + text)
    assert read_data(tmp_path / name) == dict(steps=3)


CONFIGS = [  # report, YAML, flags, name of the setting, value
    ('vllm-project/vllm#51401', 'vllm: {prefix_caching: false}', [], 'vllm.prefix_caching', False),
    (
        'vllm-project/vllm#49057',
        'vllm: {prefix_caching: false}',
        ['--steps', '2'],
        'vllm.prefix_caching',
        False,
    ),
    ('bw2/ConfigArgParse#259', 'trackers: [wandb]\nsteps: 9', ['--steps', '4'], 'steps', 4),
    ('bw2/ConfigArgParse#259', 'trackers: []\nsteps: 9', ['--steps', '4'], 'trackers', ()),
]


@pytest.mark.parametrize('report, text, flags, name, value', CONFIGS)
def test_files_of_settings_and_flags(report, text, flags, name, value, tmp_path):
    (tmp_path / 'c.yaml').write_text(text)
    found = parse_train([str(tmp_path / 'c.yaml'), *flags])
    for part in name.split('.'):
        found = getattr(found, part)
    assert found == value


REFUSED = [
    ('unslothai/unsloth#10452', dict(learning_rate=1e-4), "'learning_rate' does not exist"),
    ('unslothai/unsloth#10452', dict(optim={'num-epochs': 1}), "'optim.num-epochs' does not exist"),
    ('axolotl-ai-cloud/axolotl#3353', dict(group_size=1), 'use at least 2'),
    ('DendrouLab/panpipes#304', dict(optim=dict(lr='1e-08')), "optim.lr='1e-08': use a number"),
]


@pytest.mark.parametrize('report, settings, words', REFUSED)
def test_settings_that_are_refused(report, settings, words):
    with pytest.raises(ValueError) as e:
        config_from_dict(TrainConfig, settings)
    assert words in str(e.value)


def called(arguments):
    call = dict(id='c1', type='function', function=dict(name='w', arguments=arguments))
    return [
        *ASK,
        dict(role='assistant', content=None, tool_calls=[call]),
        dict(role='tool', content='4'),
    ]


JOINS = CALLS.replace('arguments | tojson', "arguments + ''") + END  # only text has a plus
CHATS = [  # report, template, chat, end of the prompt
    (
        'ai-dynamo/dynamo#4161',
        CALLS + END,
        called('{"a": "b"}'),
        '[w {"a": "b"}]<|user|>tool:4<|bot|>',
    ),
    (
        'axolotl-ai-cloud/axolotl#3824',
        CALLS + END,
        called('not JSON'),
        '[w "not JSON"]<|user|>tool:4<|bot|>',
    ),
    ('ggml-org/llama.cpp#19553', JOINS, called('{"a":1}'), '[w {"a":1}]<|user|>tool:4<|bot|>'),
    (
        'mistralai/mistral-common#311',
        CALLS + END,
        called(dict(a="It's <&")),
        '[w {"a": "It\'s <&"}]<|user|>tool:4<|bot|>',
    ),
    (
        'ai-dynamo/dynamo#4168',
        TURNS + END,
        [*ASK, BOT, dict(role='tool', content='4')],
        'tool: 4<|bot|>',
    ),
]


@pytest.mark.parametrize('report, template, chat, end', CHATS)
def test_chats(report, template, chat, end):
    r = Reading(spelled(False), chat=ChatTemplate(template))
    assert row_prompt(r, dict(prompt=chat, answer='4')).text.endswith(end)


BAD_ROWS = [
    (
        'axolotl-ai-cloud/axolotl#1649',
        dict(prompt=[{'from': 'human', 'value': 'hi'}]),
        'not {"role"',
    ),
    ('axolotl-ai-cloud/axolotl#1179', dict(conversations=[]), "no column 'prompt' or 'messages'"),
    ('decolua/9router#2129', dict(prompt=[*ASK, BOT]), 'ends with a turn of the assistant'),
]


@pytest.mark.parametrize('report, row, words', BAD_ROWS)
def test_rows_that_are_refused(report, row, words):
    with pytest.raises(BadRow) as e:
        row_prompt(
            Reading(spelled(False), chat=ChatTemplate(TOOLS + TURNS + END)), row | dict(answer='4')
        )
    assert words in str(e.value)


TEXTS = [
    ('huggingface/tokenizers#1543', 'hello !'),
    ('huggingface/transformers#46491', '    if x:\n'),
    ('huggingface/transformers#47487', '   leading spaces'),
]


@pytest.mark.parametrize('report, text', TEXTS)
def test_a_verifier_reads_every_blank(report, text):
    tok = spelled(False)
    tok.decoder = decoders.ByteLevel()
    assert response_text(tok, encode(tok, text)) == text


P = row_prompt(Reading(spelled(False), keep_row=True), dict(prompt='a', answer='1', solution='s'))


def by_trl(prompts, completions):
    return [float(len(c)) for c in completions]


def accuracy(completions, solution, **kwargs):
    return [float(c == s) for c, s in zip(completions, solution)]


def some(completions):
    return [1.0, None, float('nan')][: len(completions)]


REWARDS = [  # report, function, responses, rewards; None: no opinion, 'failed': no verdict
    ('huggingface/trl#4939', by_trl, ['ab', ''], [2.0, 0.0]),
    ('FareedKhan-dev/train-deepseek-r1#2', accuracy, ['s', ''], [1.0, 0.0]),
    ('hiyouga/EasyR1#338', lambda text: len(text), ['ab'], [2.0]),
    ('huggingface/trl#5902', some, ['a', 'b'], [1.0, None]),
    ('modelscope/ms-swift#8123', some, ['a', 'b', 'c'], [1.0, None, 'failed']),
    ('huggingface/trl#3455', own_function('builtins:len', 'rewards.function'), None, None),
]


@pytest.mark.parametrize('report, fn, texts, rewards', REWARDS)
def test_reward_functions(report, fn, texts, rewards):
    if texts is None:
        assert fn is len  # by its module alone, without any reward model
        return
    found = RewardFunction('f', fn, 1.0).verdicts([inputs_of(P, t) for t in texts])
    said = [v and (v.reward if v.status != 'failed' else 'failed') for v in found]
    assert said == rewards


def test_a_column_that_a_function_asks_for_and_no_row_has():
    "FareedKhan-dev/train-deepseek-r1#2: named before anything starts"
    with pytest.raises(ValueError, match=r"asks for \['solution'\]: the data has the columns"):
        RewardFunction('f', accuracy, 1.0).check(['answer'])


SCHEDULES = [  # report, steps, steps of warm-up, whole learning rate from step to step
    ('deepspeedai/DeepSpeed#8142', 10, 10),
    ('lightly-ai/lightly#1842', 1, 1),
    ('Tencent-Hunyuan/UniRL#223', 15, 5),
    ('tinygrad/tinygrad#10981', 20, 4),
]


@pytest.mark.parametrize('report, steps, warmup', SCHEDULES)
def test_schedules_rise_then_fall_and_are_never_zero(report, steps, warmup):
    for lr in (
        partial(cosine_lr, cfg=SFTConfig(steps=steps, warmup_steps=warmup)),
        lambda i: OptimConfig(warmup_steps=warmup, final_lr_frac=0.1).lr_at(i, i / steps),
    ):
        rates = [lr(i) for i in range(steps)]
        top = rates.index(max(rates))
        assert min(rates) > 0 and top <= warmup
        assert rates[:top] == sorted(rates[:top]) and rates[top:] == sorted(rates[top:])[::-1]


@pytest.mark.parametrize('report', ['wandb/wandb#4482', 'wandb/wandb#6728'])
def test_rows_of_steps_that_are_taken_again_go(report, tmp_path):
    path = tmp_path / 'metrics.jsonl'
    path.write_text(''.join(json_text(dict(step=i, loss=float('nan'))) + '\n' for i in (1, 2, 3)))
    keep_until(path, 2)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        dict(step=i, loss=None) for i in (1, 2)
    ]


# ---- checkpoints

SHAPE = dict(vocab_size=99, hidden_size=16, num_hidden_layers=2, intermediate_size=16)


@pytest.fixture(scope='module')
def shards(tmp_path_factory):
    "A policy in several files with an index"
    folder = tmp_path_factory.mktemp('shards')
    torch.manual_seed(0)
    policy = Policy(PolicyConfig(**SHAPE, tie_word_embeddings=False))
    save_pretrained(policy, folder, 8_000)
    assert len([*folder.glob('*.safetensors')]) > 1
    return folder


def rewritten(folder, **values):
    path = folder / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def without_head(folder):
    for path in folder.glob('*.safetensors'):
        save_file({k: t for k, t in load_file(path).items() if k != 'lm_head.weight'}, path)


CHECKPOINTS = [
    ('QwenLM/Qwen3-VL-Embedding#89', without_head, 'weights are missing, first lm_head'),
    (
        'GeeeekExplorer/nano-vllm#264',
        lambda f: [p.unlink() for p in f.glob('model*')],
        'incomplete',
    ),
    ('Neph0s/CoSER#3', lambda f: sorted(f.glob('*.safetensors'))[-1].unlink(), 'incomplete'),
]


@pytest.mark.parametrize('report, fault, words', CHECKPOINTS)
def test_a_checkpoint_that_lacks_something(report, fault, words, shards, tmp_path):
    folder = shutil.copytree(shards, tmp_path / 'model')
    fault(folder)
    with pytest.raises(ValueError, match=words):
        from_pretrained(folder)


@pytest.mark.parametrize('report', ['pytorch/torchtitan#3764', 'huggingface/transformers#30202'])
def test_a_tied_head_needs_no_weight_of_its_own(report, shards, tmp_path):
    "Though the index names one"
    folder = shutil.copytree(shards, tmp_path / 'model')
    without_head(folder)
    rewritten(folder, tie_word_embeddings=True)
    names = [name for name, _ in from_pretrained(folder).named_parameters()]
    assert names and not any('lm_head' in name for name in names)


@pytest.mark.parametrize('report', ['vllm-project/vllm#54230', 'ml-explore/mlx-swift-lm#408'])
def test_a_weight_comes_from_the_file_that_the_index_names(report, shards, tmp_path):
    folder = shutil.copytree(shards, tmp_path / 'model')
    where = json.loads((folder / 'model.safetensors.index.json').read_text())['weight_map']
    name = 'model.norm.weight'
    stale = next(p for p in sorted(folder.glob('*.safetensors'))[::-1] if p.name != where[name])
    save_file(load_file(stale) | {name: torch.full((16,), 7.0)}, stale)
    save_file({name: torch.full((16,), 8.0)}, folder / 'aaa.safetensors')
    want, got = (dict(hf_weights(from_pretrained(f))) for f in (shards, folder))
    assert torch.equal(got[name], want[name])
    with ExitStack() as stack:
        assert Weights(folder, stack)[name].unique().tolist() == [1.0]


@pytest.mark.parametrize('report', ['vllm-project/vllm#28542', 'NovaSky-AI/SkyRL#690'])
def test_rope_in_its_old_and_its_new_place(report, shards, tmp_path):
    found = []
    for i, values in enumerate(
        [
            dict(rope_theta=5e5, rope_scaling=None, rope_parameters=None),
            dict(rope_theta=None, rope_parameters=dict(rope_theta=5e5, rope_type='default')),
        ]
    ):
        folder = shutil.copytree(shards, tmp_path / str(i))
        rewritten(folder, **values)
        found.append(read_config(folder))
    assert found[0] == found[1] and found[0].rope_theta == 5e5


# ---- reports whose symptom was never seen here

KINDS_OF_REWARDS = [
    (np.float64(0.5), 0.5),
    (np.array(0.5), 0.5),
    (np.array([0.5]), 0.5),
    (np.int64(2), 2.0),
    (np.bool_(True), 1.0),
    (torch.tensor(0.5), 0.5),
    (torch.tensor([0.5]), 0.5),
    (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    (torch.tensor(0.5, requires_grad=True), 0.5),
    (dict(score=0.5), 0.5),
    ('good', 'failed'),
    (Decimal('0.5'), 'failed'),
    (float('inf'), 'failed'),
    (10**400, 'failed'),
    ((1.0, 2.0), 'failed'),
]


@pytest.mark.parametrize('value, reward', KINDS_OF_REWARDS, ids=str)
def test_a_reward_is_a_number_of_any_library(value, reward):
    "THUDM/slime#2121"
    [v] = RewardFunction('f', lambda text: value, 1.0).verdicts([inputs_of(P, 'x')])
    assert v and (v.reward if v.status != 'failed' else 'failed') == reward


CALLABLES = """
import functools
same = lambda text: float(len(text))
def two(text, more): return len(text) + more
part = functools.partial(two, more=0)
async def slow(text, more): return len(text) + more
later = functools.partial(slow, more=0)
class Length:
    def __call__(self, text): return len(text)
obj = Length()
@functools.wraps(two)
def wrapped(text): return two(text, 0)
kept = functools.lru_cache(same)
"""


@pytest.mark.parametrize('name', ['same', 'part', 'later', 'obj', 'kept'])
def test_a_function_of_any_kind_goes_to_another_process(name):
    "verl-project/verl#3150 and #2239"
    own = OwnReward([RewardFile(f'r.py:{name}', CALLABLES.encode())], (), 1.0)
    assert pickle.loads(pickle.dumps(own)).judge_one(P, 'abc').reward == 3.0


def test_the_step_after_an_epoch_has_prompts():
    "verl-project/verl#5725 and #7401: a step's prompts follow from its number alone"
    steps = [
        [p.id for p in prompts_of_step([*map(question, range(18))], i, 6, 0)] for i in range(6)
    ]
    assert all(sorted(sum(steps[i : i + 3], [])) == sorted(map(str, range(18))) for i in (0, 3))
    assert steps[:3] != steps[3:]


def question(i):
    return replace(P, id=str(i))


def test_ids_beyond_the_tokenizer_say_nothing():
    "vllm-project/vllm#340: the vocabulary of a model is padded"
    tok = spelled(False)
    assert response_text(tok, [*encode(tok, 'a'), 10_000, *encode(tok, 'b')]) == 'a b'


def test_a_checkpoint_does_not_choose_how_is_sampled():
    "NVIDIA-NeMo/RL#3497: its generation_config.json may hold a top_k"
    shape = PolicyConfig(**SHAPE)
    args = engine_args('m', shape, VllmConfig(), torch.float, 32, 2, False, 'cpu')
    assert args['generation_config'] == 'vllm'


def test_a_stranger_finds_the_commands_for_a_file_on_the_first_screen():
    top = (ROOT / 'README.md').read_text().splitlines()[:40]
    for words in ('pip install', '--data.path', '--init-from', '--rewards.function'):
        assert any(words in line for line in top), words


TABLES = [MATHS, WORKED, TOOL_CALLS, NO_CALLS, PROGRAMS, FILES, YAML, CONFIGS, REFUSED, CHATS]
TABLES += [BAD_ROWS, TEXTS, REWARDS, SCHEDULES, CHECKPOINTS]
