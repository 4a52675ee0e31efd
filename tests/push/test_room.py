"""Pushes, from a publish to an endpoint: delivered, tried again, given up, and nobody held up by the dead."""

import asyncio
import base64
import contextlib
import gzip
import itertools
import json
import threading
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from stage import CERTIFICATE_URL, NEWS, TESTER, Endpoint, Stage, until

from veilmq.model.commands import DeleteQueue, Unsubscribe
from veilmq.model.instant import SECOND_US
from veilmq.model.settings.topic import NOTIFICATION_NAMESPACE, ContentFormat, RetryStrategy
from veilmq.push.endpoints.connections import IN_FLIGHT_MAX
from veilmq.push.room import ERROR_CHARACTERS_MAX, TIMEOUT_S
from veilmq.push.room import IN_FLIGHT_MAX as TOTAL_MAX
from veilmq.testing.for_each import for_each

BOMB_BYTES = 1 << 26
REFUSES = b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"


@for_each("form", list(ContentFormat))
def test_what_is_published_arrives_signed_in_its_form(play: Any, form: ContentFormat) -> None:
    body = 'a <b> & "c" \u00fc'

    async def test(stage: Stage) -> None:
        async with Endpoint() as endpoint:
            await stage.subscribe("s", endpoint.url, content_format=form)
            published = await stage.publish(body, tag="t")
            await until(lambda: len(endpoint.got) == 1)
            (request,) = endpoint.got
            request.verify(stage.signer.certificate)
            assert (request.method, request.target) == ("POST", "/hook?x=1")
            assert request.headers["host"] == f"127.0.0.1:{endpoint.port}"
            assert base64.b64decode(request.headers["x-mns-signing-cert-url"]).decode() == CERTIFICATE_URL
            identity = published.id.hex().upper()
            if form is ContentFormat.SIMPLIFIED:
                assert request.body.decode() == body
                assert request.headers["x-mns-message-id"] == identity
                assert request.headers["x-mns-message-tag"] == "t"
            else:
                text = request.body.decode()
                if form is ContentFormat.JSON:
                    fields = json.loads(text)
                else:
                    root = ElementTree.fromstring(text)
                    assert root.tag == f"{{{NOTIFICATION_NAMESPACE}}}Notification"
                    fields = {child.tag.partition("}")[2]: child.text for child in root}
                assert (fields["Message"], fields["MessageId"], fields["MessageTag"]) == (body, identity, "t")
                assert (fields["TopicName"], fields["SubscriptionName"]) == ("news", "s")
            await stage.drained("s")
            (record,) = stage.pushes()
            assert (record.attempt, record.detail["status"]) == (1, 204)

    play(test)


def test_header_names_can_be_those_of_the_documents(play: Any) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint() as endpoint:
            await stage.subscribe("s", endpoint.url)
            await stage.publish()
            await until(lambda: len(endpoint.got) == 1)
            endpoint.got[0].verify(stage.signer.certificate)
            assert {"Authorization", "Content-md5", "Content-Type", "Date"} <= endpoint.got[0].headers.keys()

    play(test, documented_case=True)


@pytest.mark.slow
def test_a_refusal_is_tried_three_times_more_and_then_dead_lettered(play: Any) -> None:
    async def test(stage: Stage) -> None:
        dead = await stage.queue("dead")
        async with Endpoint(REFUSES) as endpoint:
            await stage.subscribe("s", endpoint.url, dead_letter_queue=dead)
            await stage.publish("poison")
            for attempt in range(1, 5):
                await until(lambda n=attempt: len(stage.pushes()) >= n)  # type: ignore[misc]
                # In small steps, so that a push that comes too soon has a time that tells.
                for _ in range(21):
                    await stage.advance(1)
            await stage.drained("s")
            assert [each.body for each in await stage.receive(dead)] == ["poison"]
            assert [each.attempt for each in stage.pushes()] == [1, 2, 3, 4]
            assert len(endpoint.got) == 4
            waits = [later.at - earlier.at for earlier, later in itertools.pairwise(stage.pushes())]
            assert min(waits) >= 10 * SECOND_US
            assert {each.detail["error"] for each in stage.pushes()} == {"status 500"}

    play(test)


