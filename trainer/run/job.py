"""The settings of `foreload train`: each declared once, for the command line, the job file and the run's manifest alike."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from foreload.cache.parity.erasure import MOST_ROWS
from foreload.cache.rows.layout import ROW_OPTIMIZERS
from foreload.pipelines.base.settings import size_bytes
from foreload.pipelines.errors import SettingError
from foreload.pipelines.planning.options import MOST_LANES
from foreload.trainer.compute.row_optimizers import RowOptimizer

Kind = Literal["text", "integer", "number", "size", "switch", "options", "tables"]


@dataclass(frozen=True, slots=True)
class Setting:
    """How a field of TrainJob is given: its kind, help, bounds or choices; `state` ones describe this call, not the training."""

    kind: Kind
    help: str
    metavar: str | None = None
    least: float | None = None
    choices: tuple[str, ...] = ()
    state: bool = False


def _setting(default: Any, kind: Kind, help: str, **rest: Any) -> Any:
    metadata = {"setting": Setting(kind, help, **rest)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """One call of `foreload train`, checked. Raises SettingError; the message names the setting, the rule, the value and the remedy."""

    schedule: str = _setting("", "text", "the folder that `foreload prepare` wrote")
    run: str = _setting("", "text", "folder for everything this training leaves: model, metrics, summary", metavar="DIR")
    store: str = _setting(
        "", "text", "where rows live: local:N starts N redis-servers for this job, or the URLs of running ones, with commas between",
        metavar="local:N|URL,...",
    )  # fmt: skip
    trainers: int = _setting(
        1, "integer", "trainer processes; each hosts one or more of the schedule's lanes", metavar="N", least=1
    )
    model: str = _setting("dlrm", "text", "dlrm, wide_deep, dcn, deepfm, package.module:Class, or file.py:Class", metavar="MODEL")
    model_folder: str = _setting(
        "",
        "text",
        "folder of a --model of one's own, remembered by the run; by default the one where this is called",
        metavar="DIR",
    )
    dim: int = _setting(32, "integer", "columns of an embedding, for tables whose feature file gives none", metavar="D", least=1)
    row_optimizer: str = _setting("adagrad", "text", "optimizer of the embedding rows", choices=ROW_OPTIMIZERS)
    lr: float = _setting(0.05, "number", "learning rate of the rows", metavar="X", least=0)
    dense_optimizer: str = _setting("Adagrad", "text", "optimizer of the dense part, as torch.optim names it", metavar="NAME")
    dense_lr: float = _setting(0.01, "number", "learning rate of the dense part", metavar="X", least=0)
    seed: int = _setting(0, "integer", "seed of the initial model and of everything random in training", metavar="S", least=0)
    model_options: dict[str, Any] = _setting({}, "options", "options of the model, such as top=64-32-1", metavar="K=V")
    dense_options: dict[str, Any] = _setting({}, "options", "options of the dense optimizer, such as momentum=0.9", metavar="K=V")
    tables: dict[str, dict[str, Any]] = _setting(
        {}, "tables", "job file only: row-optimizer and lr of single tables, in [train.tables.NAME]"
    )
    threads: int = _setting(
        1, "integer", "threads of the arithmetic in each trainer; part of the numerics fingerprint", metavar="T", least=1
    )
    cpu_capability: str = _setting(
        "avx2", "text", "vector instructions of the arithmetic, which every host of the run must have; part of the numerics fingerprint",
        choices=("avx2", "avx512"),
    )  # fmt: skip
    device: str = _setting("cpu", "text", "where the partitions and the dense part live", choices=("cpu", "cuda"))
    memory: str | None = _setting(
        None, "size", "most bytes a lane's slots may take; the schedule's own bound by default", metavar="SIZE"
    )
    namespace: str | None = _setting(
        None, "text", "name of the run on the store; the name of the run's folder by default", metavar="NAME"
    )
    parity: str | None = _setting(
        None, "text", "off, or K+R: any R of K+R store shards may be lost; by default 2+1 with three or more shards, else off",
        metavar="off|K+R",
    )  # fmt: skip
    spare: str | None = _setting(
        None, "text", "URLs of servers, empty ones, to take the place of store shards that are lost and do not come back",
        metavar="URL,...", state=True,
    )  # fmt: skip
    no_restart: bool = _setting(False, "switch", "do not start a server of local:N again when it has died", state=True)
    store_timeout: float | None = _setting(
        None, "number", "seconds of silence after which a store shard counts as lost; by default 1 with parity, else 10", metavar="S",
        least=0.1,
    )  # fmt: skip
    peer_timeout: float = _setting(
        300.0, "number", "seconds of silence after which a trainer counts as lost", metavar="S", least=0.1
    )
    address: str = _setting("127.0.0.1", "text", "address of this machine that the other trainers reach", metavar="HOST")
    follow: bool = _setting(False, "switch", "start while the schedule is still being prepared", state=True)
    resume: bool = _setting(
        False, "switch", "go on with a run that was stopped, or with the schedule prepared after it", state=True
    )
    accept_numerics: bool = _setting(
        False, "switch", "with --resume: go on although this machine's arithmetic is not the run's; the run then says from which step on",
        state=True,
    )  # fmt: skip
    overwrite: bool = _setting(
        False, "switch", "delete what the run's folder and its namespace on the store hold, and start anew", state=True
    )
    allow_nan: bool = _setting(
        False, "switch", "go on where a loss is NaN or infinite, instead of stopping before that step", state=True
    )
    digest: bool = _setting(False, "switch", "compute the digest of the trained model at the end", state=True)

    def __post_init__(self) -> None:
        for name, setting in settings().items():
            _check(name, setting, getattr(self, name))
        for name in ("schedule", "run", "store"):
            if not getattr(self, name):
                raise SettingError(f"{flag(name)}: is missing; give it on the command line or in the job file")
        if self.resume and self.overwrite:
            raise SettingError(
                "--resume and --overwrite: only one of them can be given; --overwrite deletes the run that --resume continues"
            )
        if self.accept_numerics and not self.resume:
            raise SettingError("--accept-numerics: is for a run that goes on; give it with --resume, or leave it out")
        if self.trainers > MOST_LANES:
            raise SettingError(f"--trainers: must be at most {MOST_LANES}, the most lanes there are; got {self.trainers}")
        if self.namespace is not None and not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", self.namespace):
            raise SettingError(
                f"--namespace: must be 1 to 64 letters, digits, dots, dashes or underscores; got {self.namespace!r}"
            )
        self.row_optimizers()
        if local_shards(self.store) and self.spare:
            raise SettingError(
                f"--spare: is for servers that --store names by URL; {self.store} starts dead servers again by itself"
            )
        if self.parity is not None:
            parse_parity(self.parity)

    def code(self, shards: int) -> tuple[int, int]:
        """K and R for a store of so many shards; (1, 0) without parity. Raises SettingError where they are too few."""
        if self.parity is None:
            return (2, 1) if shards >= 3 else (1, 0)
        k, r = parse_parity(self.parity)
        if r and k + r > shards:
            raise SettingError(f"--parity: {k}+{r} needs at least {k + r} store shards; got {shards}; give more, or --parity off")
        return k, r

    def row_optimizers(self) -> tuple[RowOptimizer, dict[str, RowOptimizer]]:
        """The row optimizer of all tables, and of those that the job file gives one of their own."""
        common = RowOptimizer(self.row_optimizer, float(self.lr))
        single: dict[str, RowOptimizer] = {}
        for table, own in self.tables.items():
            given = {key.replace("-", "_"): value for key, value in own.items()}
            unknown = sorted(set(given) - {"row_optimizer", "lr"})
            if unknown:
                raise SettingError(f"[train.tables.{table}]: knows row-optimizer and lr; got {unknown[0]}")
            lr = given.get("lr", self.lr)
            if isinstance(lr, bool) or not isinstance(lr, int | float):
                raise SettingError(f"[train.tables.{table}] lr: must be a number; got {lr!r}")
            single[table] = RowOptimizer(given.get("row_optimizer", self.row_optimizer), float(lr))
        return common, single

    @property
    def store_silence(self) -> timedelta:
        """How long a store shard may be silent."""
        if self.store_timeout is not None:
            return timedelta(seconds=self.store_timeout)
        # Where its rows are elsewhere too, a shard is better lost than waited for.
        return timedelta(seconds=1 if self.code(self.shards)[1] else 10)

    @property
    def shards(self) -> int:
        """How many store shards there are."""
        return local_shards(self.store) or self.store.count(",") + 1

    @property
    def peer_silence(self) -> timedelta:
        """How long another trainer may be silent."""
        return timedelta(seconds=self.peer_timeout)

    @property
    def memory_bytes(self) -> int | None:
        """Most bytes a lane's slots may take, where --memory was given."""
        return None if self.memory is None else size_bytes("--memory", self.memory)

    @property
    def run_namespace(self) -> str:
        """The name of the run on the store."""
        return self.namespace or re.sub(r"[^A-Za-z0-9_.-]", "_", Path(self.run).absolute().name)[:64] or "run"

    def to_dict(self) -> dict[str, Any]:
        """Every setting, as JSON and TOML can hold it."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> TrainJob:
        """A job from names (with dashes or underscores) and values; raises SettingError for an unknown name."""
        known = settings()
        given = {}
        for key, value in values.items():
            name = key.replace("-", "_")
            if name not in known:
                raise SettingError(f"job: no setting is called {key!r}; there are {', '.join(map(_spelled, known))}")
            given[name] = value
        return cls(**given)


def settings() -> dict[str, Setting]:
    """Every setting by its field's name, in order."""
    return {item.name: item.metadata["setting"] for item in dataclasses.fields(TrainJob)}


