"What a router of each kind gives to experts that another engine has chosen: the formula alone"

from typing import Literal, get_args

import torch
from torch import Tensor

# Softmax of all experts, then top-k; softmax of the top-k alone; sigmoid of each score
Score = Literal['softmax', 'topk_softmax', 'sigmoid']


def replay_gates(
    logits: Tensor,  # [N, E] of the live router
    idx: Tensor,  # [N, K] int64, the experts to use, whoever chose them
    score: Score = 'softmax',
    norm: bool = True,  # gates of a token sum to 1? ('topk_softmax' always)
    scale: float = 1.0,  # Factor of the gates, `routed_scaling_factor` of DeepSeek-V3
) -> Tensor:  # [N, K] fp32, or fp64 if given that
    "Raises ValueError for a kind that it does not know"
    if score not in get_args(Score):
        raise ValueError(f'{score=}: use one of {get_args(Score)}')
    logits = logits.to(torch.promote_types(logits.dtype, torch.float))
    chosen = logits.gather(-1, idx)
    if score == 'sigmoid':
        gates = chosen.sigmoid()
        if norm:
            gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
    elif norm or score == 'topk_softmax':
        gates = chosen.softmax(-1)
    else:
        gates = (chosen - logits.logsumexp(-1, keepdim=True)).exp()
    return gates * scale
