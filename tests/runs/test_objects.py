"Objects of a program: a policy, rows and a function become a run, and a loop of one's own is short"

import json
from dataclasses import replace

import pytest
import torch

from compassrl.own_code import own_module
from compassrl.runs.cli import main
from compassrl.runs.objects import Trained, _place_of
from tests.runs.test_own_data_and_reward import gsm8k, problem, save_model

SMALL = dict(preset='smoke-cpu', steps=1, prompts_per_step=4, rollout=dict(max_tokens=6))


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp('given') / 'model'
    save_model(folder, [problem(i)[0] for i in range(40)])
    return folder


def test_a_dataset_and_a_lambda_train_a_model(model, tmp_path, capsys):
    "Rows keep their columns; the command says why it cannot go on with such a run"
    import datasets

    from compassrl import train_policy

    rows = datasets.Dataset.from_list([gsm8k(i) | dict(want=i % 7) for i in range(40)])
    seen = []
    out = train_policy(
        model,
        rows,
        lambda text, want: seen.append(want) or float(len(text) % 7 == want),
        eval_prompts=[gsm8k(50), gsm8k(51)],
        run_dir=str(tmp_path / 'run'),
        **SMALL,
    )
    assert isinstance(out, Trained) and out.folder == tmp_path / 'run' and out.report['steps'] == 1
    assert set(seen) <= {*range(7), None} and len(set(seen)) > 2
    before = json.loads((out.folder / 'eval_before.json').read_text())
    assert before['name'] == 'eval' and before['num_prompts'] == 2
    policy = torch.cat([p.flatten() for p in out.policy.parameters()])
    assert policy.isfinite().all()
    assert '`compassrl resume` cannot find it' in capsys.readouterr().out
    config = json.loads((out.folder / 'config.json').read_text())
    assert config['cold_start']['steps'] == 0, 'it starts from a checkpoint'
    assert config['data']['path'] == str(tmp_path / 'run/given/train.jsonl')


def test_a_function_that_no_process_finds_is_named(model, tmp_path, monkeypatch):
    import sys

    place = _place_of(lambda text: 1.0)
    monkeypatch.delitem(sys.modules, place.partition(':')[0])  # another process has none
    with pytest.raises(ValueError, match="No module named 'given_in_python'"):
        own_module(place, 'rewards.function')


def test_a_function_of_a_module_is_named_by_it():
    assert _place_of(gsm8k) == 'tests.runs.test_own_data_and_reward:gsm8k'
    assert _place_of('maths') == 'maths'


@pytest.mark.parametrize(
    'more, words',
    [
        (dict(preset='huge'), "preset='huge'"),
        (dict(prompts=[dict(prompt=object())]), 'cannot be written as JSON'),
        (dict(stepz=3), "'stepz' does not exist"),
        (dict(optim=dict(rate=3)), "'optim.rate' does not exist"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(model, tmp_path, more, words):
    from compassrl import train_policy

    given = dict(prompts=[gsm8k(0)], run_dir=str(tmp_path / 'run')) | SMALL | more
    with pytest.raises(ValueError, match=words):
        train_policy(model, **given)


def test_a_loop_of_ones_own_needs_one_import(model):
    "Ask, sample, judge, compare, update, hand over: with names of the package alone"
    from compassrl import (
        LossConfig,
        OptimConfig,
        PolicyLoss,
        Request,
        SamplingParams,
        TorchRollout,
        TorchTrain,
        Verdict,
        collate,
        from_pretrained,
        group_advantages,
        load_tokenizer,
    )

    policy, tokenizer = from_pretrained(model), load_tokenizer(model)
    rollout, engine = TorchRollout(policy.config), TorchTrain(policy, OptimConfig(lr=1e-3))
    loss, params = PolicyLoss(LossConfig('grpo')), SamplingParams(max_tokens=12, stop_ids=(2,))
    prompts = ['Ann has 3 pears and buys', 'Bo has 4 figs and buys']
    for step in range(2):
        rollout.load_weights(engine.weights(), step)
        asked = [
            Request(p, tuple(tokenizer.encode(p).ids), i, seed=100 * step + i, params=params)
            for p in prompts
            for i in range(4)
        ]
        samples = sorted(rollout.generate(asked), key=lambda s: (s.prompt_id, s.index))
        for s in samples:
            reward = float(len(tokenizer.decode(s.response_ids)))
            s.verdict = Verdict(reward, correct=reward > 20)
        batch = collate(samples)
        rewards = torch.tensor([s.verdict.reward for s in samples])
        advantages = group_advantages(rewards, batch.group)[:, None] * batch.response_mask
        batch = replace(batch, advantages=advantages, **engine.score(batch))
        metrics, _ = engine.update(batch, loss)
        assert metrics['grad_norm'] > 0
    assert len(samples) == 8


def test_the_folder_of_another_run_is_not_written_to(model, tmp_path):
    from compassrl import train_policy

    (tmp_path / 'config.json').write_text('{}')
    with pytest.raises(ValueError, match='it holds a run'):
        train_policy(model, [gsm8k(0)], run_dir=str(tmp_path), **SMALL)
    assert [p.name for p in tmp_path.iterdir()] == ['config.json']
    with pytest.raises(SystemExit):
        main(['resume', str(tmp_path / 'nothing')])
