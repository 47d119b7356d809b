"""Sizes in bytes: stored rows, the memory of a lane, and a schedule on disk.

The functions are pure. `prepare`, `train` and `stores status` use them, and no other code computes
such sizes.

A row's *columns* are its float32 numbers, weights and optimizer state together. All slots of a lane
are as wide as the widest row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.schedule.format import OCCUPANT_BYTES

TRAILER_BYTES = 12  # the end of a stored row: id (8) and tag (4)
DEFAULT_DIMENSION = 32
MOST_SLOTS = 2**31 - 1
_FEWEST_STAGED, _MOST_STAGED = 1 << 10, 1 << 16  # rows in each of a lane's two stagings

# The constants from here on are for the estimate of a schedule's size.
_VALUES = 4  # values of a multi-valued feature, about
# Bytes for each lookup in moves files: slots, masks and arrivals of the distinct rows, spread over
# all lookups.
_MOVES_BYTES = 8
# Bytes for each lookup during compilation: distinct rows with their next uses (8 and two masks
# each), likewise spread.
_ACCESS_BYTES = 8
# The line in rows.arrow of a row ever trained: table (2), id (8), lane (1), ordinal (8), tag (4).
ROW_LINE_BYTES = 23
# The row's record during compilation, four int32, which is in a file if the records do not fit in
# memory.
ROW_RECORD_BYTES = 16
# The row's identity by its number in its lane, in a file: id (8), ordinal (4), tag (4), table (2),
# padded to whole words.
LANE_ROW_BYTES = 24
# A table of more than DIRECT_ROWS rows finds its records through a hash index (compiler/row_table).
# So does a table of more than FEWEST_DIRECT_ROWS rows that has over ROWS_A_LOOKUP rows for each
# sample.
DIRECT_ROWS, FEWEST_DIRECT_ROWS, ROWS_A_LOOKUP = 1 << 26, 1 << 16, 8
# What a row of such a table takes besides its record: key (16) and two entries of the index (8
# each).
HASHED_ROW_BYTES = 32


def stored_bytes(columns: int) -> int:
    """Return the size of a row on a store shard."""
    return 4 * columns + TRAILER_BYTES


def columns_of(row_bytes: int) -> int:
    """Return the columns of a stored row of `row_bytes` bytes; a partial last column counts."""
    return -(-(row_bytes - TRAILER_BYTES) // 4)


def slot_bytes(columns: int, with_base: bool) -> int:
    """Return the size of a slot, which is a row and the identity of the row.

    Args:
        columns: The row's columns.
        with_base: Whether the slot also keeps the row as the store has it, which parity needs.
    """
    return 4 * columns * (2 if with_base else 1) + OCCUPANT_BYTES


def staging_rows(slots: int) -> int:
    """Return the size of each of a lane's two stagings, in rows.

    Rows that wait for their slots take one, rows that wait for their write-back the other. Each
    holds a quarter as many rows as the lane has slots, within bounds.
    """
    return max(_FEWEST_STAGED, min(_MOST_STAGED, slots // 4))


def lane_bytes(slots: int, columns: int, with_base: bool) -> int:
    """Return the memory that a lane takes in a trainer: its slots and both stagings."""
    return slot_bytes(columns, with_base) * (slots + 2 * staging_rows(slots))


def slots_of_size(size_bytes: int, columns: int, with_base: bool) -> int:
    """Return the most slots that a lane of `size_bytes` can have, including its stagings.

    Returns 0 if not even one slot fits.
    """
    room = size_bytes // slot_bytes(columns, with_base)  # rows in slots and stagings together
    possible = range(min(room, MOST_SLOTS) + 1)
    return max(bisect_right(possible, room, key=lambda slots: slots + 2 * staging_rows(slots)) - 1, 0)


def default_columns(features: FeatureSpec) -> int:
    """Return the columns of the widest row, if nothing is known about the training.

    A table without a stated dimension counts with 32. One more column is added, as some models have
    one, and the state of Adagrad, which is as wide as all of these.
    """
    return 2 * (max((table.dimension or DEFAULT_DIMENSION for table in features.tables), default=DEFAULT_DIMENSION) + 1)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the size of a schedule depends on, besides its features.

    Attributes:
        samples: Training and evaluation samples.
        epochs: Epochs of the training samples.
        shuffled: Whether every epoch is shuffled anew.
        ordered: Whether the samples are ordered by a column.
        evaluated_within: The evaluation samples of all passes within epochs, summed up.
    """

    samples: int
    epochs: int
    shuffled: bool
    ordered: bool
    evaluated_within: int = 0


def schedule_bytes(shape: Shape, spec: FeatureSpec) -> int:
    """Estimate the most disk space that preparing a schedule takes at any time.

    It includes the pieces, the schedule and the row table.
    """
    values = [1 if feature.pooling == "single" else _VALUES for feature in spec.features]
    lookups = sum(values)
    dense = 4 * len(spec.dense)
    # In a piece, a sample takes its labels, weight, group, dense values, ids, offsets and key. A
    # sort writes all of it once more, a shuffle twice for each epoch.
    labels = 4 * len(spec.labels) + (4 if spec.weight else 0) + (8 if spec.group else 0)
    sample = labels + dense + 8 * lookups + (8 * len(spec.features) if spec.multi_valued else 0) + (24 if shape.ordered else 0)
    copies = 1 + (1 if shape.ordered else 0) + (2 * shape.epochs if shape.shuffled else 0)
    written = shape.samples * (shape.epochs if shape.shuffled else 1)
    # In a sample file, a sample takes its labels and its number (8), its dense values and an int32
    # for each lookup. Epochs in the same order share the sample files, but each has moves of its
    # own.
    schedule = (
        written * (8 + labels + dense + (4 + _ACCESS_BYTES) * lookups) + shape.samples * shape.epochs * lookups * _MOVES_BYTES
    )
    schedule += shape.evaluated_within * lookups * _MOVES_BYTES
    return shape.samples * sample * copies + schedule + _row_table_bytes(shape.samples, values, spec)


def _row_table_bytes(samples: int, values: Sequence[int], spec: FeatureSpec) -> int:
    """Estimate the row table's size, in the schedule and during compilation.

    Args:
        samples: The number of samples.
        values: For each feature, about how many values a sample has.
    """
    total = 0
    for number, table in enumerate(spec.tables):
        looked_up = samples * sum(count for count, feature in zip(values, spec.features, strict=True) if feature.table == number)
        of_row = ROW_LINE_BYTES + ROW_RECORD_BYTES + LANE_ROW_BYTES
        if table.rows is not None and table.rows > min(max(ROWS_A_LOOKUP * samples, FEWEST_DIRECT_ROWS), DIRECT_ROWS):
            of_row += HASHED_ROW_BYTES
        total += of_row * (looked_up if table.rows is None else min(table.rows, looked_up))
    return total
