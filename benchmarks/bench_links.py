"""Training through a slow link to the store, beside tables in memory.

    python benchmarks/bench_links.py [--quick] [--out DIR] [--pairs N]

Needs root: trainers and servers get a network namespace each, joined by a veth pair whose two ends are held to a rate by tc's token bucket
filter. Both namespaces end with the script, however it ends.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from comparison import Claim, Results, Series, Table, alternate, arguments, ratio, save, show, spread, tell
from contenders import Contender, ContenderSpec
from foreload.cache.client.store import Store
from foreload.pipelines.schedule.reader import Schedule
from workload import BATCH, FULL, QUICK, SHARDS, SLOTS, Workload, describe, shares

NEAR_ADDRESS, FAR_ADDRESS = "10.213.7.1", "10.213.7.2"
PORT = 7000
BURST_KB = 128  # what the filter lets pass at once after a pause: 1 ms of 1 Gbit/s
CLONE_NEWNET = 0x40000000
IN_MEMORY = "tables in memory, the faster way"
RATES = (1000, 500, 200, 100, 50, 25)
QUICK_RATES = (1000, 100)
TABLES_IN_MEMORY = ("one table", "26 bags")
# Bytes of a row on the wire, with RESP's lengths: written (field and value), asked for (field), fetched (value).
WRITTEN_BYTES, ASKED_BYTES, FETCHED_BYTES = 14 + 152, 14, 152


Figures = Mapping[str, float]
Sweeps = dict[int, dict[str, Figures]]  # slots -> Mbit/s -> figures of a run


class Unavailable(Exception):
    """There can be no such link here; the message says why."""


def namespace_call(name: str, *given: int) -> None:
    """Make a system call by its name in the C library. Raises Unavailable."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*given) != 0:
        raise Unavailable(
            f"{name}: {os.strerror(ctypes.get_errno())}; links need root, outside of a container without CAP_SYS_ADMIN"
        )


