"""Suites for an adapter that has several forms, side by side in one file of tests."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def in_forms(suites: Mapping[str, Sequence[type[Any]]]) -> dict[str, type[Any]]:
    """By name, the classes of all suites: each runs in the forms whose suite it is in.

    suites: by form. The fixture `client_account` finds its form in `request.param`.

        globals().update(in_forms({"plain": SUITE, "base64": SUITE_OF_ENCODINGS}))
    """
    classes = {cases: None for suite in suites.values() for cases in suite}
    return {
        cases.__name__: pytest.mark.parametrize(
            "client_account", [form for form, suite in suites.items() if cases in suite], indirect=True
        )(type(cases.__name__, (cases,), {"__doc__": cases.__doc__}))
        for cases in classes
    }
