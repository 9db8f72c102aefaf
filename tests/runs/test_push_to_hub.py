"An upload as `huggingface_hub` carries it out, against a server of this machine"

import os
import subprocess
import sys

from compassrl.data.tokenizer import build_tokenizer, save_tokenizer
from compassrl.model.policy import Policy, PolicyConfig
from compassrl.model.pretrained import save_pretrained
from tests.support import ROOT
from tests.support.hub import hub

SCRIPT = """
import os, sys
from compassrl.runs.objects import push_to_hub

for token in ('good', 'bad', ''):
    os.environ['HF_TOKEN'] = token
    try:
        print(push_to_hub(sys.argv[1], 'me/mine'))
    except ValueError as e:
        print(e)
"""


def test_all_files_arrive_and_a_wrong_token_is_one_line(tmp_path):
    model = tmp_path / 'model'
    save_pretrained(Policy(PolicyConfig(hidden_size=32, head_dim=8, num_hidden_layers=1)), model)
    save_tokenizer(build_tokenizer(), model)
    with hub() as server:
        env = os.environ | dict(HF_ENDPOINT=server.address, HF_HOME=str(tmp_path / 'home'))
        env |= dict(PYTHONPATH=str(ROOT), HF_HUB_OFFLINE='0', HF_HUB_DISABLE_PROGRESS_BARS='1')
        env |= dict(no_proxy='127.0.0.1', HF_HUB_DISABLE_XET='1')  # by git LFS
        words = [sys.executable, '-c', SCRIPT, str(model)]
        r = subprocess.run(words, env=env, capture_output=True, text=True, timeout=100)
    assert r.returncode == 0, r.stderr
    address, bad, none = r.stdout.splitlines()
    assert address.startswith(server.address), address
    assert server.created.get('private', server.created.get('visibility')) in (True, 'private')
    sent = {str(p.relative_to(model)): p.read_bytes() for p in model.rglob('*') if p.is_file()}
    assert {n: d for n, d in server.files.items() if n != '.gitattributes'} == sent
    for line in (bad, none):
        assert line.startswith(f'{model} is not uploaded as me/mine (') and '401' in line, line
        assert line.endswith('log in by `hf auth login`, or choose another name')
