"""`foreload evaluate`, `export` and `digest`: what a run's model is worth, and what it is."""

from __future__ import annotations

import argparse
from typing import Any

from foreload.trainer.command_line.shared import add_command, tell
from foreload.trainer.compute import numerics


def add_to(commands: Any) -> None:
    """Declare the commands."""
    evaluate = add_command(
        commands, "evaluate", _evaluate, "measure a run's model on held-out data",
        "Computes log loss, AUC and normalised entropy of the model on the evaluation steps of a schedule.",
    )  # fmt: skip
    evaluate.add_argument("schedule", nargs="?", metavar="SCHEDULE", help="evaluate on this one instead of the run's own")
    export = add_command(
        commands, "export", _export, "write a run's model to files",
        "Writes every trained row as Parquet, one file a table with columns id, weight and state, and the dense part as safetensors.",
    )  # fmt: skip
    export.add_argument("--out", required=True, metavar="DIR", help="folder to write; must not exist")
    add_command(
        commands, "digest", _digest, "print a fingerprint of a run's model",
        "Prints the SHA-256 of every bit of the model: equal digests mean equal models (docs/definitions.md).",
    )  # fmt: skip


def _evaluate(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import evaluate

    found = evaluate.run(parsed.run, parsed.store, parsed.schedule)
    text = (
        f"log loss {found['log_loss']:.5f}   AUC {found['auc']:.4f}   normalised entropy {found['normalized_entropy']:.4f}   "
        f"({found['samples']:,} samples, after step {found['step']})"
    )
    return tell(parsed, found, text)


def _export(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import export

    about = export.run(parsed.run, parsed.store, parsed.out)
    rows = sum(table["rows"] for table in about["tables"])
    return tell(
        parsed,
        about,
        f"{parsed.out}: {rows:,} rows of {len(about['tables'])} tables, and the dense part, after step {about['step']}",
    )


def _digest(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import digest

    found = digest.run(parsed.run, parsed.store)
    mixed = [numerics.mixed_text(found["mixed_numerics"])] if found["mixed_numerics"] else []
    return tell(parsed, found, "\n".join([found["digest"], *mixed]))
