"""Threads of several ranks, each with a communicator, that do something one after the other on each rank."""

from __future__ import annotations

import random
import threading
import time

import pytest

from hiercoll.runtime.turns import Turns

PATIENCE = 60.0


class Comm:
    """Its ranks agree as by an allreduce."""

    def __init__(self, ranks: int) -> None:
        self._answers: list[bool] = []
        self._meeting = threading.Barrier(ranks, timeout=PATIENCE)

    def all_may(self, may: bool) -> bool:
        self._answers.append(may)
        self._meeting.wait()
        agreed = all(self._answers)
        if self._meeting.wait() == 0:
            self._answers.clear()
        self._meeting.wait()
        return agreed


def test_one_after_the_other_on_each_rank() -> None:
    """Whatever the order in which threads come on each rank; those on other ranks may go on together."""
    groups = {"c": (0, 1, 2), "a": (0, 1, 2), "d": (1, 2), "b": (0, 1)}
    turns, busy, done = [Turns() for _ in range(3)], [0, 0, 0], []

    def work(name: str, rank: int, comm: Comm, wait: float) -> None:
        for _ in range(5):
            time.sleep(wait)
            with turns[rank].turn(name, comm.all_may):
                busy[rank] += 1
                assert busy[rank] == 1
                time.sleep(1e-3)
                busy[rank] -= 1
        done.append((name, rank))

    chance, failed = random.Random(1), []
    threads = []
    for name, ranks in groups.items():
        comm = Comm(len(ranks))
        for rank in ranks:
            given = (name, rank, comm, chance.random() * 3e-3)

            def run(given: tuple[str, int, Comm, float] = given) -> None:
                try:
                    work(*given)
                except Exception as error:
                    failed.append(error)

            threads.append(threading.Thread(target=run, daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not failed and sorted(done) == sorted((name, rank) for name, ranks in groups.items() for rank in ranks)


def test_an_error_gives_the_turn_back() -> None:
    """Of who waits for the others, and of who has the turn."""
    turns = Turns()

    def interrupted(_: bool) -> bool:
        raise TimeoutError

    for all_may in (interrupted, lambda may: may):
        with pytest.raises(TimeoutError), turns.turn("a", all_may):
            raise TimeoutError
    with turns.turn("b", lambda may: may):
        pass
