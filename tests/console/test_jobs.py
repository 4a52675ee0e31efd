"""Jobs: what matches is counted first, then done, once; progress, end, and who may."""

import re
import time
from pathlib import Path
from typing import Any

from tests.admin import server as admin
from tests.console.conftest import CONSOLE, QUEUES, Api, Visitor, hidden
from tests.console.test_pages import plain

from veilmq.model.settings.access import AccessKey, Action, Grant

ORDERS = f"{CONSOLE}/orders"
WAIT_S = 20


def ended(visitor: Visitor, path: str) -> str:
    """The page of a job that has ended."""
    until = time.monotonic() + WAIT_S
    while True:
        page = visitor.get(path)
        assert page.status_code == 200, page.text
        if ">running<" not in page.text:
            return page.text
        assert time.monotonic() < until
        time.sleep(0.05)


def begun(visitor: Visitor, **fields: str) -> str:
    answer = visitor.submit(f"{ORDERS}/job", **fields)
    assert answer.status_code == 303, answer.text
    return answer.headers["location"].partition("?")[0]


def test_what_matches_is_counted_and_then_deleted_once(api: Api, visitor: Visitor) -> None:
    api.create("orders")
    for number in range(12):
        api.send("orders", type="bad" if number % 3 else "good <b>")
    api.later(61)
    form = visitor.get(f"{ORDERS}/job?type=bad&age_us_min=60000000").text
    words = "All messages of orders that are visible with type bad , age over 1 min . They are counted first"
    assert words in plain(form)
    fields = hidden(form, f"{ORDERS}/job")
    page = ended(visitor, visitor.post(f"{ORDERS}/job", data=fields | {"act": "delete"}).headers["location"])
    assert "Counting" not in page, "it has ended"
    assert "8 messages of orders matched, of 12 that were looked at." in plain(page)
    assert "only those with type bad, age over 1 min began" in plain(page), "a count has no rate"
    assert "Delete 8 messages" in plain(page)
    assert "deleted" not in api.kinds()
    confirmed = hidden(page, f"{ORDERS}/job")
    answers = [visitor.post(f"{ORDERS}/job", data=confirmed) for _ in range(2)]
    done = {answer.headers["location"] for answer in answers}
    assert len(done) == 1
    page = ended(visitor, done.pop().partition("?")[0])
    assert re.search(r'data-live="done">8<', page)
    assert "rate 500 a second at most" in plain(page)
    fast = ended(visitor, begun(visitor, act="delete", rate="10000"))
    assert "rate 10 000 a second at most" in plain(fast)
    assert api.kinds().count("deleted") == 8
    listed = plain(visitor.get("/console/jobs").text)
    assert "delete counts only orders completed 8 0 12 admin" in listed
    assert "delete orders completed 8 0 12 admin" in listed
    assert "delete orders completed" in plain(visitor.get(ORDERS).text)


def test_of_messages_in_flight_only_a_release_is_offered(api: Api, visitor: Visitor) -> None:
    """A job that deletes would spare what the list shows, and delete what it does not show. And a redrive is offered
    only on a dead-letter queue: elsewhere it is refused."""
    api.create("orders")
    api.send("orders")
    api.act("orders", "receive")
    visible = ["delete", "move"]
    for state, acts in (("hidden", ["release"]), ("visible", visible), ("visible", [*visible, "redrive"])):
        if "redrive" in acts:
            api.create("work", redrive={"target": "orders", "receive_count_max": 2})
        assert (f'href="{ORDERS}/move"' in visitor.get(ORDERS).text) is ("redrive" in acts)
        form = visitor.get(f"{ORDERS}/job?state={state}").text
        assert re.findall(r'name="act" value="(\w+)"', form) == acts
        asks = {1: None, 2: "Queue to move to", 3: "Queue to move or redrive to"}[len(acts)]
        assert ('name="destination"' in form, "Queue to" in form) == (bool(asks), bool(asks))
        assert asks is None or f"{asks} <input" in form
        wrong = visitor.post(f"{ORDERS}/job", data=hidden(form, f"{ORDERS}/job") | {"act": acts[0], "rate": "fast"})
        assert re.findall(r'name="act" value="(\w+)"', wrong.text) == acts, "nor after a mistake"


