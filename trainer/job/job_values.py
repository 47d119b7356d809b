"""The parsed values of a training's settings, such as servers, a parity code or a size.

Each value is written again as it was given.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from foreload.base.errors import SettingError
from foreload.base.settings import Parse, choice, key_values, number, positive, size_bytes, spelled, text
from foreload.cache.parity.placement import MOST_ROWS
from foreload.cache.rows.layout import ROW_OPTIMIZERS
from foreload.pipelines.samples.initial_values import InitialValues
from foreload.trainer import storage
from foreload.trainer.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Servers:
    """The servers that store the rows.

    Attributes:
        local: the number of local servers to start for this job, or None.
        urls: the URLs of running servers, with their passwords.
        engine: the number of servers that --engine is to start for this job, or None.
    """

    local: int | None
    urls: tuple[str, ...] = ()
    engine: int | None = None

    @classmethod
    def parse(cls, flag: str, value: Any) -> Servers:
        """Parse local:N, engine:N, URLs separated by commas, or a list of URLs.

        The URLs themselves are checked when a client connects. Raises SettingError.
        """
        if isinstance(value, Servers):
            return value
        words = value.split(",") if isinstance(value, str) else value
        if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
            raise SettingError(f"{flag}: must be local:N, or URLs separated by commas; got {masked(repr(value))}")
        given = ",".join(words)
        if not given.startswith(("local", "engine")):
            return cls(None, tuple(words))
        match = re.fullmatch(r"(local|engine):(\d{1,3})", given)
        if match is None or not int(match[2]):
            raise SettingError(
                f"{flag}: must be local:N or engine:N with N from 1 to 999, or URLs separated by commas; got {masked(given)!r}"
            )
        count = int(match[2])
        return cls(count) if match[1] == "local" else cls(None, engine=count)

    @property
    def count(self) -> int:
        """The number of store shards."""
        return self.local or self.engine or len(self.urls)

    def __str__(self) -> str:
        if self.engine:
            return f"engine:{self.engine}"
        return f"local:{self.local}" if self.local else ",".join(self.urls)


class Place(NamedTuple):
    """The host and port at which a process listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, flag: str, value: Any) -> Place:
        """Parse HOST:PORT, with an IPv6 address in brackets. Raises SettingError."""
        if isinstance(value, Place):
            return value
        match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(\d{1,5})", value) if isinstance(value, str) else None
        if match is None or not 0 < int(match[2]) < 1 << 16:
            raise SettingError(f"{flag}: must be HOST:PORT, such as 10.0.0.1:5000; got {value!r}")
        return cls(match[1].strip("[]"), int(match[2]))

    @classmethod
    def parse_local(cls, flag: str, value: Any) -> Place:
        """Parse [HOST:]PORT, as `parse` does. Without a host it is 127.0.0.1; 0 is any free port.

        Raises SettingError.
        """
        if isinstance(value, Place):
            return value
        text = f"127.0.0.1:{value}" if re.fullmatch(r"\d{1,5}", str(value)) else value
        host, _, port = str(text).rpartition(":")
        try:
            return cls.parse(flag, f"{host}:1")._replace(port=0) if port and not port.strip("0") else cls.parse(flag, text)
        except SettingError as error:
            raise SettingError(f"{flag}: must be PORT or HOST:PORT, such as 9100; got {value!r}") from error

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Parity(NamedTuple):
    """Any r of k + r store shards may be lost. Without parity, k = 1 and r = 0."""

    k: int
    r: int

    @classmethod
    def parse(cls, flag: str, value: Any) -> Parity:
        """Parse K+R, or off. Raises SettingError."""
        if isinstance(value, Parity):
            return value
        if value == "off":
            return cls(1, 0)
        match = re.fullmatch(r"(\d{1,3})\+(\d{1,3})", str(value))
        if match is None or not int(match[1]) or not int(match[2]) or int(match[1]) + int(match[2]) > MOST_ROWS:
            raise SettingError(
                f"{flag}: must be off, or K+R such as 2+1, both at least 1 and at most {MOST_ROWS} together; got {value!r}"
            )
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.k}+{self.r}" if self.r else "off"


