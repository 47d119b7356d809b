"""The documentation does what it says: its examples run, its links lead somewhere, its tables name the fields that there are."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from clicks import Clicks
from command_line import done, run_here
from docs_pages import ROOT, Block, agree, anchors, blocks, is_module, links, modules, pages, table_fields, without_blocks

from foreload.cache.client.url import parse_url
from foreload.pipelines.samples.feature_file import load_features

# Data of others, in the folder that FORELOAD_DATA names; blocks with them are left out without it.
SAMPLES = ("criteo", "talkingdata")
# `make bench` writes the others.
WRITTEN = [page for page in pages() if ROOT / "docs" / "benchmarks" not in page.parents]
EXAMPLES = [page for page in pages() if any(block.file is None for block in blocks(page))]
QUICK = [page for page in EXAMPLES if any(block.file is None and not block.full for block in blocks(page))]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_what_is_there(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_modules_that_a_page_names_are_there(page: Path) -> None:
    if page.name != "CHANGELOG.md":
        assert [name for name in modules(page) if not is_module(page, name)] == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_that_a_page_names_are_there(page: Path) -> None:
    # As the title of a link to their file. In the text, long names would leave the other columns of a table no room.
    for link, test in re.findall(r"\]\(([\w./]+) \"(test_\w+)\"\)", page.read_text(encoding="utf-8")):
        assert f"def {test}(" in (page.parent / link).read_text(encoding="utf-8"), test


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_wrapped_at_100_columns(page: Path) -> None:
    """Tables, headings, comments and code are not wrapped, and one word, such as a link, may be longer."""
    prose = [line for line in without_blocks(page).splitlines() if not line.startswith(("|", "#", "<"))]
    assert [line for line in prose if len(line) > 100 and " " in line.strip().removeprefix("- ")] == []


def test_pages_named_in_the_code_have_the_section() -> None:
    # As docstrings name them: a page; or a page, Section and Another section.
    for folder in ("foreload/api", "foreload/base", "pipelines", "cache", "trainer", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for name, sections in re.findall(r"\b(docs/[\w/]+\.md)(?:, ([A-Z][^);.]*))?[);.]", path.read_text(encoding="utf-8")):
                text = (ROOT / name).read_text(encoding="utf-8")
                for section in re.split(" and (?=[A-Z])", sections) if sections else ():
                    # A heading, or what begins a paragraph.
                    assert re.search(rf"^(#+ |[-* ]*\**){re.escape(section)}\b", text, re.MULTILINE), f"{path}: {name}, {section}"


def test_store_urls_that_pages_show_can_be_parsed() -> None:
    for page in pages():
        for url in re.findall(r"\b(?:rediss?|unix)://[^\s`,)]*[^\s`,):.]", page.read_text(encoding="utf-8")):
            if "..." not in url:
                assert parse_url(url).plain


def test_every_page_is_reached_from_the_index() -> None:
    reached, to_read = {ROOT / "README.md"}, [ROOT / "docs" / "README.md"]
    while to_read:
        page = to_read.pop()
        reached.add(page)
        targets = {
            (page.parent / link.partition("#")[0]).resolve() for link in links(page) if link.partition("#")[0].endswith(".md")
        }
        to_read += sorted(targets - reached)
    assert set(pages()) == reached


@pytest.mark.parametrize("page", QUICK, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_do_what_the_page_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow([block for block in blocks(page) if not block.full], tmp_path, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("page", [page for page in EXAMPLES if any(block.full for block in blocks(page))], ids=lambda p: p.name)
def test_all_examples_do_what_the_page_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow(blocks(page), tmp_path, monkeypatch)


def test_fields_are_those_of_a_run(clicks: Clicks, tmp_path: Path) -> None:
    run, run_files = tmp_path / "run", ROOT / "docs" / "run-files.md"
    done("train", clicks.schedule, "--run", run, "--store", "local:1", "--dim", "4", "--model", "wide_deep", "--digest")
    summary = json.loads((run / "summary.json").read_text())
    traffic = {f"store_traffic.{name}" for name in summary.pop("store_traffic")}
    assert table_fields(run_files, "summary.json") == summary.keys() | traffic
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for kind in ("step", "evaluation"):
        fields = {name for line in lines if line["kind"] == kind for name in line}
        # A line has this only where a trainer was lost.
        optional = {"without"} if kind == "step" else set()
        assert table_fields(run_files, f"metrics.jsonl: {kind}") == fields | optional, kind
    names = {re.sub(r"-\d+\.safetensors", "-STEP.safetensors", path.name) for path in run.iterdir()}
    assert names <= table_fields(run_files, "The folder of a run")


def test_fields_of_json_that_the_page_of_commands_names_are_there() -> None:
    section = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8").split("## What `--json`")[1]
    golden = {path.stem.removeprefix("told-"): path for path in (ROOT / "tests" / "golden" / "data").glob("told-*.json")}
    elsewhere, listed = re.findall(r"`([\w ]+)`", section.split("| command |")[0]), set[str]()
    for commands, text in re.findall(r"^\| (`[^|]*) \| ([^|]*) \|$", section, re.MULTILINE):
        for command in re.findall(r"`([\w -]+)`", commands):
            named = set(re.findall(r"`(\w+)`", text)) - {"save"}
            answer = json.loads(golden[command.replace(" ", "-")].read_text(encoding="utf-8"))
            listed.add(command.replace(" ", "-"))
            assert answer.keys() <= named, command
            if command in ("checkpoint verify", "checkpoint compact"):
                named -= {"deleted"}
            assert named <= _keys(answer), command
    # Of a command that was pinned under several circumstances, the first has the plain name.
    assert not {name for name in golden if not name.startswith((*listed, *elsewhere))}


def _keys(answer: object) -> set[str]:
    """The names of all fields, at any depth."""
    if isinstance(answer, dict):
        return {*answer, *(name for value in answer.values() for name in _keys(value))}
    return {name for value in answer for name in _keys(value)} if isinstance(answer, list) else set()


def follow(page: list[Block], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do what a page's blocks say, in an empty folder; assert that all succeeds and prints what is shown."""
    data = os.environ.get("FORELOAD_DATA")
    for name in SAMPLES if data else ():
        (folder / name).symlink_to(Path(data or "") / name)
    (folder / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    python: list[str] = []
    for number, block in enumerate(page):
        if block.file is not None:
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            python.append(block.text)
            # Blocks with nothing between them are one program.
            if number + 1 == len(page) or page[number + 1].language != "python" or page[number + 1].file is not None:
                Path(f"block_{block.line}.py").write_text("\n".join(python), encoding="utf-8")
                python.clear()
                _run(f"{shlex.quote(sys.executable)} block_{block.line}.py", block)
        elif block.language == "toml":
            Path("features.toml").write_text(block.text, encoding="utf-8")
            load_features(Path("features.toml"))
        elif data or not any(f"{name}/" in block.text for name in SAMPLES):
            for command, shown in block.commands:
                printed = _run(command, block)
                if not block.replaced and block.language == "console":
                    assert agree(shown, printed), "\n".join([f"$ {command}", *printed])


def _run(command: str, block: Block) -> list[str]:
    """What a command prints, stderr first, as a user sees its lines who waits for the end."""
    words = shlex.split(command)
    # In this process everything is imported already.
    if words[0] == "foreload" and not {"&&", "|", ">", "&", ";"} & set(words):
        status, out, err = run_here(*words[1:])
    else:
        ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        status, out, err = ended.returncode, ended.stdout, ended.stderr
    assert status == 0, f"line {block.line}: {command}\n{out}{err}"
    return [line for line in (err + out).splitlines() if not line.startswith(("prepare: ", "train: "))]
