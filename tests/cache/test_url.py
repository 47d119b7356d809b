"""Store URLs: what they mean, that a password is never shown, and one clear line for each mistake."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreload.cache.client.connections import new_connection
from foreload.cache.client.url import PASSWORD_VARIABLE, parse_url, parse_urls
from foreload.cache.errors import StoreError, StoreTls


def test_a_url_names_host_port_database_and_credentials() -> None:
    url = parse_url("redis://ann:s%40crt@example.org:6380/3", {})
    assert (url.host, url.port, url.path, url.database) == ("example.org", 6380, None, 3)
    assert (url.username, url.password) == ("ann", "s@crt")
    assert str(url) == "redis://ann:***@example.org:6380/3"
    assert url.plain == "redis://ann@example.org:6380/3"
    assert "s@crt" not in repr(url)


def test_defaults_and_ipv6() -> None:
    assert str(parse_url("redis://localhost", {})) == "redis://localhost:6379"
    assert str(parse_url("rediss://[::1]:7000?ssl_check_hostname=False", {})) == "rediss://[::1]:7000?ssl_check_hostname=false"


def test_a_unix_socket_has_a_path_and_takes_its_database_as_an_option() -> None:
    url = parse_url("unix://:pw@/run/a b/redis.sock?db=2", {})
    assert (url.path, url.database, url.password) == ("/run/a b/redis.sock", 2, "pw")
    assert str(url) == "unix://:***@/run/a%20b/redis.sock?db=2"
    assert parse_url(url.plain, {}).path == url.path


def test_the_password_comes_from_the_environment_where_the_url_has_none() -> None:
    environment = {PASSWORD_VARIABLE: "hush"}
    assert parse_url("redis://h", environment).password == "hush"
    assert str(parse_url("redis://h", environment)) == "redis://:***@h:6379"
    assert parse_url("redis://h", environment).without_password().password is None
    assert parse_url("redis://:own@h", environment).password == "own"
    assert parse_url("redis://h", {}).password is None


@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=8),
    st.text(st.characters(codec="utf-8"), min_size=6, max_size=8),
)
def test_what_is_saved_reads_back_without_the_password(user: str, password: str) -> None:
    from urllib.parse import quote

    url = parse_url(f"redis://{quote(user, safe='')}:{quote(password, safe='')}@host:1/2", {})
    assert (url.username, url.password) == (user, password)
    again = parse_url(url.plain, {PASSWORD_VARIABLE: password})
    assert (again.username, again.password, again.host, again.port, again.database) == (user, password, "host", 1, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("http://u:secret@h", "must begin with"),
        ("host:6379", "must begin with"),
        ("redis://u:secret@h:99999", "port"),
        ("redis://u:secret@h:port", "port"),
        ("redis://u:secret/x@h", "port"),
        ("redis://u:secret#x@h", "port|%23"),
        ("redis://", "no host"),
        ("redis://u:secret@h/one", "database"),
        ("unix://u:secret@relative.sock", "absolute"),
        ("redis://u:secret@h?ssl_ca_certs=/x", "option 'ssl_ca_certs' is not known"),
        ("rediss://u:secret@h?ssl_cert_reqs=maybe", "required, optional, none"),
        ("rediss://u:secret@h?colour=red", "option 'colour'"),
    ],
)
def test_a_wrong_url_gives_one_line_without_the_password(text: str, words: str) -> None:
    with pytest.raises(StoreError, match=words) as caught:
        parse_url(text, {})
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_certificate_file_is_named() -> None:
    url = parse_url("rediss://h?ssl_ca_certs=/nowhere/ca.pem", {})
    with pytest.raises(StoreTls, match=r"ssl_ca_certs must be an existing file; got /nowhere/ca\.pem"):
        new_connection(url, timedelta(seconds=1))


def test_several_urls_keep_their_order_and_differ() -> None:
    assert [url.port for url in parse_urls("redis://h:2, redis://h:1")] == [2, 1]
    with pytest.raises(StoreError, match="a server of its own"):
        parse_urls(["redis://h:1", "redis://h:1/3"])
