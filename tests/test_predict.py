"""What a run's model says of raw records, and its rows by raw value: the same bits as evaluation's and the export's."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest
from command_line import done, refused

import foreload
from foreload.base.errors import SettingError
from foreload.pipelines.errors import RecordError, SourceError
from foreload.trainer.commands import predict
from foreload.trainer.commands.evaluate import evaluated
from foreload.trainer.compute import numerics
from foreload.trainer.errors import RunError
from foreload.trainer.saved.stopped_run import open_stopped
from foreload.trainer.serving import standalone

ROWS, HELD_OUT = 2400, 400
USERS = 500
FEATURES = f"""
label = "clicked"
[text]
missing = ["none"]
[[dense]]
name = "price"
transform = "standard"
[[feature]]
name = "ad"
rows = 300
encoding = "id"
[[feature]]
name = "user"
rows = {USERS}
[[feature]]
name = "item"
encoding = "vocabulary"
min_count = 2
[[feature]]
name = "words"
rows = 100
pooling = "mean"
separator = " "
"""


def write_log(path: Path, start: int, end: int, labels: bool = True) -> Path:
    """Rows start .. end - 1 of a log that is a function of their numbers; none of the users from 2,000 on was seen before."""
    names = [*(["clicked"] if labels else []), "price", "ad", "user", "item", "words"]
    lines = [",".join(names)]
    for k in range(start, end):
        words = " ".join(f"w{(k * j) % 37}" for j in range(k % 4))
        item = "none" if k % 11 == 0 else f"B{(k * 7) % 90:02d}X"
        row = [
            str(int(k % 3 == 0 or k % 7 == 1)),
            f"{k % 13}.5",
            str(k * 5 % 300),
            f"u{k * k % 211 + (k >= 2000) * k}",
            item,
            words,
        ]
        lines.append(",".join(row if labels else row[1:]))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("predict")
    write_log(home / "clicks.csv", 0, ROWS)
    write_log(home / "held-out.csv", ROWS - HELD_OUT, ROWS)
    write_log(home / "new.csv", ROWS - HELD_OUT, ROWS, labels=False)
    (home / "clicks.toml").write_text(FEATURES)
    return home


@pytest.fixture(scope="module")
def schedule(folder: Path) -> foreload.Schedule:
    return foreload.prepare(
        folder / "clicks.csv", features=folder / "clicks.toml", out=folder / "clicks", batch_size=96, lanes=2, epochs=2,
        eval_fraction=HELD_OUT / ROWS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(folder: Path, schedule: foreload.Schedule) -> foreload.Run:
    return foreload.train(schedule, run=folder / "run", store="local:3", dim=8, lr=0.1)


@pytest.fixture(scope="module")
def logits(run: foreload.Run) -> np.ndarray:
    """Those of the evaluation, float32 [HELD_OUT], in the order of the samples."""
    by_number = np.full(HELD_OUT, np.nan, np.float32)
    with open_stopped(os.fspath(run), None) as saved:
        for part in evaluated(saved, saved.schedule):
            by_number[part.slice.numbers] = part.outputs
    assert not np.isnan(by_number).any()
    return by_number


@pytest.mark.parametrize("log", ["held-out.csv", "new.csv"])
def test_in_the_evaluations_steps_and_slices_logits_are_its_bit_for_bit(
    run: foreload.Run, schedule: foreload.Schedule, folder: Path, logits: np.ndarray, log: str
) -> None:
    predicted = run.predict(folder / log, steps_of=schedule, logits=True)
    assert predicted.tobytes() == logits.tobytes()


def test_in_other_steps_logits_and_scores_are_within_a_millionth_of_the_evaluations(
    run: foreload.Run, folder: Path, logits: np.ndarray
) -> None:
    np.testing.assert_allclose(run.predict(folder / "new.csv", logits=True), logits, rtol=0, atol=1e-6)
    scores = run.predict(folder / "new.csv")
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-logits.astype(np.float64))), rtol=0, atol=1e-6)


def test_batches_come_one_by_one_and_may_be_left(run: foreload.Run, folder: Path) -> None:
    whole = run.predict(folder / "new.csv")
    batches = run.predict_batches(folder / "new.csv")
    first = next(batches)
    assert 0 < len(first) < HELD_OUT
    assert first.tobytes() == whole[: len(first)].tobytes()
    batches.close()  # type: ignore[attr-defined]
    assert run.evaluate().samples == HELD_OUT


def test_the_command_writes_one_score_a_record(
    run: foreload.Run, schedule: foreload.Schedule, folder: Path, tmp_path: Path
) -> None:
    scores = run.predict(folder / "new.csv")
    out = done("predict", run.path, folder / "new.csv", "--out", tmp_path / "scores.csv", "--json", tmp_path / "told.json")
    assert out == f"{tmp_path / 'scores.csv'}: {HELD_OUT} scores\n"
    assert json.loads((tmp_path / "told.json").read_text())["records"] == HELD_OUT
    written = arrow_csv.read_csv(tmp_path / "scores.csv")["score"].cast(pa.float32())
    assert written.to_numpy().tobytes() == scores.tobytes()
    done(
        "predict",
        run.path,
        folder / "held-out.csv",
        "--out",
        tmp_path / "scores.parquet",
        "--logits",
        "--steps-of",
        schedule.path,
    )
    assert pq.read_table(tmp_path / "scores.parquet").column_names == ["logit"]


@pytest.mark.full
def test_a_parquet_file_gives_the_scores_of_the_same_text(run: foreload.Run, folder: Path, tmp_path: Path) -> None:
    table = arrow_csv.read_csv(folder / "new.csv", convert_options=arrow_csv.ConvertOptions(strings_can_be_null=True))
    words = pa.array([[] if text is None else text.split(" ") for text in table["words"].to_pylist()], pa.list_(pa.string()))
    pq.write_table(table.set_column(table.column_names.index("words"), "words", words), tmp_path / "new.parquet")
    assert run.predict(tmp_path / "new.parquet").tobytes() == run.predict(folder / "new.csv").tobytes()


@pytest.mark.full
def test_files_without_a_header_line_may_lack_the_label(tmp_path: Path) -> None:
    lines = [
        "\t".join([str(k % 2), *(str(k * j % 9) for j in range(13)), *(f"{k * j % 50:08x}" for j in range(26))])
        for k in range(300)
    ]
    (tmp_path / "train.tsv").write_text("\n".join(lines) + "\n")
    (tmp_path / "test.txt").write_text("\n".join(line.partition("\t")[2] for line in lines) + "\n")
    schedule = foreload.prepare(tmp_path / "train.tsv", format="criteo", out=tmp_path / "criteo", batch_size=64)
    run = foreload.train(schedule, run=tmp_path / "run", store="local:1", dim=4)
    assert run.predict(tmp_path / "test.txt").tobytes() == run.predict(tmp_path / "train.tsv").tobytes()


WRITTEN: dict[str, Callable[[str], bytes]] = {
    "as it is": str.encode,
    "with a byte order mark": lambda text: text.encode("utf-8-sig"),
    "with blank lines": lambda text: ("\n\r\n" + text.replace("\n", "\n\n", 20)).encode(),
    "with a mark and a blank line": lambda text: ("\ufeff\r\n" + text).encode(),
    "with carriage returns": lambda text: text.replace("\n", "\r\n").encode(),
    "quoted": lambda text: "".join(
        ",".join(f'"{field}"' for field in line.split(",")) + "\n" for line in text.split("\n")[:-1]
    ).encode(),
    "with a long field": lambda text: text.replace("B07X", "x" * 200_000, 1).encode(),
    "with characters at which Python cuts lines": lambda text: text.replace("B07X", "x\u2028y\x1dz\x0c", 5).encode(),
    "gz": lambda text: gzip.compress(text.encode("utf-8-sig")),
    "zst": lambda text: pa.compress(text.encode("utf-8-sig"), "zstd", asbytes=True),
}
"""Ways to write the same records, or others that are read alike."""


@pytest.fixture(scope="module")
def served(run: foreload.Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's model, exported for torch."""
    to = tmp_path_factory.mktemp("torch") / "served"
    run.export_torch(to)
    return to


