"What can happen to a checkpoint on a disk: the same list for both kinds"

import json
import os
import shutil

from compassrl.train.checkpoint_files import seal
from tests.support import chaos

FLIPS = chaos.trials(1000, 10_000)  # trials of each kind


def reseal(path, drop=(), **changes):
    "A manifest with the right hash that says something else"
    body = json.loads((path / 'manifest.json').read_text())
    body.pop('sha256')
    body = {k: v for k, v in (body | changes).items() if k not in drop}
    (path / 'manifest.json').write_bytes(seal(body)[1])


def renewed(path, name):
    "After the content of a file was changed, its right hash"
    import compassrl.train.checkpoint_files as mf

    files = json.loads((path / 'manifest.json').read_text())['files']
    reseal(path, files=files | {name: mf.file_entry(path / name)})


def flips(path, seed):
    "Flips a random bit of a random byte of a random file, yields where, and takes it back"
    rng, files = chaos.draw('flips', seed), sorted(p for p in path.iterdir() if p.is_file())
    for _ in range(FLIPS):
        file = rng.choice(files)
        at, bit = rng.randrange(file.stat().st_size), rng.randrange(8)
        for _ in range(2):
            with open(file, 'r+b') as f:
                f.seek(at)
                old = f.read(1)[0]
                f.seek(at)
                f.write(bytes([old ^ 1 << bit]))
            if _ == 0:
                yield f'{file.name} byte {at} bit {bit}'


def replaced(make):
    "The file gives way to something else"

    def damage(file, other):
        file.unlink()
        make(file, other)

    return damage


def cut(size):
    return lambda file, other: os.truncate(file, size(file.stat().st_size))


def zeroed(file, other):
    size = file.stat().st_size
    file.write_bytes(bytes(size))


OF_A_FILE = dict(  # (the file, the one of the same name in another checkpoint)
    empty=cut(lambda n: 0),
    half=cut(lambda n: n // 2),
    shorter=cut(lambda n: n - 1),
    longer=cut(lambda n: n + 1),
    zeroed=zeroed,
    gone=lambda file, other: file.unlink(),
    swapped=lambda file, other: shutil.copy(other, file),
    link=replaced(lambda file, other: file.symlink_to(other)),
    hard_link=replaced(lambda file, other: os.link(other, file)),
    dangling=replaced(lambda file, other: file.symlink_to('nowhere')),
    folder=replaced(lambda file, other: file.mkdir()),
    fifo=replaced(lambda file, other: os.mkfifo(file)),
)


def other_step(path, earlier):
    "The earlier one under this one's name"
    shutil.rmtree(path)
    shutil.copytree(earlier, path)


def exchanged(path, earlier):
    "All files but the manifest are those of the other"
    for p in earlier.iterdir():
        if p.name != 'manifest.json':
            shutil.copy(p, path / p.name)


OF_A_FOLDER = dict(  # (the newest, the one before)
    other_step=other_step,
    exchanged=exchanged,
    linked=lambda path, earlier: (shutil.rmtree(path), path.symlink_to(earlier)),
    emptied=lambda path, earlier: [p.unlink() for p in path.iterdir()],
    renamed=lambda path, earlier: path.rename(path.with_name('step-000009')),
)

SENSELESS = dict(  # with the right hash of itself
    no_step=lambda path: reseal(path, drop=['step']),
    no_files=lambda path: reseal(path, drop=['files']),
    no_format=lambda path: reseal(path, drop=['format']),
    step_is_text=lambda path: reseal(path, step='2'),
    step_below_zero=lambda path: reseal(path, step=-2),
    files_is_a_list=lambda path: reseal(path, files=[]),
    files_is_empty=lambda path: reseal(path, files={}),
    file_without_hash=lambda path: reseal(path, files={'state.json': dict(bytes=3)}),
    file_of_elsewhere=lambda path: reseal(path, files={'../x': dict(bytes=0, sha256='')}),
    hash_is_a_number=lambda path: reseal(path, files={'a': dict(bytes=0, sha256=1)}),
)
