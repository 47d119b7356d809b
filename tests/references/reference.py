"""Plain synchronous training with whole tables in memory and no cache: what the project's digests are held against.

Follows docs/definitions.md alone, in this module and in reference_data, reference_config, reference_tables, reference_rates, reference_sums,
reference_trainer and reference_metrics. Of the project they use the modules of foreload.trainer.models with what they are told (ModelSpec,
Embeddings), connect from foreload.trainer.models.layers, and the numerics settings; reading, hashing, initial rows, gathers, sums, row optimizers and
the digest are written there afresh, for correctness before speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from reference_config import Config, config_of
from reference_data import Placement, load, rows_of, shuffled
from reference_metrics import Evaluation, evaluation_of
from reference_trainer import Trainer

from foreload.trainer.compute import numerics


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """digest: hex; log_losses: per training step; evaluations, evaluated: in order, of a pass those of each set, and after which step each; logits:
    float32 [n] or, of several labels, [n, labels], of the last pass, by sample number.
    """

    digest: str
    log_losses: list[float]
    evaluations: list[Evaluation]
    logits: np.ndarray
    evaluated: list[int] = field(default_factory=list)


def train(config: Config) -> ReferenceResult:
    """Read, train and evaluate. The caller has applied the numerics settings (foreload.trainer.compute.numerics) to the process."""
    data = load(
        config.log, config.sources, config.evaluation_sources, config.evaluation_fraction, [*config.evaluation_sets.values()]
    )
    evaluated_sets = [data.evaluation.take(np.arange(*of_set)) for of_set in data.sets]
    trainer = Trainer(config, data)
    log_losses: list[float] = []
    evaluations: list[Evaluation] = []
    logits = np.zeros(0, np.float32)
    count = len(data.training)
    placement = Placement(config.lanes, config.placement)
    slices: dict[int, list[list[int]]] = {}  # of the steps of an epoch, by their first samples
    evaluated: list[int] = []
    for epoch in range(config.epochs):
        order = np.arange(count) if config.shuffle_seed is None else shuffled(config.shuffle_seed, epoch, count)
        for first in range(0, count, config.batch_size):
            batch = data.training.take(order[first : first + config.batch_size])
            if epoch == 0 or config.shuffle_seed is not None:
                slices[first] = placement.slices(rows_of(config.log, batch))
            log_losses.append(trainer.step(len(log_losses), batch, slices[first]))
            if config.stop_after == len(log_losses) - 1:
                return ReferenceResult(trainer.digest(), log_losses, evaluations, logits, evaluated)
            place = first // config.batch_size + 1
            at_end = first + config.batch_size >= count
            if len(data.evaluation) and (at_end or (config.eval_every is not None and place % config.eval_every == 0)):
                outputs = [trainer.evaluate(of_set, len(log_losses)) for of_set in evaluated_sets]
                logits = np.concatenate(outputs)
                for name, of_set, samples in zip(config.evaluation_sets or [""], outputs, evaluated_sets, strict=True):
                    evaluations.append(replace(evaluation_of(config, of_set, samples), set=name))
                    evaluated.append(len(log_losses) - 1)
    return ReferenceResult(trainer.digest(), log_losses, evaluations, logits, evaluated)


def main(arguments: Sequence[str] | None = None) -> None:
    config, threads = config_of(arguments)
    numerics.set_up(threads)
    result = train(config)
    for epoch, evaluation in enumerate(result.evaluations):
        print(
            f"epoch {epoch}: log loss {evaluation.log_loss:.6f}, AUC {evaluation.auc:.6f}, normalized entropy {evaluation.normalized_entropy:.6f}"
        )
    print(f"digest {result.digest}")


if __name__ == "__main__":
    main()
