"""Pages to look at, byte for byte: of a recorded run (data/run, with losses written into it), of two, and of a schedule."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from clicks import write_features
from command_line import done
from golden import DATA, pinned, sha256
from inputs import RUN_SCHEDULE, write_clicks

RECORDED = DATA / "run"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the schedule `clicks`, and the runs `first` and `other`, of which the latter learns faster and loses nothing."""
    home = tmp_path_factory.mktemp("pages")
    write_clicks(home / "log.csv", 400)
    write_features(home / "features.toml")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        done("prepare", "log.csv", *RUN_SCHEDULE.split(), "--out", "clicks")
    for name in ("first", "other"):
        (home / name).mkdir()
        for path in RECORDED.iterdir():
            text = path.read_text(encoding="utf-8").replace("HOME", str(home))
            (home / name / path.name).write_text(text, encoding="utf-8")
        os.utime(home / name / "metrics.jsonl", (1_800_000_000, 1_800_000_000))
    manifest = json.loads((home / "other" / "manifest.json").read_text())
    manifest["job"]["lr"] = 0.125
    (home / "other" / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    lines = map(json.loads, (home / "other" / "metrics.jsonl").read_text().splitlines())
    faster = [line | ({"loss": line["loss"] / 2, "ms": line["ms"] * 0.75} if line["kind"] == "step" else {}) for line in lines]
    (home / "other" / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in faster), encoding="utf-8")
    events = [line for line in (home / "other" / "events.jsonl").read_text().splitlines(keepends=True) if "-lost" not in line]
    (home / "other" / "events.jsonl").write_text("".join(events), encoding="utf-8")
    return home


def brief(long: re.Match[str]) -> str:
    """What stands for a long text."""
    return f"({len(long[0])}: {sha256(long[0].encode())[:16]})"


@pytest.mark.parametrize(("name", "places"), [("run", ["first"]), ("runs", ["first", "other"]), ("schedule", ["clicks"])])
def test_a_page(name: str, places: list[str], home: Path) -> None:
    page = home / f"{name}.html"
    done("report", *(home / place for place in places), "--out", page)
    text = page.read_text(encoding="utf-8").replace(str(home), "HOME")
    # One element a line, so that a difference is seen; of what is long, and of the whole, the checksum.
    short = re.sub(r"(?s)(?<=<tbody>).+?(?=</tbody>)|(?<=<style>).+?(?=</style>)|(?<=<svg).+?(?=</svg>)", brief, text)
    pinned(f"page-{name}.html", sha256(text.encode()) + "\n" + short.replace("><", ">\n<"))
