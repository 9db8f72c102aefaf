"Files of models as their makers write them, and files that say something of another kind"

import json
import os
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from compassrl.data.chat import ChatTemplate
from compassrl.data.tokenizer import end_id, load_tokenizer, prompt_ids
from compassrl.files import read_data, read_text
from compassrl.model.hf_config import config_dict, policy_config, read_config
from compassrl.model.layers import rope_table
from compassrl.model.merge import MergeConfig, merge_checkpoints
from compassrl.model.pretrained import (
    checked_weights,
    config_like,
    copy_companions,
    from_pretrained,
    read_shards,
    shard_files,
)
from tests.support import families
from tests.support.other_kinds import KINDS, changed, places


@pytest.fixture(scope='module')
def home(tmp_path_factory):
    return tmp_path_factory.mktemp('home')


@pytest.fixture(scope='module')
def moe(home):
    families.original('Qwen3-MoE', home / 'moe')
    return home / 'moe'


ROPE = dict(
    rope_type='llama3',
    rope_theta=500_000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)


@pytest.mark.parametrize(
    'more', [{}, dict(factor=32.0), dict(high_freq_factor=9.5), dict(rope_theta=1e4)]
)
def test_llama_3_turns_as_in_transformers(more):
    "Every bit of every angle; and the file that we write says the same"
    rope = ROPE | more
    d = families.SIZES | dict(model_type='llama', rope_parameters=rope, head_dim=64)
    c = policy_config(d | dict(max_position_embeddings=300))
    hf = LlamaConfig(**families.SIZES | dict(rope_parameters=rope, head_dim=64))
    cos, sin = LlamaRotaryEmbedding(hf)(torch.zeros(1), torch.arange(300)[None])
    ours = rope_table(64, 300, c.rope_theta, c.yarn)
    half = torch.cat([-torch.ones(32), torch.ones(32)])
    assert torch.equal(ours[0], cos[0]) and torch.equal(ours[1], sin[0] * half)
    assert policy_config(config_dict(c)) == c
    assert config_dict(c)['rope_parameters'].items() >= rope.items()


@pytest.mark.parametrize(
    'rope',
    [
        dict(rope_type='llama3'),
        ROPE | dict(low_freq_factor='1'),
        ROPE | dict(low_freq_factor=4.0),
        dict(rope_type='dynamic'),
    ],
)
def test_a_rope_that_cannot_be_is_refused(rope):
    with pytest.raises(ValueError, match='rope_type|low_freq_factor|beta_'):
        policy_config(families.SIZES | dict(model_type='llama', rope_parameters=rope))


@pytest.mark.parametrize('name', families.MIXTURES)
def test_fused_experts_are_those_of_the_published_form(home, name):
    folder, fused = home / 'plain' / name, home / 'fused' / name
    families.original(name, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float)
    shutil.copytree(folder, fused)
    model.save_pretrained(fused, save_original_format=False)
    names = [n for n, _ in read_shards(fused)]
    assert any(n.endswith('experts.gate_up_proj') for n in names)
    want = from_pretrained(folder).state_dict()
    got = from_pretrained(fused).state_dict()
    assert all(torch.equal(got[k], t) for k, t in want.items())
    lazy = checked_weights(read_shards(fused, whole=False), read_config(fused))
    for (n, part), (m, t) in zip(
        sorted(lazy, key=lambda x: x[0]),
        sorted(checked_weights(read_shards(folder), read_config(folder))),
    ):
        assert n == m and torch.equal(part[...], t) and torch.equal(part[1:], t[1:])
    merge_checkpoints([fused, folder], home / 'merged' / name, MergeConfig(method='linear'))
    merged = from_pretrained(home / 'merged' / name).state_dict()
    assert all(torch.equal(merged[k], t) for k, t in want.items())


def test_models_that_number_tokens_differently_are_not_merged(moe, tmp_path):
    other = shutil.copytree(moe, tmp_path / 'other')
    d = json.loads((other / 'tokenizer.json').read_text())
    vocab = d['model']['vocab']
    a, b = list(vocab)[100:102]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (other / 'tokenizer.json').write_text(json.dumps(d))
    with pytest.raises(ValueError, match='has the number .* merge models of one base'):
        merge_checkpoints([moe, other], tmp_path / 'out', MergeConfig(method='linear'))


# files of another kind

FILES = [
    'config.json',
    'generation_config.json',
    'tokenizer_config.json',
    'model.safetensors.index.json',
    'chat_template.json',
    'special_tokens_map.json',
]


