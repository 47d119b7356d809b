"""`foreload stores`, `delete` and `scrub`: commands about a run's store shards."""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreload.trainer.command_line.shared import a_path, add_command, add_group, add_json, add_moved, add_plain, tell

if TYPE_CHECKING:
    from foreload.trainer.commands.rows import NamespaceDeleted, RunDeleted
    from foreload.trainer.run.shard_change import Change

DAMAGED = 4
"""The exit status of a scrub that found a stripe which it cannot repair."""

# The launcher checks the new server before it answers.
_REPLACE_TIMEOUT = timedelta(minutes=1)
_NEW_HELP = "URL of an empty server; local: one more of the run's own, where it has such"
_SERVERS_HELP = "servers, as --store takes them"


def add_to(commands: Any) -> None:
    """Declare the commands."""
    _add_stores(add_group(commands, "stores", "look at a run's store shards"))
    deleted = add_command(
        commands, "delete", (_delete, "rows"), "delete a run, its rows on the store too",
        "Deletes a run's rows on its store shards, its local stores and its folder; asks nothing. A run that trains is refused, and so is a copy of "
        "a run's folder, whose rows are another one's. Where a shard cannot be reached, it says what is left there, and exits with 2.",
    )  # fmt: skip
    add_moved(deleted)
    deleted.add_argument(
        "--force", action="store_true", help="delete the rows even if they are another folder's; says whose they were"
    )
    scrubbed = add_command(
        commands, "scrub", (_scrub, "scrub"), "check the parity of a run's rows, and repair them",
        "Reads every stripe of a run, also while it is trained. Repairs a row that is missing, or has a wrong id or tag, a parity row that is "
        "missing, and what several parity rows single out; names every other stripe that does not agree, leaves it alone, and exits with 4.",
    )  # fmt: skip
    add_moved(scrubbed)


def _add_stores(commands: Any) -> None:
    add_command(
        commands, "status", (_stores_status, "stores"), "whether each shard is up, and what it holds",
        "Asks each store shard of a run for its state, rows and memory. Exits with 2 if one is down or lost.",
    )  # fmt: skip
    replaced = add_plain(
        commands, "replace", _stores_replace, "use another server in place of a shard's, while the run trains",
        "Has a run that trains use another, empty server in place of a store shard's; its rows are rebuilt there from parity.",
    )  # fmt: skip
    replaced.add_argument("run", metavar="RUN", type=a_path("RUN"), help="the folder of a run that trains")
    replaced.add_argument("old", metavar="OLD", help="the URL of the shard's server now, or the shard's number")
    replaced.add_argument("new", metavar="NEW", help="the URL of an empty server")
    added = add_command(
        commands, "add", (_stores_add, "migrate"), "have further servers hold a part of the rows",
        "Has rows move to further, empty servers, so that all hold alike: while the run trains, and returns at once then, or of a stopped run.",
    )  # fmt: skip
    added.add_argument("urls", nargs="+", metavar="URL", help=_NEW_HELP)
    removed = add_command(
        commands, "remove", (_stores_remove, "migrate"), "have the other servers hold a shard's rows, and do without it",
        "Has all rows of a store shard move to the others; then the run uses its server no more, and removes what it has there. While the run "
        "trains, and returns at once then, or of a stopped run.",
    )  # fmt: skip
    removed.add_argument("shard", metavar="SHARD", help="the shard's number, or the URL of its server")
    moved = add_command(
        commands, "move", (_stores_move, "migrate"), "have another server hold a shard's rows, which both serve meanwhile",
        "Has all rows of a store shard move to another, empty server, which is a further shard; then the run uses the old one no more, and removes "
        "what it has there. Nothing is decoded, and no loss less survived meanwhile. While the run trains, and returns at once then, or of a run "
        "that rests.",
    )  # fmt: skip
    moved.add_argument("old", metavar="OLD", help="the shard's number, or the URL of its server")
    moved.add_argument("new", metavar="NEW", help=_NEW_HELP)
    for changed in (added, removed, moved):
        add_moved(changed)
    listed = add_plain(
        commands, "list", (_stores_list, "rows"), "what runs have rows on servers",
        "Names every namespace that has rows on the servers, with its size and the run that it is of. Exits with 2 if one is down.",
    )  # fmt: skip
    listed.add_argument("urls", metavar="URL[,URL...]", help=_SERVERS_HELP)
    add_json(listed, "result")
    gone = add_plain(
        commands, "delete", (_stores_delete, "rows"), "delete the rows of a run whose folder was lost",
        "Deletes a namespace from servers, whatever run it is of; asks nothing. One of a run that trains on this host is refused. Exits with 2 if "
        "rows are left.",
    )  # fmt: skip
    gone.add_argument("urls", metavar="URL[,URL...]", help=_SERVERS_HELP)
    gone.add_argument("namespace", metavar="NAMESPACE", help="as `foreload stores list` names it")
    gone.add_argument("--force", action="store_true", help="even if its run trains, which that ends")
    add_json(gone, "result")


def _stores_status(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import stores

    status = stores.run(parsed.run, parsed.store)
    tell(parsed, status, status.text())
    return 2 if any(shard["state"] in ("down", "lost") for shard in status.shards) else 0


def _stores_replace(parsed: argparse.Namespace) -> int:
    from foreload.trainer.cluster.messages.control import AskReplace, Refused, ask
    from foreload.trainer.errors import RunError

    answer = ask(Path(parsed.run), AskReplace(parsed.old, parsed.new), _REPLACE_TIMEOUT)
    if answer is None:
        raise RunError(
            f"run {parsed.run}: is not being trained; foreload train --run {parsed.run} --resume --store URL,... with the new server in the place "
            "of the old one uses that, and rebuilds the shard there"
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
    return tell(parsed, moves, moves.text())


def _stores_list(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import rows

    listed = rows.listed(parsed.urls)
    tell(parsed, listed, listed.text())
    return 2 if any(server.why for server in listed.servers) else 0


def _stores_delete(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import rows

    return _tell_deleted(parsed, rows.deleted(parsed.urls, parsed.namespace, parsed.force))


def _delete(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import rows
    from foreload.trainer.saved.run_rows import Overrule

    return _tell_deleted(parsed, rows.run(parsed.run, parsed.store, Overrule(parsed.moved, parsed.force)))


def _tell_deleted(parsed: argparse.Namespace, deleted: NamespaceDeleted | RunDeleted) -> int:
    tell(parsed, deleted, deleted.text())
    return 2 if any(shard.why for shard in deleted.shards) else 0


def _scrub(parsed: argparse.Namespace) -> int:
    from foreload.trainer.commands import scrub

    scrubbed = scrub.run(parsed.run, parsed.store, parsed.moved)
    tell(parsed, scrubbed, scrubbed.text())
    return DAMAGED if scrubbed.stripes_damaged else 0
