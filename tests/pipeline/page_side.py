"""Runs the Python of the pipeline's two pages as a reader would, in a process of its own, and prints what came of it.

    page_side.py ROOT DATA HOST:PORT ADMIN_URL DIRECTORY METRICS_PORT

Strategy: every block of a page runs as it stands, from top to bottom, in one namespace, but that the server's ports are
the ones given and every place on disk is below DIRECTORY. What the blocks take for granted (a queue with messages,
exported events, a handler) is there before; what the page says of the block before is looked at after. The last line of
stdout is JSON.
"""

import contextlib
import io
import json
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

import veilmq
from veilmq.client.messages import Message
from veilmq.pipeline.events.export import export
from veilmq.pipeline.events.reading import ServerHistory

ORDERS = 250
WORKED = 40


class Page:
    """The `python` blocks of one page, run one by one in one namespace."""

    def __init__(self, path: Path, replaced: dict[str, str]) -> None:
        self.path = path
        self.text = path.read_text()
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.replaced = replaced
        fences = [each for each in MarkdownIt().parse(self.text) if each.type == "fence" and each.info == "python"]
        self._blocks = [((each.map or [0])[0] + 1, each.content) for each in fences]

    def left(self) -> int:
        """Blocks that did not run yet."""
        return len(self._blocks)

    def run(self) -> str:
        """The next block; what it printed."""
        line, code = self._blocks.pop(0)
        for old, new in self.replaced.items():
            code = code.replace(old, new)
        out = io.StringIO()
        # Errors bear the line of the page.
        compiled = compile("\n" * line + code, str(self.path), "exec")
        with contextlib.redirect_stdout(out):
            exec(compiled, self.names)
        return out.getvalue()


def handle(job: Any) -> None:
    """For `process`: executors get it by value."""
    assert job.body


def drain_page(page: Page, queue: Any, address: str, metrics_port: int) -> dict[str, Any]:
    """The blocks of pipeline-drain.md, in their order."""
    queue.send_batch([Message(body=f"order {number}", type="order") for number in range(ORDERS)])
    printed = page.run()
    spark = page.names["spark"]
    told: dict[str, Any] = {"drained": printed, "left": _left(queue)}
    told["rows"] = _delta(page, "orders").to_pandas()["id"].nunique()
    page.run()
    told["columns"] = page.names["frame"].columns
    page.run()
    told["many"] = page.names["many"].columns
    told["bad_records"] = page.run()
    page.run()
    told["sent"] = _left(queue)
    page.run()
    told["own"] = sorted(_delta(page, "own").to_pandas()["body"])
    queue.send_batch([f"work {number}" for number in range(WORKED)])
    with veilmq.connect(f"veil://{address}/orders-dead?create=1"):
        page.names["handle"] = handle
        told["processed"] = page.run()
    page.run()
    queue.send("one more")
    places = f"delta:{page.replaced['/tables']}/orders", f"{page.replaced['/var/lib']}/drain/orders"
    page.names["drain"](spark, f"veil://{address}/orders", *places, name="orders")
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=30) as answer:
        told["metrics"] = sorted(set(re.findall(r"^(veilmq_query_\w+)\{", answer.read().decode(), re.M)))
    return told


def pipeline_page(page: Page, queue: Any, events: Path, admin: str, token: str) -> dict[str, Any]:
    """The blocks of pipeline.md, in their order."""
    export(ServerHistory(admin, token, None), events)
    page.run()
    spark = page.names["spark"]
    told: dict[str, Any] = {"events": page.names["events"].count(), "columns": page.names["events"].columns}
    query = page.names["stream"].writeStream.format("memory").queryName("told").trigger(availableNow=True).start()
    query.awaitTermination()
    told["streamed"] = spark.table("told").count()
    told["timeouts"] = page.run()
    queue.send_batch([f"kept {number}" for number in range(3)])
    page.run()
    told["kept"] = page.names["keeper"].stats.registered
    return told


def _delta(page: Page, table: str) -> Any:
    from deltalake import DeltaTable

    return DeltaTable(f"{page.replaced['/tables']}/{table}")


def _left(queue: Any) -> int:
    stats = queue.stats()
    return stats.visible + (stats.delayed or 0) + (stats.in_flight or 0)


def main() -> None:
    root, data, address, admin, directory = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:5], Path(sys.argv[5])
    metrics_port = int(sys.argv[6])
    token = (data / "admin-token").read_text().strip()
    replaced = {
        "http://127.0.0.1:9325": admin,
        "127.0.0.1:9324": address,
        '"..."': repr(token),
        "/var/lib": str(directory / "lib"),
        "/tables": str(directory / "tables"),
        "9108": str(metrics_port),
    }
    drains, pipeline = (Page(root / "docs" / name, replaced) for name in ("pipeline-drain.md", "pipeline.md"))
    with veilmq.connect(f"veil://{address}/orders?create=1") as queue:
        told: dict[str, Any] = {"drain": drain_page(drains, queue, address, metrics_port)}
        told["pipeline"] = pipeline_page(pipeline, queue, directory / "lib" / "events", admin, token)
        told["unrun"] = drains.left() + pipeline.left()
    pipeline.names["spark"].stop()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
