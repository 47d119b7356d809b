"""What the traffic of a trainer counts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from foreload.cache.protocol.rounds.rounds import RoundStats


@dataclass(slots=True)
class Counters:
    """What the traffic did so far, all lanes together.

    rows_written is without the rows written beyond the schedule, which are rows_written_at_stop; parity rows are counted apart. rounds: exchanges
    of rounds, two a round with parity and a batch; batches: acknowledged ones, of all lanes. stalled_rows: arrivals whose fetch was
    not yet allowed to leave when the trainer took their event. rows_decoded: fetched rows that their stripes gave. rows_rebuilt,
    rows_migrated: with parity rows.
    """

    rows_initial: int = 0
    rows_fetched: int = 0
    rows_written: int = 0
    rows_written_at_stop: int = 0
    parity_rows_read: int = 0
    parity_rows_written: int = 0
    rows_decoded: int = 0
    rows_rebuilt: int = 0
    rows_migrated: int = 0
    bytes_fetched: int = 0
    bytes_written: int = 0
    rounds: int = 0
    batches: int = 0
    stalled_rows: int = 0
    waited: timedelta = timedelta()

    def count(self, stats: RoundStats, rows_at_stop: int) -> None:
        """Count an exchange of a round in, of whose rows so many were written beyond the schedule."""
        self.rounds += 1
        self.batches += len(stats.written)
        self.parity_rows_read += stats.parity_rows_read
        self.parity_rows_written += stats.parity_rows_written
        self.rows_decoded += stats.rows_decoded
        self.bytes_fetched += stats.bytes_read
        self.bytes_written += stats.bytes_written
        self.rows_fetched += sum(len(fetch.places) for fetch in stats.fetched)
        self.rows_written += sum(batch.rows for _, batch in stats.written) - rows_at_stop
        self.rows_written_at_stop += rows_at_stop
