"""What encoding has learned from the training data: vocabularies and scales, kept in the schedule.

`prepare --after` starts from it. The folder `encoding/` holds `vocabulary-NNNNN.arrow` for each
table that has a vocabulary, and `scales.json` if a dense column is scaled. `encoding.json`,
with the SHA-256 of each of these files, is written last.
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
    """Return whether the spec has vocabularies or scaled columns."""
    return bool(spec.vocabulary_tables) or any(dense.scaled for dense in spec.dense)


def save(folder: Path, vocabularies: Mapping[int, Vocabulary], scales: Sequence[Scale]) -> None:
    """Write vocabularies and scales to a folder.

    Args:
        folder: created if it does not exist.
        vocabularies: place of the table -> vocabulary.
        scales: for each dense column its scale. Empty if none is scaled.
    """
    folder.mkdir(exist_ok=True)
    names = []
    for table, vocabulary in sorted(vocabularies.items()):
        names.append(_vocabulary_name(table))
        vocabulary.save(folder / names[-1])
    if scales:
        names.append(SCALES)
        write_json(folder / SCALES, [[scale.origin.hex(), scale.unit.hex()] for scale in scales])
    write_json(folder / INDEX, {name: _checksum(folder / name) for name in names})


def load(folder: Path, spec: FeatureSpec) -> tuple[FeatureSpec, Encoder]:
    """Read vocabularies and scales from a folder.

    Returns:
        The spec with the sizes of its vocabularies, and the encoder for it.

    Raises:
        ScheduleError: a file is missing or damaged.
    """
    if not needs_state(spec):
        return spec, Encoder(spec)
    try:
        index = of_json(parse_json((folder / INDEX).read_bytes()), dict[Name, str])
        for name, checksum in index.items():
            if _checksum(folder / name) != checksum:
                raise ScheduleError(f"{folder / name}: its checksum does not match {INDEX}; prepare the schedule again")
        vocabularies = {table: Vocabulary.load(folder / _vocabulary_name(table)) for table in spec.vocabulary_tables}
        scales = None
        if SCALES in index:
            pairs = of_json(parse_json((folder / SCALES).read_bytes()), list[tuple[str, str]])
            scales = [Scale(float.fromhex(origin), float.fromhex(unit)) for origin, unit in pairs]
    except OSError as error:
        raise ScheduleError(f"{error.filename or folder}: {unreadable(error, 'prepare the schedule again')}") from error
    except (ValueError, OverflowError) as error:
        raise ScheduleError(f"{folder}: its encoding cannot be read ({error}); prepare the schedule again") from error
    whole = spec.with_vocabulary({table: len(vocabulary) for table, vocabulary in vocabularies.items()})
    return whole, Encoder(whole, vocabularies, scales)


def identity(folder: Path) -> str | None:
    """Return the SHA-256 of encoding.json, which covers all files. None if it does not exist."""
    return _checksum(folder / INDEX) if (folder / INDEX).exists() else None


def copy(parent: Path, folder: Path, expected: str | None) -> None:
    """Copy the encoding of a parent schedule.

    Args:
        parent: the parent's folder.
        folder: the new folder.
        expected: the identity that the parent's encoding must have. If None, the parent must have
            none, and nothing is copied.

    Raises:
        ScheduleError: the parent's encoding has another identity.
    """
    if identity(parent) != expected:
        raise ScheduleError(f"{parent}: its encoding does not match the schedule, which is damaged; prepare it again")
    if expected is not None:
        shutil.copytree(parent, folder)


def _vocabulary_name(table: int) -> str:
    return f"vocabulary-{table:05d}.arrow"


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
