"""How much better a policy has become, measured on the same prompts."""

from __future__ import annotations

import statistics

from compassrl.runs.evaluate import EvalResult, mean_stderr


def gain(
    before: EvalResult,
    after: EvalResult,  # the same prompts
) -> tuple[float, float]:  # gain of avg@k and its standard error, paired by prompt
    "How much better, and how sure; Raises: ValueError"

    def rates(result: EvalResult) -> dict[str, float]:
        out: dict[str, list[bool]] = {}
        for s in result.samples:
            out.setdefault(s.prompt_id, []).append(s.correct)
        return {p: statistics.fmean(v) for p, v in out.items()}

    b, a = rates(before), rates(after)
    if alone := len(set(b) ^ set(a)):
        raise ValueError(f'{alone} prompts are in one evaluation only: compare the same prompts')
    return mean_stderr([a[p] - b[p] for p in b])