@pytest.mark.slow
@pytest.mark.parametrize("deleted", [False, True], ids=["none", "deleted"])
def test_without_a_dead_letter_queue_the_last_failure_drops_the_message(play: Any, deleted: bool) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint(REFUSES) as endpoint:
            dead = await stage.queue("dead") if deleted else None
            await stage.subscribe("s", endpoint.url, dead_letter_queue=dead)
            if dead is not None:
                await stage.do(DeleteQueue(queue=dead, origin=TESTER))
            await stage.publish()
            await stage.exhausted("s")
            assert len(endpoint.got) == 4
            assert stage.room.results == {"failed": 3, "exhausted": 1}

    play(test)


@pytest.mark.slow
def test_an_endpoint_that_recovers_gets_what_it_missed(play: Any) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint(REFUSES) as endpoint:
            await stage.subscribe("s", endpoint.url, strategy=RetryStrategy.EXPONENTIAL_DECAY)
            for number in range(3):
                await stage.publish(str(number))
            await until(lambda: len(stage.pushes()) >= 3)
            assert list(stage.room.unavailable()) == [f"http://127.0.0.1:{endpoint.port}"]
            endpoint.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
            for _ in range(20):
                await stage.advance(2)
                await asyncio.sleep(0.1)
                if not await stage.waiting("s"):
                    break
            assert await stage.waiting("s") == 0
            assert stage.room.results["delivered"] == 3

    play(test)


def test_at_most_four_are_in_flight_at_an_endpoint(play: Any) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint(delay_s=0.3) as endpoint:
            await stage.subscribe("a", endpoint.url)
            await stage.subscribe("b", endpoint.url.replace("hook", "other"))
            await until(lambda: len(stage.shell.engine.waiting) == 2)
            await stage.publish("first")
            await until(lambda: len(endpoint.got) == 2)
            assert endpoint.most == 1, "one at a time until it answers"
            endpoint.delay_s = 0.02
            await stage.room.stop()
            for number in range(20):
                await stage.publish(str(number))
            # Each subscription leases as much as the endpoint takes: together that is twice as much.
            await stage.open()
            await until(lambda: len(endpoint.got) == 42)
            assert endpoint.most == IN_FLIGHT_MAX

    play(test)


@pytest.mark.slow
def test_a_subscription_may_have_a_rate_of_pushes(play: Any) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint() as endpoint:
            await stage.subscribe("s", endpoint.url, pushes_per_second_max=10)
            for number in range(20):
                await stage.publish(str(number))
            await until(lambda: len(endpoint.got) == 20)
            leased = [each.at for each in stage.events() if each.kind == "received"]
            # A second's worth is there at the beginning.
            assert leased[-1] - leased[0] >= SECOND_US

    play(test)


def test_at_most_256_are_in_flight_in_all(play: Any) -> None:
    async def test(stage: Stage) -> None:
        async with contextlib.AsyncExitStack() as stack:
            endpoints = [await stack.enter_async_context(Endpoint()) for _ in range(70)]
            for number, endpoint in enumerate(endpoints):
                await stage.subscribe(f"s{number}", endpoint.url)
            await stage.publish("known to answer")
            await until(lambda: len(stage.pushes()) == 70)
            for endpoint in endpoints:
                endpoint.delay_s = 60
            await asyncio.gather(*(stage.publish(str(number)) for number in range(IN_FLIGHT_MAX)))
            await until(lambda: sum(each.now for each in endpoints) == TOTAL_MAX)
            await asyncio.sleep(0.2)
            assert sum(each.now for each in endpoints) == TOTAL_MAX
            assert max(each.now for each in endpoints) == IN_FLIGHT_MAX
            await stage.room.stop()  # it must not be cut off while it connects anew to those that are left

    play(test, timeout_s=60)


