"""Tables: what is written can be read, and whatever else is read is a TableError that names file and field."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiercoll.algorithms import get_algorithm
from hiercoll.errors import TableError
from hiercoll.model.cost import Link, Links
from hiercoll.settings import own_table
from hiercoll.tables import NATIVE_VARIANT, Choice, Entry, Figure, Table, Variant, dump, layout_distance, load, parse
from hiercoll.topology import MOST_RANKS, parse_layout
from hiercoll.tuner import NATIVE, decide

MPI = "MPICH 5.0.2"


def variant(algorithm: str, collective: str = "alltoall", **params: int | str) -> Variant:
    return Variant(algorithm, get_algorithm(collective, algorithm).resolve(params))


def figure(size: int, of: Variant, seconds: float, samples: int = 9) -> Figure:
    return Figure(size, of, seconds, seconds * 0.9, seconds * 1.1, samples)


BRUCK, PAIRWISE, LANE = variant("bruck"), variant("pairwise"), variant("grouped", form="lane")
INPLACE = variant("inplace")
ENTRY = Entry(
    collective="alltoall",
    mpi=MPI,
    memory="host",
    nodes=(4, 4),
    placement="block",
    choices=(Choice(1, BRUCK), Choice(100, Variant(NATIVE)), Choice(5000, LANE)),
    figures=(
        figure(64, BRUCK, 1e-5),
        figure(64, Variant(NATIVE), 2e-5),
        figure(64, INPLACE, 3e-5),
        figure(512, Variant(NATIVE), 3e-5),
        figure(512, BRUCK, 4e-5),
        figure(8192, LANE, 2e-4),
        figure(8192, Variant(NATIVE), 5e-4),
    ),
    about={"date": "2026-11-21T00:00:00+00:00", "hosts": 2},
    links=Links(node=Link(1e-6, 1e-10), network=Link(2e-5, 4e-8)),
)
GOOD: dict[str, Any] = json.loads(dump(Table((ENTRY,))))


def test_plans_have_choices_of_their_own() -> None:
    """Where there are none, those of calls."""
    forms = [Variant(NATIVE, {"form": form}) for form in ("nonblocking", "persistent")]
    entry = replace(ENTRY, choices=(Choice(1, forms[0]),), plans=(Choice(1, forms[1]), Choice(64, BRUCK)))
    assert parse(dump(Table((entry,)))).entries == (entry,)
    assert [entry.choice(8, held=held) for held in (False, True)] == forms
    assert ENTRY.choice(8, held=True) == ENTRY.choice(8) == BRUCK
    table, where = Table((entry,)), parse_layout("2x4")
    for held, form in enumerate(forms):
        assert decide("alltoall", where, 8, table=table, mpi=MPI, held=bool(held)).variant == form
    assert forms[0].spelled("alltoall") == "native form=nonblocking" and not forms[0].is_native
    with pytest.raises(TableError, match=r"choices\[0\].params: expected no persistent form for calls"):
        parse(dump(Table((replace(entry, choices=entry.plans),))))
    with pytest.raises(TableError, match=r"params: expected none for native, or form: nonblocking or persistent"):
        parse(dump(Table((entry,))).replace('"nonblocking"', '"other"'))


def test_forms_that_a_library_does_not_get_right() -> None:
    """native's plan is taken instead, and a form of the kind is refused only where it is unsound."""
    persistent, nonblocking = (Variant(NATIVE, {"form": form}) for form in ("persistent", "nonblocking"))
    entry = replace(ENTRY, mpi="Intel MPI 2021.18.1", choices=(Choice(1, nonblocking),), plans=(Choice(1, persistent),))
    assert [entry.choice(8, held=held) for held in (False, True)] == [nonblocking, NATIVE_VARIANT]
    assert replace(entry, mpi="MPICH 5.0.2").choice(8, held=True) == persistent
    assert BRUCK.is_sound(entry.mpi) and NATIVE_VARIANT.is_sound(entry.mpi)


def test_figures_of_one_sample_rank_nothing() -> None:
    """Nor do those that selected a finalist, those of rows and plans, and those that do not say what they timed."""
    seen = figure(64, INPLACE, 1e-6, samples=1)
    others = [seen._replace(ranked=False), seen._replace(timing="row"), seen._replace(timing="plan-single")]
    entry = replace(ENTRY, figures=(*ENTRY.figures, *others))
    assert entry.measured(64) == ENTRY.measured(64)
    text = dump(Table((entry,)))
    assert parse(text).entries == (entry,)
    data = json.loads(text)
    for each in data["entries"][0]["figures"]:
        del each["timing"], each["ranked"]
    old = parse(json.dumps(data)).entries[0]
    assert old.measured(64) == [] and old.native_seconds(64) is None and old.choice(8) == BRUCK
    assert parse(dump(Table((old,)))).entries == (old,)
    for name, wrong in (("timing", "fast"), ("ranked", "yes")):
        data["entries"][0]["figures"][0][name] = wrong
        with pytest.raises(TableError, match=rf"figures\[0\].{name}: expected"):
            parse(json.dumps(data))
        del data["entries"][0]["figures"][0][name]


