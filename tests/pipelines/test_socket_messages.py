"""Messages over a socket: what becomes of their descriptors where a message does not arrive."""

from __future__ import annotations

import os
import socket

import pytest

from foreload.base.socket_messages import packed_head, receive, send


@pytest.mark.parametrize("most", [None, 10], ids=["cut off", "too long"])
def test_descriptors_of_a_message_that_is_not_received_are_closed(most: int | None) -> None:
    """The receiver keeps none open: a pipe whose other writers are gone is at its end."""
    reader, writer = os.pipe()
    mine, theirs = socket.socketpair()
    with theirs:
        with mine:
            if most is None:
                head = packed_head({"a": 1}, 100)
                socket.send_fds(mine, [head], [writer])
            else:
                send(mine, {"a": 1}, b"x" * 100, descriptors=[writer])
        os.close(writer)
        assert receive(theirs, most) is None
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_descriptors_of_a_message_are_the_receiver_s() -> None:
    reader, writer = os.pipe()
    mine, theirs = socket.socketpair()
    with mine, theirs:
        send(mine, {"a": 1}, b"payload", descriptors=[writer])
        os.close(writer)
        message = receive(theirs)
    assert message is not None
    assert (message.values, bytes(message.payload)) == ({"a": 1}, b"payload")
    (received,) = message.descriptors
    os.write(received, b"!")
    os.close(received)
    assert os.read(reader, 2) == b"!"
    os.close(reader)
