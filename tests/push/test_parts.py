"""The parts of the push room: schedules, addresses, health, and the signature's key."""

import asyncio
import datetime
import errno
import os
import socket
import stat
import threading
from pathlib import Path

import pytest
from cryptography import x509

from veilmq.model.instant import SECOND_US
from veilmq.model.settings.topic import RetryStrategy
from veilmq.push import network
from veilmq.push.endpoints import PAUSE_SECONDS_MAX, Health, delay_us
from veilmq.push.endpoints.connections import IN_FLIGHT_MAX
from veilmq.push.network import LOOKUPS_MAX, EndpointRefused, LocalExhaustion, Lookups, check, choose, networks, parse
from veilmq.push.requests import CERTIFICATE_FILE, KEY_FILE, Signer, string_to_sign
from veilmq.testing.for_each import for_each


class TestSchedules:
    """NotifyStrategy."""

    def test_backoff_is_three_times_ten_to_twenty_seconds(self) -> None:
        strategy = RetryStrategy.BACKOFF
        assert [delay_us(strategy, attempt, 0) for attempt in range(1, 5)] == [10 * SECOND_US] * 3 + [None]
        assert delay_us(strategy, 1, 0.5) == 15 * SECOND_US
        assert (delay_us(strategy, 3, 1) or 0) <= 20 * SECOND_US

    def test_exponential_decay_is_a_day_of_retries(self) -> None:
        strategy = RetryStrategy.EXPONENTIAL_DECAY
        gaps = [delay_us(strategy, attempt, 0.3) for attempt in range(1, 178)]
        assert gaps[-1] is None
        seconds = [gap // SECOND_US for gap in gaps if gap is not None]
        assert (len(seconds), seconds[:10], sum(seconds)) == (176, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512], 86_015)


class TestAddresses:
    """Where a push may go."""

    @for_each(
        "address",
        [
            "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.100.100.200", "0.0.0.0",
            "224.0.0.1", "240.0.0.1", "255.255.255.255", "::1", "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1", "ff02::1",
            "2002:a00:1::1", "fec0::1", "64:ff9b::a9fe:a9fe", "168.63.129.16", "::ffff:168.63.129.16",
        ],
    )  # fmt: skip
    def test_addresses_that_are_not_public_are_refused(self, address: str) -> None:
        with pytest.raises(EndpointRefused):
            check(address, ())

    @for_each("address", ["8.8.8.8", "2606:4700::1111"])
    def test_public_ones_pass(self, address: str) -> None:
        check(address, ())

    def test_an_allowed_network_passes_and_no_other(self) -> None:
        allowed = networks(["10.0.0.0/8", "::1/128"])
        check("10.9.9.9", allowed)
        check("::ffff:10.0.0.1", allowed)
        check("::1", allowed)
        with pytest.raises(EndpointRefused):
            check("192.168.0.1", allowed)

    def test_a_name_is_judged_by_where_it_leads(self) -> None:
        url = "http://localhost:81"
        addresses = asyncio.run(Lookups().addresses("localhost"))
        with pytest.raises(EndpointRefused, match="not a public address"):
            choose(url, addresses, ())
        found = choose(url, addresses, networks(["127.0.0.0/8", "::1/128"]))
        assert (found.port, found.target, found.authority) == (81, "/notifications", "localhost:81")

    @for_each(
        "url",
        [
            "ftp://a/",
            "http://",
            "http://u:p@h/",
            "http://h:99999/",
            "http://h:0/",
            "http://h/ x",
            "http://h/\u00e9",
            "http://" + "h" * 3000,
        ],
    )
    def test_what_is_no_endpoint_is_refused(self, url: str) -> None:
        with pytest.raises(EndpointRefused):
            parse(url)

    def test_the_usual_port_is_not_shown(self) -> None:
        assert parse("https://example.com/a?b=c") == ("example.com", 443, True, "/a?b=c", "example.com")
        assert parse("http://[2606:4700::1]:8080/") == ("2606:4700::1", 8080, False, "/", "[2606:4700::1]:8080")


