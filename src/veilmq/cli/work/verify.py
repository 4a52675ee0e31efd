"""`veilmq verify`: drives a queue at any endpoint, and checks what it answered.

Strategy: the driver (`veilmq.driver`) runs rounds until the time is over; a thread runs the command of --kill between
the rounds' begin and their drain. The report is for people or one JSON object. A URL may hold a secret, and is shown
nowhere.
"""

import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from veilmq.checking import check
from veilmq.checking.log import Kind, LogInvalid, Outcome, decoded
from veilmq.checking.report import Promises, Report, promises_in
from veilmq.cli.failures import Exit, Failure
from veilmq.cli.options import seconds
from veilmq.client.adapters.connect import parse_url
from veilmq.client.clock import SYSTEM
from veilmq.client.errors import TransportError
from veilmq.driver import ROUND_SECONDS, Figures, Kills, Plan, Run
from veilmq.driver.recorded import Recording
from veilmq.model.errors import ParameterInvalid, VeilError
from veilmq.model.wording import counted

_WORDS: Final = {Outcome.OK: "ok", Outcome.FAIL: "refused", Outcome.INFO: "unknown"}
_DRIVEN: Final = {"minutes": 1.0, "clients": 4, "rate": 50.0, "kill_every": "10s"}
"""What options of the load are if they are not given."""
_START_SECONDS: Final = 10
_AGAIN_SECONDS: Final = 0.2


def verify(given: Mapping[str, Any]) -> Exit:
    """Drive and check, or check a file. Raises Failure."""
    if given["check"] is not None:
        for option in (*_DRIVEN, "fifo", "dead_letters", "kill", "seed", "log"):
            if given[option] is not None and given[option] is not False:
                raise Failure(Exit.USAGE, f"--{option.replace('_', '-')}: --check drives nothing, leave it out")
        return _check_file(given["check"], given)
    if given["endpoint"] is None:
        raise Failure(Exit.USAGE, "--endpoint: which account? Give its URL, or a log with --check")
    given = {**given, **{name: usual for name, usual in _DRIVEN.items() if given[name] is None}}
    if not given["minutes"] > 0:
        raise Failure(Exit.USAGE, "--minutes: expected more than 0, or nothing is driven or checked")
    for option, least in (("clients", 1), ("rate", 0)):
        if not given[option] >= least:
            raise Failure(Exit.USAGE, f"--{option}: expected at least {least}, not {given[option]}")
    seed = secrets.randbelow(1_000_000) if given["seed"] is None else given["seed"]
    kills = Kills(given["kill"], seconds("--kill-every", given["kill_every"]), seed)
    plan = _plan(given, seed)
    promises = _with_options(plan.promises(), given)
    with ExitStack() as open_files:
        file = None if given["log"] is None else open_files.enter_context(_new_log(given["log"], promises))
        run = Run(plan, promises, Recording(file))
        try:
            _open(run)
        except BaseException:
            if file is not None:
                given["log"].unlink(missing_ok=True)
            raise
        begun = SYSTEM.monotonic()
        try:
            _rounds(run, begun + given["minutes"] * 60, kills)
        finally:
            run.close()
    _print(run, kills, SYSTEM.monotonic() - begun, as_json=given["as_json"])
    kept = run.figures.clean and not (kills.done and kills.failed == kills.done)
    return Exit.DONE if kept else Exit.WRONG


def _rounds(run: Run, end: float, kills: Kills) -> None:
    try:
        while not run.figures.undrained and (left := end - SYSTEM.monotonic()) > 0:
            run.round(min(ROUND_SECONDS, left), kills.during)
    except KeyboardInterrupt:
        if not run.figures.rounds:
            raise


def _plan(given: Mapping[str, Any], seed: int) -> Plan:
    try:
        address = parse_url(given["endpoint"])
    except ParameterInvalid as error:
        raise Failure(Exit.USAGE, f"--endpoint: {error.reason}") from None
    if address.queue is not None:
        reason = "it makes a queue of its own: end the URL before the queue's name, with a slash"
        raise Failure(Exit.USAGE, f"--endpoint: {reason}")
    for option in ("fifo", "dead_letters"):
        if given[option] and address.kind in {"azure", "mns"}:
            raise Failure(Exit.USAGE, f"--{option.replace('_', '-')}: not over {address.kind}")
    url = given["endpoint"]
    if address.kind != "embedded" and address.retries:
        url += f"{'&' if '?' in url else '?'}retries=0"
    return Plan(
        url=url,
        name=f"veilmq-verify-{secrets.token_hex(4)}",
        clients=given["clients"],
        seed=seed,
        interval=1 / given["rate"] if given["rate"] else 0,
        fifo=given["fifo"],
        dead_letters=given["dead_letters"],
    )


