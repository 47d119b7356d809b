"""The connections to all store shards, and requests that run on them together, in one loop, to their last reply."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

import numpy as np

from foreload.cache.client import frames
from foreload.cache.client.backoff import pauses
from foreload.cache.client.channel import RETRIED, Channel, now_ns, reply_error
from foreload.cache.client.load import ShardLoad
from foreload.cache.client.resp import Request, lay_out
from foreload.cache.errors import (
    Fenced,
    StoreError,
    StoreSilent,
    StoreUnavailable,
)

_OUT_BYTES = 1 << 17  # a processor's nearer caches hold both buffers
_IN_BYTES = 1 << 18
_RECENT = 0.125  # weight of the last exchange in what counts as recent
_PAUSE_NS = 500_000_000  # how often, at least, Python may see to signals
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Connections:
    """One channel a store shard, with their buffers. One thread uses it.

    timeout: for silence of a shard that owes an answer, and takes nothing of what was sent to it, and for how long LOADING, BUSY and TRYAGAIN are
    tried again. commands, retries: counters.
    loads: what each shard's server was asked, and how long that took; any thread may read it. recent: seconds of a shard's answer, the mean over
    its last exchanges, whoever else was asked. judge: says why a shard answers that a key is of another type, where that may not be a fence.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.channels: list[Channel] = []
        self.commands = self.retries = 0
        self.loads: dict[int, ShardLoad] = {}
        self.recent: dict[int, float] = {}
        self.judge: Callable[[int, StoreError], StoreError] | None = None
        self._closed = ""

    def open(self) -> None:
        """Begin with the channels that are there by now."""
        self._states = np.zeros((len(self.channels), frames.CONNECTION_COLUMNS), np.int64)
        self._make_buffers(_OUT_BYTES, _IN_BYTES)

    def replace(self, shard: int, channel: Channel) -> None:
        """Use another channel for a shard from now on; the one before is closed. Nothing is under way on either."""
        self.channels[shard].close()
        self.channels[shard] = channel
        self.loads.pop(shard, None)
        self.recent.pop(shard, None)
        self._states[shard] = 0
        channel.place(self._states[shard], self._out[shard], self._in[shard])

    def append(self, channel: Channel) -> None:
        """Have one channel more. Nothing is under way on any."""
        self.channels.append(channel)
        self._states = np.concatenate([self._states, np.zeros((1, frames.CONNECTION_COLUMNS), np.int64)])
        self._make_buffers(self._out.shape[1], self._in.shape[1])

    def close(self) -> None:
        """Close all channels. Does nothing the second time."""
        self._closed = self._closed or "it was closed before"
        for channel in self.channels:
            channel.close()

    def perform(self, requests: dict[int, list[Request]], failures: dict[int, StoreError] | None = None) -> None:
        """Run requests to their replies, again where a server was not ready, and raise what a server refused.

        failures: where shards are noted whose connection fails; where it is None, that closes everything and is raised.
        """
        if self._closed:
            raise StoreUnavailable(f"store: the connections are closed ({self._closed}); make a new Store")
        try:
            attempts = pauses(self.timeout)
            while requests:
                began = now_ns()
                self._begin(requests)
                self._await_replies(list(requests), failures)
                self._count(requests, began)
                again = self._not_ready(
                    {shard: of_shard for shard, of_shard in requests.items() if shard not in (failures or ())}, failures
                )
                if again and next(attempts, self) is self:  # no attempt is left: self stands for that
                    for shard, of_shard in again.items():
                        error = next(request.reply.error for request in of_shard if request.reply.error is not None)
                        self.lose(shard, reply_error(self.channels[shard].url, error), failures)
                    return
                for request in (request for of_shard in again.values() for request in of_shard):
                    request.reply.restart()
                    self.retries += 1
                requests = again
        except StoreError:
            raise
        except BaseException as error:
            # Replies may still be under way: nothing more can be asked on these connections.
            self._fail(repr(error))
            raise

    def _count(self, requests: Iterable[int], began: int) -> None:
        """Note how long the shards' answers took, all of which are in. began: by `now_ns`."""
        took = sorted(
            (channel.progressed_ns - began, shard) for shard in requests if (channel := self.channels[shard]).failure is None
        )
        recent = self.recent
        for nanoseconds, shard in took:
            before = recent.get(shard, 0.0)
            recent[shard] = before + _RECENT * (nanoseconds * 1e-9 - before)
        if len(took) < 2:
            return
        loads = self.loads
        for nanoseconds, shard in took:
            if (load := loads.get(shard)) is None:
                load = loads[shard] = ShardLoad()
            load.exchanges += 1
            load.seconds += nanoseconds * 1e-9
            load.bytes = self.channels[shard].bytes_sent + self.channels[shard].bytes_received
        loads[took[-1][1]].held_up += (took[-1][0] - took[-2][0]) * 1e-9

    def _not_ready(self, requests: dict[int, list[Request]], failures: dict[int, StoreError] | None) -> dict[int, list[Request]]:
        """All requests of the shards that were not ready; each may be repeated safely, and the parts of a read must see the same writes.

        A shard that refuses for any other reason is lost. Raises Fenced where the lane has another owner: then it is this one that must stop.
        A key of another type may also be another program's: `judge` finds out.
        """
        again: dict[int, list[Request]] = {}
        for shard, of_shard in requests.items():
            for request in of_shard:
                error = request.reply.error
                if error is None:
                    continue
                if error.split(" ", 1)[0] in RETRIED:
                    again[shard] = of_shard
                    continue
                refusal = reply_error(self.channels[shard].url, error)
                if isinstance(refusal, Fenced):
                    if self.judge is not None:
                        refusal = self.judge(shard, refusal)
                    if isinstance(refusal, Fenced):
                        raise refusal
                self.lose(shard, refusal, failures)
                again.pop(shard, None)
                break
        return again

    def _make_buffers(self, out_bytes: int, in_bytes: int) -> None:
        """Buffers for all connections, none of which has a request under way."""
        self._out = np.empty((len(self.channels), out_bytes), np.uint8)
        self._in = np.empty((len(self.channels), in_bytes), np.uint8)
        for channel, state, out, data in zip(self.channels, self._states, self._out, self._in, strict=True):
            channel.place(state, out, data)

    def _begin(self, requests: dict[int, list[Request]]) -> None:
        """Lay requests out in one table, and start each channel on its own; buffers grow where a frame would not fit."""
        all_requests = [request for of_shard in requests.values() for request in of_shard]
        frame_bytes = max((request.frame_bytes for request in all_requests), default=0)
        if 2 * frame_bytes > self._out.shape[1]:
            self._make_buffers(2 * frame_bytes, max(4 * frame_bytes, _IN_BYTES))
        self._table = lay_out(all_requests)
        first = 0
        for shard, of_shard in requests.items():
            self.channels[shard].begin(self._table, first, of_shard)
            self.commands += len(of_shard)
            first += len(of_shard)

    def _await_replies(self, busy: list[int], failures: dict[int, StoreError] | None) -> None:
        """Send and receive on the channels of these shards until each has every reply, or has failed."""
        try:
            if all(self.channels[shard].compiled for shard in busy):
                self._run_exchange(failures)
            else:
                self._select(busy, failures)
        except StoreError as error:
            self._fail(str(error))
            raise

    def _run_exchange(self, failures: dict[int, StoreError] | None) -> None:
        """The compiled loop. It returns now and then without need (PAUSED), so that Python sees to signals, and is called again."""
        timeout_ns = self._timeout_ns
        while True:
            why, shard = frames.run_exchange(
                self._table, self._states, self._out, self._in, time.CLOCK_MONOTONIC, timeout_ns, _PAUSE_NS
            )
            if why == frames.ALL_ANSWERED:
                return
            if why == frames.SILENT and not self.channels[shard].is_taken(timeout_ns):
                self.lose(shard, self._silence(shard), failures)
            elif why == frames.IN_PYTHON:
                try:
                    self.channels[shard].handle_in_python()
                except StoreError as error:
                    self.lose(shard, error, failures)

    def _select(self, busy: list[int], failures: dict[int, StoreError] | None) -> None:
        """The same in Python, where the bytes of a socket are TLS's."""
        with selectors.DefaultSelector() as selector:
            for shard in busy:
                channel = self.channels[shard]
                try:
                    channel.send()
                except StoreError as error:
                    self.lose(shard, error, failures)
                    continue
                selector.register(channel.socket, _READ | _WRITE if channel.wants_write else _READ, shard)
            seen = now_ns()
            while selector.get_map():
                due_ns = min(self.channels[key.data].progressed_ns for key in selector.get_map().values()) + self._timeout_ns
                wait_ns = min(max(due_ns - seen, 0), _PAUSE_NS)
                ready = selector.select(wait_ns * 1e-9)
                before, seen = seen, now_ns()
                frames.discount_stall(self._states, seen - before - wait_ns)
                for key, events in ready:
                    try:
                        self._serve(selector, key, events)
                    except StoreError as error:
                        selector.unregister(key.fileobj)
                        self.lose(key.data, error, failures)
                silent = self._check_silence(busy, seen, failures)
                for key in [key for key in selector.get_map().values() if key.data in silent]:
                    selector.unregister(key.fileobj)

    def lose(self, shard: int, error: StoreError, failures: dict[int, StoreError] | None) -> None:
        """Go on without a shard, and note why in failures; where that is None, raise it."""
        if failures is None:
            raise error
        failures[shard] = error
        self.channels[shard].fail(error)

    def _serve(self, selector: selectors.BaseSelector, key: selectors.SelectorKey, events: int) -> None:
        """Do what a socket is ready for, and wait on for what its channel then wants; no more once every reply is in."""
        channel = self.channels[key.data]
        if events & _READ or channel.tls_wants_write:
            channel.receive()
        if events & _WRITE:
            channel.send()
        if channel.answered:
            selector.unregister(key.fileobj)
            return
        wanted = _READ | _WRITE if channel.wants_write else _READ
        if wanted != key.events:
            selector.modify(key.fileobj, wanted, key.data)

    @property
    def _timeout_ns(self) -> int:
        return self.timeout // timedelta(microseconds=1) * 1000

    def _check_silence(self, busy: list[int], at_ns: int, failures: dict[int, StoreError] | None) -> list[int]:
        """The shards that owe an answer and have been silent for too long: they are noted in failures, or raised (StoreSilent) where that is None."""
        silent = []
        for shard in busy:
            channel = self.channels[shard]
            silent_for = at_ns - channel.progressed_ns
            if not channel.answered and silent_for >= self._timeout_ns and not channel.is_taken(self._timeout_ns):
                self.lose(shard, self._silence(shard), failures)
                silent.append(shard)
        return silent

    def _silence(self, shard: int) -> StoreSilent:
        return StoreSilent(
            f"store {self.channels[shard].url}: silent for {self.timeout.total_seconds():g} s; is the server stopped or the network cut? "
            "--store-timeout sets the limit"
        )

    def _fail(self, why: str) -> None:
        self._closed = self._closed or why
        self.close()
