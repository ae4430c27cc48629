"""Broadcasts: every algorithm, every form, any root, whatever the ranks' buffers are like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import WORLD, layouts
from mpi4py import MPI
from test_dropin import KINDS, spelled

import hiercoll
from hiercoll import BufferSizeError, BufferTypeError, CollectiveMismatch, ParameterError, cuda
from hiercoll.algorithms import REGISTRY, Params
from hiercoll.calls import dropin
from hiercoll.cli import main
from hiercoll.collectives import BCAST
from hiercoll.cuda.late import LateArray, LateDevice
from hiercoll.runtime.lifetime import get_session
from hiercoll.tables import load
from hiercoll.tools.bench import measured_events
from hiercoll.tools.report import received
from hiercoll.tools.workload import tokens
from hiercoll.topology import Topology
from hiercoll.tuning.policy import Wanted

OnLayout = Callable[[str], MPI.Intracomm]
RANK, SIZE = WORLD.rank, WORLD.size
ROOTS = sorted({0, SIZE // 2, SIZE - 1})
ONE_NODE = Topology((0,) * SIZE)  # the constraints of broadcasts ask for the number of ranks alone
VARIANTS = [
    (name, params)
    for name, entry in REGISTRY["bcast"].items()
    for params in entry.variants()
    if entry.refusal(ONE_NODE, params) is None
]
PRIVATE = [each for each in VARIANTS if each[1].get("memory") != "shared"]
ALL = [*VARIANTS, ("auto", {}), ("native", {})]
IDS = [" ".join([name, *(f"{key}={value}" for key, value in params.items())]) for name, params in ALL]
every_algorithm = pytest.mark.parametrize(("name", "params"), ALL, ids=IDS)


def vector(root: int, nbytes: int, salt: int = 0) -> np.ndarray[Any, Any]:
    """What ``root`` sends."""
    return tokens(root + 97 * salt, 0, nbytes)


def mine(root: int, nbytes: int, salt: int = 0) -> np.ndarray[Any, Any]:
    """This rank's buffer before a call."""
    return vector(root, nbytes, salt).copy() if rank_is(root) else np.full(nbytes, 0xA5, np.uint8)


def rank_is(root: int) -> bool:
    return root == RANK


@pytest.mark.parametrize("layout", layouts())
@every_algorithm
def test_every_algorithm(on_layout: OnLayout, name: str, params: Params, layout: str) -> None:
    """From every root, of sizes that no number of blocks or segments divides; new arrays, and the same again."""
    comm = on_layout(layout)
    for root in ROOTS:
        for nbytes in (0, 1, 13, 1000, 4099):
            buf = mine(root, nbytes)
            for salt in (0, 1, 2):
                buf[:] = mine(root, nbytes, salt)
                assert hiercoll.bcast(comm, buf, root=root, algorithm=name, **params) is buf
                assert np.array_equal(buf, vector(root, nbytes, salt)), (root, nbytes, salt)


@every_algorithm
def test_large_vectors(on_layout: OnLayout, name: str, params: Params) -> None:
    """Rendezvous on every library."""
    comm = on_layout(layouts()[-1])
    for root in ROOTS:
        buf = mine(root, (1 << 20) + 24)
        hiercoll.bcast(comm, buf, root=root, algorithm=name, **params)
        assert np.array_equal(buf, vector(root, buf.size))


@every_algorithm
def test_plans(on_layout: OnLayout, name: str, params: Params) -> None:
    """Started again and again without a barrier, the data rewritten in between; two at once, with other roots."""
    comm = on_layout(layouts()[-1])
    made = [(root, np.empty(777, np.uint8)) for root in (ROOTS[-1], ROOTS[0])]
    plans = [hiercoll.bcast_init(comm, buf, root=root, algorithm=name, **params) for root, buf in made]
    for salt in range(8):
        for plan, (root, buf) in zip(plans, made, strict=True):
            buf[:] = mine(root, 777, salt)
            plan.start()
        for plan, (root, buf) in zip(plans, made, strict=True):
            assert plan.wait() is buf
            assert np.array_equal(buf, vector(root, 777, salt)), (root, salt)
    for plan in plans:
        plan.free()


