"""`foreload stores`, `delete` and `scrub`: commands about a run's store shards."""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreload.trainer.command_line.shared import a_path, add_command, add_group, add_json, add_moved, add_plain, print_result

if TYPE_CHECKING:
    from foreload.trainer.commands.rows import NamespaceDeleted, RunDeleted
    from foreload.trainer.run.shard_change import Change

DAMAGED = 4
"""The exit status of a scrub that found a stripe which it cannot repair."""

# The launcher checks the new server before it answers.
_REPLACE_TIMEOUT = timedelta(minutes=1)
_NEW_HELP = (
    "URL of an empty server, or local: one more local server, for a run that has these; or engine: one more on its cluster, for a run that "
    "--store engine:N has begun and that trains"
)
_SERVERS_HELP = "URLs of servers, as in --store"


def add_to(commands: Any) -> None:
    """Declare the commands."""
    _add_stores(add_group(commands, "stores", "show and change a run's store shards"))
    deleted = add_command(
        commands, "delete", (_delete, "rows"), "delete a run, including its rows on the store",
        "Deletes a run's rows on its store shards, its local stores and its folder, without asking. Refuses a run that trains, and a copy of a run's "
        "folder, because the rows belong to the original. If a shard cannot be reached, prints what is left there and exits with status 2.",
    )  # fmt: skip
    add_moved(deleted)
    deleted.add_argument(
        "--force", action="store_true", help="delete the rows even if they belong to another folder, and print which one"
    )
    scrubbed = add_command(
        commands, "scrub", (_scrub, "scrub"), "check a run's rows against their parity, and repair them",
        "Reads every stripe of a run, which may be training. Repairs rows that are missing or have a wrong id or tag, parity rows that are missing, "
        "and rows that several parity rows identify as wrong. Names every other stripe whose rows and parity do not match, leaves it as it is, and "
        "exits with status 4.",
    )  # fmt: skip
    add_moved(scrubbed)


def _add_stores(commands: Any) -> None:
    add_command(
        commands, "status", (_stores_status, "stores"), "show whether each shard is up, and what it holds",
        "Asks each store shard of a run for its state, rows and memory. Exits with status 2 if one is down or lost.",
    )  # fmt: skip
    replaced = add_plain(
        commands, "replace", _stores_replace, "replace a shard's server while the run trains",
        "Makes a run that trains use another, empty server for a store shard. The shard's rows are rebuilt there from parity.",
    )  # fmt: skip
    replaced.add_argument("run", metavar="RUN", type=a_path("RUN"), help="the folder of a run that trains")
    replaced.add_argument("old", metavar="OLD", help="the URL of the shard's present server, or the shard's number")
    replaced.add_argument("new", metavar="NEW", help="the URL of an empty server")
    added = add_command(
        commands, "add", (_stores_add, "migrate"), "add servers, and migrate a part of the rows to them",
        "Migrates rows to further, empty servers, so that all servers hold about the same number. If the run trains, the command returns at once, "
        "and the trainers migrate the rows. If the run is stopped, the command migrates them.",
    )  # fmt: skip
    added.add_argument("urls", nargs="+", metavar="URL", help=_NEW_HELP)
    removed = add_command(
        commands, "remove", (_stores_remove, "migrate"), "migrate a shard's rows to the other servers, and remove the shard",
        "Migrates all rows of a store shard to the others. Then the run no longer uses the shard's server, and deletes its data there. If the run "
        "trains, the command returns at once, and the trainers migrate the rows. If the run is stopped, the command migrates them.",
    )  # fmt: skip
    removed.add_argument("shard", metavar="SHARD", help="the shard's number, or the URL of its server")
    moved = add_command(
        commands, "move", (_stores_move, "migrate"), "migrate a shard's rows to another server, while both serve them",
        "Migrates all rows of a store shard to another, empty server, which becomes a new shard. Then the run no longer uses the old server, and "
        "deletes its data there. No row is decoded from parity, and the run survives as many losses as before all the while. If the run trains, the "
        "command returns at once, and the trainers migrate the rows. If the run is stopped, the command migrates them.",
    )  # fmt: skip
    moved.add_argument("old", metavar="OLD", help="the shard's number, or the URL of its server")
    moved.add_argument("new", metavar="NEW", help=_NEW_HELP)
    for changed in (added, removed, moved):
        add_moved(changed)
    listed = add_plain(
        commands, "list", (_stores_list, "rows"), "list the runs that have rows on servers",
        "Lists every namespace that has rows on the servers, with its size and its run. Exits with status 2 if a server is down.",
    )  # fmt: skip
    listed.add_argument("urls", metavar="URL[,URL...]", help=_SERVERS_HELP)
    add_json(listed, "result")
    gone = add_plain(
        commands, "delete", (_stores_delete, "rows"), "delete the rows of a run whose folder was lost",
        "Deletes a namespace from servers without asking, whichever run it belongs to. Refuses the namespace of a run that trains on this host. "
        "Exits with status 2 if rows are left.",
    )  # fmt: skip
    gone.add_argument("urls", metavar="URL[,URL...]", help=_SERVERS_HELP)
    gone.add_argument("namespace", metavar="NAMESPACE", help="the namespace, as `foreload stores list` prints it")
    gone.add_argument("--force", action="store_true", help="delete it even if its run trains; this ends the training")
    add_json(gone, "result")


