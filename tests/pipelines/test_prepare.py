"""From files to the samples that a schedule is compiled from, against the reference's reading of the same files; and what is refused."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pytest
import reference_data as reference
from grids import covering

from foreload.base.errors import ForeloadError, SettingError
from foreload.base.settings import settings_of
from foreload.pipelines import prepare
from foreload.pipelines.beam.read import CollectPieces
from foreload.pipelines.compiler.compile import Compilation
from foreload.pipelines.errors import DiskError, RecordError, ScheduleError, SlotsError, SourceError
from foreload.pipelines.planning import options
from foreload.pipelines.planning.options import PrepareOptions
from foreload.pipelines.planning.work_folder import estimate_rows
from foreload.pipelines.samples.feature_file import load_features
from foreload.pipelines.samples.features import FeatureSpec
from foreload.pipelines.samples.pieces import OrderedSource, Samples
from foreload.pipelines.schedule.at_work import Watch, at_work
from foreload.pipelines.schedule.format import ScheduleManifest
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.sources import Source, plan_splits

FEATURES = """
label = "clicked"
{order}
[table.word]
{word}
[[dense]]
name = "price"
transform = "{transform}"
[[feature]]
name = "left"
table = "word"
encoding = "{encoding}"
min_count = {min_count}
[[feature]]
name = "right"
table = "word"
encoding = "{encoding}"
min_count = {min_count}
[[feature]]
name = "tags"
encoding = "hash"
rows = 50
pooling = "sum"
"""


@dataclass(frozen=True)
class Case:
    """A way to encode and order; as a feature file and as the reference's Log."""

    encoding: str = "hash"
    transform: str = "log"
    order_by: str | None = None
    order_type: str = "text"

    def features(self, path: Path) -> Path:
        order = "" if self.order_by is None else f'order_by = "{self.order_by}"\norder_type = "{self.order_type}"'
        vocabulary = self.encoding == "vocabulary"
        word, min_count = ("", 3) if vocabulary else ("rows = 30", 1)
        path.write_text(
            FEATURES.format(order=order, word=word, transform=self.transform, encoding=self.encoding, min_count=min_count),
            encoding="utf-8",
        )
        return path

    def log(self) -> reference.Log:
        vocabulary = self.encoding == "vocabulary"
        words = [reference.Feature(n, 0, n, self.encoding, min_count=3 if vocabulary else 1) for n in ("left", "right")]
        return reference.Log(
            labels=(reference.Label("clicked", "clicked"),),
            dense=(reference.Dense("price", "price", self.transform),),
            features=(*words, reference.Feature("tags", 1, "tags", "hash", pooling="sum")),
            tables=(reference.Table("word", None if vocabulary else 30), reference.Table("tags", 50)),
            order_by=self.order_by,
            order_type=self.order_type,
        )


def write_csv(path: Path, rows: int, seed: int) -> Path:
    """Random clicks; prices, tags and times are missing here and there."""
    generator = random.Random(seed)
    lines = ["clicked,price,left,right,tags,time"]
    for _ in range(rows):
        price = generator.choice(["", str(generator.randrange(-5, 90)), f"{generator.random():.4f}"])
        tags = "|".join(str(generator.randrange(40)) for _ in range(generator.randrange(4)))
        time = "" if generator.random() < 0.02 else str(generator.randrange(100))
        lines.append(f"{generator.randrange(2)},{price},w{generator.randrange(25)},w{generator.randrange(60)},{tags},{time}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def keep(path: Path, chunks: list[tuple[Samples, np.ndarray]]) -> None:
    """Save chunks of samples and their numbers as one."""
    if chunks:
        samples = Samples.concat([s for s, _ in chunks])
        assert samples.offsets is not None
        numbers = np.concatenate([n for _, n in chunks])
        np.savez(path, labels=samples.labels, dense=samples.dense, ids=samples.ids, offsets=samples.offsets, numbers=numbers)


def assert_same(path: Path, expected: reference.Samples) -> np.ndarray:
    """The samples kept in a file are the reference's, to the bit; returns their numbers."""
    with np.load(path) as found:
        assert np.array_equal(found["labels"], expected.labels)
        assert np.array_equal(found["dense"].view(np.uint32), expected.dense.astype(np.float32).view(np.uint32))
        bags = [bag for sample in expected.bags for bag in sample]
        assert np.array_equal(found["ids"], np.concatenate(bags))
        assert np.array_equal(np.diff(found["offsets"]), [len(bag) for bag in bags])
        return found["numbers"]


def run(tmp_path: Path, *arguments: str | Path) -> dict[str, Any]:
    """Prepare into tmp_path/schedule, keeping what is compiled in tmp_path/dump."""
    words, folder, compile_all = [str(a) for a in arguments], tmp_path / "dump", Compilation.compile

    def keep_and_compile(compilation: Compilation, source: OrderedSource, *further: Any) -> ScheduleManifest:
        settings = compilation.settings
        folder.mkdir()
        for epoch in range(settings.epochs):
            keep(folder / f"training-{epoch}.npz", list(source.training(epoch)))
        keep(folder / "evaluation.npz", list(source.evaluation()))
        (folder / "rows.json").write_text(json.dumps(settings.features.table_rows))
        return compile_all(compilation, source, *further)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compilation, "compile", keep_and_compile)
        return prepare.run(
            [
                "--format",
                "csv",
                "--batch-size",
                "64",
                "--lanes",
                "2",
                "--slots",
                "200",
                "--out",
                str(tmp_path / "schedule"),
                *words,
            ]
        )


