"""`foreload check-model`: a line that says what is wrong with a model, found without data, store or run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from clicks import Clicks
from command_line import done, refused

HERE = Path(__file__).parent

WRAPPED = """
import foreload
import torch
from torch import nn


class Theirs(nn.Module):
    def __init__(self, dimension):
        super().__init__()
        self.ad, self.user, self.old = nn.Embedding(300, dimension), nn.Embedding(1000, dimension), nn.Embedding(9, 3)
        self.site = nn.EmbeddingBag(40, dimension, mode="mean")
        self.out = nn.Linear(3 * dimension + 1, 1)

    def forward(self, ad, user, site, price):
        return self.out(torch.cat([self.ad(ad), self.user(user), self.site(site), price], 1))


def net(spec, *, dimension: int = 4):
    return foreload.wrap(Theirs(dimension), dense={"price": ["price"]})
"""


def checked(clicks: Clicks, model: object, *rest: object) -> tuple[object, ...]:
    return ("check-model", model, "--features", clicks.features, "--model-folder", HERE, *rest)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("Wide", "Wide: forward must return logits, torch.float32 [3], for 3 samples; got torch.float32 [3, 1]"),
        ("Tupled", "Tupled: forward must return logits, torch.float32 [3], for 3 samples; got tuple"),
        (
            "SummedOnItsOwn",
            r"a loss of its own for each sample, torch.float32 [3], for 3 samples; got torch.float32 [] as the second",
        ),
        ("MixedOnItsOwn", "MixedOnItsOwn: an output must depend on its own sample alone"),
        (
            "PenalisedByLayer",
            "PenalisedByLayer: penalty() must return a scalar, torch.float32 []; got torch.float32 [4]; add it up",
        ),
        ("PenalisedBySamples", "PenalisedBySamples: penalty() must be a finite function of the parameters alone"),
        ("PenalisedByArgument", "PenalisedByArgument: penalty() must take no arguments"),
        ("AlwaysNormed", "it changes norm.running_mean; leave out BatchNorm and the like, use LayerNorm"),
        ("Deaf", "Deaf: logits do not depend on user, site; use all of it, or take it out of the feature file"),
        ("Failing", "Failing: forward failed on 3 synthetic samples: KeyError: 'nothing of this name' (model_cases.py, line "),
        ("Crowded", "Crowded: forward failed on 64 synthetic samples: AssertionError"),
        ("Layered", "in deep.1.1 (Logarithm)"),
        ("Rooted", "in its own forward, not in a layer"),
        ("Norm", "does not for feature ad; look for a root or norm of a value that is 0"),
        ("Probable", "ends in a sigmoid; return the sigmoid's input"),
        ("Nothing", "model: cannot import model_cases.py:Nothing: AttributeError: "),
    ],
)
def test_it_says_what_is_wrong(clicks: Clicks, case: str, message: str) -> None:
    assert message in refused(*checked(clicks, f"model_cases.py:{case}", "--dim", 4))


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("Softmax", "outputs lie between 0 and 1 for all synthetic samples, so they are probably probabilities; return logits"),
        ("Clamped", "outputs lie between 0 and 1"),
        ("Deep", "outputs lie between 0 and 1"),
        ("SomeProbable", "outputs of liked lie between 0 and 1"),
        ("Apart", ""),
        ("Zeros", ""),
    ],
)
def test_probable_probabilities_are_told(clicks: Clicks, tmp_path: Path, case: str, told: str) -> None:
    features = tmp_path / "features.toml"
    labels = ("clicked", "liked") if case == "SomeProbable" else ("clicked",)
    features.write_text(
        "".join(f'[[label]]\nname = "{label}"\n' for label in labels)
        + clicks.features.read_text().partition("\n[table")[2].join(("[table", ""))
    )
    said = done("check-model", f"doubtful_cases.py:{case}", "--features", features, "--model-folder", HERE, "--dim", 4)
    assert told in said
    assert said.count("warning") == bool(told)


@pytest.mark.parametrize(
    ("features", "dense", "products"),
    [
        (2, False, "1 dot product"),
        (3, False, "3 dot products"),
        (1, True, "1 dot product and the dense values"),
        (4, False, ""),
        (2, True, ""),
    ],
)
def test_dlrm_of_next_to_nothing_is_told(tmp_path: Path, features: int, dense: bool, products: str) -> None:
    path = tmp_path / "features.toml"
    path.write_text(
        'label = "y"\n'
        + '[[dense]]\nname = "d"\n' * dense
        + "".join(f'[[feature]]\nname = "f{k}"\nrows = 9\n' for k in range(features))
    )
    said = done("check-model", "dlrm", "--features", path)
    line = f"foreload: warning: dlrm learns from {products} here, not from the embeddings themselves; deepfm, dcn and wide_deep do: --model deepfm"
    assert (line in said) == bool(products)
    assert "warning" not in done("check-model", "deepfm", "--features", path)


def test_dlrm_of_one_feature_alone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "features.toml"
    path.write_text('label = "y"\n[[feature]]\nname = "f"\nrows = 9\n')
    assert "dlrm: needs two features, or one and dense values, for a dot product; got 1 feature alone; use deepfm" in refused(
        "check-model", "dlrm", "--features", path
    )


GIVEN = """
import foreload
import torch
from torch import nn


