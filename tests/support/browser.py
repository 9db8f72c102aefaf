"A Chromium that is installed, driven by playwright"

import shutil

CHROMIUM = next(
    filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None
)
MISSING = 'no Chromium is installed (Debian: apt-get install chromium)'
FLAGS = [
    '--no-sandbox',
    '--disable-gpu',
    '--no-first-run',
    '--disable-background-networking',
    '--disable-component-update',
    '--disable-sync',
]
