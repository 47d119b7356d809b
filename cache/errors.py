"""The exceptions of cache/: one tree, one clear line each (field, rule, value, remedy)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from foreload.base.errors import ROWS_LOST, ForeloadError


class CacheError(ForeloadError):
    """Anything that cache/ raises on purpose."""

    code = "cache"


class RowError(CacheError):
    """A row is missing, or has another id or tag than the schedule says.

    wrong: bool [n], which of the n rows of a read that is; None where the error is of no read.
    """

    code = "row"

    def __init__(self, message: str, wrong: np.ndarray | None = None) -> None:
        super().__init__(message)
        self.wrong = wrong


class RowsLost(CacheError):
    """More store shards are lost than parity covers: rows are gone.

    shards: the lost ones; why: as far as it is known. covered: how many losses a stripe survives. rows: how many of each table are gone, None
    if they were not counted. This is of one owner's or reader's lanes; what all trainers of a run lost is ShardsLost (trainer/errors.py).
    """

    code = "rows-lost"
    exit_status = ROWS_LOST

    def __init__(self, shards: Sequence[int], covered: int, rows: Mapping[str, int] | None = None, why: str = "") -> None:
        counted = ", ".join(f"{count:,} rows of table {table}" for table, count in (rows or {}).items() if count)
        gone = "rows" if rows is None else counted or "rows written from now on"
        super().__init__(
            f"store shards {', '.join(map(str, shards))} are lost{f' ({why})' if why else ''}, but parity covers only {covered}: "
            f"{gone} cannot be recovered; the other shards keep their rows; bring the servers back with their rows, then --resume continues the "
            "run or reports what is missing"
        )
        self.shards, self.covered, self.rows = list(shards), covered, rows


class CopyLost(CacheError):
    """A trainer that holds a lane's log does not hold it any more, or does not say so; or the term is over. The owner goes on in the next one."""

    code = "copy-lost"

    def __init__(self, message: str, over: bool = False) -> None:
        """over: the term is over, and nobody is known to be at fault."""
        super().__init__(message)
        self.over = over


class StoreError(CacheError):
    """A store shard does not do what it was asked; the message names the shard by its URL, the password masked."""

    code = "store"


class CommandRefused(StoreError):
    """A store shard does not know a command, or refuses it for a reason that has no exception of its own."""

    code = "store-refused"


class ShardsRefuse(StoreError):
    """More store shards refuse to work than parity covers, though they have their rows."""

    code = "shards-refuse"


class StoreUnavailable(StoreError):
    """A store shard refuses connections, has closed one, or stays silent for longer than the timeout."""

    code = "store-unavailable"


class StoreSilent(StoreUnavailable):
    """A store shard that owes an answer stays silent for longer than the timeout."""

    code = "store-silent"


class ShardsSilent(StoreUnavailable):
    """More store shards do not answer than parity covers, for longer than they are waited for; their rows may all be there."""

    code = "shards-silent"


class ForeignKey(StoreUnavailable):
    """Another program wrote a lane's hash, its epoch key or the run's note on a store shard: the shard's rows are lost."""

    code = "foreign-key"


class StoreBusy(StoreUnavailable):
    """A store shard answers, but only that it is not ready: it runs a script, or still reads what it saved."""

    code = "store-busy"


class SnapshotAbandoned(CacheError):
    """The rows of lanes as they were after a step are not to be had any more: the lanes went to others, or training is over."""

    code = "snapshot-abandoned"


class StoreFull(StoreError):
    """A store shard accepts no writes: out of memory, read-only, or unable to save."""

    code = "store-full"


class StoreAuth(StoreError):
    """A store shard rejects the user, the password, or the user's rights."""

    code = "store-auth"


class StoreTls(StoreError):
    """A TLS connection failed: certificate not trusted, expired or for another host, or no TLS at the other end."""

    code = "store-tls"


class Fenced(StoreError):
    """Another owner has taken over: the lane's key at the server is fenced (WRONGTYPE)."""

    code = "fenced"


class NamespaceInUse(StoreError):
    """The namespace on the store belongs to another run, or to another state of this one."""

    code = "namespace-in-use"
    permanent = True
