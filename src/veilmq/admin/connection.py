"""uvicorn's connection, with bounds on what an unauthenticated client sends.

Strategy: uvicorn on httptools bounds neither the size of a request's head nor its time, and joins input in quadratic
time: one endless header would stop the loop, which the data ports share. So the bytes fed to an unfinished head are
counted, and a connection that owes a head has a deadline, from its start and after each response. Bodies need neither:
they are read behind access control, within `answers.BODY_BYTES_MAX`.
"""

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES_MAX: Final = 64 * 1024
"""Request line and headers, not counting what arrives in the same read as their beginning or end."""
HEAD_S: Final = 10.0
"""Deadline for a request's head, and for the first request of a connection to begin."""


class Connection(HttpToolsProtocol):
    """One client's connection. It is closed without a response when it breaks a bound."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head_begun = False
        self._head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's own
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        begun_before = self._head_begun
        super().data_received(data)
        if self.transport.is_closing():
            return
        if begun_before and self._head_begun:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self.transport.close()
        cycle: Any = self.cycle  # None before the first request
        if self._head_begun or cycle is None or cycle.response_complete:
            self._await_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_begun = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._head_begun = False
        self._await_no_more()
        super().on_headers_complete()

    def _await_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_S, self.transport.close)

    def _await_no_more(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
