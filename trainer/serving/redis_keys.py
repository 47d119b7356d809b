"""Bringing an export to a Redis server, under keys that its user names, and reading it there (docs/serving.md, In Redis).

The value of a row has its versions one after the other, the newest first, so that a reader of an old version goes on while a new one is written. The
version key says which ones there are. It is written last, in one transaction with the dense part: with that all rows are new at once.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import NotRequired, Self, TypedDict, TypeVar

import numpy as np
from safetensors.torch import load, save

from foreload.base.arguments import checked
from foreload.base.codec import Count, FormError, of_json, parse_json
from foreload.base.errors import SettingError
from foreload.cache.client.store import Store
from foreload.cache.client.url import parse_url
from foreload.cache.errors import Fenced
from foreload.trainer.errors import ExportError
from foreload.trainer.serving.format import (
    BUFFERS,
    MODEL,
    Export,
    ExportRows,
    OfModel,
    TableOfModel,
    check_rows,
    check_same_model,
    same_table,
)

FORMAT = 1
_STEP_BYTES = 8
_ROWS = 1 << 11  # that go in a transaction
_REPLY_ROWS = 1 << 8  # that come in a reply
_TIMEOUT = timedelta(seconds=30)
_PLACES = re.compile(r"\{(\w*)\}")


class ServedTable(TableOfModel):
    """A table in the version key."""

    rows: Count


class Version(OfModel):
    """The version key (docs/serving.md, In Redis)."""

    format: int
    state: str
    kept: list[Count]
    dense: str
    tables: list[ServedTable]


class Applying(TypedDict):
    """The key that says what is being applied, and by which call."""

    step: Count
    state: str
    token: NotRequired[str]


_Decoded = TypeVar("_Decoded", Version, Applying)


@dataclass(frozen=True, slots=True)
class Keys:
    """What keys are called: a template with {table}, and {id} for a string a row; without {id} a table is a hash whose fields are the ids.

    Raises SettingError where two rows might have one key.
    """

    template: str

    def __post_init__(self) -> None:
        names = _PLACES.findall(self.template)
        if sorted(names) not in (["table"], ["id", "table"]) or set("{}") & set(_PLACES.sub("", self.template)):
            raise SettingError(
                f"--key: must have {{table}}, and may have {{id}}, each once, and no other braces; got {self.template!r}"
            )
        between = re.search(r"\{\w+\}(.*)\{\w+\}", self.template)
        if between is not None and not re.search(r"\D", between[1]):
            raise SettingError(
                f"--key: between {{table}} and {{id}} must stand something that is no digit, or two rows might have one key; got {self.template!r}"
            )

    @property
    def hashes(self) -> bool:
        """Whether a table is a hash."""
        return "{id}" not in self.template

    def table(self, name: str) -> str:
        """The template with a table's name: of a hash, its key."""
        return self.template.replace("{table}", name)

    def beside(self, what: str) -> bytes:
        """A key of what belongs to no row, named with what stands before the first brace."""
        return f"{self.template.partition('{')[0]}~{what}".encode()

    @property
    def version(self) -> bytes:
        """The version key."""
        return self.beside("version")

    @property
    def applying(self) -> bytes:
        """The key that says what is being applied."""
        return self.beside("applying")

    def dense(self, step: int) -> bytes:
        """The dense part of a version."""
        return self.beside(f"dense:{step}")

    def reading(self, name: str, ids: Sequence[int]) -> list[list[bytes | str]]:
        """The commands that get rows, each some of them: a reply is decoded again from its beginning whenever more of it has come."""
        pieces = [ids[first : first + _REPLY_ROWS] for first in range(0, len(ids), _REPLY_ROWS)]
        if self.hashes:
            return [["HMGET", self.table(name), *map(str, piece)] for piece in pieces]
        before, after = self.table(name).split("{id}")
        return [["MGET", *(f"{before}{row}{after}" for row in piece)] for piece in pieces]

    def writing(self, name: str, ids: Iterable[int], values: Iterable[bytes]) -> list[bytes | str]:
        """The command that sets rows."""
        if self.hashes:
            return [
                "HSET",
                self.table(name),
                *(word for row, value in zip(ids, values, strict=True) for word in (str(row), value)),
            ]
        before, after = self.table(name).split("{id}")
        return ["MSET", *(word for row, value in zip(ids, values, strict=True) for word in (f"{before}{row}{after}", value))]


def apply_to_redis(export: Export, url: str, keys: Keys, keep: int) -> tuple[int, list[int]]:
    """Bring an export to a server: a full one to where there is none under these keys, an increment to where what it goes on from is.

    keep: how many versions before it can still be read. Returns how many rows all tables have, and the steps that are kept. Raises ExportError with
    nothing changed for readers, and StoreError. Whoever is killed leaves the version before for readers, and goes on where it is called again.
    """
    export.verify()
    try:
        with Store([url], _TIMEOUT) as store:
            return _Application(store, export, keys, keep).run()
    except Fenced as error:
        raise ExportError(
            f"--key: {keys.template} leads to a key of {parse_url(url)} that holds something else; choose other keys"
        ) from error