def test_native_is_known_between_what_was_measured() -> None:
    """On logarithmic scales; not outside."""
    assert ENTRY.native_seconds(64) == pytest.approx(2e-5) and ENTRY.native_seconds(8192) == pytest.approx(5e-4)
    assert ENTRY.native_seconds(2048) == pytest.approx((3e-5 * 5e-4) ** 0.5)
    assert ENTRY.native_seconds(63) is ENTRY.native_seconds(8193) is ENTRY.native_seconds(0) is None
    assert replace(ENTRY, figures=()).native_seconds(64) is None


def test_round_trip(tmp_path: Path) -> None:
    other = replace(ENTRY, collective="allgather", choices=(Choice(8, Variant(NATIVE)),), figures=())
    path = tmp_path / "table.json"
    path.write_text(dump(Table((ENTRY, other))), encoding="utf-8")
    assert load(path).entries == (ENTRY, other)
    assert load(path).source == str(path)
    assert dump(load(path)) == path.read_text(encoding="utf-8")
    assert parse(dump(Table())).entries == ()


def test_transports() -> None:
    """Kept with a variant where it is not "auto"; another one is an error that names it."""
    peer = replace(LANE, transport="peer:4")
    entry = replace(
        ENTRY, memory="cuda", choices=(Choice(1, BRUCK), Choice(64, peer)), figures=(figure(64, peer, 1e-5),)
    )
    text = dump(Table((entry,)))
    assert parse(text).entries == (entry,)
    assert text.count("transport") == 2 and "transport" not in dump(Table((ENTRY,)))
    assert peer.key != LANE.key and peer.spelled("alltoall") == f"{LANE.spelled('alltoall')} peer:4"
    found = decide("alltoall", parse_layout("2x4"), 64, table=Table((entry,)), mpi=MPI, memory="cuda")
    assert found.variant == found.ranking[0].variant == peer
    near = decide("alltoall", parse_layout("4x4"), 64, table=Table((entry,)), mpi=MPI, memory="cuda")
    assert near.variant.transport == "peer:4"
    for wrong in ("node_ranks", "staged:0", 3):
        with pytest.raises(TableError, match=r"entries\[0\]\.choices\[1\]\.transport: expected 'auto', 'direct'"):
            parse(text.replace('"peer:4"', json.dumps(wrong), 1))


@pytest.mark.parametrize(
    ("size", "chosen"),
    [
        (0, BRUCK),
        (1, BRUCK),
        (99, BRUCK),
        (100, Variant(NATIVE)),
        (4999, Variant(NATIVE)),
        (5000, LANE),
        (1 << 40, LANE),
    ],
)
def test_choice_by_size(size: int, chosen: Variant) -> None:
    assert ENTRY.choice(size) == chosen


def test_figures_of_the_nearest_size() -> None:
    assert [f.variant for f in ENTRY.measured(70)] == [BRUCK, Variant(NATIVE), INPLACE]
    assert {f.size for f in ENTRY.measured(1 << 20)} == {8192}
    assert {f.size for f in ENTRY.measured(0)} == {64}


def changed(path: str, value: Any) -> str:
    """The good table with the field at ``path`` set to ``value``, or removed if that is ``...``."""
    data = json.loads(json.dumps(GOOD))
    place: Any = data
    *way, last = [int(step) if step.isdigit() else step for step in path.split("/")]
    for step in way:
        place = place[step]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(data)


