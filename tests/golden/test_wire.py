"""What processes and hosts send each other: a made-up message of every class, as text and as bytes."""

from __future__ import annotations

import dataclasses
import json
import socket
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import pytest
import torch
from golden import pinned

from foreload.base.codec import of_json, to_json
from foreload.base.socket_messages import packed_head
from foreload.trainer.cluster.messages import control, facts, host_messages, trainers
from foreload.trainer.cluster.messages.codec import decode, encode
from foreload.trainer.step import host_link

CHECKED: dict[str, dict[str, Any]] = {"TrainerFault": {"point": "committed"}, "RowFile": {"bits": 8}}
"""By class, fields whose values are checked when one is made."""


class Maker:
    """Makes values by their annotations, each number and text another one. whole: fields that may be left out are given, too."""

    def __init__(self, whole: bool) -> None:
        self._whole, self._count = whole, 0

    def of(self, hint: Any, name: str = "value") -> list[Any]:
        """The values that stand for a type: one, but of a union of classes one of each."""
        if dataclasses.is_dataclass(hint) or is_typeddict(hint):
            return [self._instance(hint)]
        origin, args = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            kinds = [one for one in args if one is not type(None)]
            return [
                made for one in (kinds if all(map(dataclasses.is_dataclass, kinds)) else kinds[:1]) for made in self.of(one, name)
            ]
        if origin is Annotated:
            return self.of(args[0], name)
        if origin is Literal:
            return [args[0]]
        if origin is tuple and args[-1] is not Ellipsis:
            return [tuple(self.of(one, name)[0] for one in args)]
        if origin in (tuple, list):
            items = self.of(args[0], name)
            return [origin(items if len(items) > 1 else items + self.of(args[0], name))]
        if origin is dict:
            return [{self.of(args[0], name)[0]: one for one in self.of(args[1], name)}]
        return [self._plain(hint, name)]

    def _plain(self, hint: Any, name: str) -> Any:
        self._count += 1
        known = {
            int: self._count,
            float: self._count + 0.1,
            str: f"{name} {self._count}",
            bool: True,
            Any: {"any": [self._count]},
        }
        return known[hint]

    def _instance(self, kind: Any) -> Any:
        hints = get_type_hints(kind, include_extras=True)
        if is_typeddict(kind):
            return {name: self.of(hint, name)[0] for name, hint in hints.items()}
        required = [
            field.name for field in dataclasses.fields(kind)
            if self._whole or (field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING)
        ]  # fmt: skip
        values = {name: self.of(hints[name], name)[0] for name in required}
        known = {name: value for name, value in CHECKED.get(kind.__name__, {}).items() if name in values}
        return kind(**(values | known))


def classes(module: types.ModuleType) -> list[type]:
    """The message classes that a module declares, in their order."""
    declared = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
    return [one for one in declared if dataclasses.is_dataclass(one)]


def made(kind: type) -> Iterator[Any]:
    """A message of a class with all its fields, and one with only those that it must have."""
    whole, bare = Maker(True).of(kind)[0], Maker(False).of(kind)[0]
    yield whole
    if bare != whole:
        yield bare


@pytest.mark.parametrize(("name", "module"), [("messages", trainers), ("facts", facts)])
def test_messages_between_coordinator_and_trainers(name: str, module: types.ModuleType) -> None:
    told = {kind.__name__: [encode(message) for message in made(kind)] for kind in classes(module)}
    for kind in classes(module):
        for message, text in zip(made(kind), told[kind.__name__], strict=True):
            assert decode(text, kind) == message
    pinned(f"wire-{name}.json", told)


def test_requests_and_answers_of_the_control_socket() -> None:
    requests = {kind: kind for kind in get_args(control.ControlRequest)}
    told: dict[str, Any] = {}
    for kind in classes(control):
        request = requests.get(kind)
        do = {"do": request.do} if request else {}
        told[kind.__name__] = [json.dumps(do | to_json(message)) for message in made(kind)]
        for message, text in zip(made(kind), told[kind.__name__], strict=True):
            assert (control.request_of(text.encode()) if do else of_json(json.loads(text), kind)) == message
        if request:
            told[kind.__name__].append(f"answered by {request.answer.__name__}")
    pinned("wire-control.json", told)


def test_frames_between_hosts() -> None:
    told: dict[str, Any] = {}
    for kind in get_args(host_messages.HostMessage):
        for message in made(kind):
            first, second = socket.socketpair()
            with first, second:
                host_messages.send_host_message(first, message)
                told.setdefault(kind.__name__, []).append(repr(second.recv(1 << 16, socket.MSG_PEEK)))
                assert host_messages.receive_host_message(second) == message
    pinned("wire-hosts.json", told)


def test_frames_between_processes_of_a_host() -> None:
    first, second = socket.socketpair()
    with first, second:
        link = host_link.HostLink(first)
        link.introduce(3)
        hello = second.recv(1 << 10)
        for kind, size in ((1, 5), (2, 100)):
            link.send(kind, torch.zeros(size, dtype=torch.int32))
        frames = second.recv(1 << 10)
        link.close()
    pinned(
        "wire-frames.json", {"hello": hello.hex(), "frames": frames.hex(), "head": packed_head({"a": 1, "é": None}, 300).hex()}
    )
