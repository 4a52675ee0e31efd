"""Whatever comes from a queue or an address is text: in HTML, SVG, JSON and CSV, and in the names of files."""

import csv
import io
import re
from typing import Any
from urllib.parse import quote

import msgspec
from tests.console.conftest import CONSOLE, QUEUES, Api, Visitor
from tests.console.hostile import HOSTILE, SOME, tags

from veilmq.model.commands import Extend, Origin
from veilmq.model.instant import Instant
from veilmq.model.messages import Failure, Report, Reported
from veilmq.model.settings.queue import QueueKey

ORDERS = f"{CONSOLE}/orders"
KEY = QueueKey("000000000000", "us-east-1", "orders")
SVG_TEXT = ("text", ("class", "text-anchor", "x", "y"))
"""A timeline may have a pause."""


class Sent:
    """A queue with a message for each text, which is its body, type, group, attribute, holder and last error."""

    def __init__(self, server: Any, api: Api, texts: list[str]) -> None:
        api.create("orders", visibility_timeout_us=3_600_000_000)
        self.ids: dict[str, str] = {}
        self.sequences: dict[str, str] = {}
        for start in range(0, len(texts), 100):
            some = texts[start : start + 100]
            given = [_message(text) for text in some]
            answer = api.client.post(f"{QUEUES}/orders/messages", json={"messages": given})
            assert answer.status_code == 200, answer.text
            for text, each in zip(some, answer.json()["messages"], strict=True):
                self.ids[text], self.sequences[text] = each["id"], str(each["sequence"])
        self.names = {identity: text for text, identity in self.ids.items()}
        held = [each for _ in texts for each in self._received(api)]
        server.on_loop(server.shell.call(*(self._failing(*each) for each in held)))
        for _ in texts:
            self._received(api)

    def _received(self, api: Api) -> list[tuple[str, str]]:
        """A message is received by a client that is called as its text."""
        number = self.turn = getattr(self, "turn", -1) + 1
        text = list(self.ids)[number % len(self.ids)]
        agent = {"user-agent": re.sub(r"[^ -~]", "?", text).strip()}
        answer = api.client.post(f"{QUEUES}/orders/receive", json={"count": 1}, headers=agent)
        return [(self.names[each["id"]], each["handle"]) for each in answer.json()["messages"]]

    def _failing(self, text: str, handle: str) -> Extend:
        report = Report(Reported.RETRY, Failure(text[:100], text[:100]))
        origin = Origin("sqs", text[:200], text[:200])
        return Extend(queue=KEY, origin=origin, handle=handle, lease_us=0, arrived=Instant(0), report=report)


def _message(text: str) -> dict[str, Any]:
    attribute = {"name": text[:256], "type": "String", "value": text}
    return {"body": text, "type": text[:256], "group": text[:128], "attributes": [attribute]}


def pages(api: Api, visitor: Visitor, sent: Sent) -> dict[str, str]:
    """Every kind of page that shows something of these messages, in as few requests as will do."""
    found, number = {}, 0
    fields = visitor.fields("/console/", "/console/sign-out")
    for state in ("visible", "hidden"):
        path: str | None = f"{ORDERS}?state={state}"
        while path:
            found[f"{state} {number}"] = page = visitor.get(path).text
            number += 1
            following = re.search(r'href="([^"]*)" rel="next"', page)
            path = following[1].replace("&amp;", "&") if following else None
    for text, identity in sent.ids.items():
        found[f"message {text}"] = visitor.post(f"/console/messages/{identity}", data=fields).text
    for text in SOME:
        found[f"typed {text}"] = visitor.get(f"{ORDERS}/past", params={"at": text, "state": text}).text
    return found


def test_markup_from_a_queue_is_text_in_html_and_svg(server: Any, api: Api, visitor: Visitor) -> None:
    assert len(set(HOSTILE)) >= 200
    sent = Sent(server, api, [f"harmless {number}" for number in range(60)])
    harmless = {tag for page in pages(api, visitor, sent).values() for tag in tags(page).found} | {SVG_TEXT}
    api.client.delete(f"{QUEUES}/orders")
    sent = Sent(server, api, HOSTILE)
    offenders, shown = [], list[str]()
    for name, page in pages(api, visitor, sent).items():
        found = tags(page)
        kind, _, text = name.partition(" ")
        texts = "".join(found.text)
        if kind == "message" and texts.count(text) < 3:
            offenders.append((name, "its type, attribute and body are not all there"))
        strange = set(found.found) - harmless
        away = {each for each in found.targets if not re.match(r"[/?#](?!/)", each) and each}
        if strange or away:
            offenders.append((name, strange, away))
        shown += [texts] * (kind != "message") + found.values
    assert offenders == []
    whole = "\n".join(shown)
    assert [text for text in HOSTILE if text[:100] not in whole] == [], "lists show their types"