def read_all(folder):
    "All that a run reads of a model's folder"
    read_config(folder)
    shard_files(folder)
    config_like(folder, torch.float32)
    tok = load_tokenizer(folder)
    end_id(tok, folder)
    prompt_ids(tok, '12+30=')
    chat = ChatTemplate.of(folder)
    if chat:
        chat.render(families.CHAT)


@pytest.fixture(scope='module')
def sharded(moe, home):
    "Two shards, an index, and all files that may hold a template or a token"
    folder = home / 'sharded'
    shutil.copytree(moe, folder)
    AutoModelForCausalLM.from_pretrained(moe).save_pretrained(folder, max_shard_size='300KB')
    (folder / 'model.safetensors').unlink()
    template = (folder / 'chat_template.jinja').read_text()
    (folder / 'chat_template.jinja').unlink()
    (folder / 'chat_template.json').write_text(json.dumps(dict(chat_template=template)))
    (folder / 'special_tokens_map.json').write_text('{"eos_token": {"content": "<|im_end|>"}}')
    c = json.loads((folder / 'config.json').read_text())
    c['rope_parameters'] = families.YARN | dict(mscale=1.0, mscale_all_dim=0.5, beta_fast=32)
    (folder / 'config.json').write_text(json.dumps(c | dict(mlp_only_layers=[1])))
    read_all(folder)
    return folder


@pytest.mark.parametrize('name', FILES)
def test_a_value_of_another_kind_is_one_line(sharded, name):
    "Each value of each file, replaced by each other kind of JSON"
    path = sharded / name
    text = path.read_text()
    d, tried = json.loads(text), 0
    try:
        for at in places(d):
            for value in KINDS:
                path.write_text(json.dumps(changed(d, at, value)))
                tried += 1
                try:
                    read_all(sharded)
                except ValueError as e:
                    assert '\n' not in str(e) and len(str(e)) < 600, (at, value)
                except BaseException as e:
                    raise AssertionError(f'{name} {at} = {value!r}: {e!r}') from e
    finally:
        path.write_text(text)
    assert tried >= 2 * len(KINDS)


@pytest.mark.parametrize(
    'value', [7, [], ['a'], [7], [dict(name='a')], [dict(name='a', template=7)], {}]
)
def test_a_template_of_another_kind(sharded, value):
    path = sharded / 'tokenizer_config.json'
    text = path.read_text()
    path.write_text(json.dumps(json.loads(text) | dict(chat_template=value)))
    try:
        read_all(sharded)
        assert value in ([], {}), value
    except ValueError as e:
        assert 'chat_template' in str(e) and '\n' not in str(e)
    finally:
        path.write_text(text)


def test_a_tokenizer_of_another_kind(sharded):
    path = sharded / 'tokenizer.json'
    text = path.read_text()
    d = json.loads(text)
    try:
        for at in (p for p in places(d) if 'vocab' not in p):
            for value in KINDS:
                path.write_text(json.dumps(changed(d, at, value)))
                try:
                    prompt_ids(load_tokenizer(sharded), '12+30=')
                except ValueError as e:
                    assert '\n' not in str(e) and len(str(e)) < 600
    finally:
        path.write_text(text)


@pytest.mark.parametrize(
    'name', ['config.json', 'chat_template.json', 'model-00001-of-00002.safetensors']
)
def test_a_pipe_is_no_file(sharded, tmp_path, name):
    "It would wait for ever"
    folder = shutil.copytree(sharded, tmp_path / 'm')
    name = name if (folder / name).exists() else shard_files(folder)[0].name
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match='is no regular file'):
        read_all(folder)
    copy_companions(
        sharded,
        tmp_path / 'copied' if (tmp_path / 'copied').mkdir() else tmp_path / 'copied',
        torch.float32,
    )


@pytest.mark.parametrize(
    'text', ['{"lr": 1, "lr": 2}', '{"optim": {"lr": 1, "lr": 2}}', '{"lr": 1, "lr": 1}']
)
@pytest.mark.parametrize('kind', ['json', 'yaml'])
def test_a_key_that_comes_twice_is_refused(tmp_path, text, kind):
    (tmp_path / f'x.{kind}').write_text(text)
    with pytest.raises(ValueError, match="the key 'lr' comes twice"):
        read_data(tmp_path / f'x.{kind}')
    (tmp_path / 'y.yaml').write_text('a: &x {lr: 1}\nb: [*x, {lr: 2}]\n')
    assert read_data(tmp_path / 'y.yaml') == dict(a=dict(lr=1), b=[dict(lr=1), dict(lr=2)])
    with pytest.raises(ValueError, match='no regular file'):
        read_text('/dev/null')
