"""The table of errors is total, and every answer has the one form."""

import re
from enum import StrEnum
from http import HTTPStatus
from pathlib import Path
from typing import get_args

import httpx
import msgspec
import pytest

from veilmq.admin import app
from veilmq.admin.api import STATUS, described, inputs
from veilmq.model.errors import ParameterInvalid, VeilError, leaves
from veilmq.model.instant import DAY_US, SECOND_US
from veilmq.model.settings.queue import TYPES_MAX
from veilmq.testing.for_each import for_each

LEAVES = [leaf for leaf in leaves() if leaf.__module__ == "veilmq.model.errors"]


def test_every_error_has_a_status() -> None:
    assert set(STATUS) == set(LEAVES)


@for_each("leaf", LEAVES, ids=lambda leaf: leaf.__name__)
def test_every_error_can_be_described(leaf: type[VeilError]) -> None:
    error = leaf(**{name: 7 if leaf.__annotations__[name] is int else "x" for name in leaf.fields})
    shown = described(error)
    assert shown["error"] == leaf.__name__
    assert shown["message"]
    assert set(shown["data"]) == set(leaf.fields)
    assert HTTPStatus(STATUS[leaf]) >= 400


def test_a_parameter_is_named() -> None:
    assert described(ParameterInvalid(parameter="delay_us", reason="too long"))["field"] == "delay_us"


@for_each(
    ("method", "path", "headers", "status", "error"),
    [
        ("GET", "/api/v1/nothing", {}, 404, "not_found"),
        ("DELETE", "/api/v1/clock", {}, 405, "method_not_allowed"),
        ("GET", "/api/v1/clock", {"Authorization": "Bearer no"}, 401, "not_authenticated"),
        ("GET", "/api/v1/clock", {"Origin": "http://page.example"}, 403, "origin_refused"),
        ("GET", "/api/v1/queues?limit=0", {}, 400, "ParameterInvalid"),
        ("GET", "/api/v1/queues/000000000000/us-east-1/none", {}, 404, "QueueMissing"),
        ("GET", "/api/v1/queues/", {}, 404, "not_found"),
        ("GET", "/health/ready/", {}, 404, "not_found"),
        ("PUT", "/api/v1/queues/000000000000/us-east-1/new/", {}, 404, "not_found"),
    ],
)
def test_every_refusal_has_the_members_of_the_page(
    shared: httpx.Client, method: str, path: str, headers: dict[str, str], status: int, error: str
) -> None:
    answer = shared.request(method, path, headers=headers)
    assert (answer.status_code, answer.json()["error"]) == (status, error)
    assert set(answer.json()) == {"error", "field", "message", "data", "request_id"}


@for_each(
    ("method", "path", "allowed"),
    [
        ("PUT", "/health/live", "GET HEAD"),
        ("PUT", "/api/v1/clock", "GET HEAD POST"),
        ("POST", "/api/v1/queues/000000000000/us-east-1/orders", "GET HEAD PUT PATCH DELETE"),
        ("DELETE", "/api/v1/queues/000000000000/us-east-1/orders/messages", "GET HEAD POST"),
        ("PATCH", "/api/v1/topics/000000000000/us-east-1/news", "GET HEAD DELETE"),
    ],
)
def test_a_wrong_method_is_told_the_right_ones(shared: httpx.Client, method: str, path: str, allowed: str) -> None:
    answer = shared.request(method, path)
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == set(allowed.split())


