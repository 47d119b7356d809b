"""Every world of `protocol_model` that can be reached, and in each the death of the writer together with every loss.

In each world the writer may die there and then: commands under way are applied or not (each mixture is a world of its own). With it go all
sets of shards that may be lost, at most R with those that are lost already, each of them empty or back with any earlier contents. A new
owner fences, recovers from the log, and dies after any of its commands, whereupon another recovers. A case is *wrong* if then

- a shard that the new owner trusts holds a row or a parity row that is not what the log says (so some row reads wrong, or would after a loss),
- or more than R shards are not trusted.

Without a log there is nothing to go by: wrong is then a row that nobody was writing and that is not what it was, or one that is neither
old nor new.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from exploration import RIGHT, UNTRUSTED, WRONG, loss_sets, reached, wrong_cases
from protocol_model import LOST, OK, REBUILDING, Cells, Contents, Log, Marker, Rules, Server, Setting, World, WrongRead, times
from protocol_writer import Model


@dataclass(slots=True)
class Findings:
    """What was explored. worlds: distinct; cases: worlds x losses; wrong: cases; wrong_reads: steps at which the living writer misread;
    unnoticed: worlds in which the writer takes a shard for whole that was emptied and written to since, and lacks rows.

    degraded, rebuilding: worlds in which a shard is lost, or being rebuilt, for the writer; finished: in which all is written; restored: of
    these, after a loss, with all shards OK again.
    """

    worlds: int = 0
    cases: int = 0
    wrong: int = 0
    wrong_reads: int = 0
    unnoticed: int = 0
    degraded: int = 0
    rebuilding: int = 0
    finished: int = 0
    restored: int = 0

    def note(self, setting: Setting, world: World, had_losses: bool) -> None:
        """Count a world."""
        views = world.writer.views
        self.worlds += 1
        self.degraded += LOST in views
        self.rebuilding += REBUILDING in views
        if world.writer.phase in ("round", "done"):
            self.unnoticed += any(
                server.wiped == "covered" and server.contents is not None and views[shard] == OK
                and setting.lacking(shard, server.contents)
                for shard, server in enumerate(world.servers)
            )  # fmt: skip
        if world.writer.phase == "done":
            self.finished += 1
            self.restored += had_losses and set(views) == {OK}

    @property
    def found(self) -> int:
        """How many wrong states there are."""
        return self.wrong + self.wrong_reads + self.unnoticed


@dataclass
class Takeover:
    """What a new owner makes of the shards."""

    model: Model
    _tallies: dict[tuple[tuple[Contents | None, ...], int, Log], tuple[int, ...]] = field(default_factory=dict)

    def recovery(self, contents: Contents, shard: int, log: Log) -> Iterator[Contents]:
        """The contents of a trusted shard after each command of the recovery, the last when it is done."""
        setting, rules = self.model.setting, self.model.rules
        n = log.last
        if log.changes and (contents.marker.p < n or not rules.p_heeded):
            cells = list(contents.cells)
            for (stripe, member), old, new in log.changes:
                place = setting.places[shard][stripe]
                if place is not None and place >= setting.k:
                    cells[stripe] ^= times(setting.code.generator(place)[member], old ^ new)
            contents = Contents(tuple(cells), Marker(n, contents.marker.d))
            yield contents
        rows = {stripe: new for (stripe, member), _, new in log.changes if setting.places[shard][stripe] == member}
        cells = [rows.get(stripe, cell) for stripe, cell in enumerate(contents.cells)]
        yield Contents(tuple(cells), Marker(n, n))

    def tally_as_is(self, server: Server, shard: int, log: Log) -> tuple[int, ...]:
        """1 at the outcome of a living shard, 0 at the others."""
        if self._harmed(server, shard, log):
            return 0, 0, 1
        return self._tally((server.contents,), shard, log)

    def tally_if_lost(self, server: Server, shard: int, log: Log) -> tuple[int, ...]:
        """How many of the contents that a shard may come back with (nothing, or what it once had) have each outcome."""
        return self._tally((None, *server.history), shard, log)

    def _tally(self, contents: tuple[Contents | None, ...], shard: int, log: Log) -> tuple[int, ...]:
        key = contents, shard, log
        if key not in self._tallies:
            tally = [0, 0, 0]
            for one in contents:
                tally[self._outcome(one, shard, log)] += 1
            self._tallies[key] = tuple(tally)
        return self._tallies[key]

    def _outcome(self, contents: Contents | None, shard: int, log: Log) -> int:
        rules = self.model.rules
        if contents is None or (contents.marker.rebuilding and rules.rebuilding_noted):
            return UNTRUSTED
        if rules.marker_compared and log.whole and min(contents.marker.p, contents.marker.d) < log.stored:
            return UNTRUSTED
        if not self.model.all_there(contents, shard):
            return UNTRUSTED
        truth = self.model.setting.truth[log.last][shard]
        for half_way in self.recovery(contents, shard, log):
            *_, recovered = self.recovery(half_way, shard, log)
            if recovered.cells != truth:
                return WRONG
        return RIGHT

    def _harmed(self, server: Server, shard: int, log: Log) -> bool:
        """Whether commands of the old owner that arrive after the takeover, or later, change what the new owner wrote."""
        commands = [*server.zombies, *(command for command in server.queue if not command.read)]
        if not commands:
            return False
        epoch = server.epoch + self.model.rules.fence
        for n in range(log.last, self.model.last + 1):
            later = Server(Contents(self.model.setting.truth[n][shard], Marker(n, n)), epoch=epoch)
            for command in commands:
                later = later.received(command, self.model.setting.stripes)
                if later.contents is None or later.contents.cells != self.model.setting.truth[n][shard]:
                    return True
        return False


def explore(setting: Setting, rules: Rules | None = None) -> Findings:
    """Visit everything."""
    model = Model(setting, rules or Rules())
    check = _losses_with_log if model.rules.log else _losses_without_log
    takeover = Takeover(model)
    findings = Findings()

    def steps(world: World) -> Iterator[World]:
        try:
            yield from model.steps(world)
        except WrongRead:
            findings.wrong_reads += 1

    for world in reached(model.start(), steps):
        findings.note(setting, world, had_losses=world.kills < setting.kills or world.wipes < setting.wipes)
        cases, wrong = check(takeover, world)
        findings.cases += cases
        findings.wrong += wrong
    return findings


def _loss_sets(model: Model, world: World) -> Iterator[tuple[int, ...]]:
    return loss_sets(range(model.setting.shards), model.unprotecting(world), model.setting.r)


def _losses_with_log(takeover: Takeover, world: World) -> tuple[int, int]:
    """Cases and wrong cases of one world. Shards recover independently of each other, so cases are counted by shard."""
    model, log = takeover.model, world.log
    as_is, if_lost = [], []
    for shard, server in enumerate(world.servers):
        if_lost.append(takeover.tally_if_lost(server, shard, log))
        as_is.append(takeover.tally_as_is(server, shard, log) if server.alive else if_lost[-1])
    cases = wrong = 0
    for lost in _loss_sets(model, world):
        tallies = [if_lost[shard] if shard in lost else as_is[shard] for shard in range(model.setting.shards)]
        total, of_them = wrong_cases(tallies, model.setting.r)
        cases += total
        wrong += of_them
    return cases, wrong


def _losses_without_log(takeover: Takeover, world: World) -> tuple[int, int]:
    """Cases and wrong cases of one world, where shards are lost for good and nothing says what was under way."""
    model = takeover.model
    setting, n = model.setting, world.writer.n
    dead = {shard for shard, server in enumerate(world.servers) if not server.alive}
    in_flight = set(setting.batches[n]) if world.writer.phase == "parity" and n < model.last else set()
    if not world.writer.stored:
        in_flight |= set(setting.batches[n - 1])
    cases = wrong = 0
    for lost in _loss_sets(model, world):
        of_shards = tuple(
            None if shard in dead or shard in lost or server.contents is None or server.contents.marker.rebuilding
            else server.contents.cells
            for shard, server in enumerate(world.servers)
        )  # fmt: skip
        cases += 1
        wrong += not all(_reads(setting, n, stripe, of_shards, in_flight) for stripe in range(setting.stripes))
    return cases, wrong


def _reads(setting: Setting, n: int, stripe: int, of_shards: tuple[Cells | None, ...], in_flight: set[tuple[int, int]]) -> bool:
    members = setting.decode(stripe, of_shards)
    versions = [setting.versions[max(n - 1, 0)][stripe], setting.versions[n][stripe]]
    versions.append(setting.versions[min(n + 1, len(setting.batches))][stripe])
    return all(
        member in {version[place] for version in versions} if (stripe, place) in in_flight else member == versions[1][place]
        for place, member in enumerate(members)
    )
