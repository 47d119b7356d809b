"""A plan in words and as a picture."""

from __future__ import annotations

from typing import Any

from foreload.trainer.commands.history import aligned
from foreload.trainer.errors import PlanError
from foreload.trainer.resources.choices import GIB, duration

_ROWS = 14  # of the front that are shown; --json has all


def text(plan: dict[str, Any]) -> str:
    """For a person."""
    settings, pool, choice = plan["settings"], plan["pool"], plan["choice"]
    profiles = f"{plan['profiles']} profile{'s' if plan['profiles'] != 1 else ''}"
    if plan["probed"]:
        profiles += f", {len(plan['probed'])} of them made now by short runs ({'; '.join(plan['probed'])})"
    lines = [
        f"schedule     {plan['schedule']}: {plan['steps']:,} steps of {settings['batch_size']:,} samples, {settings['lanes']} lane(s), "
        f"{settings['slots']:,} slots a lane",
        f"pool         {pool['cores']} cores, {pool['memory_bytes'] / GIB:.1f} GiB, up to {pool['stores']} store shards",
        f"known from   {profiles}",
        f"intervals    {plan['confidence']:.0%}: x / {1 + plan['margin']:.2f}",
        "",
        "Choices that no other one beats in both time and cost, the fastest first:",
    ]
    shown = plan["front"][:_ROWS]
    rows: list[tuple[str, ...]] = [
        ("trainers", "store", "slots a lane", "time", "interval", "ms a step", "core hours", "GB hours", "cost", "memory GiB")
    ]
    rows += [_row(one) for one in shown]
    lines += aligned(rows)
    if len(plan["front"]) > len(shown):
        lines.append(f"and {len(plan['front']) - len(shown)} more; --json FILE has all {len(plan['choices'])} choices")
    if plan["too_large"]:
        lines.append(f"{plan['too_large']} further choices take more memory than the pool has")
    lines += ["", f"chosen       {_words(choice)}: {choice['reason']}"]
    lines += [f"  {line}" for line in choice["commands"]]
    return "\n".join(lines)


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(one["trainers"]), _store(one), f"{one['slots']:,}", duration(one["seconds"]),
        f"{duration(one['seconds_low'])} to {duration(one['seconds_high'])}", f"{one['ms_step']:.2f}", f"{one['core_hours']:.4g}",
        f"{one['gb_hours']:.4g}", f"{one['cost']:.4g}", f"{one['memory_bytes'] / GIB:.2f}",
    )  # fmt: skip


def _store(one: dict[str, Any]) -> str:
    return f"local:{one['shards']}" + ("" if one["parity"] == "off" else f" {one['parity']}")


def _words(one: dict[str, Any]) -> str:
    return f"{one['trainers']} trainer{'s' if one['trainers'] > 1 else ''}, {_store(one)}, {one['slots']:,} slots a lane, {duration(one['seconds'])}"


def draw(plan: dict[str, Any], path: str) -> None:
    """All choices by time and cost, the front and the one that is meant. Raises PlanError where it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for trainers in sorted({one["trainers"] for one in plan["choices"]}):
        of_it = [one for one in plan["choices"] if one["trainers"] == trainers]
        label = f"{trainers} trainer{'s' if trainers > 1 else ''}"
        axes.scatter([one["seconds"] for one in of_it], [one["cost"] for one in of_it], s=14, alpha=0.6, label=label)
    axes.plot(
        [one["seconds"] for one in plan["front"]],
        [one["cost"] for one in plan["front"]],
        color="black",
        linewidth=1,
        label="front",
    )
    choice = plan["choice"]
    off = [[choice["seconds"] - choice["seconds_low"]], [choice["seconds_high"] - choice["seconds"]]]
    axes.errorbar(
        [choice["seconds"]], [choice["cost"]], xerr=off, fmt="*", markersize=14, color="crimson", capsize=3, label=_words(choice)
    )
    axes.set_xlabel("time of all steps, seconds")
    axes.set_ylabel("cost, core hours")
    axes.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=140)
    except OSError as error:
        raise PlanError(f"--plot: cannot write {path}: {error.strerror}; give another place") from error
