"""Data directories and files that cannot be used: which one is in the way, and that none is made in silence."""

import os
import pwd
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests.cli.conftest import Serve
from tests.users import other_user

import veilmq
from veilmq.cli.access import Target, failure_of, http_access
from veilmq.cli.directory import backup
from veilmq.cli.directory.restoring import restore
from veilmq.cli.doctor.checks import credentials
from veilmq.cli.failures import Exit, Failure, closed_to_user
from veilmq.cli.keys import new_key
from veilmq.cli.pipeline.session import make_place
from veilmq.cli.serve import _in_the_way, _keys, _service
from veilmq.cli.sources import resolve
from veilmq.cli.work.command import open_queue, parameters
from veilmq.client.errors import TransportError
from veilmq.server.auth import DevelopmentKeyring
from veilmq.server.clock import LeaseClock
from veilmq.server.config.settings import Settings
from veilmq.testing.for_each import for_each

Run = Callable[..., "CompletedProcess[str]"]
NEW = "created data directory"
GIVEN = dict.fromkeys(
    ("concurrency", "prefetch", "batch", "poison_after", "dead_letter_queue", "lease", "stop_before_expiry", "wait",
     "drain", "give_up_after", "max_hold", "retry_first", "retry_longest", "kind", "checkpoints", "guard", "metrics",
     "traces", "error_report")
) | {"keeper": True}  # fmt: skip


def test_a_data_directory_is_not_made_below_what_is_not_there(serve: Serve, tmp_path: Path) -> None:
    server = serve(data=tmp_path / "typo" / "deep er" / "data")
    assert server.ended() == 3
    assert f"because {tmp_path}/typo is not there" in server.told()
    assert f"mkdir -p '{tmp_path}/typo/deep er'" in server.told()
    assert not (tmp_path / "typo").exists()
    with pytest.raises(TransportError, match="mkdir -p"):
        veilmq.connect(f"veil://{tmp_path}/typo/data?queue=q&create=1")
    assert not (tmp_path / "typo").exists()


def test_a_new_data_directory_is_told_once(serve: Serve, tmp_path: Path) -> None:
    first = serve().ready()
    assert first.stop() == 0
    second = serve().ready()
    assert second.stop() == 0
    assert [line["message"] for line in first.logs].count(f"{NEW} {tmp_path}/data") == 1
    assert NEW not in second.told()


def test_queues_whose_account_the_credentials_lack_are_told(serve: Serve, veilmq: Run, tmp_path: Path) -> None:
    server = serve().ready()
    for name in ("a", "b"):
        server.sqs().create_queue(QueueName=name)
    server.sqs("222222222222").create_queue(QueueName="c")
    assert server.stop() == 0
    keys = tmp_path / "credentials.toml"
    veilmq("keys", "new", "--account", "222222222222", "--into", str(keys))
    checked = serve("--credentials", str(keys))
    told = checked.wait_for("no key reaches")
    assert (
        "2 queues of account 000000000000, that of development mode, which the credentials file does not have" in told
    )
    assert f"veilmq keys new --account 000000000000 --into {keys}" in told
    checked.ready()
    assert "account 222222222222" not in checked.told()
    keys.write_text(keys.read_text().replace("222222222222", "333333333333"))
    checked.send_signal(signal.SIGHUP)
    checked.wait_for("no key reaches 1 queue of account 222222222222, which the credentials file does")
    assert checked.stop() == 0
    assert checked.told().count("no key reaches 2 queues") == 1


@pytest.mark.parametrize(("option", "value"), [("guard", Path), ("checkpoints", str)])
def test_what_a_worker_remembers_is_not_kept_in_a_mistyped_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, option: str, value: type
) -> None:
    with pytest.raises(Failure, match=f"--{option}: .*parent is not there"):
        parameters(GIVEN | {option: value(tmp_path / "typo" / "kept")})
    assert list(tmp_path.iterdir()) == []
    with caplog.at_level("INFO"):
        for _ in range(2):
            parameters(GIVEN | {option: value(tmp_path / "kept")})
    assert caplog.text.count("made a new directory") == 1


@pytest.fixture
def closed(reachable: Path) -> Path:
    """A directory that its owner alone may enter, with one in it."""
    place = reachable / "closed"
    (place / "below").mkdir(parents=True)
    place.chmod(0o700)
    return place


def test_the_closed_directory_above_is_named(closed: Path) -> None:
    data = closed / "below" / "data"
    error = PermissionError(13, "Permission denied", str(data))
    with other_user():
        failure = _in_the_way(error, Settings(data=data))
        with pytest.raises(Failure) as refused:
            http_access(Target(None, None, data), {})
    assert failure.code is refused.value.code is Exit.DIRECTORY
    for advice in (failure.advice, refused.value.advice):
        assert advice.startswith(f"{closed} is closed to this user (uid ")


