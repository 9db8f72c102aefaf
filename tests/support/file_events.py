"What a process does to the disk, operation by operation, and an end or a refusal at one of them"

import os
import signal
import sys

TOUCHING = 'os.rename', 'os.mkdir', 'os.rmdir', 'os.remove'


class FileEvents:
    "Calls `hit` before every operation: a file is opened to write, synced, renamed, removed"

    def __init__(self, under=''):
        self.under, self.seen, self.writing = str(under), 0, None
        fsync = os.fsync

        def hooked(fd):
            self.count()
            fsync(fd)
            self.writing = None

        os.fsync = hooked
        sys.addaudithook(self.audit)

    def audit(self, event, args):
        opens = event == 'open' and isinstance(args[1], str) and args[1][0] in 'wxa'
        if not opens and event not in TOUCHING or not self.inside(args[0]):
            return
        self.count()
        if opens:
            self.writing = args[0]

    def inside(self, path):
        return isinstance(path, (str, os.PathLike)) and str(path).startswith(self.under)

    def count(self):
        self.seen += 1
        self.hit()

    def hit(self):
        pass


class Killer(FileEvents):
    """SIGKILL before the n-th operation; with `half`, a file that is not synced yet loses its
    second half"""

    def __init__(self, n, half=False, under=''):
        self.n, self.half = n, half
        super().__init__(under)

    def hit(self):
        if self.seen < self.n:
            return
        if self.half and self.writing:
            os.truncate(self.writing, os.path.getsize(self.writing) // 2)
        os.kill(os.getpid(), signal.SIGKILL)


class Refusing(FileEvents):
    "From the n-th operation on the disk refuses: it is full, or may not be written"

    def __init__(self, n, error, under=''):
        self.n, self.error = n, error
        super().__init__(under)

    def hit(self):
        if self.seen >= self.n:
            raise OSError(self.error, os.strerror(self.error))
