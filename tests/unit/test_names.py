"""What is special about a collective stands in its record: nothing else in the package compares a collective's name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hiercoll

PACKAGE = Path(hiercoll.__file__).parent
MAY_COMPARE = ("collectives.py", "algorithms/")  # where records and algorithms are
# Words that mean something else there.
OTHER_MEANINGS = {
    ("tools/timeline.py", "reduce"),  # a kind of operation
    ("model/benchmarks.py", "gather"),  # phases of published benchmarks
    ("model/benchmarks.py", "scatter"),
    ("model/measurements.py", "gather"),
    ("model/measurements.py", "scatter"),
}

BASES = (
    *("alltoall", "alltoallv", "alltoallw", "allgather", "allgatherv", "gather", "gatherv", "scatter", "scatterv"),
    *("bcast", "reduce", "allreduce", "reduce_scatter", "reduce_scatter_block"),
)
NAMES = {
    form
    for name in BASES
    for form in (name, f"i{name}", f"{name}_init", name.capitalize(), f"I{name}", f"{name.capitalize()}_init")
}
LOOKUPS = ("get", "pop", "setdefault")
PARTS = ("startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition")
POSITIONS = ("index", "count", "find")


def named(text: str) -> bool:
    """Whether one of the words is a collective."""
    return not NAMES.isdisjoint(re.findall(r"\w+", text))


def is_part(text: str) -> bool:
    """Whether some collective's name begins or ends so."""
    return named(text) or (len(text) > 2 and any(name.startswith(text) or name.endswith(text) for name in NAMES))


def literals(node: ast.AST | None) -> Iterator[str]:
    """The strings that stand there, alone or together: "alltoall", ("alltoall", "allgather"), frozenset({"bcast"})."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        for element in node.elts:
            yield from literals(element)
    elif isinstance(node, ast.Starred):
        yield from literals(node.value)
    elif isinstance(node, ast.Dict):
        for key in node.keys:
            yield from literals(key)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in ("tuple", "list", "set", "frozenset", "sorted"):
            for argument in node.args:
                yield from literals(argument)
    elif isinstance(node, ast.IfExp):
        yield from literals(node.body)
        yield from literals(node.orelse)


def collections_of_names(trees: dict[str, ast.Module]) -> dict[str, str]:
    """Variables that are collections of collectives' names, and one of these; in whatever module they are."""
    found = {}
    for tree in trees.values():
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(node, ast.Assign | ast.AnnAssign) and not isinstance(node.value, ast.Constant):
                first = next(filter(named, literals(node.value)), None)
                for target in targets:
                    if first is not None and isinstance(target, ast.Name) and target.id != "__all__":
                        found[target.id] = first
    return found


class Comparisons(ast.NodeVisitor):
    """The places of a module where a collective's name is compared: line, what is done, and the literal."""

    def __init__(self, collections: dict[str, str]) -> None:
        self.collections = collections
        self.found: list[tuple[int, str, str]] = []

    def note(self, node: ast.AST, what: str, *texts: str) -> None:
        for text in texts[:1]:
            self.found.append((node.lineno, what, text))  # type: ignore[attr-defined]

    def names_of(self, node: ast.AST) -> list[str]:
        """The literals, also of a variable that is a collection of them."""
        variable = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        return [*filter(named, literals(node)), *([self.collections[variable]] if variable in self.collections else [])]

    def visit_Compare(self, node: ast.Compare) -> None:
        self.note(
            node, "comparison", *(text for side in (node.left, *node.comparators) for text in self.names_of(side))
        )
        self.generic_visit(node)

    def visit_MatchValue(self, node: ast.MatchValue) -> None:
        self.note(node, "case", *filter(named, literals(node.value)))

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self.note(node, "case", *(text for key in node.keys for text in literals(key) if named(text)))
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key in node.keys:
            self.note(key or node, "key", *filter(named, literals(key)))
        self.generic_visit(node)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self.note(node, "key", *filter(named, literals(node.key)))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.note(node, "subscript", *filter(named, literals(node.slice)))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):
            method, given = node.func.attr, [text for argument in node.args for text in literals(argument)]
            if method in LOOKUPS:
                self.note(node, "look-up", *filter(named, given[:1]))
            elif method in PARTS:
                self.note(node, "part", *filter(is_part, given))
            elif method in POSITIONS:
                self.note(node, "position", *self.names_of(node.func.value))
        elif isinstance(node.func, ast.Name) and node.func.id == "dict":
            self.note(node, "key", *(word.arg for word in node.keywords if word.arg in NAMES))
        self.generic_visit(node)