def test_a_job_shows_its_progress_and_ends(api: Api, visitor: Visitor) -> None:
    api.create("orders")
    api.create("others")
    for _ in range(30):
        api.send("orders")
    path = begun(visitor, act="move", destination="others", rate="1", confirmed="yes")
    cells = visitor.get(f"{path}/news", headers={"accept": "application/json"}).json()["cells"]
    assert (cells["status"], cells["total"]) == ("running", "30")
    answer = visitor.submit(path, f"{path}/cancel")
    assert "The job ends" in visitor.get(answer.headers["location"]).text
    late = visitor.fields("/console/", "/console/sign-out")
    assert visitor.post(f"{path}/cancel", data=late).status_code in {303, 400}


def test_what_is_wrong_in_a_job_is_said_in_its_form(api: Api, visitor: Visitor) -> None:
    api.create("orders")
    for fields in ({"act": "nothing"}, {"act": "delete", "rate": "fast"}, {"act": "move", "destination": "none"}):
        answer = visitor.submit(f"{ORDERS}/job", type="kept <i>", **fields)
        assert answer.status_code in {400, 404}
        assert 'role="alert"' in answer.text
        assert "kept &lt;i&gt;" in answer.text
    assert visitor.get("/console/jobs/none").status_code in {400, 404}


def test_who_holds_messages_and_who_waits(api: Api, visitor: Visitor) -> None:
    api.create("orders")
    message = api.send("orders")
    agent = {"user-agent": "veilmq/0.1 (pay-<1>; pid 7)"}
    api.client.post(f"{QUEUES}/orders/receive", json={}, headers=agent)
    text = plain(visitor.get(ORDERS).text)
    holder = text.partition("Who holds it, who waits")[2].partition(message)[2]
    assert holder.startswith(" pay-<1>; pid 7 admin "), holder[:80]
    assert "0 receives wait for messages" in text


def test_a_job_needs_the_right_to_what_it_does(tmp_path: Path) -> None:
    looks = frozenset({Action.LIST_QUEUES, Action.DESCRIBE_QUEUE, Action.PEEK, Action.CREATE_QUEUE})
    key = AccessKey("AKL", "l-secret", "000000000000", grants=(Grant(looks),))
    with admin.running(tmp_path / "data", admin.Keys(key)) as server, Visitor(server) as visitor:
        api: Any = Api(server)
        api.create("orders")
        visitor.sign_in(key="AKL", secret="l-secret")
        assert "Act on all that match" not in visitor.get(ORDERS).text
        assert visitor.submit(f"{ORDERS}/job", act="delete", confirmed="yes").status_code == 403
        api.client.close()


def test_a_redrive_is_counted_before_it_begins(api: Api, visitor: Visitor) -> None:
    api.create("dead")
    api.create("orders", redrive={"target": "dead", "receive_count_max": 2})
    for _ in range(3):
        api.send("dead")
    refused = visitor.submit(f"{ORDERS}/move", f"{ORDERS}/job")
    assert refused.status_code == 400
    assert "it is nobody's dead-letter queue" in plain(refused.text)
    form = f"{CONSOLE}/dead/job"
    answer = visitor.submit(f"{CONSOLE}/dead/move", form, destination="orders", rate="1")
    path = answer.headers["location"].partition("?")[0]
    page = ended(visitor, path)
    assert "Redrive 3 messages" in plain(page)
    assert api.client.get(f"{QUEUES}/dead").json()["counts"]["visible"] == 3, "nothing has changed"
    assert visitor.get(f"{path}/news").json()["over"] is True, "an open page is loaded again"
    real = visitor.post(form, data=hidden(page, form)).headers["location"].partition("?")[0]
    running = visitor.get(real).text
    assert '<noscript><meta http-equiv="refresh"' in running
    assert visitor.get(f"{real}/news").json()["over"] is False
    answer = visitor.submit(real, f"{real}/cancel")
    assert "The job ends" in visitor.get(answer.headers["location"]).text
