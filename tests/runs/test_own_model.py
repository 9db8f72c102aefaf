"A model of one's own goes in, is trained, and comes out with everything that it brought"

import json
import shutil
from dataclasses import replace

import pytest
from transformers import AutoTokenizer, pipeline

from compassrl.config import TrainConfig
from compassrl.data.prompts import DataConfig
from compassrl.data.tokenizer import response_text
from compassrl.model.hf_config import read_config
from compassrl.model.pretrained import from_pretrained, hf_weights
from compassrl.model.shape import PolicyConfig
from compassrl.records import Request
from compassrl.rollout.torch_engine import RolloutConfig, TorchRollout
from compassrl.runs.data import load, resolve
from compassrl.runs.run import start_run
from tests.support import families

SMALL = TrainConfig(
    steps=1,
    prompts_per_step=2,
    group_size=2,
    eval_k=1,
    data=DataConfig(num_train=4, num_heldout=2),
    rollout=RolloutConfig(max_tokens=8),
)


@pytest.fixture(scope='module')
def own(tmp_path_factory):
    "As published in bfloat16, with fields and files that nobody here knows"
    folder = tmp_path_factory.mktemp('own')
    families.original('Qwen3-MoE', folder).bfloat16().save_pretrained(folder)
    d = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps(d | dict(my_field=[1, 'two'])))
    (folder / 'LICENSE').write_text('theirs')
    (folder / 'README.md').write_text('a card of the model before training')
    return folder


def test_a_run_gives_back_what_it_was_given(own, tmp_path, capsys):
    run = start_run(replace(SMALL, init_from=str(own), run_dir=str(tmp_path / 'run')))
    assert SMALL.cold_start.steps, 'a preset has one'
    assert 'no cold start: the policy is that of init_from=' in capsys.readouterr().out
    assert 'No cold start: the policy began as' in (run / 'report.md').read_text()
    model = run / 'model'
    apart = {'model.safetensors', 'config.json', 'README.md'}
    names = {p.name for p in own.iterdir()} - apart
    assert {'tokenizer.json', 'chat_template.jinja', 'generation_config.json', 'LICENSE'} <= names
    assert {p.name for p in model.iterdir()} == names | apart - {'README.md'}
    for name in names:
        assert (model / name).read_bytes() == (own / name).read_bytes(), name
    was, now = (json.loads((f / 'config.json').read_text()) for f in (own, model))
    assert was['dtype'] == 'bfloat16' and now == was | dict(dtype='float32')
    assert now['my_field'] == [1, 'two'] and now['eos_token_id'] == [1, 2]
    assert from_pretrained(model).config == read_config(own)

    ask = pipeline('text-generation', model=str(model))
    answer = ask(families.CHAT, max_new_tokens=4, return_full_text=False)[0]['generated_text']
    assert isinstance(answer, str)
    tok = AutoTokenizer.from_pretrained(model)
    assert tok.pad_token_id == 0 and tok.eos_token_id == 1
    assert tok(['a', 'bcd ef'], padding=True).attention_mask[0][-1] == 0


@pytest.mark.parametrize(
    'config, generation, tokenizer, ends',
    [
        ([1, 2], [1, 2], '<|im_end|>', (1, 2)),
        (2, [1, 2], '<|im_end|>', (2, 1)),
        (2, None, '<|im_end|>', (2, 1)),  # the tokenizer knows more than the model
        (2, 2, None, (2,)),
        (None, None, {'content': '<|endoftext|>'}, (2,)),
    ],
)
def test_all_end_tokens_are_found(own, tmp_path, config, generation, tokenizer, ends):
    folder = shutil.copytree(own, tmp_path / 'm')
    values = [('config.json', config), ('generation_config.json', generation)]
    for name, ids in values:
        d = json.loads((folder / name).read_text()) | dict(eos_token_id=ids)
        (folder / name).write_text(json.dumps(d))
    d = json.loads((folder / 'tokenizer_config.json').read_text()) | dict(eos_token=tokenizer)
    (folder / 'tokenizer_config.json').write_text(json.dumps(d))
    assert load(resolve(replace(SMALL, init_from=str(folder)))).eos_id == ends


def test_a_model_without_an_end_is_refused(own, tmp_path):
    folder = shutil.copytree(own, tmp_path / 'm')
    for name in ('config.json', 'generation_config.json', 'tokenizer_config.json'):
        d = json.loads((folder / name).read_text())
        d = {k: v for k, v in d.items() if k not in ('eos_token_id', 'eos_token')}
        (folder / name).write_text(json.dumps(d))
    with pytest.raises(ValueError, match='names no token that ends a response'):
        load(resolve(replace(SMALL, init_from=str(folder))))


def test_any_of_several_end_tokens_stops(own):
    policy, tok = from_pretrained(own), load(resolve(replace(SMALL, init_from=str(own)))).tokenizer
    engine = TorchRollout(policy.config, 64)
    engine.load_weights(hf_weights(policy), 0)
    params = RolloutConfig(max_tokens=100).params(read_config(own).eos_ids)
    assert params.stop_ids == (1, 2)
    samples = list(engine.generate(Request('q', (5, 6, 7), i, i, params) for i in range(256)))
    ended = [s for s in samples if s.finish_reason == 'stop']
    assert {s.response_ids[-1] for s in ended} == {1, 2}
    assert all({1, 2}.isdisjoint(s.response_ids[:-1]) for s in samples)
    for s in ended:
        assert '<|' not in response_text(tok, s.response_ids, (1, 2)).replace(
            '<|pad|>', ''
        ).replace('<|im_start|>', '')


def test_a_shape_that_its_family_cannot_have_is_refused_before_anything_is_written(tmp_path):
    policy = PolicyConfig(family='mixtral', qk_norm='none', max_position_embeddings=128)
    folder = tmp_path / 'run'
    with pytest.raises(ValueError, match="intermediate_size=128: a model of family 'mixtral' has"):
        start_run(replace(SMALL, policy=policy, run_dir=str(folder)))
    assert not folder.exists()
