"""Who may use the peer port: both sides prove themselves, and whoever is refused hears one sentence."""

import asyncio
import logging
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.peers import (
    CLUSTER,
    OTHER,
    OWNER,
    SECRET,
    THIRD,
    WAIT_S,
    Peers,
    framed,
    on_a_loop,
    peers,
    stranger_gets,
)

from veilmq.cluster.peer import VERSION, VERSION_OLDEST, Identity, Limits
from veilmq.cluster.peer.frames import ENCODER
from veilmq.cluster.peer.handshake import HELLO_BYTES_MAX, Handshake, Refusal, Role
from veilmq.testing.for_each import for_each

__all__ = ["peers"]

NONCE = bytes(32)
HELLO = ["veilmq-peer", VERSION, VERSION_OLDEST, CLUSTER, "other", NONCE]


def both(caller: Handshake, owner: Handshake) -> None:
    """Play a handshake to its end. Raises what either side raises."""
    assert owner.receive(caller.hello) is None
    proof = caller.receive(owner.hello)
    assert proof is not None
    assert not owner.done
    answer = owner.receive(proof)
    assert answer is not None
    assert caller.receive(answer) is None


def test_both_sides_prove_themselves() -> None:
    caller = Handshake(Role.CALLER, OTHER, SECRET, expects="owner")
    owner = Handshake(Role.OWNER, OWNER, SECRET)
    both(caller, owner)
    assert (caller.done, owner.done) == (True, True)
    assert (caller.peer, owner.peer) == ("owner", "other")
    assert (caller.version, owner.version) == (VERSION, VERSION)


def test_a_server_of_the_next_release_is_spoken_to_in_this_ones_version() -> None:
    owner = Handshake(Role.OWNER, OWNER, SECRET)
    owner.receive(ENCODER.encode([HELLO[0], VERSION + 1, VERSION_OLDEST, *HELLO[3:], "a new field"]))
    assert owner.version == VERSION


def test_the_owner_must_prove_itself_too() -> None:
    """Whoever took the owner's address cannot answer with a proof that it has heard: the caller's own."""
    caller = Handshake(Role.CALLER, OTHER, SECRET)
    proof = caller.receive(Handshake(Role.OWNER, OWNER, SECRET).hello)
    assert proof is not None
    with pytest.raises(Refusal, match="another secret"):
        caller.receive(proof)
    assert not caller.done


def test_a_name_that_was_changed_on_the_way_is_refused() -> None:
    caller, owner = Handshake(Role.CALLER, OTHER, SECRET), Handshake(Role.OWNER, OWNER, SECRET)
    owner.receive(caller.hello.replace(b"other", b"third"))
    proof = caller.receive(owner.hello)
    assert proof is not None
    with pytest.raises(Refusal, match="another secret"):
        owner.receive(proof)


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        Handshake(Role.OWNER, OWNER, b"123456789012345")


def test_a_name_that_does_not_fit_a_hello_is_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        Handshake(Role.OWNER, Identity(CLUSTER, "s" * HELLO_BYTES_MAX), SECRET)


def test_what_a_refusal_says_is_shown_as_a_text_and_counted_under_a_known_name() -> None:
    caller = Handshake(Role.CALLER, OTHER, SECRET)
    with pytest.raises(Refusal) as refused:
        caller.receive(ENCODER.encode([2, "one of many", "a line\n" * 100]))
    assert refused.value.reason == "other"
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


REFUSED: dict[str, tuple[Any, str, str]] = {
    "newer": ([*HELLO[:1], VERSION + 2, VERSION + 1, "new"], "version", "upgrade the older one of the two"),
    "older": ([*HELLO[:1], VERSION_OLDEST - 1, 0, "old"], "version", "upgrade the older one of the two"),
    "cluster": ([*HELLO[:3], "other cluster", *HELLO[4:]], "cluster", "two clusters: .*--advertise"),
    "itself": ([*HELLO[:4], "owner", NONCE], "itself", "leads to this server itself"),
    "no magic": (["hello", VERSION], "no peer", "does not speak the peer protocol"),
    "no list": (7, "no peer", "does not speak the peer protocol"),
    "no msgpack": (b"\xc1", "no peer", "does not speak the peer protocol"),
    "no versions": (HELLO[:2], "no peer", "it names no versions"),
    "half a hello": (HELLO[:5], "no peer", "its hello is malformed"),
    "a proof first": ([1, NONCE], "no peer", "a proof before its hello"),
}


@for_each("name", REFUSED)
def test_a_hello_that_is_refused_says_why(name: str) -> None:
    hello, reason, text = REFUSED[name]
    owner = Handshake(Role.OWNER, OWNER, SECRET)
    with pytest.raises(Refusal, match=text) as refused:
        owner.receive(hello if isinstance(hello, bytes) else ENCODER.encode(hello))
    assert refused.value.reason == reason


