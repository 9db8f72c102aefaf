"Phases: what the main thread does, readable from any other thread"

from threading import Thread

import pytest

from compassrl import procs
from compassrl.procs import phase


def names():
    return list(procs.open_phases)


def test_phases_lie_inside_each_other_and_an_error_closes_them():
    with pytest.raises(KeyError), phase('step'):
        with phase('save'):
            assert names() == ['step', 'save']
        assert names() == ['step']
        raise KeyError
    assert names() == []


def test_a_generator_that_is_closed_late_takes_its_own_phase_with_it():

    def walk():
        with phase('walk'):
            yield

    walking = walk()
    next(walking)
    with phase('step'):
        assert names() == ['walk', 'step']
        walking.close()
        assert names() == ['step']
    assert names() == []


def test_another_thread_opens_none():
    seen = []

    def work():
        with phase('work'):
            seen.append(names())

    with phase('step'):
        thread = Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [['step']]
