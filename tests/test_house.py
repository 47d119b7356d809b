"""The house: what its names are not called, how long files and functions are, and that public names have docstrings that say what they are for.

Read from the syntax trees, so nothing is imported. Each list of exceptions says why, and may only shrink.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("foreload/api", "foreload/base", "pipelines", "cache", "trainer", "benchmarks")
MOST_FUNCTION_LINES = 60

WORDS = {
    "attend": "handle_in_python",
    "census": "row counts",
    "converse": "run_exchange",
    "errand": "run request",
    "examine": "locate errors",
    "forgive": "discount_stall",
    "gentle": "defer_signals",
    "heights": "stack_sizes",
    "inbox": "EventReceiver",
    "mail": "EventSender",
    "mend": "repair",
    "mended": "repaired",
    "mending": "shard repair",
    "rejoin": "server probe",
    "rejoining": "server probe",
    "resting": "saved run",
    "settle": "assign_owners, flush_pending or await_replies",
    "settled": "assigned, flushed or awaited",
    "sparing": "connect(tolerate=r)",
    "strike": "inject",
    "striker": "injector",
    "strikes": "injections",
    "struck": "injected",
    "undue": "not_due",
    "witness": "run observer",
}
"""Words that no name has, and what to say instead."""

NAMES = {
    "ALONE": "UNFENCED",
    "Attempt": "TrainerGroup",
    "Call": "LaunchSpec",
    "DensePart": "DenseModel",
    "Launch": "Launcher",
    "Lists": "ExchangePlan",
    "Loss": "ShardLoss",
    "Moved": "RoundStats",
    "Order": "what is told to whom",
    "Part": "TrainerParts",
    "Side": "contender",
    "Sides": "contenders",
    "beyond": "at_stop, or uncorrectable",
    "cover": "lookahead_ratio",
    "FAR": "FURTHEST, or ahead",
    "fit": "memory check, or train",
    "flat": "gradient bucket",
    "known_rows": "expected rows",
    "lay": "encode_into",
    "losses": "shard losses, or log losses",
    "mine": "lane_accesses, or whose it is",
    "moved": "traffic volume",
    "orders": "commands",
    "sides": "contenders",
    "trained": "model rows, or what of them",
    "turns": "interleaved runs",
    "vector": "simd",
}
"""Whole names that nothing has. Those in small letters are forbidden in any case."""

INNOCENT: dict[tuple[str, str], str] = {
    ("foreload/api/results.py", "trained"): "whether each row was ever trained, in a result that users read",
    ("trainer/commands/lookup.py", "trained"): "whether a row was ever trained, in a result that users read",
    ("trainer/commands/lookup.py", "vector"): "a row's values, in the same result, as JSON",
    ("trainer/commands/migrate.py", "moved"): "the share of rows that has, in a result that users read, as JSON",
    ("trainer/commands/stores.py", "moved"): "the same",
}
"""(file, name): why it is right there."""

LONG_FUNCTIONS: dict[tuple[str, str], str] = {}
"""(file, function): functions over MOST_FUNCTION_LINES, and why."""


@dataclass(frozen=True)
class Named:
    """A name that the code gives: to a module, a class, a function, a field or a constant; and the line."""

    name: str
    line: int


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _files() -> tuple[Path, ...]:
    listed = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return (*listed, *sorted((ROOT / "foreload").glob("*.py")))


@cache
def _test_files() -> tuple[Path, ...]:
    return tuple(sorted((ROOT / "tests").rglob("*.py")))


def _of_folder(*folders: str) -> list[Path]:
    return [path for path in (*_files(), *_test_files()) if any(path.is_relative_to(ROOT / folder) for folder in folders)]


def _names(path: Path) -> Iterator[Named]:
    tree = _tree(path)
    yield Named(path.parent.name if path.stem == "__init__" else path.stem, 1)
    for statement in tree.body:
        yield from _assigned(statement)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield Named(node.name, node.lineno)
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                yield from _assigned(statement)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield Named(node.attr, node.lineno)


def _assigned(statement: ast.stmt) -> Iterator[Named]:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    for target in targets:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                yield Named(node.id, node.lineno)


def _instead(name: str) -> str | None:
    """What to say instead of a name; None where it is well."""
    bare = name.strip("_")
    whole = NAMES.get(bare) or (NAMES.get(bare.lower()) if bare.isupper() else None)
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", bare)
    return whole or next((WORDS[word.lower()] for word in words if word.lower() in WORDS), None)


def test_names_are_the_field_s_terms() -> None:
    """No module, class, function, field or constant has a name of the private dialect that this project once had."""
    innocent, wrong = set(), set()
    for path in (*_files(), *_test_files()):
        file = str(path.relative_to(ROOT))
        for named in _names(path):
            instead = _instead(named.name)
            if instead is None:
                continue
            if (file, named.name) in INNOCENT:
                innocent.add((file, named.name))
            else:
                wrong.add(f"{file}:{named.line}: {named.name}: say {instead}")
    assert not wrong, "\n".join(sorted(wrong))
    assert innocent == set(INNOCENT), "an exception that is not needed any more"


def _code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    """The lines of a function but its docstring and lines that are comments: to explain one must not force it apart."""
    numbers = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    if ast.get_docstring(node):
        numbers -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return sum(not lines[number - 1].lstrip().startswith("#") for number in numbers)


def test_functions_fit_a_screen() -> None:
    """No function has more than MOST_FUNCTION_LINES lines but those that say why."""
    long = set()
    for path in _files():
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(_tree(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if _code_lines(node, lines) > MOST_FUNCTION_LINES:
                long.add((str(path.relative_to(ROOT)), node.name))
    assert long == set(LONG_FUNCTIONS)


@cache
def _classes() -> dict[str, list[ast.ClassDef]]:
    """The project's classes by name."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for path in _files():
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)
    return classes


