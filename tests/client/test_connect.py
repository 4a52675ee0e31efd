"""`veilmq.connect`: every form that is built, the SDKs' own objects, and what it says of those that are not."""

import copy
import pickle
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from azure.storage.queue import QueueServiceClient

import veilmq
from veilmq.client.adapters.azure import AzureQueue
from veilmq.client.adapters.cloud import EXTEND_SECONDS
from veilmq.client.adapters.connect import OPENERS, SCHEMES, connect, connect_account
from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.adapters.mns import MnsQueue
from veilmq.client.adapters.mns.calls import TIMEOUT_SECONDS
from veilmq.client.adapters.sqs import SqsAccount, SqsQueue
from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.keeper import LeaseKeeper
from veilmq.client.messages import Template
from veilmq.client.queue import Queue
from veilmq.client.receiver import AsyncReceiver, Receiver
from veilmq.client.worker import Worker
from veilmq.client.wrapping import GatheredDeletes
from veilmq.model.errors import CapabilityMissing, ParameterInvalid, QueueExists, QueueMissing
from veilmq.testing.client_contract import for_each
from veilmq.testing.local import ServerProcess

SECRET = "a s3cret/of+the=tests"
ENCODED = "a%20s3cret%2Fof%2Bthe%3Dtests"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """With a credentials file that knows one key."""
    directory = tmp_path_factory.mktemp("server")
    credentials = directory / "credentials.toml"
    credentials.write_text(
        f'[[account]]\nid = "111111111111"\n[[account.key]]\nid = "AKIDCONNECT000000001"\nsecret = "{SECRET}"\n'
    )
    credentials.chmod(0o600)
    process = ServerProcess(directory, "--credentials", str(credentials)).start()
    yield process
    assert process.stop() == 0


def place(server: ServerProcess) -> str:
    return server.sqs.removeprefix("http://").rstrip("/")


def used(queue: Queue) -> None:
    """The queue carries a message, and is closed."""
    with queue:
        sent = queue.send("x")
        (message,) = queue.receive(lease=60, wait=5)
        assert (message.id, message.body) == (sent.id, "x")
        queue.delete(message.handle)


def client(server: ServerProcess, service: str = "sqs", secret: str = SECRET) -> Any:
    return boto3.client(
        service, endpoint_url=server.sqs, region_name="us-east-1", aws_access_key_id="AKIDCONNECT000000001",
        aws_secret_access_key=secret,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["veil", "sqs", "azure", "mns"])
def test_a_port_without_tls_is_told_with_what_to_do(server: ServerProcess, scheme: str) -> None:
    """The clouds' adapters expect TLS; a server on one's own machine rarely has it."""
    port = {"azure": server.azure, "mns": server.mns}.get(scheme, server.sqs)
    host = urlsplit(port).netloc
    url = f"azure://:a2V5@{host}/orders/work?tls=1" if scheme == "azure" else f"{scheme}://key:secret@{host}/work?tls=1"
    with (
        pytest.raises(TransportError, match="the port speaks no TLS; in a URL say tls=0"),
        connect(url) as queue,
    ):
        queue.stats()


def test_another_port_and_a_missing_key_are_told(server: ServerProcess) -> None:
    for port in (server.azure, server.mns, server.admin):
        with pytest.raises(ServiceError, match="veil:// goes to a server's --sqs port, 9324 unless told"):
            connect(f"veil://key:secret@{urlsplit(port).netloc}/work")
    with pytest.raises(ServiceError, match="the URL names no key, and this server has credentials"):
        connect(f"veil://{urlsplit(server.sqs).netloc}/work")


