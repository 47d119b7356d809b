"""A training of DeepCTR-Torch's DeepFM for peers_accuracy.py; runs in the virtual environment of peers_environment.py.

    python benchmarks/deepctr_contender.py '{"folder": "...", ...}'

As its documentation trains: columns encoded by scikit-learn's LabelEncoder over all splits, `compile` and `fit`. Epochs are given to `fit` one by
one, so that the validation and the test split are scored after each; training ends behind PATIENCE epochs that were no better. Written is
FOLDER/OUT: the scores of the best epoch.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pandas as pd
import torch
from deepctr_torch.inputs import SparseFeat
from deepctr_torch.models import DeepFM
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.preprocessing import LabelEncoder

SPLITS = ("train", "val", "test")


def scores(labels: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Log loss and AUC of a split."""
    return {"log_loss": float(log_loss(labels, predicted.astype(np.float64))), "auc": float(roc_auc_score(labels, predicted))}


def main() -> None:
    """Train, and write the scores of the best epoch."""
    spec: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    folder = Path(spec["folder"])
    frames = {name: pd.read_csv(folder / f"{name}.csv", dtype=str, keep_default_na=False) for name in SPLITS}
    columns = [name for name in frames["train"] if name != "label"]
    whole = pd.concat(frames.values())
    encoders = {name: LabelEncoder().fit(whole[name]) for name in columns}
    inputs = {of: {name: encoders[name].transform(frame[name]) for name in columns} for of, frame in frames.items()}
    labels = {of: frame["label"].astype(np.float32).to_numpy() for of, frame in frames.items()}
    settings = spec["settings"]
    features = [SparseFeat(name, len(encoders[name].classes_), embedding_dim=settings["dim"]) for name in columns]
    model = DeepFM(
        features,
        features,
        dnn_hidden_units=tuple(int(size) for size in settings["deep"].split("-")),
        dnn_dropout=settings["dropout"],
        l2_reg_embedding=settings["l2"],
        l2_reg_linear=settings["l2"],
        seed=spec["seed"],
        device="cpu",
    )
    model.compile(torch.optim.Adam(model.parameters(), lr=settings["lr"]), "binary_crossentropy")
    torch.manual_seed(spec["seed"])
    best: dict[str, Any] = {}
    for epoch in range(spec["epochs"]):
        model.fit(inputs["train"], labels["train"], batch_size=spec["batch"], epochs=1, verbose=0)
        measured = {of: scores(labels[of], model.predict(inputs[of], spec["batch"])) for of in ("val", "test")}
        if not best or measured["val"]["log_loss"] < best["val"]["log_loss"]:
            best = {"epoch": epoch + 1, **measured}
        elif epoch + 1 - best["epoch"] >= spec["patience"]:
            break
    Path(spec["out"]).write_text(json.dumps(best), encoding="utf-8")


if __name__ == "__main__":
    main()
