"""A test run beside other work: `BUSY=1 make test` keeps one core busy to the last test."""

import os
import subprocess
import sys


def start(config):
    if os.environ.get('BUSY') and not hasattr(config, 'workerinput'):
        config.busy = subprocess.Popen([sys.executable, '-c', 'while True: pass'])


def stop(config):
    if hasattr(config, 'busy'):
        config.busy.kill()
        config.busy.wait()
