"TRL's GRPOTrainer in a process of its own, one RL step per line that it is sent"

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

SIDE = Path(__file__).resolve().parent / 'trl_side'


class Trl:
    "A script of trl_side at work on a spec"

    def __init__(self, script, spec, folder, name):
        if not find_spec('trl'):
            sys.exit('TRL is not installed: python tools/setup_env.py dev')
        self.name, path = name, folder / f'{name}.json'
        path.write_text(json.dumps(spec | dict(output=str(folder / f'{name}-out'))))
        threads = dict(OMP_NUM_THREADS=str(spec['threads']), MKL_NUM_THREADS=str(spec['threads']))
        self.log = open(folder / f'{name}.log', 'w+')
        self.process = subprocess.Popen(
            [sys.executable, SIDE / script, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=os.environ | threads,
        )

    def __enter__(self):
        self.about = self.reply()
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()

    def reply(self):
        for line in self.process.stdout:
            if line.startswith('{"'):
                return json.loads(line)
        self.log.seek(0)
        raise RuntimeError(f'TRL ({self.name}) ended: ' + ''.join(self.log.readlines()[-8:]))

    def ask(self, command):
        "`step` or `save FOLDER`: what it reports"
        self.process.stdin.write(command + '\n')
        self.process.stdin.flush()
        return self.reply()
