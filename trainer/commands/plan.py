"""`foreload plan`: predict what a schedule takes, and choose a configuration.

A configuration is a number of trainers, store shards and slots. The plan is written as text, JSON
and a picture.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from foreload.base.codec import parse_json
from foreload.base.memory import available_bytes, total_bytes
from foreload.base.progress import duration
from foreload.base.settings import local, read_job_file, settings_of
from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.compiler.other_slots import BYTES_OF_USE, LaneUses, lane_uses
from foreload.pipelines.planning.options import PrepareOptions
from foreload.pipelines.schedule.format import PROVENANCE, SET_NAME
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.assembly.job_shape import alike, cores, machine, settings_of_job
from foreload.trainer.commands.history import aligned
from foreload.trainer.compute import numerics
from foreload.trainer.errors import HistoryError, PlanError
from foreload.trainer.job import job_values
from foreload.trainer.job.job import TrainJob
from foreload.trainer.job.job_values import Parity
from foreload.trainer.resources.choices import GIB, Choice, choose, front
from foreload.trainer.resources.features import StepCounts, step_counts, with_slots
from foreload.trainer.resources.job_memory import JobMemory
from foreload.trainer.resources.step_model import CONFIDENCE, Setup, StepModel, loads_of, observation_of
from foreload.trainer.run import history

DECIDED = ("store", "trainers", "parity", "run", "schedule")
"""The settings of `foreload train` that a plan decides or sets itself."""
# The slot counts between the fewest and the most that are tried besides the schedule's own.
_SLOT_COUNTS = 3

GB_PRICE = 0.13  # of a GB hour, in core hours

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Pool:
    """The resources that a job may use.

    Attributes:
        stores: the most store shards.
    """

    cores: int
    memory_bytes: int
    stores: int

    @classmethod
    def of(cls, given: job_values.Pool) -> Pool:
        """Return a pool, in which what is not given is this machine's, and up to STORES shards."""
        return cls(given.cores or cores(), given.memory_bytes or total_bytes(), given.stores or job_values.STORES)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What to plan.

    Attributes:
        given: settings of `foreload train`, by name.
        words: the schedule and the same settings, as words of the command line.
        deadline: the most time for all steps, in seconds.
        budget: the highest cost, in core hours.
        history: the path of the history of profiles. If None, the default one.
        gb_price: the price of a GB hour, in core hours.
    """

    schedule: str
    given: Mapping[str, Any]
    words: Sequence[str]
    pool: Pool
    deadline: float | None = None
    budget: float | None = None
    history: str | None = None
    gb_price: float = GB_PRICE


@dataclass(slots=True)
class _Known:
    """The profiles of jobs like the planned one.

    Attributes:
        profiles: all of them.
        probed: the configurations that were run for this plan, in words.
    """

    profiles: list[history.Profile] = field(default_factory=list)
    probed: list[str] = field(default_factory=list)


def request_of(schedule: str, given: Mapping[str, Any], job_file: str | None, pool: Pool, **further: Any) -> PlanRequest:
    """Make a request from the settings of the command line.

    Raises:
        SettingError: a setting or the job file is malformed.
    """
    known = settings_of(TrainJob)
    in_file = {} if job_file is None else read_job_file(job_file, "train", TrainJob, ["json"])
    in_file.pop("json", None)
    words = [schedule] + ([] if job_file is None else ["--job", job_file])
    for name, value in given.items():
        if name not in DECIDED:
            words += [known[name].flag, *(value if isinstance(value, list) else [str(value)])]
    values = {name: value for name, value in (in_file | dict(given)).items() if name not in DECIDED or name == "parity"}
    return PlanRequest(schedule, values, words, pool, **further)


def run(request: PlanRequest, log: Log) -> dict[str, Any]:
    """Make a plan.

    Args:
        log: called with each message for the user.

    Returns:
        The plan, in the form that `--json` writes.

    Raises:
        SettingError: a setting is malformed.
        ScheduleError: the schedule cannot be read.
        PlanError: no configuration fits the pool, or nothing is known of the time of a step.
    """
    schedule = Schedule(request.schedule)
    job = TrainJob.of({**request.given, "schedule": request.schedule, "run": "plan", "store": "local:5"})
    numerics.set_environment(job.cpu_capability, job.threads)
    # This import loads torch, which reads the environment that was just set.
    from foreload.trainer.assembly.assembly import DenseModel

    model = DenseModel.build(replace(job, device="cpu"), schedule)
    settings = settings_of_job(job, schedule, model)
    setups = setups_of(job, settings, request.pool)
    known = _known(request, settings, setups, log)
    choices, step_model = predicted_choices(
        job, schedule, model.layouts, settings, setups, _by_slots(schedule, log), known.profiles
    )
    within = [one for one in choices if one.memory_bytes <= request.pool.memory_bytes]
    if not within:
        least = min(one.memory_bytes for one in choices)
        raise PlanError(
            f"--pool: memory must be at least {least / 2**30:.2f} GiB for any choice; got {request.pool.memory_bytes / 2**30:.2f} GiB; "
            "give more, or prepare with fewer --slots"
        )
    return _result(request, schedule, settings, known, step_model, within, len(choices) - len(within))


def predicted_choices(
    job: TrainJob,
    schedule: Schedule,
    layouts: Sequence[RowLayout],
    settings: Mapping[str, Any],
    setups: Sequence[Setup],
    by_slots: Sequence[StepCounts],
    profiles: Sequence[history.Profile],
) -> tuple[list[Choice], StepModel]:
    """Return what every configuration is predicted to take, and the model that predicts it.

    Args:
        layouts: the row layout of each table.
        settings: as from `settings_of_job`.
        by_slots: the counts of the schedule's steps for each number of slots.
        profiles: at least one, of jobs like this one.
    """
    step_model = StepModel.of_profiles(profiles)
    memory = JobMemory.of(schedule, layouts, profiles, job.saves_checkpoints, job.dense_ema is not None)
    state = settings["columns"] - settings["weights"]
    choices = []
    for counts in by_slots:
        for setup in setups:
            load, steps = loads_of(counts, setup, settings["weights"], state, settings["dense_parameters"])
            predicted = step_model.predict(setup, load)
            total, low, high = (
                float(ms @ steps) * step_model.tail / 1000 for ms in (predicted.total, predicted.low, predicted.high)
            )
            # Each trainer keeps its cores busy. The work that the threads of its steps do not do
            # runs on other cores.
            further = np.maximum(predicted.processor - predicted.thread / setup.share, 0.0)
            busy = setup.trainers * setup.threads + float(further @ steps) / max(float(predicted.total @ steps), 1e-9)
            choices.append(Choice(
                setup.trainers, setup.threads, setup.shards, str(Parity(setup.k, setup.r)), setup.copies,
                counts.slots, counts.slots == max(schedule.slots),
                total, low, high, 1000 * total / max(counts.steps, 1), min(busy, setup.cores),
                memory.trainer_bytes(setup, counts), memory.store_bytes(setup),
            ))  # fmt: skip
    return choices, step_model


def _result(
    request: PlanRequest,
    schedule: Schedule,
    settings: Mapping[str, Any],
    known: _Known,
    model: StepModel,
    choices: Sequence[Choice],
    too_large: int,
) -> dict[str, Any]:
    best = front(choices, request.gb_price)
    chosen, reason = choose(choices, request.gb_price, request.deadline, request.budget)

    def entry(one: Choice) -> dict[str, Any]:
        return {
            **asdict(one), "memory_bytes": one.memory_bytes, "core_hours": one.core_hours, "gb_hours": one.gb_hours,
            "cost": one.cost(request.gb_price), "on_front": one in best, "commands": commands(one, request, schedule),
        }  # fmt: skip

    return {
        "schedule": request.schedule,
        "steps": schedule.manifest["counts"]["training_steps"],
        "pool": asdict(request.pool),
        "settings": {name: settings[name] for name in ("model", "dim", "batch_size", "lanes", "slots", "threads")},
        "profiles": len(known.profiles),
        "probed": known.probed,
        "confidence": CONFIDENCE,
        "margin": model.margin,
        "gb_price": request.gb_price,
        "terms": model.coefficients,
        "choice": {**entry(chosen), "reason": reason},
        "front": [entry(one) for one in best],
        "choices": [entry(one) for one in choices],
        "too_large": too_large,
    }


def commands(one: Choice, request: PlanRequest, schedule: Schedule) -> list[str]:
    """Return the command lines that give a choice.

    There is a `prepare` line if the choice has other slots than the schedule, and a `train` line.
    """
    train = list(request.words)
    lines = []
    if one.slots != max(schedule.slots):
        out = f"{Path(request.schedule)}-{one.slots}"
        train[0] = out
        lines.append(_prepare_line(schedule, one.slots, out))
    run = f"{Path(train[0]).name}-run"
    words = ["foreload", "train", *train, "--run", run, "--store", f"local:{one.shards}", "--trainers", str(one.trainers)]
    by_default = "2+1" if one.shards >= 3 else "off"
    if one.parity != by_default:
        words += ["--parity", one.parity]
    return [*lines, shlex.join(words)]


def _prepare_line(schedule: Schedule, slots: int, out: str) -> str:
    """Return the command line that prepares the schedule with other slots, to the folder `out`.

    Paths in it are relative to the working directory, or absolute.
    """
    try:
        provenance = parse_json((schedule.path / PROVENANCE).read_bytes())
        options, folder = provenance["options"], provenance["folder"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"foreload prepare ... --slots {slots} --out {shlex.quote(out)}"
    places: list[str] = []
    words: list[str] = []
    for known in settings_of(PrepareOptions).values():
        value = options.get(known.field)
        if known.field in ("slots", "memory_bytes", "row_bytes", "out", "overwrite", "json") or value in (
            None,
            [],
            known.default,
            "",
        ):
            continue
        if known.form == "places":
            places += [_from_here(one, folder) for one in value]
        elif known.form == "repeated":
            words += [word for one in value for word in (known.flag, _source_from_here(one, folder))]
        elif known.field in ("features", "after"):
            words += [known.flag, _from_here(value, folder)]
        else:
            words += [known.flag] if value is True else [known.flag, str(value)]
    return shlex.join(["foreload", "prepare", *places, *words, "--slots", str(slots), "--out", out])


def _from_here(path: str, folder: str) -> str:
    """Return a path that is relative to `folder` as a path for the working directory."""
    here = os.getcwd()
    if folder == here or os.path.isabs(path) or "://" in path:
        return path
    whole = os.path.normpath(os.path.join(folder, path))
    return os.path.relpath(whole, here) if whole.startswith(here + os.sep) else whole


def _source_from_here(source: str, folder: str) -> str:
    """Return an --eval-source for the working directory.

    The source is a path that is relative to `folder`, or NAME=PATH.
    """
    named = re.fullmatch(rf"({SET_NAME}=)(.+)", source, re.DOTALL)
    if named is None or os.path.exists(os.path.join(folder, source)):
        return _from_here(source, folder)
    return named[1] + _from_here(named[2], folder)


def setups_of(job: TrainJob, settings: Mapping[str, Any], pool: Pool) -> list[Setup]:
    """Return the configurations to choose from.

    Every trainer has its own cores. Every number of shards is tried, with the parity of the job or,
    if none was given, with and without parity.

    Raises:
        PlanError: the pool has too few store shards for the parity.
    """
    most = max(min(settings["lanes"], pool.cores // job.threads), 1)
    setups = []
    for trainers in range(1, most + 1):
        copies = replace(job, trainers=trainers).replicas_held
        for shards in range(1, pool.stores + 1):
            parities = [Parity(1, 0), Parity(2, 1)] if job.parity is None else [job.parity]
            setups += [
                Setup(
                    trainers,
                    job.threads,
                    copies,
                    shards,
                    code.k,
                    code.r,
                    settings["lanes"],
                    settings["dense_parameters"],
                    pool.cores,
                )
                for code in parities
                if not code.r or sum(code) <= shards
            ]
    if not setups:
        raise PlanError(
            f"--pool: stores must be at least {sum(job.parity or (1, 0))} for --parity {job.parity}; got {pool.stores}; give more"
        )
    return setups


def _known(request: PlanRequest, settings: Mapping[str, Any], setups: Sequence[Setup], log: Log) -> _Known:
    """Return the profiles of jobs like this one, on a machine like this one.

    A kind of configuration that has no profile is run for a moment.

    Raises:
        TrainerError: such a short run failed.
        PlanError: the schedule is too short for a profile.
    """
    from foreload.trainer.commands.plan_probe import Probe, probe

    path, here = history.history_path(request.history), machine()
    known = _Known()
    try:
        read = [] if path is None else history.read(path)
    except HistoryError as error:
        log(f"warning: {error}")
        path, read = None, []
    known.profiles = [one for one in read if is_usable(one, settings, here)]
    seen = {(int(one.settings["trainers"]), int(one.settings["r"]) > 0) for one in known.profiles}
    for setup in _corners(setups):
        if (setup.trainers, setup.r > 0) in seen:
            continue
        one = Probe(setup.trainers, setup.shards, str(Parity(setup.k, setup.r)))
        profile = probe(one, request.words, log)
        known.probed.append(str(one))
        if observation_of(profile) is not None:
            known.profiles.append(profile)
        if path is not None:
            try:
                history.add(path, profile)
            except HistoryError as error:
                log(f"warning: {error}")
                path = None
    if not known.profiles:
        raise PlanError(
            f"schedule {request.schedule}: is too short to show how long a step takes; train it, or plan with a longer one"
        )
    return known


def is_usable(profile: history.Profile, settings: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Return whether a profile can be used to predict this job on this machine.

    The profile must be of a like job on a like machine, and of undisturbed training: one term, the
    same servers throughout, no trainers on other hosts, no checkpoints.
    """
    return (
        alike(profile.settings, settings)
        and all(profile.machine.get(name) == here[name] for name in ("cpu", "cores"))
        and profile.settings["terms"] == 1
        and profile.settings.get("same_servers", True)
        and profile.settings["trainers"] == profile.settings["trainers_here"]
        and not profile.settings["saves_checkpoints"]
        and observation_of(profile) is not None
    )


