"""The program of a change of store shards: whoever dies at whichever step, the next driver goes on to the same end.

Every state is visited in which either driver may die, with what its folder and its servers have then. The drivers here do what the two of the product
do (`commands.migrate`, `cluster.coordinator.row_migration`), on a world that is a few values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pytest

from foreload.cache.parity.placement import Placement
from foreload.trainer.run.manifest import Manifest
from foreload.trainer.run.servers import store_setting
from foreload.trainer.run.shard_change import ShardProgram, Step

BEGIN: tuple[str, ...] = ("redis://a:1", "redis://b:1", "redis://c:1")


@dataclass(frozen=True)
class Change:
    """What is asked: add a server, or remove the shard whose server is `left`, or both, moving it."""

    added: str = ""
    left: str = ""

    def __str__(self) -> str:
        return " ".join([*(["add", self.added] if self.added else []), *(["leave", self.left] if self.left else [])])

    def applied(self, placement: Placement, urls: Sequence[str]) -> tuple[Placement, tuple[str, ...]]:
        """The placement with this under way, and the servers by number then."""
        if not self.added:
            return placement.without(urls.index(self.left)), tuple(urls)
        wanted = placement.with_migrated(urls.index(self.left)) if self.left else placement.with_added(1)
        return wanted, (*urls, self.added)


@dataclass(frozen=True)
class World:
    """What outlives a driver. migrated: the version of the placement that all rows have moved by; holding: servers that have something of the run;
    silent: those that did not answer as they were left.
    """

    manifest: Manifest
    placement: Placement
    migrated: int
    holding: frozenset[str]
    silent: frozenset[str] = frozenset()

    @property
    def key(self) -> Hashable:
        named = (self.manifest.store_urls, self.manifest.former_urls, self.manifest.job["store"])
        return named, self.placement.version, self.placement.migrating, self.migrated, self.holding, self.silent


@dataclass(frozen=True)
class Driver:
    """Who does the steps. asked: whether a change was asked for; in_use: the servers that its trainers use; ending: these have ended."""

    kind: Literal["stores", "train"]
    program: ShardProgram
    urls: tuple[str, ...]
    asked: bool = False
    in_use: frozenset[str] = frozenset()
    ending: bool = False

    @property
    def key(self) -> Hashable:
        at = self.program
        wanted = None if at.wanted is None else at.wanted.version
        of = (at.placement.version, at.placement.migrating, wanted, tuple(at.leaving.items()), at.emptied, at.named)
        return self.kind, of, self.urls, self.asked, self.in_use, self.ending


@dataclass(frozen=True)
class Explorer:
    """Changes that are asked for one after the other, each by a command or while the run trains."""

    changes: tuple[Change, ...]
    under_way: dict[int, Placement]
    servers: dict[int, tuple[str, ...]]

    @classmethod
    def of(cls, changes: tuple[Change, ...]) -> Explorer:
        """The placement that each change has rows move by, and the servers once it is made, by the placement's version."""
        placement, urls = Placement.spread(3, 1, 1), BEGIN
        under_way, servers = dict[int, Placement](), {0: urls}
        for change in changes:
            placement, urls = change.applied(placement, urls)
            under_way[placement.version] = placement
            placement = placement.completed()
            urls = tuple("" if shard in placement.removed else url for shard, url in enumerate(urls))
            servers[placement.version] = urls
        return cls(changes, under_way, servers)

    @property
    def begin(self) -> World:
        job = {"store": ",".join(BEGIN)}
        manifest = Manifest("1", job, "run", 1, BEGIN, None, ())
        return World(manifest, Placement.spread(3, 1, 1), 0, frozenset(BEGIN))

    def urls_of(self, placement: Placement) -> tuple[str, ...]:
        """The servers by number while a placement is the folder's."""
        version = placement.version
        if not placement.migrating:
            return self.servers[version]
        added = self.changes[version - 1].added
        return (*self.servers[version - 1], *([added] if added else []))

    def check(self, world: World, driver: Driver | None) -> None:
        """Assert what must hold wherever a driver dies."""
        live = {self.urls_of(world.placement)[shard] for shard in world.placement.live}
        assert live <= {*world.manifest.store_urls}, "the placement has a server that the manifest does not name"
        assert world.holding <= {*world.manifest.store_urls, *world.manifest.former_urls}, "rows are where nobody looks for them"
        assert live <= world.holding or world.placement.migrating, "a server was left that has rows"
        assert driver is None or driver.in_use <= world.holding, "a server was left that a trainer uses"

    def check_end(self, world: World, version: int) -> None:
        """Assert that the first `version` changes are made, and nothing else is left of them."""
        assert (world.placement.version, world.placement.migrating) == (version, False)
        assert world.manifest.store_urls == self.servers[version]
        assert world.manifest.job["store"] == store_setting(world.manifest, world.placement)
        live = {*filter(None, self.servers[version])}
        assert world.holding - (world.silent - live) == live

    # The drivers.

    def started(self, world: World, kind: Literal["stores", "train"]) -> Driver:
        urls = self.urls_of(world.placement)
        in_use = frozenset(urls[shard] for shard in world.placement.live) if kind == "train" else frozenset()
        return Driver(kind, ShardProgram.found(world.manifest, world.placement), urls, in_use=in_use)

    def asks(self, world: World, driver: Driver) -> Driver | None:
        """The driver as it is asked for the next change; None where that is refused."""
        wanted, program = self.under_way.get(world.placement.version + 1), driver.program
        busy = program.placement.migrating or program.wanted is not None or program.leaving or driver.ending
        if wanted is None or busy or not program.named:
            return None
        return replace(driver, program=program.ask(wanted), urls=self.urls_of(wanted), asked=True)

    def next(self, world: World, driver: Driver) -> Iterator[tuple[World, Driver | None]]:
        """What may be next: a step of the driver, what trainers do, or a request."""
        program = driver.program
        trains = driver.kind == "train" and not driver.ending
        moved, unused = world.migrated == program.placement.version, not driver.in_use & {*program.leaving.values()}
        if driver.kind == "train" and (asked := self.asks(world, driver)) is not None:
            yield world, asked
        if trains:
            yield world, replace(driver, ending=True, in_use=frozenset())
            in_use = frozenset(driver.urls[shard] for shard in program.placement.live)
            if program.wanted is None and in_use != driver.in_use:
                yield world, replace(driver, in_use=in_use)  # they are told
            if program.placement.migrating and in_use == driver.in_use and not moved:
                yield self.rows_moved(world), driver
        step = program.next_step(moved, unused)
        if driver.kind == "stores" and not driver.asked and (step is None or program.placement.migrating):
            # What an earlier call did not come to is done; a change that is under way goes on.
            yield world, replace(driver, asked=True) if program.placement.migrating else self.asks(world, driver)
        elif step is None or (step is Step.MOVE and driver.ending):
            if not trains:
                yield world, None
        elif step is not Step.MOVE or driver.kind == "stores":
            yield from self.steps(world, driver, step)

    def rows_moved(self, world: World) -> World:
        live = {self.urls_of(world.placement)[shard] for shard in world.placement.live}
        return replace(world, migrated=world.placement.version, holding=world.holding | live)

    def steps(self, world: World, driver: Driver, step: Step) -> Iterator[tuple[World, Driver]]:
        """The world and the driver once a step is done; and amid it, where it is more than one."""
        program, urls = driver.program, driver.urls
        if step is Step.NAME:
            named = program.named_in(world.manifest, urls)
            yield replace(world, manifest=named), replace(driver, program=program.name())
        elif step is Step.PLACE:
            assert program.wanted is not None
            holding = world.holding | {urls[shard] for shard in program.wanted.joining}
            yield replace(world, placement=program.wanted, holding=holding), replace(driver, program=program.place())
        elif step is Step.MOVE:
            yield self.rows_moved(world), driver
        elif step is Step.COMPLETE:
            assert world.migrated == world.placement.version, "a placement is complete whose rows have not moved"
            placement = world.placement.completed()
            left = tuple("" if shard in placement.removed else url for shard, url in enumerate(urls))
            yield replace(world, placement=placement), replace(driver, program=program.complete(urls), urls=left)
        else:
            there = {*program.leaving.values()}
            # A server may not answer.
            for emptied in ({*there}, set[str]()):
                silent = (world.silent - there) | (there - emptied)
                after = replace(world, holding=world.holding - emptied, silent=silent)
                yield after, replace(driver, program=program.leave(emptied))

    # What is explored.

    def explore(self) -> None:
        """Visit every state, and run the next driver to its end from each in which one may have died."""
        seen: set[Hashable] = set()
        worlds: dict[Hashable, World] = {}
        left: list[tuple[World, Driver | None]] = [(self.begin, None)]
        while left:
            world, driver = left.pop()
            key = (world.key, None if driver is None else driver.key)
            if key in seen:
                continue
            seen.add(key)
            self.check(world, driver)
            worlds[world.key] = world
            if driver is None:
                left += [(world, self.started(world, "stores")), (world, self.started(world, "train"))]
            else:
                left += [*self.next(world, driver), (world, None)]
        for world in worlds.values():
            self.check_goes_on(world)

    def check_goes_on(self, world: World) -> None:
        """Assert that either driver, undisturbed, brings a change that is under way to its end."""
        version = world.placement.version
        self.check_end(
            self.to_the_end(world, self.started(world, "stores")),
            min(version + (not world.placement.migrating), len(self.changes)),
        )
        trained = self.to_the_end(world, self.started(world, "train"), lambda one, other: other is None or not other.asked)
        if world.placement.migrating or ShardProgram.found(world.manifest, world.placement).leaving:
            self.check_end(trained, version)

    def to_the_end(
        self, world: World, driver: Driver, allowed: Callable[[World, Driver | None], bool] = lambda one, other: True
    ) -> World:
        """The world once a driver has ended by itself, whose trainers do what they are told before they end, and whose servers answer."""
        at: Driver | None = driver
        while at is not None:
            following = [(one, other) for one, other in self.next(world, at) if allowed(one, other)]
            # Trainers that end come last: as `next` gives them, but for what else there is.
            following.sort(key=lambda one: one[1] is not None and at is not None and one[1].ending and not at.ending)
            world, at = following[0]
        return world


