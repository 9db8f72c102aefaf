"""TRL's side of train_step.py, in a process of its own.

    python benchmarks/trl_side/step.py SPEC.json

SPEC holds the checkpoint folder, the prompts (token ids), the counts and GRPOConfig arguments. A
step is a generation, a pass for the old log-probs and two optimiser steps; see trainer.py.
"""

import json
import sys

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer import make_trainer, read_model, serve
from transformers import PreTrainedTokenizerFast


def tokenizer(vocab_size):
    "Word `17` is token 17; the end of text lies outside the model's vocabulary: never sampled"
    words = {str(i): i for i in range(vocab_size)} | {'<eos>': vocab_size}
    t = Tokenizer(models.WordLevel(words, unk_token='0'))
    t.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=t, eos_token='<eos>', pad_token='0')


def reward(completion_ids, **_):
    return [sum(ids) % 17 / 17 for ids in completion_ids]


def main(spec):
    model = read_model(spec)
    model.generation_config.eos_token_id = None  # every response has its full length
    rows = [
        dict(prompt=' '.join(map(str, ids))) for ids in spec['prompts']
    ] * 256  # one epoch is longer than any measurement
    words = tokenizer(spec['vocab_size'])
    serve(make_trainer(spec, model, Dataset.from_list(rows), reward, words))


if __name__ == '__main__':
    main(json.load(open(sys.argv[1])))
