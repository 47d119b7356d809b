"""`foreload digest`: the digest of a run's model (docs/definitions.md, Digest)."""

from __future__ import annotations

from typing import Any

from trainer.commands.resting import RestingRun, open_resting
from trainer.digest import Digest


def model_digest(resting: RestingRun) -> str:
    """The digest of the model at rest, 64 hexadecimal digits."""
    digest = Digest()
    digest.dense(*resting.dense())
    batches = resting.rows()
    batch = next(batches, None)
    for table, layout in enumerate(resting.layouts):
        digest.table(layout.name)
        while batch is not None and batch.table == table:
            digest.rows(batch.ids, batch.weights, batch.state)
            batch = next(batches, None)
    return digest.hexdigest()


def run(path: str, store: str | None) -> dict[str, Any]:
    """Compute it; returns {"digest", "step", "mixed_numerics"}, the last as the run's manifest has it."""
    with open_resting(path, store) as resting:
        mixed = list(resting.manifest.mixed_numerics)
        return {"digest": model_digest(resting), "step": resting.status.step, "mixed_numerics": mixed}