def test_an_address_that_leads_to_another_server_is_refused() -> None:
    caller = Handshake(Role.CALLER, OTHER, SECRET, expects="owner")
    with pytest.raises(Refusal, match="address of server owner leads to 'third'") as refused:
        caller.receive(Handshake(Role.OWNER, THIRD, SECRET).hello)
    assert refused.value.reason == "other server"


MSGPACK = st.builds(ENCODER.encode, st.lists(st.integers(0, 9) | st.binary()))


@given(st.lists(st.binary(max_size=80) | MSGPACK, max_size=4))
@example([b"\xd9\x04\x00\x00\x00\x80"])  # text that is no UTF-8
@example([b"\x91" * HELLO_BYTES_MAX])
@example([ENCODER.encode([2, "secret", "no"])])
def test_whatever_a_stranger_sends_it_is_refused_and_nothing_else(frames: list[bytes]) -> None:
    owner = Handshake(Role.OWNER, OWNER, SECRET)
    for frame in frames:
        try:
            owner.receive(frame)
        except Refusal:
            return
    assert not owner.done


@on_a_loop
async def test_a_server_with_another_secret_is_told_once(peers: Peers, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "veilmq.peer")
    owner = await peers.owner(Limits(retry_s_max=0.01))
    caller = peers.caller(owner.port.address, secret=b"a secret of some others", limits=Limits(retry_s_max=0.01))
    await peers.until(lambda: owner.port.refused["secret"] >= 3)
    await caller.close()
    assert caller.trouble is not None
    text = "refused this server and said: .it has another secret: start both again, .* of their cluster"
    assert re.search(text, caller.trouble)
    refusals = [each.getMessage() for each in caplog.records if "peer port: refused" in each.getMessage()]
    assert len(refusals) == 1
    assert not caller.connected
    assert owner.port.calls == 0


@on_a_loop
async def test_a_handshake_that_was_recorded_opens_nothing(peers: Peers) -> None:
    owner = await peers.owner()
    heard: list[bytes] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Between a server and the owner: keeps what the server sends."""
        theirs, ours = await asyncio.open_connection(*owner.port.address)

        async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter, keep: bool) -> None:
            while data := await source.read(65_536):
                if keep:
                    heard.append(data)
                target.write(data)
            target.close()

        await asyncio.gather(pass_on(reader, ours, True), pass_on(theirs, writer, False))

    between = await asyncio.start_server(relay, "127.0.0.1", 0)
    caller = await peers.connected(between.sockets[0].getsockname())
    await caller.close()
    between.close()
    await peers.until(lambda: owner.port.peers == [])
    *_, (_, reason, text) = await stranger_gets(owner.port.address, b"".join(heard))
    assert (reason, owner.port.refused["secret"]) == ("secret", 1)
    assert "another secret" in text


@on_a_loop
async def test_what_is_no_peer_is_closed_and_the_others_go_on(peers: Peers) -> None:
    owner = await peers.owner(Limits(handshake_s=0.5))
    caller = await peers.connected(owner.port.address)
    large = framed(bytes(HELLO_BYTES_MAX + 1))
    for sends in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", large, framed(b"\xc1")):
        frames = await stranger_gets(owner.port.address, sends)
        assert [each[1:2] for each in frames[1:]] in ([], [["no peer"]])
    assert owner.port.refused["no peer"] == 4
    *_, (_, reason, _) = await stranger_gets(owner.port.address, framed(HELLO))
    assert (reason, owner.port.refused["slow"]) == ("slow", 1)
    assert caller.connected


@on_a_loop
async def test_strangers_have_a_bound(peers: Peers) -> None:
    owner = await peers.owner(Limits(strangers_max=3))
    strangers = [await asyncio.open_connection(*owner.port.address) for _ in range(4)]
    await peers.until(lambda: owner.port.refused["full"])
    reader, writer = strangers[0]
    async with asyncio.timeout(WAIT_S):
        await reader.read()
    await peers.until(lambda: len(owner.port._connections) == 3)
    await peers.connected(owner.port.address)
    assert owner.port.refused["full"] == 2, "a server of the cluster is not kept out"
    for _, writer in strangers:
        writer.close()


@on_a_loop
async def test_an_address_where_nobody_answers_is_trouble(peers: Peers) -> None:
    writers = []
    server = await asyncio.start_server(lambda reader, writer: writers.append(writer), "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    silent = peers.caller(address, limits=Limits(handshake_s=0.05))
    await peers.until(lambda: silent.trouble)
    assert "did not prove itself within 0.05 s" in str(silent.trouble) or "nobody answered" in str(silent.trouble)
    await silent.close()
    for writer in writers:
        writer.close()
    server.close()
    nobody = peers.caller(("127.0.0.1", 1))
    await peers.until(lambda: nobody.trouble)
    assert nobody.troubles["unreachable"]


@on_a_loop
async def test_a_server_that_is_led_to_itself_says_so(peers: Peers) -> None:
    owner = await peers.owner()
    caller = peers.caller(owner.port.address, Identity(CLUSTER, "owner"))
    await peers.until(lambda: caller.troubles["itself"])
    assert "leads to this server itself" in str(caller.trouble)