def _corners(setups: Sequence[Setup]) -> list[Setup]:
    """Return the configurations of which a profile is needed: with 1, 2 and the most trainers.

    For each, the fewest shards. With parity, the most shards for the most trainers.
    """
    trainers = sorted({one.trainers for one in setups})
    corners = []
    for number in sorted({trainers[0], trainers[-1], min(2, trainers[-1])}):
        for r in sorted({one.r for one in setups}):
            of_it = [one for one in setups if one.trainers == number and one.r == r]
            # With parity, the most trainers get the most shards. This shows what several shards
            # cost.
            corners.append(of_it[-1] if r and number == trainers[-1] else of_it[0])
    return corners


def _by_slots(schedule: Schedule, log: Log) -> list[StepCounts]:
    """Return the schedule's step counts, and those for other numbers of slots.

    The numbers range from the fewest possible to one slot for each row. If memory is short, only
    the schedule's own counts are returned.
    """
    stated = step_counts(schedule)
    needed = BYTES_OF_USE * schedule.manifest["counts"]["rows_used"]
    if needed > available_bytes() / 2:
        log(f"other numbers of slots are not tried: counting the rows that they would move takes {needed / 2**30:.1f} GiB")
        return [stated]
    accesses = [lane_uses(schedule, lane) for lane in range(schedule.header.lanes)]
    return [
        stated if slots == stated.slots else with_slots(stated, accesses, slots) for slots in slot_counts(accesses, stated.slots)
    ]


