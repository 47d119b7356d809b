"""The documentation as data: pages, headings, links, and the code blocks that are run as tests.

A comment above a fenced block, which no rendered page shows, says what is done with it:

    <!-- test -->                       run it: each `$ command` of a console block with its output; a python block, with those that follow it
    <!-- test: 200000 => 2000; a => b -->  the same, with these texts replaced in commands, so that it takes seconds; its output is not compared
    <!-- test full -->                  the same, in the full suite only; `full` may precede the colon, too
    <!-- test -->, above toml           it is a feature file that `prepare` takes
    <!-- file: clicks.toml -->          put it into the folder that the page's blocks share

Output is compared line by line with every number taken for any other; a line `...` stands for any lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^(?:<!-- (?P<mark>.*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"(?P<kind>test|file)(?P<full> full)?(?:: (?P<rest>.*))?")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")
# A digest, a number, or the dash that stands where there is no number.
_NUMBER = re.compile(r"\b[0-9a-f]{64}\b|[0-9][0-9,.]*%?|(?<=\s)-(?=\s)")
_SIZE = re.compile(r"# (?:B|KiB|MiB|GiB|KB|MB|GB)\b")


@dataclass(frozen=True, slots=True)
class Block:
    """A marked block: file, the name it gets, or None for one that is run; replaced: pairs of texts in its commands."""

    language: str
    text: str
    line: int
    full: bool
    file: str | None
    replaced: tuple[tuple[str, str], ...]

    @property
    def commands(self) -> list[tuple[str, list[str]]]:
        """Of a console block: each command, its continued lines joined, and the lines of its output. A sh block has no output."""
        if self.language == "sh":
            return [(self._small(line), []) for line in self.text.replace("\\\n", " ").splitlines() if line]
        commands: list[tuple[str, list[str]]] = []
        for line in self.text.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                commands.append((self._small(line[2:]), []))
            else:
                commands[-1][1].append(line)
        return commands

    def _small(self, command: str) -> str:
        for was, now in self.replaced:
            command = command.replace(was, now)
        return command


def pages() -> list[Path]:
    """Every page of the documentation."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])


def blocks(page: Path) -> list[Block]:
    """The marked blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    marked = []
    for match in _BLOCK.finditer(text):
        if match["mark"] is None:
            continue
        mark = _MARK.fullmatch(match["mark"])
        line = text.count("\n", 0, match.start()) + 1
        assert mark is not None, f"{page}:{line}: unknown mark {match['mark']!r}"
        is_file = mark["kind"] == "file"
        replaced = [] if is_file or not mark["rest"] else [pair.partition(" => ") for pair in mark["rest"].split("; ")]
        marked.append(
            Block(
                match["language"], match["text"], line, bool(mark["full"]), mark["rest"] if is_file else None,
                tuple((was, now) for was, _, now in replaced),
            )
        )  # fmt: skip
    return marked


def without_blocks(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """The targets of a page's links that are not on the web; code is left out."""
    text = re.sub(r"`[^`\n]*`", "", without_blocks(page))
    return [target for target in _LINK.findall(text) if not re.match(r"[a-z]+:", target)]


def modules(page: Path) -> list[str]:
    """What a page names in `code` that looks like a file or a module of the repository: tests/tls.py, cache/traffic, `beam/read` in internals/."""
    own = ROOT / page.stem if page.parent.name == "internals" else ROOT
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    named = re.findall(r"`([a-z_]+(?:/[a-z_]+)+(?:\.py)?)(?:\.[A-Za-z_]+)?`", text)
    roots = [root for root in (ROOT, own) if root.is_dir()]
    return [name for name in named if any((root / name.partition("/")[0]).is_dir() for root in roots)]


def is_module(page: Path, name: str) -> bool:
    """Whether there is such a file, module or folder."""
    roots = (ROOT, ROOT / page.stem)
    return any((root / name).exists() or (root / f"{name}.py").exists() for root in roots)


def anchors(page: Path) -> set[str]:
    """The anchors of a page: of its headings, as GitHub makes them, and those it names itself."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    names = set(re.findall(r'<a name="([^"]+)">', text))
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"<[^>]*>", "", heading))
        names.add(re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-"))
    return names


def table_fields(page: Path, heading: str) -> set[str]:
    """The names in `code` in the first column of the tables under a heading."""
    text = page.read_text(encoding="utf-8")
    section = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#{{1,6}} |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None, f"{page}: has no heading {heading}"
    cells = [line.split("|")[1] for line in section[2].splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`*]+)`", cell)}


def agree(shown: list[str], printed: list[str]) -> bool:
    """Whether output is as a page shows it, numbers aside."""
    pattern = "".join(r"(?:.*\n)*" if line == "..." else re.escape(_masked(line)) + r"\n" for line in shown)
    return re.fullmatch(pattern, "".join(_masked(line) + "\n" for line in printed)) is not None


def _masked(line: str) -> str:
    return re.sub(r"\s+", " ", _SIZE.sub("# B", _NUMBER.sub("#", line))).strip()


def documented_rights() -> list[list[str]]:
    """Return the rights that docs/operations.md lists: those of training, then those of `stores` and `delete`."""
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    return [re.findall(r"\+[\w|]+", line) for line in re.findall(r"^ACL SETUSER trainer .*$", page, re.MULTILINE)]
