"""Writes a Result as Markdown and JSON to bench/results/<scenario>, with the peers that were measured, and prints it.

The latest run of a scenario replaces the previous one; git keeps those.

Ratios come first, because only they may always be quoted; absolute figures are shown with the machine's load, and may
be quoted only from a quiet machine. No path and no host name is written.
"""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measure import Disk, machine
from peers import Peer

RESULTS = Path(__file__).resolve().parent / "results"
QUIET_LOAD_MAX, QUIET_STEAL_PERCENT_MAX = 0.3, 2.0
SLOW_DISK_US = 500

Result = dict[str, Any]


def lifecycle_lines(result: Result) -> list[str]:
    head = "| ours : peer | form | connections | pairs | lives ratio (min to max) | goal | CPU ratio (min to max) "
    head += "| goal | lives/s | CPU us/request | cores | RSS MiB | p50 ms | p99 ms |"
    lines = [head, _rule(head)]
    for row in result["rows"]:
        form = " : ".join(dict.fromkeys((row["left_proto"], row["right_proto"])))
        start = f"| {row['left']} : {row['right']} | {form} | {row['load']['connections']} "
        start += f"| {row['pairs_counted']} of {row['pairs_run']} "
        if "ratio" not in row:
            lines.append(f"{start}| **void** |" + " - |" * 9)
            continue
        lives, cpu = row.get("goal") or (None, None)
        cells = [
            _ratio(row["ratio"]),
            _verdict(row["ratio"]["median"], lives, at_least=True),
            _ratio(row["cpu_ratio"]) if row["cpu_ratio"] else "-",
            _verdict(row["cpu_ratio"]["median"], cpu, at_least=False) if row["cpu_ratio"] else "-",
            _both(row, "deleted", ",.0f"),
            _both(row, "cpu_us_per_request", ".1f"),
            _both(row, "cores", ".2f"),
            _both(row, "rss_mib", ".0f"),
            _both(row, "p50_ms", ".2f"),
            _both(row, "p99_ms", ".2f"),
        ]
        lines.append(f"{start}| {' | '.join(cells)} |")
    return [*lines, "", *_void_lines(result["rows"])]


def depth_lines(result: Result) -> list[str]:
    head = "| server | deep : shallow | pairs | lives ratio (min to max) | goal | CPU ratio (min to max) | lives/s "
    head += "| CPU us/request | RSS MiB when deep | goal |"
    lines = [head, _rule(head)]
    for row in result["rows"]:
        start = f"| {row['left'].split()[0]} | {row['deep']:,} : {row['shallow']:,} "
        start += f"| {row['pairs_counted']} of {row['pairs_run']} "
        if "ratio" not in row:
            lines.append(f"{start}| **void** |" + " - |" * 6)
            continue
        cells = [
            _ratio(row["ratio"]),
            _verdict(row["ratio"]["median"], row["ratio_goal"], at_least=True),
            _ratio(row["cpu_ratio"]) if row["cpu_ratio"] else "-",
            _both(row, "deleted", ",.0f"),
            _both(row, "cpu_us_per_request", ".1f"),
            f"{row['left_rss_mib']:.0f}",
            _verdict(row["left_rss_mib"], row["rss_mib_goal"], at_least=False),
        ]
        lines.append(f"{start}| {' | '.join(cells)} |")
    return [*lines, "", *_void_lines(result["rows"])]


