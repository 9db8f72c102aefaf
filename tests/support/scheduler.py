"""Which worker runs which test: a file stays with one, so what its tests share is made once.

Notebooks share nothing; they come last, one at a time, so that both workers end together.
"""

from xdist.scheduler import LoadScopeScheduling

ALONE = 'tests/test_notebooks.py'


def unit(nodeid):
    "Tests of the same unit run in one worker, in their order"
    path = nodeid.partition('::')[0]
    return nodeid if path == ALONE else path


class ByFile(LoadScopeScheduling):
    "Units with the most tests begin first; the class asks this for the unit of a test"

    def _split_scope(self, nodeid):
        return unit(nodeid)
