"""`veilmq doctor`: each thing that can be wrong, made wrong for real, and what is said of it; and `veilmq` alone."""

import datetime
import errno
import fcntl
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from tests.cli.test_certificate import make_pair
from tests.house.test_docs import ROOT, headings
from tests.support.commands import Ended, Run
from tests.support.embedded import EmbeddedClient

from veilmq.cli.doctor import Finding, broken, checks
from veilmq.client.adapters.connect import DEVELOPMENT_KEYS
from veilmq.server.config.settings import Settings
from veilmq.store import MIB
from veilmq.store.directory import Holder, free_and_floor
from veilmq.store.sqlite.tools.backup import made
from veilmq.store.synchronised import is_synchronised
from veilmq.testing.for_each import for_each
from veilmq.testing.local import ServerProcess

FREE = (
    "--sqs", "127.0.0.1:0", "--azure", "127.0.0.1:0", "--mns", "127.0.0.1:0", "--admin", "127.0.0.1:0",
    "--connections-max", "100", "--floor-bytes", "1048576",
)  # fmt: skip
"""Ports that are free, and limits that any machine has room for."""
WELL = 0 if is_synchronised() else 1
"""A machine without a time service has a warning."""

HERE = Path(__file__).parent


@pytest.fixture
def doctor(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command; `doctor(check, ...)` gives its code, and the level, text and fix of what that check found."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)

    def examine(check: str, *arguments: str) -> tuple[int, list[tuple[str, str, str]]]:
        ended: Ended = run("doctor", "--data", str(tmp_path / "data"), "--json", *FREE, *arguments)
        found = [each for each in ended.json if each["check"] == check]
        return ended.code, [(each["level"], each["text"], each["fix"]) for each in found]

    return examine


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """The data directory of a server that has ended."""
    server = ServerProcess(tmp_path).start()
    server.stop()
    return server.data


@pytest.fixture
def running(tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path).start()
    yield server
    server.kill()


def test_before_the_first_start_all_is_well_and_nothing_is_made(run: Run, doctor: Any, tmp_path: Path) -> None:
    code, ((level, text, _),) = doctor("directory")
    assert (code, level, text.endswith("is made at the first start")) == (WELL, "ok", True)
    assert list(tmp_path.iterdir()) == []
    shown = run("doctor", "--data", str(tmp_path / "data"), *FREE).out
    assert "ok    fsync " in shown
    assert shown.endswith("all is well\n" if WELL == 0 else "0 errors, 1 warning\n")
    (tmp_path / "data").symlink_to("nowhere")
    assert doctor("directory")[1][0][1].endswith("is no directory"), "and no start makes it"
    (tmp_path / "data").unlink()
    (tmp_path / "data").write_text("a file")
    assert doctor("directory") == (
        2,
        [("error", f"{tmp_path / 'data'} is no directory", "Name another one with --data DIR.")],
    )


class TestBesideAServer:
    def test_it_says_where_the_server_listens_and_that_it_is_ready(self, doctor: Any, running: ServerProcess) -> None:
        code, found = doctor("ports")
        assert code == WELL
        assert ("ok", f"sqs listens on {running.sqs}", "") in found
        assert doctor("server")[1] == [("ok", f"pid {running.process.pid} is ready", "")]
        assert doctor("directory")[1][0][1].endswith(f"held by pid {running.process.pid}")
        (running.data / "lock").unlink()
        code, ((level, text, _),) = doctor("directory")
        assert (code, level, "its file `lock` was deleted" in text) == (2, "error", True)
        assert text.startswith(f"pid {running.process.pid} holds {running.data}")
        assert [doctor(name)[1] for name in ("ports", "server", "queues")] == [[], [], []]
        running.stop()
        looking = os.open(running.data, os.O_RDONLY)
        fcntl.flock(looking, fcntl.LOCK_SH)  # as a repair does, which is no server
        assert "was deleted" not in doctor("directory")[1][0][1]
        os.close(looking)
        copy = running.data.parent / "copy"
        with made(copy):
            text, fix = doctor("directory", "--data", str(copy))[1][0][1:]
            assert text == f"pid {os.getpid()} writes a backup or a repair into {copy}"
            assert fix == "Wait for it."

    def test_it_names_a_queue_that_no_protocol_can_name(self, run: Run, doctor: Any, running: ServerProcess) -> None:
        name = "a_" * 45
        assert run("queues", "create", name, "--data", str(running.data)).code == 0
        assert run("queues", "create", "fine_one", "--data", str(running.data)).code == 0
        code, found = doctor("queues")
        assert (code, [text for level, text, _ in found if level == "warning"]) == (
            1, [f"no protocol but veil:// can name {name}"],
        )  # fmt: skip
        running.kill()
        left = {each: each.read_bytes() for each in running.data.iterdir() if each.suffix != ".db-shm"}
        code, ((level, text, fix),) = doctor("queues")
        assert (code, level, text.startswith("not looked at: opening ")) == (1, "warning", True)
        assert fix == f"See whether it is damaged before you start it: veilmq check --data {running.data}"
        assert {each: each.read_bytes() for each in left} == left, "a repair may need it"
        (running.data / "redo").unlink()
        code, ((level, text, fix),) = doctor("queues")
        assert (code, level, "redo is missing, and with it the last acknowledged" in text) == (2, "error", True)
        assert f"veilmq check --data {running.data} --repair NEW_DIRECTORY" in fix


def test_what_the_server_reports_names_a_section_that_is_there() -> None:
    for place in (*checks.READ.values(), checks.READ_OTHERWISE):
        page, section, _ = place.split('"')
        assert section in headings(ROOT / page.removesuffix(", ")).values(), place


@for_each("said", [b"", b"[]", b'{"reasons": {}}'])
def test_an_admin_port_that_does_not_say_whether_the_server_is_ready(said: bytes) -> None:
    """As one whose connections are all taken."""
    with socket.create_server(("127.0.0.1", 0)) as port, ThreadPoolExecutor(1) as pool:
        url = f"http://127.0.0.1:{port.getsockname()[1]}"
        answered = pool.submit(_refuse, port, said)
        (found,) = checks.health(Holder(7, {"admin": url}))
        answered.result()
    assert (found.level, found.text) == (
        "error", f"pid 7 does not say whether it is ready: {url} answers 503 Service Unavailable",
    )  # fmt: skip


def _refuse(port: socket.socket, said: bytes) -> None:
    connection, _ = port.accept()
    with connection:
        connection.recv(65_536)
        connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: %d\r\n\r\n" % len(said) + said)


def test_a_timeout_that_the_history_contradicts(run: Run, doctor: Any, stopped: Path) -> None:
    at = ("--data", str(stopped))
    run("queues", "create", "jobs", "--visibility-timeout", "1h", *at)
    run("send", "jobs", "--lines", *at, stdin="a\n" * 41)
    run("receive", "jobs", "--count", "40", "--delete", *at)
    run("receive", "jobs", *at)
    found = next(found for _ in range(100) if (found := doctor("queues")[1])[0][0] == "warning")
    ((_, text, fix),) = found
    assert text.startswith("jobs: a visibility timeout of 1 h is too long.")
    assert fix.startswith("veilmq queues set jobs --visibility-timeout ")
    assert run(*fix.split()[1:], *at).code == 0


class TestDirectory:
    def test_open_to_others(self, doctor: Any, stopped: Path) -> None:
        stopped.chmod(0o755)
        code, found = doctor("directory")
        assert (code, found) == (2, [("error", f"{stopped} is open to other users", f"chmod 700 {stopped}")])

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
    def test_a_file_of_another_user(self, doctor: Any, stopped: Path) -> None:
        os.chown(stopped / "veilmq.db", 65_534, -1)
        code, ((level, text, fix),) = doctor("directory")
        assert (code, level) == (2, "error")
        assert text == f"{stopped} belongs to uid 0, and veilmq.db in it does not"
        assert fix == f"chown -R 0 {stopped}"
        spaced = stopped / "a b"
        spaced.mkdir()
        spaced.chmod(0o755)
        for name, owner in (("admin-token", 0), ("veilmq.db", 65_534)):
            (spaced / name).touch()
            (spaced / name).chmod(0o644)
            os.chown(spaced / name, owner, -1)
        fixes = [f"chmod 700 '{spaced}'", f"chown -R 0 '{spaced}'", f"chmod 600 '{spaced}/admin-token'"]
        assert [each.fix for each in checks.directory(spaced, None)] == fixes

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
    def test_of_another_user_stays_that_users(self, doctor: Any, stopped: Path) -> None:
        """Else a server that runs as that user could not start again."""
        for each in (stopped, *stopped.iterdir()):
            os.chown(each, 65_534, 65_534)
        assert doctor("queues")[1][0][0] == "ok"
        assert {each.name for each in stopped.iterdir() if each.stat().st_uid != 65_534} == set()
        assert doctor("directory")[1][0][0] == "ok"

    def test_of_another_release(self, doctor: Any, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir(mode=0o700)
        (tmp_path / "data" / "veilmq.db").write_bytes(b"no database" * 100)
        code, found = doctor("queues")
        assert (code, found[0][0]) == (2, "error")

    def test_whose_parent_is_missing(self, doctor: Any, tmp_path: Path) -> None:
        code, found = doctor("directory", "--data", str(tmp_path / "typo" / "data"))
        assert (code, found[0][0], "mkdir -p" in found[0][2]) == (2, "error", True)


def test_a_port_in_use_names_who_has_it(doctor: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        code, found = doctor("ports", "--sqs", where)
    (wrong,) = (each for each in found if each[0] == "error")
    assert code == 2
    assert wrong[1].startswith(f"--sqs: {where} is in use by pid {os.getpid()} (")
    assert wrong[2] == "End that program, or choose another port: --sqs 127.0.0.1:0"


AS_SYSTEMD = """
import socket
with open("/proc/self/comm", "w") as name:
    name.write("systemd")
with socket.create_server(("127.0.0.1", 0)) as taken:
    print(taken.getsockname()[1], flush=True)
    input()
"""


def test_a_port_that_systemd_holds_for_the_server_is_no_fault(doctor: Any) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", AS_SYSTEMD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        where = f"127.0.0.1:{process.stdout.readline().strip()}"
        code, found = doctor("ports", "--sqs", where)
        process.stdin.close()
    assert (code, {level for level, _, _ in found}) == (WELL, {"ok"})
    assert any(text.startswith(f"sqs: pid {process.pid} (systemd) holds {where}") for _, text, _ in found)


def test_an_address_of_another_machine(doctor: Any) -> None:
    code, found = doctor("ports", "--sqs", "192.0.2.1:9324", "--insecure", "--credentials", "gone.toml")
    assert code == 2
    assert [fix for level, _, fix in found if level == "error"] == [
        "Name an address of this machine: --sqs 127.0.0.1:9324"
    ]


@pytest.mark.parametrize(
    ("bypass", "level"), [("", "warning"), ("localhost,127.0.0.1", "ok"), ("localhost", "warning")]
)
def test_a_proxy_that_swallows_this_machine(
    doctor: Any, monkeypatch: pytest.MonkeyPatch, bypass: str, level: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.invalid:3128")
    monkeypatch.setenv("no_proxy", bypass)
    ((found, text, fix),) = doctor("proxy")[1]
    assert found == level
    assert ("HTTP_PROXY" in text, "NO_PROXY=" in fix) == (level == "warning",) * 2


class TestCredentials:
    def test_a_key_that_can_be_guessed(self, doctor: Any, tmp_path: Path) -> None:
        path = tmp_path / "credentials.toml"
        path.write_text('[[account]]\nid = "111111111111"\n[[account.key]]\nid = "AKWEAK0000000000"\nsecret = "test"\n')
        path.chmod(0o600)
        code, ((level, text, _),) = doctor("credentials", "--credentials", str(path))
        assert (code, level) == (2, "error")
        assert text == "the secret of key AKWEAK0000000000 has 4 characters and can be guessed"

    @pytest.mark.parametrize(
        ("key", "said"),
        [(DEVELOPMENT_KEYS["devstoreaccount1"], "is the public one of Azurite"), ("c2hvcnQ=", "has 5 bytes")],
    )
    def test_a_key_of_azure_that_can_be_guessed(self, doctor: Any, tmp_path: Path, key: str, said: str) -> None:
        path = tmp_path / "credentials.toml"
        path.write_text(f'[[account]]\nid = "111111111111"\nazure_name = "ours"\nazure_keys = ["{key}"]\n')
        path.chmod(0o600)
        code, ((level, text, _),) = doctor("credentials", "--credentials", str(path))
        assert (code, level, said in text) == (2, "error", True), text

    def test_a_file_that_others_can_read(self, run: Run, doctor: Any, tmp_path: Path) -> None:
        path = tmp_path / "its credentials.toml"
        _, ((_, _, fix),) = doctor("credentials", "--credentials", str(path))
        assert fix == f"veilmq keys new --into '{path}'"
        run("keys", "new", "--into", str(path))
        assert doctor("credentials", "--credentials", str(path)) == (WELL, [("ok", "1 account, 1 key", "")])
        path.chmod(0o644)
        code, ((level, text, _),) = doctor("credentials", "--credentials", str(path))
        assert (code, level, str(path) in text) == (2, "error", True)
        code, ((level, _, fix),) = doctor("credentials", "--credentials", str(tmp_path))  # a directory
        assert (code, level, fix) == (2, "error", "Check the path.")


@pytest.mark.parametrize(
    ("days", "level", "said"),
    [(30, "ok", "is valid until"), (3, "warning", "2 days left"), (-1, "error", "refuse it")],
)
def test_a_certificate_that_ends(doctor: Any, tmp_path: Path, days: int, level: str, said: str) -> None:
    left = datetime.timedelta(days=days) if days > 0 else datetime.timedelta(minutes=-1)
    for name, content in zip(("mq.pem", "the mq.key"), make_pair("mq", left), strict=True):
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o600)
    files = ("--tls-cert", str(tmp_path / "mq.pem"), "--tls-key", str(tmp_path / "the mq.key"))
    ((found, text, _),) = doctor("certificate", *files)[1]
    assert (found, said in text) == (level, True)
    (tmp_path / "the mq.key").chmod(0o644)
    assert doctor("certificate", *files)[1][1][2] == f"chmod 600 '{files[3]}'"
    (tmp_path / "the mq.key").chmod(0o600)
    pair = (tmp_path / "mq.pem").read_bytes()
    (tmp_path / "mq.pem").write_bytes(pair.replace(b"CERTIFICATE", b"TRUSTED CERTIFICATE"))
    assert doctor("certificate", *files)[1][0][:2] == ("ok", f"{files[1]} fits its key; its end cannot be read")
    key = (tmp_path / "the mq.key").read_bytes()
    (tmp_path / "the mq.key").write_bytes(make_pair("other")[1])
    both = f"{files[1]} with {files[3]}"
    told = ("error", f"{both}: the key is not that of the certificate")
    assert doctor("certificate", *files)[1][0][:2] == told
    for content, why in (
        (_encrypted(key), "the key is protected by a passphrase: give one without"),
        (b"no key", f"{files[3]} is no whole PEM file with a key"),
    ):
        (tmp_path / "the mq.key").write_bytes(content)
        assert doctor("certificate", *files)[1][0][:2] == ("error", f"{both}: {why}")
    (tmp_path / "the mq.key").unlink()
    assert doctor("certificate", *files)[1][0][:2] == ("error", f"{tmp_path / 'the mq.key'} is not there")


def _encrypted(key: bytes) -> bytes:
    form = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    return serialization.load_pem_private_key(key, None).private_bytes(serialization.Encoding.PEM, *form)


@for_each(
    ("number", "fix"),
    [
        (errno.ENOSPC, "Free some space"),
        (
            errno.EROFS,
            "Mount it for writing (after an error of the disk: see `dmesg`), under systemd add it to `ReadWritePaths=",
        ),
        (errno.EACCES, "Is this user the one that the server runs as?"),
    ],
)
def test_what_to_do_about_a_check_that_could_not_look(number: int, fix: str) -> None:
    found = broken("fsync", OSError(number, os.strerror(number), "/data"))
    assert (found.level, found.text) == ("error", f"/data: {os.strerror(number)}")
    assert found.fix.startswith(fix)


@for_each(
    ("found", "level", "said"),
    [
        (checks.versions((3, 13, 1)), "ok", "Python 3.13.1,"),
        (checks.versions((3, 12, 0)), "warning", "tested with Python 3.11, 3.13 and 3.14: "),
        (checks.versions((3, 15, 0)), "warning", "tested with Python 3.11, 3.13 and 3.14: "),
        (checks.clock(synchronised=True), "ok", "a time service keeps it"),
        (checks.clock(synchronised=False), "warning", "timedatectl set-ntp true"),
        (checks.open_files(32_000, Settings()), "ok", "up to 32000; a server with full ports has 32000"),
        (checks.open_files(31_999, Settings()), "warning", "LimitNOFILE=32000 in the unit"),
        (checks.open_files(4_999, Settings(connections_max=1_000)), "warning", "ulimit -n 5000"),
        (checks.open_files(resource.RLIM_INFINITY, Settings()), "ok", "no limit"),
        (checks.space(HERE, 1_024 * MIB, 256 * MIB), "ok", "1024 MiB free"),
        (checks.space(HERE, 1_023 * MIB, 256 * MIB), "warning", "1023 MiB free"),
        (checks.space(HERE, 255 * MIB, 256 * MIB), "error", "255 MiB free"),
        (checks.space(HERE, 255 * MIB, 1 * MIB), "ok", "sends are refused below 1"),
        (checks.sync_speed([0.001] * 5 + [0.9] * 4), "ok", "1 ms (the longest of 9: 900 ms)"),
        (checks.sync_speed([0.03] * 9), "warning", "each request waits for one"),
        (checks.sync_speed([0.3] * 9), "error", "each request waits for one"),
        (checks.credentials(Settings()), "ok", "with these settings none are checked"),  # a server may have others
    ],
)
def test_facts_of_the_machine(found: Iterator[Finding], level: str, said: str) -> None:
    (first,) = (each for each in found if "in memory" not in each.text and "as good as that server" not in each.text)
    assert (first.level, said in f"{first.text} {first.fix}") == (level, True), first
    assert (first.fix == "") == (level == "ok")


def test_the_settings_of_the_server_count(doctor: Any, tmp_path: Path) -> None:
    assert doctor("open files")[1][0][1].endswith("; a server with full ports has 2300")
    assert doctor("disk")[1][0][1].endswith(f" MiB free at {tmp_path}; sends are refused below 1")
    assert free_and_floor(tmp_path, 1 << 60)[1] == shutil.disk_usage(tmp_path).total // 50


def test_a_clock_that_was_ahead(doctor: Any, tmp_path: Path) -> None:
    client = EmbeddedClient(tmp_path / "data")
    client.account.create("jobs")
    client.pass_time(7_200)
    client.account.create("others")
    client.account.close()
    found = [text for _, text, _ in doctor("clock")[1]]
    assert found[-1] == "the data has seen a clock that was 2 h ahead of this machine's"


def test_a_directory_in_memory(doctor: Any) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no file system in memory here")
    found = doctor("disk", "--data", "/dev/shm/veilmq-doctor")[1]
    assert [text for level, text, _ in found if "in memory" in text] == [
        "/dev/shm is in memory (tmpfs): everything is gone after a restart of the machine"
    ]


def test_a_variable_that_is_misspelt(doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VEILMQ_CREDENTIAL", "x")
    assert doctor("settings") == (
        1,
        [("warning", "VEILMQ_CREDENTIAL is no setting", "Did you mean VEILMQ_CREDENTIALS?")],
    )


def test_settings_that_no_server_would_take(doctor: Any) -> None:
    code, ((level, text, fix),) = doctor("settings", "--sqs", "0.0.0.0:9324")
    assert (code, level) == (2, "error")
    assert text.startswith("--sqs: ")
    assert "veilmq keys new" in fix


class TestAlone:
    def test_it_says_how_to_begin(self, run: Run) -> None:
        ended = run()
        assert ended.code == 0
        assert "    veilmq serve\n" in ended.out
        assert "veilmq doctor" in ended.out

    def test_it_sees_the_server_that_runs_here(self, run: Run, tmp_path: Path) -> None:
        server = ServerProcess(tmp_path)
        server.data = tmp_path / "veilmq-data"
        server.start()
        try:
            assert f"(pid {server.process.pid}): sqs on {server.sqs}" in run().out
        finally:
            server.kill()
