"""Device arrays, on a simulated device that is as late, or as early, as CUDA's rules permit."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import CALLS, VARIANTS, WORLD, layouts
from machines import telling
from mpi4py import MPI

import hiercoll
from hiercoll import BufferTypeError, ConstraintError, DeviceError, DeviceMemoryError, ParameterError, cuda
from hiercoll.algorithms import REGISTRY
from hiercoll.cuda.binding import bind
from hiercoll.cuda.late import LateArray, LateDevice
from hiercoll.cuda.memory import DeviceCopy, DeviceMemory, PeerCopy
from hiercoll.errors import TransportWarning
from hiercoll.runtime import binding, factory, native
from hiercoll.runtime.lifetime import get_session
from hiercoll.runtime.memories import takes_device_memory
from hiercoll.tables import Variant
from hiercoll.tools.bench import Bench
from hiercoll.tools.measuring import DataError
from hiercoll.tools.workload import buffers

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


@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_native_sums_in_a_wider_type_are_of_copies(
    device: LateDevice, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """On the host, which converts: even where the MPI library takes a device's memory."""
    device.aware = transport == "direct"
    monkeypatch.setenv("HIERCOLL_CUDA_AWARE", str(int(device.aware)))
    send, recv = (device.array(np.full(9, 1 + RANK, np.float16), OWN_STREAM) for _ in range(2))
    given: list[int] = []
    engine = native.engine

    def made(comm: Any, request: Any, rank: int, sent: int, received: int, *, held: bool) -> Any:
        given.extend((sent, received))
        return engine(comm, request, rank, sent, received, held=held)

    monkeypatch.setattr(native, "engine", made)
    how: dict[str, Any] = {"algorithm": "native", "transport": transport, "accumulate": "float32"}
    hiercoll.allreduce(comm, send, recv, **how)
    np.testing.assert_array_equal(recv.get(), np.full(9, SIZE * (SIZE + 1) / 2))
    assert len(given) >= 2 and not {send.address, recv.address} & set(given)


@pytest.mark.parametrize("collective", ["allgather", "alltoall", "allreduce"])
def test_results_have_the_order_of_what_is_sent(device: LateDevice, comm: MPI.Intracomm, collective: str) -> None:
    """As on the host: an array in Fortran's order comes with its indices."""
    whole = np.arange(2.0 * SIZE * 3).reshape(2 * SIZE, 3) + 100 * RANK
    stored = LateArray(device, whole.T.shape, whole.dtype, OWN_STREAM)
    stored.fill(np.ascontiguousarray(whole.T))
    send = stored.transpose((1, 0))
    np.testing.assert_array_equal(send.get(), whole)
    got = getattr(hiercoll, collective)(comm, send).get()
    expected = getattr(hiercoll, collective)(comm, np.asfortranarray(whole))
    assert got.shape == expected.shape
    np.testing.assert_array_equal(got, expected)


@pytest.mark.mpi(min_size=2)
def test_a_window_of_a_plan_on_the_host(device: LateDevice, on_layout: Callable[[str], MPI.Intracomm]) -> None:
    """It is taken over by a plan on a device, which must be able to reach it."""
    comm = on_layout(f"1x{SIZE}")
    plan = hiercoll.allgather_init(comm, np.zeros(BLOCK * SIZE, np.uint8), algorithm="shared")
    plan()
    plan.free()
    made = get_session(comm).windows.made
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    send, recv = device.array(values, OWN_STREAM), device.array(np.zeros_like(expected), OWN_STREAM)
    with hiercoll.alltoall_init(comm, send, recv, algorithm="bruck", transport="staged") as plan:
        plan()
        np.testing.assert_array_equal(recv.get(), expected)
    assert get_session(comm).windows.made == made


@pytest.mark.mpi(min_size=2)
def test_ranks_that_receive_nothing(device: LateDevice, comm: MPI.Intracomm) -> None:
    """An empty array may lie anywhere: only the last rank receives, and the others give what they have for it."""
    last = SIZE - 1
    send = device.array(np.full(8, RANK, np.uint8), OWN_STREAM)
    counts = [8 * (rank == last) for rank in range(SIZE)]
    came = [8 if last == RANK else 0] * SIZE
    recv = device.array(np.zeros(8 * SIZE, np.uint8), OWN_STREAM) if last == RANK else np.empty(0, np.uint8)
    hiercoll.alltoallv(comm, [send, counts], [recv, came], algorithm="pairwise")
    if last == RANK:
        np.testing.assert_array_equal(recv.get(), np.repeat(np.arange(SIZE), 8))


def test_streams_of_checked_calls(device: LateDevice, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call in the background that is compared first comes after the streams that were current when it was made."""
    monkeypatch.setenv("HIERCOLL_CHECK", "1")
    values, expected = buffers("alltoall", BLOCK, RANK, SIZE)
    send, recv = device.array(np.zeros_like(values), OWN_STREAM), device.array(np.zeros_like(expected), OWN_STREAM)
    send.get()
    send.stream = OWN_STREAM + 1
    send.fill(values)
    request = hiercoll.ialltoall(comm, send, recv, algorithm="scatter_destination")
    send.stream = OWN_STREAM + 2  # of somebody else
    request.wait()
    np.testing.assert_array_equal(recv.get(), expected)


def test_streams_that_are_made_late(device: LateDevice) -> None:
    """They come after what the caller has enqueued before the start that needs them."""
    memory, done = DeviceMemory(device), list[str]()
    memory.stream("out")
    device.stream_of(OWN_STREAM).enqueue(partial(done.append, "produced"))
    memory.before_messages([OWN_STREAM], direct=False)
    late = memory.stream("in")
    late.enqueue(partial(done.append, "copied"))
    late.synchronize()  # type: ignore[attr-defined]
    assert done == ["produced", "copied"]


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


def test_a_plan_holds_up_no_other_one(comm: MPI.Intracomm) -> None:
    """Each has streams of its own; those of freed plans are used again."""
    memory = DeviceMemory(LateDevice())
    one, other = memory.of_plan(), memory.of_plan()
    assert len({id(each.stream(use)) for each in (one, other) for use in ("in", "out", ("get", 3))}) == 6
    streams = {id(one.stream("in")), id(one.stream("out")), id(one.stream(("get", 3)))}
    del one
    assert {id(memory.of_plan().stream("within"))} <= streams


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
def test_no_memory_of_others(device: LateDevice, on_layout: Callable[[str], MPI.Intracomm]) -> None:
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
    own, many = device.array(np.zeros(1)), [there, counts] if RANK == 0 else None
    for call, given in ((hiercoll.gatherv, (own, many)), (hiercoll.scatterv, (many, own))):
        with pytest.raises(
            ConstraintError, match="algorithm 'binomial': expected arrays on the host, got the memory of"
        ):
            call(comm, *given, algorithm="binomial")
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
