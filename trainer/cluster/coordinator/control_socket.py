"""RUN/control.sock, from the side of the run that trains: where it is, and who answers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socketserver
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from foreload.base.codec import to_json
from foreload.trainer.cluster.messages.control import Answer, ControlRequest, Refused, request_of
from foreload.trainer.errors import MessageError
from foreload.trainer.run.directory import CONTROL

_SOCKET_PATH_BYTES = 100  # the kernel takes 107
_Bound = TypeVar("_Bound")


class ControlSocket:
    """The side of the run that trains. respond: answers a request, in the thread of the connection that it came by."""

    def __init__(self, run: Path, respond: Callable[[ControlRequest], Answer]) -> None:
        self._path = run / CONTROL
        self._path.unlink(missing_ok=True)
        self._elsewhere: Path | None = None

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                # A client that goes away wants no answer any more.
                with contextlib.suppress(ConnectionError):
                    for line in self.rfile:
                        self.wfile.write(json.dumps(to_json(answered(line))).encode() + b"\n")

        def answered(line: bytes) -> Answer:
            try:
                request = request_of(line)
            except MessageError as error:
                return Refused(str(error))
            return respond(request)

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True
            block_on_close = False

        self._server: Server | None = None
        try:
            self._server = self._bound(lambda path: Server(str(path), Handler))
            self._path.chmod(0o600)
        except OSError as error:
            why = error.strerror or error
            if self._server is not None:
                self._server.server_close()
                self._server = None  # it never served, and so cannot be shut down
            self._remove()
            sys.stderr.write(
                f"foreload: warning: {self._path}: cannot be made ({why}), so the run cannot be asked anything while it trains\n"
            )
            return
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="control", daemon=True)
        self._thread.start()

    def _bound(self, bind: Callable[[Path], _Bound]) -> _Bound:
        """A socket in the run's folder or, where its path is too long or its file system has none, elsewhere, with a link to it. Raises OSError."""
        path = self._path.absolute()
        if len(os.fsencode(path)) <= _SOCKET_PATH_BYTES:
            with contextlib.suppress(OSError):
                return bind(path)
        self._path.unlink(missing_ok=True)
        self._elsewhere = Path(tempfile.mkdtemp(prefix="foreload-"))
        self._path.symlink_to(self._elsewhere / CONTROL)
        return bind(self._elsewhere / CONTROL)

    def close(self) -> None:
        """Stop answering and remove the socket."""
        if self._server is None:
            return
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._remove()

    def _remove(self) -> None:
        self._path.unlink(missing_ok=True)
        if self._elsewhere is not None:
            shutil.rmtree(self._elsewhere, ignore_errors=True)