class TestHealth:
    """An endpoint that fails."""

    def test_one_call_at_a_time_until_it_answers(self) -> None:
        health = Health()
        assert health.in_flight_max == 1
        health.succeeded(0.0)
        assert health.in_flight_max == IN_FLIGHT_MAX
        health.failed("x", 0.0)
        assert (health.available, health.in_flight_max) == (True, 1)

    def test_three_failures_make_it_unavailable_and_pauses_grow(self) -> None:
        health = Health()
        assert [health.failed("x", 10.0) for _ in range(4)] == [False, False, True, False]
        assert (health.pause, health.ready_at, health.in_flight_max) == (1.0, 11.0, 1)
        for _ in range(20):
            health.failed("x", 20.0)
        assert health.pause == PAUSE_SECONDS_MAX

    def test_successes_make_it_available_again(self) -> None:
        health = Health()
        for _ in range(5):
            health.failed("x", 0.0)
        assert health.pause == 2.0
        assert [health.succeeded(0.0) for _ in range(4)] == [False, False, True, False]
        assert (health.available, health.in_flight_max) == (True, IN_FLIGHT_MAX)
        assert [health.failed("x", 10.0) for _ in range(3)] == [False, False, True], "it is counted from the start"


class TestSigner:
    """The key in the data directory."""

    def test_the_key_is_made_once_and_is_nobody_elses(self, tmp_path: Path) -> None:
        now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        first, second = Signer.of_directory(tmp_path, now), Signer.of_directory(tmp_path, now)
        assert first.certificate == second.certificate
        assert first.sign("x") == second.sign("x")
        assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600

    @pytest.mark.parametrize("damage", [b"", b"-----BEGIN CERTIFICATE-----\n", None])
    def test_a_certificate_is_made_again_from_its_key(
        self, tmp_path: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        path = tmp_path / CERTIFICATE_FILE
        first = Signer.of_directory(tmp_path, now)
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage)
        again = Signer.of_directory(tmp_path, now)
        assert again.sign("x") == first.sign("x"), "the key is the same"
        assert path.read_bytes() == again.certificate
        keys = [x509.load_pem_x509_certificate(each.certificate).public_key() for each in (first, again)]
        assert keys[0] == keys[1]
        assert ("made again" in caplog.text) == (damage is not None)
        assert Signer.of_directory(tmp_path, now).certificate == again.certificate

    def test_a_certificate_of_another_key_is_made_again(self, tmp_path: Path) -> None:
        now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        old = Signer.of_directory(tmp_path, now)
        (tmp_path / KEY_FILE).unlink()
        new = Signer.of_directory(tmp_path, now)
        assert new.sign("x") != old.sign("x")
        assert new.certificate != old.certificate

    @pytest.mark.parametrize("kept_bytes", [0, 100, 1_600])
    def test_a_damaged_key_is_kept_and_told(self, tmp_path: Path, kept_bytes: int) -> None:
        now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        Signer.of_directory(tmp_path, now)
        path = tmp_path / KEY_FILE
        damaged = path.read_bytes()[:kept_bytes]
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="holds no RSA key: restore it"):
            Signer.of_directory(tmp_path, now)
        assert path.read_bytes() == damaged

    def test_a_disk_that_fails_leaves_no_half_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)

        def failing(descriptor: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing)
            with pytest.raises(OSError, match="Input/output"):
                Signer.of_directory(tmp_path, now)
        assert not (tmp_path / KEY_FILE).exists()
        Signer.of_directory(tmp_path, now)
        assert sorted(each.name for each in tmp_path.iterdir()) == [CERTIFICATE_FILE, KEY_FILE]

    def test_what_is_signed(self) -> None:
        headers = {
            "Content-md5": "M",
            "Content-Type": "text/xml",
            "Date": "D",
            "x-mns-b": "2",
            "X-MNS-A": "1",
            "Host": "h",
        }
        assert string_to_sign("POST", "/p", headers) == "POST\nM\ntext/xml\nD\nx-mns-a:1\nx-mns-b:2\n/p"


