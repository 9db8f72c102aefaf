"Promises of a line each that no other test would miss"

import asyncio
import json
import socket

import pytest

from compassrl.data.chat import ChatTemplate
from compassrl.rollout.vllm.replica import AuthMiddleware
from compassrl.rollout.vllm.server import secret_variable
from compassrl.runs.log import keep_until, replace_text, rows_hash
from compassrl.runs.resume import note_written
from compassrl.runs.run_process import locked
from compassrl.sandbox import rpc
from compassrl.train.checkpoint_files import TornCheckpoint, _compare, file_entry


def test_a_reader_has_the_whole_old_text_or_the_whole_new_one(tmp_path):
    (path := tmp_path / 'report.md').write_text('old')
    with open(path) as f:
        replace_text(path, 'new')
        assert (f.read(), path.read_text()) == ('old', 'new')
    with pytest.raises(TypeError):
        replace_text(path, None)
    assert path.read_text() == 'new'


def test_rows_of_steps_that_are_done_again_go_and_their_hashes_too(tmp_path):
    (path := tmp_path / 'metrics.jsonl').write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    for step in 3, 2:
        note_written(tmp_path, rows={path.name: rows_hash(path, step)}, step=step)
    assert [*json.loads((tmp_path / 'written.json').read_text())['rows'][path.name]] == ['2']
    keep_until(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_run_has_one_process(tmp_path):
    with locked(tmp_path), pytest.raises(ValueError, match='in use by another process'):
        with locked(tmp_path):
            pass


def test_every_digit_of_a_hash_counts(tmp_path):
    (path := tmp_path / 'weights').write_bytes(b'bits')
    entry = file_entry(path)
    digest = entry['sha256']
    _compare(path, entry, 4, lambda: digest)
    for i, digit in enumerate(digest):
        other = digest[:i] + ('0' if digit != '0' else '1') + digest[i + 1 :]
        with pytest.raises(TornCheckpoint):
            _compare(path, entry, 4, lambda other=other: other)


def test_a_message_of_a_program_has_a_bound():
    "It is refused by what it says of its size, before any of it is read"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((2**24 + 1).to_bytes(8, 'big') + b'x')
        ours.settimeout(5)
        with pytest.raises(rpc.Gone, match='16 MB'):
            rpc.receive(ours)
        rpc.send(theirs, dict(value=1))
        assert ours.recv(1) == b'x' and rpc.receive(ours) == dict(value=1)


def test_a_chat_template_reaches_no_class_of_python():
    "From a text to `object`, and from there to all that is loaded"
    for way in ("''.__class__.__mro__", 'messages.__class__.__base__.__subclasses__()'):
        try:
            text = ChatTemplate(f'{{{{ {way} }}}}').render([dict(role='user', content='x')])
        except ValueError:
            continue
        assert 'class' not in text, way


async def _status(shown):
    said = []

    async def send(message):
        said.append(message)

    async def app(scope, receive, send):
        said.append(dict(status=200))

    scope = dict(type='http', path='/x', headers=[(b'authorization', shown)])
    await AuthMiddleware(app)(scope, None, send)
    return said[0]['status']


def test_every_letter_of_a_secret_counts(monkeypatch):
    secret = 'b6' * 16
    monkeypatch.setenv(secret_variable, secret)
    right = f'Bearer {secret}'
    assert asyncio.run(_status(right.encode())) == 200
    for i in range(len(right)):
        wrong = right[:i] + 'z' + right[i + 1 :]
        assert asyncio.run(_status(wrong.encode())) == 401, i