def test_the_directory_that_takes_no_new_one_is_named(reachable: Path) -> None:
    reachable.joinpath("theirs").mkdir(0o700)
    key = reachable / "its key.pem"
    key.touch(0o600)
    reachable.joinpath("live").mkdir(0o700)  # as certbot makes it
    reachable.joinpath("ours").mkdir(0o777)
    reachable.joinpath("ours").chmod(0o777)
    with other_user():
        own = os.geteuid()
        closed = closed_to_user(reachable / "its data", made=True)
        assert closed.startswith(
            f"{reachable} may not be written by this user (uid {own}): have it made for you, sudo "
        )
        assert closed.endswith(f" -m 700 -o {own} '{reachable}/its data'.")
        assert closed_to_user(reachable / "data") == ""
        data = reachable / "ours" / "its data"
        data.mkdir(0o500)
        told = _in_the_way(PermissionError(13, "Permission denied", str(data / "lock")), Settings(data=data))
        assert told.advice == f"Its mode keeps even its owner (uid {own}) from writing: chmod 700 '{data}'"
        data.chmod(0)
        assert closed_to_user(data).endswith(f"may not be read by this user (uid {own}): chmod 700 '{data}'.")
        theirs, secret = closed_to_user(reachable / "theirs"), closed_to_user(key)
        servers = closed_to_user(key, of_server=True)
        below = closed_to_user(reachable / "live" / "key.pem", of_server=True)
        user = pwd.getpwuid(own).pw_name
    assert f"may not be read by this user (uid {own}): run the command as its owner, sudo -u " in theirs
    assert f"may not be read by this user (uid {own}): run the command as its owner, sudo -u " in secret
    if key.stat().st_uid == 0:  # a service cannot become root
        assert servers.endswith(f"(uid {own}): chown {user} '{key}' as root.")
        assert (
            below == f"{key.parent}/live is closed to this user (uid {own}): put key.pem where this user may read it."
        )
    assert closed_to_user(reachable / "data", made=True) == ""


def test_a_restore_into_a_mount_point_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc")
    for destination in (Path("/proc"), tmp_path / "link"):
        with pytest.raises(Failure) as refused:
            restore(destination, "nowhere", None, as_json=False)
        assert refused.value.code is Exit.USAGE
        assert str(refused.value) == f"DIR: {destination} is a mount point, which no directory can replace"
        assert refused.value.advice == f"Name a directory inside it: {destination}/data"


def test_a_restore_needs_the_directory_above_too(reachable: Path) -> None:
    """It is written beside its place: one that was made for this user does not help."""
    place = reachable / "made"
    place.mkdir(0o777)
    place.chmod(0o777)
    for destination in (place, reachable / "missing"):
        with other_user(), pytest.raises(Failure) as refused:
            restore(destination, "anywhere", None, as_json=False)
        assert refused.value.code is Exit.USAGE
        assert str(refused.value) == f"DIR: {destination}: Permission denied"
        assert f"written beside its place first. {reachable} may not be written by this user" in refused.value.advice
        assert "install -d" not in refused.value.advice


def test_a_credentials_file_is_asked_for_by_what_is_wrong_with_it(closed: Path, reachable: Path) -> None:
    (closed / "keys").touch()
    with other_user(), pytest.raises(Failure, match="--credentials: ") as unreadable:
        _keys(Settings(credentials=closed / "keys"))
    tls = Settings(tls_cert=closed / "cert.pem", tls_key=closed / "key.pem")
    with other_user(), pytest.raises(Failure, match="--tls-cert ") as unopened:
        _service(tls, DevelopmentKeyring(), LeaseClock(), None, None)
    for refused, name in ((unreadable, "keys"), (unopened, "cert.pem")):
        assert refused.value.advice.startswith(f"{closed} is closed to this user")
        if closed.stat().st_uid == 0:
            assert refused.value.advice.endswith(f": put {name} where this user may read it.")
    with other_user(), pytest.raises(Failure, match="--into: ") as unwritten:
        new_key(None, as_json=False, into=reachable / "new.toml")
    assert unwritten.value.advice.startswith(f"{reachable} may not be written by this user")
    assert "install -d" not in unwritten.value.advice  # it would make a directory in the file's place
    place = Path("/sys/kernel")  # takes no files, whatever its mode is
    with pytest.raises(Failure, match="--into: ") as refused:
        new_key(None, as_json=False, into=place / "new.toml")
    assert (refused.value.advice == "Check the path.") == os.access(place, os.W_OK | os.X_OK)
    with pytest.raises(Failure) as missing:
        _keys(Settings(credentials=reachable / "new keys"))
    assert missing.value.advice == f"Make it with: veilmq keys new --into '{reachable}/new keys'"
    (reachable / "keys").touch(0o600)
    with pytest.raises(Failure, match="account") as wrong:
        _keys(Settings(credentials=reachable / "keys"))
    assert wrong.value.advice == ""