def flag(name: str) -> str:
    """The flag of a setting; the schedule has none."""
    return "SCHEDULE" if name == "schedule" else "--" + name.replace("_", "-")


def read_job_file(path: str) -> dict[str, Any]:
    """What the table [train] of a TOML file gives, a `name = value` for each flag of `train`; [train.model-options] and the like for the rest.

    The file may have a table [prepare] too. Names are spelled with dashes or underscores. Raises SettingError.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"--job: cannot read {path}: {error.strerror}; give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"--job: {path} is no TOML: {error}") from error
    unknown = sorted(set(document) - {"prepare", "train"})
    if unknown or not isinstance(document.get("train", {}), dict):
        raise SettingError(f"--job: {path} may have tables [prepare] and [train]; got {unknown[0] if unknown else 'train = ...'}")
    known = [*settings(), "json"]
    values = {}
    for key, value in document.get("train", {}).items():
        name = key.replace("-", "_")
        if name not in known:
            raise SettingError(f"--job {path}: [train] knows no {key!r}; it takes {', '.join(map(_spelled, sorted(known)))}")
        values[name] = value
    if not isinstance(values.get("json", ""), str):
        raise SettingError(f"--json: must be a path, not {values['json']!r}")
    return values


def _spelled(name: str) -> str:
    return name.replace("_", "-")


def masked(text: str) -> str:
    """A text for a message, the credentials of any URL in it hidden."""
    return re.sub(r"//[^ ]*@", "//***@", text)


def local_shards(store: str) -> int | None:
    """N of local:N, None for URLs. Raises SettingError."""
    if not store.startswith("local"):
        return None
    match = re.fullmatch(r"local:(\d{1,3})", store)
    if match is None or not int(match[1]):
        raise SettingError(f"--store: must be local:N with N from 1 to 999, or URLs with commas between; got {masked(store)!r}")
    return int(match[1])


def parse_parity(text: str) -> tuple[int, int]:
    """K and R of K+R; (1, 0) for off. Raises SettingError."""
    if text == "off":
        return 1, 0
    match = re.fullmatch(r"(\d{1,3})\+(\d{1,3})", text)
    if match is None or not int(match[1]) or not int(match[2]) or int(match[1]) + int(match[2]) > MOST_ROWS:
        raise SettingError(
            f"--parity: must be off, or K+R such as 2+1, both at least 1 and at most {MOST_ROWS} together; got {text!r}"
        )
    return int(match[1]), int(match[2])


def _check(name: str, setting: Setting, value: Any) -> None:
    if value is None and name in ("memory", "namespace", "parity", "spare", "store_timeout"):
        return
    wanted = {
        "text": isinstance(value, str),
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "number": isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value),
        "size": isinstance(value, str | int) and not isinstance(value, bool),
        "switch": isinstance(value, bool),
        "options": isinstance(value, dict),
        "tables": isinstance(value, dict) and all(isinstance(own, dict) for own in value.values()),
    }
    described = {
        "text": "text",
        "integer": "an integer",
        "number": "a finite number",
        "size": "a size such as 2GiB",
        "switch": "true or false",
    }
    if not wanted[setting.kind]:
        raise SettingError(f"{flag(name)}: must be {described.get(setting.kind, 'a table')}; got {value!r}")
    if setting.kind == "size":
        size_bytes(flag(name), value)
    if setting.least is not None and value < setting.least:
        raise SettingError(f"{flag(name)}: must be at least {setting.least}; got {value}")
    if setting.choices and value not in setting.choices:
        raise SettingError(f"{flag(name)}: must be one of {', '.join(setting.choices)}; got {value!r}")


def under_scheduler() -> bool:
    """Whether this process was started by torchrun or the like."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