@for_each(
    ("shape", "members", "said"),
    [
        (inputs.KeyInput, {"account": "1", "region": "r", "name": "a"}, "account: Expected 12 digits"),
        (inputs.KeyInput, {"account": "1" * 12, "region": "R", "name": "a"}, "region: Expected 1 to 64 lower-case"),
        (inputs.KeyInput, {"account": "1" * 12, "region": "r", "name": "a b"}, "name: Expected 1 to 256 letters"),
        (inputs.ListInput, {"account": "all"}, "account: Expected 12 digits, or `*`"),
        (inputs.PageInput, {"state": "gone"}, "state: Expected visible or hidden"),
        (inputs.PageInput, {"after": "x"}, "after: Expected what the page before gave"),
        (inputs.MovesInput, {"after": "x"}, "after: Expected what the page before gave"),
        (inputs.EventsInput, {"from": "-1"}, "from: Expected an offset, first, next or snapshot"),
        (
            inputs.ChangeInput,
            {"redrive_allow": {"permission": "by_queue"}},
            "redrive_allow.permission: Invalid enum value 'by_queue': expected one of allowAll, denyAll, byQueue",
        ),
        (
            inputs.SendInput,
            {"messages": [{"body": "x", "attributes": [{"name": "a", "type": "Word", "value": "x"}]}]},
            "messages[0].attributes[0].type: Expected String, Number or Binary",
        ),
    ],
)
def test_a_pattern_is_told_in_words(shape: type[msgspec.Struct], members: dict[str, object], said: str) -> None:
    with pytest.raises(ParameterInvalid) as refused:
        inputs.convert(members, shape)
    assert str(refused.value).startswith(said)


@for_each(
    ("shape", "members", "said"),
    [
        (inputs.ChangeInput, {"visibility_timeout_us": 30 * DAY_US}, "Expected at most 7d (604800000000 microseconds)"),
        (inputs.ChangeInput, {"retention_us": 5}, "Expected at least 1m (60000000 microseconds)"),
        (inputs.ReceiveInput, {"wait_us": 60_000_000}, "Expected at most 30s (30000000 microseconds)"),
        (inputs.ReceiveInput, {"wait_us": -1}, "Expected at least 0"),
        (app.ClockInput, {"advance_us": 0}, "Expected at least 1 microseconds"),
        (inputs.ReceiveInput, {"count": 1_000}, "Expected at most 100"),
        (inputs.EventsInput, {"follow": "70"}, "Expected at most 60"),
    ],
)
def test_a_bound_is_told_in_words(shape: type[msgspec.Struct], members: dict[str, object], said: str) -> None:
    with pytest.raises(ParameterInvalid) as refused:
        inputs.convert(members, shape)
    assert refused.value.reason == said


def test_a_plan_names_a_bounded_number_of_types() -> None:
    most = {"x" * 256: SECOND_US} | {str(number): SECOND_US for number in range(TYPES_MAX - 1)}
    assert len(inputs.convert({"by_type": most}, inputs.PlanInput).by_type) == TYPES_MAX
    for beyond in (most | {"one": SECOND_US}, {"x" * 257: SECOND_US}):
        with pytest.raises(ParameterInvalid):
            inputs.convert({"by_type": beyond}, inputs.PlanInput)


def test_a_queue_of_any_region_that_sqs_takes_can_be_named() -> None:
    region = "r" * 64
    assert inputs.queue_key("1" * 12, region, "a").region == region


def test_the_log_says_which_member_is_wrong(shared: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "veilmq.admin"):
        shared.get("/api/v1/queues?limit=0")
    assert "400 ParameterInvalid: limit: Expected at least 1" in caplog.text


def test_every_choice_is_told() -> None:
    for member, choices in inputs.ENUMS.items():
        shape = {"permission": inputs.RedriveAllowInput, "act": inputs.JobInput}.get(member, inputs.ChangeInput)
        with pytest.raises(ParameterInvalid, match=", ".join(choices)):
            inputs.convert({member: "none of them"}, shape)
    found = {
        field.name
        for shape in vars(inputs).values()
        if isinstance(shape, type) and issubclass(shape, msgspec.Struct)
        for field in msgspec.structs.fields(shape)
        for kind in (field.type, *get_args(field.type))
        if isinstance(kind, type) and issubclass(kind, StrEnum)
    }
    assert found == set(inputs.ENUMS)


def test_every_pattern_has_words() -> None:
    source = Path(inputs.__file__).read_text()
    assert len(inputs.WORDS) == len(set(re.findall(r"Meta\(pattern=(\w+)", source)))
    assert "Meta(pattern=r" not in source
