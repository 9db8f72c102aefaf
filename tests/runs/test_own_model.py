"A model of one's own goes in, is trained, and comes out with everything that it brought"

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from compassrl.config import TrainConfig
from compassrl.data.prompts import DataConfig
from compassrl.data.tokenizer import response_text
from compassrl.loop import Stop
from compassrl.model.hf_config import read_config
from compassrl.model.pretrained import from_pretrained, hf_weights
from compassrl.model.shape import PolicyConfig
from compassrl.records import Request
from compassrl.rollout.torch_rollout import RolloutConfig, TorchRollout
from compassrl.runs.cli import parse_train
from compassrl.runs.cold_start import start_policy
from compassrl.runs.objects import push_to_hub
from compassrl.runs.presets import tiny_cpu
from compassrl.runs.run import start_run
from compassrl.runs.run_data import load, resolve
from compassrl.train.sft import SFTConfig
from tests.support import families
from tests.support.stops import StopAfter

SMALL = TrainConfig(
    steps=1,
    prompts_per_step=2,
    group_size=2,
    eval_k=1,
    data=DataConfig(num_train=4, num_heldout=2),
    cold_start=SFTConfig(steps=0),
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


def test_a_template_that_writes_the_date_asks_the_same_tomorrow(own, tmp_path):
    "The day is a setting of the run, so it comes back with its config"
    folder = shutil.copytree(own, tmp_path / 'm')
    template = "{{ strftime_now('%d %b %Y') }} " + families.TEMPLATE
    (folder / 'chat_template.jinja').write_text(template)
    data = replace(SMALL.data, template_date='2024-07-26', path=str(tmp_path / 'x.jsonl'))
    rows = [dict(prompt=[dict(role='user', content=f'{i}+1=')], answer='1') for i in range(60)]
    (tmp_path / 'x.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    cfg = replace(SMALL, init_from=str(folder), data=data)
    assert load(resolve(cfg)).train[0].text.startswith('26 Jul 2024 ')
    today = resolve(replace(cfg, data=replace(data, template_date=''))).data.template_date
    assert re.fullmatch(r'\d{4}-\d\d-\d\d', today)
    plain = replace(SMALL, init_from=str(own))
    assert resolve(plain).data.template_date == ''  # nothing reads it


def test_a_tokenizer_larger_than_the_embedding(own, tmp_path):
    folder = shutil.copytree(own, tmp_path / 'm')
    tok = AutoTokenizer.from_pretrained(folder)
    tok.add_tokens([f'<{i}>' for i in range(40)])
    tok.save_pretrained(folder)
    num = max(tok.get_vocab().values()) + 1
    with pytest.raises(ValueError, match=rf'embedding 320 rows.*resize_token_embeddings\({num}\)'):
        load(resolve(replace(SMALL, init_from=str(folder))))
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(num)
    model.save_pretrained(folder)
    load(resolve(replace(SMALL, init_from=str(folder))))


def test_a_name_of_the_hub_is_its_folder_in_the_cache(own, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path))
    with pytest.raises(ValueError, match='is no folder.*`hf download me/mine`'):
        resolve(replace(SMALL, init_from='me/mine'))
    repo = tmp_path / 'models--me--mine'
    (repo / 'refs').mkdir(parents=True)
    (repo / 'refs' / 'main').write_text('0' * 40)
    snapshot = shutil.copytree(own, repo / 'snapshots' / ('0' * 40))
    cfg = resolve(replace(SMALL, init_from='me/mine'))
    assert cfg.init_from == str(snapshot) and cfg.policy == read_config(own)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(own, tmp_path / 'me' / 'mine')
    assert resolve(replace(SMALL, init_from='me/mine')).init_from == 'me/mine'  # a folder wins
    with pytest.raises(ValueError, match='is not uploaded as me/mine .*: log in by'):
        push_to_hub(own, 'me/mine')


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


# ---- a cold start from it

TAUGHT = replace(SMALL, cold_start=SFTConfig(steps=3, batch_size=4, warmup_steps=0, lr=1e-4))


def theirs(model, tok, prompts):
    "What transformers says the loss is, one row at a time, padded nowhere"
    total = num = 0
    for p in prompts:
        shown = tok.encode(p.solution, add_special_tokens=False).ids + [
            tok.token_to_id('<|im_end|>')
        ]
        ids = torch.tensor([p.token_ids + shown])
        labels = ids.masked_fill(torch.arange(ids.shape[1]) < len(p.token_ids), -100)
        with torch.no_grad():
            total += model(input_ids=ids, labels=labels).loss.item() * len(shown)
        num += len(shown)
    return total / num


def told(folder):
    return [json.loads(line) for line in (folder / 'cold_start.jsonl').open()]


def test_steps_that_are_named_train_the_checkpoint_before_rl(own, tmp_path, capsys):
    "The first loss is that of the checkpoint; RL and its reference begin where the last one ended"
    cfg = replace(TAUGHT, steps=0, init_from=str(own), run_dir=str(tmp_path / 'run'))
    run = start_run(cfg)
    assert f'cold start from {own}: 3 steps, learning rate up to 0.0001' in capsys.readouterr().out
    assert f'Cold start from `{own.name}`: 3 steps' in (run / 'report.md').read_text()
    data = load(resolve(cfg))
    model = AutoModelForCausalLM.from_pretrained(own, dtype=torch.float32)
    losses = [m['loss'] for m in told(run)]
    assert losses[0] == pytest.approx(theirs(model, data.tokenizer, data.train), rel=1e-4)
    model = AutoModelForCausalLM.from_pretrained(run / 'start', dtype=torch.float32)
    assert theirs(model, data.tokenizer, data.train) < losses[-1] < losses[0]
    # nothing was trained after it, so what comes out is what RL would have started from
    start, end = (load_file(run / f / 'model.safetensors') for f in ('start', 'model'))
    assert all(start[k].equal(end[k]) for k in start) and start.keys() == end.keys()
    for f in ('start', 'model'):
        for name in ('tokenizer.json', 'chat_template.jinja', 'LICENSE'):
            assert (run / f / name).read_bytes() == (own / name).read_bytes(), name
    before, after = (json.loads((run / f'eval_{w}.json').read_text()) for w in ('before', 'after'))
    assert after['avg'] == before['avg'] and (run / 'metrics.jsonl').read_text() == ''


def test_it_goes_on_where_it_was_stopped(own, tmp_path):
    cfg = resolve(replace(TAUGHT, init_from=str(own)))
    data, once, twice = load(cfg), tmp_path / 'once', tmp_path / 'twice'
    for folder in (once, twice):
        folder.mkdir()
    start_policy(cfg, data, once, StopAfter(99))
    with pytest.raises(Stop):
        start_policy(cfg, data, twice, StopAfter(3))
    assert 0 < len(told(twice)) < 3 and not (twice / 'start').exists()
    start_policy(cfg, data, twice, StopAfter(99))
    for name in ('cold_start.jsonl', 'start/model.safetensors', 'start/config.json'):
        assert (once / name).read_bytes() == (twice / name).read_bytes(), name


def test_a_preset_teaches_its_new_policy_a_checkpoint_only_where_steps_are_named(own, tmp_path):
    steps, here = tiny_cpu().cold_start.steps, str(own)
    file, silent = tmp_path / 'c.yaml', tmp_path / 's.yaml'
    file.write_text(f'init_from: {here}\ncold_start: {{steps: 7}}\n')
    silent.write_text(f'init_from: {here}\ncold_start: {{lr: 0.5}}\n')
    for words, want in {
        ('tiny-cpu',): steps,
        ('tiny-cpu', '--init-from', here): 0,
        ('tiny-cpu', f'--init-from={here}', '--cold-start.lr', '1e-5'): 0,
        ('tiny-cpu', '--init-from', here, '--cold-start.steps', str(steps)): steps,
        ('tiny-cpu', '--init-from', here, '--cold_start.steps=5'): 5,
        (str(file),): 7,
        (str(silent),): 0,
        (str(silent), '--cold-start.steps', '9'): 9,
    }.items():
        assert parse_train([*words]).cold_start.steps == want, words


def test_solutions_that_are_missing_or_too_long_are_refused_before_anything_is_written(
    own, tmp_path
):
    file, limit = tmp_path / 'd.jsonl', read_config(own).max_position_embeddings
    cfg = replace(TAUGHT, init_from=str(own), run_dir=str(tmp_path / 'run'))
    for solution, says in {
        None: 'No row of .* has a solution, which the cold start needs: --cold-start.steps 0',
        'a ' * limit: f'its solution have .* tokens, which exceeds the context of {limit}',
    }.items():
        rows = (dict(prompt=f'{i}+1=', answer=str(i + 1), solution=solution) for i in range(9))
        file.write_text('\n'.join(map(json.dumps, rows)))
        data = DataConfig(path=str(file), num_heldout=2)
        with pytest.raises(ValueError, match=says):
            start_run(replace(cfg, data=data))
    assert not (tmp_path / 'run').exists()


def test_a_shape_that_its_family_cannot_have_is_refused_before_anything_is_written(tmp_path):
    policy = PolicyConfig(family='mixtral', qk_norm='none', max_position_embeddings=128)
    folder = tmp_path / 'run'
    with pytest.raises(ValueError, match="intermediate_size=128: a model of family 'mixtral' has"):
        start_run(replace(SMALL, policy=policy, run_dir=str(folder)))
    assert not folder.exists()
