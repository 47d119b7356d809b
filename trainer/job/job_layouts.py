"""How the rows look that a job trains."""

from __future__ import annotations

from foreload.cache.rows.layout import RowLayout
from foreload.pipelines.samples.features import FeatureSpec
from foreload.trainer.compute.row_layouts import layouts
from foreload.trainer.job.job import TrainJob
from foreload.trainer.models.built_in import further_columns_of


def layouts_of(job: TrainJob, features: FeatureSpec) -> list[RowLayout]:
    """The layout of each table's rows, in order. features: of its schedule. Raises SettingError and ModelError."""
    further = further_columns_of(job.model, job.model_folder)
    return layouts(features, further, job.dim, job.row_optimizers(features))
