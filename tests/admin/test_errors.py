"""The table of errors is total, and every answer has the one form."""

from http import HTTPStatus

import pytest

from veilmq.admin.errors import STATUS, described
from veilmq.model.errors import ParameterInvalid, VeilError, leaves

LEAVES = [leaf for leaf in leaves() if leaf.__module__ == "veilmq.model.errors"]


def test_every_error_has_a_status() -> None:
    assert set(STATUS) == set(LEAVES)


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.__name__)
def test_every_error_can_be_described(leaf: type[VeilError]) -> None:
    error = leaf(**{name: 7 if leaf.__annotations__[name] is int else "x" for name in leaf.fields})
    shown = described(error)
    assert shown["error"] == leaf.__name__
    assert shown["message"]
    assert set(shown["data"]) == set(leaf.fields)
    assert HTTPStatus(STATUS[leaf]) >= 400


def test_a_parameter_is_named() -> None:
    assert described(ParameterInvalid(parameter="delay_us", reason="too long"))["field"] == "delay_us"
