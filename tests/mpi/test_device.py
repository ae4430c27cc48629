"""Device arrays, on a simulated device that is as late, or as early, as CUDA's rules permit."""

from __future__ import annotations

import ctypes
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import CALLS, VARIANTS, WORLD, layouts
from mpi4py import MPI

import hiercoll
from hiercoll import BufferTypeError, ConstraintError, DeviceError, DeviceMemoryError, ParameterError, cuda
from hiercoll.algorithms import REGISTRY
from hiercoll.cuda.arrays import Producers
from hiercoll.cuda.binding import bind
from hiercoll.cuda.late import LateArray, LateDevice
from hiercoll.cuda.memory import DeviceCopy, DeviceMemory, PeerCopy
from hiercoll.errors import PlanError, TransportWarning
from hiercoll.memory import BlockLayout, HostMemory, Memory, Reduction
from hiercoll.runtime import binding, factory
from hiercoll.runtime import plan as executor
from hiercoll.runtime.addresses import NAMES, Addresses
from hiercoll.runtime.binding import Binding
from hiercoll.runtime.lifetime import get_session
from hiercoll.runtime.memories import takes_device_memory
from hiercoll.runtime.session import mpi_library
from hiercoll.schedule import Get, Schedule
from hiercoll.schedule.lowering import lower
from hiercoll.schedule.transports import DIRECT, Transport
from hiercoll.tables import Choice, Entry, Table, Variant
from hiercoll.tools.bench import Bench
from hiercoll.tools.measuring import Contest, DataError
from hiercoll.tools.workload import buffers
from hiercoll.tuning.search import Search

RANK, SIZE = WORLD.rank, WORLD.size
BLOCK = 200  # bytes, no multiple of 16
OWN_STREAM = 7


@pytest.fixture(params=["late", "early", "random"])
def device(request: pytest.FixtureRequest) -> Iterator[LateDevice]:
    made = LateDevice(order=request.param, seed=RANK)
    with cuda.use(lambda address: made):
        yield made


