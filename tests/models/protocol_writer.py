"""What can happen next in a world of `protocol_model`: shards apply commands and die, connections break, and the writer goes its rounds."""

from __future__ import annotations

from collections.abc import Iterator

from protocol_model import (
    LOST,
    NO_MARKER,
    OK,
    REBUILDING,
    Cells,
    Change,
    Command,
    Contents,
    Log,
    Marker,
    Rules,
    Server,
    Setting,
    World,
    Writer,
    WrongRead,
    put,
    times,
)


class Model:
    """The protocol under some rules in some setting."""

    def __init__(self, setting: Setting, rules: Rules) -> None:
        self.setting = setting
        self.rules = rules
        self.last = len(setting.batches)

    def start(self) -> World:
        """The world in which everything begins: batch 0 is stored."""
        setting = self.setting
        older = Contents((0,) * setting.stripes, Marker(-1, -1))
        nothing = ((),) * setting.shards
        servers = tuple(
            Server(Contents(setting.truth[0][shard], Marker(0, 0)), frozenset([older])) for shard in range(setting.shards)
        )
        writer = Writer(
            n=0,
            phase="round",
            views=(OK,) * setting.shards,
            awaited=(0,) * setting.shards,
            sent=nothing,
            later=nothing,
            stored=True,
            replies=(None,) * setting.shards,
            parity_read=(None,) * setting.shards,
            asked=(False,) * setting.shards,
            cursor=(0,) * setting.shards,
            cut=(0,) * setting.shards,
        )
        return World(servers, writer, Log(0), setting.kills, setting.cuts, setting.wipes)

    def unprotecting(self, world: World) -> set[int]:
        """The shards that count as lost: dead, without all of their rows, or not OK for the writer."""
        views = world.writer.views
        return {shard for shard, server in enumerate(world.servers) if not server.alive or server.wiped or views[shard] != OK}

    def steps(self, world: World) -> Iterator[World]:
        """All worlds that can come next. Raises WrongRead."""
        for shard, server in enumerate(world.servers):
            if server.alive and server.queue:
                yield from self._applied(world, shard)
            if server.alive and server.zombies:
                yield self._zombie_arrived(world, shard)
            if world.writer.awaited[shard] and not server.connected:
                yield from self._noticed(world, shard)
            yield from self._failed(world, shard)
            yield from self._wiped(world, shard)
        writer = world.writer
        if writer.phase == "round":
            yield from self._round(world)
        elif not any(writer.awaited):
            acknowledged = {
                "flush": self._flushed, "read": self._read, "decode": self._decoded, "hold": self._held, "held": self._parity_phase,
                "parity": self._parity_acknowledged, "chunk": self._chunk_read, "rebuild": self._chunk_written, "finish": self._finished,
            }  # fmt: skip
            if writer.phase in acknowledged:
                yield acknowledged[writer.phase](world)

    # The shards and the network.

    def _applied(self, world: World, shard: int) -> Iterator[World]:
        """A shard applies the next command of its connection and acknowledges it; what it answers may show that it lost rows."""
        server, writer, setting = world.servers[shard], world.writer, self.setting
        command, contents = server.queue[0], server.contents
        assert contents is not None
        if command.read:
            writer = writer._replace(replies=put(writer.replies, shard, contents.cells))
            certain, possible = self._seen(writer, shard, contents)
        else:
            server = server.received(command, setting.stripes)
            certain = command.epoch == server.epoch and contents.new(command) != setting.new(shard, command)
            # What is known of a shard is never more than it has.
            assert not certain or setting.wipes or self.rules != Rules()
            certain, possible = certain and setting.wipes > 0 and self.rules.answers_counted, False
        writer = writer._replace(awaited=put(writer.awaited, shard, writer.awaited[shard] - 1))
        following = world._replace(servers=put(world.servers, shard, server._replace(queue=server.queue[1:])), writer=writer)
        if not certain:
            yield following
        if certain or possible:
            yield self._distrusted(following, shard)

    def _seen(self, writer: Writer, shard: int, contents: Contents) -> tuple[bool, bool]:
        """Whether a read shows for certain, or if it asks for the right rows, that a shard lacks something."""
        if not self.setting.wipes:
            return False, False
        if not self._expected(writer, shard, contents.marker):
            return True, False
        lacking = self.setting.lacking(shard, contents)
        # Where anything is decoded, all is asked for; else parity rows that the next batch updates.
        asked = set(range(self.setting.stripes))
        if writer.phase == "read":
            changed = self.setting.batches[writer.n] if writer.n < self.last else ()
            asked = {stripe for stripe, _ in changed if (self.setting.places[shard][stripe] or 0) >= self.setting.k}
        return bool(lacking & asked), bool(lacking)

    def _distrusted(self, world: World, shard: int) -> World:
        """The writer gives up a shard that is there; what it sent may still arrive."""
        server, writer = world.servers[shard], world.writer
        writes = tuple(command for command in server.queue if not command.read)
        closed = server._replace(connected=False, queue=(), zombies=server.zombies + writes)
        given_up = writer._replace(
            views=put(writer.views, shard, LOST),
            awaited=put(writer.awaited, shard, 0),
            sent=put(writer.sent, shard, ()),
            replies=put(writer.replies, shard, None),
        )
        return world._replace(servers=put(world.servers, shard, closed), writer=given_up)

    def _zombie_arrived(self, world: World, shard: int) -> World:
        server = world.servers[shard]
        server = server.received(server.zombies[0], self.setting.stripes)._replace(zombies=server.zombies[1:])
        return world._replace(servers=put(world.servers, shard, server))

    def _failed(self, world: World, shard: int) -> Iterator[World]:
        """The shard dies, or only its connection breaks."""
        server = world.servers[shard]
        if world.kills and server.alive and len(self.unprotecting(world) | {shard}) <= self.setting.r:
            dead = Server(None, server.history, alive=False, connected=False, epoch=server.epoch)
            yield world._replace(servers=put(world.servers, shard, dead), kills=world.kills - 1)
        if world.cuts and server.connected:
            writes = tuple(command for command in server.queue if not command.read)
            cut = server._replace(connected=False, queue=(), zombies=server.zombies + writes)
            yield world._replace(servers=put(world.servers, shard, cut), cuts=world.cuts - 1)

    def _wiped(self, world: World, shard: int) -> Iterator[World]:
        """A living shard loses all that it has, or one row."""
        server, setting = world.servers[shard], self.setting
        if not world.wipes or not server.alive or server.contents is None or server.contents.marker == NO_MARKER:
            return
        if len(self.unprotecting(world) | {shard}) > setting.r:
            return
        cells, marker = server.contents
        left = [("all", Contents((0,) * setting.stripes, NO_MARKER))]
        left += [("a row", Contents(put(cells, stripe, 0), marker)) for stripe, cell in enumerate(cells) if cell]
        for wiped, contents in left:
            emptied = server._replace(contents=contents, past=server.history, wiped=wiped)
            yield world._replace(servers=put(world.servers, shard, emptied), wipes=world.wipes - 1)

    # The writer learns of it.

    def _noticed(self, world: World, shard: int) -> Iterator[World]:
        """The writer waits in vain: it gives the shard up, or reconnects, by the fence, and looks at the marker."""
        server, writer = world.servers[shard], world.writer
        if len(self.unprotecting(world) | {shard}) <= self.setting.r:
            # What a dead server will come back with is open until someone looks.
            given_up = writer._replace(
                views=put(writer.views, shard, LOST), awaited=put(writer.awaited, shard, 0), sent=put(writer.sent, shard, ())
            )
            yield world._replace(writer=given_up)
        if writer.views[shard] == REBUILDING and self.rules.restart:
            return
        for contents in [server.contents] if server.alive else server.past:
            if contents is not None and self._expected(writer, shard, contents.marker) and self.all_there(contents, shard):
                queue = tuple(
                    command._replace(
                        epoch=server.epoch + self.rules.fence,
                        before=command.marker if command.marker == contents.marker else command.before,
                    )
                    for command in writer.sent[shard]
                )
                again = self._fenced(server)._replace(contents=contents, alive=True, connected=True, queue=queue)
                resent = writer._replace(awaited=put(writer.awaited, shard, len(writer.sent[shard])))
                yield world._replace(servers=put(world.servers, shard, again), writer=resent)

    def all_there(self, contents: Contents, shard: int) -> bool:
        """Whether a shard has as many rows as its marker stands for, if that is asked."""
        counted = self.setting.wipes and self.rules.rows_counted and not contents.marker.rebuilding
        return not counted or not self.setting.lacking(shard, contents)

    def _fenced(self, server: Server) -> Server:
        """The server with a new epoch. What it will refuse from now on need not be remembered."""
        epoch = server.epoch + self.rules.fence
        return server._replace(epoch=epoch, zombies=tuple(command for command in server.zombies if command.epoch == epoch))

    def _expected(self, writer: Writer, shard: int, marker: Marker) -> bool:
        """Whether a shard with this marker needs no more than the commands of this phase."""
        if marker.rebuilding != (writer.views[shard] == REBUILDING):
            return False
        n, rules = writer.n, self.rules
        if not (rules.exact_resend and rules.two_markers and rules.parity_first and rules.parity_awaited):
            current = n + (writer.phase == "parity")
            return {marker.p, marker.d} <= {current - 1, current}
        if writer.phase == "parity":
            return marker.d == n and marker.p in {n, n + 1}
        return marker.p == n and marker.d in ({n} if writer.stored else {n - 1, n})

    # The writer's rounds.

    def _send(self, world: World, writer: Writer, commands: list[tuple[Command, ...]]) -> World:
        """Send commands to every shard that is not lost. One to a broken connection is never applied."""
        sent = tuple(
            () if view == LOST else self._as_rules_say(of_shard) for of_shard, view in zip(commands, writer.views, strict=True)
        )
        servers = tuple(
            server._replace(queue=tuple(command._replace(epoch=server.epoch) for command in of_shard))
            if server.connected
            else server
            for server, of_shard in zip(world.servers, sent, strict=True)
        )
        return world._replace(servers=servers, writer=writer._replace(sent=sent, awaited=tuple(map(len, sent))))

    def _as_rules_say(self, commands: tuple[Command, ...]) -> tuple[Command, ...]:
        found: list[Command] = []
        for command in commands:
            marker = command.marker
            if marker is not None and not self.rules.two_markers:
                command = command._replace(marker=Marker(max(marker.p, marker.d), max(marker.p, marker.d), marker.rebuilding))
            if self.rules.first_alone and marker is not None and command.cells:
                parts = [Command((), command.marker), Command(command.cells)]
                found += parts if self.rules.first_alone == "marker" else parts[::-1]
            else:
                found.append(command)
        return tuple(found)

    def _read_alone(self, writer: Writer) -> list[tuple[Command, ...]]:
        return [(Command(read=True),) if view == OK else () for view in writer.views]

    def _asking(self, writer: Writer, phase: str) -> Writer:
        asked = tuple(view == OK for view in writer.views)
        return writer._replace(phase=phase, asked=asked, replies=(None,) * len(asked))

    def _round(self, world: World) -> Iterator[World]:
        """What a round may begin with: while not all shards are OK, mending, which may be put off."""
        writer = world.writer
        whole = set(writer.views) == {OK}
        waiting = any(writer.later)
        if waiting and not whole and self.rules.flushed_first:
            yield self._send(world, self._asking(writer, "flush"), list(writer.later))
            return
        for shard, view in enumerate(writer.views):
            if view == LOST:
                yield self._taken_back(world, shard)
            elif view == REBUILDING:
                yield self._repaired(world, shard)
        if writer.n < self.last or waiting:
            yield self._read_phase(world)
        elif REBUILDING not in writer.views:
            yield world._replace(writer=writer._replace(phase="done"))

    def _flushed(self, world: World) -> World:
        """Batch n is fully stored, nothing is under way."""
        writer = world.writer
        return world._replace(writer=writer._replace(phase="round", later=((),) * self.setting.shards, stored=True))

    def _taken_back(self, world: World, shard: int) -> World:
        """A server is there for a lost shard: fenced, emptied, marked as rebuilding. Until it is marked, it is empty or as before for all others."""
        server, writer = world.servers[shard], world.writer
        contents = Contents((0,) * self.setting.stripes, Marker(writer.n, writer.n, rebuilding=True))
        empty = self._fenced(server)._replace(contents=contents, past=server.history, alive=True, connected=True, wiped="")
        begun = writer._replace(views=put(writer.views, shard, REBUILDING), cursor=put(writer.cursor, shard, 0))
        return world._replace(servers=put(world.servers, shard, empty), writer=begun)

    def _repaired(self, world: World, shard: int) -> World:
        """Read for the next stripe of a rebuild; after the last, the marker says OK."""
        writer = world.writer._replace(rebuilt=shard)
        if writer.cursor[shard] < self.setting.stripes:
            return self._send(world, self._asking(writer, "chunk"), self._read_alone(writer))
        commands: list[tuple[Command, ...]] = [()] * self.setting.shards
        commands[shard] = (Command((), Marker(writer.n, writer.n), before=Marker(writer.n, writer.n)),)
        return self._send(world, self._asking(writer, "finish"), commands)

    def _chunk_read(self, world: World) -> World:
        """Write what the rebuilding shard should hold of the stripe at its cursor."""
        writer, shard = world.writer, world.writer.rebuilt
        if writer.views[shard] != REBUILDING or self._unread(writer):
            return world._replace(writer=writer._replace(phase="round"))
        stripe = writer.cursor[shard]
        place = self.setting.places[shard][stripe]
        commands: list[tuple[Command, ...]] = [()] * self.setting.shards
        if place is not None:
            cell = self.setting.combine(place, self.setting.decode(stripe, writer.replies))
            chunk = Command(((stripe, cell),), Marker(writer.n, writer.n))
            commands[shard] = self._for_rebuilding((chunk,), stripe + 1)
        return self._send(world, self._asking(writer, "rebuild"), commands)

    def _chunk_written(self, world: World) -> World:
        writer, shard = world.writer, world.writer.rebuilt
        following = writer.cursor[shard] + 1 if writer.cursor[shard] or self.rules.every_stripe else 2
        if writer.views[shard] == REBUILDING:
            writer = writer._replace(cursor=put(writer.cursor, shard, min(following, self.setting.stripes)))
        return world._replace(writer=writer._replace(phase="round"))

    def _finished(self, world: World) -> World:
        writer, shard = world.writer, world.writer.rebuilt
        views = put(writer.views, shard, OK) if writer.views[shard] == REBUILDING else writer.views
        return world._replace(writer=writer._replace(phase="round", views=views))

    def _read_phase(self, world: World) -> World:
        """Reads for batch n + 1, and what batch n has yet to send: nothing, unless all shards are OK."""
        writer = world.writer
        cut = writer.cursor if self.rules.cut_after_chunk else writer.cut
        commands = []
        for later in writer.later:
            read = Command(read=True)
            commands.append((read, *later) if self.rules.reads_leave_first else (*later, read))
        return self._send(world, self._asking(writer, "read")._replace(cut=cut), commands)

    def _unread(self, writer: Writer) -> bool:
        """Whether a shard was lost that this phase reads from."""
        return any(asked and view == LOST for asked, view in zip(writer.asked, writer.views, strict=True))

    def _read(self, world: World) -> World:
        """Batch n is fully stored. Rows on shards that are not OK are read again, from what is left of their stripes."""
        writer, rules = world.writer, self.rules
        readable = tuple(
            reply if asked and view == OK else None
            for reply, asked, view in zip(writer.replies, writer.asked, writer.views, strict=True)
        )
        under_way = any(writer.later)
        writer = writer._replace(later=((),) * self.setting.shards, parity_read=writer.replies)
        if writer.n == self.last:
            return world._replace(writer=writer._replace(phase="round", stored=True))
        if None in readable and rules.flushed_first:
            writer = self._asking(writer._replace(stored=writer.stored or rules.narrowed), "decode")
            return self._send(world, writer, self._read_alone(writer))
        self._check_rows(writer.n, readable, under_way)
        return world._replace(writer=writer._replace(phase="hold", stored=True))

    def _decoded(self, world: World) -> World:
        writer = world.writer
        if self._unread(writer):
            return self._send(world, self._asking(writer, "decode"), self._read_alone(writer))
        self._check_rows(writer.n, writer.replies, under_way=False)
        return world._replace(writer=writer._replace(phase="hold", stored=True))

    def _check_rows(self, n: int, replies: tuple[Cells | None, ...], under_way: bool) -> None:
        """Raise WrongRead for a row that is not read as batch n left it; those of batch n are not fetched while they are under way."""
        unasked = self.setting.batches[n - 1] if n and under_way else ()
        for stripe, rows in enumerate(self.setting.versions[n]):
            found = self.setting.decode(stripe, replies)
            for member, row in enumerate(rows):
                # A row that is missing would have been noticed if it had been asked for.
                own = self.setting.places_of(stripe)[member]
                missing = replies[own] is not None and row and not replies[own][stripe]  # type: ignore[index]
                if (stripe, member) not in unasked and found[member] != row and not missing:
                    raise WrongRead(f"batch {n}: row {member} of stripe {stripe}")

    def _changes(self, n: int) -> tuple[Change, ...]:
        """Rows of a batch. Old values are the base, which is kept beside the rows."""
        old, new = self.setting.versions[n - 1], self.setting.versions[n]
        return tuple(Change((g, m), old[g][m], new[g][m]) for g, m in self.setting.batches[n - 1])

    def _held(self, world: World) -> World:
        """Batch n + 1 takes the place of batch n in the log."""
        writer, n = world.writer, world.writer.n
        held = world._replace(writer=writer._replace(phase="held"))
        if not self.rules.log_first:
            return held
        if world.log.whole and not self.rules.records_in_turn:
            return world._replace(log=Log(n, whole=False))
        return held._replace(log=Log(n, self._changes(n + 1)))

    def _parity_phase(self, world: World) -> World:
        """Parity of batch n + 1."""
        rules, writer = self.rules, world.writer
        now: list[tuple[Command, ...]] = []
        later: list[tuple[Command, ...]] = []
        for shard, view in enumerate(writer.views):
            parity, data = self._of_next_batch(writer, shard)
            first, second = (parity, data) if rules.parity_first else (data, parity)
            if not rules.parity_awaited:
                first, second = (), (*parity, *data)
            if view == REBUILDING:
                first, second = (self._for_rebuilding(commands, writer.cut[shard]) for commands in (first, second))
            now.append(first)
            later.append(second)
        empty = (None,) * self.setting.shards
        return self._send(world, self._asking(writer, "parity")._replace(later=tuple(later), parity_read=empty), now)

    def _for_rebuilding(self, commands: tuple[Command, ...], cursor: int) -> tuple[Command, ...]:
        """Commands as they are sent to a rebuilding shard."""
        noted = []
        for command in commands:
            cells = tuple(cell for cell in command.cells if cell[0] < cursor)
            marker = command.marker
            if marker is not None and self.rules.rebuilding_noted:
                marker = marker._replace(rebuilding=True)
            noted.append(command._replace(cells=cells, marker=marker))
        return tuple(noted)

    def _of_next_batch(self, writer: Writer, shard: int) -> tuple[tuple[Command, ...], tuple[Command, ...]]:
        """Parity and data of batch n + 1 for a shard."""
        setting, n = self.setting, writer.n
        after_parity, after_data = Marker(n + 1, n), Marker(n + 1, n + 1)
        if not self.rules.parity_first:
            after_parity, after_data = Marker(n + 1, n + 1), Marker(n, n + 1)
        rows = setting.truth[n + 1][shard]
        data = tuple((stripe, rows[stripe]) for stripe, member in setting.batches[n] if setting.places[shard][stripe] == member)
        parity = Command(self._parity(writer, shard), after_parity, before=Marker(n, n))
        return (parity,), (Command(data, after_data, before=Marker(n + 1, n)),)

    def _parity(self, writer: Writer, shard: int) -> tuple[tuple[int, int], ...]:
        """The parity rows that batch n + 1 changes on a shard, as they will be."""
        setting, reply = self.setting, writer.parity_read[shard]
        changes = self._changes(writer.n + 1)
        cells = []
        for stripe in sorted({change.row[0] for change in changes}):
            place = setting.places[shard][stripe]
            if place is None or place < setting.k or reply is None:
                continue
            cell = 0 if self._never_written(stripe, writer.n) else reply[stripe]
            for change in changes:
                if change.row[0] == stripe:
                    cell ^= times(setting.code.generator(place)[change.row[1]], change.old ^ change.new)
            cells.append((stripe, cell))
        return tuple(cells)

    def _never_written(self, stripe: int, n: int) -> bool:
        """Whether the writer knows that no batch up to n, nor anyone before, has written to a stripe."""
        upto = n if self.rules.written_noted else n - 1
        before = {g for batch in self.setting.batches[: max(upto, 0)] for g, _ in batch} | {g for g, _ in self.setting.stored}
        return stripe not in before

    def _parity_acknowledged(self, world: World) -> World:
        rules, writer, log = self.rules, world.writer, world.log
        n = writer.n + 1
        if not rules.log_first:
            log = Log(n - 1, self._changes(n))
        if not rules.held_until_stored:
            log = Log(n)
        return world._replace(writer=writer._replace(n=n, phase="round", stored=False, cut=writer.cursor), log=log)
