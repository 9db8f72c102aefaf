import sys

from compassrl.runs.help import is_a_page, without_torch


def main():
    if is_a_page(sys.argv[1:]):
        without_torch()
    from compassrl.runs.cli import main

    main()


if __name__ == '__main__':
    main()
