"""The kinds of faults of a cluster, one strike each.

Strategy: a strike hits who is in the way at that moment (the owner, the primary), holds for a random time around a
lease, and may leave things broken: the next one comes on top, until the round's end brings everything back.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Final

import psycopg
from tests.faults.cluster.network import Place
from tests.faults.cluster.stage import LEASE_SECONDS, Fault, Member, Stage
from tests.support.postgres import Server

HOUR: Final = 3_600
_LONG: Final = 2 * LEASE_SECONDS
"""Until after a take-over."""

# Kills.


def kill_owner(stage: Stage) -> None:
    """The owner."""
    owner = stage.owner
    stage.kill(owner)
    stage.pause(0, _LONG)
    stage.begin(owner)


def kill_follower(stage: Stage) -> None:
    """A follower."""
    follower = stage.follower()
    stage.kill(follower)
    stage.pause(0, _LONG)
    stage.begin(follower)


def kill_two(stage: Stage) -> None:
    """The owner, and whoever could take over but one; sometimes all."""
    both = [stage.owner, stage.follower()]
    if stage.chance.random() < 0.4:
        both = list(stage.members)
    stage.kill(*both)
    stage.pause(0, _LONG)
    stage.begin(*both)


def kill_primary(stage: Stage) -> None:
    """The primary comes back as it was."""
    primary = stage.databases.primary
    stage.databases.kill(primary)
    stage.kills += 1
    stage.pause(0, _LONG)
    stage.databases.start(primary)


def kill_standby(stage: Stage) -> None:
    """Commits wait."""
    standby = stage.databases.standby
    stage.databases.kill(standby)
    stage.kills += 1
    stage.pause(0, stage.chance.choice((1, _LONG, 15)))
    stage.databases.start(standby)


def kill_both_databases(stage: Stage) -> None:
    """Primary and standby."""
    databases = stage.databases
    databases.kill(databases.primary, databases.standby)
    stage.kills += 2
    stage.pause(0, _LONG)
    for each in stage.chance.sample((databases.primary, databases.standby), 2):
        databases.start(each)
        stage.pause(0, 1)


def fail_over(stage: Stage) -> None:
    """The primary dies, and its standby is promoted."""
    stage.databases.kill(stage.databases.primary)
    stage.kills += 1
    stage.pause(0, _LONG)
    stage.databases.promote()
    stage.pause(0, 2)
    stage.databases.rebuild()


def kill_owner_and_primary(stage: Stage) -> None:
    """At once, and the standby is promoted."""
    owner = stage.owner
    stage.kill(owner)
    fail_over(stage)
    stage.begin(owner)


# Failovers that go wrong.


def fail_over_behind(stage: Stage) -> None:
    """The standby lacks what the primary has not acknowledged. It is promoted, and the old primary comes back."""
    databases = stage.databases
    with _receiver_stopped(stage):
        stage.pause(0, 2)
        databases.kill(databases.primary)
        stage.kills += 1
    databases.promote()
    stage.pause(0, 2)
    databases.start(databases.standby)  # the former primary, which takes itself for one
    stage.pause(0, _LONG)
    databases.rebuild()


def two_primaries(stage: Stage) -> None:
    """The standby is promoted while the primary serves."""
    databases = stage.databases
    databases.promote()
    stage.pause(0, _LONG)
    databases.rebuild()


def slow_standby(stage: Stage) -> None:
    """It takes nothing for a while."""
    with _receiver_stopped(stage):
        stage.pause(0, stage.chance.choice((1, _LONG, 14)))


@contextlib.contextmanager
def _receiver_stopped(stage: Stage):  # type: ignore[no-untyped-def]  # a generator
    """The process of the standby that receives is stopped."""
    pids: list[int] = []
    with contextlib.suppress(psycopg.Error):
        pids = [pid for (pid,) in stage.databases.standby.query("select pid from pg_stat_wal_receiver")]
    _signal(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(pids, signal.SIGCONT)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def stop_primary(stage: Stage) -> None:
    """SIGSTOP of all its processes, as of a machine that sleeps."""
    pids = stage.databases.processes(stage.databases.primary)
    _signal(pids, signal.SIGSTOP)
    stage.pause(0, stage.chance.choice((1, _LONG, 12)))
    _signal(pids, signal.SIGCONT)


def cut_waits(stage: Stage) -> None:
    """Waits for the standby are cancelled and terminated, and connections of servers ended."""
    end = time.monotonic() + stage.chance.uniform(1, 4)
    with contextlib.suppress(psycopg.Error):
        with psycopg.connect(stage.databases.primary.dsn, autocommit=True, connect_timeout=2) as connection:
            connection.execute("set statement_timeout = '2s'")
            while time.monotonic() < end:
                # Without replication, or an append is too short to be caught while it waits.
                kind = stage.chance.choice(("wait_event = 'SyncRep'", "wait_event_type = 'Lock'", "random() < 0.1"))
                how = stage.chance.choice(("pg_cancel_backend", "pg_terminate_backend"))
                with _receiver_stopped(stage):
                    time.sleep(stage.chance.uniform(0, 0.1))
                    connection.execute(
                        f"select {how}(pid) from pg_stat_activity where application_name = 'veilmq' and {kind}".encode()
                    )


# Servers.


def stop_owner(stage: Stage) -> None:
    """SIGSTOP for longer than its lease."""
    stage.stop(stage.owner, LEASE_SECONDS + stage.chance.uniform(0, LEASE_SECONDS))


def stop_any(stage: Stage) -> None:
    """SIGSTOP of any server, for shorter or longer than a lease."""
    stage.stop(stage.chance.choice(stage.members), stage.chance.uniform(0, _LONG))


def stop_and_kill(stage: Stage) -> None:
    """The owner is stopped; when it goes on, the one that took over is killed."""
    owner = stage.owner
    owner.send(signal.SIGSTOP)
    stage.pause(LEASE_SECONDS, _LONG)
    heir = stage.owner
    stage.kill(heir)
    owner.send(signal.SIGCONT)
    stage.begin(heir)


def hand_over(stage: Stage) -> None:
    """Some times in a row."""
    for _ in range(stage.chance.randint(2, 6)):
        to = stage.chance.choice(["", *(each.name for each in stage.members)])
        stage.databases.ask(f"update veilmq.lease set wanted = '{to}' returning 1")
        stage.pause(0.2, 1)


def hand_over_and_kill(stage: Stage) -> None:
    """The owner is killed while it hands over."""
    owner = stage.owner
    stage.databases.ask("update veilmq.lease set wanted = '' returning 1")
    stage.pause(0, LEASE_SECONDS / 2)
    stage.kill(owner)
    stage.begin(owner)


def rolling_restart(stage: Stage) -> None:
    """All servers, one after the other."""
    for each in stage.chance.sample(stage.members, len(stage.members)):
        stage.terminate(each)
        stage.begin(each)
        _until_ready(each)


def _until_ready(member: Member, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and member.ready():
        time.sleep(0.1)


def flip_bits(stage: Stage) -> None:
    """In a follower's copy, while it is down."""
    follower = stage.follower()
    stage.kill(follower)
    file = follower.data / "veilmq.db"
    with contextlib.suppress(FileNotFoundError), file.open("r+b") as copy:
        size = file.stat().st_size
        draw = stage.chance
        for _ in range(draw.randint(1, 40)):
            place = draw.randrange(size)
            copy.seek(place)
            (was,) = copy.read(1) or b"\\0"
            copy.seek(place)
            copy.write(bytes([was ^ 1 << draw.randrange(8)]))
    stage.begin(follower)


