"""The reference workload with more lanes than one: the same slots in all, a store that holds every lane's rows, and what TorchRec reads."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from comparison import tell
from foreload.pipelines.schedule.reader import Schedule
from foreload.pipelines.schedule.walk import state_after
from foreload.trainer.compute.layouts import model_spec
from workload import BATCH, DIM, Size, Workload, events_of


class LanesWorkload(Workload):
    """The workload of `lanes` lanes, slots shared out evenly."""

    def __init__(self, folder: Path, size: Size, lanes: int) -> None:
        super().__init__(folder / f"{lanes}-lanes", size)
        self.lanes = lanes

    def _prepare(self, name: str, samples: int, slots: int, *more: str) -> Path:
        return super()._prepare(name, samples, slots // self.lanes, "--lanes", str(self.lanes), *more)

    def slices(self, schedule: Schedule) -> Path:
        """A folder of what a trainer without a schedule reads: per lane V the slices of all whole steps, in files that can be mapped.

        ids-V int64 [steps, features * samples]: ids by feature and then sample; dense-V float32 [steps, samples, n]; labels-V float32
        [steps, samples].
        """
        folder = schedule.path.with_name(schedule.path.name + "-slices")
        if folder.exists():
            return folder
        tell(f"writing the slices of {schedule.path.name}")
        temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
        temporary.mkdir()
        header, events = schedule.header, events_of(schedule)
        features, samples = len(header.features.features), BATCH // self.lanes
        shapes = {
            "ids": (features * samples,),
            "dense": (samples, model_spec(header.features, DIM).dense_width),
            "labels": (samples,),
        }
        out = {
            (name, lane): np.lib.format.open_memmap(
                temporary / f"{name}-{lane}.npy", "w+", np.int64 if name == "ids" else np.float32, (len(events), *shape)
            )
            for name, shape in shapes.items()
            for lane in range(self.lanes)
        }
        # By lane the id of the row in each slot; the tables are not needed, since each feature has a table of its own.
        id_in_slot = [np.zeros(slots, np.int64) for slots in header.slots]
        entry = state_after(schedule, header.first_step - 1).lanes
        for lane, ids in enumerate(id_in_slot):
            ids[entry[lane].slots] = entry[lane].occupants.id
        for place, event in enumerate(events):
            moves = [schedule.lane(event, lane) for lane in range(self.lanes)]
            for lane, ids in enumerate(id_in_slot):
                ids[moves[lane].arrivals.slot] = moves[lane].arrivals.id
            used = [ids[of.slots] for ids, of in zip(id_in_slot, moves, strict=True)]
            for lane, own in enumerate(moves):
                bit = 1 << lane
                local = np.concatenate([ids[(of.users & bit) != 0] for ids, of in zip(used, moves, strict=True)])
                if len(own.labels) != samples:
                    raise SystemExit(f"lane {lane} has {len(own.labels)} samples of step {event.step}; ranks need {samples} each")
                out["ids", lane][place] = local[own.index].reshape(samples, features).T.reshape(-1)
                out["dense", lane][place] = own.dense.reshape(samples, -1)
                out["labels", lane][place] = own.labels[:, 0]
        for file in out.values():
            file.flush()
        temporary.rename(folder)
        return folder
