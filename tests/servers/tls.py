"""TLS for tests: certificates, servers that speak it, and a front of Python's own for a server that does not."""

from __future__ import annotations

import asyncio
import datetime
import ssl
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from command_line import free_port
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from foreload.cache.client.local import LocalStores
from foreload.cache.client.local_server import available
from foreload.cache.client.store import Store
from foreload.cache.client.url import parse_url
from foreload.cache.errors import StoreUnavailable

KINDS = ("its own", "a front's")
"""Whose TLS it is: that of a server, or of a front before one."""
_unable: set[str] = set()
"""Servers found not to speak TLS, by name, so that each is tried once."""


def write_certificates(folder: Path) -> None:
    """Two authorities (ca.pem, stranger.pem), and of the first a certificate for localhost (server.pem, server.key)."""
    today = datetime.datetime.now(datetime.UTC)
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("ca", "stranger", "localhost")}
    for name, issuer, file in (("ca", "ca", "ca"), ("stranger", "stranger", "stranger"), ("localhost", "ca", "server")):
        key = keys[name]
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_named(name))
            .issuer_name(_named(issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(today - datetime.timedelta(days=1))
            .not_valid_after(today + datetime.timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=name == issuer, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .sign(keys[issuer], hashes.SHA256())
        )
        (folder / f"{file}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        (folder / f"{file}.key").write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


class TlsServer:
    """A server of the test's own, reached over TLS. kind: of KINDS; stores: the same server by its Unix socket; url: with the authority's file."""

    def __init__(self, folder: Path, certificates: Path, kind: str) -> None:
        """Raises StoreUnavailable where no server that can be had speaks TLS by itself."""
        self.port = free_port()
        self._front: _Front | None = None
        if kind == KINDS[0]:
            self.stores = self._with_tls(folder, certificates)
        else:
            self.stores = LocalStores(1, folder).start()
            self._front = _Front(str(parse_url(self.stores.urls[0]).path), certificates, self.port)
        self.url = f"rediss://localhost:{self.port}?ssl_ca_certs={certificates}/ca.pem"

    def _with_tls(self, folder: Path, certificates: Path) -> LocalStores:
        settings = {
            "tls-port": str(self.port),
            "bind": "127.0.0.1",
            "tls-cert-file": str(certificates / "server.pem"),
            "tls-key-file": str(certificates / "server.key"),
            "tls-ca-cert-file": str(certificates / "ca.pem"),
            "tls-auth-clients": "no",
        }
        for name, executable in available().items():
            if name not in _unable:
                try:
                    return LocalStores(1, folder, executable, settings).start()
                except StoreUnavailable as error:
                    if "did not start" not in str(error):
                        raise
                    _unable.add(name)
        raise StoreUnavailable(f"no server found here speaks TLS: {', '.join(available())}")

    def disconnect(self) -> None:
        """Have the server close every connection over TLS."""
        with Store(self.stores.urls) as store:
            store.command(0, "CLIENT", "KILL", "TYPE", "normal")

    def close(self) -> None:
        """End all of it."""
        if self._front is not None:
            self._front.close()
        self.stores.stop(save=False)


def tls_server_or_skip(folder: Path, certificates: Path, kind: str) -> TlsServer:
    """A TlsServer; the test is skipped where no server that can be had is one by itself."""
    try:
        return TlsServer(folder, certificates, kind)
    except StoreUnavailable as error:
        if "speaks TLS" not in str(error):
            raise
        pytest.skip(str(error))


class _Front:
    """Takes TLS connections and passes what comes to a Unix socket. Whoever closes, both ends are closed."""

    def __init__(self, path: str, certificates: Path, port: int) -> None:
        self._path = path
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda loop, context: None)  # handshakes that fail are the client's to tell
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="TLS front")
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._serve, "127.0.0.1", port, ssl=self._context))

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            try:
                server_reader, server_writer = await asyncio.open_unix_connection(self._path)
            except OSError:
                return
            try:
                ways = [asyncio.ensure_future(_pass(reader, server_writer)), asyncio.ensure_future(_pass(server_reader, writer))]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
            finally:
                server_writer.transport.abort()
        finally:
            writer.close()
            self._tasks.discard(task)

    def close(self) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # One turn of the loop, in which the writers that were closed are.
        await asyncio.sleep(0)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