def test_what_an_endpoint_does_not_take_waits_in_its_queue(play: Any) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint() as endpoint:
            await stage.subscribe("s", endpoint.url)
            await stage.publish("first")
            await until(lambda: len(endpoint.got) == 1)
            endpoint.delay_s = 60
            for number in range(5 * IN_FLIGHT_MAX):
                await stage.publish(str(number))
            await until(lambda: endpoint.now == IN_FLIGHT_MAX)
            await asyncio.sleep(0.1)
            assert len(stage.room._sending) == IN_FLIGHT_MAX
            assert await stage.waiting("s") == 5 * IN_FLIGHT_MAX

    play(test)


def test_the_state_of_an_endpoint_goes_with_its_last_subscription(play: Any) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint() as endpoint:
            elsewhere = [f"http://127.0.0.1:{port}/" for port in range(1, 9)]  # nobody listens there
            await stage.subscribe("kept", endpoint.url)
            for place, url in enumerate(elsewhere):
                for name in ("a", "b"):
                    await stage.subscribe(f"{name}{place}", url)
            await stage.publish()
            await until(lambda: len(stage.room.endpoints) == 9)
            await until(lambda: len(stage.pushes()) == 17)
            for left, name in ((9, "a"), (1, "b")):
                for place in range(len(elsewhere)):
                    await stage.do(Unsubscribe(topic=NEWS, origin=TESTER, name=f"{name}{place}"))
                await until(lambda left=left: len(stage.room.endpoints) == left)  # type: ignore[misc]
                assert len(stage.room.endpoints) == left
            assert len(stage.room._tasks) == 1
            assert not stage.room._held_up
            assert not stage.room._sending

    play(test)


def test_dead_endpoints_hold_up_no_healthy_one(play: Any) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint() as healthy, Endpoint(delay_s=60) as dead:
            for number in range(20):
                await stage.subscribe(f"dead{number}", dead.url.replace("hook", str(number)))
            await stage.subscribe("healthy", healthy.url)
            for number in range(30):
                await stage.publish(str(number))
            await until(lambda: len(healthy.got) == 30)
            assert dead.got == []

    play(test)


@for_each(
    "answer",
    [
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"10000\r\n"
        + b"x" * 65_536
        + b"\r\n"
        + b"10000\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n" + b"x" * 65_536,
        b"HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\nshort of it",
    ],
    ids=["a redirect", "an endless answer", "a huge answer", "a promised answer"],
)
def test_hostile_answers_count_by_their_status_alone(play: Any, answer: bytes) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint(answer) as endpoint:
            await stage.subscribe("s", endpoint.url)
            await stage.publish()
            await until(lambda: len(stage.pushes()) == 1)
            detail = stage.pushes()[0].detail
            assert (detail["status"] in (200, 302), detail.get("error")) == (True, None)
            assert len(endpoint.got) == 1

    play(test)


def test_an_answer_is_not_decompressed(play: Any) -> None:
    bomb = gzip.compress(gzip.compress(bytes(BOMB_BYTES)))
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip, gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb)

    async def test(stage: Stage) -> None:
        async with Endpoint(head + bomb) as endpoint:
            await stage.subscribe("s", endpoint.url)
            tracemalloc.start()
            try:
                await stage.publish()
                await until(lambda: len(stage.pushes()) == 1)
                peak_bytes = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert stage.pushes()[0].detail["status"] == 200
            assert peak_bytes < BOMB_BYTES / 2
            await stage.publish()
            await until(lambda: len(endpoint.got) == 2)

    play(test)


