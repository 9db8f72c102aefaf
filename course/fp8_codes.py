"""The 8-bit format of a weight, written out both ways to check the cast of PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from compassrl.rollout.fp8 import largest


def decode_e4m3(
    codes: Tensor,  # uint8, any shape
) -> Tensor:  # fp32, exactly
    "What the 256 codes stand for"
    exponent, mantissa = (codes.int() >> 3) & 15, (codes & 7).float()
    size = torch.where(
        exponent == 0, mantissa / 8 * 2.0**-6, torch.ldexp(1 + mantissa / 8, exponent - 7)
    )
    size = size.masked_fill((codes & 127) == 127, torch.nan)
    return torch.where(codes >= 128, -size, size)


def encode_e4m3(
    x: Tensor,  # any shape
) -> Tensor:  # uint8
    "The nearest code, ties to the even one; +-448 beyond (infinities too), NaN stays NaN"
    x = x.float()
    size = x.abs().clamp(max=largest)
    exponent = size.clamp(min=2.0**-6).frexp().exponent - 1  # below 2^-6 the steps get no finer
    code = 8 * (exponent + 6) + torch.ldexp(size, 3 - exponent).round().int()
    return (code.masked_fill(x.isnan(), 127) + 128 * x.signbit()).to(torch.uint8)