CASES = [
    Case(),
    Case(encoding="vocabulary", transform="standard"),
    Case(order_by="time", order_type="integer"),
    Case(encoding="vocabulary", transform="standard", order_by="time", order_type="integer"),
    Case(order_by="left"),
]
# tail: whether the evaluation samples are the last of the training files, or in a file of their own.
ONE_EVALUATION_A_CASE = covering([(case, bool((place + k) % 2)) for place, case in enumerate(CASES) for k in range(2)], 2)


@pytest.mark.parametrize(("case", "tail"), ONE_EVALUATION_A_CASE, ids=str)
def test_samples_are_those_of_the_definitions(case: Case, tail: bool, tmp_path: Path) -> None:
    first, second = write_csv(tmp_path / "a.csv", 700, 1), write_csv(tmp_path / "b.csv", 500, 2)
    other = write_csv(tmp_path / "other.csv", 150, 3)
    evaluation = ("--eval-fraction", "0.3") if tail else ("--eval-source", other)
    summary = run(tmp_path, first, second, *evaluation, "--features", case.features(tmp_path / "features.toml"))
    expected = reference.load(case.log(), [first, second], [] if tail else [other], 0.3 if tail else 0.0)
    assert json.loads((tmp_path / "dump" / "rows.json").read_text()) == list(expected.rows)
    numbers = assert_same(tmp_path / "dump" / "training-0.npz", expected.training)
    assert np.array_equal(numbers, np.arange(len(numbers)))
    assert_same(tmp_path / "dump" / "evaluation.npz", expected.evaluation)
    assert (summary["training_samples"], summary["evaluation_samples"]) == (840, 360) if tail else (1200, 150)
    assert not [path for path in (tmp_path / "schedule").iterdir() if path.name.startswith(".")], "nothing is left of the work"


