"""Pictures of benchmarks: what they say, what they are computed from, and errors that name the line."""

from __future__ import annotations

import builtins
import json
import math
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from hiercoll.cli import main
from hiercoll.errors import HiercollError
from hiercoll.tools.plots import (
    Comparison,
    PlotError,
    RecordError,
    Setting,
    compare,
    draw,
    parse_records,
    read_records,
    save,
    shown,
    spans,
    speedups,
    stems,
)
from hiercoll.tools.plots.comparison import ranking
from hiercoll.tools.plots.figure import size_ticks

Line = dict[str, Any]
SHARE = {"algorithm": "grouped", "params": {"form": "share", "memory": "shared"}}
SVG = "{http://www.w3.org/2000/svg}"
WHY = "figures are drawn with matplotlib, an optional extra"


def line(algorithm: str = "native", size: int = 64, seconds: float = 1e-3, **fields: Any) -> Line:
    """A record as bench writes it; ``params`` are the subject's."""
    return {
        "collective": "alltoall",
        "subject": {"algorithm": algorithm, "params": fields.pop("params", {})},
        "size": size,
        "median": seconds,
        "q1": 0.9 * seconds,
        "q3": 1.2 * seconds,
        "samples": 20,
        "timing": "single",
        "date": "2026-01-31T12:00:00+00:00",
        "mpi": "MPICH 5.0.2",
        "layout": "4x4",
        "ranks": 16,
        "processor": {"unknown": ["fields", "are", "fine"]},
        **fields,
    }


def write(folder: Path, *lines: Line | str) -> Path:
    """A file of these records, or of text as it is."""
    file = folder / "bench.jsonl"
    file.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return file


def one(folder: Path, *lines: Line | str) -> Comparison:
    """The comparison that these lines make."""
    (comparison,) = compare(read_records(write(folder, *lines)))
    return comparison


def plot(*arguments: object) -> Result:
    """`hiercoll plot`, which never ends in a traceback."""
    result = CliRunner().invoke(main, ["plot", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def some(chosen: Line | None = SHARE) -> Iterator[Line]:
    """Three sizes of native, auto and two more, with a bound."""
    for size in (8, 64, 4096):
        yield line(size=size, bound=1e-5 * size)
        yield line("auto", size, 0.5e-3, bound=None, **({} if chosen is None else {"chosen": chosen}))
        yield line("grouped", size, 0.5e-3, params=SHARE["params"])
        yield line("bruck", size, 1e-4 * math.sqrt(size), params={"radix": 4})


# Reading


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("collective", 3),
        ("collective", ""),
        ("subject", "native"),
        ("subject.algorithm", None),
        ("subject.params", []),
        ("subject.params", {"form": "a\nb"}),
        ("size", "64"),
        ("size", -1),
        ("size", True),
        ("size", 8.0),
        ("size", 10**400),
        ("median", 0),
        ("median", -1e-3),
        ("median", math.nan),
        ("median", math.inf),
        ("median", 10**400),
        ("q1", None),
        ("q3", "1 ms"),
        ("date", 2026),
        ("mpi", "MPICH\x00"),
        ("mpi", "\ud800"),
        ("layout", {}),
        ("ranks", 0),
        ("ranks", 1.5),
        ("bound", -1),
        ("bound", True),
        ("chosen", "bruck"),
        ("chosen.algorithm", 7),
        ("virtual_nodes", 1),
        ("memory", None),
    ],
)
def test_malformed_field(tmp_path: Path, field: str, value: Any) -> None:
    """File, line and field are named, in a message and as attributes."""
    wrong = line("auto", chosen={"algorithm": "bruck", "params": {}})
    *outer, name = field.split(".")
    (wrong[outer[0]] if outer else wrong)[name] = value
    file = write(tmp_path, line(), "", wrong)
    with pytest.raises(RecordError) as caught:
        read_records(file)
    assert isinstance(caught.value, HiercollError) and isinstance(caught.value, ValueError)
    assert (caught.value.file, caught.value.line, caught.value.field) == (file, 3, field)
    assert f"{file}, line 3: {field}: expected " in str(caught.value) and len(str(caught.value)) < len(str(file)) + 200
    said = plot(file)
    assert said.exit_code == 1 and f"line 3: {field}: " in said.output