BROKEN = [
    ("format", "another table", "format"),
    ("format", ..., "format"),
    ("version", 2, "version"),
    ("version", "1", "version"),
    ("entries", {}, "entries"),
    ("entries", ..., "entries"),
    ("entries/0", 7, "entries[0]"),
    ("entries/0/collective", "gossip", "entries[0].collective"),
    ("entries/0/mpi", "", "entries[0].mpi"),
    ("entries/0/mpi", ["MPICH"], "entries[0].mpi"),
    ("entries/0/memory", "disk", "entries[0].memory"),
    ("entries/0/nodes", [], "entries[0].nodes"),
    ("entries/0/nodes/1", 0, "entries[0].nodes[1]"),
    ("entries/0/nodes/1", 4.5, "entries[0].nodes[1]"),
    ("entries/0/nodes/1", True, "entries[0].nodes[1]"),
    ("entries/0/nodes/1", MOST_RANKS, "entries[0].nodes"),
    ("entries/0/placement", "random", "entries[0].placement"),
    ("entries/0/choices", [], "entries[0].choices"),
    ("entries/0/choices/1/from", 1, "entries[0].choices"),
    ("entries/0/choices/1/from", -1, "entries[0].choices[1].from"),
    ("entries/0/choices/1/from", 1 << 70, "entries[0].choices[1].from"),
    ("entries/0/choices/0/algorithm", "magic", "entries[0].choices[0].algorithm"),
    ("entries/0/choices/0/algorithm", ["bruck"], "entries[0].choices[0].algorithm"),
    ("entries/0/choices/0/params", {"radix": 1}, "entries[0].choices[0].params"),
    ("entries/0/choices/0/params", {"speed": 9}, "entries[0].choices[0].params"),
    ("entries/0/choices/0/params", 3, "entries[0].choices[0].params"),
    ("entries/0/choices/1/params", {"radix": 2}, "entries[0].choices[1].params"),
    ("entries/0/figures", "none", "entries[0].figures"),
    ("entries/0/figures/2/size", 0, "entries[0].figures[2].size"),
    ("entries/0/figures/2/median", -1, "entries[0].figures[2].median"),
    ("entries/0/figures/2/median", "fast", "entries[0].figures[2].median"),
    ("entries/0/figures/2/median", 10**400, "entries[0].figures[2].median"),
    ("entries/0/figures/2/samples", 0, "entries[0].figures[2].samples"),
    ("entries/0/about", [], "entries[0].about"),
    ("entries/0/links/node", 3, "entries[0].links.node"),
    ("entries/0/links/network/beta", None, "entries[0].links.network.beta"),
]


@pytest.mark.parametrize(("path", "value", "field"), BROKEN)
def test_broken_field(path: str, value: Any, field: str) -> None:
    with pytest.raises(TableError) as caught:
        parse(changed(path, value), "my.json")
    assert caught.value.file == "my.json"
    assert caught.value.field == field
    assert f"my.json: {field}: expected " in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "7", "null", '{"format": NaN}', "[" * 100_000, '"\ud800"'])
def test_not_a_table(text: str) -> None:
    with pytest.raises(TableError, match=r"^my\.json: "):
        parse(text, "my.json")


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="No such file"):
        load(tmp_path / "none.json")
    with pytest.raises(TableError, match="directory"):
        load(tmp_path)
    (tmp_path / "latin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TableError, match="UTF-8"):
        load(tmp_path / "latin")


def test_two_entries_for_a_setting() -> None:
    with pytest.raises(TableError, match=r"entries\[1\]: expected one entry for each setting"):
        parse(dump(Table((ENTRY, ENTRY))))


def read(text: str) -> Table | None:
    """The table, or None for a refusal that names the file; anything else that is raised is a failure."""
    try:
        return parse(text, "my.json")
    except TableError as error:
        if not str(error).startswith("my.json: "):
            raise
        return None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def paths(value: Any, here: str = "") -> list[str]:
    """Every place in JSON data."""
    if isinstance(value, dict):
        steps = list(value.items())
    elif isinstance(value, list):
        steps = [(str(number), each) for number, each in enumerate(value)]
    else:
        return [here]
    deeper = [path for step, each in steps for path in paths(each, f"{here}/{step}" if here else step)]
    return [*([here] if here else []), *deeper]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(paths(GOOD)), json_values | st.just(...))
def test_any_change_is_read_or_refused(path: str, value: Any) -> None:
    """Whatever stands in whichever field: a table that works, or a TableError; nothing else."""
    table = read(changed(path, value))
    if table is None or any(sum(entry.nodes) > 1000 for entry in table.entries):  # which the model takes seconds for
        return
    for layout in ("2x4", "3+5", "8x1"):
        for size in (0, 64, 1 << 20):
            decision = decide("alltoall", parse_layout(layout), size, table=table, mpi=MPI)
            if decision.variant.algorithm != NATIVE:
                entry = get_algorithm("alltoall", decision.variant.algorithm)
                assert entry.refusal(parse_layout(layout), decision.variant.params) is None


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_text_that_is_cut_or_torn(data: st.DataObject) -> None:
    text = dump(Table((ENTRY,)))
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    torn = text[:start] + data.draw(st.text(max_size=3)) + text[end:]
    read(torn)


