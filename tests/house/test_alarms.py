"""Alarms and dashboard of deploy/observability name series that /metrics shows: of a server that just began to work.

Strategy: an alarm on a name, label or value that no series has never fires and says nothing. A counter must be there
at 0 too, before anything happened: one that begins at 1 did not increase, and its alarm misses the first time.
"""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.cli.test_certificate import make_pair
from tests.house.test_docs import headings, tool

from veilmq.server.logs import Json
from veilmq.testing.for_each import for_each
from veilmq.testing.local import ServerProcess

ROOT = Path(__file__).parents[2]
ALARMS, DASHBOARD = (ROOT / "deploy" / "observability" / name for name in ("alarms.yaml", "dashboard.json"))
PAGE = ROOT / "docs" / "operations.md"
_SELECTOR = re.compile(r"\b(veilmq_\w+|up)\b(?:\{(.*?)\})?")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"(.*?)"')
OWN = {"job", "instance"}
"""Labels that Prometheus adds."""


class Series(NamedTuple):
    """One line of /metrics."""

    name: str
    labels: dict[str, str]


def alarms(group: str = "veilmq") -> list[dict[str, Any]]:
    """The rules of a group."""
    groups = {each["name"]: each["rules"] for each in yaml.safe_load(ALARMS.read_text())["groups"]}
    found: list[dict[str, Any]] = groups[group]
    return found


def panels() -> list[dict[str, Any]]:
    """Those of the dashboard that show something."""
    every: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in every if panel["type"] != "row"]


def expressions(panel: dict[str, Any]) -> list[str]:
    """What a panel asks, with every variable as its widest value."""
    return [
        target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*").replace("$queue", ".*")
        for target in panel["targets"]
    ]


def series_of(text: str) -> list[Series]:
    """What a server's /metrics shows."""
    families = text_string_to_metric_families(text)
    return [Series(sample.name, sample.labels) for family in families for sample in family.samples]


def is_matched(series: Series, name: str, matchers: str) -> bool:
    """Whether a selector of PromQL takes it. A label that a series lacks is not taken for an empty one here."""
    if series.name != name:
        return False
    for label, sign, value in _MATCHER.findall(matchers):
        if label not in series.labels:
            return False
        is_same = re.fullmatch(value, series.labels[label]) if "~" in sign else series.labels[label] == value
        if bool(is_same) == sign.startswith("!"):
            return False
    return True


def unseen(rule: dict[str, Any], shown: list[Series]) -> list[str]:
    """The selectors and labels of a rule that no series has."""
    found, labels = [], set(OWN)
    for selector in _SELECTOR.finditer(rule["expr"]):
        taken = [series for series in shown if is_matched(series, selector[1], selector[2] or "")]
        labels |= {label for series in taken for label in series.labels}
        found += [] if taken else [selector[0]]
    wanted = set(re.findall(r"\$labels\.(\w+)", str(rule.get("annotations"))))
    wanted |= {
        name
        for names in re.findall(r"(?:ignoring|on|by)\s*\((.*?)\)", rule["expr"])
        for name in re.findall(r"\w+", names)
    }
    return found + sorted(wanted - labels)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> list[Series]:
    """What a new server with TLS, an archive and one queue shows, and what Prometheus adds."""
    directory = tmp_path_factory.mktemp("alarms")
    files = directory / "cert.pem", directory / "key.pem"
    for path, text in zip(files, make_pair("mine"), strict=True):
        path.write_bytes(text)
    tls = "--tls-cert", str(files[0]), "--tls-key", str(files[1])
    server = ServerProcess(directory, *tls, "--archive", str(directory / "archive")).start()
    try:
        headers = {"Authorization": f"Bearer {(server.data / 'admin-token').read_text().strip()}"}
        with httpx.Client(base_url=server.admin, verify=False, headers=headers, timeout=30) as http:
            queue = "/api/v1/queues/000000000000/us-east-1/orders"
            http.put(queue).raise_for_status()
            http.post(f"{queue}/messages", json={"messages": [{"body": "order 1"}]}).raise_for_status()
            found = series_of(http.get("/metrics").text)
    finally:
        server.stop()
    return [*found, Series("up", {"job": "veilmq", "instance": "127.0.0.1:9325"})]


@for_each("rule", alarms(), ids=lambda rule: str(rule["alert"]))
def test_an_alarm_looks_at_what_is_shown(rule: dict[str, Any], shown: list[Series]) -> None:
    assert _SELECTOR.search(rule["expr"])
    assert unseen(rule, shown) == []


