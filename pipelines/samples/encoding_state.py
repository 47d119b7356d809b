"""What encoding has learned from the training data, kept in the schedule: vocabularies and scales. `--after` starts from it.

encoding/ holds `vocabulary-NNNNN.arrow` per table that has one, `scales.json` where a dense column is standardised, and, last,
`encoding.json` with the SHA-256 of each.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from foreload.base.codec import Name, of_json, parse_json
from foreload.base.files import unreadable, write_json
from foreload.pipelines.errors import ScheduleError
from foreload.pipelines.samples.dense import Scale
from foreload.pipelines.samples.encode import Encoder
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.samples.vocabulary import Vocabulary

INDEX, SCALES = "encoding.json", "scales.json"


def needs_state(spec: FeatureSpec) -> bool:
    """Whether the spec has vocabularies or standardised columns."""
    return bool(spec.vocabulary_tables) or any(dense.transform == "standard" for dense in spec.dense)


def save(folder: Path, vocabularies: Mapping[int, Vocabulary], scales: Sequence[Scale]) -> None:
    """Write a folder. vocabularies: place of the table -> vocabulary. scales: per dense column; empty where none is standardised."""
    folder.mkdir(exist_ok=True)
    names = []
    for table, vocabulary in sorted(vocabularies.items()):
        names.append(_vocabulary_name(table))
        vocabulary.save(folder / names[-1])
    if scales:
        names.append(SCALES)
        write_json(folder / SCALES, [[scale.mean.hex(), scale.deviation.hex()] for scale in scales])
    write_json(folder / INDEX, {name: _checksum(folder / name) for name in names})


def load(folder: Path, spec: FeatureSpec) -> tuple[FeatureSpec, Encoder]:
    """The spec with its vocabularies' sizes, and what encodes by it. Raises ScheduleError where a file is missing or damaged."""
    if not needs_state(spec):
        return spec, Encoder(spec)
    try:
        index = of_json(parse_json((folder / INDEX).read_bytes()), dict[Name, str])
        for name, checksum in index.items():
            if _checksum(folder / name) != checksum:
                raise ScheduleError(f"{folder / name}: its checksum is not that of {INDEX}; prepare the schedule again")
        vocabularies = {table: Vocabulary.load(folder / _vocabulary_name(table)) for table in spec.vocabulary_tables}
        scales = None
        if SCALES in index:
            pairs = of_json(parse_json((folder / SCALES).read_bytes()), list[tuple[str, str]])
            scales = [Scale(float.fromhex(mean), float.fromhex(deviation)) for mean, deviation in pairs]
    except OSError as error:
        raise ScheduleError(f"{error.filename or folder}: {unreadable(error, 'prepare the schedule again')}") from error
    except (ValueError, OverflowError) as error:
        raise ScheduleError(f"{folder}: its encoding cannot be read ({error}); prepare the schedule again") from error
    whole = spec.with_vocabulary({table: len(vocabulary) for table, vocabulary in vocabularies.items()})
    return whole, Encoder(whole, vocabularies, scales)


def identity(folder: Path) -> str | None:
    """SHA-256 of encoding.json, which names all of a folder; None where there is none."""
    return _checksum(folder / INDEX) if (folder / INDEX).exists() else None


def copy(parent: Path, folder: Path, expected: str | None) -> None:
    """Take over a parent schedule's encoding. expected: its identity. Raises ScheduleError where it has another."""
    if identity(parent) != expected:
        raise ScheduleError(f"{parent}: its encoding is not the schedule's; it is damaged, prepare it again")
    if expected is not None:
        shutil.copytree(parent, folder)


def _vocabulary_name(table: int) -> str:
    return f"vocabulary-{table:05d}.arrow"


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
