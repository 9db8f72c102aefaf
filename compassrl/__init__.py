"""RL for mixture-of-experts language models. What people import daily stands here, lazily: a name
imports its module when it is first used, so `import compassrl` alone is quick."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = '0.2.0'

_modules = {  # name -> where it is
    'AdvantageConfig': 'algo.algo_settings',
    'Batch': 'records',
    'DataConfig': 'data.data_settings',
    'EspoConfig': 'algo.algo_settings',
    'LossConfig': 'algo.algo_settings',
    'OptimConfig': 'train.train_settings',
    'Policy': 'model.policy',
    'PolicyConfig': 'model.shape',
    'PolicyLoss': 'algo.losses',
    'Prompt': 'records',
    'Request': 'records',
    'RewardConfig': 'judges.reward_settings',
    'RolloutConfig': 'rollout.rollout_settings',
    'RolloutEngine': 'records',
    'SFTConfig': 'train.train_settings',
    'Sample': 'records',
    'SamplingParams': 'records',
    'SerialJudge': 'judges.serial',
    'TorchRollout': 'rollout.torch_rollout',
    'TorchTrain': 'train.torch_train',
    'TrainConfig': 'config',
    'TrainEngine': 'records',
    'Verdict': 'records',
    'build_tokenizer': 'data.tokenizer',
    'collate': 'records',
    'evaluate': 'runs.evaluate',
    'fit': 'loop',
    'from_pretrained': 'model.pretrained',
    'group_advantages': 'algo.advantages',
    'load_prompts': 'data.loading',
    'load_tokenizer': 'data.tokenizer',
    'make_prompts': 'data.prompts',
    'policy_loss': 'algo.loss_registry',
    'presets': 'runs.cli',
    'read_run_config': 'config',
    'requests_of': 'rollout.requests',
    'resume_run': 'runs.run',
    'save_pretrained': 'model.pretrained',
    'start_run': 'runs.run',
    'task_family': 'data.tasks',
    'train_policy': 'runs.objects',
    'verifier': 'data.tasks',
    'verify': 'data.tasks',
}
_parts = (
    'algo config data experience judges launch loop model plan records rollout runs sandbox '
    'settings train'
)
_parts = frozenset(_parts.split())

if TYPE_CHECKING:  # the same for type checkers
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


def __getattr__(name: str) -> Any:
    if name in _modules:
        return getattr(import_module(f'{__name__}.{_modules[name]}'), name)
    if name in _parts:
        return import_module(f'{__name__}.{name}')
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
    return sorted({*globals(), *_modules, *_parts})