def test_missing_field() -> None:
    """What bench always writes must be there."""
    for field in ("collective", "subject", "size", "median", "q1", "q3", "date", "mpi", "layout", "ranks"):
        wrong = line()
        del wrong[field]
        with pytest.raises(RecordError, match=f"line 1: {field}: .* got nothing"):
            parse_records(json.dumps(wrong).encode(), Path("bench.jsonl"))


@pytest.mark.parametrize("text", ['{"collective": "allt', "[]", "3", "null", "[" * 100_000, "9" * 5000, "{]"])
def test_malformed_line(tmp_path: Path, text: str) -> None:
    """A line cut short, or of something else."""
    with pytest.raises(RecordError, match="line 2: record: expected a JSON object, got "):
        read_records(write(tmp_path, line(), text))


def test_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "bench.jsonl"
    file.write_bytes(b"\n\xff\xfe{}\n")
    with pytest.raises(RecordError, match="line 2: record"):
        read_records(file)


@settings(deadline=None, derandomize=True)
@given(st.binary(max_size=60) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_never_another_error(text: bytes | str) -> None:
    """Whatever a file contains that are no records, reading it ends in one of our errors."""
    with pytest.raises(PlotError):
        parse_records(text if isinstance(text, bytes) else text.encode(), Path("any.jsonl"))


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_empty(tmp_path: Path, text: str) -> None:
    said = plot(write(tmp_path, text))
    assert said.exit_code == 1 and "no benchmark records" in said.output


def test_one_spelling(tmp_path: Path) -> None:
    """Parameters at their defaults and the order of parameters make no difference; unknown ones stay."""
    ways = [
        line("bruck", params={}),
        line("bruck", params={"radix": 2}),
        line("grouped", params={"memory": "shared", "form": "share"}),
        line("grouped", params={"form": "share", "memory": "shared"}),
        line("of_tomorrow", params={"b": 1, "a": [2]}),
    ]
    assert list(one(tmp_path, *ways).points) == ["bruck", "grouped form=share memory=shared", "of_tomorrow a=[2] b=1"]


# Computing


def test_medians_of_repeated(tmp_path: Path) -> None:
    """Also over files: a subject's records of one size become their medians."""
    times = (3e-3, 1e-3, 2e-3)
    comparison = one(tmp_path, *(line(seconds=time, bound=time / 10) for time in times))
    point = comparison.points["native"][64]
    assert (point.median, point.q1, point.q3) == pytest.approx((2e-3, 1.8e-3, 2.4e-3))
    assert comparison.bounds == pytest.approx({64: 2e-4})


def test_settings_apart(tmp_path: Path) -> None:
    """Only what is comparable shares a figure; the dates are those of its records."""
    lines = [
        line(),
        line(date="2026-02-02T00:00:00"),
        line(collective="allgather"),
        line(layout="2x8"),
        line(mpi="Open MPI 5"),
        line(virtual_nodes=True),
        line(memory="cuda"),
        line(timing="plan-row"),
        {name: value for name, value in line(layout="8x2").items() if name != "timing"},
    ]
    comparisons, single = compare(read_records(write(tmp_path, *lines))), "public calls, one at a time"
    assert [comparison.title for comparison in comparisons] == [
        f"allgather, 4x4 (16 ranks), MPICH 5.0.2, {single}, 2026-01-31",
        f"alltoall, 2x8 (16 ranks), MPICH 5.0.2, {single}, 2026-01-31",
        f"alltoall, 4x4 (16 ranks), cuda memory, MPICH 5.0.2, {single}, 2026-01-31",
        "alltoall, 4x4 (16 ranks), MPICH 5.0.2, held plans, in a row, 2026-01-31",
        f"alltoall, 4x4 (16 ranks), MPICH 5.0.2, {single}, 2026-01-31 to 2026-02-02",
        f"alltoall, 4x4 (16 ranks, virtual nodes), MPICH 5.0.2, {single}, 2026-01-31",
        f"alltoall, 4x4 (16 ranks), Open MPI 5, {single}, 2026-01-31",
        "alltoall, 8x2 (16 ranks), MPICH 5.0.2, held plans in a row, 2026-01-31",  # of an older version
    ]


def test_few_samples_rank_nothing(tmp_path: Path) -> None:
    """They are drawn, and are nobody's choice; samples of several records add up."""
    fast, slow = line("bruck", 8, 1e-4, samples=1), line("ring", 8, 2e-4)
    comparison = one(tmp_path, line(size=8), fast, slow)
    assert ranking(comparison, 8) == ["ring", "native"] and spans(comparison)[0].subject == "ring"
    assert ranking(one(tmp_path, line(size=8), *[fast] * 6), 8) == ["bruck", "native"]
    assert spans(one(tmp_path, fast))[0].subject == "auto"


def test_speedups(tmp_path: Path) -> None:
    """Native's median by the subject's, where native was measured."""
    comparison = one(
        tmp_path, line(size=8), line("ring", 8, 2e-3), line("ring", 16), line("bruck", 8, 0.5e-3), line("eager", 16)
    )
    assert speedups(comparison) == {"ring": {8: 0.5}, "bruck": {8: 2.0}, "eager": {}}


times = st.dictionaries(st.integers(1, 1 << 40), st.floats(1e-9, 1e3), min_size=1, max_size=6)


@settings(deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(["native", "auto", *"abcdefghijkl"]), times, min_size=1, max_size=14))
def test_computed(measured: dict[str, dict[int, float]]) -> None:
    """Of any subjects at any sizes: ratios, spans that cover the axis, and who gets a colour."""
    lines = [line(name, size, time) for name, values in measured.items() for size, time in values.items()]
    (comparison,) = compare(parse_records("\n".join(map(json.dumps, lines)).encode(), Path("any.jsonl")))
    native = measured.get("native", {})
    for subject, values in speedups(comparison).items():
        assert values == {s: native[s] / time for s, time in measured[subject].items() if s in native}
    found = spans(comparison)
    assert [span.high for span in found[:-1]] == [span.low for span in found[1:]]
    for size in comparison.sizes:
        (span,) = (span for span in found if span.low < size < span.high)
        best = min((values[size] for name, values in measured.items() if size in values and name != "auto"), default=0)
        assert (span.measured and measured[span.subject][size] == best) or span.subject == "auto"
    names = shown(comparison)
    assert len(set(names)) == len(names) <= 10 and {"native", "auto"} & set(measured) <= set(names) <= set(measured)
    assert len(measured) > 8 or set(names) == set(measured)


