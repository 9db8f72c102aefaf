"""The font of the figures: what a kernel runs before its first cell.

    python tools/fonts.py   # every IPython of this environment runs it: `make lab` calls this

docs/_static/fonts holds it. tools/matplotlibrc asks for it, and falls back where it is not known.
"""

import sys
from pathlib import Path

FONTS = Path(__file__).resolve().parent.parent / 'docs' / '_static' / 'fonts'
START = f"""from matplotlib.font_manager import fontManager
for path in {sorted(map(str, FONTS.glob('*.otf')))}:
    fontManager.addfont(path)
del fontManager, path
"""


def configure(folder=Path(sys.prefix, 'etc', 'ipython')):
    "Settings that IPython reads for an environment, whoever uses it"
    folder.mkdir(parents=True, exist_ok=True)
    settings = f'c = get_config()\nc.InteractiveShellApp.exec_lines = [{START!r}]\n'
    (folder / 'ipython_config.py').write_text(settings)


if __name__ == '__main__':
    configure()