def _with_options(promises: Promises, given: Mapping[str, Any]) -> Promises:
    """The promises, changed as the options say."""
    changes: dict[str, Any] = {}
    if given["stale_deletes"] is not None:
        changes["stale_deletes_refused"] = not given["stale_deletes"]
    if given["deduplication"] is not None:
        changes["deduplication_us"] = round(seconds("--deduplication", given["deduplication"]) * 1_000_000)
    if given["tolerance"] is not None:
        changes["tolerance_us"] = round(seconds("--tolerance", given["tolerance"]) * 1_000_000)
    if given["by_group"]:
        changes["deduplication_by_group"] = True
    return msgspec.structs.replace(promises, **changes)


def _new_log(path: Path, promises: Promises) -> BinaryIO:
    try:
        file = path.open("xb")  # one that is there may be what shows a violation
    except OSError as error:
        raise Failure(Exit.USAGE, f"--log: {path}: {error.strerror}") from None
    file.write(promises.head())
    return file


def _open(run: Run) -> None:
    """The server may be starting yet. Raises Failure, which shows no secret."""
    end = SYSTEM.monotonic() + _START_SECONDS
    while True:
        try:
            return run.open()
        except TransportError as error:
            if SYSTEM.monotonic() > end:
                raise Failure(Exit.ADDRESS, f"--endpoint: {error.reason}") from None
        except ParameterInvalid as error:
            raise Failure(Exit.USAGE, f"--endpoint: {error.reason}") from None
        except VeilError as error:
            raise Failure(Exit.WRONG, f"--endpoint: {error}") from None
        time.sleep(_AGAIN_SECONDS)


def _check_file(path: Path, given: Mapping[str, Any]) -> Exit:
    try:
        with path.open("rb") as lines:
            promises = promises_in(lines.readline()) or Promises()
            lines.seek(0)
            report = check(decoded(lines), _with_options(promises, given))
    except OSError as error:
        raise Failure(Exit.USAGE, f"--check: {path}: {error.strerror}") from None
    except LogInvalid as error:
        raise Failure(Exit.USAGE, f"--check: {path}: {error}") from None
    if given["as_json"]:
        print(msgspec.json.encode(_judged(report)).decode())
    else:
        print(report)
    return Exit.DONE if report.clean else Exit.WRONG


def _judged(report: Report) -> dict[str, Any]:
    return {
        "operations": report.operations,
        "messages": report.messages,
        "not_yet_seen": report.not_yet_seen,
        "violations": {rule.value: count for rule, count in report.counts.items()},
        "stories": [str(each) for each in report.violations],
    }


def _print(run: Run, kills: Kills, took: float, *, as_json: bool) -> None:
    figures, plan = run.figures, run.plan
    if as_json:
        shown = {
            "seed": plan.seed,
            "clients": plan.clients,
            "seconds": round(took, 3),
            "rounds": figures.rounds,
            "kills": kills.done,
            "kills_failed": kills.failed,
            "queue_recreated": figures.recreated,
            "undrained": figures.undrained,
            "calls": {kind: _of_kind(figures, kind) for kind in Kind if _of_kind(figures, kind)},
            "errors": {f"{_WORDS[outcome]}: {name}": count for (outcome, name), count in figures.reasons.items()},
        }
        print(msgspec.json.encode(shown | _judged(figures.report)).decode())
        return
    ended = ", ".join([counted(figures.rounds, "round"), counted(kills.done, "kill")])
    print(f"seed {plan.seed}, {counted(plan.clients, 'client')}, {took:.0f} s, {ended}")
    print(f"{'':<8}{''.join(f'{word:>10}' for word in _WORDS.values())}")
    for kind in Kind:
        if counts := _of_kind(figures, kind):
            print(f"{kind:<8}{''.join(f'{counts.get(word, 0):>10}' for word in _WORDS.values())}")
    for outcome in (Outcome.FAIL, Outcome.INFO):
        reasons = [f"{name} {count}" for (of, name), count in figures.reasons.most_common() if of is outcome]
        if reasons:
            print(f"{_WORDS[outcome]}: {', '.join(reasons)}")
    if kills.failed:
        print(f"the command of --kill failed {counted(kills.failed, 'time')}: {kills.last}")
    if figures.recreated:
        print(f"the queue itself was gone {counted(figures.recreated, 'time')}, and was made anew")
    if figures.undrained:
        print(f"the queue could not be drained, so nothing is known about loss: {figures.undrained}")
    print(figures.report)


def _of_kind(figures: Figures, kind: Kind) -> dict[str, int]:
    return {word: count for of, word in _WORDS.items() if (count := figures.outcomes[kind, of])}
