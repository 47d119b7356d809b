"""What a run is and how far it is: the contents of manifest.json and status.json."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from foreload.base.codec import Amount, Count, LeftOut, Name, Natural, RelativePath, Step, between, filled, to_stored
from foreload.base.errors import SettingError
from foreload.base.settings import names_by_resume, settings_of, spelled
from foreload.cache.parity.placement import MOST_SHARDS
from foreload.pipelines.schedule.format import MOST_LANES
from foreload.trainer.compute.numerics import mixed_text
from foreload.trainer.job.job import TrainJob
from foreload.trainer.job.metric_choice import Watched

if TYPE_CHECKING:
    from foreload.pipelines.schedule.reader import Schedule

VERSION = 1
RATE_SETTINGS = names_by_resume(TrainJob, "rates")
"""Settings that the trained model depends on, but that may change when a run is resumed.

The manifest records from which step on each value applied.
"""

State = Literal["training", "stopped", "ended"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A schedule that the run trained or trains on.

    Attributes:
        identity: SHA-256 of the schedule's header.
        checksum: SHA-256 of its schedule.json, or None while the schedule is being prepared.
        end_step: the step after its last one.
        segments: the number of segments that training began.
        prefix: identifies these segments (Schedule.prefix).
        program: as in Header; "" if it was not recorded.
    """

    path: Annotated[str, filled]
    identity: Name
    checksum: str | None
    first_step: Count
    end_step: Count
    segments: Count = 0
    prefix: str = ""
    program: str = ""

    @classmethod
    def of(cls, schedule: Schedule) -> Stage:
        """Return the stage of a schedule in its present state."""
        checksum = schedule.checksum if schedule.complete else None
        header = schedule.header
        path = str(schedule.path.absolute())
        return cls(path, schedule.identity, checksum, header.first_step, header.end_step, program=header.program)


@dataclass(frozen=True, slots=True)
class CodeFile:
    """A file of the user's model.

    Attributes:
        name: its path in a copy of the user's folder.
        path: where it was loaded from.
        text: its contents, or None if it is not text.
    """

    name: RelativePath
    path: str
    sha256: str
    text: str | None

    @classmethod
    def of(cls, name: str, path: Path) -> CodeFile:
        """Read the file, and return it with its checksum."""
        data = path.read_bytes()
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = None
        return cls(name, str(path), hashlib.sha256(data).hexdigest(), text)


def code_sums(code: Sequence[CodeFile]) -> dict[str, str]:
    """Return the checksums of files, by name."""
    return {file.name: file.sha256 for file in code}


