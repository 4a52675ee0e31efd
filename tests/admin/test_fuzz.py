"""Anything may be asked of the admin port: it answers, with an error that names what is wrong, and is never broken."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from veilmq.admin.api import inputs, operations
from veilmq.admin.api.operations import OPERATIONS

QUEUE = "/api/v1/queues/000000000000/us-east-1/orders"
SHAPES = [operation.shape for operation in OPERATIONS.values()]
MEMBERS = sorted({name for shape in SHAPES for name in shape.__struct_fields__})
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["", "0", "orders"])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(MEMBERS), inner, max_size=4)
)
BODIES = st.dictionaries(st.sampled_from(MEMBERS) | st.text(max_size=8), VALUES, max_size=5) | VALUES
READS = ("/api/v1/queues", "/api/v1/events", "/api/v1/trace/x", "/api/v1/topics", "/api/v1/moves", f"{QUEUE}/messages")
QUERIES = st.dictionaries(
    st.sampled_from(["account", "region", "prefix", "after", "limit", "from", "follow", "scan", "state", "count"]),
    st.text(max_size=12) | st.sampled_from(["0", "-1", "1e9", "next", "*", "visible", "000000000000/us-east-1/"]),
    max_size=4,
)


@pytest.fixture
def place(shared: httpx.Client) -> httpx.Client:
    """One server for all that is asked, with a queue."""
    shared.put(QUEUE).raise_for_status()
    return shared


def explained(answer: httpx.Response) -> None:
    """Nothing failed inside, and what was refused says why."""
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        said = answer.json()
        assert said["error"]
        assert said["message"]


@pytest.mark.slow
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(sorted(OPERATIONS)), body=BODIES | st.binary(max_size=40), query=QUERIES)
def test_operations_on_a_queue(place: httpx.Client, name: str, body: Any, query: dict[str, str]) -> None:
    operation = OPERATIONS[name]
    if isinstance(body, dict):
        body = body | ({"wait_us": 0} if "wait_us" in body else {})  # nobody waits for a fuzzer
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    given_ = {} if operation.method == "GET" else {"content": content}
    explained(place.request(operation.method, QUEUE + operation.suffix, params=query, **given_))
    place.put(QUEUE)


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(READS) | st.text(max_size=30).map(lambda text: "/api/v1/" + text), query=QUERIES)
def test_everything_that_is_read(place: httpx.Client, path: str, query: dict[str, str]) -> None:
    try:
        request = place.build_request(
            "GET", path, params={name: each for name, each in query.items() if name != "follow"}
        )
    except httpx.InvalidURL:
        return
    explained(place.send(request))


def test_the_shapes_are_those_of_the_inputs() -> None:
    named = [*vars(inputs).values(), *vars(operations).values()]
    assert set(SHAPES) <= {each for each in named if isinstance(each, type)}
