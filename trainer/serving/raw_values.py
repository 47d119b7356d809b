"""Convert raw records to ids and dense values, with NumPy alone.

This is for a model that is served without foreload. The rules are those of docs/definitions.md
(Mixing, Encoding, Rows). `foreload export --format torch` joins this file with transforms.py,
plain_files.py, generators.py, inference.py, own_module.py and standalone.py into model.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

import numpy as np

from foreload.pipelines.samples.transforms import part_of, seconds_of_value, time_rule, transformed

_U64 = np.uint64
_LARGEST = float(np.finfo(np.float32).max)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_WHOLE = re.compile(r"-?\d+", re.ASCII)
_WHOLE_FLOAT = re.compile(r"(-?)(0|[1-9][0-9]*)[.]0+")
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]*)([.][0-9]+)?")
_SPACES = " \t\n\v\f\r"
_SPACES_OF_BYTES = _SPACES.encode()
_MOST_DIGITS = 4000  # the most digits of an id; Python refuses to parse longer integers
_DENSE_RULE = "a dense value must be a finite number within float32"
_CATEGORICAL_RULE = "a categorical value must be a text or a whole number"


def mix(x: np.ndarray) -> np.ndarray:
    """Apply the splitmix64 step: uint64 [n] -> uint64 [n]."""
    x = x + _U64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def hash64(texts: Sequence[bytes]) -> np.ndarray:
    """Return the hash of each text: uint64 [n]."""
    sizes = np.fromiter(map(len, texts), np.uint64, len(texts))
    # Each text is padded with zeros to whole words of 8 bytes, and mixed word by word.
    words = (sizes.astype(np.int64) + 7) // 8
    data = np.frombuffer(b"".join(text + bytes(-len(text) % 8) for text in texts), "<u8")
    starts, hashes = np.cumsum(words) - words, mix(sizes)
    for place in range(words.max(initial=0)):
        longer = np.flatnonzero(words > place)
        hashes[longer] = mix(hashes[longer] ^ data[starts[longer] + place])
    return hashes


def initial_rows(seed: int, table: int, ids: np.ndarray, initial: str, table_rows: int, columns: int, width: int) -> np.ndarray:
    """Return the initial values of rows: float32 [n, width].

    Args:
        seed: the seed of the training.
        table: the number of the table.
        ids: the ids of the rows, int64 [n].
        initial: the rule: uniform, uniform:A, xavier, normal:S or zeros.
        table_rows: the number of rows of the table.
        columns: the number of columns of the embedding, which follow the rule. The other columns
            are zeros.
        width: the number of all columns.
    """
    prefix = mix(mix(np.array([seed & (1 << 64) - 1], np.uint64)) ^ _U64(table))
    h = mix(prefix ^ ids.astype(np.uint64))
    rows = np.zeros((len(ids), width), np.float32)
    kind, _, amount = initial.partition(":")
    if kind == "zeros":
        return rows
    if kind == "normal":
        bits = mix(h[:, None] ^ np.arange(3 * columns, dtype=np.uint64)).reshape(len(ids), columns, 3, 1)
        draws = ((bits >> (np.arange(4, dtype=np.uint64) * _U64(16))) & _U64(0xFFFF)).astype(np.int64).sum((2, 3))
        rows[:, :columns] = (draws - 393210).astype(np.float32) * np.float32(2.0**-16)
    else:
        bits = mix(h[:, None] ^ np.arange((columns + 1) // 2, dtype=np.uint64))
        draws = np.stack([bits >> _U64(40), (bits >> _U64(16)) & _U64(0xFFFFFF)], 2)
        draws = draws.reshape(len(ids), 2 * bits.shape[1])[:, :columns]
        rows[:, :columns] = (draws.astype(np.int64) - (1 << 23)).astype(np.float32) * np.float32(2.0**-23)
    by_rows = math.sqrt(6.0 / (table_rows + columns)) if kind == "xavier" else 1.0 / math.sqrt(table_rows)
    rows[:, :columns] *= np.float32(float(amount) if amount else by_rows)
    return rows


class Malformed(Exception):
    """A value violates a rule. The argument is the rule."""


def whole_text(text: str) -> str:
    """Return a text as rule 2 encodes it.

    A whole number written as a float becomes the part before its point, and "-0" becomes "0". Any
    other text is unchanged.
    """
    whole = _WHOLE_FLOAT.fullmatch(text)
    if whole is None:
        return text
    return "0" if whole[2] == "0" else whole[1] + whole[2]


class Rule:
    """A rule of encoding, with the texts that mean a missing value.

    Args:
        number: 1 or 2, the number of the rule.
        missing: the texts that mean a missing value. The empty text always does.
    """

    def __init__(self, number: int, missing: Sequence[str]) -> None:
        self.number, self.missing = number, frozenset(("", *missing))
        self._wholes = frozenset(map(whole_text, missing)) if number > 1 else frozenset()
        self._numbers = [Decimal(text) for text in missing if number > 1 and _DECIMAL.fullmatch(text)]

    def text(self, written: str) -> str:
        """Return the text to encode for a given text, empty if the value is missing."""
        whole = written if self.number == 1 else whole_text(written)
        return "" if written in self.missing or whole in self._wholes else whole

    def is_missing(self, value: Any) -> bool:
        """Return whether a value that is not a text is missing.

        None, NaN, the missing values of data frames, and numbers that a missing text denotes are
        missing.
        """
        if isinstance(value, np.datetime64):
            return bool(np.isnat(value))
        if not isinstance(value, Real | Decimal):
            return value is None or type(value).__name__ in ("NAType", "NaTType")
        if value != value:
            return True
        return any(_equal(number, value) for number in self._numbers)

    def nan_where_missing(self, values: np.ndarray) -> np.ndarray:
        """Replace numbers that mean a missing value with NaN.

        Args:
            values: float64 [n]. None of them was given as a text.
        """
        for number in self._numbers:
            # A whole number that float64 cannot represent exactly is equal to none of the values.
            if number != number.to_integral_value() or Decimal(float(number)) == number:
                values = np.where(values == float(number), np.nan, values)
        return values


def _equal(number: Decimal, value: Any) -> bool:
    """Return whether a value is equal to a number.

    If the number is a fraction, a float is compared with the nearest value of its own type.
    """
    if isinstance(value, Decimal):
        return number == value
    if number == number.to_integral_value():
        return number == (int(value) if isinstance(value, Integral) else Decimal(float(value)))
    return bool((type(value) if isinstance(value, np.floating) else float)(float(number)) == value)


def number_of(value: Any, rule: Rule) -> float:
    """Convert a raw dense value to a float64, NaN if it is missing.

    Raises:
        Malformed: the value violates a rule.
    """
    text = _decoded(value)
    if isinstance(text, str):
        if not rule.text(text):
            return math.nan
        if not _NUMBER.fullmatch(text.strip(_SPACES)):
            raise Malformed(_DENSE_RULE)
        number = float(text.strip(_SPACES))
    elif rule.is_missing(value):
        return math.nan
    elif isinstance(value, Real | Decimal | np.bool_):
        try:
            number = float(value)
        except OverflowError:
            raise Malformed(_DENSE_RULE) from None
    else:
        raise Malformed(_DENSE_RULE)
    if abs(number) > _LARGEST:
        raise Malformed(_DENSE_RULE)
    return number


def part_of_time(value: Any, entry: Mapping[str, Any], rule: Rule) -> int | None:
    """Return the part of a raw time that a column's entry asks for, or None if it is missing.

    Raises:
        Malformed: the value is no time.
    """
    text = _decoded(value)
    if not rule.text(text) if isinstance(text, str) else rule.is_missing(value):
        return None
    seconds = seconds_of_value(text, entry.get("time_unit"))
    if seconds is None:
        raise Malformed(time_rule(entry.get("time_unit")))
    part: int = part_of(seconds, entry["part"])
    return part


def text_of(value: Any, rule: Rule) -> bytes:
    """Convert a raw categorical value to the text to encode, empty if it is missing.

    Raises:
        Malformed: the value violates a rule.
    """
    text = _decoded(value)
    if isinstance(text, str):
        return _encoded(rule.text(text))
    if rule.is_missing(value):
        return b""
    whole = _whole(value)
    if whole is None:
        raise Malformed(_CATEGORICAL_RULE)
    return b"%d" % whole


def _whole(value: Any) -> int | None:
    """Return the integer equal to a number, or None if there is none.

    Returns None for a fraction, a float whose absolute value is 2^63 or more, and any value that is
    not a number.
    """
    if type(value) is bool:
        return None
    if isinstance(value, Integral):
        return int(value)
    number: Any = value if isinstance(value, Real | Decimal) else math.nan
    if not math.isfinite(number) or number != int(number):
        return None
    return int(number) if isinstance(value, Decimal) or abs(number) < 2.0**63 else None


def _decoded(value: Any) -> Any:
    """Decode bytes as text, and return any other value unchanged."""
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        raise Malformed("a text must be UTF-8") from None


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise Malformed("a text must be UTF-8") from None


class Encoder:
    """Converts raw records to the inputs of the model, as features.json specifies.

    Args:
        about: the contents of features.json.
        vocabularies: the id of each text, by the number of the table.
    """

    def __init__(self, about: Mapping[str, Any], vocabularies: Mapping[int, Mapping[bytes, int]]) -> None:
        self._about, self._vocabularies = about, vocabularies
        self._rule = Rule(about.get("rule", 1), about["text"]["missing"])

    @property
    def columns(self) -> list[str]:
        """The columns that records must have, each once."""
        return list(dict.fromkeys(entry["column"] for entry in (*self._about["dense"], *self._about["features"])))

    def encode(
        self, columns: Mapping[str, Sequence[Any]], first: int = 0
    ) -> tuple[np.ndarray, dict[str, tuple[np.ndarray, np.ndarray]]]:
        """Encode records.

        Args:
            columns: the raw values by column.
            first: the number of the first record, for errors.

        Returns:
            The dense values, float32 [b, n], and per feature ids int64 [lookups] and offsets int64
            [b]. An offset is the place where the ids of a record begin.

        Raises:
            ValueError: a value is malformed.
        """
        count = len(next(iter(columns.values())))
        dense: np.ndarray = np.empty((count, len(self._about["dense"])), np.float32)
        of_vectors: dict[tuple[str, int, str], np.ndarray] = {}
        for place, entry in enumerate(self._about["dense"]):
            values = self._dense(columns[entry["column"]], entry, first, of_vectors)
            for record in np.flatnonzero(np.abs(values) > _LARGEST)[:1].tolist():
                raise ValueError(
                    f"records[{first + record}]: {entry['column']}: a dense value must be finite after its transform; got "
                    f"{columns[entry['column']][record]!r:.80}"
                )
            dense[:, place] = values
        lookups = {
            feature["name"]: self._lookups(columns[feature["column"]], feature, first) for feature in self._about["features"]
        }
        return dense, lookups

    def _dense(
        self, values: Sequence[Any], entry: Mapping[str, Any], first: int, of_vectors: dict[tuple[str, int, str], np.ndarray]
    ) -> np.ndarray:
        """Return the transformed values of a dense column, float64 [b].

        Args:
            of_vectors: the columns of vectors that are converted already, by column, size and
                separator. Added to.
        """
        column, element, rule = entry["column"], entry.get("element"), self._rule
        if element is not None:
            key = column, element["size"], element["separator"]
            if key not in of_vectors:
                of_vectors[key] = self._vectors(values, *key, first)
            numbers = of_vectors[key][:, element["place"]]
        elif "part" in entry:
            parts = _each(values, column, first, lambda value: part_of_time(value, entry, rule))
            numbers = np.array([math.nan if part is None else part for part in parts], np.float64)
        else:
            numbers = self._numbers(values, column, first)
        if "fill" in entry:
            numbers = np.where(np.isnan(numbers), entry["fill"], numbers)
        scale = (float.fromhex(entry[key]) for key in ("origin", "unit") if key in entry)
        with np.errstate(over="ignore"):
            return transformed(numbers, entry["transform"], *scale)

    def _vectors(self, values: Sequence[Any], column: str, size: int, separator: str, first: int) -> np.ndarray:
        """Return the numbers of a column of vectors, float64 [b, size], NaN where missing."""
        rule = self._rule

        def numbers(value: Any) -> list[float]:
            several = _several(value, separator, rule)
            if several and len(several) != size:
                raise Malformed(f"a vector must have {size} numbers, as size says, and has {len(several)}")
            return [number_of(part, rule) for part in several] or [math.nan] * size

        return np.array(_each(values, column, first, numbers), np.float64).reshape(len(values), size)

    def _numbers(self, values: Sequence[Any], column: str, first: int) -> np.ndarray:
        if set(map(type, values)) <= {float, int, bool, type(None)}:
            try:
                numbers = np.array(values, np.float64)
                if not (np.abs(numbers) > _LARGEST).any():
                    return self._rule.nan_where_missing(numbers)
            except OverflowError:
                # The conversion value by value, below, raises the error that names the record.
                pass
        return np.array(_each(values, column, first, lambda value: number_of(value, self._rule)), np.float64)

    def _lookups(self, values: Sequence[Any], feature: Mapping[str, Any], first: int) -> tuple[np.ndarray, np.ndarray]:
        separator, rule = feature.get("separator"), self._rule
        padding = frozenset(text.encode() for text in feature.get("padding", ()))
        table_rows = self._about["tables"][feature["table"]]["table_rows"]

        def text(value: Any) -> bytes:
            if "part" in feature:
                part = part_of_time(value, feature, rule)
                return b"" if part is None else b"%d" % part
            return text_of(value, rule)

        def one(value: Any) -> list[bytes]:
            several = [value] if separator is None else _several(value, separator, rule) or [None]
            texts = [text(part) or feature.get("fill", "").encode() for part in several]
            if feature["encoding"] == "id":
                # Padding need not be an id of the table, such as -1.
                stripped = (part.strip(_SPACES_OF_BYTES) if padding else part for part in texts)
                ids = [b"%d" % _id(part, table_rows) if part and part not in padding else b"" for part in stripped]
                texts = ids if padding else [part or b"0" for part in ids]
            if padding:
                texts = [part for part in texts if part and part not in padding]
            most = feature.get("max_values", len(texts))
            return texts[-most:] if feature.get("keep") == "last" else texts[:most]

        bags = _each(values, feature["column"], first, one)
        counts = np.fromiter(map(len, bags), np.int64, len(bags))
        texts, offsets = [text for bag in bags for text in bag], np.cumsum(counts) - counts
        if feature["encoding"] == "hash":
            # Id 0 is the missing value, so hashes give ids 1 to table_rows - 1.
            ids = (hash64(texts) % _U64(table_rows - 1)).astype(np.int64) + 1
            ids[np.fromiter(map(len, texts), np.int64, len(texts)) == 0] = 0
        elif feature["encoding"] == "vocabulary":
            known = self._vocabularies[feature["table"]]
            # Id 0 is the missing value, and id 1 is all values outside the vocabulary.
            ids = np.fromiter((known.get(text, 1) if text else 0 for text in texts), np.int64, len(texts))
        else:
            ids = np.array(list(map(int, texts)), np.int64)
        return ids, offsets


def _several(value: Any, separator: str, rule: Rule) -> Sequence[Any]:
    """Return the values of a field that may hold several. A missing field has none."""
    value = value.tolist() if isinstance(value, np.ndarray) else _decoded(value)
    if isinstance(value, str):
        return [] if value in rule.missing else value.split(separator)
    if isinstance(value, list | tuple):
        return value
    return [] if rule.is_missing(value) else [value]


def _id(text: bytes, table_rows: int) -> int:
    stripped = text.decode().strip(_SPACES)
    if not (_WHOLE.fullmatch(stripped) and len(stripped) <= _MOST_DIGITS and 0 <= int(stripped) < table_rows):
        raise Malformed(f"an id must be a whole number in 0 .. {table_rows - 1}")
    return int(stripped)


def _each(values: Sequence[Any], column: str, first: int, convert: Callable[[Any], Any]) -> list[Any]:
    """Convert each value.

    Args:
        column: their column, for errors.
        first: the number of the first record, for errors.
        convert: converts one value.

    Raises:
        ValueError: a value is malformed. The error names record, column, rule and value.
    """
    converted: list[Any] = []
    try:
        for value in values:
            converted.append(convert(value))
    except Malformed as error:
        place = len(converted)
        raise ValueError(f"records[{first + place}]: {column}: {error}; got {values[place]!r:.80}") from None
    return converted


def columns_of(records: Any, names: Sequence[str]) -> dict[str, Sequence[Any]]:
    """Return the columns with these names from records.

    Args:
        records: a list of dicts, a dict of columns, an Arrow table, or a data frame.
        names: the names of the columns.

    Raises:
        ValueError: a column is missing, or the columns differ in length.
    """
    if isinstance(records, Mapping) or hasattr(records, "columns"):
        there = records if isinstance(records, Mapping) else getattr(records, "column_names", None) or list(records.columns)
        for name in names:
            if name not in there:
                raise ValueError(f"records: must have the column {name}; got {', '.join(map(str, there))}")
        listed = {name: records[name] for name in names}
        columns = {name: _listed(column) for name, column in listed.items()}
        for name in names:
            if len(columns[name]) != len(columns[names[0]]):
                raise ValueError(
                    f"records: columns must be of one length; {name} has {len(columns[name])}, {names[0]} {len(columns[names[0]])}"
                )
        return columns
    records = list(records)
    for place, record in enumerate(records):
        for name in names:
            if not isinstance(record, Mapping) or name not in record:
                raise ValueError(
                    f"records[{place}]: must be a dict with {name}, None where a value is missing; got {record!r:.80}"
                )
    return {name: [record[name] for record in records] for name in names}


def _listed(column: Any) -> Sequence[Any]:
    """Return the values of a column as a sequence of Python's own types."""
    # As numbers, which tolist would return, times of NumPy would lose their unit.
    if isinstance(column, np.ndarray) and column.dtype.kind == "M":
        return list(column)
    return next((getattr(column, to)() for to in ("to_pylist", "tolist") if hasattr(column, to)), column)
