import os


def main() -> None:
    if 'TORCHELASTIC_RUN_ID' in os.environ:
        from compassrl.procs import end_with_parent

        end_with_parent()  # where torchrun is killed, nobody else would end its ranks
    from compassrl.runs.cli import main

    main()


if __name__ == '__main__':
    main()
