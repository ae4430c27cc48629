"""Steps as programs of the compiled engine, as far as one process shows it: words, copies, flags, self-messages; and
what happens where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from array import array
from itertools import product
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from entries import entries_of, small_systems
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from hiercoll.algorithms import Algorithm, get_algorithm
from hiercoll.collectives import COLLECTIVES, GATHERV, SCATTERV, Collective
from hiercoll.memory import BlockLayout, UnevenLayout
from hiercoll.runtime import compiled, programs
from hiercoll.runtime.programs import (
    COPY,
    COPY_BLOCKS,
    DONE,
    FLAGS,
    PLACE,
    RAISE,
    RECEIVE,
    RECEIVE_BLOCKS,
    SEND,
    SEND_BLOCKS,
    WAIT,
    Compiled,
    LaidOut,
    Tabulated,
    _scaled,
    compile_steps,
)
from hiercoll.runtime.sizes import Areas, GivenSizes, Slots
from hiercoll.schedule import RECV, Builder, Region, Schedule, in_order
from hiercoll.schedule import SEND as SENT
from hiercoll.schedule.lowering import lower
from hiercoll.topology import Topology

SHARED, SIZES = map(programs.BASES.index, ("shared", "sizes"))
needs_engine = pytest.mark.skipif(compiled.load()[0] is None, reason=f"no compiled engine: {compiled.load()[1]}")


class FakeWindow(SimpleNamespace):
    """Flags in memory of this process: two lanes of eight, and how many ranks sleep, if they do."""

    def __init__(self, *, sleeps: bool = False) -> None:
        flags, counts = array("q", [0] * 17), array("q", [0, 0])
        address = flags.buffer_info()[0]
        where = address, counts.buffer_info()[0], (address + 16 * 8) * sleeps
        super().__init__(lane=0, flags=flags, counts=counts, addresses=lambda sleeps: where)

    def slot(self, lane: int, flag: int) -> int:
        return lane * 8 + flag


def words(schedule: Schedule, layout: Any, window: Any = None) -> list[tuple[int, ...]]:
    """The words, step by step."""
    data = Tabulated(layout, {}) if isinstance(layout, GivenSizes) else LaidOut(layout, {})
    found, rest = [], list(compile_steps(lower(schedule), data, window, (0, 1, 0, 1)).words)
    while rest:
        found.append((rest[0], *rest[2 : rest[1]]))
        rest = rest[rest[1] :]
    return found


def engine(schedule: Schedule, layout: Any, window: Any = None, **places: int) -> Compiled:
    """Of a rank alone."""
    return Compiled(lower(schedule), layout, MPI.COMM_SELF, 0, places, window, (0, 1))  # type: ignore[arg-type]


def test_words_of_a_round() -> None:
    """Offsets and lengths in bytes, evenly spaced copies as one, all requests of the round waited for together."""
    b = Builder(0)
    with b.round():
        b.copy(SENT[0], RECV[3])
        b.send(1, SENT[1], tag=4)
        b.recv(2, RECV[2], tag=5)
    byte = compiled.value_of(MPI.BYTE)
    assert words(b.build(), BlockLayout(8)) == [
        (SEND, 1, 4, 0, 0, 8, 8, byte),
        (RECEIVE, 2, 5, 1, 1, 16, 8, byte),
        (COPY, 0, 0, 1, 24, 8, 1, 0, 0),
        (WAIT, 0, 1),
    ]


def test_words_of_a_flow() -> None:
    """A message of no bytes is complete with the step that would begin it; the others by their slots."""
    b = Builder(0)
    first, second = b.recv(1, RECV[0]), b.recv(2, RECV[1])
    b.copy(RECV[0], RECV[2], after=[first])
    b.send(1, RECV[1], after=[second])
    steps = lower(b.build())
    assert not steps.in_sequence
    layout = UnevenLayout()
    layout.place("recv", None, np.array([0, 0, 8]), np.array([8, 0, 8]))
    code = compile_steps(steps, LaidOut(layout, {}), None, ())
    kinds = [kind for kind, *_ in words(b.build(), layout)]
    assert kinds.count(DONE) == 2 and kinds.count(RECEIVE) == 1 and kinds.count(COPY) == 1
    assert len(code.messages) == 1 and len(code.flow) >= 6 * len(steps.steps) + 1


def test_words_of_flags() -> None:
    """By their places in the window, and by how many starts they may lag."""
    b = Builder(0)
    shared = b.shared(2)
    free = b.wait([1], 1, previous=True)
    b.signal(0, after=[b.copy(SENT[0], shared[0], after=[free])])
    assert words(in_order(b.build()), BlockLayout(8), FakeWindow()) == [
        (FLAGS, 1, 9),
        (COPY, 0, 0, SHARED, 0, 8, 1, 0, 0),
        (RAISE, 0),
    ]


def test_words_of_sizes_that_are_learned() -> None:
    """Rank 0 of two nodes of two, which talks with rank 2: its own blocks are placed first, all others of the node
    after the sizes are learned; large blocks are in tables of their own."""
    topology = Topology([0, 0, 1, 1])
    schedule = get_algorithm("alltoallv", "aggregate").system(topology, {"form": "leader", "window": 4})[0]
    areas = Areas(schedule, topology, 64)
    found = words(schedule, GivenSizes((4, 4), areas, 64), FakeWindow())
    kinds = [kind for kind, *_ in found]
    assert kinds[0] == PLACE and kinds.count(PLACE) == 1 + 3  # own; two lanes and what comes in
    learned, row = kinds.index(PLACE, 1), 8 * areas.width
    assert found[learned - 1] == (COPY, SHARED, row, SIZES, row, row, 1, 0, 0)  # the other lane's row
    assert (COPY, SIZES, 0, SHARED, 0, row, 1, 0, 0) in found[:learned]  # this lane's row is published before
    first = kinds.index(SEND_BLOCKS, learned)
    assert (found[first][1], found[first][4]) == (2, SHARED)  # to rank 2, from the node's buffer
    assert kinds.count(SEND_BLOCKS) == kinds.count(RECEIVE_BLOCKS) == 3 + 1  # large ones to all others, and one message
    assert COPY_BLOCKS in kinds[:learned] and COPY_BLOCKS in kinds[learned:]


@pytest.mark.parametrize("collective", [GATHERV, SCATTERV], ids=str)
def test_words_of_one_block_of_each_rank(collective: Collective) -> None:
    """Two nodes of two: blocks have places of their own, and are as long as the rows of their ranks say, which a leader
    learns. The root has all rows as one."""
    topology, gathers, byte = Topology([0, 0, 1, 1]), collective is GATHERV, compiled.value_of(MPI.BYTE)
    system = get_algorithm(collective.name, "aggregate").system(topology, {"window": 4})
    moved = {  # what moves rows
        0: [] if gathers else [(SEND, 2, 2, 0, SIZES, 16, 16, byte)],
        2: [(COPY, SHARED, 24, SIZES, 24, 8, 1, 0, 0)] if gathers else [(RECEIVE, 0, 2, 1, SIZES, 16, 16, byte)],
        3: [(COPY, SIZES, 24, SHARED, 24, 8, 1, 0, 0)] if gathers else [],
    }
    for rank, schedule in enumerate(system.schedules()):
        slots = Slots(schedule, topology, 64, collective)
        found = words(schedule, GivenSizes((1, 4), slots, 64), FakeWindow())
        places = [each[3:] for each in found if each[0] == PLACE]
        own = topology.node(rank)
        assert places == [(32, own[0], 0), (32 + 64, own[1], 1)] * (2 if rank == 2 else 1)
        assert [each for each in found if each[0] in (COPY, SEND, RECEIVE)] == moved.get(rank, [])
        assert (slots.ends, slots.lane, slots.lanes) == (
            (("recv" if gathers else "send",), 0, 1) if rank == 0 else (("send" if gathers else "recv",), rank, 4)
        )


regions = st.lists(st.integers(0, 11), min_size=1, max_size=12, unique=True)


@needs_engine
@settings(max_examples=200, deadline=None)
@given(regions, st.randoms(use_true_random=False), st.integers(1, 9), st.integers(1, 3))
def test_copies_are_numpys(blocks: list[int], order: Any, nbytes: int, segments: int) -> None:
    """Of any blocks to any others, whole or in segments, at whatever address, for as many starts as wanted."""
    targets = order.sample(range(12), len(blocks))
    b = Builder(0, segments)
    for part in range(segments):
        whole = None if segments == 1 else part
        b.copy(Region("send", tuple(blocks), whole), Region("recv", tuple(targets), whole))
    layout = BlockLayout(nbytes, 1, segments)
    made = engine(b.build(), layout, send=0, recv=0)
    for _ in range(3):
        send = np.frombuffer(order.randbytes(12 * nbytes), np.uint8).reshape(12, nbytes)
        recv, want = np.full((12, nbytes), 255, np.uint8), np.full((12, nbytes), 255, np.uint8)
        want[targets] = send[blocks]
        made.program.move(send.ctypes.data, recv.ctypes.data)
        made.run()
        np.testing.assert_array_equal(recv, want)
    made.free()


@needs_engine
@pytest.mark.parametrize("overlapping", [False, True])
def test_messages_to_oneself(overlapping: bool) -> None:
    """In sequence, and by completions: what is sent arrives, pieces apart as a datatype."""
    b = Builder(0)
    if overlapping:
        arrived = b.recv(0, Region("recv", (0, 2)))
        b.send(0, Region("send", (1, 3)))
        b.copy(RECV[0], RECV[1], after=[arrived])
        b.copy(SENT[0], RECV[3])
    else:
        with b.round():
            b.recv(0, Region("recv", (0, 2)))
            b.send(0, Region("send", (1, 3)))
        with b.round():
            b.copy(RECV[0], RECV[1])
            b.copy(SENT[0], RECV[3])
    assert lower(b.build()).in_sequence != overlapping
    send, recv = np.arange(4) + 5, np.zeros(4, int)
    made = engine(b.build(), BlockLayout(8), send=send.ctypes.data, recv=recv.ctypes.data)
    for _ in range(3):
        recv[:] = -1
        made.run()
        assert recv.tolist() == [6, 6, 8, 5]
        recv[:] = -1
        made.start()
        while not made.progress(False):
            pass
        assert recv.tolist() == [6, 6, 8, 5] and not made.program.active
        send += 1
        send -= 1
    made.free()


@needs_engine
def test_what_a_program_waits_for() -> None:
    """Messages by their operations; flags by the ranks that are to raise them; nothing once it is complete."""
    b = Builder(0)
    shared = b.shared(1)
    arrived = b.recv(0, RECV[0])
    b.copy(RECV[0], shared[0], after=[b.wait([1], 0, previous=False, after=[arrived])])
    window, recv, node = FakeWindow(), np.zeros(1, int), np.zeros(1, int)
    schedule = in_order(b.build())
    made = engine(schedule, BlockLayout(8), window, recv=recv.ctypes.data, shared=node.ctypes.data)
    made.start()
    assert not made.progress(False)
    assert [(each.verb, each.peer) for each in made.pending()] == [("a receive from", 0)]
    MPI.COMM_SELF.Send([np.array([7]), MPI.INT64_T], 0, 0)
    assert not made.progress(False)
    assert [(each.verb, each.peer) for each in made.pending()] == [("the flag of", 1)]
    window.flags[8] = 1
    assert made.progress(False) and made.pending() == [] and node[0] == 7 and window.counts[0] == 1
    made.free()


@needs_engine
@pytest.mark.skipif(sys.platform != "linux", reason="ranks sleep on Linux only")
def test_a_rank_sleeps_until_a_flag_is_raised() -> None:
    """Where nodes have fewer cores than ranks. It is known that it does, and it goes on when another rank raises it."""
    window, other = FakeWindow(sleeps=True), FakeWindow(sleeps=True)
    flags, _, sleepers = window.addresses(True)
    counts = other.addresses(True)[1]
    other.addresses = lambda sleeps: (flags, counts, sleepers)
    other.lane = 1
    waits, tells = Builder(0), Builder(1)
    waits.copy(SENT[0], RECV[0], after=[waits.wait([1], 0, previous=False)])
    tells.signal(0)
    send, recv = np.full(1, 7), np.zeros(1, int)
    waiting = engine(in_order(waits.build()), BlockLayout(8), window, send=send.ctypes.data, recv=recv.ctypes.data)
    telling = engine(in_order(tells.build()), BlockLayout(8), other)
    for number in (1, 2, 3):
        recv[0] = 0
        thread = threading.Thread(target=waiting.run, daemon=True)
        thread.start()
        end = monotonic() + 10
        while window.flags[16] == 0 and monotonic() < end:
            sleep(1e-5)
        assert window.flags[16] == 1 and recv[0] == 0
        telling.run()
        thread.join(10)
        assert not thread.is_alive() and recv[0] == 7 and window.flags[8] == number and window.flags[16] == 0


@needs_engine
def test_errors_of_the_library_are_raised() -> None:
    """As mpi4py raises them; the program is not complete."""
    b = Builder(0)
    with b.round():
        b.send(3, SENT[0])
    comm = MPI.COMM_SELF.Dup()
    send = np.zeros(1, int)
    schedule, places = b.build(), {"send": send.ctypes.data}
    made = Compiled(lower(schedule), BlockLayout(8), comm, 0, places, None, ())  # type: ignore[arg-type]
    with pytest.raises(MPI.Exception) as raised:
        made.run()
    assert raised.value.Get_error_class() == MPI.ERR_RANK and made.program.active
    with pytest.raises(RuntimeError, match="active"):
        made.run()
    comm.Free()


FALLBACK = """
import warnings, sys
import {before}
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import numpy as np, hiercoll
    from mpi4py import MPI
    for _ in range(3):
        hiercoll.alltoall(MPI.COMM_SELF, np.arange(4), algorithm="pairwise")
