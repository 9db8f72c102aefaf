import os
import sys


def main() -> None:
    if int(os.environ.get('WORLD_SIZE', 1)) > 1:
        from compassrl.train.megatron.heartbeat import Heartbeat

        try:
            Heartbeat(int(os.environ['RANK']))  # watched from the first import on
        except ValueError as e:
            sys.exit(str(e))
    from compassrl.runs.cli import main

    main()


if __name__ == '__main__':
    main()
