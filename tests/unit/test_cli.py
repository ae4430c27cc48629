"""The command line: what it prints, what it writes, and that errors are messages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from click.testing import CliRunner, Result

import hiercoll
from hiercoll.algorithms import REGISTRY, Algorithm
from hiercoll.cli import main
from hiercoll.collectives import called
from hiercoll.schedule import RECV, SEND, Builder, Schedule
from hiercoll.tools.proving import generate
from hiercoll.topology import Topology, parse_layout
from hiercoll.verify import describe

Run: TypeAlias = "Callable[..., Result]"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a command in an empty folder; whatever happens, there is no traceback."""
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: str) -> Result:
        result = CliRunner().invoke(main, arguments)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert "Traceback" not in result.output
        return result

    return invoke


def words(result: Result) -> str:
    """The output without line breaks and frames, which depend on the width of the terminal."""
    return " ".join(re.sub(r"[│┃╭╮╰╯─━]", " ", result.output).split())


def ok(result: Result) -> str:
    """The words of a command that went well."""
    assert result.exit_code == 0, result.output
    return words(result)


# Help and list


def test_help(run: Run) -> None:
    """All commands are listed, and the way to write algorithms and layouts."""
    said = ok(run("--help"))
    for word in ("list", "verify", "show", "timeline", "bench", "bruck:radix=4", "3+5", "2x4:cyclic"):
        assert word in said
    assert ok(run("-h")) == said
    assert hiercoll.__version__ in ok(run("--version"))


@pytest.mark.parametrize("command", ["list", "verify", "show", "timeline", "bench"])
def test_help_of_commands(run: Run, command: str) -> None:
    """Each says what it is for, without MPI."""
    said = ok(run(command, "--help"))
    assert "Usage:" in said and len(said) > 100


def test_list(run: Run) -> None:
    """Every algorithm with its parameters, and the library's own."""
    said = ok(run("list"))
    for collective, entries in REGISTRY.items():
        assert collective in said
        for entry in entries.values():
            assert entry.name in said
            assert all(f"{parameter.name}={parameter.default}" in said for parameter in entry.parameters)
    assert said.count("The MPI library's own collective.") == sum(each.name in REGISTRY for each in called())


def test_list_of_one_collective(run: Run) -> None:
    """Only its algorithms."""
    said = ok(run("list", "bcast"))
    assert "binomial" in said and "segments=1|3" in said
    assert "pairwise" not in said and "The MPI library's own" in said


def test_algorithms_of_collectives_that_share_them(run: Run) -> None:
    """alltoallw's are alltoallv's, and so on; what is shown and proved is the same."""
    for other, family in (
        ("alltoallw", "alltoallv"),
        ("allgatherv", "allgather"),
        ("reduce_scatterv", "reduce_scatter"),
    ):
        assert ok(run("list", other)) == ok(run("list", family))
    assert ok(run("show", "allgatherv", "ring")) == ok(run("show", "allgather", "ring"))
    assert "1 proved" in ok(run("verify", "alltoallw", "aggregate", "--layout", "2x2", "--workers", "1"))


# Show


def test_show_rounds(run: Run) -> None:
    """In words, rounds apart, with counts and the traffic matrix."""
    result = run("show", "alltoall", "bruck:radix=2", "--layout", "2x2", "--rank", "1")
    said = ok(result)
    lines = result.output.splitlines()
    assert lines[0] == "alltoall bruck on 2x2, rank 1 (node 0, lane 1), segments 1"
    schedule = generate("alltoall", "bruck", {}, parse_layout("2x2"))[1]
    assert schedule.rounds is not None
    assert sum("end of a round" in line for line in lines) == len(schedule.rounds) - 1
    for members in schedule.rounds:
        for index in members:
            assert f"{index}  {describe(schedule.ops[index])}" in [line.strip() for line in lines]
    assert "[after" not in said
    assert "longest chain of messages over all ranks: 2" in said
    assert "messages sent 2 2 8" in said and "of them between nodes 2 2 6" in said
    assert "blocks sent 4 4 16" in said and "blocks of scratch 8 8 32" in said
    assert "blocks from rank (row) to rank (column)" in said


def test_show_a_graph(run: Run) -> None:
    """Operations with what they wait for."""
    result = run("show", "alltoall", "hierarchical", "-l", "2x2")
    said = ok(result)
    schedule = generate("alltoall", "hierarchical", {}, parse_layout("2x2"))[0]
    assert schedule.rounds is None
    for index, op in enumerate(schedule.ops):
        after = f" [after {', '.join(map(str, op.deps))}]" if op.deps else ""
        assert f"{index} {describe(op)}{after}" in said
    assert "end of a round" not in said


