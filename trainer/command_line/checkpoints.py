"""`foreload checkpoint`: save all of a run after a step, and manage what was saved."""

from __future__ import annotations

import argparse
from typing import Any

from foreload.base.errors import SettingError
from foreload.base.settings import add_arguments, given
from foreload.trainer.checkpoints.files import BITS
from foreload.trainer.command_line.shared import add_command, add_group, add_json, add_plain, print_result
from foreload.trainer.job.job import TrainJob
from foreload.trainer.job.job_values import POLICIES


def add_to(commands: Any) -> None:
    """Declare the commands."""
    checkpoint = add_group(commands, "checkpoint", "save a run to checkpoints, and manage these")
    saved = add_command(
        checkpoint, "save", (_save, "save_checkpoint"), "save a checkpoint of a run, which may be stopped or training",
        "Saves every row ever trained, the dense part with its optimizer, and the run's manifest to the folder step-N in --to, where N is the last "
        "step trained. `foreload train --from` makes a run of it, on any store. If --to already has a checkpoint of the run, the new one may be an "
        "increment, which has only the rows that changed since. The checkpoint is written completely or not at all. A run that is training saves it "
        "after its next step, by its own --checkpoint-policy and --checkpoint-bits.",
    )  # fmt: skip
    saved.add_argument(
        "--to",
        metavar="DIR|URL",
        help="folder for checkpoints, or its URL in an object store (default: checkpoints in RUN, which are deleted with the run)",
    )
    _add_kind(saved)
    listed = add_plain(
        checkpoint, "list", (_list, "checkpoints"), "list checkpoints",
        "Lists the checkpoints in a folder, or those of a run. Exits with status 2 if one of them cannot be used."
    )  # fmt: skip
    listed.add_argument("folder", metavar="DIR|URL|RUN", help="a folder of checkpoints, or the folder of a run")
    add_json(listed, "result")
    verified = add_plain(
        checkpoint, "verify", (_verify, "checkpoints"), "check that a checkpoint is as it was saved",
        "Reads every file of a checkpoint and compares it with its checksum. If a file is damaged, names it and exits with status 2.",
    )  # fmt: skip
    compacted = add_plain(
        checkpoint, "compact", (_compact, "save_checkpoint"), "make a checkpoint with all rows of an increment",
        "Combines an increment with the checkpoints that it needs into one checkpoint with all rows. The old checkpoints stay. If the weights are "
        "exact, the result is what saving all rows would have written.",
    )  # fmt: skip
    compacted.add_argument("--to", metavar="DIR|URL", required=True, help="folder of checkpoints to write it to")
    restored = add_plain(
        checkpoint, "restore", (_restore, "train"), "make a stopped run of a checkpoint",
        "Makes a run of a checkpoint, on any store, as if the run had stopped cleanly after the checkpoint's step. `foreload evaluate`, `export` and "
        "other commands then work with it, and `foreload train --resume` continues it. `foreload train --from` restores and continues in one call.",
    )  # fmt: skip
    restored.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder that `foreload checkpoint save` wrote, or its URL")
    add_arguments(restored, TrainJob, RESTORED_SETTINGS)
    add_json(restored, "result")
    deleted = add_plain(
        checkpoint,
        "delete",
        (_delete, "checkpoints"),
        "delete a checkpoint",
        "Deletes a checkpoint without asking. Refuses if other checkpoints need it.",
    )
    deleted.add_argument("--with-increments", action="store_true", help="also delete the checkpoints that need it")
    for one in (verified, compacted, deleted):
        one.add_argument("checkpoint", metavar="CHECKPOINT", help="a folder that `foreload checkpoint save` wrote, or its URL")
        add_json(one, "result")


RESTORED_SETTINGS = (
    "schedule", "run", "model_folder", "store", "parity", "namespace", "store_timeout", "accept_numerics", "overwrite",
)  # fmt: skip


def _add_kind(saved: argparse.ArgumentParser) -> None:
    saved.add_argument(
        "--policy", choices=POLICIES, default="intermittent",
        help="which rows to save: full: all; one-shot: those changed since the first checkpoint with all rows; consecutive: those changed since the "
        "last checkpoint; intermittent (the default): as one-shot, but all rows again once that costs less; planned: those with which the least is "
        "written up to the schedule's end",
    )  # fmt: skip
    saved.add_argument(
        "--every", metavar="STEPS", type=_steps, help="with --policy planned: steps between the checkpoints that will be saved"
    )
    saved.add_argument(
        "--base", metavar="NAME", help="checkpoint in --to on which the increment is based (default: the policy chooses)"
    )
    saved.add_argument(
        "--bits", metavar="N", default=BITS[0], type=_bits,
        help="bits of a weight: 32 (exact, the default), 8, 4, 3, 2, or auto, which depends on the number of restores to expect",
    )  # fmt: skip
    saved.add_argument(
        "--failures-a-day", metavar="N", default=1.0, type=_rate, help="how often the job fails, for --bits auto (default: 1)"
    )
    saved.add_argument(
        "--keep",
        metavar="N",
        type=_count,
        help="keep the run's N newest checkpoints there, and those that they need; delete its older ones (default: keep all)",
    )


def _bits(text: str) -> int | str:
    words = ("auto", *map(str, BITS))
    if text not in words:
        raise SettingError(f"--bits: must be one of {', '.join(words)}; got {text!r}")
    return text if text == "auto" else int(text)


def _count(text: str) -> int:
    return _positive("--keep", text)


def _steps(text: str) -> int:
    return _positive("--every", text)


def _positive(flag: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise SettingError(f"{flag}: must be a number, at least 1; got {text!r}")
    return int(text)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = -1
    if not 0 <= rate < float("inf"):
        raise SettingError(f"--failures-a-day: must be a number, at least 0; got {text!r}")
    return rate


def _save(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import save_checkpoint

    kind = {name: getattr(parsed, name) for name in ("policy", "bits", "base", "keep", "failures_a_day", "every")}
    saved = save_checkpoint.saved(parsed.run, parsed.store, parsed.to, **kind)
    return print_result(parsed, saved, saved.text())


def _compact(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import save_checkpoint

    saved = save_checkpoint.compacted(parsed.checkpoint, parsed.to)
    return print_result(parsed, saved, saved.text())


def _restore(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands.train import restored

    run = restored(parsed.checkpoint, given(parsed, TrainJob))
    return print_result(parsed, run, run.text())


def _list(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import checkpoints

    listed = checkpoints.listed(parsed.folder)
    print_result(parsed, listed, listed.text() or f"{parsed.folder}: no checkpoints")
    return 2 if any(isinstance(one, checkpoints.Unusable) for one in listed.checkpoints) else 0


def _verify(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import checkpoints

    verified = checkpoints.verified(parsed.checkpoint)
    return print_result(parsed, verified, f"{verified.text()}: every file is as it was saved")


def _delete(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import checkpoints

    deleted = checkpoints.deleted(parsed.checkpoint, parsed.with_increments)
    return print_result(parsed, deleted, deleted.text())
