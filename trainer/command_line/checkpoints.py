"""`foreload checkpoint`: all of a run after a step, in a folder of its own."""

from __future__ import annotations

import argparse
from typing import Any

from foreload.trainer.command_line.shared import add_command, add_group, add_json, add_plain, tell


def add_to(commands: Any) -> None:
    """Declare the commands."""
    checkpoint = add_group(commands, "checkpoint", "save all of a run, and look at what was saved")
    saved = add_command(
        checkpoint, "save", _save, "save all of a run that rests",
        "Saves every row ever trained, the dense part with its optimizer, and what the run is, into the folder step-N of --to, N being the last step "
        "trained; `foreload train --from` makes a run of it, on any store. Whole, or not at all. A run that is being trained is refused.",
    )  # fmt: skip
    saved.add_argument(
        "--to", metavar="DIR", help="folder for checkpoints (default: checkpoints in RUN, which goes with the run)"
    )
    listed = add_plain(
        checkpoint, "list", _list, "what checkpoints there are", "Names the checkpoints in a folder, or of a run. Exits with 2 if one cannot be used."
    )  # fmt: skip
    listed.add_argument("folder", metavar="DIR|RUN", help="a folder of checkpoints, or a run's")
    add_json(listed, "result")
    verified = add_plain(
        checkpoint, "verify", _verify, "whether a checkpoint is as it was saved",
        "Reads every file of a checkpoint and compares it with its checksum. Names what is damaged, and exits with 2 then.",
    )  # fmt: skip
    deleted = add_plain(checkpoint, "delete", _delete, "delete a checkpoint", "Deletes a checkpoint; asks nothing.")
    for one in (verified, deleted):
        one.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder that `foreload checkpoint save` wrote")
        add_json(one, "result")


def _save(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import checkpoint

    told = checkpoint.saved(parsed.run, parsed.store, parsed.to)
    return tell(parsed, told, checkpoint.told_text(told))


def _list(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import checkpoint

    listed = checkpoint.listed(parsed.folder)
    text = "\n".join(map(checkpoint.told_text, listed["checkpoints"])) or f"{parsed.folder}: no checkpoints"
    tell(parsed, listed, text)
    return 2 if any("why" in one for one in listed["checkpoints"]) else 0


def _verify(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import checkpoint

    told = checkpoint.verified(parsed.checkpoint)
    return tell(parsed, told, f"{checkpoint.told_text(told)}: every file is as it was saved")


def _delete(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import checkpoint

    return tell(parsed, checkpoint.deleted(parsed.checkpoint), f"deleted  {parsed.checkpoint}")
