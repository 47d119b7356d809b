"""Models of dense values alone, without any feature: trained exactly, saved, served, and refused where a model multiplies embeddings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.csv as arrow_csv
import pytest
import reference
import reference_config
import reference_data
from command_line import done, refused
from torch import Tensor, nn
from training import job_in_memory, train

import foreload
from foreload.cache.client.local import LocalStores
from foreload.pipelines import prepare
from foreload.pipelines.schedule.reader import Schedule
from foreload.trainer.errors import ModelError
from foreload.trainer.models.building import load_model
from foreload.trainer.models.spec import ModelSpec
from foreload.trainer.serving import standalone

SAMPLES, HELD_OUT, BATCH, LANES, EPOCHS = 203, 40, 32, 5, 2
FEATURES = """
label = "clicked"
[[dense]]
name = "x"
[[dense]]
name = "z"
transform = "standard"
"""
MODELS: dict[str, dict[str, str]] = {
    "wide_deep": {"deep": "8"},
    "dcn": {"deep": "8"},
    "shared_bottom": {},
    "mmoe": {},
    "test_dense_alone:wrapped": {},
}

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """A module for plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 1), nn.Sigmoid())

    def forward(self, inputs: Tensor) -> Tensor:
        probability: Tensor = self.layers(inputs)
        return probability


def wrapped(spec: ModelSpec) -> nn.Module:
    return foreload.wrap(Net(), dense={"inputs": ["x", "z"]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random clicks, some of which lack a value, and their feature file."""
    draw, made = np.random.default_rng(6), tmp_path_factory.mktemp("dense-alone")
    lines = ["clicked,x,z"]
    for _ in range(SAMPLES):
        x, z = abs(draw.normal()), draw.normal() * 3
        lines.append(
            f"{int(draw.random() < 1 / (1 + np.exp(2 - 2 * x - z)))},{x:.4f},{f'{z:.3f}' if draw.random() < 0.9 else ''}"
        )
    (made / "clicks.csv").write_text("\n".join(lines) + "\n")
    (made / "features.toml").write_text(FEATURES)
    return made


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("window", [None, 100])
def test_any_number_of_trainers_trains_as_in_memory(
    model: str, window: int | None, folder: Path, servers: LocalStores, tmp_path: Path
) -> None:
    schedule = tmp_path / "schedule"
    given = [f"--features={folder / 'features.toml'}", f"--batch-size={BATCH}", f"--lanes={LANES}", f"--epochs={EPOCHS}"]
    given += [f"--eval-fraction={HELD_OUT / SAMPLES}", f"--out={schedule}", *([] if window is None else [f"--window={window}"])]
    prepare.run([str(folder / "clicks.csv"), "--format=csv", *given])
    job = job_in_memory(model=model, dim=4, model_options=MODELS[model], seed=3, dense_optimizer="Adam", dense_lr=0.01)
    expected = reference.train(
        reference_config.Config(
            log=reference_data.read_features(folder / "features.toml"),
            sources=(folder / "clicks.csv",),
            model=load_model(model),
            dim=4,
            batch_size=BATCH,
            lanes=LANES,
            epochs=EPOCHS,
            seed=3,
            evaluation_fraction=HELD_OUT / SAMPLES,
            model_options=MODELS[model],
            dense_optimizer="Adam",
            dense_options={"lr": 0.01},
        )
    )
    for trainers in (1, 3):
        outcome = train(job, Schedule(schedule), servers.urls[:2], trainers)
        assert [step.loss for step in outcome.steps] == expected.log_losses
        assert outcome.digest == expected.digest
    assert expected.log_losses[-1] < expected.log_losses[0]


def test_the_commands_about_a_run_know_no_rows(folder: Path, tmp_path: Path) -> None:
    """Evaluation, `predict` in its slices, and the exported model have the same bits; pages need no rows."""
    schedule = foreload.prepare(
        folder / "clicks.csv", features=folder / "features.toml", out=tmp_path / "clicks", batch_size=BATCH, lanes=2,
        eval_fraction=HELD_OUT / SAMPLES,
    )  # fmt: skip
    run = foreload.train(
        schedule, run=tmp_path / "run", store="local:3", parity="2+1", trainers=2, model="dcn"
    )  # fmt: skip
    assert "log loss" in done("evaluate", run.path)
    again = foreload.train(schedule, run=tmp_path / "again", store="local:1", model="dcn")
    assert done("digest", run.path) == done("digest", again.path)
    served = tmp_path / "served"
    assert "0 rows of 0 tables, and the dense part" in done("export", run.path, "--format", "torch", "--out", served)
    assert "0 rows of 0 tables" in done("export", run.path, "--out", tmp_path / "rows")
    wanted = run.predict(folder / "clicks.csv", logits=True)
    records = arrow_csv.read_csv(folder / "clicks.csv")
    assert wanted.tobytes() == standalone.load(served).predict(records, batch_size=BATCH // 2, logits=True).tobytes()
    assert wanted.std() > 0.1
    assert "its steps use no rows" in Path(done("report", schedule.path, "--out", tmp_path / "clicks.html").strip()).read_text(
        encoding="utf-8"
    )
    assert Path(done("report", run.path).strip()).exists()
    assert "the model has no tables, since it has no features; leave out 'x'" in refused("lookup", run.path, "x", "1")
    done("checkpoint", "save", run.path, "--to", tmp_path / "saved")
    saved = foreload.open_checkpoint(next((tmp_path / "saved").glob("step-*")))
    assert saved.predict(folder / "clicks.csv", logits=True).tobytes() == wanted.tobytes()


def test_models_that_multiply_embeddings_are_refused() -> None:
    spec = ModelSpec(2, (), ("x", "z"))
    for model in ("dlrm", "deepfm"):
        with pytest.raises(
            ModelError, match=f"{model}: multiplies embeddings, and there are only dense values; use wide_deep or dcn"
        ):
            load_model(model)(spec)


def test_a_module_without_tables_needs_the_names_of_its_dense_values() -> None:
    with pytest.raises(ModelError, match=r'has no nn.Embedding, .*their names: dense=\{"x": \["price", "age"\]\}'):
        foreload.wrap(Net())
    with pytest.raises(ModelError, match="names: Net has no table at layers; it has none"):
        foreload.wrap(Net(), dense={"inputs": ["x", "z"]}, names={"layers": "rows"})
