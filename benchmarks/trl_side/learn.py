"""TRL's side of time_to_accuracy.py, in a process of its own.

    python benchmarks/trl_side/learn.py SPEC.json

SPEC holds the checkpoint folder, the prompts in the order in which they are asked, some responses
with their log-probs, the counts and GRPOConfig arguments; see trainer.py. The verifier is ours, on
the text that our decoder makes of TRL's tokens. Before it trains it says how far its log-probs of
the given responses are from the given ones.
"""

import json
import sys

import torch
from datasets import Dataset
from trainer import make_trainer, read_model, serve
from transformers import AutoTokenizer

from compassrl.data.tasks import verify
from compassrl.data.tokenizer import load_tokenizer, response_text
from compassrl.procs import keep_freed_memory
from compassrl.records import Prompt


def make_reward(spec):
    "Verdicts of our verifier"
    tokenizer, eos_ids = load_tokenizer(spec['model']), tuple(spec['eos_ids'])
    asked = {p['text']: Prompt(**p) for p in spec['prompts']}

    def reward(prompts, completion_ids, **_):
        texts = [response_text(tokenizer, ids, eos_ids) for ids in completion_ids]
        return [verify(asked[p], text).reward for p, text in zip(prompts, texts)]

    return reward


def largest_gap(trainer, checks):
    "Of log-probs, over all tokens of the given responses"

    @torch.no_grad()
    def gap(c):
        ids = torch.tensor([c['prompt_ids'] + c['response_ids']])
        found = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, torch.ones_like(ids), len(c['response_ids'])
        )[0][0]
        return float((found - torch.tensor(c['log_probs'])).abs().max())

    return max(map(gap, checks))


def main(spec):
    keep_freed_memory()  # `compassrl train` does the same
    rows = Dataset.from_list([dict(prompt=p['text']) for p in spec['prompts']])
    tokenizer = AutoTokenizer.from_pretrained(spec['model'])
    for p in spec['prompts']:
        assert tokenizer(p['text'])['input_ids'] == p['token_ids'], f'not the same prompt: {p}'
    trainer = make_trainer(spec, read_model(spec), rows, make_reward(spec), tokenizer)
    serve(trainer, largest_gap=largest_gap(trainer, spec['checks']))


if __name__ == '__main__':
    main(json.load(open(sys.argv[1])))
