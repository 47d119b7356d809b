"""Exchange parts of the run's folder with trainers on hosts that do not have it.

This is the side that has the folder. The parts go over the rendezvous store.
"""

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
    """Return the facts about a run, by its current manifest, for trainers without its folder."""
    return RunFacts(manifest.identity, manifest.stages[-1])


def publish_dense(rendezvous: Rendezvous, run: Run, spec: LaunchSpec) -> None:
    """Publish the dense part from which a run goes on, for trainers without its folder.

    Nothing is published if all trainers have the folder, or if the run begins without one.

    Raises:
        PeerLost: The rendezvous store is gone.
        RunError: The dense part cannot be read.
    """
    if spec.hosts is None or not spec.resumes:
        return
    try:
        data = run.dense(spec.start_step).read_bytes()
    except OSError as error:
        raise RunError(f"{run.dense(spec.start_step)}: cannot be read ({error}); restore the run's folder") from error
    rendezvous.publish_bytes(DenseAtStart.of(data, spec.start_step), data)


def save_over_hosts(rendezvous: Rendezvous, run: Run, spec: LaunchSpec, term: int, ended: Mapping[int, TrainerEnd]) -> None:
    """Save what trainers without the run's folder left in the rendezvous store at the end.

    These are the dense part and the end of each lane's log, or the files of rows that trainers
    keep. If all trainers have the folder, there is nothing to do.

    Args:
        term: The term in which the trainers ended.

    Raises:
        PeerLost: The rendezvous store is gone.
        RunError: The run's folder cannot be read or written.
    """
    if spec.hosts is None:
        return
    ends = list(ended.values())  # all at the same step
    for trainer in ended:
        for count in itertools.count():
            if rendezvous.poll(KeptFileElsewhere, term, trainer, count) is None:
                break
            file, data = rendezvous.read_bytes(KeptFileElsewhere, term, trainer, count)
            write_kept(run.path, file.name, data)
    if rendezvous.poll(DenseAtEnd, term) is not None:
        _, data = rendezvous.read_bytes(DenseAtEnd, term)
        write_dense(run.dense(ends[0].step), data)
    # With parity the next owner of a lane needs the number of the last batch in its log. Trainers
    # on several hosts hold their logs in memory, so an empty record with that number is put here.
    if run.placement.r:
        log = FileLog(run.path / LOG)
        for end in ends:
            for lane, number in end.last_batches.items():
                if number:
                    log.hold(lane, LoggedBatch.empty(number, number, None))
        log.close()
