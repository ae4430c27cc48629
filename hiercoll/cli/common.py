"""What commands share: the group they belong to, types of arguments, the MPI world."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console
from rich.progress import Progress, ProgressColumn

import hiercoll
from hiercoll.algorithms import Algorithm, Params, get_algorithm
from hiercoll.collectives import COLLECTIVES, called, get_collective, tuned
from hiercoll.errors import ArgumentError, HiercollError, NativeWarning
from hiercoll.schedule.transports import parse_transport
from hiercoll.tables import MEMORIES
from hiercoll.topology import LAYOUT_HELP, parse_layout
from hiercoll.units import parse_size

if TYPE_CHECKING:
    from mpi4py import MPI

CALLED = {each.name: each for each in called() if not each.typed}  # what can be run and measured
SIZES_HELP = f"8,64,4K or FROM:TO[:FACTOR]; {'; '.join(f'{name}: {each.size_of}' for name, each in CALLED.items())}"
F = TypeVar("F", bound=Callable[..., object])


class Group(click.Group):
    """Turns hiercoll's errors into messages, never tracebacks."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HiercollError as error:
            raise click.ClickException(str(error)) from None
        except BrokenPipeError:  # whoever reads has seen enough: as click does it
            raise
        except OSError as error:
            where = "" if error.filename is None else f"{error.filename}: "
            raise click.ClickException(f"{where}{error.strerror}") from None


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.option("--version", is_flag=True, help="Show the version, and with -v what runs here, and exit.")
@click.option("-v", "--verbose", is_flag=True, help="With --version: the MPI library and the engine, too.")
@click.pass_context
def main(ctx: click.Context, version: bool, verbose: bool) -> None:
    """Hierarchical, proved collectives for mpi4py programs: alltoall, allgather, allreduce and others.

    An ALGORITHM is written as its name with parameters: bruck:radix=4 or
    grouped:form=share,memory=shared. A layout of ranks on nodes is written as 2x4 (2
    nodes of 4 ranks), 3+5, 2x4:cyclic, 3+5:random=7, or the node of each rank, 0,0,1,1.
    """
    if version:
        click.echo(f"hiercoll, version {hiercoll.__version__}")
        for what, value in _what_runs() if verbose else ():
            click.echo(f"{what}: {value}")
        ctx.exit()
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        ctx.exit(2)


def _what_runs() -> list[tuple[str, str]]:
    """See `hiercoll.config`."""
    try:
        return [(what, value) for what, value in hiercoll.config().items() if value and what != "hiercoll"]
    except ImportError as error:
        return [("mpi4py", f"none here ({error})")]


class FamilyType(click.Choice):  # type: ignore[type-arg]
    """A collective whose algorithms are meant: those of "alltoallv" for alltoallw."""

    def __init__(self) -> None:
        super().__init__(list(COLLECTIVES))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The family."""
        return COLLECTIVES[super().convert(value, param, ctx)].family


class LayoutType(click.ParamType):  # type: ignore[type-arg]
    name = "layout"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            parse_layout(value)
        except ArgumentError as error:
            self.fail(str(error), param, ctx)
        return value


class SizeType(click.ParamType):  # type: ignore[type-arg]
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_size(value)
        except ArgumentError as error:
            self.fail(str(error), param, ctx)


class SizesType(click.ParamType):  # type: ignore[type-arg]
    """``8,64,4K`` or ``8:64K`` (powers of two from, to) or ``8:64K:8`` (factor)."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        try:
            sizes: list[int] = []
            for piece in value.split(","):
                bounds = [parse_size(text) for text in piece.split(":")]
                if len(bounds) == 1:
                    sizes += bounds
                    continue
                low, high, factor = [*bounds, 2][:3]
                if factor < 2 or low < 1 or len(bounds) > 3:
                    raise ArgumentError("sizes", "FROM:TO or FROM:TO:FACTOR, FROM >= 1, FACTOR >= 2", repr(piece))
                if low > high:
                    raise ArgumentError("sizes", "FROM:TO, FROM at most TO", repr(piece))
                while low <= high:
                    sizes.append(low)
                    low *= factor
            return sizes
        except ArgumentError as error:
            self.fail(str(error), param, ctx)


