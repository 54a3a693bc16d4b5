"""Messages between two ranks: a ring of bytes for each ordered pair, matched by tag at the receiver.

A message is a line of 64 bytes (tag, length) and its bytes, padded to whole
lines. A send is complete when its last byte is in the ring; larger ones go in
as the receiver makes room. A message that nobody asked for yet is kept by the
receiver whenever it waits for something else, so receives may come in any order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmlab.messages import shared_file as at
from mmlab.parallel.shm.segment import Segment, now

if TYPE_CHECKING:
    from mmlab.parallel.shm.work import ShmWork

LINE = 64


@dataclass(eq=False)
class _Call:
    """A send or a receive that was asked for: `data` uint8, whole; `moved` bytes sent so far, -1 before the line."""

    tag: int
    data: Tensor
    work: ShmWork
    moved: int = -1


@dataclass(eq=False)
class _Arriving:
    """A message out of a ring: into the receive it is for, or into a buffer while nobody asked for it."""

    tag: int
    data: Tensor
    receive: _Call | None
    moved: int = 0

    @property
    def complete(self) -> bool:
        return self.moved == self.data.numel()


@dataclass
class _Ring:
    """One end of a ring: `block` index of its two counters, `data` its bytes, `start` index of its first word.

    `calls` are sends in their order, or receives that no message has come for; `kept` messages that nobody asked for;
    `current` the message of which a part has come.
    """

    block: int
    data: Tensor
    start: int
    calls: deque[_Call] = field(default_factory=deque)
    kept: deque[_Arriving] = field(default_factory=deque)
    current: _Arriving | None = None


class Mail:
    """Sends and receives of one rank in one group. Everything here happens under the group's lock."""

    def __init__(self, segment: Segment) -> None:
        self.segment, self.ring = segment, segment.layout.ring
        assert segment.tensor is not None
        self._out: dict[int, _Ring] = {}
        self._in: dict[int, _Ring] = {}
        layout, me = segment.layout, segment.rank
        for other in segment.others:
            for rings, pair in ((self._out, (me, other)), (self._in, (other, me))):
                start = layout.ring_at(*pair)
                rings[other] = _Ring(layout.ring_block(*pair), segment.tensor[start : start + layout.ring], start // 8)
        self._any: deque[_Call] = deque()  # receives from whoever sends first

    def send(self, data: Tensor, peer: int, tag: int, work: ShmWork) -> None:
        """Queue a message; `data` is uint8 and stays as it is until the work is done."""
        self._out[peer].calls.append(_Call(tag, data, work))

    def receive(self, data: Tensor, peer: int, tag: int, work: ShmWork) -> None:
        """Ask for a message from a peer, -1 for any, into `data`."""
        receive = _Call(tag, data, work)
        for source in [peer] if peer >= 0 else list(self._in):
            ring = self._in[source]
            found = next((message for message in ring.kept if message.tag == tag), None)
            if found is not None:
                ring.kept.remove(found)
                found.receive = receive  # where a part is still to come, `_pull` hands it over
                if found.complete and found is not ring.current:
                    self._hand_over(found, source)
                return
        (self._in[peer].calls if peer >= 0 else self._any).append(receive)

    def pump(self) -> None:
        """Move what can be moved now."""
        for peer, ring in self._out.items():
            if ring.calls:
                self._push(peer, ring)
        words = self.segment.words
        for peer, ring in self._in.items():
            if words[ring.block + at.HEAD] != words[ring.block + at.TAIL]:
                self._pull(peer, ring)

    def _copy(self, ring: Tensor, position: int, data: Tensor, into_ring: bool) -> None:
        """Copy bytes to or from a place in a ring, around its end."""
        start, done, size = position % self.ring, 0, data.numel()
        if start + size <= self.ring:
            inside = ring[start : start + size]
            (inside if into_ring else data).copy_(data if into_ring else inside)
            return
        while done < size:
            step = min(size - done, self.ring - start)
            inside, outside = ring[start : start + step], data[done : done + step]
            (inside if into_ring else outside).copy_(outside if into_ring else inside)
            start, done = 0, done + step

    def _push(self, peer: int, ring: _Ring) -> None:
        words = self.segment.words
        head, moved = words[ring.block + at.HEAD], False
        while ring.calls:
            message = ring.calls[0]
            room = self.ring - (head - words[ring.block + at.TAIL])
            if room < LINE:
                break
            if message.moved < 0:
                line = ring.start + head % self.ring // 8
                words[line], words[line + 1] = message.tag, message.data.numel()
                message.moved, head, room = 0, head + LINE, room - LINE
            size = message.data.numel()
            step = min(size - message.moved, room)
            self._copy(ring.data, head, message.data[message.moved : message.moved + step], True)
            message.moved += step
            head += step
            moved = True
            if message.moved == size:
                head += -size % LINE  # room is whole lines, so the padding fits
                ring.calls.popleft()
                message.work.complete()
            words[ring.block + at.HEAD] = head
        if moved:
            self.segment.ring_bell(peer)

    def _pull(self, peer: int, ring: _Ring) -> None:
        words = self.segment.words
        tail = words[ring.block + at.TAIL]
        while (ready := words[ring.block + at.HEAD] - tail) > 0:
            if ring.current is None:
                line = ring.start + tail % self.ring // 8
                tail, ready = tail + LINE, ready - LINE
                ring.current = self._expected(ring, words[line], words[line + 1])
            message = ring.current
            step = min(message.data.numel() - message.moved, ready)
            self._copy(ring.data, tail, message.data[message.moved : message.moved + step], False)
            message.moved += step
            tail += step
            if message.complete:
                tail += -message.data.numel() % LINE
                ring.current = None
                if message.receive is not None:
                    self._hand_over(message, peer)
            words[ring.block + at.TAIL] = tail
        self.segment.ring_bell(peer)

    def _expected(self, ring: _Ring, tag: int, size: int) -> _Arriving:
        """The message whose line has come: for the first receive with its tag, else to be kept."""
        for calls in (ring.calls, self._any):
            for receive in calls:
                if receive.tag == tag:
                    calls.remove(receive)
                    fits = receive.data.numel() == size
                    buffer = receive.data if fits else torch.empty(size, dtype=torch.uint8, device="cpu")
                    return _Arriving(tag, buffer, receive)
        message = _Arriving(tag, torch.empty(size, dtype=torch.uint8, device="cpu"), None)
        ring.kept.append(message)
        return message

    def _hand_over(self, message: _Arriving, peer: int) -> None:
        receive = message.receive
        assert receive is not None
        wanted, came = receive.data.numel(), message.data.numel()
        receive.work.source = peer
        if wanted != came:
            text = f"shm: {receive.work.label} asks for {wanted} bytes, but the peer's message has {came}"
            receive.work.complete(ValueError(text))
            return
        if message.data is not receive.data:
            receive.data.copy_(message.data)
        receive.work.complete()

    def busy(self) -> bool:
        """Whether a send is not complete (a receive is driven by its waiter alone)."""
        return any(ring.calls for ring in self._out.values())

    def works(self) -> list[ShmWork]:
        """Every call that is not complete."""
        calls = [*self._any]
        for ring in [*self._out.values(), *self._in.values()]:
            calls += ring.calls
            if ring.current is not None and ring.current.receive is not None:
                calls.append(ring.current.receive)
        return [call.work for call in calls]

    def waits_for(self, work: ShmWork) -> list[int]:
        """The ranks of the group without which a call cannot be completed."""
        for peer in self._out:
            ends = (self._out[peer], self._in[peer])
            current = ends[1].current
            if any(call.work is work for end in ends for call in end.calls):
                return [peer]
            if current is not None and current.receive is not None and current.receive.work is work:
                return [peer]
        return list(self._out)

    def clear(self) -> None:
        """Forget everything (after a failure)."""
        self._any.clear()
        for ring in [*self._out.values(), *self._in.values()]:
            ring.calls.clear()
            ring.kept.clear()
            ring.current = None

    def close(self) -> None:
        """Drop the views of the rings."""
        self._out.clear()
        self._in.clear()

    def note(self, op: str, peer: int, tag: int, size: int, shape: tuple[int, ...], waiting: bool) -> None:
        """Record that this rank waits in a send or receive, or does no more."""
        words, me = self.segment.words, self.segment.me
        if waiting:
            words[me + at.P2P_PEER], words[me + at.P2P_TAG], words[me + at.P2P_BYTES] = peer, tag, size
            words[me + at.P2P_TIME] = now()
            at.write_shape(words, me + at.P2P_SHAPE, shape)
        words[me + at.P2P_OP] = at.OPS.index(op) if waiting else 0
