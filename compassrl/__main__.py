import os

from compassrl.train.megatron.pulse import Pulse

if __name__ == '__main__':
    if int(os.environ.get('WORLD_SIZE', 1)) > 1:
        Pulse(int(os.environ['RANK']))  # watched from the first import on

    from compassrl.runs.cli import main

    main()
