"""Network namespaces for store servers behind links of their own: trainers at one end, a server at each other end.

Needs root. Nothing outside the namespaces is touched, and no name is registered: they vanish with the last process and file that holds them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench_links import BURST_KB, CLONE_NEWNET, PORT, Unavailable, namespace_call, run_words
from foreload.cache.client.local import LocalStores
from foreload.cache.client.store import Store


class StoreLinks:
    """Servers at the far ends of links of their own; this thread moves to the near end.

    Attributes:
        urls: the servers' URLs, as reached from the near end.
    """

    def __init__(self, servers: int, folder: Path, megabits: float) -> None:
        missing = [word for word in ("ip", "tc") if shutil.which(word) is None]
        if missing or os.geteuid() != 0:
            raise Unavailable(f"links need {' and '.join(missing) + ' (iproute2)' if missing else 'root'}")
        self._stack = ExitStack()
        self._home = self._here()
        namespace_call("unshare", CLONE_NEWNET)
        self._near = self._here()
        self._far: list[int] = []
        urls = []
        try:
            run_words("ip", "link", "set", "lo", "up")
            for server in range(servers):
                self._add_link(server)
                self.limit(server, megabits)
                with self._at(self._far[server]):
                    stores = self._stack.enter_context(LocalStores(1, folder / f"server-{server}"))
                address, port = f"10.213.{10 + server}.2", PORT + server
                with Store(stores.urls) as store:
                    store.command(0, "CONFIG", "SET", "protected-mode", "no")  # nobody else reaches this address
                    store.command(0, "CONFIG", "SET", "bind", address)
                    store.command(0, "CONFIG", "SET", "port", port)
                urls.append(f"redis://{address}:{port}")
        except BaseException:
            self.close()
            raise
        self.urls: Sequence[str] = tuple(urls)

    def _here(self) -> int:
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    def _add_link(self, server: int) -> None:
        namespace_call("unshare", CLONE_NEWNET)
        self._far.append(self._here())
        words = ("ip", "link", "add", "far", "type", "veth", "peer", "name", f"near{server}")
        run_words(*words, "netns", f"/proc/{os.getpid()}/fd/{self._near}")
        for end, name, address in ((self._far[-1], "far", 2), (self._near, f"near{server}", 1)):
            namespace_call("setns", end, CLONE_NEWNET)
            run_words("ip", "address", "add", f"10.213.{10 + server}.{address}/30", "dev", name)
            run_words("ip", "link", "set", name, "up")
            run_words("ip", "link", "set", "lo", "up")

    @contextmanager
    def _at(self, end: int) -> Iterator[None]:
        namespace_call("setns", end, CLONE_NEWNET)
        try:
            yield
        finally:
            namespace_call("setns", self._near, CLONE_NEWNET)

    def limit(self, server: int, megabits: float) -> None:
        """Hold both directions of a server's link to so many Mbit/s each."""
        shape = ("root", "tbf", "rate", f"{megabits:g}mbit", "burst", f"{BURST_KB}kb", "latency", "100ms")
        run_words("tc", "qdisc", "replace", "dev", f"near{server}", *shape)
        with self._at(self._far[server]):
            run_words("tc", "qdisc", "replace", "dev", "far", *shape)

    def empty(self) -> None:
        """Delete everything that the servers hold."""
        with Store(self.urls) as store:
            for server in range(store.shards):
                store.command(server, "FLUSHALL")

    def close(self) -> None:
        """End the servers, and go back to where this thread came from."""
        namespace_call("setns", self._home, CLONE_NEWNET)
        self._stack.close()
        for end in (self._home, self._near, *self._far):
            os.close(end)
