"""The scenarios. Two servers are measured alternating: both run, one is driven, and the order alternates.

A run counts only if every answer was 200, no connection broke, at least 0.95 of what was sent was received and, for a
server that checks signatures, forged requests got 403 before and after it. Otherwise it is void and repeated, at most
RETRIES times. A ratio is the median over the pairs, with its smallest and largest.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import measure
from measure import Load, MeasureFailed, Run, measured_run
from peers import Peer, Server, prepare, started
from sqs import CallFailed, Proto, forgeries_let_in

RETRIES = 2
QUOTABLE_PAIRS = 5
QUOTABLE_SECONDS = 10

# (ours, peer, batch) -> smallest ratio of completed lives, largest ratio of CPU a request
GOALS = {
    ("veilmq", "fauxqs", 1): (1.2, 1.0),
    ("veilmq", "fauxqs", 10): (1.0, 64 / 51),
    ("veilmq-python", "fauxqs", 1): (1.0, 1.0),
    ("veilmq-python", "fauxqs", 10): (0.8, 64 / 51),
    ("veilmq", "elasticmq", 1): (2.0, None),
    ("veilmq", "elasticmq", 10): (2.0, None),
}
DEPTH_GOAL = 0.9
DEPTH_RSS_MIB_MAX = 300
RESTART_CLEAN_S_MAX, RESTART_KILLED_S_MAX = 0.5, 2.0

Say = Callable[[str], None]
Result = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """How a scenario is measured: `proto` is the wire form wanted, a peer that lacks it decides its pair's form."""

    wrk: str
    pairs: int
    seconds: int
    proto: Proto
    say: Say


@dataclass(frozen=True)
class Lane:
    """One side of a pair. Without a fixed queue every run has a new one."""

    server: Server
    proto: Proto
    queue_url: str = ""
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or self.server.peer.name

    def run(self, load: Load, wrk: str) -> Run:
        """A single run, void or not."""
        server = self.server
        queue_url = self.queue_url or server.new_queue(self.proto)
        let_in: list[str] = []
        if server.peer.checks_signatures:
            let_in += self.forgeries_let_in(queue_url)
        run = measured_run(wrk, server.pid, server.target(self.proto, queue_url), load)
        server.still_there()
        if server.peer.checks_signatures:
            let_in += self.forgeries_let_in(queue_url)
        if not self.queue_url:
            server.drop_queue(self.proto, queue_url)
        return replace(run, void="; ".join(filter(None, [run.void, *let_in])))

    def forgeries_let_in(self, queue_url: str) -> list[str]:
        """Forged requests that the server answered with anything but 403."""
        return forgeries_let_in(self.server.caller(self.proto), queue_url, self.server.peer.path_of(queue_url))


def counted_run(lane: Lane, load: Load, settings: Settings) -> Run:
    """A run that counts, or after RETRIES repeats the last void one."""
    for attempt in range(RETRIES + 1):
        run = lane.run(load, settings.wrk)
        word = f"VOID ({run.void})" if run.void else "ok"
        settings.say(
            f"  {lane.name:<12} {run.deleted:>8,.0f} del/s  {run.cpu_us_per_request:>6.1f} us CPU/request  "
            f"{run.cores:.2f} cores  p50 {run.p50_ms:.2f} ms  p99 {run.p99_ms:.2f} ms  RSS {run.rss_mib:.0f} MiB  "
            f"load {run.load_before:.2f}  steal {run.steal_percent:.1f} %  others {run.other_cores:.2f}  {word}"
        )
        if not run.void or attempt == RETRIES:
            return run
    raise AssertionError("unreachable")


