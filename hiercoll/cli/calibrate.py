"""The parameters of a machine for the model, measured here or fitted to measured times: calibrate."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as Grid

from hiercoll.cli.common import Together, main, quiet_progress, wide_console, world
from hiercoll.errors import ArgumentError, HiercollError, MachineError
from hiercoll.model.calibration import Calibrated, Notes, analyse
from hiercoll.model.machine import Machine, get_machine, parameter_fields
from hiercoll.model.measurements import Measurement, read
from hiercoll.tools.published import predictable, profiles
from hiercoll.units import format_time

if TYPE_CHECKING:
    from mpi4py import MPI

    from hiercoll.tools.calibrating import Calibration

Given = TypeVar("Given")
FILE = click.Path(dir_okay=False, path_type=Path)
OF_DATA = ("system", "source", "most_nodes", "start")
OF_MEASURING = ("out", "seconds", "fresh")


@main.command()
@click.option("--machine", "-m", "target", type=FILE, required=True, help="The machine to write (JSON).")
@click.option("--name", help="What the machine is called. Default: as its file.")
@click.option(
    "--domain", type=click.IntRange(1), help="Ranks in a NUMA domain. Default: as the system says, if it does."
)
@click.option("--socket", type=click.IntRange(1), help="Ranks in a socket. Default: as the system says, if it does.")
@click.option(
    "--out",
    type=FILE,
    default=Path("calibration.jsonl"),
    show_default=True,
    help="What is measured, as it comes (JSON Lines); a second call goes on from there.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=0.3,
    show_default=True,
    help="Time for each of some fifty measurements, about.",
)
@click.option("--fresh", is_flag=True, help="Do not go on from what is in --out.")
@click.option("--data", type=FILE, help="Fit to the measured times in this CSV file instead; without MPI.")
@click.option("--system", help="With --data: the system to take the rows of.")
@click.option("--source", multiple=True, help="With --data: only rows whose source begins so. May be repeated.")
@click.option(
    "--most-nodes", type=click.IntRange(1), help="With --data: fit to rows of so many nodes, predict the others."
)
@click.option("--start", help="With --data: the machine to start from, a file or a name. Default: usual values.")
@click.pass_context
def calibrate(
    ctx: click.Context,
    target: Path,
    name: str | None,
    domain: int | None,
    socket: int | None,
    out: Path,
    seconds: float,
    fresh: bool,
    data: Path | None,
    system: str | None,
    source: tuple[str, ...],
    most_nodes: int | None,
    start: str | None,
) -> None:
    """Find the parameters of a machine for the performance model; under mpiexec or srun, or with --data.

    Measured are messages, copies and flags, in a minute or a few. Two nodes are needed for what concerns the
    network, bound ranks for what differs within a node; what is not measured keeps its default, and is listed in the
    machine as assumed. An interrupted run goes on from what it has left in --out.
    """
    for each in OF_MEASURING if data else OF_DATA:
        if ctx.get_parameter_source(each) is click.core.ParameterSource.COMMANDLINE:
            option = f"--{each.replace('_', '-')}"
            raise click.UsageError(f"{option} is for {'measuring, not for --data' if data else 'use with --data'}")
    name = name or target.stem
    if data:
        if not system:
            raise click.UsageError("--data needs --system")
        _check(target, domain, socket)
        _from_data(data, system, source, most_nodes, _machine(name, start, domain or 0, socket or 0), target)
        return
    comm = world()
    with Together(comm):
        _from_root(comm, lambda: _check(target, domain, socket))
        _measure(comm, target, name, out, (seconds, domain or 0, socket or 0), fresh)


def _check(path: Path, domain: int | None, socket: int | None) -> None:
    """Raises ArgumentError if the file could not be written, or such domains do not fill such sockets."""
    if domain and socket and socket % domain:
        raise ArgumentError("--socket", f"a multiple of --domain, {domain}", socket)
    if not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArgumentError("--machine", "a file that can be written", path)


# Measured here


def _measure(
    comm: MPI.Intracomm, target: Path, name: str, out: Path, options: tuple[float, int, int], fresh: bool
) -> None:
    from hiercoll.tools.calibrating import Calibration

    here = Calibration(comm, *options)
    notes = _from_root(comm, lambda: _notes(out, here, fresh), keep=True)
    _run(comm, here, notes)
    here.close()
    if notes is not None:
        found = analyse(notes.samples, here.setting)
        about = f"Measured on {here.setting.layout} with {here.setting.mpi}, {here.setting.hosts} hosts"
        machine = found.machine(name, here.setting, (str(out),), about)
        target.write_text(machine.to_json(), encoding="utf-8")
        _print_parameters(found, machine)
        click.echo(f"{target}: {len(found.values)} parameters from {len(notes.samples)} measurements in {out}")


def _notes(path: Path, here: Calibration, fresh: bool) -> Notes:
    try:
        return Notes(path, here.setting, fresh)
    except (OSError, UnicodeError) as error:
        raise MachineError(path, "file", "one that can be read and written", str(error)) from None


def _from_root(comm: MPI.Intracomm, do: Callable[[], Given], keep: bool = False) -> Given | None:
    """What rank 0 does and has (``keep``: gives back, there alone); its error on every rank. Collective."""
    found, error = None, None
    if comm.rank == 0:
        try:
            found = do()
        except HiercollError as raised:
            error = str(raised)
    error = comm.bcast(error)
    if error is not None:
        raise HiercollError(error)
    return found if keep else None


def _run(comm: MPI.Intracomm, here: Calibration, notes: Notes | None) -> None:
    """Measure what is not in the notes yet."""
    done = comm.bcast(set(notes.samples) if notes is not None else None)
    groups = [(group, all(key in done for key in group)) for group in here.groups()]
    columns = (TextColumn("calibrating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with quiet_progress(comm, *columns, TimeElapsedColumn()) as progress:
        total = sum(len(group) for group, _ in groups)
        task = progress.add_task("", total=total, completed=sum(len(group) for group, there in groups if there))
        for group, there in groups:
            if there:
                continue
            samples = here.run(group)
            if notes is not None:
                notes.add(samples)
            last = f"{group[-1]}: {format_time(samples[-1].median)}"
            progress.update(task, advance=len(group), description=last, refresh=True)


def _print_parameters(found: Calibrated, machine: Machine) -> None:
    grid = Grid("parameter", "value", "unit", "meaning", "")
    for each in parameter_fields():
        value = getattr(machine.parameters, each.name)
        grid.add_row(each.name, f"{value:.4g}", each.metadata["unit"], each.metadata["meaning"], _why(found, each.name))
    wide_console().print(grid)


def _why(found: Calibrated, name: str) -> str:
    return f"assumed: {found.reasons[name]}" if name in found.reasons else "measured"


# Fitted to measured times


def _machine(name: str, start: str | None, domain: int, socket: int) -> Machine:
    """What to start from. Raises MachineError."""
    from dataclasses import replace

    given = get_machine(start) if start else Machine(name)
    return replace(given, name=name, domain=domain or given.domain, socket=socket or given.socket, assumed=())


def _from_data(
    path: Path, system: str, sources: Sequence[str], most_nodes: int | None, machine: Machine, target: Path
) -> None:
    """Fit to the rows of a file. Raises MachineError."""
    if importlib.util.find_spec("scipy") is None:
        raise click.ClickException("--data needs SciPy: pip install 'hiercoll[model]'")
    from dataclasses import replace

    from hiercoll.model.fit import Rows, fit, without_influence

    rows = _chosen(path, system, sources)
    near = [row for row in rows if most_nodes is None or row.nodes <= most_nodes]
    if not near:
        raise MachineError(path, "rows", f"some of at most {most_nodes} nodes", "none")
    try:
        silent = without_influence(machine, near, profiles)
        fixed = {name: getattr(machine.parameters, name) for name in silent}
        found = fit(machine, near, fixed, profiles)
    except ArgumentError as error:
        raise MachineError(path, error.argument, error.expected, str(error.got)) from None
    except MachineError as error:
        raise MachineError(path, error.field, error.expected, error.got) from None
    unknown = sorted({*silent, *found.undetermined})
    about = f"Fitted to times of {system} in {path.name}"
    fitted = replace(found.machine, assumed=tuple(unknown), sources=(path.name, *sources), about=about)
    target.write_text(fitted.to_json(), encoding="utf-8")
    _print_quality("fitted", near, found.errors)
    far = [row for row in rows if row not in near]
    if far:
        _print_quality(f"predicted, more than {most_nodes} nodes", far, Rows(fitted, far, profiles).errors(fitted))
    _print_unknown(unknown)
    click.echo(f"{target}: {len(near)} rows, half of them within {found.machine.fitted['median']:.0%}")


def _chosen(path: Path, system: str, sources: Sequence[str]) -> list[Measurement]:
    """Rows of a system that the model knows the schedules of. Raises MachineError."""
    rows = read(path)
    own = [row for row in rows if row.system == system]
    if not own:
        raise MachineError(path, "system", f"one of {', '.join(sorted({row.system for row in rows}))}", system)
    chosen = [row for row in own if not sources or row.source.startswith(tuple(sources))]
    if not chosen:
        known = ", ".join(sorted({row.source for row in own}))
        raise MachineError(path, "source", f"the beginning of one of {known}", " or ".join(sources))
    found = predictable(chosen)
    if not found:
        raise MachineError(path, "rows", f"some of {system} with a schedule that the model knows", "none")
    return found


def _print_quality(what: str, rows: Sequence[Measurement], errors: Any) -> None:
    """By how much the model is off, by algorithm and phase."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row, error in zip(rows, errors, strict=True):
        groups.setdefault((row.algorithm, row.phase), []).append(float(error))
    grid = Grid(title=f"model / measured - 1, {what}")
    for column in ("algorithm", "phase", "rows", "median of |error|", "90 % within", "median"):
        grid.add_column(column, justify="left" if column in ("algorithm", "phase") else "right")
    for (algorithm, phase), off in [*sorted(groups.items()), (("all", ""), list(map(float, errors)))]:
        sizes = np.abs(off)
        middle, most = np.median(sizes), np.quantile(sizes, 0.9)
        grid.add_row(algorithm, phase, str(len(off)), f"{middle:.0%}", f"{most:.0%}", f"{np.median(off):+.0%}")
    wide_console().print(grid)


def _print_unknown(names: Iterable[str]) -> None:
    grid = Grid("not determined", "meaning", "what would tell", title="as at the start, or near it")
    metadata = {each.name: each.metadata for each in parameter_fields()}
    for name in names:
        grid.add_row(name, metadata[name]["meaning"], metadata[name]["measured"])
    if grid.row_count:
        wide_console().print(grid)
