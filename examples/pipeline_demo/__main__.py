"""How long should a lease be? Six kinds of work in one queue, the pipeline's answer, and what it changes.

    make pipeline-demo

Strategy: a server of its own, a queue with one timeout for everything, and work whose laws are known (laws.py), done on
the server's movable clock (work.py). The pipeline reads what the server wrote down and knows nothing else; what it
recommends is printed beside the best for the truth, put in force by the owner's leave, and the same work is done again.
"""

import argparse
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from laws import KINDS
from shown import beside_the_truth, drawing, outcome
from truth import COSTS, Found, found_of
from work import RECEIVES_MAX, Measured, Shift

import veilmq
from veilmq.client.messages import Template
from veilmq.pipeline.events.reading import ServerHistory
from veilmq.pipeline.publish import publish
from veilmq.pipeline.publish.plans import floors, plans_of
from veilmq.pipeline.report import Analysis, page
from veilmq.pipeline.session import session
from veilmq.testing.local import LocalServer

DEAD: Final = "dead"
QUEUE: Final = ("000000000000", "us-east-1", "work")
TODAY_S: Final = 180
SHORTEST_S: Final = 1
"""The owner's minimum: without one, plans only lengthen."""
_S: Final = 1_000_000


def main() -> int:
    """The exit code: 1 if the plan did not reach the goal that `outcome` prints."""
    wanted = arguments()
    wanted.out.mkdir(parents=True, exist_ok=True)
    with LocalServer.temporary() as server:
        server.connect(DEAD).close()
        template = Template(dead_letter_queue=DEAD, receive_count_max=RECEIVES_MAX)
        veilmq.connect(f"{server.queue_url(QUEUE[2])}?create=1", template=template).close()
        settings = {"visibility_timeout_us": TODAY_S * _S, "adaptive": "apply", "first_lease_min_us": SHORTEST_S * _S}
        ask(server, "PATCH", settings)
        print(f"{len(KINDS)} kinds of work, {wanted.messages} messages each, one queue, one timeout: {TODAY_S} s.")
        before = work(server, wanted)
        print(f"\nThe pipeline reads the history on {wanted.master}.", flush=True)
        found = learn(server, wanted)
        print(beside_the_truth(found))
        print(drawing(found, TODAY_S))
        print("\nThe same work again, under the plan.", flush=True)
        after = work(server, wanted)
    text, numbers = outcome(before, after)
    print(text)
    written = {"types": [each.numbers() for each in found], **numbers}
    (wanted.out / "numbers.json").write_text(json.dumps(written, indent=1) + "\n")
    print(f"Curves and numbers: {wanted.out / 'report.html'}, {wanted.out / 'numbers.json'}")
    return 0 if numbers["reached"] else 1


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="pipeline_demo", description="The pipeline on work whose truth is known.")
    parser.add_argument("--messages", type=int, default=150, help="of each of the six types (150)")
    parser.add_argument("--master", default="local[2]", help="where Spark runs (local[2])")
    parser.add_argument("--out", type=Path, default=Path("build/pipeline-demo"), help="for report.html, numbers.json")
    parser.add_argument("--seed", type=int, default=4, help="of the work (4)")
    return parser.parse_args()


def work(server: LocalServer, wanted: argparse.Namespace) -> Mapping[str, Measured]:
    """One shift, from an empty queue to an empty queue."""
    begun = time.perf_counter()
    with server.connect(QUEUE[2], create=False) as queue:
        shift = Shift(server, queue, KINDS, wanted.messages, wanted.seed)
        passed = shift.run()
    print(f"{passed / 60:.0f} minutes of work passed in {time.perf_counter() - begun:.0f} s.", flush=True)
    return shift.measured


def learn(server: LocalServer, wanted: argparse.Namespace) -> list[Found]:
    """Run the jobs, write the report, publish the plan; what was found of each type, and what is in force."""
    token = (server.process.data / "admin-token").read_text().strip()
    with tempfile.TemporaryDirectory(prefix="veilmq-") as scratch:
        settings = {
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": scratch,
            "spark.local.dir": scratch,
            # A short life is not worth the second compiler.
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
        }
        spark = session(wanted.master, name="pipeline-demo", settings=settings)
        try:
            events = spark.read.format("veilmq-events").options(server=server.admin_url, token=token).load().cache()
            analysis = Analysis(events, COSTS)
            rows = records(analysis.timeouts)
            least = {(row.account, row.region, row.queue): row.floor_us for row in floors(events).collect()}
            said = publish(plans_of(rows, least), server.admin_url, token)
            print(f"The server says: {said[QUEUE]}.")
            applied = ask(server, "GET")["plan"]["applied"]["by_type"]
            quantiles = records(analysis.quantiles)
            text = page(
                analysis,
                source=server.admin_url,
                offsets=tuple(ServerHistory(server.admin_url, token, None).bounds()),
                now=server.now,
            )
            (wanted.out / "report.html").write_text(text)
        finally:
            spark.stop()
    return found_of(KINDS, rows, quantiles, applied, TODAY_S)


def records(frame: Any) -> list[dict[str, Any]]:
    """The rows of a pandas frame; what is missing is None."""
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return [{str(name): value for name, value in row.items()} for row in rows]


def ask(server: LocalServer, method: str, members: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The queue, by the admin port."""
    token = (server.process.data / "admin-token").read_text().strip()
    request = urllib.request.Request(
        f"{server.admin_url}/api/v1/queues/{'/'.join(QUEUE)}",
        None if members is None else json.dumps(members).encode(),
        {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        method=method,
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


if __name__ == "__main__":
    sys.exit(main())
