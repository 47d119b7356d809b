"""Apply exports to a Redis server, and read the rows there (docs/serving.md, In Redis).

The user names the keys. The value of a row has its versions one after the other, the newest first,
so that readers of an old version continue while a new one is written. The version key lists the
readable versions. It is written last, in one transaction with the dense part, so that all new rows
become visible at once.
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
_ROWS = 1 << 11  # rows per transaction
_REPLY_ROWS = 1 << 8  # rows per reply
_TIMEOUT = timedelta(seconds=30)
_PLACES = re.compile(r"\{(\w*)\}")


class ServedTable(TableOfModel):
    """A table in the version key.

    Attributes:
        rows: the number of rows of the table.
    """

    rows: Count


class Version(OfModel):
    """The contents of the version key (docs/serving.md, In Redis)."""

    format: int
    state: str
    kept: list[Count]
    dense: str
    tables: list[ServedTable]


class Applying(TypedDict):
    """The contents of the key that marks an export as being applied.

    Attributes:
        step: the step of the export.
        state: the state of the export.
        token: identifies the call that applies it.
    """

    step: Count
    state: str
    token: NotRequired[str]


_Decoded = TypeVar("_Decoded", Version, Applying)


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of the keys of a served model.

    The template contains {table}. If it contains {id}, each row is a string. Otherwise each table
    is a hash whose fields are the ids.

    Raises:
        SettingError: the template is not valid, for example if two rows might have the same key.
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
                f"--key: must have something other than digits between {{table}} and {{id}}, or two rows might have one key; got {self.template!r}"
            )

    @property
    def hashes(self) -> bool:
        """Whether each table is a hash."""
        return "{id}" not in self.template

    def table(self, name: str) -> str:
        """Return the template with the name of a table. For a hash this is its key."""
        return self.template.replace("{table}", name)

    def beside(self, what: str) -> bytes:
        """Return a key for data that belongs to no row.

        It begins with the part of the template before the first brace.
        """
        return f"{self.template.partition('{')[0]}~{what}".encode()

    @property
    def version(self) -> bytes:
        """The version key."""
        return self.beside("version")

    @property
    def applying(self) -> bytes:
        """The key that marks an export as being applied."""
        return self.beside("applying")

    def dense(self, step: int) -> bytes:
        """Return the key of the dense part of a version."""
        return self.beside(f"dense:{step}")

    def reading(self, name: str, ids: Sequence[int]) -> list[list[bytes | str]]:
        """Return the commands that read rows, in order.

        Each command reads only some rows, because a reply is decoded again from its beginning
        whenever more of it arrives.
        """
        pieces = [ids[first : first + _REPLY_ROWS] for first in range(0, len(ids), _REPLY_ROWS)]
        if self.hashes:
            return [["HMGET", self.table(name), *map(str, piece)] for piece in pieces]
        before, after = self.table(name).split("{id}")
        return [["MGET", *(f"{before}{row}{after}" for row in piece)] for piece in pieces]

    def writing(self, name: str, ids: Iterable[int], values: Iterable[bytes]) -> list[bytes | str]:
        """Return the command that writes rows."""
        if self.hashes:
            return [
                "HSET",
                self.table(name),
                *(word for row, value in zip(ids, values, strict=True) for word in (str(row), value)),
            ]
        before, after = self.table(name).split("{id}")
        return ["MSET", *(word for row, value in zip(ids, values, strict=True) for word in (f"{before}{row}{after}", value))]


def apply_to_redis(export: Export, url: str, keys: Keys, keep: int) -> tuple[int, list[int]]:
    """Apply an export to a server.

    A full export is applied if there is nothing under these keys. An increment is applied to its
    predecessor. If the call is killed, readers still see the previous version, and a second call of
    the same export continues.

    Args:
        keep: the number of previous versions that remain readable.

    Returns:
        The number of rows of all tables, and the steps that are kept.

    Raises:
        ExportError: the export cannot be applied. Nothing has changed for readers.
        StoreError: the server failed.
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
    """One call of `apply_to_redis`.

    The key `applying` holds a token of the call. Every write is a transaction that fails if another
    call has replaced the token.
    """

    def __init__(self, store: Store, export: Export, keys: Keys, keep: int) -> None:
        self._store, self._export, self._keys, self._keep = store, export, keys, keep
        self._token = secrets.token_hex(8)
        self._where = f"{store.urls[0]} {keys.template}"

    def run(self) -> tuple[int, list[int]]:
        version = self._begin()
        before = None if version is None else version["step"]
        kept = [] if version is None else version["kept"]
        readable = kept if before is None else [before, *kept]
        # Readers ignore the new versions of rows until the transaction below changes the version
        # key.
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
        """Check that the export is the next one, and mark it as being applied.

        Returns:
            The current version, as readers see it from now on, or None if there is none.
        """
        export, keys = self._export, self._keys
        _, found, applying = self._ask(["WATCH", keys.version, keys.applying], ["GET", keys.version], ["GET", keys.applying])
        version = None if found is None else _decoded(found, keys.version, Version)
        interrupted = None if applying is None else _decoded(applying, keys.applying, Applying)
        if version is None and export.since is not None:
            raise ExportError(
                f"{export.what}, and there is nothing at {self._where} yet; apply a full export of step {export.since[0]} first"
            )
        if version is not None:
            check_same_model(str(export.path), export.about, version, version["tables"], self._where)
            export.check_next(self._where, version["step"], version["state"])
        if interrupted is not None and interrupted["state"] != export.state:
            raise ExportError(
                f"{export.what}, and at {self._where} applying that of step {interrupted['step']} was interrupted; apply that one again first"
            )
        # An interrupted call has already written some of the new rows, so only the first call can
        # count them.
        if version is not None and interrupted is None:
            self._check_rows(version)
        commands: list[list[bytes | str]] = []
        if version is not None:
            # The version key stops listing a step before the rows of that step are deleted.
            dropped = version["kept"][max(self._keep - 1, 0) :]
            version["kept"] = version["kept"][: max(self._keep - 1, 0)]
            if dropped:
                commands.append(["SET", keys.version, json.dumps(version, sort_keys=True)])
                commands.append(["DEL", *map(keys.dense, dropped)])
        marker = json.dumps({"step": export.step, "state": export.state, "token": self._token}, sort_keys=True)
        self._committed([*commands, ["SET", keys.applying, marker]])
        return version

    def _check_rows(self, version: Version) -> None:
        """Check the numbers of rows that the tables will have, before anything is written.

        Raises:
            ExportError: a table would have another number of rows than the model.
        """
        for table, layout in enumerate(self._export.layouts):
            new = sum(
                value is None
                for rows in self._export.rows(table)
                for first in range(0, len(rows), _ROWS)
                for value in _values(self._ask(*self._keys.reading(layout.name, rows.ids[first : first + _ROWS].tolist())))
            )
            check_rows(self._export, table, version["tables"][table]["rows"] + new, self._where)

    def _write(self, name: str, rows: ExportRows, part: slice, readable: Sequence[int]) -> None:
        """Write a version of some rows, which no reader uses yet.

        Args:
            name: the name of the table.
            rows: rows of the table.
            part: the rows to write.
            readable: the steps that readers may use, in descending order.
        """
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
                        f"--key: the value of row {row_id} of table {name} at {self._where} was not written by an export; choose other keys"
                    )
                older = b"".join(_needed(value, entry, self._export.step, readable))
            values.append(head + row.tobytes() + older)
        self._committed([self._keys.writing(name, ids, values)])

    # -- Commands ----------------------------------------------------------------------------------

    def _transact(self, *commands: list[bytes | str]) -> None:
        """Execute all commands in one transaction, if the token is still that of this call."""
        _, marker = self._ask(["WATCH", self._keys.applying], ["GET", self._keys.applying])
        self._check_token(marker)
        self._committed(commands)

    def _committed(self, commands: Iterable[Sequence[bytes | str]]) -> None:
        answers = self._ask(["MULTI"], *commands, ["EXEC"])
        # EXEC returns None if a watched key has changed.
        if answers[-1] is None:
            raise self._another()

    def _check_token(self, marker: object) -> None:
        if not isinstance(marker, bytes) or _decoded(marker, self._keys.applying, Applying).get("token") != self._token:
            raise self._another()

    def _another(self) -> ExportError:
        return ExportError(f"{self._export.path}: another call is applying an export to {self._where} now; this one stops")

    def _ask(self, *commands: Sequence[bytes | str]) -> list[object]:
        return self._store.commands_at_once(0, commands)