def lose_directory(stage: Stage) -> None:
    """Of a follower, which fills another from a snapshot and the log."""
    follower = stage.follower()
    stage.kill(follower)
    shutil.rmtree(follower.data, ignore_errors=True)
    stage.begin(follower)


# The network.


def _both(stage: Stage, one: Place, other: Place) -> None:
    """Cut one direction, the other, or both."""
    for sender, receiver in stage.chance.choice((((one, other),), ((other, one),), ((one, other), (other, one)))):
        stage.network.cut(sender, receiver)


def _cut_off(stage: Stage, seconds: float) -> None:
    time.sleep(seconds)
    stage.network.heal()


def partition_servers(stage: Stage) -> None:
    """The owner and a follower."""
    _both(stage, stage.owner.place, stage.follower().place)
    _cut_off(stage, stage.chance.uniform(0.5, 10))


def partition_owner_from_primary(stage: Stage) -> None:
    """In either direction."""
    _both(stage, stage.owner.place, stage.databases.place(stage.databases.primary))
    _cut_off(stage, stage.chance.uniform(0.5, 10))


def partition_follower_from_primary(stage: Stage) -> None:
    """In either direction."""
    _both(stage, stage.follower().place, stage.databases.place(stage.databases.primary))
    _cut_off(stage, stage.chance.uniform(0.5, 10))