def write_code(folder: Path, code: Sequence[CodeFile]) -> None:
    """Write a copy of a model's files into a folder, except files that are not text."""
    for file in code:
        if file.text is not None:
            (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
            (folder / file.name).write_bytes(file.text.encode())


@dataclass(frozen=True, slots=True)
class Inexact:
    """Records that a run was restored from a checkpoint with rounded weights.

    Attributes:
        since: the step of the first such checkpoint.
        bits: the smallest number of bits that a weight had.
        restores: how often this happened.
    """

    since: Step
    bits: Natural
    restores: Count


class OtherNumerics(TypedDict):
    """The numerics fingerprint of a run from a step on."""

    step: Count
    fingerprint: dict[str, Any]


class OtherCode(TypedDict):
    """The code of a run's model from a step on: checksums by file name."""

    step: Count
    code: dict[str, str]


class OtherRates(TypedDict):
    """The learning rates (RATE_SETTINGS) of a run from a step on."""

    step: Count
    lr: float
    lr_schedule: str | None
    dense_lr: float
    dense_lr_schedule: str | None
    dense_clip: float | None


def rates_text(rates: Sequence[Mapping[str, Any]]) -> str:
    """Describe, in a line, how the learning rates of a run changed.

    Args:
        rates: as in Manifest; at least two entries.
    """
    since = []
    for before, now in pairwise(rates):
        changed = [name for name in now if name != "step" and now[name] != before[name]]
        words = ", ".join(f"{spelled(name)} {now[name]} ({before[name]} before)" for name in changed)
        since.append(f"from step {now['step']} on {words}")
    return f"learning rates: {'; '.join(since)}"


def code_text(mixed_code: Sequence[Mapping[str, Any]]) -> str:
    """Describe, in a line, how the code of a run's model changed.

    Args:
        mixed_code: as in Manifest; at least two entries.
    """
    since = []
    for before, now in pairwise(mixed_code):
        differing = {*before["code"].items()} ^ {*now["code"].items()}
        since.append(f"from step {now['step']} on {', '.join(sorted({name for name, _ in differing}))}")
    return f"code of the model changed: {'; '.join(since)}"


def inexact_text(inexact: InexactEntry) -> str:
    """Describe, in a line, why a model is inexact."""
    return f"inexact since step {inexact['since']}: {inexact['bits']} bits a weight, restored {inexact['restores']} times"


class InexactEntry(TypedDict):
    """`Inexact`, as JSON."""

    since: int
    bits: int
    restores: int


class Caveats(TypedDict):
    """What a model depends on besides the data and the settings, as JSON."""

    mixed_numerics: list[OtherNumerics]
    rates: list[OtherRates]
    mixed_code: list[OtherCode]
    inexact: InexactEntry | None


def caveat_lines(caveats: Mapping[str, Any]) -> list[str]:
    """Return a line for each thing that a model depends on besides the data and the settings.

    Args:
        caveats: has at least the entries of `Manifest.caveats`.
    """
    texts: dict[str, Callable[[Any], str]] = {
        "mixed_numerics": mixed_text,
        "rates": rates_text,
        "mixed_code": code_text,
        "inexact": inexact_text,
    }
    return [text(caveats[name]) for name, text in texts.items() if caveats[name]]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a run is.

    Attributes:
        run_id: drawn at random when the run is created.
        job: its settings as in TrainJob.to_dict, without those declared stated=False.
        namespace: its name on the store.
        store_urls: URLs of its servers without passwords; empty for local stores.
        local_stores: the number of local stores, or None.
        stages: its schedules, in order.
        fingerprint: the numerics fingerprint of its last training.
        mixed_numerics: if the run was resumed under another fingerprint, {"step", "fingerprint"} of
            each in order, "step" being the first step under it; else empty.
        inexact: None if the model is exactly, to the bit, that of the data and the settings.
        rates: if the run was resumed with other learning rates, {"step"} and RATE_SETTINGS of
            each, as in mixed_numerics.
        watched: if the run may stop early, the evaluation results of its last schedule so far, up
            to where the run stopped or, in a checkpoint, was saved.
        code: the files of the user's model and loss in the last training. Empty for a built-in
            model, and for runs of earlier versions.
        mixed_code: if the run was resumed with other code, {"step", "code"} of each, as in
            mixed_numerics; "code" has the checksums by name.
        former_urls: servers that the run no longer uses but that may still have its rows. `delete`
            and `--overwrite` check them too.
        mixes_samples: whether the model declares that an output depends on the other samples of a
            slice.
    """

    run_id: Name
    job: dict[str, Any]
    namespace: str
    lanes: Annotated[int, between(1, MOST_LANES)]
    store_urls: tuple[str, ...]
    local_stores: Annotated[int, between(1, MOST_SHARDS)] | None
    stages: Annotated[tuple[Stage, ...], filled]
    fingerprint: dict[str, Any] | None = None
    mixed_numerics: tuple[OtherNumerics, ...] = ()
    version: int = VERSION
    inexact: Inexact | None = None
    rates: tuple[OtherRates, ...] = ()
    watched: LeftOut[Watched | None] = None
    code: LeftOut[tuple[CodeFile, ...]] = ()
    mixed_code: LeftOut[tuple[OtherCode, ...]] = ()
    former_urls: LeftOut[tuple[str, ...]] = ()
    mixes_samples: LeftOut[bool] = False

    @property
    def identity(self) -> dict[str, Any]:
        """Identifies the run in the note that every shard holds about who owns the namespace."""
        return {"run": self.run_id, "lanes": self.lanes}

    def under(self, fingerprint: dict[str, Any], step: int) -> Manifest:
        """Return the manifest of this run, resumed under a numerics fingerprint.

        Args:
            step: the first training step under it.
        """
        if self.fingerprint is None or self.fingerprint == fingerprint:
            return replace(self, fingerprint=fingerprint)
        mixed = self._since(self.mixed_numerics, step, {"fingerprint": self.fingerprint}, {"fingerprint": fingerprint})
        return replace(self, fingerprint=fingerprint, mixed_numerics=mixed)

    def with_rates(self, job: TrainJob, step: int) -> Manifest:
        """Return the manifest of this run, resumed with the learning rates of a job.

        Args:
            step: the first training step with them.
        """
        before, now = ({name: of.to_dict()[name] for name in RATE_SETTINGS} for of in (self.training_job, job))
        if before == now:
            return self
        return replace(self, job=self.job | now, rates=self._since(self.rates, step, before, now))

    def with_code(self, code: tuple[CodeFile, ...], step: int) -> Manifest:
        """Return the manifest of this run, resumed with this code of its model.

        Args:
            step: the first training step with it.
        """
        before, now = code_sums(self.code), code_sums(code)
        mixed = (
            self._since(self.mixed_code, step, {"code": before}, {"code": now})
            if self.code and before != now
            else self.mixed_code
        )
        return replace(self, code=code, mixed_code=mixed)

    def _since(self, entries: Sequence[Any], step: int, before: dict[str, Any], now: dict[str, Any]) -> tuple[Any, ...]:
        """Add a change to a list of values and their first steps.

        Args:
            entries: the list so far; empty if nothing has changed yet.
            step: the first step of the new value.
            before: the value until then.
            now: the new value.

        Returns:
            The new list, or () if only one value was ever used.
        """
        # With a value that was set at this step or later, nothing was trained.
        kept = [one for one in entries or ({"step": self.stages[0].first_step, **before},) if one["step"] < step]
        if not kept or kept[-1] != {"step": kept[-1]["step"], **now}:
            kept.append({"step": step, **now})
        return tuple(kept) if len(kept) > 1 else ()

    @property
    def caveats(self) -> Caveats:
        """What the model depends on besides the data and the settings."""
        return {
            "mixed_numerics": list(self.mixed_numerics),
            "rates": list(self.rates),
            "mixed_code": list(self.mixed_code),
            "inexact": to_stored(self.inexact),
        }

    @property
    def steps(self) -> int:
        """The number of training steps of all its schedules."""
        return self.stages[-1].end_step - self.stages[0].first_step

    @property
    def rounded_restores(self) -> int:
        """How often the run was restored from a checkpoint with rounded weights."""
        return 0 if self.inexact is None else self.inexact.restores

    @property
    def training_job(self) -> TrainJob:
        """The job that the run was started with. Raises SettingError for malformed settings."""
        try:
            return TrainJob.of(self.job)
        except SettingError as error:
            raise SettingError(f"the settings that the run recorded: {error}") from error


@dataclass(frozen=True, slots=True)
class Status:
    """How far a run is.

    While `state` is "training", also after trainers died in that state, the other fields describe
    the last clean stop, at which the call began and to which the saved dense part belongs.

    Attributes:
        step: the last step that was trained, or first_step - 1 if none was.
        batches: for each lane, the number of its last write-back batch.
        totals: the sums of the metrics so far.
        lost: lost store shards, whose rows can only be decoded from their stripes.
        term: the highest term in which the run's lanes were ever owned. Each call of `train` begins
            with the next one. 0 if an earlier version, which had no terms, wrote the status.
    """

    state: State
    step: Step
    batches: dict[str, Count] = field(default_factory=dict)
    totals: dict[str, Amount] = field(default_factory=dict)
    lost: list[Annotated[int, between(0, MOST_SHARDS - 1)]] = field(default_factory=list)
    term: Count = 0

    @property
    def last_batches(self) -> tuple[int, ...]:
        """The number of each lane's last write-back batch."""
        return tuple(int(self.batches[str(lane)]) for lane in range(len(self.batches)))


def new_manifest(
    job: TrainJob, schedule: Schedule, store_urls: tuple[str, ...], local_stores: int | None, code: tuple[CodeFile, ...] = ()
) -> Manifest:
    """Return the manifest of a new run.

    Args:
        store_urls: the servers' URLs, without passwords.
        local_stores: the number of local stores, or None.
        code: as in Manifest.
    """
    return Manifest(
        run_id=secrets.token_hex(8),
        job=_saved(job, store_urls, local_stores),
        namespace=job.run_namespace,
        lanes=schedule.header.lanes,
        store_urls=() if local_stores else store_urls,
        local_stores=local_stores,
        stages=(Stage.of(schedule),),
        code=code,
    )


def _saved(job: TrainJob, store_urls: tuple[str, ...], local_stores: int | None) -> dict[str, Any]:
    stated = {name for name, setting in settings_of(TrainJob).items() if setting.stated}
    saved = {name: value for name, value in job.to_dict().items() if name in stated}
    if ":" in job.model or job.loss is not None:
        # Later commands may be called in another working folder.
        saved["model_folder"] = os.path.abspath(job.model_folder)
    store = f"local:{local_stores}" if local_stores else ",".join(store_urls)
    return saved | {"store": store, "checkpoint": remembered_folder(job)}


def remembered_folder(job: TrainJob) -> str | None:
    """Return the folder of checkpoints to record for later calls, which may run in another folder.

    If None, checkpoints are saved in the run's folder.
    """
    if job.checkpoint is None or "://" in job.checkpoint:
        return job.checkpoint
    return os.path.abspath(job.checkpoint)