def test_show_parameters_and_flags(run: Run) -> None:
    """Parameters that differ from the defaults are named; flags are counted."""
    said = ok(run("show", "alltoall", "grouped:form=share,memory=shared", "-l", "3+2:cyclic", "-r", "4"))
    assert "alltoall grouped form=share memory=shared on 3+2:cyclic, rank 4 (node 0, lane 2)" in said
    assert "raise flag" in said and "wait for flag" in said and "(start before)" in said
    assert not re.search(r"flags raised or waited for 0 ", said)


def test_show_in_place(run: Run) -> None:
    """The send buffer is gone."""
    plain = ok(run("show", "allgather", "ring", "-l", "1x3"))
    moved = ok(run("show", "allgather", "ring", "-l", "1x3", "--in-place"))
    assert "send[0]" in plain and "send[" not in moved


# Verify


def test_verify_one(run: Run) -> None:
    """With given parameters, on given layouts."""
    said = ok(run("verify", "alltoall", "bruck:radix=3", "-l", "2x2", "-l", "5", "-j", "1"))
    assert "alltoall bruck radix=3: 4 proved" in said  # each in place too
    assert re.search(r"4 proved \([1-9]\d* operations\), 0 refused, 0 refuted", said)
    assert "radix=4" not in said


def test_verify_all_variants(run: Run) -> None:
    """Without parameters, all of their choices; equal layouts count once."""
    said = ok(run("verify", "alltoall", "bruck", "-l", "1x3", "-l", "3", "-l", "1x3:cyclic", "-j", "1"))
    choices = REGISTRY["alltoall"]["bruck"].parameters[0].choices
    assert f"{2 * len(choices)} proved" in said and said.count(": 2 proved") == len(choices)


@pytest.mark.parametrize("collective", ["alltoall", "allgather", "barrier", "bcast", "allreduce"])
def test_verify_a_collective(run: Run, collective: str) -> None:
    """All of its algorithms; those that refuse say what they need."""
    said = ok(run("verify", collective, "-l", "1x3", "-l", "1+2", "-j", "1"))
    for entry in REGISTRY[collective].values():
        assert f"{collective} {entry.name}" in said
    assert said.endswith("0 refuted")
    if collective == "allgather":
        assert re.search(r"neighbor_exchange: [1-9] refused \(needs an even number of ranks\)", said)


def test_verify_says_the_order(run: Run) -> None:
    """Of reductions, as it is derived; in how many cases."""
    said = ok(run("verify", "reduce_scatter", "-l", "1x2", "-l", "2x2", "-j", "1"))
    assert "reduce_scatter pairwise: 2 proved (order: fixed 1, any 1)" in said
    assert "reduce_scatter direct: 4 proved (order: fixed 4)" in said
    assert "order" not in ok(run("verify", "gather", "binomial", "-l", "1x2", "-j", "1"))


def test_accumulate(run: Run) -> None:
    """How often results are rounded, and the blocks that count twice; of what combines nothing it is refused."""
    found = run("verify", "allreduce", "--accumulate", "float32", "-l", "1x3", "-j", "1").output
    assert "allreduce all_pairs: 2 proved (order: fixed 2; rounded once)" in found
    assert "rounded never" in run("verify", "reduce", "binomial", "--accumulate", "float32", "-l", "1x1").output
    shown = run("show", "allreduce", "ring", "--accumulate", "float32", "-l", "1x4").output
    assert "copy narrow[0] to scratch[" in shown and "count as two" in shown
    assert re.search(r"^blocks sent +8 +8 +32$", shown, re.MULTILINE)  # 1 contribution, 2 sums, 3 results
    for command in (["verify", "allgather"], ["show", "allgather", "ring"]):
        wrong = run(*command, "--accumulate", "float32")
        assert wrong.exit_code == 2 and "allgather combines nothing" in wrong.output


def test_verify_every_root(run: Run) -> None:
    """On a small layout; on another the first, the last and one between; or a sample of all."""
    small, large = (run("verify", "gather", "linear:window=4", "-l", layout, "-j", "1") for layout in ("1x7", "8x1"))
    assert "gather linear window=4: 7 proved" in ok(small) and "window=4: 3 proved" in ok(large)
    sample = run("verify", "gather", "linear:window=4", "-l", "1x7", "-j", "1", "--sample", "3")
    assert "window=4: 3 proved" in ok(sample)


def test_verify_in_processes(run: Run) -> None:
    """The same by two of them."""
    one, two = (ok(run("verify", "bcast", "-l", "2x2", "-j", workers)) for workers in ("1", "2"))
    assert one.split(" bcast ")[1:] == two.split(" bcast ")[1:]


