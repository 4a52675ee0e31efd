"""The table of settings in the docs is the one in the code, and the names in its alarms are those of /metrics."""

import re
from itertools import groupby
from pathlib import Path

from veilmq.admin import metrics
from veilmq.cli.failures import Exit
from veilmq.cli.sources import flag
from veilmq.server.config.settings import FIELDS, Field

DOCS = Path(__file__).parents[2] / "docs"
SETTINGS = DOCS / "deploy.md"
OPERATIONS = DOCS / "operations.md"
COMMANDS = DOCS / "cli.md"


def shown(field: Field) -> str:
    """The default as a person would write it; empty if there is none."""
    if field.default is None or field.default == ():
        return ""
    if isinstance(field.default, bool):
        return "yes" if field.default else "no"
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)


def row(field: Field) -> str:
    name = flag(field.name) if field.type is bool else f"{flag(field.name)} {field.metavar}".replace("|", "\\|")
    return f"| `{name}` | {shown(field)} | {field.help} |".replace("|  |", "| |").replace("<", "\\<")


def printed(page: Path, begin: str, end: str) -> list[str]:
    text = page.read_text()
    assert begin in text
    assert end in text
    return text.partition(begin)[2].partition(end)[0].strip().splitlines()


def test_the_page_prints_the_settings() -> None:
    rows = printed(
        SETTINGS, "<!-- settings: printed from veilmq.server.config.settings.FIELDS -->", "<!-- end of settings -->"
    )
    groups = groupby(FIELDS.values(), key=lambda field: field.group)
    assert rows[2:] == [line for group, each in groups for line in (f"| **{group}** | | |", *map(row, each))]


def test_every_exit_code_has_its_row() -> None:
    for page in (OPERATIONS, COMMANDS):  # of serve, and of all commands
        rows = printed(page, "## Exit codes", "\n## ")
        assert [int(code) for line in rows for code in re.findall(r"^\| (\d) \|", line)] == [int(code) for code in Exit]


def test_every_metric_that_the_page_names_exists() -> None:
    named = set(re.findall(r"veilmq_[a-z_]+", OPERATIONS.read_text()))
    counters = {f"veilmq_{attribute}_total" for attribute in metrics._LISTENER_COUNTERS}
    source = Path(str(metrics.__file__)).read_text()
    families = {
        name + ("_total" if kind == "Counter" else "")
        for kind, name in re.findall(r"(Counter|Gauge|Histogram)MetricFamily\(\s*\"(veilmq_[a-z_]+)\"", source)
    }
    families |= {f"{name}_total" for name in re.findall(r"_counters\(\s*\"(veilmq_[a-z_]+)\"", source)}
    histograms = re.findall(r"_histogram\(\s*\"(veilmq_[a-z_]+)\"", source)
    families |= {f"{name}_{part}" for name in histograms for part in ("bucket", "count", "sum")}
    assert named
    assert named <= families | counters