from hiercoll.runtime import compiled, programs
print(compiled.load()[0], len(told), *[each.message for each in told], sep="; ")
"""


def outcome(before: str, **environment: str) -> str:
    """What a program says of its engine."""
    code = FALLBACK.format(before="os" if before == "" else "os\n" + before)
    own = {name: value for name, value in os.environ.items() if not name.startswith("HIERCOLL_")}
    env = {**own, "HIERCOLL_TABLE": "model", **environment}
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert told.returncode == 0, told.stderr
    return told.stdout.strip()


def test_without_a_compiled_engine() -> None:
    """Python's engines take over: in silence where nothing was built, saying why once where it was asked for."""
    missing = "sys.modules['hiercoll.runtime._engine'] = None"
    assert outcome(missing) == "None; 0"
    why = "no compiled engine, Python's run: it was not built: there was no C compiler when hiercoll was installed"
    assert outcome(missing, HIERCOLL_ENGINE="c") == f"None; 1; {why}"
    assert outcome("", HIERCOLL_ENGINE="python") == "None; 0"


@needs_engine
def test_a_library_whose_functions_are_not_found() -> None:
    """Nor a faulty build: Python's engines take over, and it is said why, once."""
    fault = "import types; m = types.ModuleType('hiercoll.runtime._engine')\n"
    fault += "def setup(*_): raise OSError('MPI_Isend is not found')\n"
    fault += "m.setup = setup; sys.modules['hiercoll.runtime._engine'] = m"
    assert outcome(fault) == "None; 1; no compiled engine, Python's run: MPI_Isend is not found"


