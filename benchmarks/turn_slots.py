"""What does a turn cost that goes on in its slot, against one that reads its response again?

    python benchmarks/turn_slots.py [--quick] [--repeats 5]

128 episodes in 64 slots of the embedded engine: a prompt of 16 tokens, at most 160 tokens of
response, a turn of about 16 tokens, four calls, answers of 8, 16, 32 or 64 tokens. Both sides draw
the same tokens; they take turns in one process, and a ratio is the median over the rounds of that
round's ratio of CPU seconds. `again` is how many tokens the second side reads again for each token
that is drawn. Last line: one JSON object; `ratio` is the gain with answers of 8 tokens.
"""

import argparse
import json
import statistics
import time

import torch

from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import hf_weights
from compassrl.records import Request, SamplingParams, derive_seed
from compassrl.rollout import slots
from compassrl.rollout.episodes import Episodes
from compassrl.rollout.partial import drawn_mask
from compassrl.rollout.torch_rollout import TorchRollout
from compassrl.runs.summary import machine_info

MOST = 64  # more than `slots.most_given`, to see where it should be


class Answers:
    "A tool that says so many tokens, whatever it is asked"

    stop_ids, max_calls = (2,), 4

    def __init__(self, num):
        self.ids = [3 + i % 13 for i in range(num)]

    def ends(self, ids):
        return True

    def begin(self, prompt_id, calls=()):
        return lambda ids: (self.ids, False)


def seconds(engine, tool, requests, longest):
    "CPU seconds, and the samples in their order; answers of up to `longest` go on in their slots"
    slots.most_given = longest
    engine.prefixes.clear()
    t = time.process_time()
    found = list(Episodes(engine, tool).generate(requests))
    return time.process_time() - t, sorted(found, key=lambda s: (s.prompt_id, s.index))


def row(engine, requests, num, repeats):
    tool, ratios = Answers(num), []
    for _ in range(repeats):
        kept, a = seconds(engine, tool, requests, MOST)
        again, b = seconds(engine, tool, requests, 0)
        ratios.append(again / kept)
    same = sum(x.response_ids == y.response_ids for x, y in zip(a, b)) / len(a)
    drawn = sum(int(drawn_mask(s).sum()) for s in b)
    read = 0
    for s in b:
        ends = (drawn_mask(s).int().diff() == 1).nonzero()[:, 0] + 1  # ends of answers
        read += sum(len(s.prompt_ids) + int(e) - num for e in ends)
    return dict(answer=num, ratio=statistics.median(ratios), again=read / drawn, same=same)


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument('--repeats', type=int, default=5)
    p.add_argument('--quick', action='store_true', help='a small case, to see that it runs')
    a = p.parse_args()
    torch.set_num_threads(1)
    prompts, repeats, width = (2, 1, 32) if a.quick else (16, a.repeats, 128)
    shape = PolicyConfig(
        vocab_size=16, hidden_size=width, moe_intermediate_size=width, max_position_embeddings=512
    )
    engine = TorchRollout(shape, 64)
    engine.load_weights(hf_weights(Policy(shape, seed=0)), 0)
    requests = [
        Request(
            f'p{i:02}',
            tuple(3 + derive_seed(i, t) % 13 for t in range(16)),
            k,
            derive_seed('turns', i, k),
            SamplingParams(160, stop_ids=(1,)),
        )
        for i in range(prompts)
        for k in range(8)
    ]
    rows = [row(engine, requests, num, repeats) for num in (8, 16, 32, 64)]
    for r in rows:
        print(
            f'answers of {r["answer"]:2} tokens: {r["ratio"]:.2f} times as fast in the slot; else '
            f'{r["again"]:.1f} tokens are read again per token drawn; '
            f'{r["same"]:.0%} of the responses are equal in fp32'
        )
    settings = dict(responses=len(requests), slots=64, width=width, repeats=repeats)
    print(
        json.dumps(
            dict(
                name='turn_slots',
                ratio=rows[0]['ratio'],
                units='CPU seconds of turns that read all again over those that go on',
                by_answer=rows,
                settings=settings,
                machine=machine_info(),
            )
        )
    )


if __name__ == '__main__':
    main()
