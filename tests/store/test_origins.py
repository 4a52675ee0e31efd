"""How many distinct clients a store remembers, and what it records of more: restarts of workers do not use them up."""

import pytest
from tests.support.contract.stage import Stage, sending

from veilmq.model.commands import Origin
from veilmq.store.sqlite.disk import rows


def test_beyond_the_bounds_new_clients_lose_their_process_and_then_their_name(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "PROCESSES_MAX", 4)
    monkeypatch.setattr(rows, "ORIGINS_MAX", 6)
    queue = stage.create()
    start = stage.following()
    named = ["veilmq/1 (a; pid 1)", "veilmq/1 (a; pid 2)", "sdk", *(f"veilmq/1 (a; pid {pid})" for pid in range(3, 90))]
    for name in [*named, "veilmq/1 (b; pid 1)", "other", "veilmq/1 (c; pid 7)", "veilmq/1 (a; pid 1)"]:
        stage.batch([sending(queue, origin=Origin("veil", "k", name))])
    found = [event.client for event in stage.events(start)]
    assert found[:3] == named[:3]
    assert set(found[3:90]) == {"veilmq/1 (a)"}
    assert found[90:] == ["veilmq/1 (b)", "", "", "veilmq/1 (a; pid 1)"]