def broken(topology: Topology, rank: int) -> Schedule:
    """An alltoall that does not wait for what it sends on."""
    p, b = topology.size, Builder(rank)
    b.copy(SEND[rank], RECV[rank])
    for peer in range(p):
        if peer != rank:
            b.recv(peer, RECV[peer])
            b.send(peer, SEND[peer if peer else p - 1])
    return b.build()


def test_verify_refutes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken algorithm: exit status 1, the case and the reason."""
    monkeypatch.setitem(REGISTRY["alltoall"], "broken", Algorithm("alltoall", "broken", broken))
    result = run("verify", "alltoall", "broken", "-l", "1x1", "-l", "1x3", "-j", "1")
    said = words(result)
    assert result.exit_code == 1
    assert "REFUTED alltoall broken on 1x3: [contract] rank 0" in said
    assert "must hold block 0 of rank 1 and holds block 2 of rank 1" in said
    assert "alltoall broken: 1 proved, 1 refuted" in said
    result = run("verify", "alltoall", "-l", "1x3", "-j", "1")
    assert result.exit_code == 1 and "1 refuted" in words(result)


# Timeline


@pytest.mark.parametrize(
    ("collective", "algorithm", "layout"),
    [("alltoall", "hierarchical", "2x3"), ("allgather", "ring:segments=3", "1+2")],
)
def test_timeline(run: Run, tmp_path: Path, collective: str, algorithm: str, layout: str) -> None:
    """A picture and a trace of a simulated run."""
    said = ok(run("timeline", collective, algorithm, "-l", layout, "-s", "64K", "--svg", "a.svg", "--trace", "a.json"))
    title = f"{collective} {algorithm.replace(':', ' ')} on {layout}, 64K per block, simulated"
    assert f"a.svg: {title}" in said and "a.json: open it at ui.perfetto.dev" in said
    root = ET.parse(tmp_path / "a.svg").getroot()
    assert root.tag.endswith("svg") and title in "".join(root.itertext())
    trace = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    topology = parse_layout(layout)
    name, _, value = algorithm.partition(":segments=")
    schedules = generate(collective, name, {"segments": int(value)} if value else {}, topology)
    messages = sum(type(op).__name__ == "Send" for s in schedules for op in s.ops)
    assert len([event for event in trace["traceEvents"] if event["ph"] == "X"]) >= messages


def test_timeline_files(run: Run, tmp_path: Path) -> None:
    """Only what was asked for; by default a picture with a name."""
    ok(run("timeline", "alltoall", "pairwise", "--trace", "only.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["only.json"]
    ok(run("timeline", "alltoall", "pairwise"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alltoall-pairwise.svg", "only.json"]


@pytest.mark.parametrize("option", ["--svg", "--trace"])
def test_timeline_files_that_cannot_be_written(run: Run, option: str) -> None:
    """A folder that is not there is told."""
    result = run("timeline", "alltoall", "pairwise", option, "nowhere/a.file")
    assert result.exit_code != 0 and "nowhere" in words(result)


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("show alltoall brooke", "expected one of scatter_destination, pairwise, bruck"),
        ("show alltoall brooke", "got 'brooke'"),
        ("show alltoall ring", "got 'ring'"),
        ("show allwhere ring", "allwhere"),
        ("show alltoall bruck:radix=1", "radix: expected a whole number, at least 2, got 1"),
        ("show alltoall bruck:radix=two", "radix: expected a whole number, at least 2, got 'two'"),
        ("show alltoall bruck:radix=", "radix: expected a whole number"),
        (
            "show allgather ring:segments=1000000000",
            "segments: expected a whole number, at least 1, at most 65536, got",
        ),
        ("show alltoall bruck:base=2", "parameter 'base': expected one that bruck takes (radix), got 2"),
        ("show alltoall bruck:radix", "expected name:parameter=value,parameter=value, got 'bruck:radix'"),
        ("show alltoall bruck:=2", "expected name:parameter=value"),
        ("show alltoall pairwise:exchange=both", "exchange: expected one of rotation, xor, got 'both'"),
        ("show alltoall bruck -l 2y4", "expected NODESxLANES (2x4)"),
        ("show alltoall bruck -l 2y4", "got '2y4'"),
        ("show alltoall bruck -l 0x4", "got '0x4'"),
        ("show alltoall bruck -l 2x2 -r 4", "rank 4 of 4"),
        ("show alltoall bruck -r -1", "-1 is not in the range"),
        ("show alltoall pairwise:exchange=xor -l 1x3", "expected a power-of-two number of ranks"),
        ("show alltoall pairwise --in-place", "expected separate send and receive buffers"),
        ("show alltoall", "Missing argument"),
        ("list gossip", "gossip"),
        ("verify", "name a collective (and an algorithm), or say --all"),
        ("verify alltoall --all", "a collective, --all and --combinations exclude each other"),
        ("verify alltoall brooke", "got 'brooke'"),
        ("verify alltoall bruck:radix=0", "at least 2, got 0"),
        ("verify alltoall bruck -l 3+0", "got '3+0'"),
        ("verify alltoall bruck -j 0", "0 is not in the range"),
        ("timeline alltoall bruck -s 4Q", "expected a whole number of bytes, K, M or G, got '4Q'"),
        ("timeline alltoall bruck -s -1", "got '-1'"),
        ("timeline alltoall bruck --svg .", "is a directory"),
        ("timeline alltoall pairwise:exchange=xor -l 3", "expected a power-of-two number of ranks"),
        ("timeline alltoallv aggregate --measured", "--measured serves alltoall, allgather"),
        ("bench gossip", "gossip"),
        ("bench alltoall -s 8:4:1", "FACTOR >= 2"),
        ("bench alltoall -s 0:8", "FROM >= 1"),
        ("bench alltoall -s 8:x", "got 'x'"),
        ("frobnicate", "No such command"),
    ],
)
def test_errors(run: Run, tmp_path: Path, arguments: str, message: str) -> None:
    """A message that says what was expected, a status, no traceback, no file."""
    result = run(*arguments.split())
    assert result.exit_code in (1, 2)
    assert message in words(result)
    assert list(tmp_path.iterdir()) == []


def test_a_layout_beyond_all_bounds(run: Run) -> None:
    """A number with thousands of digits is a malformed layout, too."""
    result = run("show", "alltoall", "bruck", "-l", "9" * 5000)
    assert result.exit_code == 2 and "expected NODESxLANES" in words(result)


# Without MPI

WITHOUT_MPI = """
import sys
sys.modules[sys.argv.pop(1)] = None  # importing it fails
import hiercoll
from hiercoll.cli import main
main(sys.argv[1:], prog_name="hiercoll")
"""


def without_mpi(folder: Path, *arguments: str, missing: str = "mpi4py") -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, in which a module cannot be imported."""
    command = [sys.executable, "-W", "error", "-c", WITHOUT_MPI, missing, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder, check=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--help", "Commands:"),
        ("list alltoall", "bruck"),
        ("show alltoall bruck -l 1x3", "end of a round"),
        ("verify allreduce -l 2x2 -j 1", "0 refuted"),
        ("timeline alltoall hierarchical -l 2x2 --svg a.svg --trace a.json", "a.json: open it"),
    ],
)
def test_without_mpi(tmp_path: Path, arguments: str, said: str) -> None:
    """Proving and drawing need no MPI library."""
    done = without_mpi(tmp_path, *arguments.split())
    assert done.returncode == 0 and said in done.stdout, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", ["bench alltoall", "timeline alltoall bruck --measured"])
