"""HTTP/1.1 of the data ports: from the bytes of a connection to a complete request, and from a response to bytes. Here
are the limits of a listener: everything that a client can make grow or last is bounded.

Strategy: `listener.Listener` is one port; each `connection.Connection` passes one request at a time to its handler. A
request that came whole and plain is read at once, every other one by llhttp (intake). Nothing here knows a protocol.
"""

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one listener. Deadlines are exact to one tick.

    header_bytes_max: request line and headers together, so the longest target too. More: 431.
    header_count_max: header lines. More: 431.
    body_bytes_max: body without its transfer coding; a message of 1 MiB can be 6 MiB of JSON escapes. More: 413.
    header_deadline_s: from the first byte of a request to the end of its headers. Longer: 408.
    body_deadline_s: for the body, and one second more for each `rate_bytes_per_s_min` received. Longer: 408.
    answer_deadline_s: for the client to read an answer, extended in the same way. Longer: the connection is dropped.
    idle_s: a connection without a request; above the 60 s of the usual load balancers, so that they close first.
    linger_s: after a refusal, input is read and thrown away this long, so that the client gets to see the refusal. With
        TLS a client also has this long to close its side, after it has read everything.
    connections_max: more are answered 503 and closed.
    held_bytes_max: of unfinished and not yet parsed requests of all connections together. More: 503.
    pipeline_bytes_max: of one connection while a request of it is being answered; then nothing more is read.
    pipeline_requests_max: requests of one connection that are handed over in one turn of the loop, before others' are.
    write_buffer_bytes_max: unread answers of one connection; then its next request waits until the client has read.
    accept_backlog: connections that the kernel completes before they are accepted.
    tick_s: how often deadlines are checked.
    """

    header_bytes_max: int = 64 * 1024
    header_count_max: int = 100
    body_bytes_max: int = 7 * 1024 * 1024
    header_deadline_s: float = 10.0
    body_deadline_s: float = 60.0
    answer_deadline_s: float = 30.0
    rate_bytes_per_s_min: int = 16 * 1024
    idle_s: float = 75.0
    linger_s: float = 2.0
    connections_max: int = 10_000
    held_bytes_max: int = 128 * 1024 * 1024
    pipeline_bytes_max: int = 64 * 1024
    pipeline_requests_max: int = 32
    write_buffer_bytes_max: int = 64 * 1024
    accept_backlog: int = 1024
    tick_s: float = 1.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be greater than 0, not {getattr(self, name)}")
