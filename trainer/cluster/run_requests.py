"""What is asked of a training run over its control socket and done by all of its trainers, each for its lanes: a scrub, and a count of the store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from foreload.cache.errors import CacheError
from foreload.cache.rows.layout import RowLayout
from foreload.cache.traffic import Traffic
from foreload.trainer.cluster.board import EventSender
from foreload.trainer.run.directory import SCRUB
from foreload.trainer.run.expected_rows import MappedRows

COUNT_TIMEOUT = timedelta(seconds=3)  # less than an answer on the control socket may take


class RunRequests:
    """The coordinator's side. scrub, scrubbed and count are called in threads of the control socket, the rest in the main one."""

    def __init__(self, trainers: int, protected: bool, training: Callable[[], bool]) -> None:
        self._trainers, self._protected, self._training = trainers, protected, training
        self._condition = threading.Condition()
        self._commands: list[dict[str, Any]] = []
        self._number = 0
        self._told: dict[str, dict[int, dict[str, Any]]] = {}  # by request: what each trainer told of the last one
        self._last: dict[str, int] = {}

    def scrub(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to {"rows": name of a folder in RUN/scrub}."""
        if not self._protected:
            return {"error": "it has no parity, so there is nothing to check its rows against; train with --parity"}
        if not self._training():
            return {"error": "its trainers are still starting; try again in a moment"}
        with self._condition:
            if "scrub" in self._last and not self._done("scrub"):
                return {"error": "a scrub of it is under way already; wait for its end"}
            return {"scrub": self._command("scrub", rows=str(request.get("rows")))}

    def scrubbed(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """How far the last scrub is: {"done", "stripes", "trainers": [{"stripes", "findings", ...}]}, or {"error"}."""
        with self._condition:
            parts = list(self._told.get("scrub", {}).values())
            errors = [part["error"] for part in parts if "error" in part]
            if errors:
                return {"error": errors[0]}
            return {"done": self._done("scrub"), "stripes": sum(part["stripes"] for part in parts), "trainers": parts}

    def row_counts(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """What each trainer counts: {"trainers": [{"rows", "parity_rows", "row_bytes", "lag"}]}; of those that do not answer in time nothing."""
        if not self._training():
            return {"trainers": []}
        with self._condition:
            if "row_counts" not in self._last or self._done("row_counts"):
                self._command("row_counts")
            self._condition.wait_for(lambda: self._done("row_counts"), COUNT_TIMEOUT.total_seconds())
            return {"trainers": list(self._told["row_counts"].values()) if self._done("row_counts") else []}

    def take(self) -> list[dict[str, Any]]:
        """What is to be told to all trainers."""
        with self._condition:
            taken, self._commands = self._commands, []
            return taken

    def receive(self, sender: Mapping[str, Any]) -> None:
        """What a trainer tells of an request."""
        with self._condition:
            if sender["number"] == self._last[sender["request"]]:
                self._told[sender["request"]][sender["trainer"]] = dict(sender["told"])
                self._condition.notify_all()

    def _command(self, request: str, **what: Any) -> int:
        self._number += 1
        self._last[request], self._told[request] = self._number, {}
        self._commands.append({"do": request, "number": self._number, **what})
        return self._number

    def _done(self, request: str) -> bool:
        told = self._told.get(request, {})
        return len(told) == self._trainers and all(part.get("done", True) or "error" in part for part in told.values())


class TrainerRequests:
    """A trainer's side; its main thread uses it."""

    def __init__(
        self, sender: EventSender, run: Path, traffic: Traffic, lanes: Sequence[int], layouts: Sequence[RowLayout]
    ) -> None:
        self._events, self._run, self._traffic, self._lanes, self._layouts = sender, run, traffic, list(lanes), layouts
        self._scrub: int | None = None
        self._row_counts: int | None = None

    def begin(self, command: Mapping[str, Any]) -> None:
        """Begin an request that the coordinator asks for."""
        if command["do"] == "row_counts":
            self._row_counts = command["number"]
            self._traffic.inspection.begin_row_counts()
            return
        try:
            self._traffic.inspection.begin_scrub(MappedRows(self._run / SCRUB / command["rows"], self._lanes))
            self._scrub = command["number"]
        except (OSError, ValueError, CacheError) as error:
            self._tell("scrub", command["number"], {"error": str(error)})

    def tell(self) -> None:
        """Tell how far errands are."""
        counted = self._traffic.inspection.row_counts()
        if self._row_counts is not None and counted is not None:
            told = {
                "rows": counted.rows.sum(axis=0).tolist(), "parity_rows": counted.parity_rows.sum(axis=0).tolist(),
                "row_bytes": counted.row_bytes(self._layouts).tolist(), "lag": asdict(self._traffic.inspection.lag()),
            }  # fmt: skip
            self._tell("row_counts", self._row_counts, told)
            self._row_counts = None
        found = self._traffic.inspection.scrubbed()
        if self._scrub is not None and found is not None:
            self._tell("scrub", self._scrub, asdict(found))
            if found.done:
                self._scrub = None

    def finish(self) -> None:
        """Bring what was begun to its end, and tell of it."""
        if self._scrub is not None:
            self._traffic.inspection.scrubbed(finish=True)
        self.tell()

    def _tell(self, request: str, number: int, told: Mapping[str, Any]) -> None:
        self._events.send("request", request=request, number=number, told=dict(told))
