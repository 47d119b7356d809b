"""What a run is, and how far it is: the contents of manifest.json and status.json."""

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
"""Settings that the trained model depends on, and with other ones of which a run may go on: it notes since which step."""

State = Literal["training", "stopped", "ended"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A schedule that the run trained or trains on.

    identity: SHA-256 of its header; checksum: of its schedule.json, None while that is being prepared; end_step: the step after its last. segments:
    how many were begun; prefix: what identifies these (Schedule.prefix). program: as Header has it; "" where that was not noted.
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
        """The stage of a schedule as it is now."""
        checksum = schedule.checksum if schedule.complete else None
        header = schedule.header
        path = str(schedule.path.absolute())
        return cls(path, schedule.identity, checksum, header.first_step, header.end_step, program=header.program)


@dataclass(frozen=True, slots=True)
class CodeFile:
    """A file of the user's model. name: in a copy of the user's folder; path: where it was loaded from; text: None where it is no text."""

    name: RelativePath
    path: str
    sha256: str
    text: str | None

    @classmethod
    def of(cls, name: str, path: Path) -> CodeFile:
        """The file as it is now."""
        data = path.read_bytes()
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = None
        return cls(name, str(path), hashlib.sha256(data).hexdigest(), text)


def code_sums(code: Sequence[CodeFile]) -> dict[str, str]:
    """The checksums of files, by name."""
    return {file.name: file.sha256 for file in code}


def write_code(folder: Path, code: Sequence[CodeFile]) -> None:
    """Write a copy of a model's files into a folder, but for those that are no text."""
    for file in code:
        if file.text is not None:
            (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
            (folder / file.name).write_bytes(file.text.encode())


@dataclass(frozen=True, slots=True)
class Inexact:
    """That a run went on from a checkpoint with rounded weights. since: the step after which it was first so; bits: the fewest that weights had;
    restores: how often.
    """

    since: Step
    bits: Natural
    restores: Count


class OtherNumerics(TypedDict):
    """Under which numerics a run went on, from which step."""

    step: Count
    fingerprint: dict[str, Any]


class OtherCode(TypedDict):
    """With which code of its model a run went on, from which step: checksums by name."""

    step: Count
    code: dict[str, str]


class OtherRates(TypedDict):
    """With which learning rates a run went on, from which step: RATE_SETTINGS."""

    step: Count
    lr: float
    lr_schedule: str | None
    dense_lr: float
    dense_lr_schedule: str | None
    dense_clip: float | None


def rates_text(rates: Sequence[Mapping[str, Any]]) -> str:
    """A line about a run that went on with other learning rates. rates: as in Manifest, two at least."""
    since = []
    for before, now in pairwise(rates):
        changed = [name for name in now if name != "step" and now[name] != before[name]]
        words = ", ".join(f"{spelled(name)} {now[name]} ({before[name]} before)" for name in changed)
        since.append(f"from step {now['step']} on {words}")
    return f"learning rates: {'; '.join(since)}"


def code_text(mixed_code: Sequence[Mapping[str, Any]]) -> str:
    """A line about a run that went on with other code of its model. mixed_code: as in Manifest, two at least."""
    since = []
    for before, now in pairwise(mixed_code):
        differing = {*before["code"].items()} ^ {*now["code"].items()}
        since.append(f"from step {now['step']} on {', '.join(sorted({name for name, _ in differing}))}")
    return f"code of the model changed: {'; '.join(since)}"


def inexact_text(inexact: InexactEntry) -> str:
    """A line about a model that is inexact."""
    return f"inexact since step {inexact['since']}: {inexact['bits']} bits a weight, restored {inexact['restores']} times"


class InexactEntry(TypedDict):
    """Inexact, as JSON has it."""

    since: int
    bits: int
    restores: int


class Caveats(TypedDict):
    """What a model depends on besides the data and the settings, as JSON has it."""

    mixed_numerics: list[OtherNumerics]
    rates: list[OtherRates]
    mixed_code: list[OtherCode]
    inexact: InexactEntry | None


def caveat_lines(caveats: Mapping[str, Any]) -> list[str]:
    """A line about each thing that a model depends on besides the data and the settings. caveats: with what `Manifest.caveats` has."""
    texts: dict[str, Callable[[Any], str]] = {
        "mixed_numerics": mixed_text, "rates": rates_text, "mixed_code": code_text, "inexact": inexact_text,
    }  # fmt: skip
    return [text(caveats[name]) for name, text in texts.items() if caveats[name]]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a run is. run_id: drawn when it was made; job: its settings as TrainJob.to_dict has them, without those declared stated=False;
    namespace: its name on the store. store_urls carry no passwords and are empty for local stores; local_stores: how many, or None. stages: in
    order.

    fingerprint: of the numerics it was trained under last. mixed_numerics: where it went on under another one, {"step", "fingerprint"} of each
    in order, step the first under it; else empty. rates: the same where it went on with other learning rates, {"step"} and RATE_SETTINGS of each.
    code: the files of the user's model and loss that it was trained with last; empty for a built-in one, and where an earlier version trained it.
    mixed_code: as mixed_numerics, where it went on with other code, {"step", "code"}, the checksums by name.
    mixes_samples: whether its model declares that an output depends on the other samples of a slice.
    former_urls: servers that the run no longer uses and that may still have rows of it; `delete` and `--overwrite` ask them, too.
    inexact: None where its model is that of the data and the settings, to the bit. watched: where it may stop early, what evaluations of its last
    schedule have been, up to where it rests or, in a checkpoint, that was saved.
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
        """What stands beside the rows on every shard, and says whose the namespace is."""
        return {"run": self.run_id, "lanes": self.lanes}

    def under(self, fingerprint: dict[str, Any], step: int) -> Manifest:
        """This run as it goes on under a fingerprint with the training step given."""
        if self.fingerprint is None or self.fingerprint == fingerprint:
            return replace(self, fingerprint=fingerprint)
        mixed = self._since(self.mixed_numerics, step, {"fingerprint": self.fingerprint}, {"fingerprint": fingerprint})
        return replace(self, fingerprint=fingerprint, mixed_numerics=mixed)

    def with_rates(self, job: TrainJob, step: int) -> Manifest:
        """This run as it goes on with the learning rates of a job with the training step given."""
        before, now = ({name: of.to_dict()[name] for name in RATE_SETTINGS} for of in (self.training_job, job))
        if before == now:
            return self
        return replace(self, job=self.job | now, rates=self._since(self.rates, step, before, now))

    def with_code(self, code: tuple[CodeFile, ...], step: int) -> Manifest:
        """This run as it goes on with other code of its model with the training step given."""
        before, now = code_sums(self.code), code_sums(code)
        mixed = (
            self._since(self.mixed_code, step, {"code": before}, {"code": now})
            if self.code and before != now
            else self.mixed_code
        )
        return replace(self, code=code, mixed_code=mixed)

    def _since(self, entries: Sequence[Any], step: int, before: dict[str, Any], now: dict[str, Any]) -> tuple[Any, ...]:
        """What a run went by, since which steps. entries: so far; before, now: what it went by until a step, and goes by from it on."""
        # By what was so before the same step, nothing was trained.
        kept = [one for one in entries or ({"step": self.stages[0].first_step, **before},) if one["step"] < step]
        if not kept or kept[-1] != {"step": kept[-1]["step"], **now}:
            kept.append({"step": step, **now})
        return tuple(kept) if len(kept) > 1 else ()

    @property
    def caveats(self) -> Caveats:
        """See Caveats."""
        return {
            "mixed_numerics": list(self.mixed_numerics),
            "rates": list(self.rates),
            "mixed_code": list(self.mixed_code),
            "inexact": to_stored(self.inexact),
        }

    @property
    def steps(self) -> int:
        """Training steps of all its schedules."""
        return self.stages[-1].end_step - self.stages[0].first_step

    @property
    def rounded_restores(self) -> int:
        """How often it went on from a checkpoint with rounded weights."""
        return 0 if self.inexact is None else self.inexact.restores

    @property
    def training_job(self) -> TrainJob:
        """The job as it was started. Raises SettingError for settings that are malformed."""
        try:
            return TrainJob.of(self.job)
        except SettingError as error:
            raise SettingError(f"the settings that the run notes: {error}") from error


@dataclass(frozen=True, slots=True)
class Status:
    """How far a run is: step, the last one trained (first_step - 1: none); batches: per lane, the number of its last write-back batch.

    totals: what the metrics so far add up to. While state is "training", and where trainers died in it, the others say where this call began: at
    the last clean stop, of which the dense part is. lost: store shards whose rows only their stripes give. term: the highest that the run's lanes
    were ever owned in; each call of `train` begins with the next (0: one of an earlier version, which had none).
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
    """The manifest of a run that begins; store_urls without passwords; code: as in Manifest."""
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
        # Commands that read the run may be called elsewhere.
        saved["model_folder"] = os.path.abspath(job.model_folder)
    store = f"local:{local_stores}" if local_stores else ",".join(store_urls)
    return saved | {"store": store, "checkpoint": remembered_folder(job)}


def remembered_folder(job: TrainJob) -> str | None:
    """Where a call saves checkpoints, for those that may be made elsewhere; None: in the run's folder."""
    if job.checkpoint is None or "://" in job.checkpoint:
        return job.checkpoint
    return os.path.abspath(job.checkpoint)