def test_every_epoch_is_shuffled_by_its_documented_key(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", 900, 1)
    case = Case(order_by="time", order_type="integer")
    run(tmp_path, file, "--features", case.features(tmp_path / "features.toml"), "--epochs", "2", "--shuffle-seed", "7")
    expected = reference.load(case.log(), [file])
    orders = [reference.shuffled(7, epoch, 900) for epoch in range(2)]
    for epoch, order in enumerate(orders):
        numbers = assert_same(tmp_path / "dump" / f"training-{epoch}.npz", expected.training.take(order))
        assert np.array_equal(numbers, order)
    assert not np.array_equal(orders[0], orders[1])


def refused(tmp_path: Path, *arguments: str | Path, csv: bool = True) -> ForeloadError:
    """The error that these arguments end in; its message is one line, and no schedule is left that could be taken for whole."""
    out = tmp_path / "schedule"
    defaults = ("--format", "csv", "--batch-size", "64", "--lanes", "2", "--out", str(out)) if csv else ()
    with pytest.raises(ForeloadError) as caught:
        prepare.run([*defaults, *(str(a) for a in arguments)])
    assert "\n" not in str(caught.value)
    assert not (out / "schedule.json").exists()
    assert not (out / ".work").exists()
    return caught.value


@pytest.fixture
def features(tmp_path: Path) -> Path:
    return Case().features(tmp_path / "features.toml")


def test_what_can_be_seen_without_the_data_is_refused_at_once(features: Path, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", 50, 1)
    for arguments, words in {
        (file, "--features", features, "--batch-size", "0"): "--batch-size: must be at least 1; got 0",
        (file, "--features", features, "--lanes", "65"): "--lanes: must be at most 64; got 65",
        (file, "--features", features, "--placement", "near"): "--placement: must be one of order, locality; got 'near'",
        (
            file,
            "--features",
            features,
            "--slots",
            "few",
        ): "--slots: must be a number, min, all, or a size such as 2GiB; got 'few'",
        (file, "--features", features, "--memory", "1 parsec"): "--memory: must be a size such as 1GiB",
        (file, "--features", features, "--slots", "9", "--memory", "1GB"): "--memory: cannot be given with --slots",
        (file, "--features", features, "--eval-fraction", "1.5"): "--eval-fraction: must be between 0 and 1",
        (file, "--features", features, "--eval-fraction", "0.5", "--eval-source", file): "choose one of them",
        (file, "--features", features, "--format", "avro"): "--format: must be one of criteo, csv",
        (file, "--features", features, "--batchsize=3"): "--batchsize=3: is not an option",
        (file, "--features", features, "--rows", "3"): "--rows: is for --format synthetic",
        (file,): "--features: --format csv needs a feature file",
        ("--features", features): "SOURCE: --format csv needs at least one file",
        ("--format", "synthetic"): "--rows: --format synthetic needs",
        (file, "--format", "synthetic", "--rows", "5"): "SOURCE: --format synthetic reads no files",
        (file, "--features", features, "--after", tmp_path / "schedule"): "--out: must not be the schedule that --after",
        (file, "--features", features, "--after", tmp_path / "nowhere"): "nowhere",
        (file, "--features", tmp_path / "nothing.toml"): "nothing.toml: cannot read the feature file",
        (tmp_path / "*.tsv", "--features", features): "no file matches",
    }.items():
        assert words in str(refused(tmp_path, *arguments))
        assert not (tmp_path / "schedule").exists()


def test_required_options_are_named(tmp_path: Path) -> None:
    for missing, given in (("--format", ["--out=x", "--batch-size=1"]), ("--out", ["--format=criteo", "--batch-size=1"])):
        assert str(refused(tmp_path, *given, csv=False)).startswith(f"{missing}: is missing")


@pytest.mark.parametrize("pattern", ["*.csv", "./*.csv", "../*/*.csv", "[ab].csv"])
def test_patterns_are_those_of_the_working_directory(
    features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    for seed, name in enumerate(("a.csv", "b.csv")):
        write_csv(folder / name, 30, seed)
    monkeypatch.chdir(folder)
    assert run(tmp_path, pattern, "--features", features)["training_samples"] == 60


def test_malformed_records_are_counted_and_the_first_ones_named(features: Path, tmp_path: Path) -> None:
    first, second = write_csv(tmp_path / "a.csv", 60, 1), write_csv(tmp_path / "b.csv", 60, 2)
    malformed = ((first, 40), (second, 7), (second, 9))  # file and line
    for file, line in malformed:
        lines = file.read_text().splitlines()
        fields = lines[line - 1].split(",")
        lines[line - 1] = ",".join([fields[0], "dear", *fields[2:]])
        file.write_text("\n".join(lines) + "\n")
    error = refused(tmp_path, first, second, "--features", features, "--max-rejects", "2")
    assert isinstance(error, RecordError)
    places = [str(error).find(f"{file}:{line}: price:") for file, line in malformed]
    assert min(places) >= 0
    assert places == sorted(places)
    assert "'dear'" in str(error)
    rejects = [json.loads(line) for line in (tmp_path / "schedule" / "rejects.jsonl").read_text().splitlines()]
    assert [(r["file"], r["line"], r["field"]) for r in rejects] == [(str(file), line, "price") for file, line in malformed]
    summary = run(tmp_path, first, second, "--features", features, "--max-rejects", "3")
    assert (summary["training_samples"], summary["rejected"]) == (117, 3)


def test_what_only_the_data_shows_ends_in_one_line_too(features: Path, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", 300, 1)
    empty = tmp_path / "empty.csv"
    empty.write_text(file.read_text().splitlines()[0] + "\n")
    assert isinstance(refused(tmp_path, empty, "--features", features), SourceError)
    assert isinstance(refused(tmp_path, file, "--features", features, "--eval-source", empty), SourceError)
    assert "--eval-fraction: must hold out at least one" in str(
        refused(tmp_path, file, "--features", features, "--eval-fraction", "0.001")
    )
    error = refused(tmp_path, file, "--features", features, "--slots", "3")
    assert isinstance(error, SlotsError)
    assert json.loads((tmp_path / "schedule" / "failed.json").read_text())["error"] == str(error)
    with pytest.raises(ScheduleError, match="preparing it failed"):
        Schedule(tmp_path / "schedule")
    run(tmp_path, file, "--features", features)  # what failed may be replaced without a word
    assert Schedule(tmp_path / "schedule").complete


def test_a_truncated_compressed_file_is_refused(features: Path, tmp_path: Path) -> None:
    whole = gzip.compress(write_csv(tmp_path / "a.csv", 5000, 1).read_bytes())
    (tmp_path / "a.csv.gz").write_bytes(whole[: len(whole) // 2])
    error = refused(tmp_path, tmp_path / "a.csv.gz", "--features", features)
    assert isinstance(error, SourceError)
    assert "a.csv.gz" in str(error)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_read(
    features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_csv(tmp_path / "a.csv", 300, 1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    assert isinstance(refused(tmp_path, file, "--features", features), DiskError)


def test_only_a_schedule_is_replaced_and_only_when_asked(features: Path, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", 100, 1)
    first = run(tmp_path, file, "--features", features)
    shutil.rmtree(tmp_path / "dump")
    with pytest.raises(ScheduleError, match="add --overwrite"):
        run(tmp_path, file, "--features", features)
    assert Schedule(tmp_path / "schedule").checksum == first["checksum"]
    again = run(tmp_path, file, "--features", features, "--overwrite")
    assert again["checksum"] == first["checksum"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    with pytest.raises(ScheduleError, match="other files in it"):
        run(tmp_path, file, "--features", features, "--out", tmp_path / "other")


def test_two_at_once_do_not_write_the_same_schedule(features: Path, tmp_path: Path) -> None:
    file, out = write_csv(tmp_path / "a.csv", 100, 1), tmp_path / "schedule"
    (out / ".work").mkdir(parents=True)
    watch = Watch(out / ".work" / "lock")
    with at_work(out / ".work" / "lock"):
        assert not watch.gone()
        with pytest.raises(ScheduleError, match="another `foreload prepare` is writing there"):
            run(tmp_path, file, "--features", features)
        assert not watch.gone()
    assert watch.gone()
    run(tmp_path, file, "--features", features)


def test_a_job_file_gives_options_and_flags_win(features: Path, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", 100, 1)
    job = tmp_path / "job.toml"
    job.write_text(
        f'[prepare]\nsources = ["{file}"]\nfeatures = "{features}"\nformat = "csv"\nbatch-size = 10\nlanes = 3\nepochs = 2\nmemory = "2MB"\n'
    )
    report = tmp_path / "report.json"
    summary = prepare.run(["--job", str(job), "--lanes=1", "--out", str(tmp_path / "s"), "--json", str(report)])
    assert (summary["training_steps"], summary["lanes"]) == (20, 1)
    assert json.loads(report.read_text()) == summary
    job.write_text("[prepare]\nbatches = 10\n")
    with pytest.raises(SettingError, match="has no setting 'batches'"):
        prepare.run(["--job", str(job)])


def test_more_data_continues_numbers_steps_and_encoding(tmp_path: Path) -> None:
    case = Case(encoding="vocabulary", transform="standard")
    features = case.features(tmp_path / "features.toml")
    first, second = write_csv(tmp_path / "a.csv", 640, 1), write_csv(tmp_path / "b.csv", 320, 2)
    run(tmp_path, first, "--features", features, "--placement", "order")
    parent, expected = tmp_path / "schedule", reference.load(case.log(), [first], [second])
    (tmp_path / "more").mkdir()
    run(tmp_path / "more", second, "--features", features, "--after", parent)
    header = Schedule(tmp_path / "more" / "schedule").header
    assert (header.first_step, header.first_number, header.parent) == (10, 640, Schedule(parent).checksum)
    assert header.placement == "order", "the parent's, unless told otherwise"
    assert_same(tmp_path / "more" / "dump" / "training-0.npz", expected.evaluation)
    other = Case(encoding="hash").features(tmp_path / "other.toml")
    assert "--features: must be those" in str(refused(tmp_path / "more" / "x", second, "--features", other, "--after", parent))
    assert "--lanes: must be" in str(
        refused(tmp_path / "more" / "x", second, "--features", features, "--after", parent, "--lanes", "1")
    )
    locality = ("--features", features, "--after", parent, "--placement", "locality")
    assert "--placement: must be order, as in the schedule of --after; got locality" in str(
        refused(tmp_path / "more" / "x", second, *locality)
    )


def test_flags_of_beam_pass_through_with_and_without_an_equals_sign() -> None:
    own, flags = options.split_flags(
        [
            "a.csv",
            "--runner",
            "PortableRunner",
            "--lanes",
            "2",
            "--streaming",
            "b.csv",
            "--parallelism",
            "4",
            "--x=1",
            "--",
            "--odd",
        ]
    )
    assert own == ["--lanes", "2", "--", "a.csv", "b.csv", "--odd"]
    assert flags == ["--runner", "PortableRunner", "--streaming", "--parallelism", "4", "--x=1"]


def test_the_help_page_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        prepare.run(["--help"])
    assert caught.value.code == 0
    page = capsys.readouterr().out
    for name in (*(setting.flag for setting in settings_of(PrepareOptions).values()), "examples:", "docs/flink.md"):
        assert name in page
    assert max(len(line) for line in page.splitlines()) <= 130


class Interrupted(beam.DoFn):
    """Meets Ctrl-C."""

    def process(self, element: Any) -> Iterator[Any]:
        raise KeyboardInterrupt


def test_ctrl_c_leaves_nothing_that_could_be_taken_for_whole(features: Path, tmp_path: Path) -> None:
    file, out = write_csv(tmp_path / "a.csv", 100, 1), tmp_path / "schedule"
    command = [str(file), "--features", str(features), "--format", "csv", "--batch-size", "64", "--out", str(out)]
    with pytest.raises(KeyboardInterrupt):
        prepare.run(command, wrap=lambda stage: Interrupted() if isinstance(stage, CollectPieces) else stage)
    assert [path.name for path in out.iterdir()] == ["failed.json"]
    with pytest.raises(ScheduleError, match="it was stopped before it was complete"):
        Schedule(out)


def test_rows_are_estimated_by_the_length_of_lines(tmp_path: Path) -> None:
    file, packed = write_csv(tmp_path / "a.csv", 5000, 1), tmp_path / "b.csv.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    spec = load_features(Case().features(tmp_path / "features.toml"))
    splits = plan_splits(Source("csv", (str(file),)), spec)
    assert abs(estimate_rows(splits) - 5000) < 250
    assert 2500 < estimate_rows(plan_splits(Source("csv", (str(packed),)), spec)) < 20_000
    assert estimate_rows(plan_splits(Source("synthetic", rows=1234), FeatureSpec.synthetic())) == 1234


@pytest.mark.parametrize("shuffled", [False, True])
def test_the_disk_estimate_covers_what_a_run_takes(shuffled: bool, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", 3000, 1)
    features = Case(order_by="time", order_type="integer").features(tmp_path / "features.toml")
    flags = ("--epochs", "2", *(("--shuffle-seed", "1") if shuffled else ()))
    summary = run(tmp_path, file, "--features", features, *flags)
    assert summary["bytes"] < summary["estimated_bytes"] < 20 * summary["bytes"]
