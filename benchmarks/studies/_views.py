"""What the policy sees in the middle of an episode of `turns`: the text of an observation, and how
much of the history stays in view."""

import re
from dataclasses import dataclass, replace
from typing import Literal

import torch

from compassrl.data.tokenizer import encode
from compassrl.data.tools import ToolConfig, ToolUser
from compassrl.model.policy import Policy
from compassrl.records import derive_seed
from compassrl.rollout.episodes import Episodes, Turns
from compassrl.train.sft import cold_start

ASKED, CALLED = ':', '>'  # what ends a question, and a call


@dataclass(frozen=True)
class View:
    "What an episode shows of itself"

    # what an observation begins with: nothing, the number of steps that are left, or, in the same
    # place, a number that says nothing
    digit: Literal['', 'left', 'noise'] = ''
    window: bool = False  # earlier calls and observations go out of view


VIEWS = dict(
    plain=View(),
    left=View('left'),
    noise=View('noise'),
    left_window=View('left', True),
    noise_window=View('noise', True),
)


class Watcher(ToolUser):
    "A tool that knows the question and how often it was called"

    def __init__(self, cfg: ToolConfig, tokenizer, view: View):
        super().__init__(cfg, tokenizer)
        self.view = view

    def written(self, question, made, found):
        "The ids of an answer, as the view writes it after so many calls"
        if not self.view.digit:
            return found
        n = max(int(question[0]) - made, 0)
        if self.view.digit == 'noise':
            n = derive_seed('noise', question, made) % 4
        return found[:1] + encode(self.tokenizer, str(n)) + found[1:]

    def play(self, solution, prompt_id=''):
        "A written-out response as an episode of this view would have it"
        *calls, rest = re.split(f'(?<={CALLED})', solution)
        question = f'{len(calls)}{calls[0][1:-1]}{ASKED}' if calls else ''
        ids, mask = [], []
        for made, call in enumerate(calls, 1):
            said = encode(self.tokenizer, call)
            read = self.written(question, made, self(said))
            ids, mask = ids + said + read, mask + [True] * len(said) + [False] * len(read)
        said = encode(self.tokenizer, rest)
        return ids + said, mask + [True] * len(said)


class ViewedTurns(Turns):
    "Turns whose next request holds what is in view"

    def turn(self, r, ids, own):
        new = super().turn(r, ids, own)
        if not ids or not self.tool.view.window:
            return new
        last = len(own) - own[::-1].index(True)  # where the observation begins
        return replace(new, prompt_ids=(*r.prompt_ids, *ids[last:]), begun=None)

    def answer(self, r, calls):
        found = super().answer(r, calls)
        if found is None:
            return None
        question = self.tool.tokenizer.decode(list(r.prompt_ids))
        return self.tool.written(question, len(calls), found[0]), found[1]

    def take(self, s):
        "What went out of view belongs to the response all the same; a dense policy has no routes"
        key = s.prompt_id, s.index
        old = self.drawn.get(key)
        read = [*self.asked[key].prompt_ids, *(old.response_ids if old else ())]
        return super().take(replace(s, prompt_ids=read, routed_experts=None, routes_valid=None))


class Viewed(Episodes):
    "A rollout engine for a policy that sees a part of its episode"

    queue = ViewedTurns


class ViewedPolicy(Policy):
    "A dense policy. With a window, a turn attends to the question and its last observation alone"

    def __init__(self, config, seed, tokenizer):
        super().__init__(config, seed)
        self.window = False
        (self.asked,), (self.called,) = (encode(tokenizer, x) for x in (ASKED, CALLED))

    def forward(
        self, token_ids, token_mask=None, routed_experts=None, routes_valid=None, share=False
    ):
        if not self.window:
            return super().forward(token_ids, token_mask, share=share)
        rows, kept = [], []  # every turn; which of its tokens are not the question once more
        for ids, n in zip(token_ids.tolist(), token_mask.sum(1).tolist()):
            asked = ids.index(self.asked) + 1
            cuts = [i + 1 for i in range(n - 1) if ids[i] == self.called]
            for a, b in zip([0, *cuts], [*cuts, n]):
                again = asked if a else 0
                rows.append(torch.tensor(ids[:again] + ids[a:b]))
                kept.append(torch.arange(len(rows[-1])) >= again)
        lengths = torch.tensor([len(r) for r in rows])
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        hidden, routes = super().forward(padded, mask, share=share)
        kept = torch.cat(kept)
        return hidden[kept], routes[kept]


def taught(engine, prompts, cfg, views, tokenizer):
    "A cold start that shows each solution in every view, one step for each in turn; in place"
    sft, shows = cfg.cold_start, {}
    for view in views:
        tool = Watcher(cfg.tools, tokenizer, view)
        shows[view] = cold_start(engine, prompts, sft, tokenizer, cfg.seed, tool=tool)
    for _ in range(sft.steps):
        for view, steps in shows.items():
            engine.policy.window = view.window
            next(steps)