def _bases(node: ast.ClassDef) -> Iterator[str]:
    for base in node.bases:
        while isinstance(base, ast.Subscript):
            base = base.value
        yield base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""


def _described(node: ast.ClassDef, method: str) -> bool:
    """Whether what a class derives from says what a method is for: a class of the project, in its docstring, or one of another library."""
    for base in _bases(node):
        if base not in _classes():
            return base not in ("Protocol", "ABC", "NamedTuple", "Exception")
        for parent in _classes()[base]:
            own = [child for child in parent.body if isinstance(child, ast.FunctionDef) and child.name == method]
            if any(ast.get_docstring(child) for child in own) or _described(parent, method):
                return True
    return False


def _of_protocol(path: Path, method: str) -> bool:
    """Whether a Protocol of the same file says what a method is for: the classes that it stands for derive from nothing."""
    protocols = [node for node in _tree(path).body if isinstance(node, ast.ClassDef) and "Protocol" in _bases(node)]
    return any(
        isinstance(child, ast.FunctionDef) and child.name == method and bool(ast.get_docstring(child))
        for protocol in protocols
        for child in protocol.body
    )


def _without_docstring(node: ast.Module | ast.ClassDef, path: Path) -> Iterator[str]:
    if not ast.get_docstring(node):
        yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {getattr(node, 'name', path.stem)}"
    for child in node.body:
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from _without_docstring(child, path)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            inherited = isinstance(node, ast.ClassDef) and (_described(node, child.name) or _of_protocol(path, child.name))
            if not ast.get_docstring(child) and not inherited:
                yield f"{path.relative_to(ROOT)}:{child.lineno}: {child.name}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_public_names_say_what_they_are_for(folder: str) -> None:
    """Modules, and public classes, functions and methods, have docstrings; a method that overrides a described one has its."""
    files = _of_folder(folder)
    assert files
    silent = [line for path in files for line in _without_docstring(_tree(path), path)]
    assert not silent, "\n".join(silent)


def test_locals_say_what_they_hold() -> None:
    """No variable is called `found`, in the folders that have none."""
    others = _of_folder("tests/cache", "tests/models", "tests/pipelines", "tests/harness/lost_shards.py")
    clean = {*_of_folder("pipelines", "benchmarks", "tests")}.difference(others)
    named = {
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in clean
        for node in ast.walk(_tree(path))
        if (isinstance(node, ast.Name) and node.id == "found") or (isinstance(node, ast.arg) and node.arg == "found")
    }
    assert not named, "\n".join(sorted(named))


def test_kernels_are_declared_with_the_numba_whose_cache_notices_changes() -> None:
    imported = [
        str(path.relative_to(ROOT))
        for path in _files()
        if path.relative_to(ROOT).parts[0] != "benchmarks" and "import numba as nb" in path.read_text(encoding="utf-8")
    ]
    assert imported == ["foreload/base/compiled.py"]