def _values(replies: Iterable[object]) -> Iterator[bytes | None]:
    """Yield the value of each row that was read, or None if it does not exist."""
    for reply in replies:
        assert isinstance(reply, list)
        yield from reply


def _decoded(value: object, key: bytes, kind: type[_Decoded]) -> _Decoded:
    try:
        return of_json(parse_json(value if isinstance(value, bytes) else b""), kind)
    except FormError as error:
        raise ExportError(f"--key: {key.decode()} holds something that no export wrote ({error}); choose other keys") from error


def _needed(value: bytes, entry: int, step: int, readable: Sequence[int]) -> Iterator[bytes]:
    """Yield the versions of a row that readers need, the newest first.

    The version of `step` is left out, because it is written again.

    Args:
        value: the value of the row.
        entry: the size of a version in bytes.
        step: the step that is being written.
        readable: the steps that readers may use, in descending order.
    """
    # A reader at a step uses the newest version that is not newer than that step. So a version is
    # needed if a readable step lies between it and the next newer version.
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


# -- Reading ---------------------------------------------------------------------------------------


class ServedRows:
    """The served rows of one version.

    The version is the newest one at construction, or a kept one. The server may move to a newer
    version at any time: see `read`.

    Args:
        key: the template of the keys, as `foreload apply --key` has it.
        step: the step of a kept version. If None, the newest version.

    Raises:
        ExportError: there is no such version.
        StoreError: the server failed.
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
        """Read rows of a table.

        Args:
            table: the name of the table.
            ids: the ids of the rows.

        Returns:
            The weights, float32 [n, W], and whether each row was trained, bool [n]. The weights of
            a row that was never trained are zeros.

        Raises:
            ExportError: this version is no longer kept, or the table is unknown.
        """
        if table not in self._widths:
            raise ExportError(f"TABLE: must be one of {', '.join(self._widths)}; got {table!r}")
        width = self._widths[table]
        weights, found = np.zeros((len(ids), width), np.float32), np.zeros(len(ids), bool)
        if not len(ids):
            return weights, found
        # The version key is read after the rows. An application removes a version from that key
        # before it deletes rows, so rows that are still listed afterwards are complete.
        *values, version = self._store.commands_at_once(
            0, [*self._keys.reading(table, list(map(int, ids))), ["GET", self._keys.version]]
        )
        self._check(_decoded(version, self._keys.version, Version))
        entry = _STEP_BYTES + 4 * width
        for place, value in enumerate(_values(values)):
            if value is None:
                continue
            if len(value) % entry:
                raise ExportError(f"{self._where}: the value of row {ids[place]} of table {table} was not written by an export")
            for start in range(0, len(value), entry):
                if int.from_bytes(value[start : start + _STEP_BYTES], "little") <= self.step:
                    weights[place] = np.frombuffer(value, "<f4", width, start + _STEP_BYTES)
                    found[place] = True
                    break
        return weights, found

    def dense(self) -> bytes:
        """Return the dense part, in the format of safetensors.

        Raises:
            ExportError: this version is no longer kept.
        """
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
                f"{self._where}: has the model after step {there}; the one after {self.step} was requested, which is not kept"
            )