def test_chosen(tmp_path: Path) -> None:
    """The band shows what auto ran, equal neighbours together, and the fastest where that is not known."""
    bruck = {"algorithm": "bruck", "params": {"radix": 2}}
    lines = [
        line("auto", 1, chosen=bruck),
        line("auto", 4, chosen=bruck),
        line("auto", 16, chosen={"algorithm": "native", "params": {}}),
        line("auto", 64, chosen=None),
        line("ring", 64, 5e-4, chosen=bruck),  # not auto's: says nothing
        line("native", 64),
        line("auto", 256),
    ]
    found = [(span.low, span.high, span.subject, span.measured) for span in spans(one(tmp_path, *lines))]
    assert found == [
        (0.5, 8.0, "bruck", False),
        (8.0, 32.0, "native", False),
        (32.0, 128.0, "ring", True),
        (128.0, 512.0, "auto", True),
    ]


def test_latest_of_equally_frequent_choices(tmp_path: Path) -> None:
    lines = [line("auto", chosen={"algorithm": name}) for name in ("bruck", "pairwise")]
    assert one(tmp_path, *lines).chosen == {64: "pairwise"}
    assert one(tmp_path, *lines, lines[0]).chosen == {64: "bruck"}


@pytest.mark.parametrize(("seconds", "clear"), [(0.5e-3, True), (0.8e-3, False)])
def test_clear(tmp_path: Path, seconds: float, clear: bool) -> None:
    """A winner whose third quartile (1.2 x) is not below native's first (0.9 ms) is not clear."""
    (span,) = spans(one(tmp_path, line(), line("ring", seconds=seconds)))
    assert (span.subject, span.clear) == ("ring", clear)


