"""Coefficients of a merge that are learned: W = base + sum of c * (child - base), and the gradient
of a loss reaches each c.

From labels: the mean loss of written solutions over two kinds of prompt. Without labels: the mean
entropy of the next token in the merged model's own answers. AdaMerging (arXiv 2310.02575) does the
latter with classifiers, with one coefficient per child or one per child and layer.
"""

import time
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call

from compassrl.data.tokenizer import build_tokenizer
from compassrl.experience import in_order
from compassrl.model.policy import Policy
from compassrl.model.pretrained import hf_weights
from compassrl.records import collate, derive_seed, select
from compassrl.rollout.requests import requests_of
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.runs.presets import tiny_cpu
from compassrl.train.sft import solution_batch
from compassrl.train.torch_train import packed_states, score_response


class Scores(nn.Module):
    "What a policy says of given responses"

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, batch, what):
        "Per response token, in nats: mean loss, or mean entropy of the choice"
        hidden, _ = packed_states(self.policy, batch, replay=False)
        if what == 'loss':
            log_probs, _ = score_response(self.policy, hidden, batch)
            return -log_probs.sum() / batch.response_mask.sum()
        at = batch.response_mask[batch.token_mask].nonzero()[:, 0]
        log_probs = self.policy.logits(hidden.index_select(0, at - 1)).log_softmax(-1)
        return -(log_probs.exp() * log_probs).sum(-1).mean()


class Blend:
    "A base and its children; a tensor is one of the library's: all experts of a layer are one"

    def __init__(self, base, children):
        self.scores = Scores(base)
        self.base = {n: p.detach().clone() for n, p in base.named_parameters()}
        rows = [dict(child.named_parameters()) for child in children]
        self.changes = {
            n: torch.stack([row[n].detach() - b for row in rows]) for n, b in self.base.items()
        }

    def weights(self, c):  # [M], or [M, tensors]
        c = c[:, None].expand(-1, len(self.base)) if c.dim() == 1 else c
        pairs = zip(self.base.items(), c.T)
        return {n: b + torch.tensordot(own, self.changes[n], 1) for (n, b), own in pairs}

    def measure(self, weights, batch, what):
        named = {f'policy.{n}': w for n, w in weights.items()}
        return functional_call(self.scores, named, (batch, what))

    def policy(self, weights):
        out = Policy(self.scores.policy.config).to(next(iter(weights.values())).dtype)
        with torch.no_grad():
            for n, p in out.named_parameters():
                p.copy_(weights[n])
        return out


@dataclass(frozen=True)
class Form:
    "Which numbers are learned, where they begin, and what merged weights they make"

    start: object  # blend -> list of tensors
    coefficients: object = None  # made of these tensors; None: they are the weights
    rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)  # learning rates to choose from

    def weights(self, blend, numbers):
        if self.coefficients is None:
            return dict(zip(blend.base, numbers))
        return blend.weights(self.coefficients(*numbers))


def halves(*shape):
    return torch.full(shape, 0.5)


FORMS = {
    'one weight': Form(lambda b: [halves()], lambda w: torch.stack([w, 1 - w])),
    'one per child': Form(lambda b: [halves(2)], lambda c: c),
    'one per child and tensor': Form(
        lambda b: [halves(2, len(b.base))], lambda c: c, (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    ),
    'all weights': Form(
        lambda b: list(b.weights(halves(2)).values()),
        None,
        (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    ),
}
ARMS = {f'labels, {form}': ('loss', form) for form in FORMS}
ARMS |= {f'no labels, {form}': ('entropy', form) for form in list(FORMS)[1:3]}


@dataclass(frozen=True)
class Effort:
    "How much is learned from"

    problems: int = 128  # number of each kind
    steps: int = 120
    each: int = 16  # problems of each kind in a step
    draws: int = 4  # without labels: how often the answers are drawn again


def drawn(what, policy, kinds, seed, turn):
    "What a loss reads: the written solutions, or one answer to each prompt by the model as it is"
    if what == 'loss':
        return [solution_batch(prompts, build_tokenizer()) for prompts in kinds]
    cfg = tiny_cpu()
    engine = TorchRollout(policy.config, cfg.rollout.num_slots)
    engine.load_weights(hf_weights(policy), 0)
    params, out = cfg.rollout.params(policy.config.eos_ids), []
    for prompts in kinds:
        asked = requests_of(prompts, [1] * len(prompts), Counter(), params, seed, turn)
        out.append(collate(in_order(asked, list(engine.generate(asked)))))
    return out


def rows_of(seed, step, effort):
    "Which problems of each kind a step reads: all once before any comes again"
    epoch, place = divmod(step * effort.each, effort.problems)
    gen = torch.Generator().manual_seed(derive_seed(seed, 'coefficients', epoch))
    return torch.randperm(effort.problems, generator=gen)[place : place + effort.each].tolist()


def learn(blend, arm, lr, kinds, effort, seed):
    "The merged policy, its coefficients, the loss of all problems before and after, CPU seconds"
    began = time.process_time()
    what, form = ARMS[arm][0], FORMS[ARMS[arm][1]]
    numbers = [t.clone().requires_grad_() for t in form.start(blend)]
    adam = torch.optim.Adam(numbers, lr)
    every = effort.steps if what == 'loss' else -(-effort.steps // effort.draws)

    def total(batches):
        weights = form.weights(blend, numbers)
        return sum(blend.measure(weights, b, what) for b in batches) / len(batches)

    path = []
    for step in range(effort.steps + 1):
        last = step == effort.steps
        if step % every == 0 or last:
            batches = drawn(what, blend.policy(form.weights(blend, numbers)), kinds, seed, step)
            with torch.no_grad():
                path += [total(batches).item()] * (last or not path)
        if not last:
            adam.param_groups[0]['lr'] = lr * (1 - step / effort.steps)
            adam.zero_grad()
            rows = rows_of(seed, step, effort)
            total([select(b, rows) for b in batches]).backward()
            adam.step()
    c = form.coefficients and form.coefficients(*numbers).detach()
    return blend.policy(form.weights(blend, numbers)), c, path, time.process_time() - began
