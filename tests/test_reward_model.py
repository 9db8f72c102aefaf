"A scalar on a trunk: the last token of each text, whatever stands beside it; it learns an order"

import pytest
import torch

from compassrl.data.tokenizer import build_tokenizer, encode
from compassrl.model.policy import PolicyConfig
from compassrl.train.sft import SFTConfig
from course.reward_model import RewardModel, score_texts, train_reward_model

TOK = build_tokenizer()
SMALL = PolicyConfig(hidden_size=32, num_hidden_layers=1, num_experts=2, num_attention_heads=2)


def test_scores_one_by_one():
    model = RewardModel(SMALL).double()
    torch.nn.init.normal_(model.score)
    texts = ['a', 'a longer text', 'b!', 'a']
    for text, score in zip(texts, score_texts(model, texts, TOK)):
        ids = torch.tensor([encode(TOK, text)])
        hidden, _ = model.trunk(ids, torch.ones_like(ids, dtype=torch.bool))
        assert score.item() == pytest.approx((hidden[-1] * model.score).sum().item(), rel=1e-9)


def test_it_learns_who_is_larger():
    pairs = [(str(a), str(b), 0.5 + 0.5 * ((a > b) - (a < b))) for a in range(6) for b in range(6)]
    model, again = RewardModel(SMALL), RewardModel(SMALL)
    cfg = SFTConfig(steps=60, batch_size=24, lr=1e-2, warmup_steps=5)
    found = [[m['loss'] for m in train_reward_model(m_, pairs, cfg, TOK)] for m_ in (model, again)]
    assert found[0] == found[1] and found[0][-1] < 0.5 * found[0][0]
    assert (score_texts(model, '012345', TOK).diff() > 0).all()
