"""The servers of an episode of the campaign that has them by URL."""

from __future__ import annotations

import os
from pathlib import Path

from command_line import free_port
from tls import KINDS, TlsServer

from foreload.cache.client.local import LocalStores


class Servers:
    """Servers of an episode that has them by URL; each in a folder of its own, so that one can be started again empty."""

    def __init__(self, folder: Path, count: int, environment: dict[str, str], certificates: Path | None) -> None:
        self._locals: list[LocalStores] = []
        self._fronts: list[TlsServer] = []
        self.urls: list[str] = []
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            for shard in range(count):
                place = folder / f"server-{shard}"
                if certificates is not None:
                    self._fronts.append(TlsServer(place, certificates, KINDS[1]))
                    self._locals.append(self._fronts[-1].stores)
                    self.urls.append(self._fronts[-1].url)
                else:
                    port = free_port()
                    self._locals.append(LocalStores(1, place, settings={"port": str(port), "bind": "127.0.0.1"}).start())
                    self.urls.append(f"redis://127.0.0.1:{port}")
        finally:
            os.environ.clear()
            os.environ.update(before)

    def direct(self, server: int) -> str:
        return self._locals[server].urls[0]

    def pid(self, server: int) -> int | None:
        return self._locals[server].pids[0]

    def restart(self, server: int) -> None:
        """Start a dead server again, empty."""
        self._locals[server].restart(0)

    def close(self) -> None:
        for front in self._fronts:
            front.close()
        for one in self._locals if not self._fronts else ():
            one.stop(save=False)
