"""How many bytes things take: rows at rest, in a lane's slots, on the way there and back, on servers, and a schedule on the disk.

Pure; `prepare`, `train` and `stores status` go by it, and nothing else reckons such sizes.

A row has *columns*: its float32 numbers, weights and optimizer state together. Slots of one lane are all as wide as the widest row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from foreload.pipelines.samples.features import FeatureSpec

TRAILER_BYTES = 12  # of a row at rest: id (8) and tag (4)
OCCUPANT_BYTES = 26  # of a slot, who sits in it: table (2), ordinal (8), id (8), tag (4), stored tag (4)
DEFAULT_DIMENSION = 32
MOST_SLOTS = 2**31 - 1
_FEWEST_STAGED, _MOST_STAGED = 1 << 10, 1 << 16  # rows in each of a lane's two stagings

# Of the estimate of a schedule's size.
_VALUES = 4  # values of a multi-valued feature, about
_MOVES_BYTES = 8  # of a lookup: slots, masks and arrivals of the distinct rows, spread over all lookups
_ACCESS_BYTES = 8  # of a lookup: distinct rows with their next uses (8 and two masks each) while compiling, likewise spread
ROW_LINE_BYTES = 23  # of a row ever trained, its line in rows.arrow: table (2), id (8), lane (1), ordinal (8), tag (4)
ROW_RECORD_BYTES = 16  # and its record while compiling, four int32; in a file where the records do not fit in memory
LANE_ROW_BYTES = (
    24  # of a row, who it is by its number in its lane: id (8), ordinal (4), tag (4), table (2), whole words; in a file
)
# A table of more rows, or of so many times more than there are samples, finds its records by a hash index.
DIRECT_ROWS, FEWEST_DIRECT_ROWS, ROWS_A_LOOKUP = 1 << 26, 1 << 16, 8
HASHED_ROW_BYTES = 32  # of a row of such a table, beside its record: key (16) and two entries of the index (8 each)


def stored_bytes(columns: int) -> int:
    """A row at rest, as a store shard has it."""
    return 4 * columns + TRAILER_BYTES


def columns_of(row_bytes: int) -> int:
    """The columns of a row that takes so many bytes at rest, the last one perhaps not whole."""
    return -(-(row_bytes - TRAILER_BYTES) // 4)


def slot_bytes(columns: int, with_base: bool) -> int:
    """A slot: its row and who sits there; with_base: and the row as the store has it, which is kept where there is parity."""
    return 4 * columns * (2 if with_base else 1) + OCCUPANT_BYTES


def staging_rows(slots: int) -> int:
    """Rows that a lane may hold that wait for their slots, and as many that wait for their write-back: a quarter of its slots, within bounds."""
    return max(_FEWEST_STAGED, min(_MOST_STAGED, slots // 4))


def lane_bytes(slots: int, columns: int, with_base: bool) -> int:
    """What a lane takes of a trainer's memory: its slots, and rows on their way in and out."""
    return slot_bytes(columns, with_base) * (slots + 2 * staging_rows(slots))


def slots_of_size(size_bytes: int, columns: int, with_base: bool) -> int:
    """The most slots of a lane that may take so many bytes, staging included; 0 where not even one may."""
    room = size_bytes // slot_bytes(columns, with_base)  # rows, in slots or staging
    possible = range(min(room, MOST_SLOTS) + 1)
    return max(bisect_right(possible, room, key=lambda slots: slots + 2 * staging_rows(slots)) - 1, 0)


def default_columns(features: FeatureSpec) -> int:
    """The widest row of a training with nothing said of it: a dimension of 32 where the features state none, a column more, as some models have
    one, and the state of Adagrad, which is as wide."""
    return 2 * (max((table.dimension or DEFAULT_DIMENSION for table in features.tables), default=DEFAULT_DIMENSION) + 1)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the size of a schedule depends on, besides its features.

    samples: training and evaluation; epochs: of the training samples; shuffled: every epoch anew; ordered: by a column; evaluated_amid: evaluation
    samples of all passes amid epochs.
    """

    samples: int
    epochs: int
    shuffled: bool
    ordered: bool
    evaluated_amid: int = 0


def schedule_bytes(shape: Shape, spec: FeatureSpec) -> int:
    """About the most bytes that preparing a schedule has on the disk at once: pieces, the schedule and the row table."""
    values = [1 if feature.pooling == "single" else _VALUES for feature in spec.features]
    lookups = sum(values)
    dense = 4 * len(spec.dense)
    # In a piece, a sample is its labels, weight, group, dense values, ids, offsets and key; a sort writes all once more, a shuffle twice an epoch.
    labels = 4 * len(spec.labels) + (4 if spec.weight else 0) + (8 if spec.group else 0)
    sample = labels + dense + 8 * lookups + (8 * len(spec.features) if spec.multi_valued else 0) + (24 if shape.ordered else 0)
    copies = 1 + (1 if shape.ordered else 0) + (2 * shape.epochs if shape.shuffled else 0)
    written = shape.samples * (shape.epochs if shape.shuffled else 1)
    # In a sample file it is these and its number (8), dense values and an int32 a lookup; epochs in the same order share the files, not the moves.
    schedule = (
        written * (8 + labels + dense + (4 + _ACCESS_BYTES) * lookups) + shape.samples * shape.epochs * lookups * _MOVES_BYTES
    )
    schedule += shape.evaluated_amid * lookups * _MOVES_BYTES
    return shape.samples * sample * copies + schedule + _row_table_bytes(shape.samples, values, spec)


def _row_table_bytes(samples: int, values: Sequence[int], spec: FeatureSpec) -> int:
    """The row table, and what it is while compiling, of so many samples. values: of each feature, a sample's, about."""
    total = 0
    for number, table in enumerate(spec.tables):
        looked_up = samples * sum(count for count, feature in zip(values, spec.features, strict=True) if feature.table == number)
        of_row = ROW_LINE_BYTES + ROW_RECORD_BYTES + LANE_ROW_BYTES
        if table.rows is not None and table.rows > min(max(ROWS_A_LOOKUP * samples, FEWEST_DIRECT_ROWS), DIRECT_ROWS):
            of_row += HASHED_ROW_BYTES
        total += of_row * (looked_up if table.rows is None else min(table.rows, looked_up))
    return total