UNKNOWN_ARRAYS = "arrays of this NumPy are laid out in a way that is not known"
OTHER_FLAGS = """from mpi4py import MPI; from hiercoll.runtime import _engine as e; real = e.setup_arrays
def other(kind, example, counts): real(kind, (*example[:2], 1 + example[2]), counts)
e.setup_arrays = other"""


@needs_engine
def test_arrays_that_look_otherwise() -> None:
    """The compiled engine reads fields of NumPy's arrays, and looks at one before it does: here, its flags differ."""
    assert outcome(f"import numpy; {OTHER_FLAGS}") == f"None; 1; no compiled engine, Python's run: {UNKNOWN_ARRAYS}"


@needs_engine
def test_arrays_of_a_numpy_that_is_imported_later() -> None:
    """Until then it tells no arrays from other buffers; where they look otherwise, for good, and that is said once."""
    code = "import sys, warnings; from mpi4py import MPI; from hiercoll import Intracomm\n"
    code += "from hiercoll.runtime.compiled import know_arrays\nassert 'numpy' not in sys.modules\n"
    code += "warnings.simplefilter('error')\ncomm, told = Intracomm(MPI.COMM_SELF), []\n"
    code += "def gathered(buffer, into):\n for _ in range(3): comm.Allgather(buffer, into)\n"
    code += "gathered(bytearray(b'abc'), mine := bytearray(3)); assert mine == b'abc'\n"
    code += "assert know_arrays.cache_info().currsize == 0\nimport numpy\n"
    code += "with warnings.catch_warnings(record=True) as told:\n warnings.simplefilter('always')\n"
    code += " gathered(numpy.arange(3.0), found := numpy.zeros(3)); gathered(bytearray(b'xyz'), mine)\n"
    code += "assert know_arrays.cache_info().currsize == 1 and list(found) == [0, 1, 2] and mine == b'xyz'\n"
    code += "print(*[each.message for each in told], sep='; ')"
    for begin, said in (("", ""), (f"{OTHER_FLAGS}\n", f"the compiled engine does not know arrays: {UNKNOWN_ARRAYS}")):
        command = [sys.executable, "-c", begin + code]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert told.stdout.strip() == said