def test_many_subjects(tmp_path: Path) -> None:
    """The fastest two at each size keep their colour, native not counted; the choice does too."""
    lines = [line("slow", size, 1.0, params={"n": n}) for n in range(12) for size in (8, 16)]
    lines += [line("native", 8, 1e-6), line("native", 16, 1e-6), line("auto", 8, chosen={"algorithm": "far"})]
    lines += [line("first", 8), line("second", 8, 2e-3), line("first", 16), line("other", 16, 2e-3)]
    assert shown(one(tmp_path, *lines)) == ["native", "auto", "first", "second", "other", "far"]


def test_stems() -> None:
    """Safe characters, a bounded length, no two alike."""
    rest = (16, False, "host", "single")
    every = [
        Setting("alltoall", "4x4", "MPICH 5.0.2", *rest),
        Setting("alltoall", "4x4", "MPICH/5.0.2", *rest),
        Setting("../x", "5+3:cyclic", "é\\ü 1", *rest),
        Setting("/", "/", ".", *rest),
        Setting("a", "1+" * 500, "b", *rest),
    ]
    mpich = "alltoall-4x4-mpich-5.0.2-single"
    assert stems(every)[:4] == [mpich, f"{mpich}-2", "x-5+3-cyclic-1-single", "single"]
    assert len(stems(every)[4]) == 100


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 1 << 50), min_size=1, max_size=60, unique=True).map(sorted))
def test_size_ticks(sizes: list[int]) -> None:
    """Few enough to be read, and the first among them."""
    ticks = size_ticks(sizes)
    assert ticks[0] == sizes[0] and set(ticks) <= set(sizes) and len(ticks) <= 17
    assert len(ticks) == len(sizes) or len(sizes) > 2


# Drawing


def svg_words(path: Path) -> list[str]:
    return ["".join(text.itertext()) for text in ET.parse(path).getroot().iter(f"{SVG}text")]


def test_files(tmp_path: Path) -> None:
    """PNG and SVG are written; the SVG has the labels as text."""
    pytest.importorskip("matplotlib", reason=WHY)
    out = tmp_path / "new" / "folder"
    said = plot(write(tmp_path, *some()), "--output", out)
    assert said.exit_code == 0, said.output
    assert {path.name for path in out.iterdir()} == {
        f"alltoall-4x4-mpich-5.0.2-single.{kind}" for kind in ("png", "svg")
    }
    assert all(str(path) in said.output for path in out.iterdir())
    assert (out / "alltoall-4x4-mpich-5.0.2-single.png").read_bytes().startswith(b"\x89PNG")
    words = svg_words(out / "alltoall-4x4-mpich-5.0.2-single.svg")
    for label in ("native", "auto", "bruck radix=4", "bound of the link", "8", "64", "4K", "500 us", "1 ms", "0.5x"):
        assert label in words, label
    for piece in (
        "4x4 (16 ranks), MPICH 5.0.2, public calls, one at a time, 2026-01-31",
        "bytes per pair",
        "speed-up over native",
        "auto's choice",
    ):
        assert any(piece in word for word in words), piece


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_one_format_always_the_same(tmp_path: Path, kind: str) -> None:
    """Equal records give equal bytes, whatever the user's settings are, which stay as they were."""
    matplotlib = pytest.importorskip("matplotlib", reason=WHY)
    (comparison,) = compare(read_records(write(tmp_path, *some())))
    (first,) = save(comparison, tmp_path, "first", [kind])
    with matplotlib.rc_context({"font.size": 30, "svg.hashsalt": None}):
        (second,) = save(comparison, tmp_path, "second", [kind])
        assert matplotlib.rcParams["font.size"] == 30
    assert first.read_bytes() == second.read_bytes()
    assert "matplotlib.pyplot" not in sys.modules


