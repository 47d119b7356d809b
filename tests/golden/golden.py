"""Compare formats and answers with the files in data/, which say what they are at the moment.

`python tests/golden/golden.py` (`make golden`) writes the files anew, where a format is meant to change.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
MASKED = "(varies)"
_WRITE = "FORELOAD_GOLDEN"
_MOST_DIFFERING_LINES = 60


def pinned(name: str, value: Any) -> None:
    """Assert that a value is what data/NAME holds: text as it is, anything else as JSON with one item a line."""
    text = value if isinstance(value, str) else _lines(value) + "\n"
    path = DATA / name
    if os.environ.get(_WRITE) == "write":
        path.write_text(text, encoding="utf-8")
        return
    expected = path.read_text(encoding="utf-8") if path.exists() else ""
    if text != expected:
        differing = difflib.unified_diff(expected.splitlines(), text.splitlines(), f"data/{name}", "now", lineterm="", n=1)
        shown = "\n".join(line[:300] for line in list(differing)[:_MOST_DIFFERING_LINES])
        raise AssertionError(f"{name} differs; if that is meant, run `make golden` and look at the diff\n{shown}")


def _lines(value: Any, depth: int = 0, width: int = 140) -> str:
    """JSON in the order of the keys given; what fits into a line stands on one, and so does an object of plain values."""
    short = json.dumps(value, ensure_ascii=False)
    if len(short) + depth <= width or not isinstance(value, dict | list | tuple) or not value:
        return short
    if isinstance(value, dict) and len(short) <= 4 * width and not any(isinstance(one, dict | list) for one in value.values()):
        return short
    inner, outer = " " * (depth + 1), " " * depth
    if isinstance(value, dict):
        items = [
            f"{inner}{json.dumps(str(key), ensure_ascii=False)}: {_lines(one, depth + 1, width)}" for key, one in value.items()
        ]
        return "{\n" + ",\n".join(items) + f"\n{outer}}}"
    if not any(isinstance(one, dict | list | tuple | str) and len(json.dumps(one)) > width // 4 for one in value):
        filled = textwrap.wrap(short[1:-1], width - depth, break_long_words=False, break_on_hyphens=False)
        return "[\n" + "\n".join(inner + line for line in filled) + f"\n{outer}]"
    return "[\n" + ",\n".join(inner + _lines(one, depth + 1, width) for one in value) + f"\n{outer}]"


def masked(value: Any, keys: Collection[str]) -> Any:
    """JSON in which of the value of every key named only the types are left."""
    if isinstance(value, Mapping):
        return {key: _types(one) if key in keys else masked(one, keys) for key, one in value.items()}
    return [masked(one, keys) for one in value] if isinstance(value, list) else value


def _types(value: Any) -> Any:
    """What stands for a value that varies; as it is where it stands for one already."""
    if isinstance(value, str) and re.fullmatch(r"\(\w+\)", value):
        return value
    if isinstance(value, Mapping) and MASKED in value:
        return value
    types = shape(value)
    return f"({types})" if isinstance(types, str) else {MASKED: types}


def replaced(value: Any, texts: Mapping[str, str]) -> Any:
    """JSON in whose texts, keys too, each of some texts (folders, say) is replaced by its name."""
    if isinstance(value, Mapping):
        return {replaced(key, texts): replaced(one, texts) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [replaced(one, texts) for one in value]
    if isinstance(value, str):
        for text in sorted(texts, key=len, reverse=True):
            value = value.replace(text, texts[text])
    return value


def shape(value: Any, kept: Collection[str] = ()) -> Any:
    """The types of JSON, keys in order; the values themselves of keys in `kept`. Of a list whose items are alike, one, and how many there are not."""
    if isinstance(value, Mapping):
        return {key: one if key in kept else shape(one, kept) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return ["list of", *_distinct([shape(one, kept) for one in value])]
    return "null" if value is None else type(value).__name__


def _distinct(values: Sequence[Any]) -> list[Any]:
    """Each value once, in order of its first place."""
    return list({json.dumps(one): one for one in values}.values())


def sha256(data: bytes) -> str:
    """The checksum of bytes, as the files in data/ have it."""
    return hashlib.sha256(data).hexdigest()


def files_of(
    folder: Path,
    keys: Collection[str] = (),
    unhashed: str = r"(?!)",
    unsized: str = r"(?!)",
    texts: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Every file below a folder by its path: JSON as it is, the values of `keys` masked and `texts` replaced; and the size and the checksum.

    unhashed, unsized: patterns of paths whose bytes, or whose size too, depend on the machine and are left out. JSON that is masked has no checksum.
    """
    told: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name, data = str(path.relative_to(folder)), path.read_bytes()
        if re.fullmatch(unsized, name):
            told[name] = MASKED
        elif re.fullmatch(unhashed, name):
            told[name] = f"{len(data)} bytes"
        elif path.suffix in (".json", ".jsonl"):
            held = json.loads(data) if path.suffix == ".json" else list(map(json.loads, data.splitlines()))
            shown = replaced(masked(held, keys), texts or {})
            told[name] = shown if shown != held else {"sha256": sha256(data), "value": shown}
        else:
            told[name] = f"{len(data)} bytes {sha256(data)}"
    return told


if __name__ == "__main__":
    which = sys.argv[1:] or [str(Path(__file__).parent)]  # some of these tests, and what pytest takes besides
    sys.exit(
        subprocess.run([sys.executable, "-m", "pytest", "-q", *which], env=os.environ | {_WRITE: "write"}, check=False).returncode
    )