@pytest.fixture
def hangs_up() -> Iterator[tuple[str, list[bytes]]]:
    """Host and port of a server that reads each request and ends the connection; and the requests."""
    requests: list[bytes] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    requests.append(connection.recv(65_536))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", requests
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@for_each("url", ["veil://{}/", "azure://{}/devstoreaccount1/?tls=0", "sqs://a:b@{}/?tls=0", "mns://a:b@{}/"])
def test_without_retries_a_call_is_one_request(url: str, hangs_up: tuple[str, list[bytes]]) -> None:
    place, requests = hangs_up
    url = url.format(place)
    for given, many in ((url, True), (f"{url}{'&' if '?' in url else '?'}retries=0", False)):
        if many and url.startswith("sqs"):
            continue  # boto3 would wait for seconds
        requests.clear()
        with connect_account(given) as account, pytest.raises(TransportError) as lost:
            account.names()
        assert lost.value.may_have_happened
        assert (len(requests) > 1) is many


class TestUrls:
    """From a URL."""

    def test_embedded(self, tmp_path: Path) -> None:
        url = f"veil://{tmp_path}/data?queue=jobs"
        used(connect(f"{url}&create=1"))
        used(connect(url))
        with EmbeddedAccount(tmp_path / "data") as account:
            assert account.names() == ["jobs"]

    def test_a_queue_closes_the_account_that_was_opened_for_it(self, tmp_path: Path) -> None:
        queue = connect(f"veil://{tmp_path}/data?queue=jobs&create=1")
        account = queue.account
        for thing in (queue, account, account.queue("jobs"), Worker(queue, print), AsyncReceiver(queue)):
            for transfer in (pickle.dumps, copy.copy):
                with pytest.raises(TypeError, match="cannot be pickled or copied: make another one"):
                    transfer(thing)
        queue.close()
        queue.close()
        with pytest.raises(TransportError):
            account.names()

    def test_nothing_is_made_without_being_asked_to(self, tmp_path: Path) -> None:
        url = f"veil://{tmp_path}/data?queue=jobs"
        with pytest.raises(ParameterInvalid):
            connect(url)
        assert not (tmp_path / "data").exists()
        connect(f"{url}&create=1").close()
        with pytest.raises(QueueMissing) as missing:
            connect(f"veil://{tmp_path}/data?queue=other")
        assert "create=1" in missing.value.__notes__[0]
        assert pickle.loads(pickle.dumps(missing.value)).__notes__ == missing.value.__notes__
        with connect_account(f"veil://{tmp_path}/data") as account:  # type: ignore[attr-defined]
            assert account.names() == ["jobs"]

    def test_a_template_makes_the_queue_as_it_says(self, tmp_path: Path) -> None:
        url = f"veil://{tmp_path}/data?queue=jobs&create=1"
        with connect(url, template=Template(visibility_timeout=7)) as queue:
            assert queue.stats().visibility_timeout == 7
        with pytest.raises(QueueExists):
            connect(url, template=Template(visibility_timeout=8))
        connect(url).close()

    @pytest.mark.slow
    @pytest.mark.parametrize("scheme", ["veil", "sqs"])
    def test_a_server(self, server: ServerProcess, scheme: str) -> None:
        url = f"{scheme}://AKIDCONNECT000000001:{ENCODED}@{place(server)}"
        used(connect(f"{url}/{scheme}-jobs?tls=0&create=1"))
        again = connect(f"{url}/{scheme}-jobs?tls=0")
        assert repr(Receiver(again)) == f"Receiver({type(again.inner).__name__}('{scheme}-jobs'))"
        assert repr(GatheredDeletes(again)) == f"GatheredDeletes({type(again.inner).__name__}('{scheme}-jobs'))"
        used(again)
        with pytest.raises(QueueMissing) as refused:
            connect(f"{url}/missing?tls=0")
        assert refused.value.queue == "missing"
        account = connect_account(f"{url}/?tls=0")
        assert f"{scheme}-jobs" in account.names()
        used(account.queue(f"{scheme}-jobs"))
        account.close()

    @pytest.mark.slow
    def test_an_account_in_an_sqs_url(self, server: ServerProcess) -> None:
        url = f"sqs://AKIDCONNECT000000001:{ENCODED}@{place(server)}/111111111111/owned?tls=0"
        used(connect(f"{url}&create=1"))

    @pytest.mark.slow
    @pytest.mark.parametrize("scheme", ["veil", "sqs"])
    def test_a_wrong_secret_is_told_and_not_shown(self, server: ServerProcess, scheme: str) -> None:
        url = f"{scheme}://AKIDCONNECT000000001:wrong%2F{ENCODED}@{place(server)}/jobs?tls=0"
        with pytest.raises(ServiceError) as refused:
            connect(url)
        error: BaseException | None = refused.value
        while error is not None:
            for shown in (str(error), repr(error)):
                assert SECRET not in shown
                assert ENCODED not in shown
            error = error.__cause__ or error.__context__

    def test_a_repr_names_the_place_and_the_state_but_no_secret(self, tmp_path: Path) -> None:
        places = [
            f"veil://k:{ENCODED}@h:1/",
            f"sqs://k:{ENCODED}@h:1/",
            f"mns://k:{ENCODED}@h:1/",
            "azure://:a2V5@h:1/a/",
        ]
        for url in places:
            with connect_account(url) as account:
                assert re.fullmatch(r"\w+Account\('(https?://)?h:1(/a)?'\)", repr(account))
            assert repr(account).endswith("', closed)")
        assert repr(connect_account(QueueServiceClient("http://h:1/a?sig=key"))) == "AzureAccount('http://h:1/a')"
        with connect(f"veil://{tmp_path}/data?queue=jobs&create=1") as queue:
            assert repr(queue.account) == f"EmbeddedAccount('{tmp_path}/data')"
            with LeaseKeeper(queue) as keeper:
                assert repr(keeper) == f"LeaseKeeper({queue!r}, leases=0)"
            assert repr(keeper) == f"LeaseKeeper({queue!r}, leases=0, closed)"
            assert repr(Worker(queue, print)) == f"Worker({queue!r}, print, idle)"
            assert SECRET not in repr(Worker(queue, partial(print, SECRET)))
        client = boto3.client("sqs", endpoint_url=f"http://u:{ENCODED}@h:1/", region_name="x")
        assert repr(SqsAccount(client)) == "SqsAccount('http://h:1/')"
        worker = Worker(f"veil://k:{ENCODED}@h:1/jobs", print)
        assert ENCODED not in repr(worker)
        assert SECRET not in repr(worker)
        assert "queue='jobs'" in repr(worker)

    def test_an_event_loop_that_does_not_fit_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with connect(f"veil://{tmp_path}/data?queue=jobs&create=1") as queue:
            waiting = AsyncReceiver(queue).receive()
            with pytest.raises(CapabilityMissing, match="outside asyncio"):
                waiting.send(None)  # as any other loop would
        monkeypatch.delattr("select.poll")  # as eventlet's monkey_patch() does
        for scheme in ("veil", "mns"):
            with pytest.raises(CapabilityMissing, match="eventlet"):
                connect_account(f"{scheme}://key:secret@127.0.0.1:1/")

    def test_nobody_there(self) -> None:
        with pytest.raises(TransportError) as refused:
            connect(f"veil://key:{ENCODED}@127.0.0.1:1/jobs?tls=0")
        assert not refused.value.may_have_happened
        assert SECRET not in str(refused.value)

    @pytest.mark.slow
    def test_a_held_directory_names_the_url_to_use(self, server: ServerProcess) -> None:
        with pytest.raises(TransportError) as refused:
            connect(f"veil://{server.data}?queue=jobs&create=1")
        assert refused.value.reason.endswith(f"held by pid {server.process.pid}, use veil://{place(server)}/NAME")

    def test_every_scheme_has_its_adapter(self) -> None:
        assert set(OPENERS) == {*SCHEMES, "embedded"}

    @pytest.mark.parametrize(
        ("module", "url"),
        [
            ("boto3", "sqs://key:secret@127.0.0.1:1/jobs?tls=0"),
            ("azure.storage.queue", "azure://:a2V5@127.0.0.1:1/account/jobs"),
            ("mns.account", "mns://id:secret@127.0.0.1:1/jobs"),
        ],
    )
    def test_an_sdk_that_is_not_installed_is_named(
        self, monkeypatch: pytest.MonkeyPatch, module: str, url: str
    ) -> None:
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(CapabilityMissing, match=rf"pip install 'veilmq\[{url.partition(':')[0]}\]'"):
            connect(url)

    @for_each(
        "url, queue, parameter",
        [
            ("veil:///data", None, "url"),
            ("veil:///data?queue=jobs", "jobs", "queue"),
            ("sqs:///?region=us-east-1", None, "url"),
            ("redis://127.0.0.1", None, "url"),
        ],
    )
    def test_which_queue_must_be_clear(self, url: str, queue: str | None, parameter: str) -> None:
        with pytest.raises(ParameterInvalid) as refused:
            connect(url, queue)
        assert refused.value.parameter == parameter

    def test_an_account_has_no_queue(self, tmp_path: Path) -> None:
        with pytest.raises(ParameterInvalid):
            connect_account(f"veil://{tmp_path}/data?queue=jobs")
        with pytest.raises(ParameterInvalid, match=r"/ at the end \(azure://\.\.\./ACCOUNT/\)"):
            connect_account("azure://127.0.0.1:1/devstoreaccount1?tls=0")
        with connect_account(f"veil://{tmp_path}/data?create=1") as account:  # type: ignore[attr-defined]
            account.create("jobs")
            assert account.names() == ["jobs"]


