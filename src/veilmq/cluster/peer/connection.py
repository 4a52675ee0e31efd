"""One connection between two servers: frames in, frames out, and whether the other end still lives.

Strategy: frames that are sent in one turn of the loop leave in one write. A side that does not read stops the writer.
What is sent meanwhile stays here, and is known not to have left (`unsent` has its notes). One timer per connection
sends the Pings and counts those of the other side; a late turn of this loop does not count as the other side's silence.
"""

import asyncio
from typing import Any, Final, cast

from veilmq.cluster.peer import SILENT_PINGS, Limits
from veilmq.cluster.peer.frames import ENCODER, LENGTH_BYTES, MALFORMED, Garbage, Ping
from veilmq.cluster.peer.handshake import HELLO_BYTES_MAX, Handshake, Refusal, refused
from veilmq.cluster.tls import CHECK

_PING: Final = Ping()
_NO_LENGTH: Final = bytes(LENGTH_BYTES)


class Connection(asyncio.Protocol):
    """See the module. Ends by `connection_lost`, after which `why` says why."""

    transport: asyncio.Transport

    def __init__(self, handshake: Handshake, limits: Limits, decoder: Any) -> None:
        self.handshake = handshake
        self.limits = limits
        self.why: Exception | None = None
        self.paused = False
        self.unsent: list[Any] = []
        """Notes of the frames that were not given to the transport."""
        self.address = ""
        """Of the peer; empty until there is a connection."""
        self._decode = decoder.decode
        self._in = bytearray()
        self._out = bytearray()
        self._flushes = False
        self._timer: asyncio.TimerHandle | None = None
        self._heard = True
        self._buffered_bytes = 0
        self._silent = 0
        self._ticked_s = 0.0
        self._frame_bytes_max = HELLO_BYTES_MAX

    # What each side makes of it.

    def proved(self) -> None:
        """The peer has proved itself; calls may follow."""

    def received(self, frame: Any) -> None:
        """Take one decoded frame. Raises Garbage."""
        raise NotImplementedError

    def written(self) -> None:
        """All that was sent was given to the transport, which may be `paused` by now."""

    def lost(self) -> None:
        """The connection is gone."""

    # What each side calls.

    @property
    def backlog_bytes(self) -> int:
        """What was sent and waits until the peer reads."""
        return len(self._out)

    def send(self, frame: Any, note: Any = None) -> int:
        """Send a frame in this turn; returns its size, or 0 if it cannot be sent: too large, or not to be packed."""
        out = self._out
        at = len(out)
        out += _NO_LENGTH
        begin = at + LENGTH_BYTES
        try:
            ENCODER.encode_into(frame, out, begin)
        except (TypeError, ValueError, OverflowError):
            del out[at:]
            return 0
        size = len(out) - begin
        if size > self.limits.frame_bytes_max:
            del out[at:]
            return 0
        out[at:begin] = size.to_bytes(LENGTH_BYTES, "big")
        if note is not None:
            self.unsent.append(note)
        self._flush_soon()
        return size

    def finish(self, why: Exception) -> None:
        """Close when what was sent has left."""
        self._flush()
        self.why = self.why or why
        self.transport.close()

    def end(self, why: Exception) -> None:
        """Close at once; a peer that is refused is sent the reason, if it can be."""
        if self.why is None:
            self.why = why
            transport = self.transport
            if isinstance(why, Refusal) and not why.by_peer and not self.handshake.done:
                self._send_bare(refused(why))
                transport.close()
                self._due(self.limits.handshake_s, transport.abort)  # the stranger may not read it
            else:
                transport.abort()

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=self.limits.write_buffer_bytes_max)
        peer = transport.get_extra_info("peername")
        self.address = f"{peer[0]}:{peer[1]}" if peer else "an unknown address"
        self._send_bare(self.handshake.hello)
        self._due(self.limits.handshake_s, self._too_slow)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        if self.why is not None:
            return
        held = self._in
        if held:
            held += data
        try:
            at = self._take(held or data)
        except (Garbage, Refusal) as error:
            self.end(error)
        else:
            if held:
                del held[:at]
            elif at < len(data):
                held += data[at:]

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        silent = "" if self.handshake.peer else f" before it said who it is: {CHECK}"
        self.why = self.why or error or ConnectionResetError(f"the connection was closed{silent}")
        self._in.clear()
        self._out.clear()
        self.lost()
        self.unsent.clear()

    # In.

    def _take(self, data: bytes | bytearray) -> int:
        """Take all whole frames; returns where the first one begins that is not whole."""
        at, end = 0, len(data)
        view = memoryview(data)
        try:
            while end - at >= LENGTH_BYTES and self.why is None:
                begin = at + LENGTH_BYTES
                size = int.from_bytes(view[at:begin], "big")
                if size > self._frame_bytes_max:
                    raise self._too_large(size)
                if end - begin < size:
                    break
                at = begin + size
                if self.handshake.done:
                    self._take_frame(view[begin:at])
                else:
                    self._shake(bytes(view[begin:at]))
        finally:
            view.release()
        return at

    def _take_frame(self, packed: memoryview) -> None:
        try:
            with packed:
                frame = self._decode(packed)
        except MALFORMED as error:
            raise Garbage(str(error)) from error
        if type(frame) is not Ping:
            self.received(frame)

    def _shake(self, packed: bytes) -> None:
        answer = self.handshake.receive(packed)
        if answer is not None:
            self._send_bare(answer)
        if self.handshake.done:
            self._frame_bytes_max = self.limits.frame_bytes_max
            self._ticked_s = asyncio.get_running_loop().time()
            self._due(self.limits.ping_s, self._tick)
            self.proved()

    def _too_large(self, size: int) -> Exception:
        if self.handshake.done:
            return Garbage(f"a frame of {size} bytes; the bound is {self._frame_bytes_max}")
        return Refusal("no peer", f"it does not speak the peer protocol: {CHECK}")

    # Out.

    def _send_bare(self, packed: bytes) -> None:
        self.transport.write(len(packed).to_bytes(LENGTH_BYTES, "big") + packed)

    def _flush_soon(self) -> None:
        if not self._flushes and not self.paused:
            self._flushes = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushes = False
        # A transport that is closing takes bytes and drops them.
        if self._out and not self.paused and not self.transport.is_closing():
            out, self._out = self._out, bytearray()
            self.unsent.clear()
            self.transport.write(out)
        if not self._out:
            self.written()

    # The timer.

    def _due(self, after_s: float, call: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(after_s, call)

    def _too_slow(self) -> None:
        self.end(Refusal("slow", f"it did not prove itself within {self.limits.handshake_s:g} s"))

    def _tick(self) -> None:
        now_s, ping_s = asyncio.get_running_loop().time(), self.limits.ping_s
        late = now_s - self._ticked_s > 2 * ping_s
        self._ticked_s = now_s
        buffered_bytes = self.transport.get_write_buffer_size()
        reads = buffered_bytes < self._buffered_bytes
        self._silent = 0 if self._heard or reads or late else self._silent + 1
        self._heard, self._buffered_bytes = False, buffered_bytes
        if self._silent >= SILENT_PINGS:
            self.end(ConnectionResetError(f"nothing was heard of it for {SILENT_PINGS * ping_s:g} s"))
            return
        self._due(ping_s, self._tick)
        self.send(_PING)
