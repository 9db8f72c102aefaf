"The policy of the study of turns: what it is trained on is what its rollout saw, through a window"

import sys

import pytest
import torch

from compassrl.data.tokenizer import EOS_ID, build_tokenizer, encode
from compassrl.data.tools import ToolConfig
from compassrl.model.policy import PolicyConfig
from compassrl.model.pretrained import hf_weights
from compassrl.records import Request, SamplingParams, collate, derive_seed
from compassrl.rollout.partial import drawn_mask
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.train.torch_train import response_log_probs
from tests.support import ROOT

sys.path.insert(0, str(ROOT / 'benchmarks' / 'studies'))
import _views as views

TOK = build_tokenizer()
ROOM = 60  # tokens of a response, with what it reads


@pytest.fixture(scope='module')
def policy():
    size = dict(hidden_size=32, num_hidden_layers=2, head_dim=8, mlp_only_layers=(0, 1))
    cfg = PolicyConfig(vocab_size=TOK.get_vocab_size(), **size)
    return views.ViewedPolicy(cfg, 0, TOK)


def watcher(name):
    return views.Watcher(ToolConfig('calculator'), TOK, views.VIEWS[name])


def sampled(policy, name, num=32):
    "Responses of a view to questions of one to four steps"
    params = SamplingParams(ROOM, stop_ids=(EOS_ID,))
    asked = [encode(TOK, f'{1 + i % 4}{chr(97 + i % 26)}bc:') for i in range(num)]
    rows = [Request(f'p{i}', tuple(x), 0, derive_seed(i), params) for i, x in enumerate(asked)]
    rollout = TorchRollout(policy.config, 8)
    rollout.load_weights(hf_weights(policy), 0)
    return list(views.Viewed(rollout, watcher(name)).generate(rows))


def differences(policy, samples, window):
    "Of the log-probs of drawn tokens, trainer against rollout; and is the token after a call?"
    policy.window, batch = window, collate(samples)
    with torch.no_grad():
        log_probs, _ = response_log_probs(policy, batch)
    stop, found = watcher('noise').stop_ids[0], []
    for i, s in enumerate(samples):
        a = len(s.prompt_ids)
        new = log_probs[i, a : a + len(s.response_ids)]
        for k, mine in enumerate(drawn_mask(s).tolist()):
            if mine:
                later = stop in s.response_ids[:k]
                found.append((abs(new[k] - s.rollout_log_probs[k]).item(), later))
    return found


@pytest.mark.parametrize('name', views.VIEWS)
def test_the_trainer_sees_what_the_rollout_saw(policy, name):
    window = views.VIEWS[name].window
    samples = sampled(policy, name)
    found = differences(policy, samples, window)
    assert sum(later for _, later in found) > 100, 'hardly a turn after a call'
    assert max(x for x, _ in found) < 1e-5
    other = differences(policy, samples, not window)
    assert max(x for x, later in other if not later) < 1e-5, 'the first turn sees it all'
    assert max(x for x, later in other if later) > 1e-2, 'another view is another policy'


def read(name, question='3abc:'):
    "What the view writes after the first, second ... call"
    w = watcher(name)
    return [
        TOK.decode(w.written(question, n, encode(TOK, '=xyz;'))).replace(' ', '')
        for n in (1, 2, 3, 4)
    ]


def test_only_what_the_number_says_differs():
    assert read('plain') == ['=xyz;'] * 4
    assert read('left') == read('left_window') == ['=2xyz;', '=1xyz;', '=0xyz;', '=0xyz;']
    noise = read('noise')
    assert noise == read('noise_window') and len({len(x) for x in noise + read('left')}) == 1
    many = [read('noise', f'3{a}bc:')[0] for a in 'abcdefghijklmnopqrstuvwxyz']
    assert {x[1] for x in many} == set('0123')


@pytest.mark.parametrize('name', views.VIEWS)
def test_a_turn_is_asked_with_what_is_in_view(name):
    w = watcher(name)
    turns = views.ViewedTurns((), w)
    params = SamplingParams(ROOM)
    r = Request('p', tuple(encode(TOK, '3abc:')), 0, 1, params)
    parts = ['<abc>', '=2xyz;', '<xyz>', '=1uvw;']
    ids = [encode(TOK, x) for x in parts]
    own = [x.startswith('<') for x, part in zip(parts, ids) for _ in part]
    new = turns.turn(r, sum(ids, []), own)
    want = '3abc:=1uvw;' if views.VIEWS[name].window else '3abc:' + ''.join(parts)
    assert list(new.prompt_ids) == encode(TOK, want)
    assert new.params.max_tokens == ROOM - sum(map(len, ids))