@pytest.mark.slow
class TestSdkObjects:
    """From what the user already has."""

    def test_a_boto3_client_with_a_name_or_url(self, server: ServerProcess) -> None:
        sqs = client(server)
        url = sqs.create_queue(QueueName="sdk")["QueueUrl"]
        used(connect(sqs, "sdk"))
        used(connect(sqs, url))
        used(connect(sqs, "sdk-made", template=Template(visibility_timeout=60)))
        assert sqs.list_queues(QueueNamePrefix="sdk")["QueueUrls"]  # the client is still the user's
        assert "sdk" in connect_account(sqs).names()

    def test_boto3_resources(self, server: ServerProcess) -> None:
        resource = boto3.resource(
            "sqs", endpoint_url=server.sqs, region_name="us-east-1", aws_access_key_id="AKIDCONNECT000000001",
            aws_secret_access_key=SECRET,
        )  # fmt: skip
        queue = resource.create_queue(QueueName="resource")
        used(connect(queue))
        used(connect(resource, "resource"))
        with pytest.raises(ParameterInvalid) as refused:
            connect(queue, "resource")
        assert refused.value.parameter == "queue"
        with pytest.raises(ParameterInvalid):
            connect_account(queue)

    def test_a_client_without_a_queue(self, server: ServerProcess) -> None:
        with pytest.raises(ParameterInvalid) as refused:
            connect(client(server))
        assert refused.value.parameter == "queue"

    def test_a_client_of_another_service(self, server: ServerProcess) -> None:
        with pytest.raises(ParameterInvalid, match="not of sns"):
            connect(client(server, "sns"), "jobs")

    @for_each("thing", [None, 7, b"veil:///data", object(), Path("/data")])
    def test_anything_else(self, thing: object) -> None:
        with pytest.raises(ParameterInvalid) as refused:
            connect(thing, "jobs")
        assert refused.value.parameter == "source"


