"""From ratings to a model that can be served, with MovieLens' files: a model of one's own, two labels, four learning rates, a report, an export.

    python examples/movielens.py [--ratings ratings.csv --movies movies.csv] [--out movielens]

Without files, ratings of the same form are made up.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import csv

import foreload

HERE = Path(__file__).resolve().parent
GENRES = (
    "Action",
    "Adventure",
    "Animation",
    "Comedy",
    "Crime",
    "Documentary",
    "Drama",
    "Fantasy",
    "Horror",
    "Romance",
    "Thriller",
)
RATES = (0.01, 0.03, 0.1, 0.3)


def made_up(folder: Path, count: int = 30_000, users: int = 600, movies: int = 400) -> tuple[Path, Path]:
    """Files like MovieLens' ratings.csv and movies.csv: who likes which genres, and which movies are good, decides."""
    random = np.random.default_rng(0)
    has = random.random((movies, len(GENRES))) < 0.25
    has[np.arange(movies), random.integers(len(GENRES), size=movies)] = True
    taste, quality = random.normal(size=(users, len(GENRES))), random.normal(size=movies)
    user, movie = random.integers(users, size=count), (movies * random.random(count) ** 2).astype(int)
    liking = (taste[user] * has[movie]).sum(1) / np.sqrt(has[movie].sum(1)) + quality[movie] + 0.5 * random.normal(size=count)
    stars = np.clip(np.round(2 * (3.4 + 0.9 * liking)) / 2, 0.5, 5)
    ratings = pa.table(
        {"userId": user + 1, "movieId": movie + 1, "rating": stars, "timestamp": 1_000_000_000 + 60 * np.arange(count)}
    )
    genres = ["|".join(np.array(GENRES)[row]) for row in has]
    named = pa.table({"movieId": np.arange(movies) + 1, "title": [f"Movie {k + 1}" for k in range(movies)], "genres": genres})
    csv.write_csv(ratings, folder / "ratings.csv")
    csv.write_csv(named, folder / "movies.csv")
    return folder / "ratings.csv", folder / "movies.csv"


def main() -> None:
    """Everything, from the files to predictions of the exported model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratings", type=Path, help="MovieLens' ratings.csv")
    parser.add_argument("--movies", type=Path, help="and its movies.csv")
    parser.add_argument("--out", type=Path, default=Path("movielens"), help="a new folder for all that is written")
    given = parser.parse_args()
    out: Path = given.out
    out.mkdir(parents=True)

    # 1. One file with a row a rating: genres are joined to it.
    ratings, movies = (given.ratings, given.movies) if given.ratings else made_up(out)
    genres = csv.read_csv(movies).select(["movieId", "genres"])
    rows = csv.read_csv(ratings).join(genres, "movieId", join_type="inner")
    rows = rows.sort_by([(name, "ascending") for name in ("timestamp", "userId", "movieId")])
    csv.write_csv(rows, out / "rated.csv")

    # 2. Which rows are needed when: known before training begins. The last tenth is for evaluation.
    schedule = foreload.prepare(
        out / "rated.csv",
        format="csv",
        features=HERE / "movielens.toml",
        out=out / "schedule",
        eval_fraction=0.1,
        batch_size=256,
        epochs=3,
    )
    if schedule.summary is not None:
        print(
            f"{schedule.summary.training_samples:,} ratings to train on, {schedule.summary.evaluation_samples:,} to evaluate on"
        )

    # 3. Four learning rates: the one that tells best what will be liked stays.
    runs = {}
    for rate in RATES:
        run = foreload.train(
            schedule,
            run=out / f"run-{rate}",
            store="local:1",
            model=f"{HERE / 'movielens_model.py'}:Ratings",
            dim=16,
            lr=rate,
            dense_lr=rate,
        )
        liked, stars = (run.summary.labels[name] for name in ("liked", "stars"))
        print(f"learning rate {rate}: liked: AUC {liked['auc']:.4f}; stars: off by {stars['rmse']:.3f} (RMSE)")
        runs[liked["log_loss"]] = run
    best, second = (runs[loss] for loss in sorted(runs)[:2])

    # 4. A page to look at: the best run beside the second.
    print(f"report: {best.report(out / 'report.html', beside=second)}")

    # 5. A model that can be served, without foreload: tables, encoding and the dense part in a folder.
    best.export_torch(out / "model")
    spec = importlib.util.spec_from_file_location("served", out / "model" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    served = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(served)
    model = served.load(out / "model")

    # 6. It says of raw records what the run says of them.
    newest = rows.slice(rows.num_rows - 1000)
    csv.write_csv(newest.drop_columns(["rating"]), out / "new.csv")
    theirs, ours = model.predict(newest.to_pylist()), best.predict(out / "new.csv")
    apart = 0.0
    for column, name in enumerate(("liked", "stars")):
        print(f"{name}: {np.asarray(theirs[name])[:3].tolist()}")
        apart = max(apart, float(np.abs(np.asarray(theirs[name]) - ours[:, column]).max()))
    print(f"the exported model and the run differ by {apart:.1e} at most")
    if apart > 1e-6:
        raise SystemExit("they should differ by a millionth at most")


if __name__ == "__main__":
    main()
