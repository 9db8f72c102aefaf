"""TRL's side of train_step.py, run by the environment that it makes.

    python benchmarks/trl_side/step.py SPEC.json

SPEC holds the checkpoint folder, the prompts (token ids), the counts and GRPOConfig arguments.
Every line read from stdin makes one RL step (a generation, a pass for the old log-probs, two
optimiser steps) and prints one JSON line with its seconds and what it did.
"""

import json
import os
import sys
import time
import warnings

os.environ.update(
    HF_HUB_OFFLINE='1', TRANSFORMERS_VERBOSITY='error', TOKENIZERS_PARALLELISM='false'
)
warnings.filterwarnings('ignore')
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def tokenizer(vocab_size):
    "Word `17` is token 17; the end of text lies outside the model's vocabulary: never sampled"
    words = {str(i): i for i in range(vocab_size)} | {'<eos>': vocab_size}
    t = Tokenizer(models.WordLevel(words, unk_token='0'))
    t.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=t, eos_token='<eos>', pad_token='0')


def reward(completion_ids, **_):
    return [sum(ids) % 17 / 17 for ids in completion_ids]


class Commands(TrainerCallback):
    "Waits for a line before each generation; reports after the last update that uses it"

    def __init__(self, updates):
        self.updates, self.work = updates, None

    def on_step_begin(self, args, state, control, **_):
        if state.global_step % self.updates:
            return
        if not sys.stdin.readline():
            sys.stdout.flush()
            os._exit(0)
        self.work = dict(generations=0, log_prob_rows=0, grad_rows=0, response_tokens=0)
        self.start = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **_):
        if state.global_step % self.updates:
            return
        print(
            json.dumps(
                dict(
                    seconds=time.perf_counter() - self.start[0],
                    cpu_seconds=time.process_time() - self.start[1],
                    **self.work,
                )
            ),
            flush=True,
        )


class Counted(GRPOTrainer):
    "GRPOTrainer that counts the rows of its forward passes and the tokens that it generates"

    def _generate_single_turn(self, *args, **kwargs):
        out = super()._generate_single_turn(*args, **kwargs)
        self.commands.work['generations'] += 1
        self.commands.work['response_tokens'] += sum(map(len, out[0]))
        return out

    def _get_per_token_logps_and_entropies(self, model, input_ids, *args, **kwargs):
        self.commands.work['grad_rows' if torch.is_grad_enabled() else 'log_prob_rows'] += len(
            input_ids
        )
        return super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kwargs)


def main(spec):
    torch.set_num_threads(spec['threads'])
    model = AutoModelForCausalLM.from_pretrained(
        spec['model'], dtype=torch.float32, **spec['model_args']
    )
    model.generation_config.eos_token_id = None  # every response has its full length
    rows = [
        dict(prompt=' '.join(map(str, ids))) for ids in spec['prompts']
    ] * 256  # one epoch is longer than any measurement
    args = GRPOConfig(
        output_dir=spec['output'],
        use_cpu=True,
        report_to='none',
        save_strategy='no',
        disable_tqdm=True,
        max_steps=len(rows),
        beta=0.0,
        num_generations=spec['samples'],
        max_completion_length=spec['new_tokens'],
        num_iterations=1,
        shuffle_dataset=False,
        learning_rate=spec['lr'],
        lr_scheduler_type='constant',
        generation_batch_size=len(spec['prompts']) * spec['samples'],
        **spec['grpo_args'],
    )
    trainer = Counted(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(spec['vocab_size']),
    )
    trainer.commands = Commands(spec['updates'])
    trainer.add_callback(trainer.commands)
    import transformers
    import trl

    print(
        json.dumps(
            dict(
                ready=True,
                trl=trl.__version__,
                transformers=transformers.__version__,
                torch=torch.__version__,
            )
        ),
        flush=True,
    )
    trainer.train()


if __name__ == '__main__':
    main(json.load(open(sys.argv[1])))