def test_the_reference_lists_every_metric_with_its_labels(shown: list[Series]) -> None:
    listed = {each.name: set(each.labels) for each in tool("reference").families() if not each.of_cluster}
    found: dict[str, set[str]] = {}
    for series in shown[:-1]:  # without Prometheus' own `up`
        name = re.sub(r"(veilmq_commit_seconds)_(bucket|count|sum)", r"\1", series.name)
        found.setdefault(name, set()).update(series.labels.keys() - {"le"})
    assert {name: labels for name, labels in found.items() if listed.get(name) != labels} == {}
    assert sorted(listed.keys() - found.keys()) == []


@for_each("panel", panels(), ids=lambda panel: str(panel["title"]))
def test_a_panel_looks_at_what_is_shown(panel: dict[str, Any], shown: list[Series]) -> None:
    """Those of a cluster are held against the code's names."""
    assert panel["targets"]
    of_cluster = {each.name for each in tool("reference").families() if each.of_cluster}
    for expr in expressions(panel):
        here = [Series(each.name, each.labels | {"instance": "x", "job": "veilmq"}) for each in shown]
        missing = unseen({"expr": expr}, here)
        known = [name for name in missing if re.sub(r"(_bucket)?(\{.*)?$", "", name) in of_cluster]
        assert _SELECTOR.search(expr)
        assert [name for name in missing if name not in known and name != "le"] == []


def test_the_dashboard_can_be_laid_out() -> None:
    every = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    taken: set[tuple[int, int]] = set()
    for panel in every:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.slow
def test_prometheus_takes_the_alarms_and_what_the_dashboard_asks(tmp_path: Path) -> None:
    promtool = ROOT / ".tools/promtool/promtool"
    assert promtool.exists(), "promtool is missing: run `make setup-clients`"
    asked = [{"record": "x:y", "expr": expr} for panel in panels() for expr in expressions(panel)]
    (tmp_path / "dashboard.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": asked}]}))
    for path, count in (
        (ALARMS, len(alarms()) + len(alarms("veilmq-cluster"))),
        (tmp_path / "dashboard.yaml", len(asked)),
    ):
        command = [str(promtool), "check", "rules", "--lint=none", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, f"SUCCESS: {count} rules found" in done.stdout) == (0, True), done.stdout + done.stderr


FIRING: dict[str, dict[str, dict[str, str]]] = {
    "VeilMQDiskFills": {
        "steadily": {"disk_free_bytes": "6e10-3e8x90"},
        "by a backup each hour": {"disk_free_bytes": " ".join(f"{free}e9x59" for free in range(60, 14, -5))},
    },
    "VeilMQWorkFails": {
        "with a cloud's SDK": {
            'lease_outcomes_total{outcome="received"}': "0+100x90",
            'lease_outcomes_total{outcome="released"}': "0+20x90",
        }
    },
    "VeilMQSnapshotOld": {
        "never": {"cluster_log_bytes": "5e9x90", "cluster_snapshot_lsn": "0x90"},
        "long ago": {
            "cluster_log_bytes": "5e9x90",
            "cluster_snapshot_lsn": "7x90",
            "cluster_snapshot_age_seconds": "700000x90",
        },
    },
    "VeilMQOwnerChanges": {
        "by crashes": {
            'cluster_epoch{instance="a"}': "40x24 _ 41x7 _ 43x7 _ 44x7 _ 45x7 _ 46x7 _ 47x9",
            'cluster_epoch{instance="b"}': "40x24 41x8 43x8 44x8 45x8 46x8 47x9",
        }
    },
}
"""By alarm: a series a minute of a server, as promtool has it, on which it fires at minute 85, or as `_LATER` says."""
_LATER = {"by a backup each hour": 595}
SILENT: dict[str, dict[str, dict[str, str]]] = {
    "VeilMQDiskFills": {
        "a backup to the same disk": {"disk_free_bytes": "6e10x400 6e10-4e9x5 4e10x500"},
        "a backup soon after the start": {"disk_free_bytes": "6e10x45 6e10-4e9x5 4e10x500"},
    },
    "VeilMQSnapshotOld": {
        "lately": {
            "cluster_log_bytes": "5e9x90",
            "cluster_snapshot_lsn": "7x90",
            "cluster_snapshot_age_seconds": "600000x90",
        },
        "a short log": {"cluster_log_bytes": "4e9x90", "cluster_snapshot_lsn": "0x90"},
    },
    "VeilMQOwnerChanges": {
        "a server that has just started": {"cluster_epoch": "_x40 0 0 47x60"},
        "three planned hand-overs": {"cluster_epoch": "40x50 42x4 44x4 46x24"},
    },
}
"""Series on which an alarm fires at no minute."""


