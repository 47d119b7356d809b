"""Store URLs: redis://, rediss:// (TLS) and unix://.

They may have a user, a password, a database and TLS options. Passwords are never printed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from foreload.cache.errors import StoreError, StoreTls

PASSWORD_VARIABLE = "FORELOAD_STORE_PASSWORD"
_FILE_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_ca_path")
_CHOICES = {"ssl_cert_reqs": ("required", "optional", "none"), "ssl_check_hostname": ("true", "false")}
# The part of a malformed URL that may be shown: a scheme and a host, or the / of a path, with
# nothing before them that may be a password.
_PLACE = r"[a-z]+://(/|([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:\d*)?($|[/?#]))"
NEVER_EVICTS = "?evicts=never"
_EVICTS = "evicts"
_FORMS = "redis://[USER[:PASSWORD]@]HOST[:PORT][/DATABASE], rediss://... or unix://[USER[:PASSWORD]@]/PATH[?db=DATABASE]"


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """The address of one store shard.

    `str()` masks the password; `plain`, for files, leaves it out.

    Attributes:
        host: None for a Unix socket.
        path: the path of the Unix socket; else None.
        options: TLS options under the names of redis-py, as text, and evicts=never, by which the
            user guarantees that a server which does not report its policy never evicts keys.
        password_from_environment: the password is not part of the URL. If a server wants none, it
            is used without.
    """

    scheme: str
    host: str | None
    port: int
    path: str | None
    username: str | None
    password: str | None = field(repr=False)
    database: int
    options: tuple[tuple[str, str], ...] = ()
    password_from_environment: bool = False

    def __str__(self) -> str:
        return self._text("***" if self.password is not None else None)

    @property
    def plain(self) -> str:
        """The URL without its password.

        If it is parsed again, it takes the environment's password.
        """
        return self._text(None)

    def with_password(self, password: str) -> str:
        """Return the URL with this password, as text that shows it."""
        return self._text(quote(password, safe=""))

    @property
    def place(self) -> tuple[str | None, int, str | None]:
        """The server's place, the same for any user, database and options."""
        return self.host, self.port, self.path

    def without_password(self) -> StoreUrl:
        """Return the same address, for a server that wants no password."""
        return replace(self, password=None, password_from_environment=False)

    @property
    def never_evicts(self) -> bool:
        """Whether the URL says that the server evicts nothing."""
        return (_EVICTS, "never") in self.options

    def _text(self, password: str | None) -> str:
        user = quote(self.username or "", safe="")
        credentials = f"{user}:{password}@" if password is not None else f"{user}@" if user else ""
        query = dict(self.options)
        if self.path is not None:
            location = quote(self.path)
            query |= {"db": str(self.database)} if self.database else {}
        else:
            host = f"[{self.host}]" if self.host and ":" in self.host else self.host
            location = f"{host}:{self.port}" + (f"/{self.database}" if self.database else "")
        return f"{self.scheme}://{credentials}{location}" + (f"?{urlencode(query, safe='/')}" if query else "")

    def tls_settings(self) -> dict[str, Any]:
        """Return the TLS options as redis-py takes them.

        Raises StoreTls if an option names a file that does not exist.
        """
        settings: dict[str, Any] = {}
        for name, value in self.options:
            if name == _EVICTS:
                continue
            if name in _FILE_OPTIONS and not os.path.exists(value):
                raise StoreTls(f"store {self}: {name} must be an existing file; got {value}")
            settings[name] = value == "true" if name == "ssl_check_hostname" else value
        return settings


def hidden(text: str) -> str:
    """Return a URL for a message, with every part masked that may be a password."""
    # Everything up to the last @ is masked, so no part of a password with a stray @ or / is shown.
    hidden = re.sub(r"(?s)^(.*?//)?.*@", r"\1***@", text)
    # A password with a stray comma ends the URL before its @. So without an @, the text after // is
    # shown only if it looks like a host.
    return hidden if "@" in text or re.match(_PLACE, text) else re.sub(r"(?s)//.*", "//***", hidden)


def _refusal(text: str, why: str) -> StoreError:
    return StoreError(f"store URL {hidden(text)}: {why}")


