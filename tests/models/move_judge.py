"""What a new owner makes of the shards of `move_model`: which it trusts, where the cursor is, and what finishes or undoes a chunk."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from move_model import UNMIGRATED, Command, Contents, Migrated, Record, Rules, Scope
from protocol_model import NO_MARKER, Marker, times

LAST_TERM = 99


class Outcome(Enum):
    """Of a takeover: all trusted shards have what they must; one has not; more than r are not trusted."""

    RIGHT = "right"
    WRONG = "wrong"
    TOO_FEW = "too few"


class Judged(NamedTuple):
    """at: where the cursor is. commands: of each trusted shard, what finishes or undoes a chunk there; None: nothing does."""

    at: int
    commands: dict[int, Command | None]


class Judge:
    """How new owners judge, under some rules."""

    def __init__(self, scope: Scope, rules: Rules) -> None:
        self.scope = scope
        self.rules = rules

    def trusts(self, record: Record, shard: int, contents: Contents) -> bool:
        """Whether a shard has what it takes to play the record, by its marker and its number of rows."""
        marker, migrated = contents.marker, contents.migrated
        if marker.rebuilding or not {marker.p, marker.d} <= {record.number, record.before}:
            return False
        held = record.held[shard][(marker.p == record.number) + (marker.d == record.number)]
        if self.rules.held and migrated is not None and migrated.n == marker.p == marker.d:
            held = migrated.held
        return contents.rows == held

    def judge(self, found: tuple[Contents | None, ...], record: Record, versions: tuple[int, int], term: int) -> Judged | None:
        """found: None where a shard is lost; versions: of the placement that is, and of that which rows move to. None: no shard can be trusted."""
        scope, (current, announced) = self.scope, versions
        asked = scope.asked(current, announced)
        there = {s: one for s, one in enumerate(found) if s in asked and one is not None and self.trusts(record, s, one)}
        if not self.rules.versions:
            begun = UNMIGRATED._replace(upto=current * scope.stripes)
            there = {s: one if one.at.upto > begun.upto else one._replace(migrated=begun) for s, one in there.items()}
        joining = self._joining(found, there, versions, record.number, term)
        if not there:
            return None
        all_judged = []
        for top in sorted({one.at for one in there.values()}, key=self._order, reverse=True):
            judged = self._judged_by(top, there, record, term)
            judged.commands.update(joining)
            if len(asked) - len(judged.commands) <= scope.r or not self.rules.fewest:
                return judged
            all_judged.append(judged)
        return all_judged[0]

    def _joining(
        self, found: tuple[Contents | None, ...], there: dict[int, Contents], versions: tuple[int, int], number: int, term: int
    ) -> dict[int, Command]:
        """The shards that come in, and to which no owner has come yet; what has them take part."""
        (current, announced), scope = versions, self.scope
        begun = current * scope.stripes
        if not self.rules.joining or any(one.at.upto > begun for one in there.values()):
            return {}
        command = self.joined(number, begun, term)
        return {
            s: command
            for s in scope.of_version[announced] - scope.of_version[current]
            if found[s] == Contents((0,) * scope.stripes, NO_MARKER)
        }

    def _judged_by(self, top: Migrated, there: dict[int, Contents], record: Record, term: int) -> Judged:
        """What follows if the cursor is where the newest of the shards that are right is."""
        says_top = [one.at for one in there.values() if self._order(one.at) == self._order(top)]
        chunk = min(says_top, key=lambda migrated: migrated.start)
        done = any(migrated.done for migrated in says_top) or not self.rules.rolled_back
        judged = Judged(chunk.upto if done else chunk.start, {})
        for shard, one in there.items():
            trusted, command = self._finished(shard, one, record, chunk, term) if done else self._undone(shard, one, chunk, term)
            if trusted:
                judged.commands[shard] = command
        return judged

    def _order(self, migrated: Migrated) -> tuple[int, int]:
        """By which what a shard says is older or newer."""
        return (migrated.term if self.rules.rolled_back_by_term else 0), migrated.upto

    def joined(self, number: int, at: int, term: int) -> Command:
        """What makes a shard one that has no rows."""
        migrated = Migrated(at, at, True, number, 0, term) if self.rules.joined_moved else None
        return Command((), Marker(number, number), migrated)

    def _undone(self, shard: int, one: Contents, chunk: Migrated, term: int) -> tuple[bool, Command | None]:
        """Whether a shard is trusted where a chunk is only copied, and what rolls it back."""
        migrated = one.at
        if self._order(migrated) != self._order(chunk):
            return (migrated.done and migrated.upto == chunk.start) or not self.rules.others_left, None
        return True, self._without_copies(shard, one, term)

    def _without_copies(self, shard: int, one: Contents, term: int) -> Command:
        """What takes the copies of a chunk from a shard."""
        start, upto = one.at.start, one.at.upto
        coming = [(g, 0) for g in self.scope.moving(shard, start, upto)[0] if one.cells[g]]
        return Command(tuple(coming), one.marker, Migrated(start, start, True, one.at.n, one.rows - len(coming), term))

    def _finished(self, shard: int, one: Contents, record: Record, chunk: Migrated, term: int) -> tuple[bool, Command | None]:
        """Whether a shard is trusted where some say that a chunk is done, and what does it."""
        rules, migrated = self.rules, one.at
        coming, leaving = self.scope.moving(shard, chunk.start, chunk.upto)
        if migrated.done and migrated.upto == chunk.upto:
            return True, None
        if not migrated.done and migrated.start == chunk.upto:
            return True, self._without_copies(shard, one, term)
        before = migrated.done and migrated.upto == chunk.start
        if self._order(migrated) != self._order(chunk) and not before:
            return not rules.others_left, None
        if before and rules.stale_targets and (shard in chunk.targets if rules.targets_named else coming):
            return False, None
        # No row may have been written since: then all shards would have said done.
        if rules.at_n and not (record.number == chunk.n and one.marker == Marker(chunk.n, chunk.n)):
            return False, None
        left = [(g, 0) for g in leaving if one.cells[g]]
        return True, Command(tuple(left), one.marker, chunk._replace(done=True, held=one.rows - len(left)))

    def leftover(
        self, found: tuple[Contents | None, ...], judged: Judged, record: Record, versions: tuple[int, int]
    ) -> tuple[int, ...]:
        """By shard, how many rows of those that it keeps, as all leave it, have moved away."""
        counts, arithmetic = [0] * self.scope.shards, self.scope.held(record.batch, judged.at)
        for shard, command in judged.commands.items():
            if shard in self.scope.keeping(*versions) and self.rules.leftover:
                one = found[shard]
                assert one is not None
                one = one if command is None else one.after(command)
                stage = (one.marker.p == record.number) + (one.marker.d == record.number)
                counts[shard] = one.rows - arithmetic[shard][stage if record.rows else 2]
        return tuple(counts)

    def parity_played(self, record: Record, shard: int, contents: Contents, at: int) -> Command | None:
        """What brings a shard to a record's parity; None if it is there."""
        if contents.marker.p == record.number:
            return None
        if not record.rows:
            return Command((), Marker(record.number, record.number))
        cells, geometry = dict(enumerate(contents.cells)), self.scope.geometry
        old, new = geometry.versions[record.batch - 1], geometry.versions[record.batch]
        for stripe, member in record.rows:
            place = self.scope.place(shard, stripe, at)
            if place is not None and place >= self.scope.k:
                change = old[stripe][member] ^ new[stripe][member]
                cells[stripe] ^= times(geometry.code.generator(place)[member], change)
        return Command(tuple(cells.items()), Marker(record.number, contents.marker.d))

    def data_played(self, record: Record, shard: int, contents: Contents, at: int) -> Command | None:
        """What brings a shard that has a record's parity to its data; None if it is there."""
        if contents.marker.d == record.number or not record.rows:
            return None
        new = self.scope.geometry.versions[record.batch]
        cells = tuple((g, new[g][m]) for g, m in record.rows if self.scope.place(shard, g, at) == m)
        return Command(cells, Marker(record.number, record.number))

    def taken_over(
        self, found: tuple[Contents | None, ...], record: Record, versions: tuple[int, int]
    ) -> tuple[Outcome, set[int]]:
        """What a new owner that is not disturbed makes of shards, and which it does not trust."""
        judged = self.judge(found, record, versions, LAST_TERM)
        asked = self.scope.asked(*versions)
        if judged is None or len(asked) - len(judged.commands) > self.scope.r:
            return Outcome.TOO_FEW, set(asked)
        for shard, command in judged.commands.items():
            contents = found[shard]
            assert contents is not None
            contents = contents if command is None else contents.after(command)
            for play in (self.parity_played, self.data_played):
                played = play(record, shard, contents, judged.at)
                contents = contents if played is None else contents.after(played)
            keeps = shard in self.scope.keeping(*versions)
            if not self.scope.as_it_should(shard, contents.cells, record.batch, judged.at, keeps):
                return Outcome.WRONG, set()
        return Outcome.RIGHT, set(asked - judged.commands.keys())