def shown(code: programs.Code, datatypes: dict[object, MPI.Datatype]) -> list[Any]:
    """The words, with what a datatype is like instead of its handle."""
    known = {compiled.value_of(each): like for like, each in datatypes.items()}
    return [known.get(word, word) for word in code.words]


@entries_of(*(each.name for each in COLLECTIVES.values() if each.is_even and not each.operation))
def test_words_for_blocks_of_any_size(entry: Algorithm) -> None:
    """Those for one byte, times the size, are those for that size: of all algorithms, in all their forms."""
    for topology, params, schedules in small_systems(entry):
        for schedule, block in product(schedules, (8, 1, 24)):
            steps, layout = lower(schedule), BlockLayout(block, 1, schedule.segments)
            own, other = dict[object, MPI.Datatype](), dict[object, MPI.Datatype]()
            where: tuple[Any, ...] = FakeWindow() if schedule.flags else None, topology.lane_of
            made, scaled = compile_steps(steps, LaidOut(layout, own), *where), _scaled(steps, layout, *where, other)
            if schedule.segments > 1:
                assert scaled is None
                continue
            assert scaled is not None and shown(scaled, other) == shown(made, own), (params, schedule.rank, block)
            assert scaled[1:] == made[1:] and list(own) == list(other)


def test_words_for_blocks_that_are_too_long() -> None:
    """Where blocks that lie together have more bytes than MPI counts, each size has its own words; so have blocks of
    no bytes, and segments."""
    b = Builder(0)
    b.send(1, SENT[0:4])
    steps = lower(b.build())
    assert _scaled(steps, BlockLayout(2**29 - 1), None, (), {}) is not None
    for layout in (BlockLayout(2**29), BlockLayout(0), BlockLayout(8, 1, 2), UnevenLayout()):
        assert _scaled(steps, layout, None, (), {}) is None
