"""Read the files of a model that is served without foreload.

These are files of tensors, a program of torch.export, and text files of records. Nothing is
unpickled. `foreload export --format torch` joins this file with raw_values.py, generators.py,
inference.py, own_module.py and standalone.py into model.py.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

# The members that dense.pt2 may have: the graph as JSON, weights and tensor constants with their
# JSON, sample inputs that must be empty, and markers of the container. torch.export.load unpickles
# several other members, or loads them as libraries.
_INPUTS = "data/sample_inputs/model.pt"
_MEMBERS = re.compile(
    r"models/model\.json|data/weights/(weight_\d+|model_weights_config\.json)|data/constants/(tensor_\d+|model_constants_config\.json)|"
    + re.escape(_INPUTS)
    + r"|archive_format|archive_version|byteorder|\.data/(version|serialization_id)"
)


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file, float32 and int64, mapped into memory.

    Parts that are never read take no memory.
    """
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            kind, shape = {"F32": "<f4", "I64": "<i8"}[entry["dtype"]], tuple(entry["shape"])
            tensors[name] = np.empty(shape, kind)
            if tensors[name].size:
                tensors[name] = np.memmap(path, kind, "c", 8 + size + entry["data_offsets"][0], shape)
    return tensors


_KINDS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, copied into memory. Any type in _KINDS may occur."""
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            tensors[name] = torch.empty(entry["shape"], dtype=_KINDS[entry["dtype"]])
            if first < end:
                tensors[name] = torch.frombuffer(data[8 + size + first : 8 + size + end], dtype=_KINDS[entry["dtype"]]).reshape(
                    entry["shape"]
                )
    return tensors


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a module and the buffers of its state, each once, by name."""
    buffers = dict(module.named_buffers())
    state = {name: value for name, value in module.state_dict().items() if name in buffers}
    return {name: value.detach() for name, value in module.named_parameters()} | state


def read_program(path: Path) -> nn.Module:
    """Read the dense part as torch.export wrote it.

    torch reads a copy that has only the checked members, so it cannot find other members in the
    file.

    Raises:
        ValueError: the file has members that `foreload export` does not write.
    """
    copied = io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(copied, "w") as copy:
        members = {item.filename.partition("/")[2]: archive.read(item) for item in archive.infolist()}
        if len(members) < len(archive.infolist()):
            raise ValueError(f"{path}: must have each member once; export it again")
        for name, data in members.items():
            if not _MEMBERS.fullmatch(name) or (name == _INPUTS and data) or _names_others(name, data, members):
                raise ValueError(
                    f"{path}: must hold a graph, weights and tensor constants alone, nothing pickled; got {name}; export it again"
                )
            copy.writestr(f"dense/{name}", data)
    copied.seek(0)
    return torch.export.load(copied).module()


def _names_others(name: str, data: bytes, members: Mapping[str, bytes]) -> bool:
    """Return whether a list of tensors has an entry that would be unpickled or is not in the file.

    Args:
        name: the name of the member.
        data: its contents.
        members: all members of the file, by name.
    """
    if not name.endswith("_config.json"):
        return False
    beside = name.rpartition("/")[0]
    entries = json.loads(data)["config"].values()
    return any(entry["use_pickle"] is not False or f"{beside}/{entry['path_name']}" not in members for entry in entries)


@contextlib.contextmanager
def opened_text(path: str) -> Iterator[io.TextIOWrapper]:
    """Open a text file, and decompress it if its name ends in .gz or .zst.

    Lines end only at line feeds.

    Raises:
        ValueError: the file is not a valid text file. This may also be raised while it is read.
    """
    try:
        opened: Callable[..., Any] = gzip.open if path.endswith(".gz") else open
        if path.endswith(".zst"):
            import pyarrow as pa

            def opened(path: str, mode: str) -> Any:
                return pa.input_stream(path, compression="zstd")

        with opened(path, "rb") as binary:
            yield io.TextIOWrapper(binary, encoding="utf-8-sig", newline="\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: must be text in UTF-8, or named .gz or .zst if it is compressed so; {error}") from error
    except csv.Error as error:
        raise ValueError(f"{path}: cannot be cut into rows; {error}; check quotes and line breaks") from error
    except (EOFError, OSError, zlib.error) as error:
        if isinstance(error, OSError) and error.filename is not None:
            # The error names the file itself, for example if it does not exist.
            raise
        raise ValueError(f"{path}: must be whole, and compressed as its name says; {error}") from error


class RowLines:
    """The lines of a file, for csv.reader.

    Raises ValueError if a value spans more lines than allowed, or its quote is never closed.

    Args:
        path: the path of the file, for errors.
        file: the lines.
        most: the most lines that a value may span. If 0, values contain no line breaks.

    Attributes:
        waiting: the number of lines that the reader has taken for a row that it has not returned
            yet. The caller sets it to 0 after each row.
    """

    def __init__(self, path: str, file: Iterator[str], most: int) -> None:
        self._path, self._file, self._most = path, file, most
        self._number = self.waiting = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._file, None)
        where = f"{self._path}:{self._number - self.waiting + 1}"
        if self.waiting and (line is None or self.waiting >= max(self._most, 1)):
            raise ValueError(f"{where}: a quote that opens here is not closed, or a value holds more line breaks than it may")
        if line is None:
            raise StopIteration
        self._number += 1
        self.waiting += 1
        # csv.reader itself refuses all other carriage returns within a value.
        if not self._most and line.removesuffix("\n").endswith("\r\r"):
            raise ValueError(f"{where}: a value holds a carriage return")
        return line