def _options(text: str, query: str, scheme: str) -> tuple[dict[str, str], str | None]:
    """Return the options in a URL's query.

    Returns:
        (the options by name; the database, if it is one of them, as in unix://, else None).

    Raises:
        StoreError: an option is unknown.
    """
    options: dict[str, str] = {}
    database = None
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name == "db" and scheme == "unix":
            database = value
        elif name == _EVICTS and value.lower() == "never":
            options[name] = "never"
        elif scheme == "rediss" and (name in _FILE_OPTIONS or value.lower() in _CHOICES.get(name, ())):
            options[name] = value if name in _FILE_OPTIONS else value.lower()
        elif scheme == "rediss" and name in _CHOICES:
            raise _refusal(text, f"{name} must be one of {', '.join(_CHOICES[name])}; got {value!r}")
        else:
            known = {"unix": ["db"], "redis": []}.get(scheme, [*_FILE_OPTIONS, *_CHOICES])
            raise _refusal(text, f"option {name!r} is not known; {scheme}:// takes {', '.join([*known, 'evicts=never'])}")
    return options, database


def _split(text: str) -> tuple[SplitResult, int]:
    """Return the parts of a URL, and its port, 6379 by default. Raises StoreError."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        # urlsplit's message quotes the text that it failed on, which may be a piece of the
        # password.
        raise _refusal(
            text,
            f"the port must be a number, 1 to 65535, and the host well-formed; write a comma in a password as %2C; use {_FORMS}",
        ) from error
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise _refusal(text, f"must begin with redis://, rediss:// or unix://; use {_FORMS}")
    if port == 0:
        raise _refusal(text, "the port must be a number, 1 to 65535")
    return parts, port or 6379


def parse_url(text: str, environment: Mapping[str, str] | None = None) -> StoreUrl:
    """Parse one store URL.

    Args:
        environment: if the URL has no password, the value of FORELOAD_STORE_PASSWORD here is used.
            Defaults to os.environ.

    Raises:
        StoreError: the URL is malformed. The message masks the password.
    """
    environment = os.environ if environment is None else environment
    parts, port = _split(text)
    if parts.fragment:
        raise _refusal(text, "write a # in a user or password as %23")
    options, database_text = _options(text, parts.query, parts.scheme)
    host: str | None = None
    path: str | None = None
    if parts.scheme == "unix":
        path = unquote(parts.path)
        if parts.hostname or not path.startswith("/"):
            raise _refusal(text, "the path of a Unix socket must be absolute, as in unix:///tmp/redis.sock")
    else:
        host = unquote(parts.hostname or "")
        if not host:
            raise _refusal(text, f"has no host; use {_FORMS}")
        database_text = parts.path.strip("/") or None
    if database_text is not None and not (database_text.isascii() and database_text.isdigit()):
        raise _refusal(text, f"the database must be a number; got {database_text!r}")
    username = unquote(parts.username) if parts.username else None
    password = unquote(parts.password) if parts.password else None
    from_environment = password is None and bool(environment.get(PASSWORD_VARIABLE))
    if from_environment:
        password = environment[PASSWORD_VARIABLE]
    database = int(database_text or 0)
    return StoreUrl(parts.scheme, host, port, path, username, password, database, tuple(options.items()), from_environment)


def parse_urls(text: str | Sequence[str]) -> tuple[StoreUrl, ...]:
    """Parse the URLs of all store shards, in order.

    Args:
        text: the URLs separated by commas, or a sequence of them.

    Raises:
        StoreError: a URL is malformed, or a server is named twice.
    """
    texts = text.split(",") if isinstance(text, str) else list(text)
    for number, part in enumerate(texts[1:], 2):
        # The text may be the rest of a password, so it is not shown.
        if "//" not in part:
            raise StoreError(
                f"store URL {number} of {len(texts)}: must begin with redis://, rediss:// or unix://; write a comma in a password as %2C"
            )
    urls = tuple(parse_url(part.strip()) for part in texts)
    seen: dict[tuple[object, ...], StoreUrl] = {}
    for url in urls:
        if url.place in seen:
            raise StoreError(
                f"store URLs {seen[url.place]} and {url}: are the same server; give every store shard a server of its own"
            )
        seen[url.place] = url
    return urls