@pytest.mark.parametrize("layout", layouts())
def test_in_the_background(on_layout: OnLayout, layout: str) -> None:
    """Many at once, completed in another order on each rank; shared memory is refused, and "auto" does without."""
    comm = on_layout(layout)
    calls = [(root, *each) for root in ROOTS for each in (*PRIVATE, ("auto", {}), ("native", {}))]
    buffers = [mine(root, 333, salt) for salt, (root, *_) in enumerate(calls)]
    requests = [
        hiercoll.ibcast(comm, buf, root=root, algorithm=name, **params)
        for (root, name, params), buf in zip(calls, buffers, strict=True)
    ]
    for salt in np.random.default_rng(RANK).permutation(len(calls)):
        assert requests[salt].wait() is buffers[salt]
        assert np.array_equal(buffers[salt], vector(calls[salt][0], 333, salt)), calls[salt]
    if SIZE > 1:
        with pytest.raises(hiercoll.ConstraintError, match="shares no memory"):
            hiercoll.ibcast(comm, mine(0, 8), algorithm="hierarchical", memory="shared")


@pytest.mark.parametrize("turn", range(KINDS))
@pytest.mark.parametrize("layout", layouts())
def test_ranks_spell_differently(on_layout: OnLayout, calls: dropin.Calls, layout: str, turn: int) -> None:
    """On a drop-in communicator every rank describes its buffer in its own way; all are served."""
    ours, items = hiercoll.Intracomm(on_layout(layout)), 30
    for root in ROOTS:
        start = np.arange(items, dtype="i4") + 1000 * root if rank_is(root) else np.full(items, -1, "i4")
        spec, values, datatype = spelled((RANK + turn) % KINDS, start.astype("i4"), items)
        ours.Bcast(spec, root)
        np.testing.assert_array_equal(values, np.arange(items) + 1000 * root)
        if datatype is not None:
            datatype.Free()
    if SIZE > 1:
        assert calls == {"bcast": len(ROOTS)}


@pytest.mark.parametrize("algorithm", ["auto", "scatter_allgather", "hierarchical", "native"])
def test_gaps_on_the_root_only(on_layout: OnLayout, algorithm: str) -> None:
    """A column of a matrix on the root is sent as plain items, and nothing of the root's is written."""
    comm, items = on_layout(layouts()[-1]), 11
    column = MPI.INT.Create_vector(items, 1, 2).Commit()
    for root in ROOTS:
        matrix = np.arange(2 * items, dtype="i4") + 100 * root
        matrix.flags.writeable = False
        buf = np.full(items, -1, "i4")
        spec = [matrix, 1, column] if rank_is(root) else buf
        for call in (hiercoll.bcast, lambda *given, **options: hiercoll.ibcast(*given, **options).wait()):
            buf[:] = -1
            call(comm, spec, root=root, algorithm=algorithm)
            np.testing.assert_array_equal(matrix, np.arange(2 * items) + 100 * root)
            assert rank_is(root) or np.array_equal(buf, matrix_column(root, items))
    column.Free()


def matrix_column(root: int, items: int) -> np.ndarray[Any, Any]:
    return 2 * np.arange(items) + 100 * root


@every_algorithm
def test_a_root_that_is_read_only(on_layout: OnLayout, calls: dropin.Calls, name: str, params: Params) -> None:
    """As mpi4py has it; on other ranks it is refused."""
    comm = on_layout(layouts()[-1])
    ours = hiercoll.Intracomm(comm)
    for root in ROOTS:
        buf = mine(root, 100)
        buf.flags.writeable = not rank_is(root)
        for _ in range(2):
            hiercoll.bcast(comm, buf, root=root, algorithm=name, **params)
            assert np.array_equal(buf, vector(root, 100))
            ours.Bcast(buf, root)
            assert np.array_equal(buf, vector(root, 100))
    assert SIZE == 1 or calls == {"bcast": 2 * len(ROOTS)}
    if SIZE > 1 and RANK:
        buf.flags.writeable = False
        with pytest.raises(BufferTypeError, match="buf: expected a writable array"):
            hiercoll.bcast(comm, buf, algorithm=name, **params)


