"""`foreload digest`: the digest of a run's model, or of a checkpoint's (docs/definitions.md, Digest)."""

from __future__ import annotations

from typing import Any

from foreload.trainer.checkpoints.saved_checkpoint import open_model


def run(path: str, store: str | None) -> dict[str, Any]:
    """Compute it; returns {"digest", "step"} and `Manifest.caveats`. path: of a run, or of a checkpoint, whose rows are as they are read there."""
    with open_model(path, store) as model:
        return {"digest": model.digest(), "step": model.step} | model.manifest.caveats