ADD, REMOVE, MOVE = Change(added="redis://d:1"), Change(left="redis://b:1"), Change("redis://d:1", "redis://b:1")
CHANGES = [(ADD,), (REMOVE,), (MOVE,), (REMOVE, ADD), (MOVE, Change(added="redis://b:1"), REMOVE)]


def explore(changes: Sequence[tuple[Change, ...]]) -> None:
    for some in changes:
        Explorer.of(some).explore()


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: ", ".join(map(str, changes)))
def test_from_wherever_a_driver_dies_either_goes_on_to_the_same_end(changes: tuple[Change, ...]) -> None:
    explore([changes])


def the_placement_goes_first(patch: pytest.MonkeyPatch) -> None:
    rule = ShardProgram.next_step
    patch.setattr(ShardProgram, "next_step", lambda at, *seen: Step.PLACE if at.wanted is not None else rule(at, *seen))


def nobody_waits_for_rows(patch: pytest.MonkeyPatch) -> None:
    rule = ShardProgram.next_step
    patch.setattr(ShardProgram, "next_step", lambda at, moved, unused: rule(at, True, unused))


def nobody_waits_for_trainers(patch: pytest.MonkeyPatch) -> None:
    rule = ShardProgram.next_step
    patch.setattr(ShardProgram, "next_step", lambda at, moved, unused: rule(at, moved, True))


