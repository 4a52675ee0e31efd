"""What the code offers by name is on a page: options, kinds of events, metrics, routes, actions, tables, variables. And
what a release offered is still there.

Strategy: the names are read off the code, and looked for where a reader would look. A name in the docs that the code
does not know is found the other way round, where names can be told from words (`VEILMQ_...`). The names of a release
are in `released/VERSION.txt`, which is written when the release is cut:

    python -m tests.house.test_reference_pages > tests/house/released/VERSION.txt
"""

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import httpx
import msgspec
import pytest
import typer.main
from tests.house.test_cli_page import leaves
from tests.house.test_docs import tool

import veilmq
import veilmq.admin
from veilmq.admin.api.operations import OPERATIONS
from veilmq.cli import application
from veilmq.cli.failures import Exit
from veilmq.cli.sources import variable
from veilmq.model.events import EventRecord, Kind
from veilmq.model.settings.access import Action
from veilmq.server.config.settings import FIELDS
from veilmq.store.sqlite.disk.schema import MIGRATIONS
from veilmq.testing.local import LocalServer

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "veilmq"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCS = "\n".join(page.read_text() for page in PAGES)
ADMIN = (ROOT / "docs" / "admin-api.md").read_text()
OTHERS = {
    "VEILMQ_ACCELERATOR",
    "VEILMQ_TOKEN_FILE",
    "VEILMQ_ENDPOINT",
    "VEILMQ_QUEUE",
    "VEILMQ_CONFIG",
    "VEILMQ_CLIENT_NAME",
    "VEILMQ_FROM",
    "VEILMQ_TO",
}
"""Variables that are no settings of the server."""
QUEUE = "/api/v1/queues/{account}/{region}/{name}"
RELEASED = Path(__file__).parent / "released"
GONE: dict[str, str] = {}
"""Names of an earlier release that are not there any more, each with the release that deprecated it."""


def quoted(page: str) -> set[str]:
    """Every word that stands in a code span or block of a page."""
    blocks = re.findall(r"^```.*?^```", page, re.M | re.S)
    spans = blocks + re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", page, flags=re.M | re.S))
    return {word for span in spans for word in re.findall(r"[A-Za-z0-9_./-]+", span)}


def routes() -> set[str]:
    """The admin port's paths, with {} for what varies."""
    found = {
        path
        for module in (SOURCE / "admin").rglob("*.py")
        for path in re.findall(r'Route\(\s*"([^"]+)"', module.read_text())
    }
    found |= {f".../{operation.suffix.strip('/')}" for operation in OPERATIONS.values() if operation.suffix}
    return found


def metrics() -> set[str]:
    source = (SOURCE / "admin" / "metrics.py").read_text()
    counters = {f"{name}_total" for name in re.findall(r'_counters\(\s*"(veilmq_[a-z_]+)"', source)}
    for kind, name in re.findall(r'(Counter|Gauge|Histogram)MetricFamily\(\s*"(veilmq_[a-z_]+)"', source):
        counters.add(f"{name}_total" if kind == "Counter" else name)
    return counters


def test_every_option_is_on_a_page() -> None:
    commands: dict[tuple[str, ...], Any] = leaves(typer.main.get_command(application()))
    known = set(re.findall(r"--[a-z][a-z-]*", DOCS))
    options = {
        (*words, option)
        for words, command in commands.items()
        for each in command.params
        if (option := next((name for name in each.opts if name.startswith("--")), None))
    }
    assert len(options) > 100
    assert sorted(option for option in options if option[-1] not in known) == []


def test_every_kind_of_event_is_on_the_page() -> None:
    assert {kind.name.lower() for kind in Kind} - quoted(ADMIN) == set()


def test_every_member_of_an_event_is_on_the_page() -> None:
    assert set(EventRecord.__struct_fields__) - quoted(ADMIN) == set()


def test_every_metric_is_on_the_page() -> None:
    assert len(metrics()) > 15
    assert metrics() - quoted(ADMIN) == set()