class TestLookups:
    """Names."""

    def test_an_address_that_is_written_out_is_not_looked_up(self) -> None:
        def never(host: str) -> list[str]:
            raise AssertionError(host)

        lookups = Lookups(never)
        assert asyncio.run(lookups.addresses("10.0.0.1")) == ["10.0.0.1"]
        assert asyncio.run(lookups.addresses("2001:DB8::1")) == ["2001:db8::1"]

    def test_forms_of_an_address_that_only_resolvers_read_are_resolved(self) -> None:
        for host in ("127.1", "0x7f000001", "2130706433"):
            assert asyncio.run(Lookups().addresses(host)) == ["127.0.0.1"]

    def test_who_asks_together_shares_one_look(self) -> None:
        asked: list[str] = []

        def counting(host: str) -> list[str]:
            asked.append(host)
            return ["192.0.2.1"]

        async def many() -> None:
            lookups = Lookups(counting, believed_s=0)
            for times in (1, 2):
                found = await asyncio.gather(*(lookups.addresses("a.example") for _ in range(50)))
                assert found == [["192.0.2.1"]] * 50
                assert len(asked) == times, "an answer is not believed for ever"

        asyncio.run(many())

    def test_an_answer_is_believed_for_a_while(self) -> None:
        asked: list[str] = []

        async def twice() -> None:
            lookups = Lookups(lambda host: asked.append(host) or ["192.0.2.1"])  # type: ignore[func-returns-value]
            for _ in range(2):
                await lookups.addresses("a.example")

        asyncio.run(twice())
        assert asked == ["a.example"]

    @for_each(
        "error", [socket.gaierror(socket.EAI_NONAME, "Name or service not known"), UnicodeError("label too long")]
    )
    def test_a_name_that_cannot_be_found(self, error: Exception) -> None:
        def failing(host: str) -> list[str]:
            raise error

        with pytest.raises(EndpointRefused, match=r"a\.example cannot be found: (Name or|label)"):
            asyncio.run(Lookups(failing).addresses("a.example"))

    def test_a_bug_is_told_to_who_asks_and_the_next_may_ask_again(self) -> None:
        asked: list[str] = []

        def failing(host: str) -> list[str]:
            asked.append(host)
            raise KeyError(host)

        async def twice() -> None:
            lookups = Lookups(failing)
            for _ in range(2):
                with pytest.raises(KeyError):
                    await asyncio.wait_for(lookups.addresses("a.example"), 5)

        asyncio.run(twice())
        assert len(asked) == 2

    def test_names_are_remembered_within_a_bound(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(network, "_REMEMBERED_MAX", 3)
        sizes = []

        async def many() -> None:
            lookups = Lookups(lambda host: ["192.0.2.1"])
            for number in range(8):
                await lookups.addresses(f"n{number}.example")
                sizes.append(len(lookups._known))

        asyncio.run(many())
        assert sizes == [1, 2, 3, 1, 2, 3, 1, 2]

    def test_where_too_many_hang_others_wait(self) -> None:
        released = threading.Event()

        def hanging(host: str) -> list[str]:
            released.wait(30)
            return ["192.0.2.1"]

        async def many() -> None:
            lookups = Lookups(hanging)
            tasks = [asyncio.create_task(lookups.addresses(f"n{number}.example")) for number in range(LOOKUPS_MAX)]
            await asyncio.sleep(0)
            with pytest.raises(LocalExhaustion, match="256 names are being looked up"):
                await lookups.addresses("one-more.example")
            released.set()
            assert await asyncio.gather(*tasks) == [["192.0.2.1"]] * LOOKUPS_MAX

        asyncio.run(many())
