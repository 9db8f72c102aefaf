"Who asks a run to stop"


class StopAfter:
    "Is asked between two steps; so many steps are done before"

    def __init__(self, num):
        self.left = num

    @property
    def asked(self):
        self.left -= 1
        return self.left < 0