@pytest.mark.parametrize("form", ["Bcast", "Ibcast", "Bcast_init"])
@pytest.mark.parametrize("layout", layouts())
def test_drop_in(on_layout: OnLayout, calls: dropin.Calls, layout: str, form: str) -> None:
    """mpi4py's three methods, with and without a root, by position and by name."""
    ours = hiercoll.Intracomm(on_layout(layout))
    get_session(ours)
    is_persistent = form == "Bcast_init"
    for root, given, options in ((0, (), {}), (SIZE - 1, (SIZE - 1,), {}), (SIZE - 1, (), {"root": SIZE - 1})):
        buf = mine(root, 500)
        request = getattr(ours, form)(buf, *given, **options)
        for salt in range(3 if is_persistent else 1):
            if is_persistent:
                buf[:] = mine(root, 500, salt)
                request.Start()
            if request is not None:
                request.Wait()
            assert np.array_equal(buf, vector(root, 500, salt))
        if is_persistent:
            request.Free()
    if SIZE > 1 and (form == "Bcast" or MPI.Query_thread() == MPI.THREAD_MULTIPLE):
        assert calls == {{"Bcast": "bcast", "Ibcast": "ibcast", "Bcast_init": "bcast_init"}[form]: 3}


@pytest.mark.parametrize("root", [True, -1, SIZE, 1.0, "0", None, [0]])
@every_algorithm
def test_wrong_roots(comm: MPI.Intracomm, name: str, params: Params, root: Any) -> None:
    """Refused before anything moves, also if a call with an equal root was seen before."""
    buf = mine(SIZE - 1, 10)
    for known in {0, 1} & set(range(SIZE)):
        hiercoll.bcast(comm, buf, root=known, algorithm=name, **params)
    before = buf.copy()
    for call in (hiercoll.bcast, hiercoll.bcast_init, hiercoll.ibcast):
        with pytest.raises(ParameterError, match=r"root: expected a rank, a whole number from 0 to"):
            call(comm, buf, root=root, algorithm=name, **params)
    assert np.array_equal(buf, before)
    buf[:] = mine(SIZE - 1, 10)
    hiercoll.bcast(comm, buf, root=np.int64(SIZE - 1), algorithm=name, **params)
    assert np.array_equal(buf, vector(SIZE - 1, 10))


def test_roots_are_mpi4pys_on_a_drop_in_communicator(comm: MPI.Intracomm) -> None:
    """True is 1 there, on some ranks and not on others; what mpi4py refuses, it refuses."""
    ours, root = hiercoll.Intracomm(comm), min(1, SIZE - 1)
    for _ in range(3):
        buf = mine(root, 40)
        ours.Bcast(buf, bool(root) if RANK % 2 else root)
        assert np.array_equal(buf, vector(root, 40))

    class Index:
        """No more than that."""

        def __index__(self) -> int:
            return 0

    for wrong in (SIZE, -1, "0", None, Index()):
        with pytest.raises(Exception) as theirs:  # noqa: PT011
            comm.Bcast(buf, wrong)
        with pytest.raises(Exception) as its:  # noqa: PT011
            ours.Bcast(buf, wrong)
        assert type(its.value) is type(theirs.value)


def test_wrong_buffers(comm: MPI.Intracomm) -> None:
    """The argument has a name of its own; what is not contiguous is refused."""
    for wrong in (None, np.zeros((4, 4))[:, 1], [np.zeros(3), 9, MPI.DOUBLE], np.array([None])):
        with pytest.raises((BufferTypeError, BufferSizeError), match="buf: expected"):
            hiercoll.bcast(comm, wrong)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("algorithm", ["auto", "binomial", "native"])
