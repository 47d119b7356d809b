"""`foreload digest`: the digest of the model of a run or a checkpoint.

See docs/definitions.md, Digest.
"""

from __future__ import annotations

from dataclasses import dataclass

from foreload.base.codec import to_stored
from foreload.trainer.checkpoints.saved_checkpoint import open_model
from foreload.trainer.run.manifest import InexactEntry, OtherCode, OtherNumerics, OtherRates, caveat_lines


@dataclass(frozen=True, slots=True)
class Digest:
    """The digest of a model after a step, and what it depends on besides the data and the settings.

    The fields after `step` are those of `Manifest.caveats`.
    """

    digest: str
    step: int
    mixed_numerics: list[OtherNumerics]
    rates: list[OtherRates]
    mixed_code: list[OtherCode]
    inexact: InexactEntry | None

    def text(self) -> str:
        """Return the digest, and a line for each caveat."""
        return "\n".join([self.digest, *caveat_lines(to_stored(self))])


def run(path: str, store: str | None) -> Digest:
    """Compute the digest of a model.

    Args:
        path: the folder of a run, or of a checkpoint. If the weights in a checkpoint are rounded,
            the digest is that of the rounded weights.
        store: the URLs of the run's servers. If None, the run's own.
    """
    with open_model(path, store) as model:
        return Digest(model.digest(), model.step, **model.manifest.caveats)