def by_turns(left: Lane, right: Lane, load: Load, settings: Settings) -> Result:
    """Pairs of runs; the ratio is left to right."""
    for lane in (left, right):
        warm_seconds = min(lane.server.peer.warm_seconds, load.seconds * 2)
        lane.run(replace(load, seconds=warm_seconds), settings.wrk)
    pairs: list[tuple[Run, Run]] = []
    for turn in range(settings.pairs):
        settings.say(f" pair {turn + 1} of {settings.pairs}")
        order = (left, right) if turn % 2 == 0 else (right, left)
        runs = {id(lane): counted_run(lane, load, settings) for lane in order}
        pairs.append((runs[id(left)], runs[id(right)]))
    return _summary(left, right, load, pairs)


def _summary(left: Lane, right: Lane, load: Load, pairs: list[tuple[Run, Run]]) -> Result:
    counted = [(a, b) for a, b in pairs if not a.void and not b.void]
    everyone = [run for pair in pairs for run in pair]
    result: Result = {
        "left": left.name,
        "right": right.name,
        "left_proto": left.proto,
        "right_proto": right.proto,
        "load": asdict(load),
        "pairs_run": len(pairs),
        "pairs_counted": len(counted),
        "voids": [run.void for run in everyone if run.void],
        "load_before_max": max(run.load_before for run in everyone),
        "steal_percent_max": max(run.steal_percent for run in everyone),
        "other_cores_max": max(run.other_cores for run in everyone),
        "runs": [{"left": asdict(a), "right": asdict(b)} for a, b in pairs],
    }
    result["quotable"] = len(counted) >= QUOTABLE_PAIRS and load.seconds >= QUOTABLE_SECONDS
    if not counted:
        return result
    result["ratio"] = _spread([a.deleted / b.deleted for a, b in counted])
    # Ticks of 10 ms: a peer that answered almost nothing may show no CPU at all.
    cpu = [a.cpu_us_per_request / b.cpu_us_per_request for a, b in counted if b.cpu_us_per_request]
    result["cpu_ratio"] = _spread(cpu) if cpu else None
    for side, index in (("left", 0), ("right", 1)):
        for name in ("deleted", "rps", "cpu_us_per_request", "cores", "rss_mib", "p50_ms", "p99_ms"):
            result[f"{side}_{name}"] = statistics.median(getattr(pair[index], name) for pair in counted)
    return result


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def shared_protos(left: Peer, right: Peer, wanted: Proto) -> tuple[Proto, Proto]:
    """The wire form that both sides have in common, the wanted one first; otherwise each side's own."""
    wishes: list[Proto] = [wanted, *(form for form in left.protos if form != wanted)]
    for form in wishes:
        if form in left.protos and form in right.protos:
            return form, form
    return _own(left, wanted), _own(right, wanted)


def _own(peer: Peer, wanted: Proto) -> Proto:
    return wanted if wanted in peer.protos else peer.protos[0]


def lifecycle(ours: Peer, others: list[Peer], batch: int, connections: list[int], settings: Settings) -> Result:
    """Ours against each peer: send, receive, delete in equal parts."""
    rows = []
    for other in others:
        left_proto, right_proto = shared_protos(ours, other, settings.proto)
        with started(ours, "ours") as left, started(other, "peer") as right:
            for count in connections:
                settings.say(f"{ours.name} against {other.name}: batch {batch}, {count} connections")
                lanes = Lane(left, left_proto), Lane(right, right_proto)
                row = by_turns(*lanes, Load(settings.seconds, count, batch), settings)
                row["goal"] = GOALS.get((ours.name, other.name, batch))
                rows.append(row)
    return {"batch": batch, "rows": rows}


def preload(lane: Lane, count: int, settings: Settings) -> int:
    """Put at least `count` messages of 200 bytes into the lane's queue; how many were acknowledged."""
    caller, path = lane.server.caller(lane.proto), lane.server.peer.path_of(lane.queue_url)
    done, rate = 0, 0.0
    while count - done > max(20_000.0, rate):
        seconds = 1 if not rate else max(1, min(10, int((count - done) / rate)))
        load = Load(seconds, 32, 10, only_send=True)
        run = measured_run(settings.wrk, lane.server.pid, lane.server.target(lane.proto, lane.queue_url), load)
        if run.void:
            raise MeasureFailed(f"{lane.name}: filling the queue: {run.void}")
        done, rate = done + run.requests * 10, run.requests * 10 / run.seconds
    while done < count:
        caller.send_ten(lane.queue_url, "x" * 200, path)
        done += 10
    visible = caller.visible(lane.queue_url, path)
    settings.say(f"{lane.name}: {done:,} messages acknowledged, {visible:,} shown as visible")
    return done


