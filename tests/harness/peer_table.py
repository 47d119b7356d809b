"""Which model classes of other libraries foreload takes, and how: the table of docs/models.md.

    python tests/harness/peer_table.py

tries every class and writes the table anew, in about five minutes.
"""

from __future__ import annotations

import itertools
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# This folder is on the path already.
sys.path.append(str(Path(__file__).resolve().parents[1] / "references"))

import peer_loops
import peer_models
import peer_trials
import torch

from foreload.cache.client.local import LocalStores
from foreload.trainer.commands import adapt, check_model
from foreload.trainer.compute import numerics
from foreload.trainer.errors import ModelError
from foreload.trainer.models.building import build_model, load_model
from foreload.trainer.models.checking import doubts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
WRAPPED, LOGITS, SKELETON, NOT = "`wrap`", "`wrap` of its logits", "a skeleton", "no"
_HEAD = ["| library | taken by | classes | why not by `wrap` |", "| --- | --- | --- | --- |"]
_TITLES = {"deepctr_torch": "DeepCTR-Torch", "torchfm": "pytorch-fm", "fuxictr": "FuxiCTR"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """How foreload takes a class, one of WRAPPED, LOGITS, SKELETON and NOT; and why not by `wrap`, "" if it does."""

    how: str
    why: str


class _Unlike(Exception):
    """A class is trained through `wrap`, but not as by its library."""


def verdict(library: str, name: str, folder: Path, urls: Sequence[str]) -> Verdict:
    """Try a class: by itself, through `wrap`, by the skeleton that `foreload adapt` writes.

    Args:
        folder: for what is written.
        urls: of stores.
    """
    try:
        torch.manual_seed(peer_trials.SEED)
        peer_models.build(library, name)(peer_models.given(library, name, *peer_trials.some_inputs()))
    except Exception as error:  # a library's class may raise anything
        return Verdict(NOT, f"fails itself with this torch: {_short(str(error))}")
    try:
        _try_wrap(library, name, folder, urls)
        return Verdict(LOGITS if (library, name) in peer_models.PROBABILITIES else WRAPPED, "")
    except (ModelError, _Unlike) as error:
        refused = _short(str(error))
    # No forward of theirs can be trained exactly, whoever writes it.
    if "buffers" in refused or peer_models.reads_sequence(name):
        return Verdict(NOT, f"{'a norm over the batch' if 'buffers' in refused else 'a sequence'}: {refused}")
    try:
        own, out = f"peer_models:own_{peer_models.function_name(library, name)}", folder / "adapted.py"
        written = adapt.run(own, "", str(out))
        check_model.run(f"{out.name}:Adapted", str(folder), written.features, 1, {}, peer_trials.SEED)
        return Verdict(SKELETON, refused)
    except ModelError as error:
        return Verdict(NOT, f"{refused}; by `adapt`: {_short(str(error))}")


def _try_wrap(library: str, name: str, folder: Path, urls: Sequence[str]) -> None:
    """Raise ModelError or _Unlike unless the class is trained through `wrap` as by its library, with the same bits for any trainers."""
    if peer_trials.worst_difference(library, name) > peer_trials.NEAR:
        raise _Unlike("other logits")
    function = peer_models.function_name(library, name)
    spec = peer_trials.spec_of(peer_models.wrapped(library, name), peer_models.labels_of(name))
    model = build_model(load_model(f"peer_models:{function}"), spec, {}, peer_trials.SEED, drop_weights=True)
    if doubtful := doubts(function, model, spec):
        raise _Unlike(doubtful[0])
    (folder / "learned").mkdir()
    if peer_loops.compare(library, name, folder / "learned", urls, 100).difference > peer_loops.BAR:
        raise _Unlike("other logits after 100 steps")
    peer_trials.write_clicks(folder / "clicks.csv", peer_trials.SAMPLES)
    one, three = peer_trials.digests(library, name, folder / "clicks.csv", folder / "trained", urls, (1, 3))
    if one != three:
        raise _Unlike("other bits for other numbers of trainers")


def _short(message: str) -> str:
    """What is wrong, without names, places and remedies."""
    return re.split(r";|, so | \(|, since ", re.sub(r"^(wrap: )?[A-Z_]\w*: ", "", message))[0].replace("|", "/")


def text(verdicts: dict[tuple[str, str], Verdict]) -> str:
    """The table."""
    lines, order = list(_HEAD), [WRAPPED, LOGITS, SKELETON, NOT]
    for library, title in _TITLES.items():
        own = sorted((order.index(v.how), v.why, name) for (of, name), v in verdicts.items() if of == library)
        for (how, why), group in itertools.groupby(own, key=lambda one: one[:2]):
            lines.append(f"| {title} | {order[how]} | {', '.join(name for *_, name in group)} | {why} |")
    return "\n".join(lines)


def stated() -> dict[tuple[str, str], Verdict]:
    """What the table says, by library and class."""
    verdicts, libraries = {}, {title: library for library, title in _TITLES.items()}
    for line in _table_of(PAGE.read_text(encoding="utf-8")).splitlines()[len(_HEAD) :]:
        title, how, names, why = (cell.strip() for cell in line.strip("|").split("|"))
        verdicts.update({(libraries[title], name): Verdict(how, why) for name in names.split(", ")})
    return verdicts


def _table_of(page: str) -> str:
    """The table in the page's text."""
    return page[page.index(_HEAD[0]) :].partition("\n\n")[0]


def main() -> None:
    """Try every class, and write the table."""
    numerics.set_environment()
    numerics.set_up(1)
    verdicts = {}
    with tempfile.TemporaryDirectory() as folder, LocalStores(2, Path(folder)) as stores:
        for library, names in peer_models.classes().items():
            for name in names:
                own = Path(folder) / f"{library}-{name}"
                own.mkdir()
                verdicts[library, name] = verdict(library, name, own, stores.urls)
                print(library, name, verdicts[library, name])
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page.replace(_table_of(page), text(verdicts)), encoding="utf-8")


if __name__ == "__main__":
    main()