class _Application:
    """One call. A token of its own stands in the key `applying`, and every write is a transaction that fails where another call has put its there."""

    def __init__(self, store: Store, export: Export, keys: Keys, keep: int) -> None:
        self._store, self._export, self._keys, self._keep = store, export, keys, keep
        self._token = secrets.token_hex(8)
        self._where = f"{store.urls[0]} {keys.template}"

    def run(self) -> tuple[int, list[int]]:
        version = self._begin()
        before = None if version is None else version["step"]
        kept = [] if version is None else version["kept"]
        readable = kept if before is None else [before, *kept]
        for table, layout in enumerate(self._export.layouts):
            for rows in self._export.rows(table):
                for first in range(0, len(rows), _ROWS):
                    self._write(layout.name, rows, slice(first, first + _ROWS), readable)
        dense = self._export.file(MODEL).read_bytes()
        if BUFFERS in self._export.about["files"]:
            dense = save(load(dense) | load(self._export.file(BUFFERS).read_bytes()))
        new_version = self._version(([] if before is None else [before, *kept])[: self._keep])
        gone = [self._keys.dense(step) for step in readable if step not in new_version["kept"]]
        self._transact(
            ["SET", self._keys.dense(self._export.step), dense],
            ["SET", self._keys.version, json.dumps(new_version, sort_keys=True)],
            ["DEL", self._keys.applying, *gone],
        )
        return sum(table["rows"] for table in new_version["tables"]), new_version["kept"]

    def _version(self, kept: Sequence[int]) -> Version:
        about = self._export.about
        return {
            "step": about["step"],
            "state": about["state"],
            "seed": about["seed"],
            "model": about["model"],
            "settings": about["settings"],
            "inexact": about["inexact"],
            "format": FORMAT,
            "kept": list(kept),
            "tables": [{**same_table(table), "rows": table.get("whole_rows", table["rows"])} for table in about["tables"]],
            "dense": self._keys.dense(self._export.step).decode(),
        }

    def _begin(self) -> Version | None:
        """Check that the export is the next one, and say that it is applied; returns the version that is there, as readers see it from now on."""
        export, keys = self._export, self._keys
        _, found, applying = self._ask(["WATCH", keys.version, keys.applying], ["GET", keys.version], ["GET", keys.applying])
        version = None if found is None else _decoded(found, keys.version, Version)
        broken_off = None if applying is None else _decoded(applying, keys.applying, Applying)
        if version is None and export.since is not None:
            raise ExportError(
                f"{export.what}, and there is nothing at {self._where} yet; apply a full export of step {export.since[0]} first"
            )
        if version is not None:
            check_same_model(str(export.path), export.about, version, version["tables"], self._where)
            export.check_next(self._where, version["step"], version["state"])
        if broken_off is not None and broken_off["state"] != export.state:
            raise ExportError(
                f"{export.what}, and at {self._where} applying that of step {broken_off['step']} was broken off; apply that one again first"
            )
        if version is not None and broken_off is None:
            self._check_rows(version)
        commands: list[list[bytes | str]] = []
        if version is not None:
            # The version key stops listing a step that is to go before its rows do.
            dropped = version["kept"][max(self._keep - 1, 0) :]
            version["kept"] = version["kept"][: max(self._keep - 1, 0)]
            if dropped:
                commands.append(["SET", keys.version, json.dumps(version, sort_keys=True)])
                commands.append(["DEL", *map(keys.dense, dropped)])
        marker = json.dumps({"step": export.step, "state": export.state, "token": self._token}, sort_keys=True)
        self._committed([*commands, ["SET", keys.applying, marker]])
        return version

    def _check_rows(self, version: Version) -> None:
        """Raise ExportError where the tables would have other numbers of rows than the model has, before anything is written."""
        for table, layout in enumerate(self._export.layouts):
            new = sum(
                value is None
                for rows in self._export.rows(table)
                for first in range(0, len(rows), _ROWS)
                for value in _values(self._ask(*self._keys.reading(layout.name, rows.ids[first : first + _ROWS].tolist())))
            )
            check_rows(self._export, table, version["tables"][table]["rows"] + new, self._where)

    def _write(self, name: str, rows: ExportRows, part: slice, readable: Sequence[int]) -> None:
        """Write a version of some rows, which nobody reads yet. readable: the steps that readers may be at, in descending order."""
        ids, weights = rows.ids[part].tolist(), rows.weights[part]
        _, marker, *found = self._ask(
            ["WATCH", self._keys.applying], ["GET", self._keys.applying], *self._keys.reading(name, ids)
        )
        self._check_token(marker)
        head = self._export.step.to_bytes(_STEP_BYTES, "little")
        entry = _STEP_BYTES + 4 * weights.shape[1]
        values = []
        for row_id, row, value in zip(ids, np.ascontiguousarray(weights, "<f4"), _values(found), strict=True):
            older = b""
            if value is not None:
                if len(value) % entry or not value:
                    raise ExportError(
                        f"--key: the value of row {row_id} of table {name} at {self._where} is none of an export; choose other keys"
                    )
                older = b"".join(_needed(value, entry, self._export.step, readable))
            values.append(head + row.tobytes() + older)
        self._committed([self._keys.writing(name, ids, values)])

    # -- Commands ------------------------------------------------------------------------------------------------------------------

    def _transact(self, *commands: list[bytes | str]) -> None:
        """All of these at once, if this is still the call that applies."""
        _, marker = self._ask(["WATCH", self._keys.applying], ["GET", self._keys.applying])
        self._check_token(marker)
        self._committed(commands)

    def _committed(self, commands: Iterable[Sequence[bytes | str]]) -> None:
        answers = self._ask(["MULTI"], *commands, ["EXEC"])
        if answers[-1] is None:
            raise self._another()

    def _check_token(self, marker: object) -> None:
        if not isinstance(marker, bytes) or _decoded(marker, self._keys.applying, Applying).get("token") != self._token:
            raise self._another()

    def _another(self) -> ExportError:
        return ExportError(f"{self._export.path}: another call applies an export to {self._where} now; this one stops")

    def _ask(self, *commands: Sequence[bytes | str]) -> list[object]:
        return self._store.commands_at_once(0, commands)


