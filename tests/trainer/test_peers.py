"""Model classes of DeepCTR-Torch, FuxiCTR and pytorch-fm, unchanged, through `wrap`.

Their logits are those of the class itself, they are trained as by their library, and have the same bits for any trainers.
"""

from __future__ import annotations

from pathlib import Path

import peer_loops
import peer_models
import peer_table
import peer_trials
import pytest
import torch
from torch import nn

from foreload.cache.client.local import LocalStores
from foreload.trainer.errors import ModelError

pytestmark = pytest.mark.usefixtures("one_thread")

STATED = peer_table.stated()
"""How docs/models.md says that each class is taken."""
SHORT = [
    ("deepctr_torch", "DCN"),
    ("deepctr_torch", "DeepFM"),
    ("deepctr_torch", "MMOE"),
    ("torchfm", "fm.FactorizationMachineModel"),
    ("fuxictr", "DCNv2"),
]
"""Those that are trained in every run of the tests."""
CLASSES = [one for one, stated in STATED.items() if stated.how in (peer_table.WRAPPED, peer_table.LOGITS)]
EVERY_CLASS = [pytest.param(*one, marks=() if one in SHORT else pytest.mark.full) for one in CLASSES]
OTHERS = [one for one in STATED if one not in CLASSES]
NEEDED = "needs the libraries that `make venv` installs"


def installed(library: str) -> None:
    if not peer_models.is_installed(library):
        pytest.skip(NEEDED)


@pytest.mark.parametrize(("library", "name"), CLASSES)
def test_logits_are_those_of_the_class_itself(library: str, name: str) -> None:
    installed(library)
    assert peer_trials.worst_difference(library, name) <= peer_trials.NEAR


@pytest.mark.parametrize(("library", "name"), EVERY_CLASS)
def test_after_100_steps_logits_are_those_of_the_librarys_own_loop(
    library: str, name: str, servers: LocalStores, tmp_path: Path
) -> None:
    installed(library)
    both = peer_loops.compare(library, name, tmp_path, servers.urls[:2], 100)
    assert both.learned > 0.5
    assert both.difference <= peer_loops.BAR
    log_loss = float(nn.functional.binary_cross_entropy_with_logits(both.theirs[:, 0], both.labels[:, 0]))
    assert both.log_loss == pytest.approx(log_loss, abs=peer_loops.BAR)


@pytest.mark.full
@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize(("library", "name"), SHORT)
def test_after_a_few_steps_logits_are_those_of_the_librarys_own_loop(
    library: str, name: str, steps: int, servers: LocalStores, tmp_path: Path
) -> None:
    installed(library)
    both = peer_loops.compare(library, name, tmp_path, servers.urls[:2], steps)
    assert both.learned > 10 * peer_loops.BAR
    assert both.difference <= peer_loops.BAR


def test_another_learning_rate_gives_other_logits(servers: LocalStores, tmp_path: Path) -> None:
    installed("torchfm")
    both = peer_loops.compare("torchfm", "fm.FactorizationMachineModel", tmp_path, servers.urls[:2], 50, factor=1.01)
    assert both.difference > 10 * peer_loops.BAR


@pytest.mark.parametrize(("library", "name"), EVERY_CLASS)
def test_one_and_three_trainers_train_the_same_bits(library: str, name: str, servers: LocalStores, tmp_path: Path) -> None:
    installed(library)
    peer_trials.write_clicks(tmp_path / "clicks.csv", peer_trials.SAMPLES)
    one, three = peer_trials.digests(library, name, tmp_path / "clicks.csv", tmp_path / "trained", servers.urls[:2], (1, 3))
    assert one == three


@pytest.mark.parametrize(("library", "name"), OTHERS)
def test_other_classes_are_refused_as_the_documentation_says(
    library: str, name: str, servers: LocalStores, tmp_path: Path
) -> None:
    installed(library)
    assert peer_table.verdict(library, name, tmp_path, servers.urls[:2]) == STATED[library, name]


def test_a_product_of_probabilities_is_refused_as_it_is() -> None:
    installed("deepctr_torch")
    around = peer_models.build("deepctr_torch", "ESMM")
    assert isinstance(around, peer_models.Logits)
    itself = peer_models.wrap_module(around.net, "deepctr_torch", "ESMM")
    with pytest.raises(ModelError, match="all outputs for clicks must be logits; some end in a sigmoid and others do not"):
        itself.predict(("click", "click"))


def test_the_documentation_has_every_class() -> None:
    for library, names in peer_models.classes().items():
        assert sorted(names) == sorted(name for of, name in STATED if of == library)


def test_the_trial_notices_other_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    installed("torchfm")
    name = "fm.FactorizationMachineModel"
    rows_of = peer_trials.rows_of
    monkeypatch.setattr(peer_trials, "rows_of", lambda *given: {key: rows + 1e-3 for key, rows in rows_of(*given).items()})
    assert peer_trials.worst_difference("torchfm", name) > peer_trials.NEAR
    assert torch.get_num_threads() == 1