def run_words(*words: str) -> None:
    """Run a command. Raises Unavailable if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{' '.join(words)}: {done.stderr.strip()}")


class Link:
    """Two network namespaces joined by a veth pair: this thread moves to the near one; `far` is where the servers go.

    Nothing outside the two is touched, and no name is registered: they vanish with the last process and file that holds them.
    """

    def __init__(self) -> None:
        missing = [word for word in ("ip", "tc") if shutil.which(word) is None]
        if missing or os.geteuid() != 0:
            raise Unavailable(f"links need {' and '.join(missing) + ' (iproute2)' if missing else 'root'}")
        self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        namespace_call("unshare", CLONE_NEWNET)
        self._near = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        namespace_call("unshare", CLONE_NEWNET)
        self._far = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            run_words(
                "ip",
                "link",
                "add",
                "far",
                "type",
                "veth",
                "peer",
                "name",
                "near",
                "netns",
                f"/proc/{os.getpid()}/fd/{self._near}",
            )
            for place, address in (("far", FAR_ADDRESS), ("near", NEAR_ADDRESS)):
                namespace_call("setns", self._far if place == "far" else self._near, CLONE_NEWNET)
                run_words("ip", "address", "add", f"{address}/30", "dev", place)
                run_words("ip", "link", "set", place, "up")
                run_words("ip", "link", "set", "lo", "up")
        except Unavailable:
            self.close()
            raise

    @property
    def ends(self) -> tuple[int, int]:
        """Descriptors of the near and the far namespace."""
        return self._near, self._far

    @contextmanager
    def far(self) -> Iterator[None]:
        """What is started in here is at the other end."""
        namespace_call("setns", self._far, CLONE_NEWNET)
        try:
            yield
        finally:
            namespace_call("setns", self._near, CLONE_NEWNET)

    @contextmanager
    def near(self) -> Iterator[None]:
        """In here, where `far` is, what is started is at this end."""
        namespace_call("setns", self._near, CLONE_NEWNET)
        try:
            yield
        finally:
            namespace_call("setns", self._far, CLONE_NEWNET)

    def limit(self, megabits: float) -> None:
        """Hold both directions to so many Mbit/s each."""
        shape = ("root", "tbf", "rate", f"{megabits:g}mbit", "burst", f"{BURST_KB}kb", "latency", "100ms")
        run_words("tc", "qdisc", "replace", "dev", "near", *shape)
        with self.far():
            run_words("tc", "qdisc", "replace", "dev", "far", *shape)

    def bytes_passed(self) -> tuple[int, int]:
        """Bytes that came from the servers and that went to them so far, all headers included."""
        for line in Path("/proc/thread-self/net/dev").read_text(encoding="utf-8").splitlines():
            name, _, figures = line.partition(":")
            if name.strip() == "near":
                return int(figures.split()[0]), int(figures.split()[8])
        raise Unavailable("the link has gone")

    def close(self) -> None:
        """Go back to where this thread came from."""
        namespace_call("setns", self._home, CLONE_NEWNET)
        for end in (self._home, self._near, self._far):
            os.close(end)


def listen(servers: Sequence[str], first_port: int) -> tuple[str, ...]:
    """Make servers, reached by their Unix sockets, listen at the far address, at a port each; their new URLs."""
    urls = []
    with Store(servers) as store:
        for shard in range(store.shards):
            store.command(shard, "CONFIG", "SET", "protected-mode", "no")  # nobody else reaches this address
            store.command(shard, "CONFIG", "SET", "bind", FAR_ADDRESS)
            store.command(shard, "CONFIG", "SET", "port", first_port + shard)
            urls.append(f"redis://{FAR_ADDRESS}:{first_port + shard}")
    return tuple(urls)


@dataclass(frozen=True, slots=True)
class Pace:
    """How long the contenders run, in steps: warm_up before the first run, while slots fill; of a run, those discarded and those counted (steps)."""

    warm_up: int
    discarded: int
    steps: int


# Before steps count, traffic has turned over what it had fetched ahead and what waited to be written when the link's speed changed.
FULL_PACE, QUICK_PACE = Pace(400, 40, 40), Pace(20, 12, 10)


class Through:
    """A Foreload contender at the near end of the link."""

    def __init__(self, link: Link, contender: Contender, pace: Pace, schedule: Schedule) -> None:
        self.link, self.contender, self.pace, self.schedule = link, contender, pace, schedule

    def run(self, megabits: int) -> Figures:
        """A run at a link speed: ms a step, ms of it waiting for rows, and the share of each direction's capacity that was used.

        The share is over all counted steps. A share near 1 means that the link is the limit: fetches ahead and waiting write-backs keep it busy.
        """
        self.link.limit(megabits)
        self.contender.run(1, self.pace.discarded - 1)
        begin = self.contender.steps
        before = self.link.bytes_passed()
        answer = self.contender.run(self.pace.steps, 0)
        passed = [after - earlier for after, earlier in zip(self.link.bytes_passed(), before, strict=True)]
        seconds = sum(answer.ms) / 1000
        rows = shares(self.schedule, begin, self.contender.steps)
        fetched, ended = rows["arrivals"] * rows["fetched_share"], rows["ended"]
        return {
            "ms": answer.mean_ms,
            "waiting": answer.parts["waiting for rows"],
            "KB down": passed[0] / self.pace.steps / 1000,
            "KB up": passed[1] / self.pace.steps / 1000,
            "rows down": fetched * FETCHED_BYTES / 1000,
            "rows up": (ended * WRITTEN_BYTES + fetched * ASKED_BYTES) / 1000,
            "used down": passed[0] * 8 / (seconds * megabits * 1e6),
            "used up": passed[1] * 8 / (seconds * megabits * 1e6),
        }


def main() -> None:
    """Measure, print, save."""
    given = arguments(__doc__, pairs=(7, 3))
    try:
        link = Link()
    except Unavailable as error:
        tell(f"skipped: {error}")
        note = f"not measured: {error}"
        claims = [
            Claim(name, IN_MEMORY, f">= {bar}", None, least=bar, note=note)
            for name, bar in (
                ("samples/s through 1 Gbit/s", 0.95),
                ("samples/s through 100 Mbit/s, 1 % of the rows as slots", 0.9),
            )
        ]
        save(Results("links", "Slow links to the store", claims, notes=[note]), given.out)
        return
    try:
        measure(given, link)
    finally:
        link.close()


_LINK_NOTE = (
    "The servers' and the trainers' network namespaces are joined by a veth pair; a token bucket filter (tc tbf) holds each direction to the rate. "
    "There is no other delay. What is used of a direction is counted on the link, TCP's and IP's headers included."
)


def _start(
    stack: ExitStack, work: Workload, link: Link, pace: Pace, schedules: Mapping[int, Schedule]
) -> tuple[dict[int, Through], dict[str, Contender]]:
    """The contenders, until the stack ends: by slots those whose servers are at the far end, each with a schedule, and those in memory."""
    throughs: dict[int, Through] = {}

    def start(spec: ContenderSpec) -> Contender:
        contender = Contender(spec)
        stack.callback(contender.close)
        return contender

    for slots, schedule in schedules.items():
        with link.far():
            servers = stack.enter_context(work.stores()).urls
        spec = ContenderSpec("foreload", str(schedule.path), "small", urls=listen(servers, PORT + SHARDS * len(throughs)))
        throughs[slots] = Through(link, start(spec), pace, schedule)
    few = schedules[SLOTS]
    memory = {name: start(ContenderSpec(name, str(few.path), "small", str(work.ids(few)))) for name in TABLES_IN_MEMORY}
    return throughs, memory


def _claims(milliseconds: Mapping[str, Sequence[float]], better: str, bars: Mapping[str, float]) -> list[Claim]:
    """Samples a second through each link, over the faster way in memory, `better`."""
    told = f"{better[0].upper()}{better[1:]} was the faster."
    return [
        Claim(
            f"samples/s through {name}",
            IN_MEMORY,
            f">= {bar}",
            ratio(milliseconds[better], milliseconds[name]),
            least=bar,
            note=told,
        )
        for name, bar in bars.items()
    ]


def measure(given: argparse.Namespace, link: Link) -> None:
    """Both claims, and throughput against link speed."""
    work = Workload(given.out / "work", QUICK if given.quick else FULL)
    pace, rates = (QUICK_PACE, QUICK_RATES) if given.quick else (FULL_PACE, RATES)
    # All runs train one schedule, which must have steps for the pairs and, after them, for one run at each rate.
    runs_in_it = (work.size.steps - pace.warm_up) // (pace.discarded + pace.steps)
    pairs = min(given.pairs, runs_in_it - len(rates))
    few = work.second()
    percent = int(work.bases[-1]) // 100
    many = work.second(percent)
    names = {SLOTS: f"{SLOTS:,} slots", percent: f"{percent:,} slots (1 % of the rows)"}
    with ExitStack() as stack:
        throughs, memory = _start(stack, work, link, pace, {SLOTS: few, percent: many})
        link.limit(1000)
        for contender in memory.values():
            contender.run(1, QUICK_PACE.warm_up)
        for through in throughs.values():
            through.contender.run(1, pace.warm_up - 1)

        def in_memory(contender: Contender) -> Figures:
            # Nothing of it runs while others have their runs, so a few steps to fill its caches are enough.
            return {"ms": contender.run(pace.steps, 4).mean_ms}

        fast, slow = "1 Gbit/s", "100 Mbit/s, 1 % of the rows as slots"
        contenders: dict[str, Callable[[], Figures]] = {
            **{name: partial(in_memory, contender) for name, contender in memory.items()},
            fast: partial(throughs[SLOTS].run, 1000),
            slow: partial(throughs[percent].run, 100),
        }
        measured = alternate(contenders, pairs, given.budget.until(0.65))
        sweeps: Sweeps = {}
        for slots, through in throughs.items():
            interleaved: dict[str, Callable[[], Figures]] = {str(rate): partial(through.run, rate) for rate in rates}
            sweeps[slots] = {rate: of for rate, (of,) in alternate(interleaved, 1).items()}
        seen = {slots: shares(few if slots == SLOTS else many, 0, through.contender.steps) for slots, through in throughs.items()}
    milliseconds = {name: [float(result["ms"]) for result in results] for name, results in measured.items()}
    better = min(memory, key=lambda name: spread(milliseconds[name]).median)
    claims = _claims(milliseconds, better, {fast: 0.95, slow: 0.9})
    arrivals = "; ".join(
        f"{names[slots]}: {of['arrivals']:,.0f} arrivals a step, {of['fetched_share']:.1%} of them fetched"
        for slots, of in seen.items()
    )
    results = Results(
        "links",
        "Slow links to the store",
        claims,
        [_compared(milliseconds), _swept(names, sweeps)],
        [_plot(names, sweeps, spread(milliseconds[better]).median)],
        settings={"pairs": len(milliseconds[better]), "steps": pace.steps, "discarded": pace.discarded, "burst_kb": BURST_KB},
        notes=[describe(work), f"{_LINK_NOTE} {arrivals}."],
    )
    save(results, given.out)


def _compared(milliseconds: dict[str, list[float]]) -> Table:
    rows = [[name, str(spread(of)), show(BATCH * 1000 / spread(of).median)] for name, of in milliseconds.items()]
    return Table("Small model, one trainer, three store shards", ["contender", "ms a step", "samples/s"], rows)


def _swept(names: dict[int, str], sweeps: Sweeps) -> Table:
    columns = [
        "slots",
        "Mbit/s",
        "ms a step",
        "of it waiting for rows",
        "KB a step down",
        "rows alone",
        "up",
        "rows alone ",
        "of the capacity down",
        "up ",
    ]
    rows = [
        [
            names[slots],
            rate,
            f"{of['ms']:.1f}",
            f"{of['waiting']:.1f}",
            f"{of['KB down']:.0f}",
            f"{of['rows down']:.0f}",
            f"{of['KB up']:.0f}",
            f"{of['rows up']:.0f}",
            f"{of['used down']:.0%}",
            f"{of['used up']:.0%}",
        ]
        for slots, sweep in sweeps.items()
        for rate, of in sweep.items()
    ]
    return Table(
        "Throughput against link speed",
        columns,
        rows,
        "One run each. Rows alone: what the schedule fetches and writes back in these steps.",
    )


def _plot(names: dict[int, str], sweeps: Sweeps, memory_ms: float) -> Series:
    lines: dict[str, list[tuple[str | float, float]]] = {
        names[slots]: sorted((float(rate), BATCH * 1000 / of["ms"]) for rate, of in sweep.items())
        for slots, sweep in sweeps.items()
    }
    ends = [point[0] for point in next(iter(lines.values()))]
    lines[IN_MEMORY] = [(rate, BATCH * 1000 / memory_ms) for rate in (ends[0], ends[-1])]
    return Series("Throughput against link speed", "Mbit/s to the store, each way", "samples/s", "lines", lines)


if __name__ == "__main__":
    main()