def test_find_prefers_library_then_layout() -> None:
    other_version = replace(ENTRY, mpi="MPICH 4.2.0")
    elsewhere = replace(ENTRY, mpi="Open MPI 5.0.11")
    wide = replace(ENTRY, nodes=(8, 8))
    cyclic = replace(ENTRY, placement="cyclic")
    table = Table((other_version, elsewhere, wide, cyclic, ENTRY))
    here = parse_layout("2x4")
    assert table.find("alltoall", MPI, "host", here) is ENTRY
    assert table.find("alltoall", MPI, "host", parse_layout("2x4:cyclic")) is cyclic
    assert table.find("alltoall", MPI, "host", parse_layout("2x9")) is wide
    assert table.find("alltoall", "MPICH 6.0", "host", here) in (ENTRY, other_version)
    assert table.find("alltoall", "Open MPI 5.0.11", "host", here) is elsewhere
    assert table.find("alltoall", "MVAPICH 3.0", "host", here) is None
    assert table.find("allgather", MPI, "host", here) is None
    assert table.find("alltoall", MPI, "cuda", here) is None


def test_layouts_that_are_the_same() -> None:
    uneven = replace(ENTRY, nodes=(5, 3, 4))
    assert layout_distance(uneven, parse_layout("3+4+5")) == (0.0, 0.0)
    assert layout_distance(uneven, parse_layout("4+4+4"))[0] > 0
    assert layout_distance(uneven, parse_layout("3+4+5:cyclic")) == (0.0, 1.0)


def test_merge_keeps_the_later() -> None:
    later = replace(ENTRY, about={"date": "2027-01-01T00:00:00+00:00"}, choices=(Choice(1, LANE),))
    other = replace(ENTRY, memory="cuda")
    for one, two in ((ENTRY, later), (later, ENTRY)):
        assert Table((one,)).merged(Table((two, other))).entries == (later, other)


def test_default_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert own_table() is None
    path = tmp_path / "hiercoll" / "table.json"
    path.parent.mkdir()
    path.touch()
    assert own_table() == path


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose user is unknown, or that may not be entered: there is no table, and no error, on what may be one rank."""
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    for home in ("/dev/null", None):  # a file; no name to look for
        monkeypatch.setattr(os.path, "expanduser", lambda path, home=home: path.replace("~", home) if home else path)
        assert own_table() is None


def test_exact_entry_decides() -> None:
    table = Table((ENTRY,), "my.json")
    topology = parse_layout("2x4")
    decision = decide("alltoall", topology, 64, table=table, mpi=MPI)
    assert decision.variant == BRUCK
    assert decision.reason.startswith("my.json: measured for 2x4")
    assert [(c.algorithm, c.seconds) for c in decision.ranking] == [("bruck", 1e-5), (NATIVE, 2e-5), ("inplace", 3e-5)]
    assert decide("alltoall", topology, 300, table=table, mpi=MPI).variant == Variant(NATIVE)
    assert decide("alltoall", topology, 64, inplace=True, table=table, mpi=MPI).variant == BRUCK
    assert decide("alltoall", topology, 8192, table=table, mpi=MPI).variant == LANE
    in_place = decide("alltoall", topology, 8192, inplace=True, table=table, mpi=MPI)
    assert in_place.variant == Variant(NATIVE)
    assert "in place" in in_place.reason


def test_nearest_entry_is_carried_over() -> None:
    """native's lead there is native's lead here, and what cannot run here is left out."""
    table = Table((ENTRY,), "my.json")
    decision = decide("alltoall", parse_layout("2x5"), 512, table=table, mpi=MPI)
    assert "nearest entry, 2x4" in decision.reason
    assert {c.algorithm for c in decision.ranking} == {NATIVE}  # what was not chosen there is no candidate here
    decision = decide("alltoall", parse_layout("2x5"), 64, table=table, mpi=MPI)
    assert {c.algorithm for c in decision.ranking} == {NATIVE, "bruck"} and decision.variant.algorithm == "bruck"
    assert [c.seconds for c in decision.ranking] == sorted(c.seconds for c in decision.ranking)


@pytest.mark.parametrize("held", [False, True])
def test_no_entry_means_native(held: bool) -> None:
    """In calls and plans, unless the cost model is asked for; its ranking is there to be looked at."""
    where, mpi = parse_layout("2x4"), "Open MPI 5"
    decision = decide("alltoall", where, 512, table=Table((ENTRY,)), mpi=mpi, held=held)
    assert decision.variant == Variant(NATIVE) and "no table for alltoall" in decision.reason
    by_model = decide("alltoall", where, 512, table=load("model"), mpi=mpi, held=held)
    assert by_model.variant == by_model.ranking[0].variant == decision.ranking[0].variant != Variant(NATIVE)
    assert decide("alltoall", where, 512, table=load("model"), mpi=mpi, inplace=True).variant.algorithm != NATIVE
    assert decide("alltoall", parse_layout("1x1"), 512, table=Table((ENTRY,)), mpi=MPI).variant == Variant(NATIVE)
