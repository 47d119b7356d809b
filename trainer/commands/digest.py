"""`foreload digest`: the digest of a run's model, or of a checkpoint's (docs/definitions.md, Digest)."""

from __future__ import annotations

from dataclasses import dataclass

from foreload.base.codec import to_stored
from foreload.trainer.checkpoints.saved_checkpoint import open_model
from foreload.trainer.run.manifest import InexactEntry, OtherCode, OtherNumerics, OtherRates, caveat_lines


@dataclass(frozen=True, slots=True)
class Digest:
    """The digest of a model after a step, and what it depends on besides the data and the settings (`Manifest.caveats`)."""

    digest: str
    step: int
    mixed_numerics: list[OtherNumerics]
    rates: list[OtherRates]
    mixed_code: list[OtherCode]
    inexact: InexactEntry | None

    def text(self) -> str:
        """For a person."""
        return "\n".join([self.digest, *caveat_lines(to_stored(self))])


def run(path: str, store: str | None) -> Digest:
    """Compute it. path: of a run, or of a checkpoint, whose rows are as they are read there."""
    with open_model(path, store) as model:
        return Digest(model.digest(), model.step, **model.manifest.caveats)
