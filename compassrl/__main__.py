import gc
import os
import sys

from compassrl.runs.help import is_a_page, without_torch


def main() -> None:
    gc.disable()  # imports make half a million objects that stay: a quarter of their time was this
    if is_a_page(sys.argv[1:]):
        without_torch()
    elif int(os.environ.get('WORLD_SIZE', 1)) > 1:
        from compassrl.train.megatron.heartbeat import Heartbeat

        try:
            Heartbeat(int(os.environ['RANK']))  # watched from the first import on
        except ValueError as e:
            sys.exit(str(e))
    from compassrl.runs.cli import main

    gc.freeze()
    gc.enable()
    main()


if __name__ == '__main__':
    main()
