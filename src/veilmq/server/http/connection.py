"""One client connection of a listener.

Strategy: a connection passes one request at a time to the handler and writes each response in one piece. Input that
arrives meanwhile is kept unparsed, up to a bound, and parsed after the response. Each phase has one deadline, which the
listener's tick checks, so no request needs a timer.

    phase     what is awaited              on its deadline        left when
    IDLE      a request                    close                  input comes
    HEADERS   the rest of the headers      refuse 408             complete, or refused
    BODY      the rest of the body         refuse 408, if slow    complete, or refused
    HANDLER   the handler's answer         (none)                 answered, or the client is gone
    WRITING   the client, to read          drop, if slow          the write buffer is nearly empty
    LINGERING the client, to see a refusal drop                   the client closes
    CLOSING   the last answer to be read   drop, if slow or read  all is written, and with TLS the client closes

Before changing it: a client that hangs up cannot be told from one that only stops sending: both send a FIN. Every
request that came before it is answered. The handler of a waiting request (it set `on_gone`) is notified, and answers
soon, so that no message goes to a dead consumer. With TLS the end of the input ends the connection: asyncio cannot keep
one half open.
"""

from __future__ import annotations

import asyncio
import logging
from fcntl import ioctl
from math import inf
from struct import Struct
from termios import TIOCOUTQ
from typing import TYPE_CHECKING, Final, cast

from veilmq.protocols import Request, Response
from veilmq.server.http import CLOSE, CONTINUE
from veilmq.server.http.exchange import Exchange
from veilmq.server.http.intake import Intake, Refusal

if TYPE_CHECKING:
    from veilmq.server.http.listener import Listener

log = logging.getLogger("veilmq.listener")

IDLE: Final = 0
HEADERS: Final = 1
BODY: Final = 2
HANDLER: Final = 3  # from here on no input is parsed
WRITING: Final = 4
LINGERING: Final = 5
CLOSING: Final = 6

_INT: Final = Struct("i")

# Connections beyond the limit that may linger at the same time to read their 503; further ones are dropped.
OVERFLOW_MAX: Final = 64


def unread_bytes_of(transport: asyncio.Transport) -> int:
    """What the other end has not received, in our buffer and in the kernel's, which may hold megabytes."""
    unread_bytes = transport.get_write_buffer_size()
    sock = transport.get_extra_info("socket")
    if sock is None:  # of TLS: being lost
        return unread_bytes
    try:
        (queued_bytes,) = _INT.unpack(ioctl(sock.fileno(), TIOCOUTQ, _INT.pack(0)))
    except OSError:  # closed already
        return unread_bytes
    return unread_bytes + int(queued_bytes)