def test_same_colour_everywhere(tmp_path: Path) -> None:
    """A subject's line has one colour in both panels, and its span has it too."""
    pytest.importorskip("matplotlib", reason=WHY)
    from matplotlib.colors import to_hex

    latency, speedup, choice = draw(one(tmp_path, *some())).axes
    by_name = {str(drawn.get_label()): to_hex(drawn.get_color()) for drawn in latency.lines}
    again = {str(drawn.get_label()): to_hex(drawn.get_color()) for drawn in speedup.lines}
    names = ["auto", "grouped form=share memory=shared", "bruck radix=4"]
    assert [by_name[name] for name in names] == [again[name] for name in names]
    assert len(set(by_name.values())) == 5  # native and the bound too
    assert [to_hex(patch.get_facecolor()) for patch in choice.patches] == [by_name[names[1]]]
    assert [text.get_text() for text in choice.texts] == ["grouped\nform=share\nmemory=shared"]


@pytest.mark.parametrize(
    ("lines", "piece"),
    [
        ([line(size=8), line(size=16)], "nothing but native"),
        ([line("ring", 8), line("bruck", 16)], "native was not measured"),
        ([line(size=8), line("ring", 16)], "nothing but native"),
        ([line(), line("ring", seconds=0.99e-3)], "pale: native is"),
        ([line("auto", 8, chosen=SHARE), line("ring", 16)], "hatched: fastest"),
        ([line("auto", 8, chosen=SHARE)], "measured)"),
        ([line(), *(line("slow", params={"n": n}) for n in range(12))], "10 more"),
        ([line(), line("ring", 1 << 59, 8e8), line("ring", 1, 2e-12)], "536870912G"),
        ([line(mpi="$\\frac{1$ <&> %")], "$\\frac{1$ <&> %"),
        ([line(layout="1+" * 200 + "1")], "1+1+1"),
        ([line(collective="of_tomorrow")], "block size, bytes"),
    ],
)
def test_odd_files(tmp_path: Path, lines: list[Line], piece: str) -> None:
    """Files with little or strange data make figures that say so."""
    pytest.importorskip("matplotlib", reason=WHY)
    said = plot(write(tmp_path, *lines), "-o", tmp_path, "--format", "svg")
    assert said.exit_code == 0, said.output
    (path,) = tmp_path.glob("*.svg")
    assert any(piece in word for word in svg_words(path)), svg_words(path)


def test_size_zero(tmp_path: Path) -> None:
    """0 bytes have no place on the axis: said, and an error if there is nothing else."""
    pytest.importorskip("matplotlib", reason=WHY)
    said = plot(write(tmp_path, line(size=0), line(), line(size=8)), "-o", tmp_path, "--format", "svg")
    assert said.exit_code == 0 and "1 of 3 records" in said.output
    said = plot(write(tmp_path, line(size=0)), "-o", tmp_path)
    assert said.exit_code == 1 and "nothing to draw" in said.output


def test_unwritable(tmp_path: Path) -> None:
    """A file in the way is named."""
    pytest.importorskip("matplotlib", reason=WHY)
    (tmp_path / "alltoall-4x4-mpich-5.0.2-single.png").mkdir()
    said = plot(write(tmp_path, line()), "-o", tmp_path)
    assert said.exit_code == 1 and "alltoall-4x4-mpich-5.0.2-single.png: Is a directory" in said.output


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing says what to install; the command exists all the same."""
    import_ = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return import_(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    said = plot(write(tmp_path, line()), "-o", tmp_path)
    assert said.exit_code == 1 and "pip install 'hiercoll[plot]'" in said.output
    assert plot("--help").exit_code == 0