@dataclass(frozen=True, slots=True)
class Pool:
    """The resources that a job may use. None stands for what is not given.

    Attributes:
        stores: the most store shards.
        weight: how much the job's speed counts beside that of others with which it shares a
            cluster.
    """

    cores: int | None = None
    memory_bytes: int | None = None
    stores: int | None = None
    weight: float | None = None

    @classmethod
    def parse(cls, flag: str, value: Any) -> Pool:
        """Parse cores=N,memory=SIZE,stores=N,weight=W, any of them. Raises SettingError."""
        if isinstance(value, Pool):
            return value
        pool: dict[str, Any] = {}
        for part in str(value).split(","):
            name, _, amount = part.partition("=")
            if name in pool:
                raise SettingError(f"{flag}: must give {name} once; got {value!r}")
            if name == "memory":
                pool[name] = size_bytes(f"{flag} memory", amount)
            elif name in ("cores", "stores") and re.fullmatch(r"[1-9]\d{0,3}", amount):
                pool[name] = int(amount)
            elif name == "weight":
                pool[name] = positive(f"{flag} weight", amount)
            else:
                raise SettingError(
                    f"{flag}: must be cores=N, memory=SIZE, stores=N and weight=W, any of them, separated by commas; got {part!r}"
                )
        return cls(pool.get("cores"), pool.get("memory"), pool.get("stores"), pool.get("weight"))

    def __str__(self) -> str:
        given = {"cores": self.cores, "memory": self.memory_bytes, "stores": self.stores, "weight": self.weight}
        return ",".join(f"{name}={amount}" for name, amount in given.items() if amount is not None)


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes.

    Attributes:
        written: the text that it was parsed from.
    """

    bytes: int
    written: str

    @classmethod
    def parse(cls, flag: str, value: Any) -> Size:
        """Parse a number with or without a unit. Raises SettingError."""
        return value if isinstance(value, Size) else cls(size_bytes(flag, value), str(value))

    def __str__(self) -> str:
        return self.written


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Interval:
    """A number of steps, or a time in seconds; the other one is None.

    Attributes:
        written: the text that it was parsed from.
    """

    steps: int | None
    seconds: float | None
    written: str

    @classmethod
    def parse(cls, flag: str, value: Any) -> Interval:
        """Parse a whole number of steps, or a time such as 90s, 10m or 2h. Raises SettingError."""
        if isinstance(value, Interval):
            return value
        text = str(value)
        if re.fullmatch(r"[1-9]\d{0,17}", text):
            return cls(int(text), None, text)
        if (time := cls._time(text)) is None:
            raise SettingError(
                f"{flag}: must be a number of steps, such as 1000, or a time, such as 90s, 10m or 2h; got {value!r}"
            )
        return time

    @classmethod
    def parse_time(cls, flag: str, value: Any) -> Interval:
        """Parse a time such as 90s, 10m or 2h. Raises SettingError."""
        if (time := cls._time(str(value))) is None:
            raise SettingError(f"{flag}: must be a time, such as 90s, 10m or 2h; got {value!s:.100}")
        return time

    @classmethod
    def _time(cls, text: str) -> Interval | None:
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smh])", text)
        return cls(None, float(match[1]) * _UNITS[match[2]], text) if match is not None and float(match[1]) else None

    def __str__(self) -> str:
        return self.written


def weight_bits(flag: str, value: Any) -> int | Literal["auto"]:
    """Parse the number of bits that a weight has in a checkpoint.

    With auto, the expected number of restores decides. Raises SettingError.
    """
    if str(value) not in ("auto", "32", "8", "4", "3", "2"):
        raise SettingError(f"{flag}: must be auto, 32, 8, 4, 3 or 2; got {value!r}")
    return "auto" if value == "auto" else int(value)


def decay(flag: str, value: Any) -> float:
    """Parse the share of a moving average that each step keeps.

    The share must be above 0 and, also as a float32, below 1. Raises SettingError.
    """
    result = number(-math.inf)(flag, value)
    if not (result > 0 and np.float32(result) < 1):
        raise SettingError(f"{flag}: must be above 0 and, as a float32, below 1; got {value!r}")
    return result


def numbers(least: float) -> Parse:
    """Return a parser of finite numbers by name.

    Such are the options of a row optimizer, and label weights.

    Args:
        least: the smallest number allowed.
    """

    def parse(flag: str, value: Any) -> dict[str, float]:
        return {name: number(least)(f"{flag}: {name}", own) for name, own in key_values(flag, value).items()}

    return parse


row_options, label_weights = numbers(-math.inf), numbers(0)


def initial_values(flag: str, value: Any) -> str:
    """Parse the rule by which rows begin. Raises SettingError."""
    try:
        return str(InitialValues.parse(value))
    except ValueError as error:
        raise SettingError(f"{flag}: {error}") from None


def _own(parse: Parse) -> Any:
    """Return a field of TableSettings: None, or what the parser makes of a table's own value."""
    return field(default=None, metadata={"parse": parse})