def test_groups_and_deduplication_ids_are_text(api: Api, visitor: Visitor) -> None:
    """On the page of a FIFO queue that stands still, and where messages are found by deduplication id."""

    def shown(name: str, texts: list[str]) -> dict[str, Any]:
        api.create(name, fifo=True)
        for text in texts:
            for number in range(2):
                api.send(name, "x", group=text[:128], deduplication_id=f"{text[:120]}-{number}")
        for text in texts:
            agent = {"user-agent": re.sub(r"[^ -~]", "?", text).strip()}
            api.client.post(f"{QUEUES}/{name}/receive", json={"lease_us": 3_600_000_000}, headers=agent)
        pages = {name: visitor.get(f"{CONSOLE}/{name}").text}
        return pages | {text: visitor.get("/console/find", params={"q": f"{text[:120]}-1"}).text for text in texts}

    harmless = {tag for page in shown("tame.fifo", ["harmless 1", "harmless-2"]).values() for tag in tags(page).found}
    offenders = []
    for name, page in shown("wild.fifo", [text for text in SOME if text.strip()][:10]).items():
        found = tags(page)
        away = {each for each in found.targets if not re.match(r"[/?#](?!/)", each) and each}
        if away or set(found.found) - harmless:
            offenders.append((name, away, set(found.found) - harmless))
    assert offenders == []


def test_a_body_is_saved_as_it_is(server: Any, api: Api, visitor: Visitor) -> None:
    sent = Sent(server, api, SOME)
    fields = visitor.fields("/console/", "/console/sign-out")
    wrong = []
    for text, identity in sent.ids.items():
        file = visitor.post(f"/console/messages/{identity}/download", data=fields | {"sequence": sent.sequences[text]})
        named = f'attachment; filename="message-{identity}.bin"'
        if file.content.decode() != text or file.headers["content-disposition"] != named:
            wrong.append(text)
    assert wrong == []


def test_files_hold_no_formula_and_no_lost_character(server: Any, api: Api, visitor: Visitor) -> None:
    sent, found = Sent(server, api, HOSTILE), set[str]()
    path: str | None = f"{ORDERS}/messages?state=hidden"
    while path:
        form = {name: visitor.get(f"{path}&form={name}") for name in ("csv", "json")}
        rows = msgspec.json.decode(form["json"].content)
        _check_csv(form["csv"].content.decode(), rows)
        for name, file in form.items():
            assert file.headers["content-disposition"] == f'attachment; filename="orders-messages.{name}"'
            assert file.headers["x-content-type-options"] == "nosniff"
        found |= {each["type"] for each in rows}
        page = visitor.get(path.replace("/messages", "")).text
        following = re.search(r'href="[^"]*after=([^"&#]*)[^"]*" rel="next"', page)
        path = f"{ORDERS}/messages?state=hidden&after={following[1]}" if following else None
    assert found == {text[:256] for text in sent.ids}


def _check_csv(text: str, rows: list[dict[str, Any]]) -> None:
    names, *cells = csv.reader(io.StringIO(text, newline=""))
    assert len(cells) == len(rows)
    for row, line in zip(rows, cells, strict=True):
        for name, cell in zip(names, line, strict=True):
            value = row.get(name)
            if not isinstance(value, str):
                continue
            assert cell in (value, f"'{value}"), value
            assert not cell.startswith(
                ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
            ), value


def test_no_name_in_an_address_gets_into_a_header_or_a_page(api: Api, visitor: Visitor) -> None:
    api.create("orders")
    harmless = {tag for tag, _ in tags(visitor.get("/console/none").text).found}
    harmless |= {tag for tag, _ in tags(visitor.get("/console/queues/1/2/3").text).found}
    harmless |= {tag for tag, _ in tags(visitor.get("/console/sign-in").text).found}
    wrong = []
    for text in HOSTILE:
        given = quote(text, safe="").replace(".", "%2E")
        paths = (
            f"{CONSOLE}/{given}/messages?form=csv", f"/console/messages/{given}", f"/console/topics/1/r/{given}",
            f"/console/jobs/{given}", f"{ORDERS}/messages?form={given}", f"/console/sign-in?next={given}&code={given}",
        )  # fmt: skip
        for path in paths:
            answer = visitor.get(path)
            kept = [value for name, value in answer.headers.items() if name != "location" and "evil" in value.lower()]
            strange = (
                {tag for tag, _ in tags(answer.text).found} - harmless
                if "html" in answer.headers["content-type"]
                else set()
            )
            if "x-evil" in answer.headers or kept or strange or answer.status_code >= 500:
                wrong.append((path, answer.status_code, kept, strange))
    assert wrong == []