class RateType(click.ParamType):  # type: ignore[type-arg]
    """Bytes per second, from bits per second as tc writes them: 200mbit, 25gbit."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", value.strip().lower())
        if not match or float(match[1]) == 0:
            self.fail(f"{value!r} is not a rate such as 200mbit or 25gbit", param, ctx)
        return float(match[1]) * {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[match[2]] / 8


class TransportType(click.ParamType):  # type: ignore[type-arg]
    """As the argument ``transport`` of the calls."""

    name = "transport"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parse_transport(value)
        except ArgumentError as error:
            self.fail(str(error), param, ctx)
        return str(value)


def layout_option(default: str) -> Callable[[F], F]:
    """The option --layout."""
    return click.option("--layout", "-l", type=LayoutType(), default=default, show_default=True, help=LAYOUT_HELP + ".")


def memory_option(more: str = "") -> Callable[[F], F]:
    """The option --memory."""
    choice = click.Choice(MEMORIES)
    return click.option("--memory", type=choice, default="host", show_default=True, help=f"Of the arrays{more}.")


def parse_algorithm(text: str) -> tuple[str, Params]:
    """Name and given parameters of ``name:key=value,key=value``, or, as they are printed, ``name key=value key=value``.
    Raises ArgumentError."""
    name, *rest = re.split("[: ]", text.strip(), maxsplit=1)
    params: Params = {}
    for piece in filter(None, re.split("[, ]", "".join(rest))):
        key, equals, value = piece.partition("=")
        if not equals or not key:
            raise ArgumentError("algorithm", "name:parameter=value,parameter=value", repr(text))
        params[key] = int(value) if re.fullmatch(r"-?\d+", value) else value
    return name, params


def known_algorithm(collective: str, text: str) -> tuple[Algorithm, Params]:
    """The registry entry and all parameters of an algorithm as written. Raises ArgumentError."""
    name, params = parse_algorithm(text)
    entry = get_algorithm(get_collective(collective).family, name)
    return entry, entry.resolve(params)


def measured(collective: str, memory: str) -> list[str]:
    """What is measured, of one collective or "all" that tables are made for in that memory. Raises ArgumentError."""
    if collective == "all":
        return [name for name in tuned() if memory == "host" or CALLED[name].is_on_devices]
    if memory != "host" and not CALLED[collective].is_on_devices:
        raise ArgumentError("--memory", f"host with {collective}", memory)
    return [collective]


def sizes_of(collective: str, given: list[int]) -> list[int]:
    """The given ones; 0 alone for what takes no buffers."""
    return given if get_collective(collective).buffers else [0]


def world() -> MPI.Intracomm:
    """MPI_COMM_WORLD, or a message about what is missing."""
    how = "pip install 'hiercoll[mpich]', and start it with mpiexec or srun"
    try:
        import_module("hiercoll.calls")  # looks which mpi4py there is
    except ImportError as error:
        raise click.ClickException(f"{error}; with an MPI library: {how}") from None
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise click.ClickException(f"this command needs an MPI library ({error}); try: {how}") from None
    return MPI.COMM_WORLD


def quiet_progress(comm: MPI.Intracomm, *columns: ProgressColumn) -> Progress:
    """A progress bar of rank 0, drawn only when it is updated with ``refresh=True``: the thread
    that draws it otherwise, ten times a second, takes time from what is measured."""
    return Progress(*columns, console=Console(stderr=True), auto_refresh=False, disable=comm.rank > 0)


def tell_once(console: Console, what: str) -> None:
    """What is going on, where no progress bar is drawn: in a file or a pipe."""
    if not console.is_terminal:
        console.print(f"{what} ..", markup=False, highlight=False)


def wide_console(width: int = 140) -> Console:
    """For tables: at least so wide. (Launchers give ranks a terminal of 80 columns, whatever the user's is.)"""
    console = Console()
    return console if console.width >= width else Console(width=width)


class Together:
    """What all ranks do: an error that all have is reported once, an error of one ends the job."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm

    def __enter__(self) -> None:
        if self.comm.rank:  # all ranks know; one says it
            warnings.simplefilter("ignore", NativeWarning)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> None:
        if error is None or isinstance(error, SystemExit):
            return
        if isinstance(error, HiercollError):  # raised from values that are equal on all ranks
            if self.comm.rank == 0:
                raise click.ClickException(str(error)) from None
            raise SystemExit(1)
        if isinstance(error, OSError):
            click.echo(f"Error: {error.filename}: {error.strerror}", err=True)
        elif not isinstance(error, KeyboardInterrupt):
            sys.excepthook(kind or type(error), error, error.__traceback__)
        sys.stderr.flush()
        self.comm.Abort(1)