def test_every_route_is_on_the_page() -> None:
    assert len(routes()) > 15
    page = re.sub(r"\b[A-Z_]{4,}\b", "{}", ADMIN)
    paths = {re.sub(r"\{[a-z]+\}", "{}", route) for route in routes()}
    assert {path for path in paths if path not in page} == set()


def test_every_member_of_a_request_is_on_the_page() -> None:
    modules = [importlib.import_module(each.name) for each in walk_packages(veilmq.admin.__path__, "veilmq.admin.")]
    inputs = {
        each
        for module in modules
        for name, each in vars(module).items()
        if name.endswith("Input") and inspect.isclass(each) and issubclass(each, msgspec.Struct)
    }
    assert len(inputs) > 40
    assert {member for each in inputs for member in each.__struct_encode_fields__} - quoted(ADMIN) == set()


def gets() -> set[str]:
    """Paths that answer a GET with JSON: of the server, and of a queue."""
    source = "".join(module.read_text() for module in (SOURCE / "admin").rglob("*.py"))
    found = set(re.findall(r'Route\("([^"]+)".*methods=\["GET"\]', source))
    of_queue = set(re.findall(r'Route\(_PATH \+ "([^"]+)".*methods=\["GET"\]', source))
    of_queue |= {operation.suffix for operation in OPERATIONS.values() if operation.method == "GET"}
    found |= {QUEUE + each for each in of_queue}
    return found - {"/api/v1/settings", "/api/v1/cluster", "/api/v1/snapshot", "/metrics"}


def members_of(answer: Any) -> Iterator[str]:
    """Names of all members, at any depth."""
    if isinstance(answer, dict):
        yield from answer
    if isinstance(answer, dict | list):
        for each in answer.values() if isinstance(answer, dict) else answer:
            yield from members_of(each)


@pytest.mark.slow
def test_every_member_of_an_answer_is_on_the_page(veilmq_server: LocalServer) -> None:
    """Of each GET, of a queue in which much has happened, and of the calls by which it did; those of `settings` are on
    a page of their own."""
    token = (veilmq_server.process.data / "admin-token").read_text().strip()
    where, members = {"account": "000000000000", "region": "us-east-1", "name": "orders.fifo"}, set[str]()
    with httpx.Client(base_url=veilmq_server.admin_url, headers={"Authorization": f"Bearer {token}"}) as server:
        where |= lived(server, QUEUE.format_map(where), members)
        asked = {
            "v1/queues": {"minutes": "5"},
            "v1/messages": {"deduplication_id": "one"},
            "}/timeout": {"timeout_us": "90000000"},
            "}/past": {"at": where["sent"]},
        }
        for path in gets():
            params = next((given for end, given in asked.items() if path.endswith(end)), {})
            answer = server.get(path.format_map(where), params=params)
            assert answer.status_code == 200, (path, answer.text)
            members |= {name for line in answer.text.splitlines() for name in members_of(json.loads(line))}
    assert len(members) > 150
    assert members - quoted(ADMIN) == set()


def lived(server: httpx.Client, queue: str, answered: set[str]) -> dict[str, str]:
    """Make a queue in which much happens; the message in flight, when it was sent, and a job. answered: gets the
    members of all answers."""

    def done(method: str, path: str, **members: Any) -> Any:
        answer = server.request(method, path, json=members).raise_for_status().json()
        answered.update(members_of(answer))
        return answer

    dead = queue.replace("orders", "dead")
    done("PUT", dead, fifo=True)
    done("PUT", queue, fifo=True, redrive={"target": "dead.fifo", "receive_count_max": 1})
    message = {"group": "g", "type": "t", "attributes": [{"name": "a", "type": "String", "value": "v"}]}
    for body in ("one", "two", "three"):
        done("POST", f"{queue}/messages", messages=[message | {"body": body, "deduplication_id": body}])
    done("POST", f"{queue}/receive", lease_us=1)
    (held,) = done("POST", f"{queue}/receive", lease_us=60_000_000)["messages"]
    done("POST", f"{queue}/extend", handles=[held["handle"]], lease_us=50_000_000)
    done("PUT", f"{queue}/templates", name="t", message={"body": "x"})
    done("PUT", f"{queue}/plan", lease_us=5_000_000)
    done("POST", f"{dead}/move")
    done("POST", f"{dead}/purge")
    job = done("POST", "/api/v1/jobs", act="release", queue="orders.fifo")
    return {"message": held["id"], "sent": str(held["sent"]), "job": job["id"]}


