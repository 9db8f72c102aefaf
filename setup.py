"What pyproject.toml cannot say: the README as PyPI shows it, where a relative link leads nowhere"

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def absolute(
    text: str,  # markdown, its links as seen from the root of the repository
    repository: str,
) -> str:
    "The same text with links to the repository's files and pictures"

    def moved(m):
        picture, words, to = m.groups()
        place = 'raw' if picture else 'blob'
        return f'{picture}[{words}]({repository}/{place}/main/{to})'

    return re.sub(r'(!?)\[([^\]]*)\]\((?!\w+:|#|//)([^)\s]+)\)', moved, text)


if __name__ == '__main__':
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    readme = absolute((ROOT / 'README.md').read_text(), project['urls']['Repository'])
    setup(long_description=readme, long_description_content_type='text/markdown')
