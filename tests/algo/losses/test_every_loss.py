"Laws of every loss of the folder algo/losses; a loss is put under them by its line in LOSSES"

import pickle

import pytest

from compassrl.algo.algo_settings import LossConfig
from compassrl.algo.loss_registry import policy_losses
from compassrl.algo.losses import PolicyLoss
from compassrl.algo.losses.espo import EspoStep
from tests.support import loss_laws as laws

# loss -> laws that it breaks by design, each with its reason; `own`: settings of its own
LOSSES = {
    'grpo': {},
    'dr_grpo': {},
    'dapo': {},
    'gspo': {},
    'cispo': {},
    'gmpo': {},
    'espo': {'own': EspoStep(vocab_size=50), 'law_first_update': 'weighs tokens by their groups'},
}
PAIRS = [(name, law) for name in LOSSES for law in laws.EVERY]


def test_every_loss_has_its_line():
    assert set(LOSSES) == set(policy_losses), 'give the loss a line in LOSSES'


@pytest.mark.parametrize('name, law', PAIRS, ids=lambda x: getattr(x, '__name__', x))
def test_law(name, law):
    exceptions = LOSSES[name]

    def make(cfg):
        return PolicyLoss(cfg, exceptions.get('own'))

    if law.__name__ not in exceptions:
        law(make, name)
        return
    with pytest.raises(AssertionError):  # an exception that is none any more
        law(make, name)


@pytest.mark.parametrize('name', LOSSES)
def test_ranks_get_the_loss_of_rank_0(name):
    "It travels by its name, with its settings; the function stays the one object of its module"
    mine = PolicyLoss(LossConfig(name, max_response_tokens=8), LOSSES[name].get('own'))
    theirs = pickle.loads(pickle.dumps(mine))
    assert theirs.loss is mine.loss and (theirs.cfg, theirs.own) == (mine.cfg, mine.own)