def test_every_action_is_on_the_page() -> None:
    assert {action.value for action in Action} - quoted((ROOT / "docs" / "deploy.md").read_text()) == set()


def test_every_table_is_on_the_page() -> None:
    tables = set(re.findall(r"CREATE TABLE ([a-z_]+)", "".join(MIGRATIONS)))
    assert len(tables) > 10
    assert tables - quoted((ROOT / "docs" / "how-it-works.md").read_text()) == set()


def test_every_variable_on_a_page_exists() -> None:
    named = set(re.findall(r"VEILMQ_[A-Z_]*[A-Z]", DOCS))
    assert named > OTHERS
    assert named - {variable(name) for name in FIELDS} - OTHERS == set()


def resolves(dotted: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        missing = object()
        for part in parts[length:]:
            found = getattr(found, part, missing)
        return found is not missing
    return False


def test_every_module_on_a_page_exists() -> None:
    rooms = "|".join(sorted(path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"))
    named = {
        (page.relative_to(ROOT).as_posix(), name)
        for page in PAGES
        for name in re.findall(rf"\bveilmq\.(?:{rooms})(?:\.[A-Za-z_]+)*", page.read_text())
    }
    assert {name for _, name in named} > {"veilmq.testing"}
    assert sorted(found for found in named if not resolves(found[1])) == []


def names() -> set[str]:
    """Everything that docs/releases.md promises to keep, a line each: its kind, and its name."""
    reference = tool("reference")
    found = {f"setting {name}" for name in FIELDS} | {f"exit code {int(code)} {code.name}" for code in Exit}
    for words, command in leaves(typer.main.get_command(application())).items():
        if not command.hidden:
            shown = [each for each in command.params if not getattr(each, "hidden", False)]
            options = {name for each in shown for name in each.opts if name.startswith("-")}
            found |= {f"command {' '.join(words)}"} | {f"command {' '.join(words)} {name}" for name in options}
    found |= {f"metric {each.name}" + "".join(f" {label}" for label in each.labels) for each in reference.families()}
    found |= {f"route {route}" for route in routes()} | {f"event {kind.name.lower()}" for kind in Kind}
    found |= {f"member of an event {name}" for name in EventRecord.__struct_fields__}
    for module in {"veilmq", *(name for modules in reference.MODULES.values() for name in modules)}:
        held = importlib.import_module(module)
        public = getattr(held, "__all__", None) or [
            name
            for name, each in vars(held).items()
            if not name.startswith("_") and getattr(each, "__module__", None) == module
        ]
        found |= {f"python {module}.{name}" for name in public}
        for name in public:
            each = getattr(held, name)
            for method, _ in inspect.getmembers(each) if inspect.isclass(each) else ():
                if method in vars(each) and not method.startswith("_"):
                    found.add(f"python {module}.{name}.{method}")
    return found


def test_names_of_earlier_releases_are_still_there() -> None:
    """One that goes is deprecated first: put it into GONE in the minor release after."""
    now = names()
    for release in RELEASED.glob("*.txt"):
        then = set(release.read_text().splitlines())
        assert {each.partition(" ")[0] for each in then} == {each.partition(" ")[0] for each in now}
        assert sorted(then - now - GONE.keys()) == [], f"{release.stem} had them"
    assert GONE.keys() & now == set()


def test_a_release_is_written_down() -> None:
    """A version without `.dev` has its heading with a date, and its names."""
    headings = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == ("Unreleased", "")
    assert [version for version, date in headings[1:] if not date] == []
    if ".dev" not in veilmq.__version__:
        assert headings[1:2] == [(veilmq.__version__, headings[1][1])]
    assert [version for version, _ in headings[1:] if not (RELEASED / f"{version}.txt").exists()] == []


if __name__ == "__main__":
    print("\n".join(sorted(names())))
