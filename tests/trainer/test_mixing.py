"""A model whose outputs depend on other samples than their own is refused wherever it shows, unless it declares that."""

from __future__ import annotations

import json
from pathlib import Path

import mixing_cases
import numpy as np
import pytest
import torch
from command_line import done, refused, run_here
from torch import Tensor, nn

from foreload.trainer.errors import ModelError
from foreload.trainer.models.building import build_model, load_model
from foreload.trainer.models.built_in import MODELS
from foreload.trainer.models.checking import check_uses
from foreload.trainer.models.diagnosis import check_apart, mixes_samples
from foreload.trainer.models.spec import Embeddings, ModelSpec

HERE = Path(__file__).parent
NAMES = ("ad", "user", "site")
SPEC = ModelSpec(2, tuple((name, 8, name) for name in NAMES), ("price", "age"), ("single",) * 3)
FEATURES = """
label = "clicked"
[[dense]]
name = "price"
transform = "none"
[[feature]]
name = "ad"
rows = 300
[[feature]]
name = "user"
rows = 300
"""


def tried(name: str) -> nn.Module:
    """What `check-model` does."""
    module = build_model(load_model(name if name in MODELS else f"mixing_cases:{name}"), SPEC, {}, 3)
    check_uses(module, SPEC)
    return module


@pytest.mark.parametrize("name", ["Apart", "HalfPrecision", *MODELS])
def test_what_keeps_samples_apart_is_taken(name: str) -> None:
    assert not mixes_samples(tried(name))


@pytest.mark.parametrize(
    "name",
    [
        "BatchSecond", "TransposedAttention", "Centred", "CentredInTraining", "SoftmaxOfSlice", "Broadcast", "Normalised", "Neighbour",
        "AtFirstNothing",
    ],
)  # fmt: skip
def test_an_output_that_other_samples_change_is_refused(name: str) -> None:
    with pytest.raises(
        ModelError, match=r"must depend on its own sample alone, .* an output changes with the other samples of its slice, by"
    ):
        tried(name)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("CentredInEvaluation", "in evaluation mode an output changes with the other samples"),
        ("ByPlace", "its place in the slice"),
        ("BySize", "the size of its slice"),
    ],
)
def test_where_and_how_it_shows_is_told(name: str, what: str) -> None:
    with pytest.raises(ModelError) as error:
        tried(name)
    assert what in str(error.value)
    assert str(error.value).endswith("; if it is intended, declare mixes_samples = True in its class")
    assert "\n" not in str(error.value)


def test_what_declares_it_is_taken_and_the_check_leaves_a_module_as_it_was() -> None:
    assert mixes_samples(tried("Declared"))
    torch.manual_seed(9)
    before = torch.random.get_rng_state()
    module = build_model(mixing_cases.Apart, SPEC, {}, 3)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert module.training
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a log whose dense values are larger than any that is made up."""
    folder = tmp_path_factory.mktemp("log")
    random = np.random.default_rng(4)
    lines = [f"{k % 2},{random.integers(100, 999)},a{random.integers(40)},u{random.integers(60)}" for k in range(240)]
    (folder / "log.csv").write_text("\n".join(["clicked,price,ad,user", *lines]) + "\n")
    (folder / "features.toml").write_text(FEATURES)
    done(
        "prepare", folder / "log.csv", "--format", "csv", "--features", folder / "features.toml", "--eval-fraction", 0.2,
        "--batch-size", 48, "--lanes", 2, "--slots", "min", "--out", folder / "schedule",
    )  # fmt: skip
    return folder / "schedule"


def train(schedule: Path, run: Path, name: str) -> tuple[object, ...]:
    model = ("--model", f"mixing_cases.py:{name}", "--model-folder", HERE, "--dim", 4)
    return ("train", schedule, "--run", run, "--store", "local:1", "--trainers", 2, *model)


def test_the_first_real_slice_of_training_shows_what_made_up_samples_do_not(schedule: Path, tmp_path: Path) -> None:
    tried("OfRealData")
    told = refused(*train(schedule, tmp_path / "run", "OfRealData"))
    assert "OfRealData: an output must depend on its own sample alone" in told
    assert "(training stopped before the first step, with everything saved)" in told
    done(*train(schedule, tmp_path / "apart", "Apart"))
    assert "mixes_samples" not in json.loads((tmp_path / "apart" / "manifest.json").read_text())
    assert "mixes_samples" not in run_here("evaluate", tmp_path / "apart")[2]
    done("export", tmp_path / "apart", "--out", tmp_path / "out")
    assert "mixes_samples" not in json.loads((tmp_path / "out" / "export.json").read_text())


def test_a_model_that_declares_it_says_so_wherever_it_is_asked(schedule: Path, tmp_path: Path) -> None:
    done(*train(schedule, tmp_path / "run", "Declared"))
    status, _, err = run_here("predict", tmp_path / "run", schedule.parent / "log.csv", "--out", tmp_path / "scores.csv")
    assert status == 0
    assert "mixing_cases.py:Declared declares mixes_samples: a score depends on the records around it" in err
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["mixes_samples"] is True
    status, _, err = run_here("evaluate", tmp_path / "run")
    assert status == 0
    assert "mixing_cases.py:Declared declares mixes_samples: a score depends on the records around it" in err
    done("export", tmp_path / "run", "--out", tmp_path / "plain")
    assert json.loads((tmp_path / "plain" / "export.json").read_text())["mixes_samples"] is True
    done("apply", tmp_path / "plain", "--to", tmp_path / "applied")
    done("export", tmp_path / "run", "--format", "torch", "--out", tmp_path / "out")
    assert "An output depends on the other samples of its call" in (tmp_path / "out" / "README.md").read_text()


def test_the_bits_of_a_large_slice_keep_samples_apart_too() -> None:
    module = build_model(mixing_cases.Apart, SPEC, {}, 3)
    parts = [(("weights", 8),)] * len(NAMES)

    def forward(dense: Tensor, block: Tensor) -> Tensor:
        torch.manual_seed(1)
        outputs: Tensor = module(dense, Embeddings.split(block, NAMES, parts))
        return outputs

    check_apart("Apart", module, forward, torch.randn(512, 2), torch.randn(512, len(NAMES), 8))
