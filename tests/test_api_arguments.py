"""What the functions of the Python interface are given is checked by one mechanism, whoever calls what with what."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import foreload
from foreload.api.models import plain
from foreload.base.errors import ForeloadError, SettingError
from foreload.base.settings import settings_of
from foreload.pipelines.planning.options import PrepareOptions
from foreload.trainer.job.job import TrainJob


class Strange:
    """A value that no parameter takes."""


def _calls() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function, method and constructor that takes something, methods of an object that is nowhere on disk."""
    for name in ("apply", "open_checkpoint", "open_run", "prepare", "train"):
        yield name, getattr(foreload, name)
    yield "Schedule", foreload.Schedule
    for kind in (foreload.Run, foreload.Checkpoint):
        yield kind.__name__, kind
        for name, function in inspect.getmembers(kind, inspect.isfunction):
            method = function.__get__(kind("nowhere"))
            if not name.startswith("_") and inspect.signature(method).parameters:
                yield f"{kind.__name__}.{name}", method


def _wrong_calls() -> Iterator[Any]:
    for of, function in _calls():
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD and name != "summary":  # which `prepare` alone gives
                yield pytest.param(function, name, id=f"{of} {name}")


@pytest.mark.parametrize(("function", "name"), list(_wrong_calls()))
def test_a_value_of_a_wrong_type_is_refused_by_its_parameter_s_name(function: Callable[..., Any], name: str) -> None:
    parameters = inspect.signature(function).parameters
    kinds = inspect.Parameter
    required = [
        one.name
        for one in parameters.values()
        if one.default is kinds.empty and one.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
    ]
    given = dict.fromkeys(required, "somewhere") | {name: Strange()}
    args = [given.pop(name)] if parameters[name].kind is kinds.VAR_POSITIONAL else []
    with pytest.raises(ForeloadError, match=rf"^{name}: must be .+; got Strange") as refused:
        function(*args, **given)
    assert "\n" not in str(refused.value)


def test_what_a_sequence_holds_is_checked_too() -> None:
    run = foreload.Run("nowhere")
    for ids in ([1.5], ["1"], "17", 17, {1: 2}, [True], np.array([1.0])):
        with pytest.raises(SettingError, match=r"^ids: must be a list"):
            run.rows("ad", ids=ids)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"^sources: must be a path; got list .*write the records into a CSV or Parquet file"):
        run.predict([{"ad": 17}])  # type: ignore[arg-type]
    # What fits comes as far as the run, which is not there.
    for good in ([1], np.array([1, 2]), [np.int32(3)], ()):
        with pytest.raises(ForeloadError, match=r"has no manifest\.json"):
            run.rows("ad", ids=good)  # type: ignore[arg-type]
    for values in (["B1", None, 3, 1.5], np.array(["a"])):
        with pytest.raises(ForeloadError, match=r"has no manifest\.json"):
            run.rows("ad", values=values)  # type: ignore[arg-type]


_STRANGE = [
    *(
        b"x",
        [],
        {},
        [[]],
        {"a": []},
        {"a": {"b": []}},
        1.5,
        float("nan"),
        float("inf"),
        True,
        "",
        "x",
        "\0",
        -1,
        0,
        2**63,
        10**30,
    ),
    *(["a", 1], [None], "1e400", "=", ",", "::", "redis://", "a:b"),
]


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (TrainJob, {"schedule": "s", "run": "r", "store": "local:3"}),
        (PrepareOptions, {"format": "csv", "sources": ["a.csv"], "out": "o", "batch_size": 3, "slots": 10, "features": "f"}),
    ],
)
def test_a_setting_is_taken_or_refused_in_a_line_whatever_it_is(kind: Any, given: dict[str, Any]) -> None:
    messages = []
    for name in settings_of(kind):
        for value in _STRANGE:
            try:
                kind.of(given | {name: plain(value)})
            except ForeloadError as error:
                messages.append(str(error))
    assert len(messages) > len(_STRANGE)
    assert not [message for message in messages if "\n" in message]
