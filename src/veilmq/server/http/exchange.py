"""One request at its handler: the response goes through here, and so does the news that the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from veilmq.protocols import Request, Response
from veilmq.server.http import CLOSE

if TYPE_CHECKING:
    from veilmq.server.http.connection import Connection


class Exchange:
    """One request at its handler. It is answered exactly once, now or later, on the loop's thread."""

    __slots__ = ("_connection", "_flags", "_on_gone", "account", "answered", "request")

    account: str
    """Whose messages the answer may have; not set if it has none."""

    def __init__(self, connection: Connection, request: Request, flags: int) -> None:
        self._connection: Connection | None = connection
        self._flags = flags
        self._on_gone: Callable[[], None] | None = None
        self.request = request
        self.answered = False

    @property
    def gone(self) -> bool:
        """The client hung up or was dropped: nobody will read a response."""
        return self._connection is None and not self.answered

    @property
    def on_gone(self) -> Callable[[], None] | None:
        """Called once if the client hangs up (`gone` is then true) or stops sending before the response, which must
        then come soon. Only for a waiting request: see connection.py."""
        return self._on_gone

    @on_gone.setter
    def on_gone(self, call: Callable[[], None] | None) -> None:
        self._on_gone = call
        connection = self._connection
        if call is not None and not self.answered and (connection is None or connection.input_ended):
            # Not called inside the handler, which may be just parking the request.
            asyncio.get_running_loop().call_soon(self.give_up)

    def respond(self, response: Response) -> bool:
        """Write the response; False if the client is known to be gone. True does not prove that the client got it.

        A second response is a bug: AssertionError.
        """
        if self.answered:
            raise AssertionError(f"request {self.request.request_id} is answered already")
        self.answered = True
        connection = self._connection
        if connection is None:
            return False
        self._connection = self._on_gone = None
        return connection.write_answer(response, self._flags, self)

    def keep_place(self) -> None:
        """The request has a valid key: its connection does not make room for others when the port is full."""
        connection = self._connection
        if connection is not None and connection.stranger:
            connection.stranger = False
            connection.keep_place()

    def close_after(self) -> None:
        """Close the connection after this response."""
        self._flags |= CLOSE

    def give_up(self) -> None:
        """The client stopped sending: call `on_gone`."""
        call, self._on_gone = self._on_gone, None
        if call is not None and not self.answered:
            call()

    def lose(self) -> None:
        """The connection is lost."""
        self._connection = None
        call, self._on_gone = self._on_gone, None
        if call is not None:
            call()