@for_each(
    ("answer", "error"),
    [
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000, "the endpoint did not answer in HTTP: "),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "the endpoint did not answer in HTTP: "),
        (b"\xff" * 60_000 + b"\r\n\r\n", "the endpoint did not answer in HTTP: "),
        (b"HTTP/1.1 200 OK\r\nContent-", "no answer within 1 s"),
        (b"HTTP/1.1 404 Gone\r\nContent-Length: 0\r\n\r\n", "status 404"),
    ],
    ids=["an endless header", "another protocol", "a long nonsense", "half an answer", "an error"],
)
def test_what_is_no_answer_has_failed(play: Any, answer: bytes, error: str) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint(answer) as endpoint:
            await stage.subscribe("s", endpoint.url)
            await stage.publish()
            await until(lambda: len(stage.pushes()) == 1)
            said = stage.pushes()[0].detail["error"]
            assert error in said
            assert len(said) <= ERROR_CHARACTERS_MAX
            assert await stage.waiting("s") == 1

    # Time passes for what waits for it alone: any other fails by what it says, however slow the machine is.
    play(test, timeout_s=1 if error.startswith("no answer") else 60)


def test_the_time_for_a_push_is_five_seconds() -> None:
    assert TIMEOUT_S == 5.0


def test_a_name_that_changes_after_the_check_changes_nothing(play: Any) -> None:
    asked: list[str] = []

    def rebinding(host: str) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["10.255.255.1"]

    async def test(stage: Stage) -> None:
        async with Endpoint() as endpoint:
            await stage.subscribe("s", f"http://rebinding.example:{endpoint.port}/hook")
            await stage.publish("first")
            await until(lambda: len(endpoint.got) == 1)
            assert endpoint.got[0].headers["host"] == f"rebinding.example:{endpoint.port}"
            assert asked == ["rebinding.example"], "the connection goes to what was checked, without asking again"

    play(test, resolve=rebinding)


def test_one_private_address_of_several_is_enough_to_be_refused(play: Any) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint() as endpoint:
            await stage.subscribe("s", f"http://two.example:{endpoint.port}/hook")
            await stage.publish()
            await until(lambda: len(stage.pushes()) == 1)
            assert "10.0.0.7 is not a public address" in stage.pushes()[0].detail["error"]
            assert endpoint.got == []

    play(test, resolve=lambda host: ["127.0.0.1", "10.0.0.7"])


@pytest.mark.slow
def test_a_name_server_that_hangs_holds_up_its_own_names_alone(play: Any) -> None:
    released, asked = threading.Event(), Counter[str]()

    def resolve(host: str) -> list[str]:
        if host.startswith("hangs"):
            asked[host] += 1
            released.wait(30)
            raise OSError("too late")
        return ["127.0.0.1"]

    async def test(stage: Stage) -> None:
        async with Endpoint() as endpoint:
            for number in range(30):
                await stage.subscribe(f"dead{number}", f"http://hangs{number}.example/")
            await stage.subscribe("s", f"http://fine.example:{endpoint.port}/")
            for number in range(5):
                await stage.publish(str(number))
            await until(lambda: len(endpoint.got) == 5)
            assert max(asked.values()) == 1, "one thread a name, however many pushes wait for it"
            await until(lambda: len(stage.pushes()) > 5)
            errors = {each.detail.get("error") for each in stage.pushes()}
            assert errors == {None, "no answer within 2 s"}
        released.set()

    play(test, timeout_s=2, resolve=resolve)


def test_a_certificate_that_nobody_vouches_for_is_refused(play: Any, tmp_path: Path) -> None:
    async def test(stage: Stage) -> None:
        key, certificate = stage.self_signed(tmp_path)
        async with Endpoint(tls=(certificate, key)) as endpoint:
            await stage.subscribe("s", endpoint.url)
            await stage.publish()
            await until(lambda: len(stage.pushes()) == 1)
            assert "CERTIFICATE_VERIFY_FAILED" in stage.pushes()[0].detail["error"]
            assert endpoint.got == []

    play(test)


def test_the_state_of_a_subscription_tells_what_is_wrong(play: Any) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint(REFUSES) as endpoint:
            await stage.subscribe("s", endpoint.url)
            at_first = stage.room.state(endpoint.url)
            assert (at_first["available"], at_first["last_error"]) == (True, None)
            for number in range(3):
                await stage.publish(str(number))
            await until(lambda: len(stage.pushes()) == 3)
            state = stage.room.state(endpoint.url)
            assert state["endpoint"] == f"http://127.0.0.1:{endpoint.port}"
            assert (state["available"], state["failures"], state["last_error"]) == (False, 3, "status 500")
            assert state["pause_us"] == 500_000

    play(test)