def comparisons(sources: dict[str, str]) -> list[str]:
    """Where collectives' names are compared in modules, of which the sources are given by file: "file:line: what"."""
    trees = {file: ast.parse(source) for file, source in sources.items()}
    collections, found = collections_of_names(trees), []
    for file, tree in trees.items():
        visitor = Comparisons(collections)
        visitor.visit(tree)
        lines = [(line, what, text) for line, what, text in visitor.found if (file, text) not in OTHER_MEANINGS]
        found += [f"{file}:{line}: {what} {text!r}" for line, what, text in sorted(set(lines))]
    return found


COMPARED = {
    "if collective == 'alltoall': pass": "comparison",
    "factor = size if collective != 'allgatherv' else 1": "comparison",
    "if 'bcast' == collective: pass": "comparison",
    "if collective in ('alltoall', 'allgather'): pass": "comparison",
    "if collective not in {'gather'}: pass": "comparison",
    "if collective in ['x', *('reduce',)]: pass": "comparison",
    "if collective in frozenset({'reduce_scatter'}): pass": "comparison",
    "if collective in {'scatter': 1}: pass": "comparison",
    "if 'alltoallv' in collective or x: pass": "comparison",
    "if name == 'Ialltoall': pass": "comparison",
    "if name == 'Alltoall_init': pass": "comparison",
    "if name == ('allreduce' if a else b): pass": "comparison",
    "EVEN = ('alltoall', 'allgather')\nif collective in EVEN: pass": "comparison",
    "EVEN: tuple = ('alltoall', 'allgather')\nif collective in module.EVEN: pass": "comparison",
    "COLLECTIVES = ['allgather']\ntag = COLLECTIVES.index(collective)": "position",
    "tag = ('allgather', 'alltoall').index(collective)": "position",
    "match collective:\n case 'alltoall': pass": "case",
    "match collective:\n case 'x' | 'Allgather': pass": "case",
    "match call:\n case ('alltoall', size): pass": "case",
    "match call:\n case Call(name='alltoall'): pass": "case",
    "match call:\n case {'alltoall': size}: pass": "case",
    "if collective.startswith('alltoall'): pass": "part",
    "if collective.startswith('all'): pass": "part",
    "if collective.endswith(('gather', 'x')): pass": "part",
    "if collective.endswith('_init'): pass": "part",
    "family = collective.removesuffix('gatherv')": "part",
    "limits = {'alltoall': 1, 'x': 2}": "key",
    "limits = dict(alltoall=1)": "key",
    "limits = {'alltoall': each for each in x}": "key",
    "limit = limits['alltoall']": "subscript",
    "calls['alltoallv, native'] += 1": "subscript",
    "limit = limits.get('allgather', 1)": "look-up",
    "vars(comm).pop('Alltoallv', None)": "look-up",
}


@pytest.mark.parametrize("source", COMPARED)
def test_comparisons_are_found(source: str) -> None:
    """Each in its own way."""
    found = comparisons({"sample.py": source})
    assert any(f": {COMPARED[source]} " in place for place in found)


@pytest.mark.parametrize(
    "source",
    [
        "from hiercoll.calls.functions import alltoall, allgather",
        "__all__ = ['alltoall', 'allgather']\nif name in __all__: pass",
        "TABLE = {'hiercoll.calls.functions': ('alltoall', 'allgather')}\nif name in TABLE: pass",
        "def alltoall(comm, sendbuf): return serve(comm, 'alltoall', sendbuf)",
        "class Comm:\n def Alltoall(self, a, b): super().Alltoall(a, b)",
        "request = getattr(comm, 'Ialltoall')(send, recv)",
        "for name in ('alltoall', 'allgather'): setattr(Comm, name, None)",
        "if comm.Alltoall is other.Alltoall: pass",
        "if work.collective == other.collective: pass",
        "if work.collective is ALLTOALL: pass",
        "if algorithm == 'scatter_destination': pass",
        "if name == 'all': pass",
        "if line.startswith('# '): pass",
        "'''if collective == 'alltoall': pass'''",
    ],
)
def test_what_is_no_comparison(source: str) -> None:
    """Definitions, arguments, imports, and comparisons of other things."""
    assert comparisons({"sample.py": source}) == []


def test_no_name_of_a_collective_is_compared() -> None:
    """Outside of the records and the algorithms."""
    files = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    assert all((PACKAGE / each).exists() for each in MAY_COMPARE) and len(files) > 20
    found = comparisons({file: path.read_text() for file, path in files.items() if not file.startswith(MAY_COMPARE)})
    assert not found, f"{len(found)} places:\n" + "\n".join(found)