def slot_counts(accesses: Sequence[LaneUses], own: int) -> list[int]:
    """Return the numbers of slots to try, in ascending order.

    These are the schedule's own, the fewest that every step allows, all rows of a lane, and some
    between.

    Args:
        accesses: the row uses of each lane.
        own: the schedule's own number of slots.
    """
    least, most = (max(1, *of_lanes) for of_lanes in zip(*((one.least_slots, len(one.new)) for one in accesses), strict=True))
    between = np.geomspace(least, most, _SLOT_COUNTS + 2).round().astype(int).tolist()
    # The numbers are rounded up to two digits, which is exact enough and easier to read.
    rounded = [int(-(-slots // (step := 10 ** max(len(str(slots)) - 2, 0))) * step) for slots in between[1:-1]]
    return sorted({own, least, most, *(slots for slots in rounded if least < slots < most)})


def check_writable(path: str | None) -> None:
    """Check that a picture can be drawn and written to `path`.

    Raises:
        PlanError: matplotlib is not installed, or the file cannot be written.
    """
    if path is None:
        return
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise PlanError("--plot: needs matplotlib, which is not installed; `pip install matplotlib`, or leave it out") from error
    if Path(local("--plot", path)).suffix not in (".png", ".svg", ".pdf"):
        raise PlanError(f"--plot: must be a file whose name ends in .png, .svg or .pdf; got {path}")
    folder = Path(path).absolute().parent
    if not os.access(folder, os.W_OK):
        raise PlanError(f"--plot: cannot write {path}: {folder} is not a writable folder; give another place")


_ROWS = 14  # choices of the front in the text; --json has all


def text(plan: dict[str, Any]) -> str:
    """Return the plan for the terminal."""
    settings, pool, choice = plan["settings"], plan["pool"], plan["choice"]
    profiles = f"{plan['profiles']} profile{'s' if plan['profiles'] != 1 else ''}"
    if plan["probed"]:
        profiles += f", {len(plan['probed'])} of them made now by short runs ({'; '.join(plan['probed'])})"
    lines = [
        f"schedule     {plan['schedule']}: {plan['steps']:,} steps of {settings['batch_size']:,} samples, {settings['lanes']} lane(s), "
        f"{settings['slots']:,} slots a lane",
        f"pool         {pool['cores']} cores, {pool['memory_bytes'] / GIB:.1f} GiB, up to {pool['stores']} store shards",
        f"based on     {profiles}",
        f"intervals    {plan['confidence']:.0%}: the time divided, and multiplied, by {1 + plan['margin']:.2f}",
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
    """Draw all choices by time and cost, with the front and the chosen one.

    Raises:
        PlanError: the file cannot be written.
    """
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
        label="no other choice is better",
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
