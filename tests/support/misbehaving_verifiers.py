"Verifiers that misbehave, in a module of their own: the workers of a reward pool import it"

import hashlib
import os
import signal
import subprocess
import time

from compassrl.data.tasks import judge
from compassrl.records import Verdict


def digest(text, answer):
    "The bytes that were read"
    return judge(True, hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest())


def moody(text, answer):
    "Does what the first word says, with the second; the verdict depends on the whole text"
    mood, _, what = text.partition(' ')
    if mood == 'hang':
        time.sleep(60)
    if mood == 'note':  # each try
        with open(what, 'a') as f:
            f.write('tried ')
        time.sleep(60)
    if mood == 'die':  # at each try
        with open(what, 'a') as f:
            f.write('tried ')
        os._exit(3)
    if mood == 'crash':
        os.kill(os.getpid(), signal.SIGSEGV)
    if mood == 'leave':
        os._exit(int(what))
    if mood == 'exit':
        raise SystemExit('enough')
    if mood == 'raise':
        raise RuntimeError('out of order')
    if mood == 'busy':
        while True:
            pass
    if mood == 'memory':
        bytearray(10**10)
    if mood == 'slow':
        time.sleep(0.0005 * (hash(text) % 7))
    if mood == 'spawn':
        subprocess.Popen(['sleep', what])
        time.sleep(60)
    return judge(len(text) % 2 == 0, text)


def once(text, answer):
    "Dies at its first attempt: `answer` is a folder"
    try:
        os.open(f'{answer}/{text}', os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return judge(True, text)
    os.kill(os.getpid(), signal.SIGKILL)


def even(text, answer):
    "An untrained policy is right about half of the time"
    right = bool(text) and ord(text[0]) % 2 == 0
    return Verdict(float(right), right, 'ok' if right else 'wrong', text[:1])