@pytest.fixture
def full_of(reachable: Path) -> Path:
    """A data directory and a settings file of this user's, which others may not use."""
    veilmq.connect(f"veil://{reachable}/data?queue=q&create=1").close()
    (reachable / "settings.toml").touch(0o600)
    return reachable


def test_the_issuers_keys_that_cannot_be_read_name_the_option(serve: Serve, tmp_path: Path) -> None:
    server = serve("--azure-issuer", "https://login.example", "--azure-issuer-keys", str(tmp_path / "keys.json"))
    assert server.ended() == 2
    assert f"--azure-issuer-keys: {tmp_path}/keys.json: cannot be read: No such file" in server.told()
    assert "Check the path." in server.told()


def told(body: Callable[[], object]) -> Failure:
    with pytest.raises(Failure) as refused:
        body()
    return refused.value


@pytest.mark.parametrize("below", ["closed/below/new", "closed/new", "readable/new", "readable"])
def test_every_place_that_is_made_names_what_keeps_the_user_out(
    closed: Path, caplog: pytest.LogCaptureFixture, below: str
) -> None:
    (closed.parent / "readable").mkdir(0o755)
    place = closed.parent / below
    with other_user(), caplog.at_level("INFO"):
        refused = {
            "DEST": told(lambda: backup(closed / "none", place, as_json=False)),
            "--guard": told(lambda: parameters(GIVEN | {"guard": place})),
            "--checkpoints": told(lambda: parameters(GIVEN | {"checkpoints": str(place)})),
            "--out": told(lambda: make_place(place)),
        }
    for named, failure in refused.items():
        assert str(failure) == f"{named}: {place}: Permission denied"
        assert failure.advice.startswith(f"{closed.parent / below.partition('/')[0]} ")
        assert "this user (uid " in failure.advice
    assert caplog.text == ""


def test_a_queue_in_a_closed_directory_names_it(closed: Path) -> None:
    with other_user():
        for url in (f"veil://{closed}/new?queue=q&create=1", f"veil:///{closed}/below?queue=q"):
            assert told(lambda url=url: open_queue(url)).advice.lstrip("/").startswith(f"{closed} is closed"[1:])


def test_settings_that_cannot_be_read_name_the_option(full_of: Path) -> None:
    settings = str(full_of / "settings.toml")
    with other_user():
        for source, flags, environment in (
            ("--config", {"config": settings}, {}),
            ("VEILMQ_CONFIG", {}, {"VEILMQ_CONFIG": settings}),
        ):
            failure = told(lambda given=(flags, environment): resolve(*given))
            assert str(failure) == f"{source}: {settings}: cannot be read: Permission denied"
            assert failure.advice.startswith(f"{settings} may not be read by this user")
        (finding,) = credentials(Settings(credentials=full_of / "settings.toml"))
        assert finding.fix == failure.advice
    assert told(lambda: resolve({"config": f"{settings}.none"}, {})).advice == "Check the path."


def test_a_copy_is_not_made_below_what_is_not_there(full_of: Path) -> None:
    for body in (
        lambda place: backup(full_of / "data", place, as_json=False),
        lambda place: make_place(place, "DIR"),
    ):
        failure = told(lambda body=body: body(full_of / "ty po" / "copy"))
        assert "is not made, because its parent is not there" in str(failure)
        assert failure.advice.endswith(f"mkdir -p '{full_of}/ty po'")
        assert failure.code is Exit.USAGE
    assert not (full_of / "ty po").exists()
    backup(full_of / "data", full_of / "copy", as_json=False)


def test_a_copy_that_may_not_be_written_does_not_ask_for_space(tmp_path: Path) -> None:
    class Door:
        def download(self, path: str, *_: object) -> None:
            raise PermissionError(1, "Operation not permitted", path)

    failure = told(lambda: backup(tmp_path / "none", tmp_path / "copy", as_json=False, access=Door()))  # type: ignore
    assert failure.advice == "Name a directory that belongs to this user, or one that is not there yet."


def test_who_is_refused_is_told_of_the_directory_first() -> None:
    advice = failure_of("not_authenticated", "no", {}).advice
    assert advice.startswith("Name the server's data directory with --data DIR or VEILMQ_DATA")
    assert "--token-file" in advice


@for_each(
    ("arguments", "says"),
    [
        (["serve", "--sqs", "127.0.0.1:99999"], "--sqs: 127.0.0.1:99999: a port is a number up to 65535, not 99999"),
        (["serve", "--external-url", "http://a:99999"], "--external-url: a port is a number up to 65535, not 99999"),
        (["queues", "list", "--admin", "127.0.0.1:99999"], "--admin: a port is a number up to 65535, not 99999"),
    ],
    ids=["serve", "url", "admin"],
)
def test_a_port_beyond_all_ports_is_told(veilmq: Run, arguments: list[str], says: str) -> None:
    done = veilmq(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    with pytest.raises(Failure, match="--metrics: a port is a number up to 65535"):
        parameters(GIVEN | {"metrics": "127.0.0.1:99999"})
