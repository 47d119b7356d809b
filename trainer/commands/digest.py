"""`foreload digest`: the digest of a run's model (docs/definitions.md, Digest)."""

from __future__ import annotations

from typing import Any

from foreload.trainer.run.saved_run import open_saved


def run(path: str, store: str | None) -> dict[str, Any]:
    """Compute it; returns {"digest", "step", "mixed_numerics"}, the last as the run's manifest has it."""
    with open_saved(path, store) as saved:
        mixed = list(saved.manifest.mixed_numerics)
        return {"digest": saved.digest(), "step": saved.status.step, "mixed_numerics": mixed}
