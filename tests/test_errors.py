"""The tree of errors: one root, a code of its own for every class, and docs/errors.md that lists them all."""

from __future__ import annotations

from pathlib import Path

import foreload
import foreload.trainer.errors
from foreload.base.errors import ForeloadError, SettingError, all_errors, error_of
from foreload.cache.errors import CacheError, RowsLost
from foreload.pipelines.errors import PipelineError, SlotsError

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"


def listed() -> str:
    """The table of docs/errors.md: the tree in order, what a class is raised for in the words of its docstring."""
    lines = ["| code | class | raised for | exit status |", "| --- | --- | --- | --- |"]
    # Branches are listed in this order, whichever was imported first.
    modules = [f"foreload.{package}.errors" for package in ("base", "pipelines", "cache", "trainer")]
    for kind in sorted(all_errors(), key=lambda kind: modules.index(kind.__module__)):
        above = "" if kind is ForeloadError else f" ({kind.__bases__[0].__name__})"
        words = (kind.__doc__ or "").splitlines()[0].split(". ")[0].rstrip(".")
        lines.append(
            f"| `{kind.code}` | `{kind.__name__}`{above} | {words} | {kind.exit_status}{', 6' if kind.permanent else ''} |"
        )
    return "\n".join(lines)


def test_every_error_has_a_code_of_its_own_and_stands_in_an_errors_module() -> None:
    kinds = list(all_errors())
    # Were the modules of errors not imported, there would be few.
    assert len(kinds) == len({kind.code for kind in kinds}) > 20
    for kind in kinds:
        assert "code" in vars(kind), kind
        assert kind.__module__.endswith(".errors"), kind
        assert kind.code == kind.code.lower()
        assert set(kind.code) <= set("abcdefghijklmnopqrstuvwxyz-")


def test_the_page_lists_every_error() -> None:
    assert listed() in PAGE.read_text(encoding="utf-8"), f"docs/errors.md must have this table:\n{listed()}"


def test_there_is_one_root() -> None:
    assert foreload.ForeloadError is ForeloadError
    for branch in (SettingError, PipelineError, CacheError, foreload.trainer.errors.TrainerError):
        assert branch.__base__ is ForeloadError


def test_an_error_of_another_process_is_made_again_from_its_code() -> None:
    again = error_of("slots", "--slots: must be more")
    assert (type(again), str(again)) == (SlotsError, "--slots: must be more")
    assert type(error_of(RowsLost.code, "gone")) is CacheError, "its own takes more than a message"
    assert type(error_of("of a later version", "what")) is ForeloadError
