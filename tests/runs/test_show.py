"""From files to a served model: GSM8K's format, a reward of one's own, a model of one's own, two
evaluation sets, wandb; one command, killed in the middle, resumed, opened and served"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from compassrl.runs.cli import main
from tests.runs.test_trackers import history_of, records_of
from tests.support import ROOT, families
from tests.support import fork_server as forked
from tests.support import vllm_fork_server as vllm_forks
from tests.support.file_events import Killer

STEPS, SETS = 6, ('easy', 'hard')
TRAIN = f"""train smoke-cpu --init-from model --data.path train.jsonl --data.apply-chat-template
--data.eval-path easy=test1.jsonl hard=test2.jsonl --data.num-heldout None --eval-every 2
--rewards.function reward.py:near --rollout.max-tokens 16 --steps {STEPS} --save-every 1
--data.max-prompt-tokens 100 --prompts-per-step 4 --group-size 4 --optim.lr 1e-3
--trackers wandb --run-dir run""".split()
REWARD = """
def near(text, answer):
    digits = ''.join(c for c in text if c in '0123456789')
    return 1 / (1 + abs(len(digits) - len(answer))) if digits else 0.0
"""


class Later(Killer):
    def hit(self):  # wandb opens its file in a thread of its own
        for _ in range(30_000 * (self.seen >= self.n)):
            if [*Path('run/wandb').glob('offline-run-*/*.wandb')]:
                break
            time.sleep(0.01)
        super().hit()


def killed_train(home, at):
    "The run, until this operation on its checkpoints"
    os.chdir(home)
    Later(at, under='run/checkpoints')
    main(TRAIN)


def write(path, numbers):
    def row(i):
        a, b = i, 3 * i + 2
        answer = f'{a}+{b}={a + b}\n#### {a + b}'
        return dict(question=f'Ann has {a}, buys {b}. Sum?', answer=answer)

    path.write_text('\n'.join(json.dumps(row(i)) for i in numbers))


def environment():
    env = os.environ | dict(WANDB_MODE='offline', PYTHONPATH=str(ROOT), OMP_NUM_THREADS='1')
    env.pop('WANDB_SERVICE', None)  # An earlier test in this process may have left it
    return env


def compassrl(*words, cwd):
    run = [sys.executable, '-m', 'compassrl', *words]
    return subprocess.run(run, cwd=cwd, env=environment(), capture_output=True, text=True)


def steps(run):
    return [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]


@pytest.fixture(scope='module')
def home(tmp_path_factory):
    "What somebody brings, and the run that was killed and has gone on"
    pytest.importorskip('wandb', reason='wandb is not installed: pip install compassrl[trackers]')
    home = tmp_path_factory.mktemp('show')
    families.original('Qwen3-MoE', home / 'model')
    for name, numbers in dict(train=range(60), test1=range(60, 66), test2=range(600, 604)).items():
        write(home / f'{name}.jsonl', numbers)
    (home / 'reward.py').write_text(REWARD)

    killed = forked.run(home / 'log', killed_train, home, 16, env=environment(), timeout=600)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert 1 <= len(steps(home / 'run')) < STEPS, 'not in the middle: choose another operation'
    (home / 'reward.py').unlink()  # the run has its own copy

    resumed = compassrl('resume', 'run', cwd=home)
    assert resumed.returncode == 0 and 'resuming run after step' in resumed.stdout, resumed.stderr
    assert resumed.stdout.splitlines()[-1] == 'run'
    return home


def test_every_step_is_there_once_with_rewards_and_both_sets(home):
    rows = steps(home / 'run')
    assert [r['step'] for r in rows] == [*range(1, STEPS + 1)]
    assert all(r['failed_frac'] == 0 and 0 < r['reward_mean'] < 1 for r in rows)
    assert [r['step'] for r in rows if r['eval_hard_avg'] is not None] == [2, 4]
    for when in ('before', 'after'):
        found = json.loads((home / f'run/eval_{when}.json').read_text())
        assert (found['name'], *found['sets']) == SETS
        assert found['num_prompts'] == 6 and found['sets']['hard']['num_prompts'] == 4
        assert '<|im_start|>assistant' in found['samples'][0]['prompt']
    report = (home / 'run/report.md').read_text()
    assert all(name in report for name in SETS)


def test_wandb_has_both_parts_of_the_run_and_both_sets(home):
    files = sorted((home / 'run/wandb').glob('offline-run-*/*.wandb'))
    assert len(files) == 2 and len({f.name for f in files}) == 1, 'one run, continued'
    logged = [values for f in files for values in history_of(f)]
    assert {v['step'] for v in logged if 'policy/entropy' in v} == {*range(1, STEPS + 1)}
    names = set().union(*logged)
    assert {'eval/avg', 'eval/hard/avg', 'reward/mean'} <= names
    # the settings name both; of the killed part wandb may have written nothing, it is logged again
    written = b''.join(r for f in files for r in records_of(f.read_bytes()))
    assert all(name.encode() in written for name in SETS)


def greedy(folder, chat, num):
    "Tokens of the prompt, text of the answer, by transformers"
    tok = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float)
    ask = dict(add_generation_prompt=True, return_tensors='pt', return_dict=True)
    prompt = tok.apply_chat_template(chat, **ask)
    out = model.generate(**prompt, max_new_tokens=num, do_sample=False)
    size = prompt['input_ids'].shape[1]
    return size, tok.decode(out[0, size:], skip_special_tokens=True)


CHAT = [dict(role='user', content='Ann has 7, buys 23. Sum?')]


def test_the_result_opens_in_transformers_with_its_template(home):
    model, result = home / 'model', home / 'run/model'
    was, now = (load_file(f / 'model.safetensors') for f in (model, result))
    assert was.keys() == now.keys() and any(not torch.equal(was[n], now[n]) for n in was)
    for name in ('tokenizer.json', 'chat_template.jinja', 'generation_config.json'):
        assert (result / name).read_bytes() == (model / name).read_bytes()
    size, _ = greedy(result, CHAT, 1)
    tok = AutoTokenizer.from_pretrained(result)
    assert tok.chat_template == families.TEMPLATE
    by_hand = f'<|im_start|>user\n{CHAT[0]["content"]}<|im_end|>\n<|im_start|>assistant\n'
    assert size == len(tok(by_hand)['input_ids'])


def post(url, **body):
    headers = {'Content-Type': 'application/json'}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as r:
        return json.load(r)


@pytest.fixture(scope='module')
def served(home):
    "The address of `vllm serve run/model`"
    pytest.importorskip('vllm', reason='needs vLLM: python tools/setup_env.py engines-cpu')
    from compassrl.rollout.vllm.server import ServerProcess, flags, free_port, server_env

    port = free_port()
    small = dict(max_model_len=128, max_num_seqs=4, kv_cache_memory_bytes=8 << 20)
    args = dict(model=home / 'run/model', host='127.0.0.1', port=port, served_model_name='mine')
    args |= dict(dtype='float32', enforce_eager=True, **small)
    command = [sys.executable, '-m', 'vllm.entrypoints.openai.api_server', *flags(args)]
    vllm_forks.adopt(home / 'forks.log')
    server = ServerProcess(command, server_env('cpu'), home / 'server.log')
    url = f'http://127.0.0.1:{port}'
    try:
        for _ in range(300):
            assert server.alive, server.tail()
            try:
                urllib.request.urlopen(f'{url}/health', timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield url
    finally:
        server.kill()


def test_vllm_serves_it_with_its_template(home, served):
    "The chat endpoint reads the prompt and gives the answer that transformers gives"
    size, text = greedy(home / 'run/model', CHAT, 16)
    reply = post(
        f'{served}/v1/chat/completions', model='mine', messages=CHAT, temperature=0, max_tokens=16
    )
    assert reply['usage']['prompt_tokens'] == size
    unfinished = '\ufffd'  # a character that was cut off: vLLM leaves it out at the end
    content = reply['choices'][0]['message']['content']
    assert content.rstrip(unfinished) == text.rstrip(unfinished) != ''