def servers_are_never_left(patch: pytest.MonkeyPatch) -> None:
    rule = ShardProgram.complete
    patch.setattr(ShardProgram, "complete", lambda at, urls: replace(rule(at, urls), leaving={}))


def what_an_earlier_call_left_undone_is_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShardProgram, "found", classmethod(lambda cls, manifest, placement: cls(placement)))


def servers_that_are_left_stay_named(patch: pytest.MonkeyPatch) -> None:
    rule = ShardProgram.leave
    patch.setattr(ShardProgram, "leave", lambda at, emptied: replace(rule(at, emptied), named=True))


def servers_to_be_left_are_not_named(patch: pytest.MonkeyPatch) -> None:
    rule = ShardProgram.named_in
    patch.setattr(ShardProgram, "named_in", lambda at, manifest, urls: rule(replace(at, leaving={}), manifest, urls))


def what_is_empty_counts_as_empty_for_ever(patch: pytest.MonkeyPatch) -> None:
    rule = ShardProgram.complete
    patch.setattr(ShardProgram, "complete", lambda at, urls: replace(rule(at, urls), emptied=at.emptied))


RULES = [
    the_placement_goes_first,
    nobody_waits_for_rows,
    nobody_waits_for_trainers,
    servers_are_never_left,
    what_an_earlier_call_left_undone_is_not_looked_for,
    servers_that_are_left_stay_named,
    servers_to_be_left_are_not_named,
    what_is_empty_counts_as_empty_for_ever,
]


@pytest.mark.parametrize("left_out", RULES, ids=lambda rule: rule.__name__)
def test_without_a_rule_some_end_is_another(
    left_out: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out(monkeypatch)
    with pytest.raises(AssertionError):
        explore(CHANGES)
