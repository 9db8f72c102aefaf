"A judge in a folder: its replies are what the policy itself would write, token by token"

import dataclasses
import json

import pytest
import torch

from compassrl.data.tokenizer import EOS_ID, build_tokenizer, encode, response_text, save_tokenizer
from compassrl.judges.genrm import GenRMConfig, Question
from compassrl.judges.genrm_client import JUDGE_PROMPT, GenRM, LocalGenRM, check_genrm, open_genrm
from compassrl.judges.genrm_judge import GenRMJudge, make_judge
from compassrl.judges.serial import RewardConfig
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import from_pretrained, save_pretrained
from compassrl.records import Prompt, Sample
from compassrl.train.sft import SFTConfig, cold_start
from compassrl.train.torch_train import OptimConfig, TorchTrain
from tests.runs.test_run import cli

TOK = build_tokenizer()
SHAPE = PolicyConfig(hidden_size=16, num_hidden_layers=1, num_experts=2, max_position_embeddings=48)
ASKED = [Question('p', a, b) for a in ('', 'a', 'xyz') for b in ('q', 'a longer one')]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "A judge that ends its reply now and then"
    folder = tmp_path_factory.mktemp('judge')
    policy = Policy(SHAPE, 1)
    with torch.no_grad():
        policy.head *= 20
    save_pretrained(policy, folder)
    save_tokenizer(TOK, folder)
    (folder / JUDGE_PROMPT).write_text('{prompt}|{first}|{second}=')
    return folder


def by_hand(folder, text, most):
    "Greedy, the whole sequence again for each token, in fp64; None where it is cut off"
    policy, ids, out = from_pretrained(folder, torch.float64), encode(TOK, text), []
    while len(out) < most:
        row = torch.tensor([ids + out])
        hidden, _ = policy(row, torch.ones_like(row, dtype=torch.bool))
        out.append(int(policy.logits(hidden)[-1].argmax()))
        if out[-1] == EOS_ID:
            return response_text(TOK, out)
    return None


def test_replies_are_what_the_policy_writes(folder):
    "Alone, together, in any order, with few slots, from a second engine: the same"
    cfg = GenRMConfig(model=str(folder), max_tokens=16)
    replies = LocalGenRM(cfg)(ASKED)
    for q, r in zip(ASKED, replies):
        text = f'{q.prompt}|{q.first}|{q.second}='
        want = by_hand(folder, text, min(16, 48 - len(text)))
        assert (r.text, r.status) == ((want, 'ok') if want is not None else ('', 'failed'))
    assert {r.status for r in replies} == {'ok', 'failed'}, 'the test needs both'
    few = LocalGenRM(GenRMConfig(model=str(folder), max_tokens=16, concurrency=2))
    assert few(ASKED[::-1]) == replies[::-1] == [r for q in ASKED[::-1] for r in few([q])]


def test_what_is_too_long_is_a_failed_reply(folder):
    ask = LocalGenRM(GenRMConfig(model=str(folder)))
    long, ok = ask([Question('p' * 60, '', ''), ASKED[0]])
    assert (long.status, long.detail) == ('failed', '63 tokens leave no room in 48')
    assert ok == ask([ASKED[0]])[0]


def test_the_prompt_of_a_file_comes_first(folder, tmp_path):
    file = tmp_path / 'mine.txt'
    file.write_text('{second}{first}{prompt}')
    mine = LocalGenRM(GenRMConfig(model=str(folder), prompt_file=str(file), max_tokens=6))
    for q, r in zip(ASKED, mine(ASKED)):
        assert r.text == (by_hand(folder, q.second + q.first + q.prompt, 6) or '')
    file.write_text('{first} or {second}?')
    with pytest.raises(ValueError, match='has the fields'):
        LocalGenRM(GenRMConfig(model=str(folder), prompt_file=str(file)))


def test_a_folder_or_a_name(folder, tmp_path):
    assert isinstance(open_genrm(GenRMConfig(model=str(folder))), LocalGenRM)
    pytest.importorskip('openai')
    assert isinstance(open_genrm(GenRMConfig(model='org/judge')), GenRM)
    for path in ('./judge', '/no/such/judge', '~/no-such-judge'):
        with pytest.raises(ValueError, match=f"genrm.model='{path}': there is no such folder"):
            check_genrm(GenRMConfig(model=path))
    with pytest.raises(ValueError):  # nothing lies in it
        check_genrm(GenRMConfig(model=str(tmp_path)))


def test_a_local_judge_waits_for_the_rollout(folder):
    "`start` asks nothing; `settle` asks all in one batch"
    prompts = [Prompt('p', 'd', 'p', [1], 'q', 'genrm')]
    cfg = RewardConfig(genrm=GenRMConfig(model=str(folder), max_tokens=16))
    judge = make_judge(prompts, TOK, EOS_ID, cfg).judges[0]
    batches, ask = [], judge.ask
    judge.ask = lambda questions: batches.append(len(questions)) or ask(questions)
    texts = ['', 'a', 'xyz']
    samples = [
        Sample('p', i, [1], encode(TOK, t) + [EOS_ID], torch.zeros(1), None, None, 'stop', 0)
        for i, t in enumerate(texts)
    ]
    for s in samples:
        judge.start(s)
    assert isinstance(judge, GenRMJudge) and not batches
    judge.settle(samples)
    judge.close()
    assert batches == [6] and all(s.verdict for s in samples)


def always_tie(folder):
    "A judge that has learned one word"
    shape = dataclasses.replace(SHAPE, max_position_embeddings=128)
    policy = Policy(shape)
    asked = [Prompt(str(i), 'd', '', encode(TOK, f'{i}='), 'Tie', 'exact', 'Tie') for i in range(9)]
    engine = TorchTrain(policy, OptimConfig(lr=1e-2), replay='off')
    for _ in cold_start(engine, asked, SFTConfig(steps=60, batch_size=9, lr=1e-2), TOK):
        pass
    save_pretrained(policy, folder)
    save_tokenizer(TOK, folder)
    (folder / JUDGE_PROMPT).write_text('{prompt}|{first}|{second}=')


def test_a_run_with_a_judge_in_a_folder(tmp_path):
    "Shop questions, judged in the trainer's process"
    (tmp_path / 'judge').mkdir()
    always_tie(tmp_path / 'judge')
    flags = '--data.domains shop --data.difficulty 0 --data.num-heldout 4 --steps 2'
    more = ['--rewards.genrm.model', tmp_path / 'judge', '--run-dir', tmp_path / 'run']
    r = cli('train', 'smoke-cpu', *flags.split(), *more)
    assert r.returncode == 0, r.stderr[-2000:]
    rows = [json.loads(s) for s in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()]
    for row in rows:
        assert row['genrm_calls'] > 0 and row['genrm_tie_frac'] == 1 and row['reward_mean'] == 0.5