def depth(subjects: list[Peer], deep: int, connections: int, settings: Settings, shallow: int = 1000) -> Result:
    """Each subject against itself: one server `deep` messages deep, another `shallow`, driven alternating."""
    rows = []
    for subject in subjects:
        form = _own(subject, settings.proto)
        with started(subject, "deep") as left, started(subject, "shallow") as right:
            lanes = [
                Lane(server, form, server.new_queue(form), f"{subject.name} {count:,}")
                for server, count in ((left, deep), (right, shallow))
            ]
            filled = [preload(lane, count, settings) for lane, count in zip(lanes, (deep, shallow), strict=True)]
            row = by_turns(lanes[0], lanes[1], Load(settings.seconds, connections, 1), settings)
            row |= {"deep": filled[0], "shallow": filled[1]}
            row |= {"ratio_goal": DEPTH_GOAL, "rss_mib_goal": DEPTH_RSS_MIB_MAX}
            rows.append(row)
    return {"rows": rows}


def restart(subject: Peer, count: int, settings: Settings, times: int = 3) -> Result:
    """Time from the start of the process to its first answer, after clean stops and after kills under load."""
    form = _own(subject, settings.proto)
    server = prepare(subject, "restart")
    rows: list[Result] = []
    try:
        server.launch()
        server.wait_ready()
        lane = Lane(server, form, server.new_queue(form))
        acknowledged = preload(lane, count, settings)
        for how in ["stop"] * times + ["kill"] * times:
            if how == "kill":
                acknowledged += _kill_under_load(lane, settings)
                stop_s = 0.0
            else:
                stop_s = server.stop()
            start = time.perf_counter()
            server.launch()
            server.wait_ready(pause_s=0.002)
            first_s = time.perf_counter() - start
            visible = _visible_or_none(lane)
            times_s = {"stop_s": stop_s, "first_answer_s": first_s}
            rows.append({"how": how, **times_s, "acknowledged": acknowledged, "visible": visible})
            settings.say(
                f"{subject.name}: first answer {first_s:.2f} s after a {how}, {visible:,} visible of {acknowledged:,} "
                f"acknowledged" + ("" if visible >= acknowledged else "  LOST")
            )
            acknowledged = max(acknowledged, visible)
        rss_mib = measure.rss_bytes(server.pid) / 2**20
    finally:
        server.remove()
    goals = {"stop": RESTART_CLEAN_S_MAX, "kill": RESTART_KILLED_S_MAX}
    return {"server": subject.name, "messages": count, "rows": rows, "goals": goals, "rss_mib": rss_mib}


def _visible_or_none(lane: Lane) -> int:
    """Messages visible after a restart: 0 if the server has forgotten the queue."""
    try:
        return lane.server.caller(lane.proto).visible(lane.queue_url, lane.server.peer.path_of(lane.queue_url))
    except CallFailed as error:
        if error.status != 400:
            raise
        return 0


def _kill_under_load(lane: Lane, settings: Settings) -> int:
    """SIGKILL in the middle of a stream of batch sends; how many messages of it were acknowledged."""
    target = lane.server.target(lane.proto, lane.queue_url)
    command, env = target.wrk_command(settings.wrk, Load(4, 32, 10, only_send=True))
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as wrk:
        try:
            time.sleep(2)
            lane.server.kill()
            text, _ = wrk.communicate(timeout=30)
        finally:
            wrk.kill()
    answered = measure.answered_ok(text)
    if not answered:
        print("no send was answered before the kill", file=sys.stderr)
    return answered * 10
