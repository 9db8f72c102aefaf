"""What the TRL sides of all benchmarks share: a GRPOTrainer that is driven from outside.

Every line `step` on stdin makes one RL step (a generation and the optimiser steps that use it) and
prints one JSON line with its seconds and what it did. A line `save FOLDER` writes the weights;
the answer says which betas the optimiser has.
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
import transformers
import trl
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Commands(TrainerCallback):
    "Waits for a line before each generation; reports after the last update that uses it"

    def __init__(self, updates):
        self.updates, self.work = updates, None

    def on_step_begin(self, args, state, control, model, optimizer, **_):
        if state.global_step % self.updates:
            return
        while (line := sys.stdin.readline()).startswith('save'):
            model.save_pretrained(line.split(None, 1)[1].strip())
            betas = {tuple(group['betas']) for group in optimizer.param_groups}
            report(saved=True, betas=sorted(betas))
        if not line:
            sys.stdout.flush()
            os._exit(0)
        self.work = dict(generations=0, log_prob_rows=0, grad_rows=0, response_tokens=0)
        self.start = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **_):
        if state.global_step % self.updates:
            return
        seconds = time.perf_counter() - self.start[0]
        report(seconds=seconds, cpu_seconds=time.process_time() - self.start[1], **self.work)


class Counted(GRPOTrainer):
    "GRPOTrainer that counts the rows of its forward passes and the tokens that it generates"

    def _generate_single_turn(self, *args, **kwargs):
        out = super()._generate_single_turn(*args, **kwargs)
        self.commands.work['generations'] += 1
        self.commands.work['response_tokens'] += sum(map(len, out[0]))
        return out

    def _get_per_token_logps_and_entropies(self, model, input_ids, *args, **kwargs):
        if self.commands.work:
            rows = 'grad_rows' if torch.is_grad_enabled() else 'log_prob_rows'
            self.commands.work[rows] += len(input_ids)
        return super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kwargs)


def report(**values):
    print(json.dumps(values), flush=True)


def read_model(spec):
    "The checkpoint that a spec names, in fp32"
    torch.set_num_threads(spec['threads'])
    return AutoModelForCausalLM.from_pretrained(
        spec['model'], dtype=torch.float32, **spec['model_args']
    )


def make_trainer(spec, model, rows, reward, tokenizer):
    "In the order of `rows`, at most one epoch"
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
        shuffle_dataset=False,
        **spec['grpo_args'],
    )
    trainer = Counted(
        model=model, reward_funcs=reward, args=args, train_dataset=rows, processing_class=tokenizer
    )
    trainer.commands = Commands(spec['updates'])
    trainer.add_callback(trainer.commands)
    return trainer


def serve(trainer, **more):
    "Until stdin ends"
    versions = dict(
        trl=trl.__version__, transformers=transformers.__version__, torch=torch.__version__
    )
    report(versions=versions, **more)
    trainer.train()
