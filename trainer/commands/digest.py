"""`foreload digest`: the digest of a run's model, or of a checkpoint's (docs/definitions.md, Digest)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foreload.trainer.checkpoints.format import MANIFEST, Checkpoint
from foreload.trainer.checkpoints.reader import digest_of
from foreload.trainer.run.saved_run import open_saved


def run(path: str, store: str | None) -> dict[str, Any]:
    """Compute it; returns {"digest", "step", "mixed_numerics"}, the last as the run's manifest has it. path: of a run, or of a checkpoint."""
    if (Path(path) / MANIFEST).exists():
        checkpoint = Checkpoint.open(path)
        contents = checkpoint.contents
        return {"digest": digest_of(checkpoint), "step": contents.step, "mixed_numerics": list(contents.run.mixed_numerics)}
    with open_saved(path, store) as saved:
        mixed = list(saved.manifest.mixed_numerics)
        return {"digest": saved.digest(), "step": saved.status.step, "mixed_numerics": mixed}
