"""More epochs of a schedule's own samples: the model is that of one schedule with as many, and nothing of the raw logs is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import small_terms
from command_line import refused
from training import train

from foreload.cache.client.local import LocalStores
from foreload.pipelines import prepare
from foreload.pipelines.schedule.kept import keep
from foreload.pipelines.schedule.reader import Schedule


def more(parent: Path, out: Path, *further: str) -> Schedule:
    prepare.run([f"--after={parent}", f"--out={out}", "--slots=120", *further])
    return Schedule(out)


@pytest.mark.parametrize(
    ("shuffle_seed", "further"),
    [(None, ()), (7, ("--window=300",)), pytest.param(None, ("--window=300",), marks=pytest.mark.full)],
)
@pytest.mark.usefixtures("one_thread")
def test_the_model_is_that_of_one_schedule(
    tmp_path: Path, servers: LocalStores, shuffle_seed: int | None, further: tuple[str, ...]
) -> None:
    given = () if shuffle_seed is None else (f"--shuffle-seed={shuffle_seed}",)
    first = small_terms.schedule(tmp_path, "--eval-every=5", *given)
    os.rename(tmp_path / "log.csv", tmp_path / "away.csv")  # it is not read again
    second = more(first.path, tmp_path / "second", "--epochs=1", *further)
    third = more(second.path, tmp_path / "third", "--epochs=2", "--eval-every=7")
    assert (second.header.first_epoch, third.header.first_epoch, third.header.end_step) == (2, 3, 60)
    assert (second.header.eval_every, third.header.eval_every) == (5, 7)
    assert second.header.first_number == third.header.first_number == 0
    job = small_terms.job()
    trained = [train(job, first, servers.urls, 2)]
    for schedule in (second, third):
        trained.append(train(job, schedule, servers.urls, 1, resume=trained[-1]))
    os.rename(tmp_path / "away.csv", tmp_path / "log.csv")
    expected = small_terms.plainly(tmp_path, shuffle_seed=shuffle_seed, epochs=5)
    assert trained[-1].digest == expected.digest
    assert [step.loss for one in trained for step in one.steps] == expected.log_losses
    at_ends = [e for one in trained for e in one.evaluations if (e.step + 1) % 12 == 0]
    assert [e.epoch for e in at_ends] == list(range(5))
    assert [e.log_loss for e in at_ends] == pytest.approx([e.log_loss for e in expected.evaluations])


def test_what_cannot_be_gone_on_with_is_refused(tmp_path: Path) -> None:
    parent = small_terms.schedule(tmp_path)
    given = ("prepare", "--after", parent.path, "--out", tmp_path / "more")
    assert "--epochs K for K more epochs" in refused(*given)
    again = (*given, "--epochs", "1")
    assert refused(*again, "--batch-size", "16").startswith("--batch-size: must be the schedule's 32")
    assert refused(*again, "--lanes", "2").startswith("--lanes: must be 4, as in the schedule of --after")
    assert refused(*again, "--shuffle-seed", "3").startswith("--shuffle-seed: is for new samples")
    assert refused(*again, "--eval-fraction", "0.5").startswith("--eval-fraction: is for new samples")
    keep(parent, tmp_path / "kept" / "schedule")
    (tmp_path / "kept" / "schedule" / "position.json").write_text("{}")
    kept = ("prepare", "--after", tmp_path / "kept" / "schedule", "--out", tmp_path / "more", "--epochs", "1")
    assert "has only the part of a schedule that a run keeps" in refused(*kept, "--slots", "100")
    (parent.path / "schedule.json").unlink()
    assert "unfinished" in refused(*again)
    assert not (tmp_path / "more").exists()