@pytest.mark.parametrize(
    ("missing", "needed"),
    [("mpi4py", "hiercoll needs mpi4py 4.0"), ("mpi4py.MPI", "this command needs an MPI library")],
)
def test_what_needs_mpi_says_so(tmp_path: Path, arguments: str, missing: str, needed: str) -> None:
    """And how to come by it."""
    done = without_mpi(tmp_path, *arguments.split(), missing=missing)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("Error: ") and "Traceback" not in done.stderr
    said = " ".join(done.stderr.split())
    assert needed in said and "pip install 'hiercoll[mpich]'" in said and "mpiexec" in said
    assert list(tmp_path.iterdir()) == []


def test_transports_are_shown_and_proved() -> None:
    """What runs on device arrays: with copies to and from the host, or from node_ranks."""
    runner = CliRunner()
    shown = runner.invoke(main, ["show", "alltoall", "bruck", "--layout", "1x3", "--transport", "peer"])
    assert shown.exit_code == 0 and "get scratch[" in shown.output
    shown = runner.invoke(main, ["show", "alltoall", "bruck", "--layout", "3x1", "--transport", "staged"])
    assert shown.exit_code == 0 and "to host[" in shown.output
    for transport in ("peer", "staged:3"):
        proved = runner.invoke(main, ["verify", "allgather", "-l", "2x3", "-j", "1", "--transport", transport])
        assert proved.exit_code == 0 and " 0 refuted" in proved.output, proved.output
    assert "(needs a schedule without segments and flags)" in proved.output
    wrong = runner.invoke(main, ["verify", "allgather", "--transport", "node_ranks"])
    assert wrong.exit_code == 2 and "'peer:PARTS'" in wrong.output
