"What several tests share"

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # root of the repository


def front_page():
    "Text and tables of nbs/index.ipynb, the front page of the site"
    cells = json.loads((ROOT / 'nbs' / 'index.ipynb').read_text())['cells']
    outputs = [
        o.get('data', {}).get('text/markdown', '') for c in cells for o in c.get('outputs', [])
    ]
    texts = [c['source'] for c in cells if c['cell_type'] == 'markdown']
    return '\n\n'.join(map(''.join, [*texts, *outputs]))
