"""`foreload digest`: the digest of a run's model, or of a checkpoint's (docs/definitions.md, Digest)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from foreload.trainer.checkpoints.format import MANIFEST, Checkpoint
from foreload.trainer.checkpoints.reader import digest_of
from foreload.trainer.run.saved_run import open_saved


def run(path: str, store: str | None) -> dict[str, Any]:
    """Compute it; returns {"digest", "step"} and `Manifest.caveats`. path: of a run, or of a checkpoint, whose rows are as they are read there."""
    if (Path(path) / MANIFEST).exists():
        checkpoint = Checkpoint.open(path)
        contents = checkpoint.contents
        told = replace(contents.run, inexact=contents.inexact)
        return {"digest": digest_of(checkpoint), "step": contents.step} | told.caveats
    with open_saved(path, store) as saved:
        return {"digest": saved.digest(), "step": saved.status.step} | saved.manifest.caveats
