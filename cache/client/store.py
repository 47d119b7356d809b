"""The store client: reads and writes arrays of rows on all store shards at once, in one loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np

from foreload.base.at_once import at_once
from foreload.cache.client.connections import Channel, Connections
from foreload.cache.client.load import ShardLoad
from foreload.cache.client.resp import HmgetReply, NumberReply, PlainReply, Request, hmget, hset, plain
from foreload.cache.client.url import NEVER_EVICTS, StoreUrl, parse_url
from foreload.cache.errors import (
    CommandRefused,
    RowError,
    StoreAuth,
    StoreError,
    StoreUnavailable,
)

Command = Sequence[bytes | str | int] | Request  # the words of a command, or a prepared request
COMMAND_ROWS = 2048  # most rows of one command, during which a server does nothing else
_REMOVED = StoreError("store: this shard was removed")
_NOWHERE = parse_url("redis://removed.invalid:6379")  # in the place of a removed shard's URL
NO_ROWS = np.empty(0, np.uint64), np.empty((0, 4), np.uint8)  # fields and rows of a Read or Write of the marker alone


@dataclass(slots=True)
class Read:
    """Rows to read from one store shard, with the marker.

    Attributes:
        fields: uint64 [n].
        rows: uint8 [n, row_bytes], the last axis contiguous. The exchange fills them in place;
            missing rows stay unchanged.
        missing: bool [n], or None if nothing is missing; set by the exchange.
        marker: the marker's bytes, or None if there is no marker; set by the exchange.
        any_length: if True, a value that is not as long as a row counts as missing, and is no
            error.
    """

    shard: int
    key: bytes
    fields: np.ndarray
    rows: np.ndarray
    missing: np.ndarray | None = None
    marker: bytes | None = None
    any_length: bool = False


@dataclass(slots=True)
class Write:
    """Rows to write to one store shard, with the marker, by one atomic command.

    Attributes:
        fields: uint64 [n], n <= 2048.
        rows: uint8 [n, row_bytes].
        new: how many of the fields, including those of marker and migrated, the hash may lack
            before. If None, that is not known.
        added: how many fields it lacked, as the server reports; set by the exchange. None if the
            server has not answered.
        migrated: how far the lane's rows have migrated, if this command records that.
    """

    shard: int
    key: bytes
    fields: np.ndarray
    rows: np.ndarray
    marker: bytes | None = None
    new: range | None = None
    added: int | None = None
    migrated: bytes | None = None

    @property
    def surprise(self) -> str | None:
        """What the server's answer says about rows that were lost; None if it is as expected."""
        if self.new is None or self.added is None or self.added in self.new:
            return None
        least, most = self.new.start, self.new.stop - 1
        must = f"{least}" if least == most else f"at most {most}"
        fields = len(self.fields) + (self.marker is not None) + (self.migrated is not None)
        return f"of {fields} fields written, {self.added} were new to the server, must be {must}"


def _check_arrays(request: Read | Write) -> None:
    # The kernels copy without bounds checks, so the arrays are checked here.
    fields, rows = request.fields, request.rows
    if rows.ndim != 2 or rows.dtype != np.uint8 or (rows.size and rows.strides[1] != 1):
        raise ValueError(f"rows: must be uint8 [n, row_bytes], the last axis contiguous; got {rows.dtype} {rows.shape}")
    if isinstance(request, Read) and not rows.flags.writeable:
        raise ValueError("rows: must be writeable, because a Read fills them")
    if fields.dtype != np.uint64 or fields.shape != rows.shape[:1]:
        raise ValueError(f"fields: must be uint64 [{len(rows)}], one per row; got {fields.dtype} {fields.shape}")


def server_version(info: Mapping[str, str]) -> str:
    """Return a server's kind and version, from its INFO: "redis 7.0.15".

    A Valkey server also calls itself redis 7.2.4.
    """
    kind = next((kind for kind in ("valkey", "redis") if f"{kind}_version" in info), None)
    return f"{kind} {info[f'{kind}_version']}" if kind else "unknown"