def predicted_here(run: foreload.Run, path: Path) -> np.ndarray:
    """The logits of a file's records, computed in this process."""
    with predict.run(os.fspath(run), None, predict.Records((str(path),)), logits=True) as predictions:
        return np.concatenate(list(predictions.batches))


def read_alone(path: Path, served: Path) -> list[dict[str, str]]:
    return list(standalone.read_csv(str(path), json.loads((served / standalone.ABOUT).read_text())))


@pytest.mark.parametrize("how", WRITTEN)
def test_however_a_file_is_written_predict_and_the_exported_model_read_it_alike(
    run: foreload.Run, served: Path, folder: Path, tmp_path: Path, how: str
) -> None:
    path = tmp_path / ("new.csv" + (f".{how}" if how in ("gz", "zst") else ""))
    path.write_bytes(WRITTEN[how]((folder / "new.csv").read_text()))
    logits = predicted_here(run, path)
    # The same bits: the model is given its records as the slices of `predict` are.
    np.testing.assert_array_equal(standalone.load(served).predict(read_alone(path, served), batch_size=48, logits=True), logits)
    if how not in ("with a long field", "with characters at which Python cuts lines"):
        np.testing.assert_array_equal(logits, predicted_here(run, folder / "new.csv"))


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("new.csv", gzip.compress(b"price\n1\n"), "must be text in UTF-8, or named .gz or .zst if it is compressed so"),
        ("new.csv", "price\né\n".encode("latin-1"), "must be text in UTF-8"),
        (
            "new.csv.gz",
            gzip.compress(b"price,ad,user,item,words\n" + b"1,2,3,4,5\n" * 999)[:-9],
            "must be whole, and compressed as its name says",
        ),
    ],
    ids=["compressed", "latin-1", "cut short"],
)
def test_a_file_that_the_exported_model_cannot_read_is_named(
    served: Path, tmp_path: Path, name: str, content: bytes, why: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}: {why}"):
        read_alone(tmp_path / name, served)