def _values(replies: Iterable[object]) -> Iterator[bytes | None]:
    """The values of the rows that were read, one after the other; None for one that is not there."""
    for reply in replies:
        assert isinstance(reply, list)
        yield from reply


def _decoded(value: object, key: bytes, kind: type[_Decoded]) -> _Decoded:
    try:
        return of_json(parse_json(value if isinstance(value, bytes) else b""), kind)
    except FormError as error:
        raise ExportError(f"--key: {key.decode()} holds something that no export wrote ({error}); choose other keys") from error


def _needed(value: bytes, entry: int, step: int, readable: Sequence[int]) -> Iterator[bytes]:
    """The versions in a row's value that readers at these steps need, the newest first; not that of `step`, which is written again."""
    wanted = iter(readable)
    at = next(wanted, None)
    for place in range(0, len(value), entry):
        of = int.from_bytes(value[place : place + _STEP_BYTES], "little")
        if of == step:
            continue
        needed = False
        while at is not None and at >= of:
            needed, at = True, next(wanted, None)
        if needed:
            yield value[place : place + entry]


# -- Reading -----------------------------------------------------------------------------------------------------------------------


class ServedRows:
    """Rows as they are served, of one version: that which was the newest when this was made, or a kept one.

    Raises ExportError where there is none, and StoreError. What is served may move on meanwhile: see `read`.
    """

    @checked()
    def __init__(self, url: str, key: str, step: int | None = None) -> None:
        self._keys = Keys(key)
        self._store = Store([url], _TIMEOUT)
        self._where = f"{self._store.urls[0]} {key}"
        try:
            found = self._store.command(0, "GET", self._keys.version)
            if found is None:
                raise ExportError(f"{self._where}: nothing is served under these keys; apply an export first")
            version = _decoded(found, self._keys.version, Version)
            self.step: int = version["step"] if step is None else step
            self._widths = {table["name"]: sum(columns for _, columns in table["parts"]) for table in version["tables"]}
            self._check(version)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @checked()
    def read(self, table: str, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Weights float32 [n, W] of rows, zeros where a row was never trained, and whether it was (bool [n]).

        Raises ExportError where this version is not kept any more.
        """
        if table not in self._widths:
            raise ExportError(f"TABLE: must be one of {', '.join(self._widths)}; got {table!r}")
        width = self._widths[table]
        weights, found = np.zeros((len(ids), width), np.float32), np.zeros(len(ids), bool)
        if not len(ids):
            return weights, found
        # In this order: rows go after the version key has said so.
        *values, version = self._store.commands_at_once(
            0, [*self._keys.reading(table, list(map(int, ids))), ["GET", self._keys.version]]
        )
        self._check(_decoded(version, self._keys.version, Version))
        entry = _STEP_BYTES + 4 * width
        for place, value in enumerate(_values(values)):
            if value is None:
                continue
            if len(value) % entry:
                raise ExportError(f"{self._where}: the value of row {ids[place]} of table {table} is none of an export")
            for start in range(0, len(value), entry):
                if int.from_bytes(value[start : start + _STEP_BYTES], "little") <= self.step:
                    weights[place] = np.frombuffer(value, "<f4", width, start + _STEP_BYTES)
                    found[place] = True
                    break
        return weights, found

    def dense(self) -> bytes:
        """The dense part, as a file of safetensors has it. Raises ExportError as `read`."""
        data, version = self._store.commands_at_once(0, [["GET", self._keys.dense(self.step)], ["GET", self._keys.version]])
        self._check(_decoded(version, self._keys.version, Version))
        assert isinstance(data, bytes)
        return data

    def close(self) -> None:
        """Close the connection."""
        self._store.close()

    def _check(self, version: Version) -> None:
        if self.step not in (version["step"], *version["kept"]):
            there = ", ".join(map(str, (version["step"], *version["kept"])))
            raise ExportError(
                f"{self._where}: has the model after step {there}; asked for that after {self.step}, which is not kept"
            )