def partition_databases(stage: Stage) -> None:
    """Primary and standby."""
    databases = stage.databases
    _both(stage, databases.place(databases.primary), databases.place(databases.standby))
    _cut_off(stage, stage.chance.uniform(0.5, 14))


def isolate_owner(stage: Stage) -> None:
    """From everything but its clients."""
    owner = stage.owner.place
    others = [each.place for each in stage.members if each.place is not owner]
    for other in (*others, *stage.databases.places.values()):
        _both(stage, owner, other)
    _cut_off(stage, stage.chance.uniform(1, 10))


def split_brain(stage: Stage) -> None:
    """The owner and the primary on one side; on the other one the standby, which is promoted, and the other servers."""
    databases = stage.databases
    owner, old, new = stage.owner, databases.primary, databases.standby
    left = [owner.place, databases.place(old)]
    right = [databases.place(new), *(each.place for each in stage.members if each is not owner)]
    for one in left:
        for other in right:
            stage.network.cut(one, other)
            stage.network.cut(other, one)
    stage.pause(0, LEASE_SECONDS)
    databases.promote()
    stage.pause(0, _LONG)
    stage.network.heal()
    stage.pause(0, 2)
    databases.rebuild()


# Disks and clocks.


def full_disk(stage: Stage) -> None:
    """Of the owner, or of a follower."""
    member = stage.chance.choice((stage.owner, stage.follower()))
    stage.fill(member.disk)
    stage.pause(0.5, 6)
    if stage.chance.random() < 0.3:
        stage.kill(member)
        stage.begin(member)
        stage.pause(0, 2)
    stage.empty()


def full_database_disk(stage: Stage) -> None:
    """Of the primary, or of the standby."""
    databases = stage.databases
    server: Server = stage.chance.choice((databases.primary, databases.standby))
    stage.fill(server.home)
    stage.pause(0.5, 8)
    stage.empty()
    stage.pause(0, 1)
    with contextlib.suppress(subprocess.CalledProcessError):
        databases.start(server)


def step_database_clock(stage: Stage) -> None:
    """Of the primary and the standby, by up to an hour in either direction; then the owner dies."""
    assert stage.database_clock is not None
    stage.database_clock.set_ahead(stage.chance.randint(-HOUR, HOUR))
    stage.pause(0, 1)
    kill_owner(stage)


KINDS: Final = (
    Fault("owner killed", kill_owner, 4),
    Fault("follower killed", kill_follower, 2),
    Fault("two or all servers killed", kill_two, 2),
    Fault("primary killed, and back", kill_primary, 2),
    Fault("standby killed, and back", kill_standby, 2),
    Fault("primary and standby killed", kill_both_databases),
    Fault("primary killed, standby promoted", fail_over, 3),
    Fault("owner and primary killed, standby promoted", kill_owner_and_primary, 2),
    Fault("standby promoted that lacks records, old primary back", fail_over_behind, 3),
    Fault("standby promoted beside the primary", two_primaries, 2),
    Fault("standby slow", slow_standby, 2),
    Fault("primary stopped", stop_primary),
    Fault("waits for the standby cancelled or terminated", cut_waits, 4),
    Fault("owner stopped for longer than its lease", stop_owner, 4),
    Fault("a server stopped", stop_any),
    Fault("owner stopped, its heir killed", stop_and_kill, 2),
    Fault("hand-overs", hand_over, 3),
    Fault("owner killed in a hand-over", hand_over_and_kill, 2),
    Fault("rolling restart", rolling_restart, 2),
    Fault("flipped bits in a follower", flip_bits, 2),
    Fault("a follower's directory lost", lose_directory, 2),
    Fault("owner and follower partitioned", partition_servers, 3, "cuts"),
    Fault("owner and primary partitioned", partition_owner_from_primary, 3, "cuts"),
    Fault("follower and primary partitioned", partition_follower_from_primary, 2, "cuts"),
    Fault("primary and standby partitioned", partition_databases, 2, "cuts"),
    Fault("owner isolated", isolate_owner, 2, "cuts"),
    Fault("owner and primary on one side, standby promoted on the other", split_brain, 2, "cuts"),
    Fault("full disk of a server", full_disk, 2, "disks"),
    Fault("full disk of PostgreSQL", full_database_disk, 2, "disks"),
    Fault("PostgreSQL's clock set, owner killed", step_database_clock, 2, "clocks"),
)
STANDARD: Final[tuple[Callable[[Stage], None], ...]] = (kill_owner, kill_follower, kill_standby, fail_over)
