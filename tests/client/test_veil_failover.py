"""The veil adapter before several servers: which failure sends a request on to the next one, and which does not."""

import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from tests.client.test_veil_connections import DONE, GONE, SENT, Script, answer, be_silent, hang_up, patient, say

from veilmq.client.adapters.connect import parse_url
from veilmq.client.adapters.veil import VeilAccount, VeilQueue
from veilmq.client.errors import ServiceError, TransportError
from veilmq.model.errors import ParameterInvalid

NOT_CARRIED_OUT = b'{"__type":"InternalFailure","message":"The request was not carried out. Try again."}'
UNKNOWN = b'{"__type":"InternalFailure","message":"The outcome of the request is unknown."}'
FAILED = b"500 Internal Server Error"


@pytest.fixture
def servers() -> Iterator[list[Script]]:
    servers = [Script(), Script()]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def queue(servers: list[Script]) -> Iterator[VeilQueue]:
    """The first server has described it; nothing else came yet."""
    first, second = servers
    others = [("127.0.0.1", second.port)]
    with closing(VeilAccount("127.0.0.1", first.port, "k", "s", timeout=5, others=others)) as account:
        found = account.queue("q")
        first.requests.clear()
        yield found


def counts(servers: list[Script]) -> list[int]:
    return [len(server.requests) for server in servers]


def test_the_next_server_is_asked_when_one_is_gone_and_the_client_stays_there(
    servers: list[Script], queue: VeilQueue
) -> None:
    servers[1].steps = [say(answer(SENT))] * 3
    servers[0].close()
    for _ in range(3):
        assert queue.send("hello").id == "1"
    assert (counts(servers), servers[1].connections) == ([0, 3], 1)


@pytest.mark.parametrize("status", [b"503 Service Unavailable", FAILED])
def test_what_was_surely_not_carried_out_is_sent_to_the_next(
    servers: list[Script], queue: VeilQueue, status: bytes
) -> None:
    """Whatever it is. A proxy without a server says 503, too."""
    servers[0].steps = [say(answer(b"<html>" if status != FAILED else NOT_CARRIED_OUT, status))]
    servers[1].steps = [say(answer(SENT))] * 2
    assert queue.send("hello").id == "1"
    assert queue.send("hello").id == "1"
    assert counts(servers) == [1, 2]


@pytest.mark.parametrize("step", [say(answer(UNKNOWN, FAILED)), hang_up], ids=["said to be unknown", "cut off"])
def test_what_may_have_been_carried_out_is_sent_again_only_if_it_may_be(
    servers: list[Script], queue: VeilQueue, step: Any
) -> None:
    servers[0].steps = [step]
    with pytest.raises((ServiceError, TransportError)):
        queue.send("hello")
    assert counts(servers) == [1, 0]
    for server in servers:
        server.steps, server.requests[:] = [step], []
    servers[1].steps = [say(answer(GONE))]
    servers[0].steps *= 2
    queue.delete("handle")  # that it is gone the second time is no error
    assert counts(servers)[1] == 1


def test_who_does_not_answer_is_left(servers: list[Script], queue: VeilQueue) -> None:
    servers[0].steps = [be_silent] * 2
    with patient(queue, 0.3), pytest.raises(TransportError) as lost:
        queue.send("hello")
    assert lost.value.may_have_happened
    servers[1].steps = [say(answer(SENT))]
    assert queue.send("hello").id == "1"
    assert counts(servers) == [1, 1]


def test_when_all_fail_the_error_says_so_once(servers: list[Script], queue: VeilQueue) -> None:
    servers[0].steps = [say(answer(NOT_CARRIED_OUT, FAILED))] * 3
    servers[1].steps = [say(answer(NOT_CARRIED_OUT, FAILED))] * 3
    with pytest.raises(ServiceError, match="not carried out"):
        queue.send("hello")
    assert counts(servers) == [1, 1]
    for server in servers:
        server.close()
    with pytest.raises(TransportError, match="cannot be reached") as unreached:
        queue.send("hello")
    assert not unreached.value.may_have_happened


def test_a_name_with_several_addresses_is_as_many_servers(
    servers: list[Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = [("127.0.0.1", server.port) for server in servers]
    listed = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments: listed)
    servers[0].steps = [say(answer(NOT_CARRIED_OUT, FAILED))]
    with closing(VeilAccount("queues.example", 9324, "k", "s", timeout=5)) as account:
        queue = account.queue("q")
        servers[1].steps = [say(answer(DONE))]
        queue.delete("handle")
    assert counts(servers) == [1, 2]


def test_urls_name_several_servers() -> None:
    found = parse_url("veil://k:s@one:1,two,[::1]:3/jobs")
    assert (found.host, found.port, found.others) == ("one", 1, (("two", None), ("::1", 3)))
    for url in ("sqs://k:s@one:1,two:2/jobs", "veil://one:1,/jobs", "veil://,/jobs"):
        with pytest.raises(ParameterInvalid):
            parse_url(url)