@pytest.mark.slow
def test_alarms_fire_when_they_should(tmp_path: Path) -> None:
    promtool = ROOT / ".tools/promtool/promtool"
    summaries = {rule["alert"]: rule["annotations"] for rule in [*alarms(), *alarms("veilmq-cluster")]}
    tests = [
        {
            "name": f"{alert}, {what}",
            "interval": "1m",
            "input_series": [
                {"series": f"veilmq_{name}", "values": values} for name, values in series.items()
            ],
            "alert_rule_test": [
                {
                    "eval_time": f"{minute}m",
                    "alertname": alert,
                    "exp_alerts": [{"exp_annotations": summaries[alert]}] if cases is FIRING else [],
                }
                for minute in ([_LATER.get(what, 85)] if cases is FIRING else range(900))
            ],
        }
        for cases in (FIRING, SILENT)
        for alert, named in cases.items()
        for what, series in named.items()
    ]  # fmt: skip
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALARMS)], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run([str(promtool), "test", "rules", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def row(rule: dict[str, Any]) -> str:
    text = (
        rule["annotations"]["summary"].replace("{{ $labels.", "<").replace("{{ $value", "<number").replace(" }}", ">")
    )
    place, _, anchor = rule["annotations"]["runbook"].partition("#")
    page = ROOT / place
    read = f"[{headings(page)[anchor]}]({'' if page == PAGE else page.name}#{anchor})"
    return f"| `{rule['alert']}` | {rule.get('for', 'at once')} | {text} | {read} |".replace("<", "\\<")


def test_the_page_lists_the_fields_of_a_log_line() -> None:
    text = (ROOT / "docs" / "observability.md").read_text().partition("<!-- fields of a log line -->")[2]
    table = text.partition("<!-- end of fields -->")[0]
    listed: dict[str, str] = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", table, re.M))
    plain = logging.LogRecord("veilmq.shell", logging.INFO, "", 0, "a", None, None)
    assert [name for name, when in listed.items() if when == "always"] == list(json.loads(Json().format(plain)))
    try:
        raise ValueError("b")
    except ValueError:
        full = logging.LogRecord("veilmq.shell", logging.ERROR, "", 0, "a", None, sys.exc_info())
    full.request = "id"
    assert list(listed) == list(json.loads(Json().format(full)))


def test_the_page_lists_the_alarms() -> None:
    text = PAGE.read_text().partition("<!-- alarms: printed from deploy/observability/alarms.yaml -->\n")[2]
    printed = text.partition("<!-- end of alarms -->")[0].splitlines()
    assert printed == [
        "| alarm | after | | what to do |",
        "|---|---|---|---|",
        *map(row, [*alarms(), *alarms("veilmq-cluster")]),
    ]


def test_every_alarm_has_a_name_of_its_own_and_says_what_is_wrong() -> None:
    rules = [*alarms(), *alarms("veilmq-cluster")]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 10
    for rule in rules:
        assert rule.keys() <= {"alert", "expr", "for", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        assert rule["annotations"].keys() == {"summary", "runbook"}
    old = _SELECTOR.search(next(rule["expr"] for rule in rules if rule["alert"] == "VeilMQQueueOld"))
    assert old is not None
    names = {
        "orders-dlq": 0,
        "OrdersDLQ": 0,
        "orders-dead": 0,
        "jobs-poison": 0,
        "failed": 0,
        "a-failed.fifo": 0,
        "jobs": 1,
        "unfailed": 1,
    }
    ages = {name: Series("veilmq_queue_oldest_age_seconds", {"queue": name}) for name in names}
    assert {name: is_matched(series, old[1], old[2]) for name, series in ages.items()} == names


@for_each(
    ("expr", "said"),
    [
        ('veilmq_lease_outcomes_total{outcome="died"} > 0', 'veilmq_lease_outcomes_total{outcome="died"}'),
        ("veilmq_deep > 1", "veilmq_deep"),
        ('veilmq_queues{queue!="a"} > 1', 'veilmq_queues{queue!="a"}'),
        ("veilmq_disk_low > on(queue) veilmq_queues", "queue"),
    ],
)
def test_what_no_series_has_is_found(expr: str, said: str, shown: list[Series]) -> None:
    rule = {"expr": expr, "annotations": {"summary": "{{ $labels.instance }}"}}
    assert unseen(rule, shown) == [said]
