"""Rounds against a data directory in this process."""

import contextlib
import io
import threading
from pathlib import Path

import pytest

from veilmq.checking import check
from veilmq.checking.log import Kind, Outcome, decoded
from veilmq.checking.report import Promises, Rule, promises_in
from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.errors import TransportError
from veilmq.client.messages import Message, Sent
from veilmq.client.wrapping import Wrapping
from veilmq.driver import Plan, Run
from veilmq.driver.recorded import Recorded, Recording


class Cut(Wrapping):
    """Nobody knows what became of a send."""

    def send(self, message: str | Message) -> Sent:
        raise TransportError(reason="cut", may_have_happened=True)


@pytest.mark.slow
def test_rounds_share_a_queue_and_a_log(tmp_path: Path) -> None:
    """A message that comes in a later round is one that nobody sent, unless an earlier send of it had no answer."""
    file = io.BytesIO()
    plan = Plan(url=f"veil://{tmp_path}/data?create=1", name="jobs", clients=2, seed=3, interval=0.01)
    file.write(Promises().head())
    recording = Recording(file)
    run = Run(plan, Promises(), recording)
    run.open()
    with EmbeddedAccount(tmp_path / "data") as account:

        def cut(stop: threading.Event) -> None:
            with contextlib.suppress(TransportError):
                Recorded(Cut(account.queue("jobs")), recording).send("late")

        def smuggle(stop: threading.Event) -> None:
            account.queue("jobs").send_batch(["late", "from elsewhere"])

        run.round(1, cut)
        assert run.figures.clean, str(run.figures.report)
        run.round(1, smuggle)
        run.close()
        assert account.names() == []
    assert dict(run.figures.report.counts) == {Rule.INVENTED: 1}
    assert run.figures.rounds == 2
    assert run.figures.outcomes[Kind.SEND, Outcome.OK] > 10
    lines = file.getvalue().splitlines(keepends=True)
    assert promises_in(lines[0]) == Promises()
    assert dict(check(decoded(lines)).counts) == {Rule.INVENTED: 1}