def wrong(device: LateDevice, comm: MPI.Intracomm, collective: str, inplace: bool = False, **options: Any) -> list[int]:
    """Of two calls on the same arrays, with other data in the second, those that gave wrong data."""
    send, recv = (
        LateArray(device, array.shape, np.uint8, OWN_STREAM) for array in buffers(collective, BLOCK, RANK, SIZE)
    )
    found = []
    for salt in (0, 1):
        values, expected = (array + np.uint8(salt) for array in buffers(collective, BLOCK, RANK, SIZE))
        start = np.full(expected.shape, 0xA5, np.uint8)
        if inplace:
            start = (
                values
                if collective == "alltoall"
                else np.where(np.arange(SIZE * BLOCK) // BLOCK == RANK, expected, start)
            )
        recv.fill(start)
        send.fill(values)
        result = CALLS[collective](comm, MPI.IN_PLACE if inplace else send, recv, **options)
        assert result is recv
        if not np.array_equal(recv.get(), expected):
            found.append(salt)
    return found


@contextmanager
def telling() -> Iterator[list[str]]:
    """What all ranks warn of transports: there at the end. Collective."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield told
    own = [str(each.message) for each in caught if each.category is TransportWarning]
    told.extend(text for texts in WORLD.allgather(own) for text in texts)


def check(device: LateDevice, comm: MPI.Intracomm, collective: str, **options: Any) -> None:
    """Right data."""
    assert not wrong(device, comm, collective, **options)


@pytest.mark.ranks([1, 3, 4])
@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("transport", ["staged", "direct", "peer"])
def test_every_algorithm(
    device: LateDevice,
    on_layout: Callable[[str], MPI.Intracomm],
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    layout: str,
) -> None:
    """Right data, whenever the device does its work."""
    device.aware = transport == "direct"
    monkeypatch.setenv("HIERCOLL_CUDA_AWARE", str(int(device.aware)))
    comm = on_layout(layout)
    topology = hiercoll.get_topology(comm)
    for collective, name, params in VARIANTS:
        if REGISTRY[collective][name].refusal(topology, params) is None:
            check(device, comm, collective, algorithm=name, transport=transport, **params)
    for collective in CALLS:
        for name in ("native", "auto"):
            check(device, comm, collective, algorithm=name, transport=transport)


def addresses_of(comm: MPI.Intracomm, schedule: Schedule, memory: Any, places: dict[Any, int]) -> Addresses:
    """As plans have them."""
    session = get_session(comm)
    own = {name: places[name] for name in NAMES if name in schedule.offered}
    wanted = [(op.peer, op.source.buffer) for op in schedule.ops if isinstance(op, Get)]
    least = partial(session.agreement.least, what="addresses")
    lanes = session.topology.lane_of
    return Addresses(RANK, lanes, session.node.size, memory, own, wanted, session.node.Allgather, least)


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("transport", [None, Transport(False, 0), Transport(False, 1), Transport(True, 1)])
def test_reductions(
    device: LateDevice, on_layout: Callable[[str], MPI.Intracomm], transport: Transport | None, layout: str
) -> None:
    """Plans of a schedule with reductions, on the host too, bound by hand: no call makes one yet."""
    device.aware = transport == Transport(False, 0)
    comm, how, items = on_layout(layout), Reduction(np.dtype("i4"), "sum"), 6
    topology = hiercoll.get_topology(comm)
    emit = partial(REGISTRY["allreduce"]["ring"].schedule, topology, params={}, inplace=False)
    schedule = (transport or DIRECT).schedule(emit, topology, RANK)
    memory: Memory = DeviceMemory(device) if transport else HostMemory()
    values = np.arange(SIZE * items, dtype="i4") + RANK
    send, recv = (device.array(v, OWN_STREAM) if transport else v for v in (values, np.full_like(values, -1)))
    addresses = [array.address if transport else array.ctypes.data for array in (send, recv)]
    (scratch, one), (host, two) = (
        memory.allocate(schedule.scratch * items * 4),
        memory.allocate_host(schedule.host * items * 4),
    )
    places: dict[Any, int] = dict(zip(("send", "recv", "scratch", "host"), (*addresses, scratch, host), strict=True))
    block = BlockLayout(items * 4, 4, schedule.segments)
    peers = addresses_of(comm, schedule, memory, places) if transport and transport.peer else None
    binding = Binding(comm, topology.lane_of, memory, block, places, 0, peers=peers)
    plan = executor.plan_of(lower(schedule), replace(binding, reduction=how), "allreduce")
    plan.producers, plan.tell = Producers(OWN_STREAM), peers and peers.tell
    for salt in (0, 1):
        if salt and transport:
            send.fill(values + salt)
        elif salt:
            send += salt
        plan()
        expected = SIZE * (np.arange(SIZE * items) + salt) + SIZE * (SIZE - 1) // 2
        np.testing.assert_array_equal(recv.get() if transport else recv, expected)
    plan.free()
    assert one is not None and two is not None
    if SIZE > 1:
        with pytest.raises(PlanError, match=r"Binding\.reduction"):
            executor.plan_of(lower(schedule), binding, "allreduce")


@pytest.mark.parametrize("transport", ["staged:3", "peer:3"])
@pytest.mark.parametrize("name", ["scatter_destination", "bruck", "eager", "hierarchical", "grouped", "native"])
def test_in_parts(device: LateDevice, on_layout: Callable[[str], MPI.Intracomm], name: str, transport: str) -> None:
    """Parts that overlap."""
    layout = f"{SIZE - SIZE // 2}+{SIZE // 2}" if SIZE > 2 and transport == "peer:3" else f"1x{SIZE}"
    check(device, on_layout(layout), "alltoall", algorithm=name, transport=transport)


@pytest.mark.parametrize("collective", CALLS)
@pytest.mark.parametrize("name", ["native", "auto", "inplace", "ring"])
def test_in_place(device: LateDevice, comm: MPI.Intracomm, collective: str, name: str) -> None:
    """The input in the receive buffer."""
    if name in ("inplace", "ring") and name not in REGISTRY[collective]:
        pytest.skip("not of this collective")
    values, expected = buffers(collective, BLOCK, RANK, SIZE)
    start = values if collective == "alltoall" else np.where(np.arange(SIZE * BLOCK) // BLOCK == RANK, expected, 0xA5)
    recv = device.array(start.astype(np.uint8), OWN_STREAM)
    CALLS[collective](comm, MPI.IN_PLACE, recv, algorithm=name)
    np.testing.assert_array_equal(recv.get(), expected)


@pytest.mark.parametrize("name", ["scatter_destination", "eager", "native"])
def test_plans(device: LateDevice, comm: MPI.Intracomm, name: str) -> None:
    """Start and wait, with work in between."""
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    send, recv = device.array(values, OWN_STREAM), LateArray(device, expected.shape, np.uint8, OWN_STREAM)
    with hiercoll.alltoall_init(comm, send, recv, algorithm=name) as plan:
        for salt in range(3):
            send.fill(values + salt)
            plan.start()
            while not plan.test():
                pass
            np.testing.assert_array_equal(recv.get(), expected + salt)


@pytest.mark.ranks([3, 4])
@pytest.mark.parametrize("name", ["scatter_destination", "eager", "grouped"])
def test_nothing_but_flags_within_a_node(
    device: LateDevice, on_layout: Callable[[str], MPI.Intracomm], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Plans make no messages within it, staged or by peer; where its memory has no room, staged ones are sent."""
    comm = on_layout(f"{SIZE - 1}+1")
    near = 0 if RANK == SIZE - 1 else SIZE - 2
    made: list[int] = []
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    send, recv = device.array(values, OWN_STREAM), LateArray(device, expected.shape, np.uint8, OWN_STREAM)
    init = binding._bind_messages

    def counted(ops: Any, *args: Any) -> Any:
        parts = init(ops := list(ops), *args)
        made.extend(op.peer for op, part in zip(ops, parts, strict=True) if isinstance(part, MPI.Prequest))
        return parts

    monkeypatch.setattr(binding, "_bind_messages", counted)
    for transport in ("staged", "peer", "staged"):
        made.clear()
        with hiercoll.alltoall_init(comm, send, recv, algorithm=name, transport=transport) as plan:
            for salt in range(3):
                send.fill(values + salt)
                plan()
                np.testing.assert_array_equal(recv.get(), expected + salt)
        assert set(made) <= ({SIZE - 1} if near else set(range(SIZE - 1)))
    monkeypatch.setattr(factory, "free_shared_memory", lambda: 10)
    check(device, comm, "alltoall", algorithm=name, transport="staged")
    assert set(made) - {SIZE - 1} or not near


def test_a_stream_of_the_callers(device: LateDevice, comm: MPI.Intracomm) -> None:
    """``stream=`` counts, not what the array says."""
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    send, recv = LateArray(device, values.shape, np.uint8, OWN_STREAM), LateArray(device, expected.shape, np.uint8)
    send.stream = 9
    send.fill(values)
    send.stream = OWN_STREAM
    hiercoll.alltoall(comm, send, recv, stream=9)
    np.testing.assert_array_equal(recv.get(), expected)


def test_streams_that_change(device: LateDevice, comm: MPI.Intracomm) -> None:
    """A plan comes after the stream that is the array's when it is started, not when the plan was made; and after what
    is under way on that of the receive buffer."""
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    send, recv = LateArray(device, values.shape, np.uint8, 5), LateArray(device, expected.shape, np.uint8, 6)
    with hiercoll.alltoall_init(comm, send, recv, algorithm="scatter_destination", transport="staged") as plan:
        for salt in range(3):
            send.stream, recv.stream = 10 + salt, 20 + salt
            recv.fill(np.full_like(expected, 0xA5))
            send.fill(values + salt)
            plan()
            np.testing.assert_array_equal(recv.get(), expected + salt)


@pytest.mark.parametrize("kind", ["protocol", "attribute", "ctypes", "number"])
def test_streams_of_other_libraries(device: LateDevice, comm: MPI.Intracomm, kind: str) -> None:
    """NVIDIA's protocol, CuPy's and PyTorch's attributes, Numba's handles of ctypes."""
    stream: Any = {
        "protocol": SimpleNamespace(__cuda_stream__=lambda: (0, 9)),
        "attribute": SimpleNamespace(ptr=9),
        "ctypes": SimpleNamespace(handle=ctypes.c_void_p(9)),
        "number": 9,
    }[kind]
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    send, recv = device.array(values, 9), LateArray(device, expected.shape, np.uint8)
    send.stream = 1
    hiercoll.alltoall(comm, send, recv, stream=stream)
    np.testing.assert_array_equal(recv.get(), expected)


def test_a_stream_that_is_captured(device: LateDevice, comm: MPI.Intracomm) -> None:
    """It is refused before anything moves, and the communicator goes on."""
    send = device.array(np.zeros(SIZE * 8), 9)
    hiercoll.alltoall(comm, send, stream=9)
    for _ in range(2):
        device.capturing.add(9)
        with pytest.raises(ParameterError, match="stream: expected one that is not being captured into a graph"):
            hiercoll.alltoall(comm, send, stream=9)
        device.capturing.clear()
        check(device, comm, "alltoall")


def test_a_plan_holds_up_no_other_one(comm: MPI.Intracomm) -> None:
    """Each has streams of its own; those of freed plans are used again."""
    memory = DeviceMemory(LateDevice())
    one, other = memory.of_plan(), memory.of_plan()
    assert len({id(each.stream(use)) for each in (one, other) for use in ("in", "out", ("get", 3))}) == 6
    streams = {id(one.stream("in")), id(one.stream("out")), id(one.stream(("get", 3)))}
    del one
    assert {id(memory.of_plan().stream("within"))} <= streams


@pytest.mark.ranks([2, 4])
def test_memory_that_is_given_out_again_and_again(
    device: LateDevice, on_layout: Callable[[str], MPI.Intracomm]
) -> None:
    """Of 4 MiB and more, in sizes that vary, over two communicators: one cache of mappings serves both, and what
    overlaps is not mapped twice."""
    comms = [on_layout(f"1x{SIZE}"), on_layout(f"1x{SIZE}")]
    for turn in range(6):
        items = (1 << 22) // SIZE + 4096 * (turn * 7 % 5)
        block = np.full(items, 16 * RANK + turn, np.uint8)
        send = device.array(np.tile(block, SIZE), OWN_STREAM)
        recv = LateArray(device, (SIZE * items,), np.uint8, OWN_STREAM)
        for comm in comms:
            hiercoll.alltoall(comm, send, recv, algorithm="pairwise", transport="peer")
            expected = np.repeat(np.arange(SIZE) * 16 + turn, items).astype(np.uint8)
            np.testing.assert_array_equal(recv.get(), expected)
        del send, recv
    cuda.unmap(WORLD)


@pytest.mark.ranks([2, 4])
@pytest.mark.parametrize("held", [False, True])
def test_a_mapping_that_fails_on_one_rank(
    device: LateDevice, on_layout: Callable[[str], MPI.Intracomm], monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """All ranks raise before data move, and go on."""
    comm = on_layout(f"1x{SIZE}")
    check(device, comm, "alltoall", algorithm="pairwise", transport="peer")
    cuda.unmap(WORLD)

    def refuse(handle: bytes) -> Any:
        raise DeviceError("handle", "memory that can be mapped", "no room for it")

    send, recv = device.array(np.zeros(SIZE * 8), OWN_STREAM), device.array(np.ones(SIZE * 8), OWN_STREAM)
    call = hiercoll.alltoall_init if held else hiercoll.alltoall
    if RANK == SIZE - 1:
        monkeypatch.setattr(device, "open", refuse)
    with pytest.raises(DeviceError, match="no room" if RANK == SIZE - 1 else "some that another rank cannot"):
        call(comm, send, recv, algorithm="pairwise", transport="peer")
    np.testing.assert_array_equal(recv.get(), np.ones(SIZE * 8))
    monkeypatch.undo()
    check(device, comm, "alltoall", algorithm="pairwise", transport="peer")


def test_new_arrays(device: LateDevice, comm: MPI.Intracomm) -> None:
    """The result is of the caller's kind, with its type and shape."""
    values = np.arange(SIZE * 6, dtype=np.float32).reshape(SIZE, 2, 3) + 100 * RANK
    result = hiercoll.alltoall(comm, device.array(values))
    assert isinstance(result, LateArray) and result.shape == (SIZE, 2, 3) and result.dtype == np.float32
    np.testing.assert_array_equal(
        result.get(), [np.arange(RANK * 6, RANK * 6 + 6).reshape(2, 3) + 100 * r for r in range(SIZE)]
    )
    gathered = hiercoll.allgather(comm, device.array(values[0]))
    assert gathered.shape == (SIZE, 2, 3)
    assert hiercoll.alltoall(comm, device.array(np.empty((SIZE, 0)))).nbytes == 0


def no_wait(self: object) -> None:
    """Instead of waiting."""


def at_once(self: object) -> bool:
    """Instead of asking."""
    return True


def unordered(self: DeviceMemory, handles: Iterable[int], direct: bool) -> None:
    """Neither copies nor messages after what the caller has enqueued."""


def without_streams(self: DeviceMemory, handles: Iterable[int], direct: bool) -> None:
    """Messages after what the caller has enqueued, copies not."""
    for handle in handles if direct else ():
        self.device.stream_of(handle).record().synchronize()


def without_host(self: DeviceMemory, handles: Iterable[int], direct: bool) -> None:
    """Copies after what the caller has enqueued, messages not."""
    BEFORE_MESSAGES(self, handles, False)


BEFORE_MESSAGES = DeviceMemory.before_messages
MUTATIONS: dict[str, tuple[type, str, Any, dict[str, Any]]] = {  # what is lost, and where that matters
    "waiting for copies": (DeviceCopy, "wait", no_wait, {"algorithm": "scatter_destination", "transport": "staged"}),
    "waiting for copies, native": (DeviceCopy, "wait", no_wait, {"algorithm": "native", "transport": "staged"}),
    "asking for copies": (DeviceCopy, "done", at_once, {"algorithm": "scatter_destination", "transport": "staged:2"}),
    "order": (DeviceMemory, "before_messages", unordered, {"algorithm": "scatter_destination", "transport": "staged"}),
    "order, native": (DeviceMemory, "before_messages", unordered, {"algorithm": "native", "transport": "staged"}),
    "order of copies": (
        DeviceMemory, "before_messages", without_streams, {"algorithm": "scatter_destination", "transport": "staged"},
    ),
    "order of messages": (
        DeviceMemory, "before_messages", without_host, {"algorithm": "scatter_destination", "transport": "direct"},
    ),
    "asking for gets": (PeerCopy, "done", at_once, {"algorithm": "scatter_destination", "transport": "peer"}),
}  # fmt: skip


@pytest.mark.ranks([2, 4])
@pytest.mark.parametrize("lost", MUTATIONS)
def test_a_lost_synchronisation_is_seen(
    on_layout: Callable[[str], MPI.Intracomm], monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Each one, on the simulated device, gives wrong data on some rank."""
    owner, name, instead, options = MUTATIONS[lost]
    device = LateDevice(aware=options["transport"] == "direct", seed=RANK)
    monkeypatch.setenv("HIERCOLL_CUDA_AWARE", str(int(device.aware)))
    monkeypatch.setattr(owner, name, instead)
    comm = on_layout(f"1x{SIZE}" if options["transport"] == "peer" else f"{SIZE}x1")
    collective = "allgather" if options["algorithm"] == "ring" else "alltoall"
    with cuda.use(lambda address: device):
        found = wrong(device, comm, collective, **options)
    assert any(WORLD.allgather(found))


@pytest.mark.ranks([2, 4])
def test_an_offer_before_its_data_is_seen(
    on_layout: Callable[[str], MPI.Intracomm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If offers do not wait for what the caller has enqueued, rank 0 gets old data: its device works at
    once, the others' devices late, and what would make them work, a get of their own, later still."""
    get = PeerCopy.start

    def start(self: PeerCopy) -> None:
        if RANK:
            time.sleep(0.1)
        get(self)

    monkeypatch.setattr(DeviceMemory, "before_messages", without_host)
    monkeypatch.setattr(PeerCopy, "start", start)
    device = LateDevice(order="late" if RANK else "early")
    comm = on_layout(f"1x{SIZE}")
    with cuda.use(lambda address: device):
        found = wrong(device, comm, "allgather", inplace=True, algorithm="ring", transport="peer")
    assert any(WORLD.allgather(found))


@pytest.mark.parametrize("name", ["scatter_destination", "bruck", "grouped"])
def test_memory_that_mates_cannot_map(device: LateDevice, on_layout: Callable[[str], MPI.Intracomm], name: str) -> None:
    """Another buffer takes its place, on that rank only."""
    comm = on_layout(f"1x{SIZE}")
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    device.private = RANK == 0
    send, recv = device.array(values, OWN_STREAM), LateArray(device, expected.shape, np.uint8, OWN_STREAM)
    device.private = False
    with telling() as told:
        for salt in (0, 1):
            send.fill(values + salt)
            hiercoll.alltoall(comm, send, recv, algorithm=name, transport="peer")
            np.testing.assert_array_equal(recv.get(), expected + salt)
        gathered = buffers("allgather", BLOCK, RANK, SIZE)[1]
        start = np.where(np.arange(SIZE * BLOCK) // BLOCK == RANK, gathered, 0xA5).astype(np.uint8)
        device.private = RANK == 0
        inplace = device.array(start, OWN_STREAM)
        device.private = False
        hiercoll.allgather(comm, MPI.IN_PLACE, inplace, algorithm="ring", transport="peer")
        np.testing.assert_array_equal(inplace.get(), gathered)
    assert len(told) == min(SIZE - 1, 1) and all("rank 0: transport 'peer' copies" in text for text in told)
    assert all("bytes more of device memory" in text and "expandable_segments" in text for text in told)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("held", [False, True])
def test_a_warning_of_mirrors_as_an_error(
    device: LateDevice, on_layout: Callable[[str], MPI.Intracomm], held: bool
) -> None:
    """Where warnings are errors, what one rank mirrors is one error on all ranks, and then the calls go on."""
    comm = on_layout(f"1x{SIZE}")
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    device.private = RANK == 1
    send, recv = device.array(values, OWN_STREAM), LateArray(device, expected.shape, np.uint8, OWN_STREAM)
    device.private = False
    how: dict[str, Any] = {"algorithm": "scatter_destination", "transport": "peer"}
    with pytest.raises(TransportWarning, match="rank 1: transport 'peer' copies buffers"):
        hiercoll.alltoall_init(comm, send, recv, **how) if held else hiercoll.alltoall(comm, send, recv, **how)
    hiercoll.alltoall(comm, send, recv, **how)
    np.testing.assert_array_equal(recv.get(), expected)


@pytest.mark.mpi(min_size=2)
def test_hidden_devices(device: LateDevice, on_layout: Callable[[str], MPI.Intracomm]) -> None:
    """Where each rank sees only a device of its own, one rank warns, says what helps, and the host's memory serves."""
    comm = on_layout(f"1x{SIZE}")
    buses = [f"0000:{rank:02x}:00.0" for rank in range(SIZE)]
    device.bus, device.hidden = buses[RANK], {bus for bus in buses if bus != buses[RANK]}
    with telling() as told:
        for collective in CALLS:
            check(device, comm, collective, transport="peer")
    assert len(told) == 1 and "rank 0: transport 'peer' passes through the host instead" in told[0]
    assert f"GPU {buses[1]} is hidden from this rank" in told[0] and "--gpu-bind=none" in told[0]
    other = on_layout(f"1x{SIZE}")
    with pytest.raises(TransportWarning, match="passes through the host"):  # as an error: on all ranks
        check(device, other, "alltoall", transport="peer")
    check(device, other, "alltoall", transport="peer")


@pytest.mark.mpi(min_size=2)
def test_no_memory_of_mates(device: LateDevice, on_layout: Callable[[str], MPI.Intracomm]) -> None:
    """Where one rank's memory cannot be mapped at all, one rank warns, and the host's memory serves."""
    comm = on_layout(f"1x{SIZE}")
    device.private = RANK == 1
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    send, recv = device.array(values, OWN_STREAM), LateArray(device, expected.shape, np.uint8, OWN_STREAM)
    with telling() as told:
        for _ in range(2):
            hiercoll.alltoall(comm, send, recv, transport="peer")
    np.testing.assert_array_equal(recv.get(), expected)
    assert len(told) == 1 and "passes through the host" in told[0]
    assert "hidden" not in told[0]


@pytest.mark.parametrize("name", ["scatter_destination", "bruck", "grouped"])
def test_memory_at_an_address_used_before(
    device: LateDevice, on_layout: Callable[[str], MPI.Intracomm], name: str
) -> None:
    """New arrays in each call, at the addresses of freed ones: the ranks of the node map what is there now."""
    comm = on_layout(f"1x{SIZE}")
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    for salt in range(6):
        send = device.array(values + salt, OWN_STREAM)
        result = hiercoll.alltoall(comm, send, algorithm=name, transport="peer")
        np.testing.assert_array_equal(result.get(), expected + salt)
        if salt % 2:
            del send, result
    assert device.counts["mappings"] <= 20 * SIZE


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("transport", ["staged", "peer"])
@pytest.mark.parametrize("name", ["inplace", "grouped"])
def test_no_memory_on_one_rank(
    device: LateDevice, on_layout: Callable[[str], MPI.Intracomm], name: str, transport: str
) -> None:
    """Too little on one rank is an error on all, for plans and calls, and the communicator goes on."""
    comm = on_layout(f"1x{SIZE}")
    there = device.array(np.zeros(SIZE * 4096))
    source = MPI.IN_PLACE if name == "inplace" else device.array(np.zeros(SIZE * 4096))
    given: dict[str, Any] = {"algorithm": name, "transport": transport}
    if name == "grouped":
        given["memory"] = "shared"
    if name == "grouped" and transport == "staged":
        given = {"algorithm": "bruck", "transport": transport}
    check(device, comm, "alltoall", transport=transport)
    device.limit = device.used if RANK == 0 else 1 << 30
    for call in (hiercoll.alltoall_init, hiercoll.alltoall):
        with pytest.raises(DeviceMemoryError, match="left" if RANK == 0 else "too little on another one"):
            call(comm, source, there, **given)
    device.limit = 1 << 30
    hiercoll.alltoall(comm, source, there, **given)
    check(device, comm, "alltoall", transport=transport)


def test_what_cannot_be(device: LateDevice, comm: MPI.Intracomm) -> None:
    """Typed errors, and the communicator goes on."""
    there, here = device.array(np.zeros(SIZE)), np.zeros(SIZE)
    with pytest.raises(BufferTypeError, match=r"memory of a simulated device \(.*\), as sendbuf, got host"):
        hiercoll.alltoall(comm, there, here)
    with pytest.raises(BufferTypeError, match="memory of the host, as sendbuf, got a simulated"):
        hiercoll.alltoall(comm, here, there)
    with pytest.raises(ConstraintError, match="HIERCOLL_CUDA_AWARE=1"):
        hiercoll.alltoall(comm, there, transport="direct")
    for transport in ("node_ranks", "peer:65", "staged:0", "staged:x", "direct:2", 3):
        with pytest.raises(ParameterError, match="'auto', 'direct', 'staged', 'peer'"):
            hiercoll.alltoall(comm, there, transport=transport)
    with pytest.raises(ParameterError, match="for arrays on the host"):
        hiercoll.alltoall(comm, here, transport="staged")
    with pytest.raises(ParameterError, match="a CUDA stream"):
        hiercoll.alltoall(comm, there, stream="mine")
    device.limit = device.used
    with pytest.raises(DeviceMemoryError, match="left"):  # for the new array
        hiercoll.alltoall(comm, there)
    device.limit = 1 << 30
    check(device, comm, "alltoall")


def test_counted_buffers(device: LateDevice, comm: MPI.Intracomm) -> None:
    """mpi4py's specifications, with device arrays in them; a count smaller than the buffer too."""
    values = np.arange(SIZE * 3, dtype=np.float64) + 100 * RANK
    expected = np.concatenate([np.arange(RANK * 3, RANK * 3 + 3) + 100.0 * r for r in range(SIZE)])
    send, recv = device.array(values), LateArray(device, (SIZE * 3 + 5,), np.float64)
    result = hiercoll.alltoall(comm, [send, 3, MPI.DOUBLE], [recv, 3, MPI.DOUBLE])
    assert result is recv
    np.testing.assert_array_equal(recv.get()[: SIZE * 3], expected)
    longer = device.array(np.concatenate([values, values]))
    new = hiercoll.alltoall(comm, [longer, 3, MPI.DOUBLE])
    assert isinstance(new, LateArray) and new.shape == (SIZE * 3,)
    np.testing.assert_array_equal(new.get(), expected)


class LateArrays:
    """`measuring.Arrays` on the simulated device."""

    kind = "cuda"

    def __init__(self, device: LateDevice) -> None:
        self.device = device

    def put(self, values: np.ndarray[Any, Any]) -> LateArray:
        return self.device.array(values, OWN_STREAM)

    def fill(self, array: LateArray, values: np.ndarray[Any, Any]) -> None:
        array.fill(values)

    def get(self, array: LateArray) -> np.ndarray[Any, Any]:
        return array.get()


@pytest.mark.ranks([1, 2, 4])
def test_bench_and_tuning(device: LateDevice, on_layout: Callable[[str], MPI.Intracomm]) -> None:
    """Benchmarks and the search on device memory; the table's choice, with its transport, is what "auto" runs."""
    comm = on_layout(f"1x{SIZE}")
    bench = Bench(comm, seconds=0.05, arrays=LateArrays(device))
    subjects = [Variant("native"), Variant("scatter_destination"), Variant("bruck", {}, "staged:2")]
    results = list(bench.run("alltoall", subjects, [64, 1000]))
    assert [result.name for result in results[:3]] == ["native", "scatter_destination", "bruck staged:2"]
    transports = bench.transports()
    assert ("peer" in transports) == (SIZE > 1)
    tried: set[str] = set()

    def opened(collective: str, size: int, field: Sequence[Variant]) -> Contest:
        tried.update(variant.transport for variant in field)
        return bench.open(collective, size, field)

    Search("alltoall", bench.topology, opened, bench.clock, 1.0, bench.links(), transports=transports).run([256])
    assert tried >= {transport for transport in transports if SIZE > 1 or transport in ("auto", "staged")}
    chosen = Variant("scatter_destination", {"window": 32}, "peer")
    topology = hiercoll.get_topology(comm)
    entry = Entry("alltoall", mpi_library(), "cuda", topology.node_sizes, topology.placement, (Choice(1, chosen),))
    hiercoll.configure(comm, table=Table((entry,)))
    check(device, comm, "alltoall")
    plans = [plan for plan in get_session(comm).plans.values() if plan.schedule]
    gets = [op for plan in plans for op in plan.schedule.ops if isinstance(op, Get)]
    assert len(gets) == (SIZE - 1) * len(plans)


class Vectors:
    """Blocks of sizes drawn for each turn, a device array for each end; the first rank receives nothing in turn 1."""

    def __init__(self, device: LateDevice, turn: int, form: str) -> None:
        draw = np.random.default_rng(turn)
        sizes = draw.integers(0, 9, (SIZE, SIZE)) + 900 * (draw.random((SIZE, SIZE)) < 0.2)
        sizes[:, 0] *= turn != 1
        if form == "allgatherv":
            sizes[:] = sizes[:, -1:]
        sent, received = sizes[RANK], sizes[:, RANK].copy()
        gaps = draw.integers(0, 2, SIZE)
        at = np.cumsum(received + gaps) - received
        values = np.concatenate(
            [np.full(n, 100.0 * RANK + peer * (form == "alltoallv")) for peer, n in enumerate(sent)]
        )
        self.expected = np.full(int((received + gaps).sum()) if received.any() else 0, -1.0)
        for peer in range(SIZE if received.any() else 0):
            self.expected[at[peer] : at[peer] + received[peer]] = 100 * peer + RANK * (form == "alltoallv")
        self.result = device.array(np.full(len(self.expected), -1.0), OWN_STREAM)
        self.send: Any = [device.array(values, OWN_STREAM), sent]
        if form == "allgatherv":
            self.send = device.array(values[: sent[0]], OWN_STREAM)
        self.recv = [self.result, (received, at if received.any() else at * 0)]

    def check(self) -> None:
        np.testing.assert_array_equal(self.result.get(), self.expected)


@pytest.mark.parametrize("how", ["call", "in the background", "plan", "drop-in", "drop-in, request", "drop-in, plan"])
@pytest.mark.parametrize("form", ["alltoallv", "allgatherv"])
@pytest.mark.parametrize("algorithm", ["auto", "native", "straight", "shared"])
@pytest.mark.parametrize("transport", ["staged", "direct"])
def test_blocks_of_any_sizes(
    device: LateDevice,
    on_layout: Callable[[str], MPI.Intracomm],
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    algorithm: str,
    form: str,
    how: str,
) -> None:
    """Other sizes in each turn, gaps between blocks, in all forms: what lies in the gaps stays."""
    device.aware = transport == "direct"
    monkeypatch.setenv("HIERCOLL_CUDA_AWARE", str(int(device.aware)))
    comm = on_layout(f"{SIZE - SIZE // 2}+{SIZE // 2}" if SIZE > 1 else "1x1")
    ours = hiercoll.Intracomm(comm)
    options: dict[str, Any] = {"algorithm": algorithm}
    if algorithm == "straight":
        options = {"algorithm": "pairwise" if form == "alltoallv" else "ring"}
    if algorithm == "shared":
        options = {"algorithm": "aggregate" if form == "alltoallv" else "shared", "limit": 600}
        if form == "allgatherv":
            del options["limit"]
    if (algorithm == "shared" and how == "in the background") or ("drop-in" in how and algorithm != "auto"):
        pytest.skip("not to be had")
    if how != "in the background":
        options["transport"] = transport
    for turn in range(4):
        given = Vectors(device, turn, form)
        if how == "call":
            getattr(hiercoll, form)(comm, given.send, given.recv, **options)
        elif how == "in the background":
            getattr(hiercoll, f"i{form}")(comm, given.send, given.recv, **options).wait()
        elif how == "plan":
            with getattr(hiercoll, f"{form}_init")(comm, given.send, given.recv, **options) as plan:
                plan()
        elif how == "drop-in":
            getattr(ours, form.capitalize())(given.send, given.recv)
        elif how == "drop-in, request":
            getattr(ours, f"I{form}")(given.send, given.recv).Wait()
        else:
            request = getattr(ours, f"{form.capitalize()}_init")(given.send, given.recv)
            request.Start()
            request.Wait()
            request.Free()
        given.check()


@pytest.mark.parametrize("how", ["call", "request", "plan"])
def test_drop_in_methods(device: LateDevice, comm: MPI.Intracomm, how: str) -> None:
    """Of equal blocks, in all forms, and on one rank too: nothing is left to a library that may not have them."""
    ours = hiercoll.Intracomm(comm)
    for turn in range(3):
        for name in ("alltoall", "allgather", "bcast"):
            values, expected = (array + np.uint8(turn) for array in buffers(name, BLOCK, RANK, SIZE))
            given = [device.array(values, OWN_STREAM), LateArray(device, expected.shape, np.uint8, OWN_STREAM)]
            result = given[1]
            if name == "bcast":
                root = np.random.default_rng(turn).integers(0, 255, 99).astype(np.uint8)
                expected, result = root, device.array(root if RANK == 0 else root * 0, OWN_STREAM)
                given = [result]
            if how == "call":
                getattr(ours, name.capitalize())(*given)
            elif how == "request":
                getattr(ours, f"I{name}")(*given).Wait()
            else:
                request = getattr(ours, f"{name.capitalize()}_init")(*given)
                request.Start()
                request.Wait()
                request.Free()
            np.testing.assert_array_equal(result.get(), expected)


def test_what_cannot_be_of_any_sizes(device: LateDevice, comm: MPI.Intracomm) -> None:
    """Typed errors, and the communicator goes on."""
    counts = np.ones(SIZE, int)
    there, here = device.array(np.zeros(SIZE)), np.zeros(SIZE)
    with pytest.raises(ConstraintError, match="transport 'peer': expected equal blocks"):
        hiercoll.alltoallv(comm, [there, counts], [device.array(here), counts], transport="peer")
    with pytest.raises(ConstraintError, match="expected equal blocks"):
        hiercoll.alltoallv(comm, [there, counts], [device.array(here), counts], transport="staged:3")
    with pytest.raises(BufferTypeError, match="memory of host, as sendbuf"):
        hiercoll.alltoallv(comm, [here, counts], [there, counts])
    with pytest.raises(BufferTypeError, match="an array of its own"):
        hiercoll.alltoallv(comm, MPI.IN_PLACE, [there, counts], algorithm="pairwise")
    for _ in range(2):
        hiercoll.alltoallv(comm, [here, counts], [here.copy(), counts], algorithm="pairwise")
        with pytest.raises(ParameterError, match="'auto', 'direct', 'staged', 'peer'"):
            hiercoll.alltoallv(comm, [here, counts], [here.copy(), counts], algorithm="pairwise", transport="nonsense")
        with pytest.raises(ParameterError, match="a CUDA stream"):
            hiercoll.alltoallv(comm, [here, counts], [here.copy(), counts], algorithm="pairwise", stream="mine")
    check(device, comm, "alltoall")


def test_bench_finds_wrong_data(device: LateDevice, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only on the host."""
    monkeypatch.setattr(LateArrays, "fill", lambda self, array, values: None)
    monkeypatch.setattr(DeviceCopy, "start", lambda self: None)
    subjects = [Variant("native"), Variant("scatter_destination")]
    with pytest.raises(DataError):
        list(Bench(comm, seconds=0.05, arrays=LateArrays(device)).run("alltoall", subjects, [64]))


class FakeDevices:
    """Those that a rank sees."""

    def __init__(self, *names: str) -> None:
        self.names, self.selected = list(names), -1

    def visible(self) -> list[str]:
        return self.names

    def select(self, number: int) -> None:
        self.selected = number


def test_binding() -> None:
    """Ranks that see the same devices share them out; devices of one's own are taken as they are."""
    both = FakeDevices("a", "b")
    assert bind(WORLD, both) == both.selected == RANK % 2
    own = FakeDevices(str(RANK))
    assert bind(WORLD, own) == own.selected == 0
    pairs = FakeDevices(f"{RANK // 2}a", f"{RANK // 2}b")  # resource sets of two ranks and two devices
    assert bind(WORLD, pairs) == RANK % 2
    each, next_one = FakeDevices(*map(str, range(SIZE))), (RANK + 1) % SIZE
    assert bind(WORLD, each, lambda buses: [bus == str(next_one) for bus in buses]) == each.selected == next_one
    with pytest.raises(
        DeviceError, match=rf"devices: expected at least one for every rank, got none \(rank {SIZE - 1}"
    ):
        bind(WORLD, FakeDevices(*(["a"] if RANK < SIZE - 1 else [])))


def test_what_the_library_says(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the user's word, these libraries take no device memory; with it on all ranks, they do."""
    monkeypatch.delenv("HIERCOLL_CUDA_AWARE", raising=False)
    assert not takes_device_memory(comm) and get_session(comm).stages
    monkeypatch.setenv("HIERCOLL_CUDA_AWARE", str(int(RANK == 0)))
    other = WORLD.Dup()
    assert get_session(other).stages == (SIZE > 1)
    other.Free()