class Connection(asyncio.Protocol):
    """See the module. `deadline` is on the loop's clock."""

    __slots__ = (
        "_answering_in_turn", "_exchange", "_flags", "_held_bytes", "_intake", "_leftover", "_listener", "_peer",
        "_pending", "_progress_bytes", "_reading_paused", "_rest", "_since", "_transport", "_unread_account",
        "_unread_answer_bytes", "deadline", "input_ended", "phase", "stranger",
    )  # fmt: skip

    _transport: asyncio.Transport
    _intake: Intake

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.phase = IDLE
        self.deadline = inf
        self.input_ended = False
        self.stranger = True
        """Whether it has had no request with a valid key."""
        self._exchange: Exchange | None = None
        self._flags = 0
        self._pending = bytearray()
        self._leftover = False
        """Whether anything is left to do after the answer: requests, input or its end."""
        self._answering_in_turn = False
        """Whether the handler of the current request has not returned yet."""
        self._reading_paused = False
        self._held_bytes = 0
        self._since = 0.0
        """When the headers, the body, the input behind a request, or the reading of the answer began."""
        self._progress_bytes = 0
        self._unread_account = ""
        self._unread_answer_bytes = 0
        self._rest = memoryview(b"")
        """What is not written yet of an answer over TLS."""

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        listener = self._listener
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=listener.limits.write_buffer_bytes_max)
        address = transport.get_extra_info("peername")
        self._peer = address[0] if address else ""
        self._intake = listener.intake(listener.limits, self._peer, listener.secure, listener.next_request_id)
        others = len(listener.connections)
        listener.connections.add(self)
        self._await_request()
        if listener.closing or others >= listener.limits.connections_max + OVERFLOW_MAX:
            self.drop()
        elif others >= listener.limits.connections_max and not listener.make_place():
            self._refuse(Refusal(503, "too many connections"))
        else:
            listener.strangers[self] = None

    def data_received(self, data: bytes) -> None:
        self._listener.bytes_received += len(data)
        if self.phase >= HANDLER:
            self._keep(data)
            return
        intake = self._intake
        request = intake.read_plain(data)
        if request is None:
            self._pending += intake.parse(data)
        elif not self._hand_over(request, 0):
            return
        self._advance()

    def eof_received(self) -> bool:
        self.input_ended = True
        self._leftover = True
        if self._listener.secure or self.phase < HANDLER or self.phase == LINGERING:
            self.close()  # asyncio's TLS cannot stay half open
            return False
        if self._exchange is not None:
            self._exchange.give_up()
        return True

    def pause_writing(self) -> None:
        if self.phase < LINGERING:
            self.phase = WRITING
            if not self._unread_answer_bytes:
                self._measure_writing()

    def resume_writing(self) -> None:
        if self.phase == WRITING:
            self.phase = HANDLER
            self._write_rest()
            if self.phase == WRITING:
                return
            self.deadline = inf
            self._listener.loop.call_soon(self._advance_later)
        self._uncount()

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.forget(self)
        self._hold(0)
        self._uncount()
        self.phase = CLOSING
        self.deadline = inf
        self._pending.clear()
        self._intake.end()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.lose()

    # Input.

    def _keep(self, data: bytes) -> None:
        """Keep input that arrives while a request is being answered."""
        if self.phase >= LINGERING or self._intake.refusal is not None:
            return
        self._pending += data
        self._hold_behind()

    def _hold_behind(self) -> None:
        """Count the input behind requests that come first, and read no more of it than the limits allow."""
        listener, intake = self._listener, self._intake
        if intake.ready or self._pending or intake.in_body or intake.refusal is not None:
            self._leftover = True
        if self.phase == HANDLER and not self._held_bytes:
            self._since = listener.now
        self._hold(intake.fed_bytes + len(self._pending))
        if not self._held_bytes:
            return
        limits = listener.limits
        if self.stranger and listener.held_bytes > limits.held_bytes_max:
            self.turn_out()
        elif len(self._pending) > limits.pipeline_bytes_max or listener.held_bytes > limits.held_bytes_max:
            self._reading_paused = True
            self._transport.pause_reading()

    def _hold(self, size: int) -> None:
        self._listener.held_bytes += size - self._held_bytes
        self._held_bytes = size

    def _advance_later(self) -> None:
        if self.phase == HANDLER and self._exchange is None and not self._transport.is_closing():
            self._advance()

    def _advance(self) -> None:
        """Hand over ready requests, parse further input, and enter the next phase."""
        intake = self._intake
        turns = self._listener.limits.pipeline_requests_max
        while True:
            while intake.ready:
                if turns == 0:
                    self.phase = HANDLER
                    self.deadline = inf
                    self._listener.loop.call_soon(self._advance_later)
                    self._hold_behind()
                    return
                turns -= 1
                if not self._hand_over(*intake.ready.popleft()):
                    if self.phase < LINGERING:
                        self._hold_behind()
                    return
            if intake.refusal is not None:
                self._refuse(intake.refusal)
                return
            if not self._pending:
                break
            data = bytes(self._pending)
            self._pending.clear()
            self._pending += intake.feed(data)
        if self.input_ended:
            self.close()
        else:
            self._await_input()

    def _hand_over(self, request: Request, flags: int) -> bool:
        """Pass one request to the handler; True if it is answered and the connection can take another."""
        listener = self._listener
        listener.requests += 1
        self.phase = HANDLER
        exchange = self._exchange = Exchange(self, request, flags | self._flags)
        self._answering_in_turn = True
        try:
            listener.handler(request, exchange)
        except Exception as error:  # noqa: BLE001 the request's edge
            listener.fail(exchange, error)
        self._answering_in_turn = False
        if exchange.answered:
            return self.phase == HANDLER
        self.deadline = inf
        return False

    def _await_input(self) -> None:
        intake = self._intake
        limits = self._listener.limits
        self._leftover = False
        fed_bytes = intake.fed_bytes
        if fed_bytes != self._held_bytes:
            self._hold(fed_bytes)
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
        if intake.in_body:
            if self.phase != BODY:
                self.phase = BODY
                self._since = self._listener.now
                self.deadline = self._listener.due(limits.body_deadline_s)
            if intake.expects:
                intake.expects = False
                self._transport.write(CONTINUE)
        elif not fed_bytes:
            self._await_request()
        elif self.phase != HEADERS:
            self.phase = HEADERS
            self._since = self._listener.now
            self.deadline = self._listener.due(limits.header_deadline_s)
        if self._listener.held_bytes > limits.held_bytes_max:
            self._listener.make_room()

    def _await_request(self) -> None:
        if self._flags:
            self.close()
        else:
            self.phase = IDLE
            self.deadline = self._listener.idle_due

    # Output.

    def write_answer(self, response: Response, flags: int, exchange: Exchange) -> bool:
        """See `Exchange.respond`; False if the client is gone."""
        self._exchange = None
        transport = self._transport
        if transport.is_closing():
            return False
        listener = self._listener
        if response.close:
            flags |= CLOSE
        try:
            answer = listener.answers.write(response, flags)
        except ValueError as error:
            answer = listener.unwritable(exchange.request, flags, error)
        if listener.secure:
            self._rest = memoryview(answer)
            self._write_rest()
        else:
            transport.write(answer)
        listener.bytes_sent += len(answer)
        if self.phase == WRITING:
            self._count(len(answer), exchange)
        if flags & CLOSE:
            self.close()
        elif self._answering_in_turn or self.phase == WRITING:
            pass
        elif self._leftover:
            # The next request's handler must not run inside this call.
            listener.loop.call_soon(self._advance_later)
        else:
            self.phase = IDLE
            self.deadline = listener.idle_due
        return True

    def _write_rest(self) -> None:
        """With TLS an answer goes out in pieces: asyncio accepts any amount at once, and pauses its writer only when
        more is written after that."""
        size = self._listener.limits.write_buffer_bytes_max
        while self._rest and self.phase != WRITING:
            piece, self._rest = self._rest[:size], self._rest[size:]
            self._transport.write(piece)

    def _count(self, size: int, exchange: Exchange) -> None:
        """Count the whole answer as unread: all of it stays in memory until the kernel has taken its end."""
        self._uncount()
        self._unread_account = getattr(exchange, "account", "")
        self._unread_answer_bytes = size
        self._listener.unread.add(self._unread_account, size)

    def _uncount(self) -> None:
        size, self._unread_answer_bytes = self._unread_answer_bytes, 0
        if size:
            self._listener.unread.remove(self._unread_account, size)

    def _refuse(self, refusal: Refusal) -> None:
        """Refuse a request that cannot be read further, and close once the client has had time to read the refusal."""
        if self._transport.is_closing():
            return
        listener = self._listener
        answer = listener.refusal_answer(refusal, self._peer)
        self.phase = LINGERING
        self.deadline = listener.due(listener.limits.linger_s)
        self._pending.clear()
        self._intake.drop_body()
        self._hold(0)
        self._transport.write(answer)
        listener.bytes_sent += len(answer)
        # Closing with unread input would send a RST, which may overtake the answer.
        if self.input_ended:
            self.close()
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()

    def _measure_writing(self) -> None:
        self._progress_bytes = self._unread_bytes()
        self._since = self._listener.now
        self.deadline = self._listener.due(self._listener.limits.answer_deadline_s)

    def _unread_bytes(self) -> int:
        """Bytes that the client has not received."""
        return len(self._rest) + unread_bytes_of(self._transport)

    def close(self) -> None:
        self.phase = CLOSING
        if self._transport.is_closing():  # asyncio's TLS transport answers no call after a second close
            return
        if self._rest:
            rest, self._rest = self._rest, memoryview(b"")
            self._transport.write(rest)
        self._measure_writing()
        self.deadline = self._listener.due(self._listener.limits.linger_s)
        self._transport.close()

    def drop(self) -> None:
        """Close without waiting for the client to read anything."""
        self.phase = CLOSING
        self._transport.abort()

    def keep_place(self) -> None:
        """See `Exchange.keep_place`."""
        self._listener.strangers.pop(self, None)

    # What the listener calls.

    @property
    def peer(self) -> str:
        """The client's address."""
        return self._peer

    def finish(self) -> None:
        """Close after the current request; at once if there is none."""
        self._flags = CLOSE
        if self._exchange is not None:
            self._exchange.close_after()
        elif self.phase == IDLE:
            self.close()

    def postpone(self, stalled_s: float) -> None:
        """Move the deadline: the loop stalled that long and read no input, which is not the client's fault."""
        self.deadline += stalled_s
        self._since += stalled_s

    @property
    def held_for(self) -> tuple[bool, float, int]:
        """Sorts the connections that hold input: strangers come first, of these and of the others the one that began
        first, and of one tick the largest."""
        return not self.stranger, self._since, -self._held_bytes

    @property
    def holds_input(self) -> bool:
        """Whether it holds input: of a request that is not complete, or behind one whose answer is not written."""
        return self._held_bytes > 0 and self.phase < LINGERING

    def turn_out(self) -> None:
        """Throw the input away, to make room for others. A request that is being answered is answered before that."""
        if self.phase == WRITING:
            self.drop()
            self._hold(0)
        elif self.phase == HANDLER:
            self._intake.refusal = Refusal(503, "too many unfinished requests")
            self._pending.clear()
            self._intake.drop_body()
            self._hold(0)
        else:
            self._refuse(Refusal(503, "too many unfinished requests"))

    def expire(self, now: float) -> None:
        """The deadline has passed."""
        limits = self._listener.limits
        if self.phase == IDLE and not self._transport.get_write_buffer_size():
            self.close()
        elif self.phase == HEADERS:
            self._refuse(Refusal(408, "the headers took too long"))
        elif self.phase == BODY:
            if not self._keeps_pace(self._intake.fed_bytes, limits.body_deadline_s, now):
                self._refuse(Refusal(408, "the body took too long"))
        elif self.phase in (WRITING, CLOSING):
            unread_bytes = self._unread_bytes()
            keeps_pace = self._keeps_pace(self._progress_bytes - unread_bytes, limits.answer_deadline_s, now)
            if not keeps_pace or (self.phase == CLOSING and not unread_bytes):
                self.drop()
            elif self.phase == CLOSING:
                self.deadline = self._listener.due(limits.linger_s)
        else:
            self.drop()

    def _keeps_pace(self, progress_bytes: int, deadline_s: float, now: float) -> bool:
        earned_s = progress_bytes / self._listener.limits.rate_bytes_per_s_min
        self.deadline = self._since + deadline_s + self._listener.limits.tick_s + earned_s
        return now < self.deadline
