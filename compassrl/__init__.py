"""RL for mixture-of-experts language models. What people import daily stands here, lazily: a name
imports its module when it is first used, so `import compassrl` alone is quick."""

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = '0.2.0'

_parts = (
    'algo config data experience judges launch loop model plan records rollout runs sandbox '
    'settings train'
)
_parts = frozenset(_parts.split())

if TYPE_CHECKING:  # the one list: type checkers read it, and `_modules` does
    from .algo.advantages import group_advantages as group_advantages
    from .algo.algo_settings import AdvantageConfig as AdvantageConfig
    from .algo.algo_settings import EspoConfig as EspoConfig
    from .algo.algo_settings import LossConfig as LossConfig
    from .algo.loss_registry import policy_loss as policy_loss
    from .algo.losses import PolicyLoss as PolicyLoss
    from .config import TrainConfig as TrainConfig
    from .config import read_run_config as read_run_config
    from .data.data_settings import DataConfig as DataConfig
    from .data.loading import load_prompts as load_prompts
    from .data.prompts import make_prompts as make_prompts
    from .data.tasks import task_family as task_family
    from .data.tasks import verifier as verifier
    from .data.tasks import verify as verify
    from .data.tokenizer import build_tokenizer as build_tokenizer
    from .data.tokenizer import load_tokenizer as load_tokenizer
    from .judges.reward_settings import RewardConfig as RewardConfig
    from .judges.serial import SerialJudge as SerialJudge
    from .loop import fit as fit
    from .model.policy import Policy as Policy
    from .model.pretrained import from_pretrained as from_pretrained
    from .model.pretrained import save_pretrained as save_pretrained
    from .model.shape import PolicyConfig as PolicyConfig
    from .records import Batch as Batch
    from .records import Prompt as Prompt
    from .records import Request as Request
    from .records import RolloutEngine as RolloutEngine
    from .records import Sample as Sample
    from .records import SamplingParams as SamplingParams
    from .records import TrainEngine as TrainEngine
    from .records import Verdict as Verdict
    from .records import collate as collate
    from .rollout.requests import requests_of as requests_of
    from .rollout.rollout_settings import RolloutConfig as RolloutConfig
    from .rollout.torch_rollout import TorchRollout as TorchRollout
    from .runs.cli import presets as presets
    from .runs.evaluate import evaluate as evaluate
    from .runs.objects import train_policy as train_policy
    from .runs.run import resume_run as resume_run
    from .runs.run import start_run as start_run
    from .train.torch_train import TorchTrain as TorchTrain
    from .train.train_settings import OptimConfig as OptimConfig
    from .train.train_settings import SFTConfig as SFTConfig


@cache
def _modules() -> dict[str, str]:
    "Name -> where it is"
    body = ast.parse(Path(__file__).read_text()).body
    imports: Any = next(n for n in body if isinstance(n, ast.If)).body
    return {a.name: n.module for n in imports for a in n.names}


def __getattr__(name: str) -> Any:
    if module := _modules().get(name):
        return getattr(import_module(f'{__name__}.{module}'), name)
    if name in _parts:
        return import_module(f'{__name__}.{name}')
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
    return sorted({*globals(), *_modules(), *_parts})
