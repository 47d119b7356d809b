"""What trainers on hosts without the run's folder get of it and leave for it, over the rendezvous store: the side that has the folder."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from foreload.cache.protocol.ownership.batch_log import FileLog, LoggedBatch
from foreload.trainer.assembly.dense_file import write_dense
from foreload.trainer.cluster.messages.facts import DenseAtEnd, DenseAtStart, KeptFileElsewhere
from foreload.trainer.cluster.messages.rendezvous import Rendezvous
from foreload.trainer.cluster.messages.trainers import LaunchSpec, RunFacts, TrainerEnd
from foreload.trainer.errors import RunError
from foreload.trainer.run.directory import LOG, Run
from foreload.trainer.run.manifest import Manifest
from foreload.trainer.saved.kept_lanes import write_kept


def run_facts(run: Run, manifest: Manifest) -> RunFacts:
    """What trainers without a run's folder receive about it. manifest: as it is by now."""
    return RunFacts(manifest.identity, manifest.stages[-1])


def publish_dense(rendezvous: Rendezvous, run: Run, spec: LaunchSpec) -> None:
    """Put the dense part that a run goes on from in the rendezvous store, where there are trainers without its folder. Raises PeerLost, RunError."""
    if spec.hosts is None or not spec.resumes:
        return
    try:
        data = run.dense(spec.start_step).read_bytes()
    except OSError as error:
        raise RunError(f"{run.dense(spec.start_step)}: cannot be read ({error}); restore the run's folder") from error
    rendezvous.publish_bytes(DenseAtStart.of(data, spec.start_step), data)


def save_over_hosts(rendezvous: Rendezvous, run: Run, spec: LaunchSpec, term: int, ended: Mapping[int, TrainerEnd]) -> None:
    """Put into a run's folder what trainers without it have left in the rendezvous store at the end of a term: the dense part, and where each lane's
    log ends, or the files that they keep.

    Where all trainers have that folder, there is nothing to be done. Raises PeerLost, RunError.
    """
    if spec.hosts is None:
        return
    ends = list(ended.values())  # all of the same step
    for trainer in ended:
        for count in itertools.count():
            if rendezvous.poll(KeptFileElsewhere, term, trainer, count) is None:
                break
            file, data = rendezvous.read_bytes(KeptFileElsewhere, term, trainer, count)
            write_kept(run.path, file.name, data)
    if rendezvous.poll(DenseAtEnd, term) is not None:
        _, data = rendezvous.read_bytes(DenseAtEnd, term)
        write_dense(run.dense(ends[0].step), data)
    if run.placement.r:
        log = FileLog(run.path / LOG)
        for end in ends:
            for lane, number in end.last_batches.items():
                if number:
                    log.hold(lane, LoggedBatch.empty(number, number, None))
        log.close()