def parked_lines(result: Result) -> list[str]:
    head = "| server | parked | idle CPU before | idle CPU parked | goal | RSS more | goal "
    head += "| message to a parked receive, alone: median, p99 | goal | amid the parked: median, p99 | counts |"
    lines = [head, _rule(head)]
    for row in result["rows"]:
        goals = row["goals"]
        cells = [
            row["server"],
            f"{row['parked']:,}",
            f"{row['idle_percent_before']:.2f} %",
            f"{row['idle_percent']:.2f} %",
            _verdict(row["idle_percent"], goals["idle_percent"], at_least=False),
            f"{row['rss_mib_more']:.1f} MiB",
            _verdict(row["rss_mib_more"], goals["rss_mib_more"], at_least=False),
            f"{row['alone_ms_median']:.2f}, {row['alone_ms_p99']:.2f} ms",
            _verdict(row["alone_ms_median"], goals["alone_ms_median"], at_least=False),
            f"{row['amid_ms_median']:.2f}, {row['amid_ms_p99']:.2f} ms",
            f"**void**: {row['void']}" if row["void"] else "yes",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def restart_lines(result: Result) -> list[str]:
    head = "| server | ended by | stop took | first answer after | goal | acknowledged before | visible after |"
    lines = [head, _rule(head)]
    for row in result["rows"]:
        goal = _verdict(row["first_answer_s"], result["goals"][row["how"]], at_least=False)
        killed = row["how"] == "kill"
        how = "SIGKILL under load | -" if killed else f"SIGTERM | {row['stop_s']:.2f} s"
        kept = "" if row["visible"] >= row["acknowledged"] else " **LOST**"
        lines.append(
            f"| {result['server']} | {how} | {row['first_answer_s']:.2f} s "
            f"| {goal} | {row['acknowledged']:,} | {row['visible']:,}{kept} |"
        )
    return [*lines, "", f"RSS at the end {result['rss_mib']:.0f} MiB."]


LINES = {"lifecycle": lifecycle_lines, "depth": depth_lines, "parked": parked_lines, "restart": restart_lines}


def counted(kind: str, result: Result) -> bool:
    """Whether every row of a result counts: nothing void, nothing lost."""
    if kind == "parked":
        return all(not row["void"] for row in result["rows"])
    if kind == "restart":
        return all(row["visible"] >= row["acknowledged"] for row in result["rows"])
    return all(row["pairs_counted"] == row["pairs_run"] for row in result["rows"])


def write(kind: str, name: str, result: Result, peers: list[Peer], disk: Disk, load: float, quick: bool) -> str:
    """Write both files; the Markdown text."""
    stamp = time.strftime("%Y-%m-%dT%H%MZ", time.gmtime())
    servers = {
        peer.name: {"version": peer.version, "runtime": peer.runtime(), "promise": peer.promise} for peer in peers
    }
    head = _heading(kind, name, result, stamp, quick)
    text = "\n".join([*head, *LINES[kind](result), "", *_footing(result, servers, disk, load)])
    record = {
        "scenario": name, "kind": kind, "at": stamp, "quick": quick, "load_at_start": load, "machine": machine(),
        "servers": servers, "disk": asdict(disk), "result": result,
    }  # fmt: skip
    against = [peer for peer in servers if peer != "veilmq"]
    return save("-".join([name, *against]), text, record, quick)


def save(stem: str, text: str, record: Result, quick: bool = False) -> str:
    """Write both files; the text, and where it was written. A quick run keeps apart from those that may be quoted."""
    RESULTS.mkdir(exist_ok=True)
    stem += "-quick" if quick else ""
    (RESULTS / f"{stem}.md").write_text(text + "\n")
    (RESULTS / f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n")
    return f"{text}\n\nwritten to bench/results/{stem}.md and .json"


def _heading(kind: str, name: str, result: Result, stamp: str, quick: bool) -> list[str]:
    lines = [f"# {name}, {stamp}", ""]
    rows = result["rows"]
    if quick:
        lines += ["**QUICK RUN: shows that the benchmark works. No figure of it may be quoted.**", ""]
    elif kind in ("lifecycle", "depth") and not all(row["quotable"] for row in rows):
        lines += ["**Not quotable: fewer than 5 counted pairs, or runs shorter than 10 s.**", ""]
    if kind in ("lifecycle", "depth"):
        load = rows[0]["load"]
        lines += [
            f"Runs of {load['seconds']} s in turns, bodies of {load['body_bytes']} bytes; a ratio is a median.",
            "Absolute figures are quotable only from a quiet machine (see load and steal below); quote the ratios.",
            "",
        ]
    return lines


def _footing(result: Result, servers: dict[str, dict[str, str]], disk: Disk, load: float) -> list[str]:
    steal = max((row.get("steal_percent_max", 0.0) for row in result["rows"]), default=0.0)
    quiet = load < QUIET_LOAD_MAX and steal < QUIET_STEAL_PERCENT_MAX
    during = ""
    if any("other_cores_max" in row for row in result["rows"]):
        others = max(row["other_cores_max"] for row in result["rows"])
        during = f"; in a run at most {steal:.1f} % steal, {others:.2f} cores used by others"
    p50, p99 = disk.p50_us / 1000, disk.p99_us / 1000
    slow = (
        " **The disk, and not the server, limits 32 connections: judge by CPU.**" if p50 * 1000 > SLOW_DISK_US else ""
    )
    lines = [
        f"fdatasync in the data directory ({disk.filesystem}): p50 {p50:.3f} ms, p99 {p99:.3f} ms.{slow}",
        f"Load before the benchmark {load:.2f}{during}: {'' if quiet else 'not '}a quiet machine.",
        "",
    ]
    for name, server in servers.items():
        lines.append(f"- {name} {server['version']} ({server['runtime']}): {server['promise']}")
    lines += ["", "; ".join(f"{key}: {value}" for key, value in machine().items())]
    return lines


def _void_lines(rows: list[Result]) -> list[str]:
    return [f"Void ({row['left']} : {row['right']}): {why}" for row in rows for why in row["voids"]]


def _rule(head: str) -> str:
    return "|" + "---|" * (head.count("|") - 1)


def _ratio(spread: dict[str, float]) -> str:
    return f"**{spread['median']:.2f}** ({spread['min']:.2f} to {spread['max']:.2f})"


def _both(row: Result, name: str, shape: str) -> str:
    return f"{row[f'left_{name}']:{shape}} : {row[f'right_{name}']:{shape}}"


def _verdict(value: float, goal: float | None, at_least: bool) -> str:
    if goal is None:
        return "-"
    met = value >= goal if at_least else value <= goal
    return f"{'>=' if at_least else '<='} {goal:.4g}: {'met' if met else 'missed'}"