def test_a_mark_before_records_without_a_header_is_no_part_of_the_first_value(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text(
        "label = 'y'\n[text]\ncolumns = ['y', 'city', 'ad']\n[[feature]]\nname = 'city'\nencoding = 'vocabulary'\n"
        "[[feature]]\nname = 'ad'\nrows = 40\n"
    )
    rows = [f"{k % 2},city{k % 2},ad{k % 30}" for k in range(120)]
    (tmp_path / "log.csv").write_text("\n".join(rows) + "\n", encoding="utf-8-sig")
    schedule = foreload.prepare(
        tmp_path / "log.csv", features=tmp_path / "f.toml", out=tmp_path / "out", batch_size=32, lanes=1, epochs=3
    )
    run = foreload.train(schedule, run=tmp_path / "run", store="local:1", dim=4, lr=0.3)
    (tmp_path / "new.csv").write_text("city1,ad1\ncity1,ad1\ncity0,ad1\n", encoding="utf-8-sig")
    first, second, third = run.predict(tmp_path / "new.csv")
    assert first == second != third
    run.export_torch(tmp_path / "served")
    read = read_alone(tmp_path / "new.csv", tmp_path / "served")
    assert read == [{"city": "city1", "ad": "ad1"}] * 2 + [{"city": "city0", "ad": "ad1"}]


BREAKS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.out = nn.Linear(spec.dense_width + spec.width, 1)

    def forward(self, dense, embeddings):
        logits = self.out(torch.cat([dense, *embeddings.values()], 1)).squeeze(1)
        return logits / (dense[:, 0] < 1000)
"""


def test_an_output_that_is_no_finite_number_is_an_error_that_names_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "breaks.py").write_text(BREAKS)
    (tmp_path / "f.toml").write_text(
        "label = 'y'\n[[dense]]\nname = 'price'\ntransform = 'none'\n[[feature]]\nname = 'ad'\nrows = 40\n"
    )
    (tmp_path / "log.csv").write_text("y,price,ad\n" + "".join(f"{k % 2},{k % 7},ad{k % 30}\n" for k in range(120)))
    schedule = foreload.prepare("log.csv", features="f.toml", out="out", batch_size=32, lanes=2)
    run = foreload.train(schedule, run="run", store="local:1", dim=4, model="breaks.py:Net")
    (tmp_path / "new.csv").write_text("price,ad\n" + "3,ad1\n" * 70 + "2000,ad1\n")
    line = refused("predict", "run", "new.csv", "--out", "scores.csv")
    assert re.match(r"predict: record 71: y: the model must give a finite number; got -?inf; look for numbers in it", line)
    assert not (tmp_path / "scores.csv").exists()
    run.export_torch("served")
    status = subprocess.run(
        [sys.executable, "served/model.py", "new.csv"],
        env=os.environ | numerics.environment(),
        check=False,
        capture_output=True,
        text=True,
    )
    assert status.returncode == 2
    assert "records[70]: y: the model must give a finite number" in status.stderr


def test_files_without_a_header_line_may_lack_labels_weights_and_groups(tmp_path: Path) -> None:
    columns = ["clicked", "seconds", "worth", "user", "ad"]
    (tmp_path / "f.toml").write_text(
        f"weight = 'worth'\ngroup = 'user'\n[text]\ncolumns = {columns}\n[[label]]\nname = 'clicked'\n[[label]]\nname = 'seconds'\n"
        "kind = 'number'\n[[feature]]\nname = 'ad'\nrows = 40\n"
    )
    rows = [[str(k % 2), f"{k % 5}.5", str(k % 3), f"u{k % 7}", f"ad{k % 30}"] for k in range(120)]
    for first in range(5):
        (tmp_path / f"{first}.csv").write_text("".join(",".join(row[first:]) + "\n" for row in rows))
    schedule = foreload.prepare(tmp_path / "0.csv", features=tmp_path / "f.toml", out=tmp_path / "out", batch_size=32, lanes=2)
    run = foreload.train(schedule, run=tmp_path / "run", store="local:1", dim=4, model="mmoe")
    whole = run.predict(tmp_path / "0.csv")
    assert whole.shape == (120, 2)
    for first in (2, 3, 4):
        assert run.predict(tmp_path / f"{first}.csv").tobytes() == whole.tobytes()
    with pytest.raises(RecordError, match="a line must have 5 columns, not '4'"):
        run.predict(tmp_path / "1.csv")


def test_what_cannot_be_predicted_is_refused(
    run: foreload.Run, schedule: foreload.Schedule, folder: Path, tmp_path: Path
) -> None:
    bad = write_log(tmp_path / "bad.csv", 0, 50)
    bad.write_text(bad.read_text().replace(",10,", ",1000,"))
    with pytest.raises(RecordError, match=r"more than 0 records are malformed.*bad\.csv:\d+: ad: an id must be"):
        run.predict(bad)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SourceError, match="no column 'price'"):
        run.predict(tmp_path / "other.csv")
    with pytest.raises(RunError, match="has fewer records than the evaluation samples"):
        run.predict(write_log(tmp_path / "short.csv", ROWS - HELD_OUT, ROWS - 1), steps_of=schedule)
    with pytest.raises(RunError, match="has other records, or in another order"):
        run.predict(write_log(tmp_path / "other.csv", 1, 1 + HELD_OUT), steps_of=schedule)
    assert refused("predict", run.path, bad, "--out", tmp_path / "scores.txt").startswith("--out: must end in .csv or .parquet")


def test_a_checkpoint_says_what_its_run_says(
    run: foreload.Run, schedule: foreload.Schedule, folder: Path, tmp_path: Path, logits: np.ndarray
) -> None:
    done("checkpoint", "save", run.path, "--to", tmp_path)
    (path,) = tmp_path.glob("step-*")
    checkpoint = foreload.open_checkpoint(path)
    assert (checkpoint.digest(), checkpoint.evaluate()) == (run.digest(), run.evaluate())
    assert path.name == f"step-{checkpoint.step}"
    assert checkpoint.predict(folder / "held-out.csv", steps_of=schedule, logits=True).tobytes() == logits.tobytes()
    asked, answered = (model.rows("item", values=["i3", "i5", None]) for model in (run, checkpoint))
    assert asked.ids.tolist() == answered.ids.tolist()
    assert asked.vectors.tobytes() == answered.vectors.tobytes()
    # Values of a vocabulary stand in the schedule alone.
    moved = Path(schedule).rename(tmp_path / "moved")
    try:
        with pytest.raises(foreload.ForeloadError, match="say where it is now: --schedule"):
            checkpoint.export(tmp_path / "out")
        exported = foreload.open_checkpoint(path, schedule=moved).export(tmp_path / "out")
        with pytest.raises(foreload.ForeloadError, match=r"has no checkpoint\.json"):
            foreload.open_checkpoint(folder)
    finally:
        moved.rename(schedule)
    applied = foreload.apply(tmp_path / "out", tmp_path / "served")
    assert (applied.step, applied.rows) == (checkpoint.step, sum(table["rows"] for table in exported.tables))
    assert run.export(tmp_path / "of-the-run").state == exported.state
    for file in (tmp_path / "of-the-run").iterdir():
        assert (tmp_path / "served" / file.name).read_bytes() == file.read_bytes()
    with pytest.raises(foreload.ForeloadError, match="nothing was trained since"):
        run.export(tmp_path / "increment", since=checkpoint)


def test_rows_are_those_of_the_export(run: foreload.Run, tmp_path: Path) -> None:
    about = run.export(tmp_path / "out")
    assert about.encoding == "encoding.json"
    how = json.loads((tmp_path / "out" / "encoding.json").read_text())
    assert {one["name"]: one["encoding"] for one in how["features"]}["user"] == "hash"
    for table in about.tables:
        exported = pq.read_table(tmp_path / "out" / table["file"])
        ids, weights = exported["id"].to_pylist(), np.array(exported["weight"].to_pylist(), np.float32)
        rows = run.rows(table["name"], ids=ids)
        assert rows.vectors.tobytes() == weights.tobytes()
        assert rows.trained.all()
        assert ("value" in exported.column_names) == (table["name"] == "item")
    items = pq.read_table(tmp_path / "out" / "item.parquet")
    known = [
        (value, weight) for value, weight in zip(items["value"].to_pylist(), items["weight"].to_pylist(), strict=True) if value
    ]
    assert known
    by_value = run.rows("item", values=[value for value, _ in known])
    assert by_value.vectors.tolist() == [weight for _, weight in known]


def test_rows_never_trained_have_their_initial_value_and_say_so(run: foreload.Run) -> None:
    every = run.rows("user", ids=range(USERS))
    some = run.rows("user", ids=[USERS - 1, 0, 0])
    assert not every.trained.all()
    assert every.trained.any()
    assert some.vectors[1].tobytes() == some.vectors[2].tobytes() == every.vectors[0].tobytes()
    # Initial weights lie within 1 / sqrt(rows of the table).
    bound = 1 / np.sqrt(np.float32(USERS))
    assert (np.abs(every.vectors[~every.trained]) <= bound).all()
    # Missing, any other value, and the same value twice.
    items = run.rows("item", values=[None, "none", "never seen", "B07X", "B07X"])
    assert items.ids[:3].tolist() == [0, 0, 1]
    assert items.ids[3] == items.ids[4] >= 2
    assert run.rows("ad", values=[5, "5"]).ids.tolist() == [5, 5]
    with pytest.raises(SettingError, match="TABLE: must be one of ad, user, item, words; got 'site'"):
        run.rows("site", values=["x"])
    with pytest.raises(SettingError, match=r"an id must be a whole number in 0 \.\. 299; got 300"):
        run.rows("ad", ids=[300])
    with pytest.raises(SettingError, match="not both"):
        run.rows("ad")


def test_lookup_prints_what_rows_gives(run: foreload.Run, tmp_path: Path) -> None:
    out = done("lookup", run.path, "item", "B07X", "never seen", "--json", tmp_path / "rows.json")
    rows = run.rows("item", values=["B07X", "never seen"])
    told = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["id"] for row in told] == rows.ids.tolist()
    assert np.array([row["vector"] for row in told], np.float32).tobytes() == rows.vectors.tobytes()
    first = out.splitlines()[0].split("  ")
    assert first[:3] == ["'B07X'", f"id {rows.ids[0]}", "trained"]
    assert np.array(first[3].split(), np.float32).tobytes() == rows.vectors[0].tobytes()
    assert done("lookup", run.path, "item", "0", "--ids").startswith("'0'  id 0  trained")


WITHOUT_FORELOAD = """
import csv, json, sys
sys.modules["foreload"] = None
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from model import load
records = list(csv.DictReader(open(sys.argv[2])))
model = load()
logits = model.predict(records, batch_size=48, logits=True)
print(logits.tobytes().hex())
try:
    model.predict([records[0] | {"ad": "300"}])
except ValueError as error:
    print(error)
"""


def test_a_model_exported_for_torch_predicts_the_same_where_foreload_is_not(
    run: foreload.Run, folder: Path, tmp_path: Path
) -> None:
    """In the slices of `foreload predict`, half of its batch of 96 for each of two lanes; DLRM's dot products are small enough to be torch's."""
    told = done("export", run.path, "--format", "torch", "--out", tmp_path / "served")
    assert "4 tables, and the dense part, after step" in told
    wanted = run.predict(folder / "new.csv", logits=True)
    apart = os.environ | numerics.environment()
    command = [sys.executable, "-c", WITHOUT_FORELOAD, str(tmp_path / "served"), str(folder / "new.csv")]
    logits, error = subprocess.run(command, env=apart, check=True, capture_output=True, text=True).stdout.splitlines()
    assert logits == wanted.tobytes().hex()
    assert error == "records[0]: ad: an id must be a whole number in 0 .. 299; got '300'"
    # As a command, and as the Python interface writes it, of a checkpoint; nothing else in the folder differs.
    command = [sys.executable, str(tmp_path / "served" / "model.py"), "--logits", str(folder / "new.csv")]
    lines = subprocess.run(command, env=apart, check=True, capture_output=True, text=True).stdout.splitlines()
    assert lines[0] == "logit"
    np.testing.assert_allclose(np.array(lines[1:], np.float32), wanted, rtol=1e-6, atol=1e-6)
    done("checkpoint", "save", run.path, "--to", tmp_path / "saved")
    saved = foreload.open_checkpoint(next((tmp_path / "saved").glob("step-*")))
    again = saved.export_torch(tmp_path / "again")
    assert (again.step, again.program, again.labels) == (saved.step, "dense.pt2", ({"kind": "click", "name": "clicked"},))
    for path in (tmp_path / "served").iterdir():
        # torch numbers what it traces; Python may leave what it compiled.
        if path.name not in ("dense.pt2", "features.json", "__pycache__"):
            assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name