class TestLaziness:
    """`import veilmq` costs nothing."""

    def test_the_package_offers_it(self) -> None:
        assert veilmq.connect is connect
        assert veilmq.connect_account is connect_account
        with pytest.raises(AttributeError, match="conect"):
            veilmq.conect  # type: ignore[attr-defined]  # noqa: B018

    @for_each("modules", ["veilmq", "veilmq, veilmq.server.service, veilmq.admin.app, veilmq.cli.serve"])
    def test_neither_it_nor_the_server_imports_the_client(self, modules: str) -> None:
        script = f"import sys, {modules}; print([name for name in sys.modules if name.startswith('veilmq.client')])"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        assert (done.stdout, done.stderr) == ("[]\n", "")

    def test_an_adapter_imports_no_other_ones_sdk(self) -> None:
        script = (
            "import sys, veilmq; veilmq.connect; import veilmq.client.adapters.embedded\n"
            "print([name for name in ('boto3', 'botocore', 'azure', 'mns', 'asyncio') if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        assert (done.stdout, done.stderr) == ("[]\n", "")


class TestManyAccountsOfSqs:
    """Each has a client of its own; what botocore reads from its files is read once a process."""

    def test_its_models_are_read_once(self) -> None:
        script = (
            "import sys, threading, collections\n"
            "from veilmq.client.adapters.connect import connect_account\n"
            "reads = collections.Counter()\n"
            "def seen(event, given):\n"
            "    if event == 'open' and '/botocore/data/' in str(given[0]): reads[given[0]] += 1\n"
            "sys.addaudithook(seen)\n"
            "def make(): connect_account('sqs://id:secret@127.0.0.1:1/?tls=0').close()\n"
            "threads = [threading.Thread(target=make) for _ in range(8)]\n"
            "for each in threads: each.start()\n"
            "for each in threads: each.join()\n"
            "print(len(reads) > 3, max(reads.values()))"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        assert (done.stdout, done.stderr) == ("True 1\n", "")

    def test_credentials_are_each_accounts_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def key_of(url: str) -> str:
            with connect_account(url) as account:
                return str(account.client._request_signer._credentials.access_key)

        found = []
        for key in ("first", "second"):
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
            found += [key_of("sqs://127.0.0.1:1/?tls=0"), key_of(f"sqs://own-{key}:secret@127.0.0.1:1/?tls=0")]
        assert found == ["first", "own-first", "second", "own-second"]
        for name in ("AWS_DEFAULT_REGION", "AWS_REGION", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
        with pytest.raises(ParameterInvalid, match="add region=NAME"):
            connect("sqs:///jobs")


def over_sqs(account: Any) -> Queue:
    return SqsQueue(account, account._calls, "jobs", f"{account.client.meta.endpoint_url}/000000000000/jobs")


def over_azure(account: Any) -> Queue:
    return AzureQueue(account, account.client.get_queue_client("jobs"))


def over_mns(account: Any) -> Queue:
    return MnsQueue(account, "jobs")


@pytest.mark.parametrize(
    ("url", "made", "place"),
    [
        ("sqs://k:s@127.0.0.1:{}/?tls=0&retries=0", over_sqs, "sqs.calls"),
        ("azure://127.0.0.1:{}/devstoreaccount1/?tls=0&retries=0", over_azure, "azure"),
        ("mns://k:s@127.0.0.1:{}/?retries=0", over_mns, "mns.calls"),
    ],
    ids=["sqs", "azure", "mns"],
)
def test_an_extension_leaves_time_for_another_one(
    url: str, made: Callable[[Any], Queue], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a connection that swallowed it a keeper lost the lease: the SDKs wait for a minute."""
    monkeypatch.setattr(f"veilmq.client.adapters.{place}.EXTEND_SECONDS", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        connect_account(url.format(silent.getsockname()[1])) as account,
    ):
        queue, began = made(account), time.monotonic()
        with pytest.raises(TransportError) as unanswered:
            queue.extend("00000000-0000-0000-0000-000000000000:r" if place == "azure" else "handle", 30)
        assert unanswered.value.may_have_happened
        assert time.monotonic() - began < 10


def test_after_an_extension_over_mns_a_poll_may_wait_again() -> None:
    account: Any = connect_account("mns://k:s@127.0.0.1:1/")
    with socket.create_server(("127.0.0.1", 0)) as server, account:
        mine = account.clients._taken()
        mine.connection.sock = socket.create_connection(server.getsockname())
        for seconds in (EXTEND_SECONDS, TIMEOUT_SECONDS):
            mine.wait_at_most(seconds)
            assert mine.connection.sock.gettimeout() == seconds