@for_each("dead_letters", [True, False])
def test_a_push_that_expired_is_dead_lettered_or_dropped(play: Any, dead_letters: bool) -> None:
    """After a day, however often it was tried (mns.md, section 8)."""

    async def test(stage: Stage) -> None:
        dead = await stage.queue("dead")
        await stage.subscribe("s", "http://127.0.0.1:1/", dead_letter_queue=dead if dead_letters else None)
        await stage.publish("too late")
        await until(lambda: len(stage.pushes()) == 1)
        await stage.advance(86_401)
        await stage.drained("s")
        assert [each.body for each in await stage.receive(dead)] == (["too late"] if dead_letters else [])
        ended = [each for each in stage.events() if each.kind in {"expired", "dead_lettered"}]
        assert [each.kind for each in ended] == ["dead_lettered" if dead_letters else "expired"]
        if dead_letters:
            assert ended[0].detail["expired"] is True

    play(test, allowed=())


def test_who_answers_too_slowly_has_failed(play: Any) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint(delay_s=60) as endpoint:
            await stage.subscribe("s", endpoint.url)
            await stage.publish()
            await until(lambda: len(stage.pushes()) == 1)
            assert stage.pushes()[0].detail["error"] == "no answer within 0.1 s"
            assert await stage.waiting("s") == 1

    play(test, timeout_s=0.1)


def test_a_private_address_is_not_called(play: Any) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint() as endpoint:
            await stage.subscribe("s", endpoint.url)
            await stage.publish()
            await until(lambda: len(stage.pushes()) == 1)
            assert "not a public address" in stage.pushes()[0].detail["error"]
            assert endpoint.got == []
            assert await stage.waiting("s") == 1

    play(test, allowed=())


def test_a_room_that_died_in_mid_push_loses_nothing(play: Any) -> None:
    async def test(stage: Stage) -> None:
        async with Endpoint(delay_s=60) as endpoint:
            await stage.subscribe("s", endpoint.url)
            await stage.publish("survivor")
            await until(lambda: endpoint.now == 1)
            await stage.room.stop()
            assert await stage.waiting("s") == 1
            endpoint.delay_s = 0
            await stage.open()
            await stage.advance(31)
            await until(lambda: len(endpoint.got) == 1)
            assert b"survivor" in endpoint.got[0].body

    play(test)


def test_who_stops_in_order_waits_for_what_is_under_way(play: Any) -> None:
    """An answer that comes after the end would be a second push."""

    async def test(stage: Stage) -> None:
        async with Endpoint(delay_s=0.3) as endpoint:
            await stage.subscribe("s", endpoint.url)
            for number in range(2):
                await stage.publish(str(number))
            await until(lambda: endpoint.now == 1)  # and the other waits for its turn
            await stage.room.stop(grace_s=60)
            assert (len(endpoint.got), stage.room.results["delivered"]) == (1, 1)
            assert await stage.waiting("s") == 1

    play(test)


def test_what_has_not_changed_is_not_gone_through_again(play: Any) -> None:
    class Counted(dict[Any, Any]):
        walks = looks = 0

        def values(self) -> Any:
            self.walks += 1
            return super().values()

    async def test(stage: Stage) -> None:
        async with Endpoint() as endpoint:
            await stage.subscribe("s", endpoint.url)
            counted = Counted(stage.subscriptions())

            def look() -> Counted:
                counted.looks += 1
                return counted

            await stage.room.stop()
            stage.subscriptions = look  # type: ignore[method-assign]
            await stage.open()
            await stage.publish("a")
            await until(lambda: counted.looks > 5 and len(endpoint.got) == 1)
            assert counted.walks == 1

    play(test)
