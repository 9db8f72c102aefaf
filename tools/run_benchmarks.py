"""Run benchmarks one after another and keep what each reports.

    python tools/run_benchmarks.py [NAME ...]     # benchmarks/NAME.py; none = all of them
    python tools/run_benchmarks.py recipe         # or benchmarks/studies/NAME.py: an hour or two

A benchmark ends with one JSON line on stdout and exits 0. The line becomes
benchmarks/results/NAME.json, with the commit, the day, and hashes of library and settings. A study
that was ended goes on with the runs that are missing.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / 'benchmarks'
sys.path.insert(0, str(FOLDER / 'studies'))
from _evidence import version  # noqa: E402


def run(script):
    "The last JSON line of a benchmark, whose output is shown as it comes; None if it failed"
    last = None
    with subprocess.Popen(
        [sys.executable, '-u', script], cwd=FOLDER.parent, stdout=subprocess.PIPE, text=True
    ) as p:
        for line in p.stdout:
            print(line, end='', flush=True)
            if line.startswith('{'):
                last = line
    if p.returncode != 0:
        return print(f'{script.name}: exit status {p.returncode}', file=sys.stderr)
    try:
        return json.loads(last or '')
    except ValueError:
        return print(f'{script.name}: its last line is not JSON', file=sys.stderr)


def main(names):
    benchmarks, studies = (
        {p.stem: p for p in sorted(folder.glob('[!_]*.py'))}
        for folder in (FOLDER, FOLDER / 'studies')
    )
    known = benchmarks | studies
    unknown = sorted(set(names) - known.keys())
    if unknown:
        sys.exit(f'no benchmark {", ".join(unknown)}: use some of {", ".join(known)}')
    (FOLDER / 'results').mkdir(exist_ok=True)
    failed = []
    for name in names or benchmarks:
        print(f'== {name}', flush=True)
        start, result = time.monotonic(), run(known[name])
        if result is None:
            failed.append(name)
            continue
        result |= dict(version=version(result))
        (FOLDER / 'results' / f'{name}.json').write_text(json.dumps(result, indent=2) + '\n')
        took = time.monotonic() - start
        print(f'== {name}: {took:.0f} s, benchmarks/results/{name}.json', flush=True)
    if failed:
        sys.exit(f'failed: {", ".join(failed)}')


if __name__ == '__main__':
    main(sys.argv[1:])
