"The page on Qwen3-0.6B: its command lines, and its architecture through vLLM"

import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from compassrl.model.hf_config import read_config
from compassrl.rollout.vllm.messages import check_vllm
from compassrl.runs.cli import parse_train
from tests.support import ROOT, families
from tests.support import vllm_fork_server as vllm_forks

CELLS = nbformat.read(ROOT / 'nbs/how_to/qwen3.ipynb', 4).cells
SMALL = dict(head_dim=128, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6)


@pytest.fixture(scope='module')
def qwen3(tmp_path_factory):
    "Tied, heads wider than the model, base 1e6: as Qwen3-0.6B, but small"
    folder = tmp_path_factory.mktemp('qwen3')
    values = families.SIZES | SMALL | dict(tie_word_embeddings=True, rope_theta=1_000_000)
    model = families.lively(AutoModelForCausalLM.from_config(Qwen3Config(**values)))
    model.generation_config.update(eos_token_id=list(families.END), do_sample=True)
    model.save_pretrained(folder / 'in')
    families.bpe().save_pretrained(folder / 'in')
    model = families.opened(folder / 'in')
    return model, families.there_and_back(folder / 'in', folder / 'out'), folder / 'out'


@pytest.mark.parametrize('column', ['values', 'gradients', 'round trip', 'generates'])
def test_it_is_what_transformers_computes_and_comes_back(qwen3, column):
    model, policy, out = qwen3
    assert policy.config.tie_word_embeddings and policy.config.rope_theta == 1e6
    assert policy.config.num_attention_heads * policy.config.head_dim > policy.config.hidden_size
    getattr(families, column.replace(' ', '_'))(model, policy, out)


def test_vllm_serves_it_and_samples_as_the_policy_says(qwen3):
    out = qwen3[2]
    r = vllm_forks.run(out.parent / 'log', families.serves, out, False, timeout=300)
    assert r.returncode == 0, r.stderr[-3000:]


def test_the_line_for_one_gpu_is_one_that_vllm_takes(qwen3):
    "Without `--router-replay off` it is refused"
    cell = next(c.source for c in CELLS if c.source.startswith('train = """'))
    words = shlex.split(re.search('"""(.*?)"""', cell, re.S)[1])
    shape = read_config(qwen3[2])
    cfg = parse_train(words)
    common = shape, cfg.vllm, torch.bfloat16, cfg.device
    check_vllm(*common, cfg.router_replay == 'R3', one_process=True)
    with pytest.raises(ValueError, match="router_replay='off'"):
        check_vllm(*common, True, one_process=True)


def test_the_download_has_these_flags():
    hf = Path(sys.executable).with_name('hf')
    told = subprocess.run([hf, 'download', '--help'], capture_output=True, text=True, check=True)
    lines = re.findall(r'^hf download .*', '\n'.join(c.source for c in CELLS), re.M)
    assert len(lines) == 2
    for flag in re.findall(r'--[\w-]+', ' '.join(lines)):
        assert flag in told.stdout
