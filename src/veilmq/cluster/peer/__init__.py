"""The peer port: a server passes its clients' calls on to the server that owns the shard. Here are its bounds.

Strategy: one TCP connection from each server to the owner. Listener, signature and codec run where the client
connected; the engine runs at the owner. Frames are msgpack with a length before them. `frames` says what a frame is,
`handshake` who may send any, `connection` carries them; `port` is the owner's side and `caller` the other one, which is
called like the shell of the own engine (`cluster/__init__.py`).

    caller                                 owner
    Hello(cluster, server, nonce)     ->
                                      <-   Hello(cluster, server, nonce)
    Proof(HMAC of both hellos)        ->
                                      <-   Proof(HMAC of both hellos), or Refusal(sentence)
    Call(id, age, commands)           ->
    Cancel(id), AnswerSoon(id)        ->
                                      <-   Outcomes(id, outcomes), or NotOwner(id, who is)
    Ping                              <->
                                      <-   Bye(greatest id that was read)

Each call ends with exactly one `Outcomes` or `NotOwner`; a call that was cancelled in time ends with no outcomes. All
of it runs on one loop's thread.

Before changing it: the frames are an agreement between releases, of which two run beside each other while a cluster is
upgraded. A field with a default may be added. Any other change, a new command among them, is a new `VERSION`, and
nothing of it is sent to a server that speaks only the one before (`Handshake.version`).
tests/cluster/test_peer_frames.py holds the bytes of one frame of each kind.
"""

from typing import Final

import msgspec

from veilmq.model.instant import MINUTE_US

VERSION: Final = 1
"""Of the frames. Two servers use the greatest that both speak."""
VERSION_OLDEST: Final = 1
AGE_US_MAX: Final = 5 * MINUTE_US
"""An older call counts as that old: how long ago it arrived is the word of another machine's clock."""


class Identity(msgspec.Struct, frozen=True):
    """What a server calls itself to its peers."""

    cluster: str
    """Incarnation of the cluster: another one after a restore."""
    server: str
    """Unique in the cluster."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one server's peer port and of its connections to the owner."""

    frame_bytes_max: int = 64 * 1024 * 1024
    calls_max: int = 50_000
    """Calls of one peer in flight, parked receives included; beyond, Overloaded."""
    strangers_max: int = 64
    """Connections that have not proved themselves yet; beyond, the oldest one is closed."""
    handshake_s: float = 5.0
    """From the connection to the last proof."""
    ping_s: float = 2.0
    """How often each side sends a Ping. A peer that is silent for `SILENT_PINGS` times as long is gone."""
    held_s_max: float = 10.0
    """How long a call waits for a connection to the owner; then StoreFailed."""
    retry_s_max: float = 1.0
    """The longest pause between two attempts to connect."""
    write_buffer_bytes_max: int = 1024 * 1024
    """Beyond, outcomes that the peer has not read count as unread (engine/long_polls.py)."""
    backlog_bytes_max: int = 64 * 1024 * 1024
    """Beyond so many more bytes, the owner reads no further calls of a peer that does not read its outcomes."""


SILENT_PINGS: Final = 3