def test_ranks_that_differ_are_told(monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    """With HIERCOLL_CHECK: of another root, or another size; nothing is worse for it."""
    monkeypatch.setenv("HIERCOLL_CHECK", "1")
    comm = hiercoll.Intracomm(WORLD.Dup())
    buf = mine(0, 64)
    for _ in range(2):
        with pytest.raises(CollectiveMismatch, match=r"root 1"):
            hiercoll.bcast(comm, buf, root=int(RANK == SIZE - 1), algorithm=algorithm)
        with pytest.raises(CollectiveMismatch, match=r"32 bytes"):
            hiercoll.bcast(comm, buf[: 32 if RANK else 64], algorithm=algorithm)
        with pytest.raises(CollectiveMismatch, match=r"root 1"):
            comm.Bcast(buf, int(RANK == SIZE - 1))
        hiercoll.bcast(comm, buf, algorithm=algorithm)
        assert np.array_equal(buf, vector(0, 64))
    comm.Free()


@pytest.mark.mpi(min_size=2)
def test_plans_of_other_roots_are_refused(comm: MPI.Intracomm) -> None:
    """Whoever checks or not: what ranks agree on for a plan has the root in it."""
    with pytest.raises(ParameterError, match="the same"):
        hiercoll.bcast_init(comm, np.zeros(8), root=int(RANK == SIZE - 1), algorithm="hierarchical", memory="shared")


@pytest.mark.ranks([3, 4])
def test_online(on_layout: OnLayout) -> None:
    """The program's own calls try candidates, with roots that change, and settle."""
    comm = on_layout(layouts()[-1])
    hiercoll.configure(comm, table="model", tune="online")
    policy, buf = get_session(comm).policy, np.empty(2000, np.uint8)
    for salt in range(1000):
        root = salt % SIZE
        buf[:] = mine(root, 2000, salt)
        hiercoll.bcast(comm, buf, root=root)
        assert np.array_equal(buf, vector(root, 2000, salt))
        if policy.is_settled:
            break
    assert policy.is_settled and policy.learner(Wanted(BCAST, 2000, True)) is not None


@pytest.mark.ranks([4])
def test_commands(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """tune makes a table, which "auto" follows, bench measures what it chose; a traced run."""
    monkeypatch.setenv("HIERCOLL_NODES", "2x2")
    world = WORLD.Dup()
    for module in ("tune", "measure"):
        monkeypatch.setattr(f"hiercoll.cli.{module}.world", lambda: world)
    path = folder / "table.json"
    for command in (
        ["tune", "bcast", "--budget", "4s", "-o", str(path)],
        ["bench", "bcast", "--seconds", ".05", "-a", "binomial", "-a", "hierarchical:memory=shared"],
    ):
        done = CliRunner().invoke(main, [*command, "--sizes", "10,4K"])
        assert done.exit_code == 0, done.output
        WORLD.Barrier()
    (entry,) = load(path).entries
    assert entry.collective == "bcast" and {10, 4096} <= {figure.size for figure in entry.figures}
    hiercoll.configure(world, table=path)
    assert get_session(world).policy.decide(Wanted(BCAST, 10, True)).variant == entry.choice(10)
    for root in range(SIZE):
        buf = mine(root, 10)
        assert np.array_equal(hiercoll.bcast(world, buf, root=root), vector(root, 10))
    events = measured_events(world, "bcast", "hierarchical", {}, 1000)
    assert RANK or events
    world.Free()


def test_bytes_in_reports() -> None:
    """Of a root that is read-only too; a wrong root is mpi4py's to refuse."""
    buf = np.zeros(12)
    buf.flags.writeable = False
    assert [received(BCAST, SIZE, RANK, given) for given in ((buf,), (buf, SIZE - 1), (buf, SIZE))] == [96, 96, 0]


@pytest.fixture(params=["late", "early", "random"])
def device(request: pytest.FixtureRequest) -> Iterator[LateDevice]:
    made = LateDevice(order=request.param, seed=RANK)
    with cuda.use(lambda address: made):
        yield made


@pytest.mark.ranks([1, 3, 4])
@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("transport", ["staged", "staged:3", "peer", "direct"])
def test_device_arrays(
    device: LateDevice, on_layout: OnLayout, monkeypatch: pytest.MonkeyPatch, transport: str, layout: str
) -> None:
    """Every algorithm with every transport that takes it, of sizes that no number of blocks divides."""
    device.aware = transport == "direct"
    monkeypatch.setenv("HIERCOLL_CUDA_AWARE", str(int(device.aware)))
    comm = on_layout(layout)
    for number, (name, params) in enumerate(ALL):
        if ":" in transport and (name == "auto" or params.get("segments", 1) != 1 or params.get("memory") == "shared"):
            continue  # not to be cut, or "auto" may choose what is not
        for root in (ROOTS[number % len(ROOTS)],):  # all of them on the host
            for nbytes in (0, 1, 203):
                array = LateArray(device, (nbytes,), np.uint8, 7)
                for salt in (0, 1):
                    array.fill(mine(root, nbytes, salt))
                    assert (
                        hiercoll.bcast(comm, array, root=root, algorithm=name, transport=transport, **params) is array
                    )
                    assert np.array_equal(array.get(), vector(root, nbytes, salt)), (name, params, root, nbytes)