class Store:
    """Connections to all store shards.

    One thread uses a Store; another thread makes its own. Nothing reconnects by itself. After
    StoreUnavailable the Store is closed, except for shards that `attempt` goes on without; `adopt`
    brings these back.

    Args:
        urls: None in the place of a shard that was removed.
        timeout: how long a shard that owes an answer may be silent. Also how long LOADING, BUSY and
            TRYAGAIN are retried.
        connect_timeout: how long a server that cannot be reached is retried at the start.
        optional: if True, a shard that cannot be reached is recorded in `down`, with the reason,
            and is no error.

    Attributes:
        rows_read: the number of rows read so far.
        rows_written: the number of rows written so far.
    """

    def __init__(
        self,
        urls: Sequence[str | StoreUrl | None],
        timeout: timedelta = timedelta(seconds=30),
        connect_timeout: timedelta = timedelta(seconds=10),
        optional: bool = False,
    ) -> None:
        if not urls:
            raise StoreError("store: needs the URL of at least one store shard; got none")
        self.rows_read = self.rows_written = 0
        self._connections = Connections(timeout)
        try:
            self._connect(
                [url if isinstance(url, StoreUrl | None) else parse_url(url) for url in urls], connect_timeout, optional
            )
            self._connections.open()
            for shard in self.used if optional else ():
                # A stopped server still accepts connections, so each server must answer a PING.
                self._connections.perform({} if shard in self.down else {shard: [plain("PING")]}, {})
            # The symmetric difference is the set of used shards that are not down.
            for shard in self.down.keys() ^ self.used:
                self._check_server(shard)
        except BaseException:
            self.close()
            raise

    def _connect(self, urls: Sequence[StoreUrl | None], connect_timeout: timedelta, optional: bool) -> None:
        """Open channels to all servers at once, so that silent ones are waited for together."""
        used = {shard: url for shard, url in enumerate(urls) if url is not None}
        opened = at_once({shard: partial(Channel, url, self.timeout, connect_timeout) for shard, url in used.items()})
        failures: list[Exception] = []
        for shard in range(len(urls)):
            channel = opened.get(shard)
            if isinstance(channel, Exception):
                if not (optional and isinstance(channel, StoreUnavailable)):
                    failures.append(channel)
                    continue
                channel = Channel.absent(used[shard], channel)
            self._connections.channels.append(channel or Channel.absent(_NOWHERE, _REMOVED))
        if failures:
            raise failures[0]

    @classmethod
    def connect(
        cls,
        urls: Sequence[str | StoreUrl | None],
        timeout: timedelta,
        spared: int,
        patience: timedelta = timedelta(seconds=10),
    ) -> Self:
        """Return a Store of which some shards may be lost, because parity has their rows.

        Args:
            spared: how many shards may be lost. If it is not 0, a shard that cannot be reached is
                no error, and is retried for 1 s only.
            patience: how long a server that cannot be reached is retried if `spared` is 0.
        """
        return cls(urls, timeout, timedelta(seconds=1), optional=True) if spared else cls(urls, timeout, patience)

    @property
    def timeout(self) -> timedelta:
        """How long a shard that owes an answer may be silent."""
        return self._connections.timeout

    @property
    def commands(self) -> int:
        """Commands sent so far."""
        return self._connections.commands

    @property
    def retries(self) -> int:
        """Commands that were sent again because a server was not ready."""
        return self._connections.retries

    @property
    def shards(self) -> int:
        """The number of store shards, including those that were removed."""
        return len(self._connections.channels)

    @property
    def used(self) -> list[int]:
        """The store shards that were not removed, in order."""
        return [shard for shard, channel in enumerate(self._connections.channels) if channel.failure is not _REMOVED]

    @property
    def urls(self) -> tuple[StoreUrl, ...]:
        """The store shards' addresses, in order."""
        return tuple(channel.url for channel in self._connections.channels)

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to all shards so far."""
        return sum(channel.bytes_sent for channel in self._connections.channels)

    @property
    def bytes_received(self) -> int:
        """Bytes received from all shards so far."""
        return sum(channel.bytes_received for channel in self._connections.channels)

    @property
    def loads(self) -> dict[int, ShardLoad]:
        """The load of each shard, from exchanges with several shards.

        These are copies, and any thread may ask for them.
        """
        return {shard: replace(load) for shard, load in sorted(self._connections.loads.copy().items())}

    @property
    def recent_seconds(self) -> dict[int, float]:
        """The mean seconds of each shard's recent answers."""
        return self._connections.recent

    @property
    def down(self) -> dict[int, StoreError]:
        """The shards that cannot be used, each with the reason."""
        failures = ((shard, channel.failure) for shard, channel in enumerate(self._connections.channels))
        return {shard: failure for shard, failure in failures if failure is not None and failure is not _REMOVED}

    def exchange(self, reads: Sequence[Read], writes: Sequence[Write]) -> None:
        """Do all reads, then all writes of each shard, on all shards at once.

        This returns when every reply is in. Reads go first so that a slow link is used both ways at
        once: rows come in while others go out. A read may still see the writes if a server was not
        ready at first. The arrays of a Write must not change until the end.

        Raises:
            RowError: a stored value is not as long as a row.
            StoreFull, StoreAuth, Fenced, StoreError: a server refuses a command. Raised once all
                answers are in.
            StoreUnavailable: a connection failed.
        """
        requests, replies, counts = self._prepare(reads, writes)
        self._connections.perform(requests)
        for read, parts in replies:
            self._finish(read, parts)
        for write, count in counts:
            write.added = count.number

    def attempt(self, reads: Sequence[Read], writes: Sequence[Write]) -> dict[int, StoreError]:
        """Do the same as `exchange`, but go on without shards that fail.

        A shard fails if its connection fails, if it stays silent or refuses a command, or if it
        failed before. Its commands may or may not have been executed, and its connection is closed.

        Returns:
            By shard, why it failed.

        Raises:
            RowError: a stored value is not as long as a row.
            Fenced: the lane has another owner, so this process must stop.
        """
        asked = {read.shard for read in reads} | {write.shard for write in writes}
        failures = {shard: error for shard, error in self.down.items() if shard in asked}
        reads, writes = (
            [read for read in reads if read.shard not in failures],
            [write for write in writes if write.shard not in failures],
        )
        requests, replies, counts = self._prepare(reads, writes)
        self._connections.perform(requests, failures)
        for read, parts in replies:
            if read.shard not in failures:
                try:
                    self._finish(read, parts)
                except StoreError as error:
                    self._connections.lose(read.shard, error, failures)
        for write, count in counts:
            if write.shard not in failures:
                write.added = count.number
        return failures

    def adopt(self, shard: int, other: Store) -> None:
        """Bring back a shard that failed in `attempt`.

        Args:
            other: a Store of that one server. Its connection is taken over, so it has none from
                then on.
        """
        self._connections.replace(shard, other._connections.channels.pop())

    def forget_loads(self) -> None:
        """Start to count `loads` anew.

        Call this when shards have other rows than before, because their earlier loads say nothing
        about later ones.
        """
        self._connections.loads, self._connections.recent = {}, {}

    def extend(self, others: Sequence[Store]) -> None:
        """Add shards.

        Args:
            others: Stores of one server each. Their connections are taken over, so they have none
                from then on.
        """
        for other in others:
            self._connections.append(other._connections.channels.pop())

    def remove(self, shard: int) -> None:
        """Close a shard's connection. The shard keeps its number, but is no longer used."""
        self._connections.channels[shard].fail(_REMOVED)

    def give_up(self, shard: int, why: StoreUnavailable) -> None:
        """Close a shard's connection. From now on the shard counts as failed in `attempt`."""
        self._connections.channels[shard].fail(why)

    def judge_wrong_type(self, judge: Callable[[int, StoreError], StoreError]) -> None:
        """Set the function that decides why a key is of another type.

        It is called if a shard answers so in `attempt` or `ask`, with the shard and the error that
        this is taken for at first, Fenced. It returns why the shard fails, which is raised if it is
        Fenced.
        """
        self._connections.judge = judge

    def _prepare(
        self, reads: Sequence[Read], writes: Sequence[Write]
    ) -> tuple[dict[int, list[Request]], list[tuple[Read, list[HmgetReply]]], list[tuple[Write, NumberReply]]]:
        """Return the requests by shard, reads first, with the replies to each read and write.

        A read may need several commands, and has as many replies.
        """
        requests: dict[int, list[Request]] = {}
        replies: list[tuple[Read, list[HmgetReply]]] = []
        for read in reads:
            _check_arrays(read)
            parts: list[HmgetReply] = []
            for start in range(0, max(len(read.fields), 1), COMMAND_ROWS):
                fields = read.fields[start : start + COMMAND_ROWS]
                request = hmget(read.key, fields, read.rows[start : start + COMMAND_ROWS])
                requests.setdefault(read.shard, []).append(request)
                assert isinstance(request.reply, HmgetReply)
                parts.append(request.reply)
            replies.append((read, parts))
        counts: list[tuple[Write, NumberReply]] = []
        for write in writes:
            request = self._write_request(write)
            requests.setdefault(write.shard, []).append(request)
            assert isinstance(request.reply, NumberReply)
            counts.append((write, request.reply))
        return requests, replies, counts

    def command(self, shard: int, *words: bytes | str | int) -> object:
        """Run a single command on one shard.

        Returns:
            bytes, int, None, a list of these, or str for a status.

        Raises:
            StoreError: as in `exchange`.
        """
        return self.commands_at_once(shard, [words])[0]

    def commands_at_once(self, shard: int, commands: Sequence[Command]) -> list[object]:
        """Run several commands on one shard in one exchange. Returns and raises as `command`.

        Each command is atomic by itself. Keys of different lanes may not occur in one command
        (CROSSSLOT in a cluster).
        """
        requests = [command if isinstance(command, Request) else plain(*command) for command in commands]
        if requests:
            self._connections.perform({shard: requests})
        return [request.reply.value for request in requests if isinstance(request.reply, PlainReply)]

    def ask(self, commands: Mapping[int, Sequence[Command]]) -> tuple[dict[int, list[object]], dict[int, StoreError]]:
        """Run commands on several shards at once.

        A shard that fails is treated as in `attempt`, and so is Fenced.

        Args:
            commands: shard -> its commands, as for `commands_at_once`.

        Returns:
            (shard -> its answers; shard that failed -> the reason).
        """
        failures = {shard: error for shard, error in self.down.items() if shard in commands}
        requests = {
            shard: [command if isinstance(command, Request) else plain(*command) for command in of_shard]
            for shard, of_shard in commands.items()
            if shard not in failures
        }
        # `perform` removes answered requests from its dictionary, so it gets a copy.
        self._connections.perform(dict(requests), failures)
        answers = {
            shard: [request.reply.value for request in of_shard if isinstance(request.reply, PlainReply)]
            for shard, of_shard in requests.items()
            if shard not in failures
        }
        return answers, failures

    def info(self, shard: int) -> dict[str, str]:
        """Return the entries of INFO, by name."""
        text = self.command(shard, "INFO")
        assert isinstance(text, bytes)
        pairs = (line.split(":", 1) for line in text.decode(errors="replace").splitlines() if ":" in line)
        return dict(pairs)

    def close(self) -> None:
        """Close all connections. A second call does nothing."""
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_server(self, shard: int) -> None:
        """Raise StoreError for a server that would evict rows.

        A server that does not report its policy is refused, too, unless its URL guarantees that it
        never evicts.
        """
        url = self.urls[shard]
        policy = self.info(shard).get("maxmemory_policy")
        if policy is None:
            with contextlib.suppress(StoreAuth, CommandRefused):
                answer = self.command(shard, "CONFIG", "GET", "maxmemory-policy")
                policy = answer[1].decode() if isinstance(answer, list) and len(answer) == 2 else None
        if policy is None and not url.never_evicts:
            raise StoreError(
                f"store {url}: does not report whether it evicts rows: neither INFO nor CONFIG GET has a maxmemory-policy; if it never "
                f"does, add {NEVER_EVICTS} to its URL"
            )
        # volatile-* evicts only keys with a TTL, and these keys never have one.
        if policy is not None and policy != "noeviction" and not policy.startswith("volatile-"):
            raise StoreError(
                f"store {url}: maxmemory-policy must be noeviction or volatile-*, because others delete rows; got {policy}; run CONFIG SET "
                "maxmemory-policy noeviction there, or, if the provider does not allow that, set it in the server's parameter group"
            )

    def _write_request(self, write: Write) -> Request:
        _check_arrays(write)
        if not len(write.fields) and write.marker is None and write.migrated is None:
            raise ValueError("Write: needs at least one row or a marker")
        if len(write.fields) > COMMAND_ROWS:
            raise ValueError(f"Write: at most {COMMAND_ROWS} rows per command; got {len(write.fields)}")
        self.rows_written += len(write.fields)
        return hset(write.key, write.fields, write.rows, write.marker, write.migrated)

    def _finish(self, read: Read, parts: list[HmgetReply]) -> None:
        """Gather the results of a read's commands.

        Raises:
            RowError: a value is not as long as a row.
            StoreUnavailable: the commands saw different markers.
        """
        url = self.urls[read.shard]
        for part, reply in enumerate(parts):
            if reply.other_length is not None and not read.any_length:
                row, length = reply.other_length
                field = int(read.fields[part * COMMAND_ROWS + row])
                raise RowError(
                    f"store {url}: the value of field {field:#018x} of {read.key.decode()} has {length} bytes, but a row of this model and "
                    f"optimizer has {read.rows.shape[1]}; use the run that wrote it, or start again with --overwrite"
                )
        read.marker = parts[0].marker
        if any(reply.marker != read.marker for reply in parts):
            raise StoreUnavailable(
                f"store {url}: the marker of {read.key.decode()} changed during one read; the server was emptied, or another trainer writes this lane"
            )
        read.missing = None
        if any(reply.missing is not None for reply in parts):
            absent = [np.zeros(len(reply.rows), np.bool_) if reply.missing is None else reply.missing for reply in parts]
            read.missing = np.concatenate(absent)
        self.rows_read += len(read.rows)
