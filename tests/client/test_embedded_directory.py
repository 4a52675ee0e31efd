"""Who may use a data directory: one process, any number of accounts in it; forks, exits and kills."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.sqlite import SMALL
from tests.users import other_user

from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.errors import TransportError
from veilmq.model.errors import ParameterInvalid
from veilmq.store.sqlite.tools import check
from veilmq.testing.client_contract import for_each
from veilmq.testing.client_contract.stage import MovableClock

PROLOGUE = """
import os, sys, threading, time
from pathlib import Path
from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.errors import TransportError
from tests.support.sqlite import SMALL
account = EmbeddedAccount(sys.argv[1], options=SMALL)
account.create("jobs")
queue = account.queue("jobs")
"""
SECONDS = 30


def started(directory: Path, script: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", PROLOGUE + script, str(directory)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> str:
    """What it printed; it must have ended well and complained about nothing."""
    out, complaints = process.communicate(timeout=SECONDS)
    assert (process.returncode, complaints) == (0, ""), complaints
    return out


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def opened(directory: Path) -> EmbeddedAccount:
    return EmbeddedAccount(directory, options=SMALL)


def bodies(directory: Path) -> list[str]:
    with opened(directory) as account:
        return sorted(message.body for message in account.queue("jobs").peek(1_000))


def test_accounts_of_one_process_share_a_directory(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    first = opened(directory)
    second = opened(tmp_path / "." / "data")
    (tmp_path / "link").symlink_to(directory)
    third = opened(tmp_path / "link")
    first.create("jobs")
    queue = second.queue("jobs")
    first.close()
    third.close()
    first.close()
    queue.send("x")
    with pytest.raises(TransportError, match="account was closed"):
        first.names()
    second.close()
    with pytest.raises(TransportError, match="closed"):
        queue.send("y")
    assert bodies(directory) == ["x"]


def test_accounts_and_regions_are_apart(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as one, EmbeddedAccount(
        tmp_path / "data", account="111111111111", options=SMALL
    ) as two, EmbeddedAccount(tmp_path / "data", region="eu-west-1", options=SMALL) as three:  # fmt: skip
        for number, account in enumerate((one, two, three)):
            assert account.create("jobs")
            account.queue("jobs").send(str(number))
        for number, account in enumerate((one, two, three)):
            assert [message.body for message in account.queue("jobs").receive(10)] == [str(number)]


def test_another_process_is_told_who_has_it(tmp_path: Path) -> None:
    holder = started(tmp_path / "data", "print('open', flush=True); sys.stdin.read()")
    assert line(holder) == "open"
    with pytest.raises(TransportError) as refused:
        opened(tmp_path / "data")
    assert not refused.value.may_have_happened
    assert f"held by pid {holder.pid}, which serves no port" in refused.value.reason
    ended(holder)
    opened(tmp_path / "data").close()


def test_another_clock_or_other_options_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "data"):
        for given in ({"clock": MovableClock()}, {"options": None}):
            with pytest.raises(ParameterInvalid, match="another clock or options"):
                EmbeddedAccount(tmp_path / "data", **({"options": SMALL} | given))  # type: ignore[arg-type]


def test_a_directory_that_others_can_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o755)
    with pytest.raises(TransportError, match="chmod 700"):
        opened(tmp_path / "data")


@pytest.mark.parametrize("create", [True, False])
def test_a_directory_that_we_may_not_see_is_told(tmp_path: Path, create: bool) -> None:
    opened(tmp_path / "data").close()
    tmp_path.chmod(0)
    with other_user(), pytest.raises(ParameterInvalid, match="Permission denied"):
        EmbeddedAccount(tmp_path / "data", options=SMALL, create=create)
    tmp_path.chmod(0o700)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    with pytest.raises(ParameterInvalid) as refused:
        opened(tmp_path / "data")
    assert refused.value.parameter == "directory"


def test_a_database_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "data" / "veilmq.db").write_bytes(b"not a database, but long enough to be read as one" * 100)
    with pytest.raises(TransportError, match="not a database"):
        opened(tmp_path / "data")


@for_each("given", [{"account": "12"}, {"account": 7}, {"region": ""}])
def test_an_account_or_region_that_cannot_be_is_refused(tmp_path: Path, given: dict[str, str]) -> None:
    with pytest.raises(ParameterInvalid) as refused:
        EmbeddedAccount(tmp_path / "data", **given)
    assert refused.value.parameter in given
    assert not (tmp_path / "data").exists()


def test_without_create_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(ParameterInvalid, match="create=1"):
        EmbeddedAccount(tmp_path / "data", create=False, options=SMALL)
    assert not (tmp_path / "data").exists()
    opened(tmp_path / "data").close()
    EmbeddedAccount(tmp_path / "data", create=False, options=SMALL).close()


def test_a_forked_child_is_refused_and_leaves_the_parent_in_peace(tmp_path: Path) -> None:
    script = """
queue.send("before")
child = os.fork()
if child == 0:
    for call in (lambda: queue.send("child"), queue.receive, queue.peek, account.names, lambda: account.queue("jobs"),
                 lambda: EmbeddedAccount(sys.argv[1], options=SMALL)):
        try:
            call()
        except TransportError as error:
            assert "fork" in str(error) or f"held by pid {os.getppid()}" in str(error), error
        else:
            raise AssertionError("a child used its parent's store")
    queue.close()
    account.close()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
queue.send("after")
"""
    ended(started(tmp_path / "data", script))
    assert bodies(tmp_path / "data") == ["after", "before"]
    assert check(tmp_path / "data" / "veilmq.db").problems_count == 0


def test_a_child_does_not_hold_the_directory_for_its_parent(tmp_path: Path) -> None:
    script = """
if os.fork() == 0:
    os.write(1, b"child\\n")  # at once, or the other process may write between word and line break
    sys.stdin.read()
    os._exit(0)
account.close()
os.write(1, b"closed\\n")
"""
    parent = started(tmp_path / "data", script)
    assert {line(parent), line(parent)} == {"child", "closed"}
    opened(tmp_path / "data").close()
    ended(parent)


def test_an_interpreter_that_ends_closes_what_is_open(tmp_path: Path) -> None:
    script = """
threading.Thread(target=lambda: queue.receive(wait=600), daemon=True).start()
while not len(account._shell._engine.waiting):
    time.sleep(0.001)
other = account.create("other") and account.queue("other")
other.send("x")
"""
    ended(started(tmp_path / "data", script))
    assert not (tmp_path / "data" / "veilmq.db-wal").exists()  # the last connection closed it
    with opened(tmp_path / "data") as account:
        assert account.queue("other").stats().visible == 1


def test_what_was_acknowledged_outlives_a_kill(tmp_path: Path) -> None:
    script = """
for number in range(1_000_000):
    queue.send(f"{number:06}")
    print(number, flush=True)
"""
    process = started(tmp_path / "data", script)
    seen = [line(process) for _ in range(50)]
    process.send_signal(signal.SIGKILL)
    out, _ = process.communicate(timeout=SECONDS)
    seen += [text for text in out.split("\n")[:-1] if text]
    found: set[str] = set()
    with opened(tmp_path / "data") as account:
        while received := account.queue("jobs").receive(1_000):
            found |= {message.body for message in received}
    assert {f"{int(number):06}" for number in seen} <= found
    assert check(tmp_path / "data" / "veilmq.db").problems_count == 0
