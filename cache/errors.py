"""The exceptions of cache/. Each message is one line: field, rule, value, remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from foreload.base.errors import ROWS_LOST, ForeloadError


class CacheError(ForeloadError):
    """The base class of the errors that cache/ raises on purpose."""

    code = "cache"


class RowError(CacheError):
    """A row is missing, or has another id or tag than the schedule says.

    Attributes:
        wrong: bool [n], which of the n rows of a read are wrong. None if the error is not about a
            read.
    """

    code = "row"

    def __init__(self, message: str, wrong: np.ndarray | None = None) -> None:
        super().__init__(message)
        self.wrong = wrong


class RowsLost(CacheError):
    """More store shards are lost than parity covers, so rows are lost.

    The error is about the lanes of one owner or reader. ShardsLost (trainer/errors.py) is about all
    trainers of a run.

    Attributes:
        shards: the lost shards.
        covered: how many losses a stripe survives.
        rows: how many rows of each table are lost. None if they were not counted.
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
    """A trainer that should hold a lane's log does not, or does not answer, or the term is over.

    The owner goes on in the next term.
    """

    code = "copy-lost"

    def __init__(self, message: str, over: bool = False) -> None:
        """Create the error.

        Args:
            over: whether the term is over, so that no trainer is known to be at fault.
        """
        super().__init__(message)
        self.over = over


class StoreError(CacheError):
    """A store shard failed to do what was asked. The message names it by its URL, with the password masked."""

    code = "store"


class CommandRefused(StoreError):
    """A store shard does not know a command, or refuses it for a reason without an exception of its own."""

    code = "store-refused"


class ShardsRefuse(StoreError):
    """More store shards refuse to work than parity covers, although they have their rows."""

    code = "shards-refuse"


class StoreUnavailable(StoreError):
    """A store shard refuses connections, has closed one, or is silent for longer than the timeout."""

    code = "store-unavailable"


class StoreSilent(StoreUnavailable):
    """A store shard has not answered a request within the timeout."""

    code = "store-silent"


class ShardsSilent(StoreUnavailable):
    """More store shards are silent than parity covers, beyond --store-patience; their rows may still exist."""

    code = "shards-silent"


class ForeignKey(StoreUnavailable):
    """Another program wrote a lane's hash, its epoch key or the run's note on a store shard, whose rows are lost."""

    code = "foreign-key"


class StoreBusy(StoreUnavailable):
    """A store shard answers that it is not ready: it runs a script, or still loads its data."""

    code = "store-busy"


class SnapshotAbandoned(CacheError):
    """A snapshot of lanes was abandoned, because the lanes changed hands or training is over."""

    code = "snapshot-abandoned"


class StoreFull(StoreError):
    """A store shard accepts no writes: it is out of memory, read-only, or unable to save."""

    code = "store-full"


class StoreAuth(StoreError):
    """A store shard rejects the user, the password, or the user's rights."""

    code = "store-auth"


class StoreTls(StoreError):
    """A TLS connection failed: the certificate is not trusted, expired or for another host, or the server has no TLS."""

    code = "store-tls"


class Fenced(StoreError):
    """Another owner has taken over: the lane's key on the server is fenced (WRONGTYPE)."""

    code = "fenced"


class NamespaceInUse(StoreError):
    """The namespace on the store belongs to another run, or to another state of this run."""

    code = "namespace-in-use"
    permanent = True