def _stores_status(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import stores

    status = stores.run(parsed.run, parsed.store)
    print_result(parsed, status, status.text())
    return 2 if any(shard["state"] in ("down", "lost") for shard in status.shards) else 0


def _stores_replace(parsed: argparse.Namespace) -> int:
    from foreload.trainer.cluster.messages.control import AskReplace, Refused, ask
    from foreload.trainer.errors import RunError

    answer = ask(Path(parsed.run), AskReplace(parsed.old, parsed.new), _REPLACE_TIMEOUT)
    if answer is None:
        raise RunError(
            f"run {parsed.run}: is not being trained; resume it by `foreload train --run {parsed.run} --resume --store URL,...`, with the new server "
            "in the place of the old one, to rebuild the shard there"
        )
    if isinstance(answer, Refused):
        raise RunError(f"stores replace: {answer.error}")
    print(f"shard {answer.replacing}: {answer.by} takes its place")
    return 0


def _stores_add(parsed: argparse.Namespace) -> int:
    return _stores_change(parsed, "add", "", tuple(parsed.urls))


def _stores_remove(parsed: argparse.Namespace) -> int:
    return _stores_change(parsed, "remove", parsed.shard, ())


def _stores_move(parsed: argparse.Namespace) -> int:
    return _stores_change(parsed, "move", parsed.old, (parsed.new,))


def _stores_change(parsed: argparse.Namespace, change: Change, shard: str, urls: tuple[str, ...]) -> int:
    from foreload.trainer.commands import migrate
    from foreload.trainer.run.shard_change import ShardChange

    moves = migrate.run(parsed.run, parsed.store, ShardChange(change, shard, urls), parsed.moved)
    return print_result(parsed, moves, moves.text())


def _stores_list(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import rows

    listed = rows.listed(parsed.urls)
    print_result(parsed, listed, listed.text())
    return 2 if any(server.why for server in listed.servers) else 0


def _stores_delete(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import rows

    return _print_deleted(parsed, rows.deleted(parsed.urls, parsed.namespace, parsed.force))


def _delete(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import rows
    from foreload.trainer.saved.run_rows import Overrule

    return _print_deleted(parsed, rows.run(parsed.run, parsed.store, Overrule(parsed.moved, parsed.force)))


def _print_deleted(parsed: argparse.Namespace, deleted: NamespaceDeleted | RunDeleted) -> int:
    print_result(parsed, deleted, deleted.text())
    return 2 if any(shard.why for shard in deleted.shards) else 0


def _scrub(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import scrub

    scrubbed = scrub.run(parsed.run, parsed.store, parsed.moved)
    print_result(parsed, scrubbed, scrubbed.text())
    return DAMAGED if scrubbed.stripes_damaged else 0