@dataclass(frozen=True, slots=True)
class TableSettings:
    """A table's own settings. If a value is None, the setting for all tables applies."""

    row_optimizer: str | None = _own(choice(*ROW_OPTIMIZERS))
    lr: float | None = _own(number(0))
    row_options: dict[str, float] | None = _own(row_options)
    row_initial: str | None = _own(initial_values)
    row_l1: float | None = _own(number(0))
    row_l2: float | None = _own(number(0))

    @classmethod
    def parse(cls, table: str, value: Any) -> TableSettings:
        """Parse [train.tables.NAME] of the job file, or a mapping with its names.

        Raises SettingError.
        """
        if isinstance(value, TableSettings):
            return value
        place = f"[train.tables.{table}]"
        if not isinstance(value, Mapping):
            raise SettingError(f"{place}: must be a table; got {value!r}")
        given = {key.replace("-", "_"): own for key, own in value.items()}
        parsers: dict[str, Parse] = {one.name: one.metadata["parse"] for one in fields(cls)}
        unknown = sorted(set(given) - set(parsers))
        if unknown:
            raise SettingError(f"{place}: may have only {', '.join(map(spelled, parsers))}; got {unknown[0]}")
        return cls(**{name: parsers[name](f"{place} {spelled(name)}", own) for name, own in given.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return the settings under their names in the job file."""
        return {spelled(name): value for name, value in asdict(self).items() if value is not None}


def tables(flag: str, value: Any) -> dict[str, TableSettings]:
    """Parse the settings of single tables, by the tables' names. Raises SettingError."""
    if not isinstance(value, Mapping):
        raise SettingError(f"{flag}: must be a table of tables; got {value!r}")
    return {str(name): TableSettings.parse(name, own) for name, own in value.items()}


def storage_place(flag: str, value: Any) -> str:
    """Parse a folder or the URL of one, which must not contain keys. Raises SettingError."""
    named = text(flag, value)
    try:
        storage.place(named)
    except CheckpointError as error:
        raise SettingError(f"{flag}: {error}") from error
    return named


def tracker_name(flag: str, value: Any) -> str:
    """Parse the name of an experiment tracker. Raises SettingError."""
    if not re.fullmatch(r"mlflow(:.+)?|[^:]+:[^:/]+", str(value)):
        raise SettingError(
            f"{flag}: must be mlflow, mlflow:URI such as mlflow:http://10.0.0.1:5000, package.module:Class or file.py:Class; "
            f"got {masked(repr(value))}"
        )
    return str(value)


AUTO = "auto"
"""The value of --resume that starts the run if it is new, and else resumes it."""
DRY_RUN = "dry-run"
"""The value of --auto that only says what would be changed."""
STORES = 5
"""The most store shards that the run has servers of its own for, if no --pool says otherwise."""

Policy = Literal["full", "one-shot", "consecutive", "intermittent", "planned"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
"""Which rows the checkpoints that are saved during training hold (docs/checkpoints.md)."""


def masked(text: str) -> str:
    """Return a text for a message, with the credentials of any URL in it hidden."""
    return re.sub(r"//[^ ]*@", "//***@", text)