class Theirs(nn.Module):
    def __init__(self, given):
        super().__init__()
        self.ad, self.user, self.site = nn.Embedding(300, 4), nn.Embedding(1000, 4), nn.EmbeddingBag(40, 4, mode="mean")
        nn.init.xavier_uniform_(self.ad.weight)
        nn.init.zeros_(self.site.weight)
        if given == "one value":
            self.user = nn.Embedding.from_pretrained(torch.full((1000, 4), 7.0), freeze=False)
        if given == "vectors":
            with torch.no_grad():
                self.user.weight.copy_(torch.arange(4000.0).reshape(1000, 4))
        if given == "bag":
            self.site = nn.EmbeddingBag.from_pretrained(torch.ones(40, 4), freeze=False, mode="mean")
        self.out = nn.Linear(13, 1)

    def forward(self, ad, user, site, price):
        return self.out(torch.cat([self.ad(ad), self.user(user), self.site(site), price], 1))


def net(spec, *, given=""):
    return foreload.wrap(Theirs(given), dense={"price": ["price"]})
"""


@pytest.mark.parametrize(("given", "path"), [("one value", "user"), ("vectors", "user"), ("bag", "site"), ("", "")])
def test_weights_that_embeddings_were_given_are_refused_or_dropped(clicks: Clicks, tmp_path: Path, given: str, path: str) -> None:
    (tmp_path / "theirs.py").write_text(GIVEN)
    model = ("--model-folder", tmp_path, "--dim", 4)
    check = ("check-model", "theirs.py:net", "--features", clicks.features, *model, "--model-options", f"given={given}")
    without = ("train", clicks.schedule, "--model", "theirs.py:net", "--store", "local:1", *model)
    train = (*without, "--model-options", f"given={given}")
    if not given:
        done(*check)
        return
    line = f"wrap: Theirs: {path} was given weights, the same under any seed, and would lose them, since rows begin with random values of --seed; "
    for command in (check, (*train, "--run", tmp_path / "run")):
        assert line in refused(*command)
    assert not (tmp_path / "run").exists()
    done(*check, "--drop-weights")
    if path == "site":
        done(*train, "--run", tmp_path / "dropped", "--drop-weights")
        done(*without, "--run", tmp_path / "without")
        assert done("digest", tmp_path / "dropped") == done("digest", tmp_path / "without")


@pytest.mark.parametrize(
    ("case", "warnings", "mixes", "told"),
    [
        ("Apart", 0, False, ""),
        ("Uneven", 1, False, "foreload: warning: outputs of equal samples differ in their last bits by their place in the batch"),
        ("Declared", 0, True, "it declares mixes_samples: an output depends on the other samples of its slice"),
    ],
)
def test_it_says_whether_equal_records_tie(
    clicks: Clicks, tmp_path: Path, case: str, warnings: int, mixes: bool, told: str
) -> None:
    said = done(*checked(clicks, f"mixing_cases.py:{case}", "--dim", 4), "--json", tmp_path / "told.json")
    assert told in said
    assert said.count("warning") == warnings
    about = json.loads((tmp_path / "told.json").read_text())
    assert (len(about["warnings"]), about["mixes_samples"]) == (warnings, mixes)


def test_it_says_why_a_file_cannot_be_imported(clicks: Clicks, tmp_path: Path) -> None:
    (tmp_path / "torn.py").write_text("import torch\n\ndef net(spec):\nreturn 3\n")
    (tmp_path / "lost.py").write_text("import no_such_package\n")
    message = refused("check-model", "torn.py:net", "--features", clicks.features, "--model-folder", tmp_path)
    assert message.startswith(
        "model: cannot import torn.py:net: IndentationError: expected an indented block after function definition on line 3"
    )
    message = refused("check-model", "lost.py:net", "--features", clicks.features, "--model-folder", tmp_path)
    assert message.startswith("model: cannot import lost.py:net: ModuleNotFoundError: No module named 'no_such_package'")
    message = refused("check-model", "none.py:net", "--features", clicks.features, "--model-folder", tmp_path)
    assert "FileNotFoundError: there is no file none.py" in message
    message = refused("check-model", "s3://user:secret@bucket/net.py:net", "--features", clicks.features)
    assert message.startswith("model: must be a path on this machine; got s3://***@bucket/net.py:net;")


def test_it_says_what_a_sound_model_is(clicks: Clicks, tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(WRAPPED)
    given = ["check-model", "theirs.py:net", "--features", clicks.features, "--model-folder", tmp_path, "--dim", 4]
    line = "theirs.py:net: 3 features, 1 dense value, 14 parameters; forward and backward work on synthetic samples, and use all of it; not used in "
    assert done(*given, "--json", tmp_path / "told.json") == f"{line}forward: old\n"
    told = {"model": "theirs.py:net", "features": 3, "dense_values": 1, "parameters": 14, "unused_tables": ["old"]} | {
        "mixes_samples": False, "warnings": [],
    }  # fmt: skip
    assert json.loads((tmp_path / "told.json").read_text()) == told
    message = refused(*given, "--model-options", "dimension=5")
    assert message.startswith(
        "Theirs: ad: feature ad: must have rows of dimension 5; got 4; say dimension = 5 in the feature file"
    )
    assert done(*checked(clicks, "dcn")).startswith("dcn: 3 features, 1 dense value, ")


def test_a_loss_of_ones_own_is_tried_as_training_would(clicks: Clicks, tmp_path: Path) -> None:
    told = done(*checked(clicks, "dcn"), "--loss", "loss_cases.py:focal", "--json", tmp_path / "told.json")
    assert told.endswith("and use all of it; loss loss_cases.py:focal works on them too\n")
    assert json.loads((tmp_path / "told.json").read_text())["loss"] == "loss_cases.py:focal"
    for loss, message in (
        ("mean", "must return a loss for each sample, torch.float32 [5], for 5 sample(s); got torch.float32 []"),
        ("root", "must give finite losses for synthetic samples"),
        ("detached", "must have a gradient with respect to the outputs"),
        ("nothing", "cannot import loss_cases.py:nothing"),
    ):
        assert message in refused(*checked(clicks, "dcn"), "--loss", f"loss_cases.py:{loss}")


def test_a_loss_is_tried_for_all_labels(clicks: Clicks, tmp_path: Path) -> None:
    two = tmp_path / "two.toml"
    labels = '[[label]]\nname = "clicked"\n[[label]]\nname = "seconds"\nkind = "number"\n'
    two.write_text(clicks.features.read_text().replace('label = "clicked"\n', "") + labels)
    given = ("check-model", "shared_bottom", "--features", two, "--model-folder", HERE, "--loss")
    assert "loss loss_cases.py:clicks_and_huber works" in done(*given, "loss_cases.py:clicks_and_huber")
    assert "got torch.float32 [5, 2]; add up those of its labels" in refused(*given, "loss_cases.py:by_label")


def test_what_it_is_told_is_checked(clicks: Clicks, tmp_path: Path) -> None:
    assert refused("check-model", "dlrm", "--features", tmp_path / "no.toml").startswith(
        f"{tmp_path}/no.toml: cannot read the feature file"
    )
    assert refused(*checked(clicks, "dlrm", "--dim", 0)) == "--dim: must be at least 1; got 0"
    assert "has no option botom" in refused(*checked(clicks, "dlrm", "--model-options", "botom=3"))
    assert "--features" in refused("check-model", "dlrm")
