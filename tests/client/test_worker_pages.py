"""The code on the pages about workers, checkpoints and guards runs, against a real server."""

import asyncio
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from veilmq.client.messages import Message
from veilmq.client.worker import Worker
from veilmq.testing.local import LocalServer

pytestmark = pytest.mark.slow

PAGES = Path(__file__).parents[2] / "docs" / "patterns"


def code(page: str) -> list[str]:
    blocks = re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)
    assert blocks
    return blocks


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


def test_the_workers_page(veilmq_server: LocalServer) -> None:
    queue = veilmq_server.connect("images")
    queue.send_batch(["1.png 2.png", "3.png"])
    program, web = code("worker.md")
    url = ("veil://127.0.0.1:9324/images", veilmq_server.queue_url("images"))
    text = replaced(
        program,
        url,
        ("concurrency=8, prefetch=16)", "concurrency=8, prefetch=16, wait=0.2)"),
        (".run(signals=True)", ".run(until_empty=True)"),
    )
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "worker.md", "exec"), names)
    stats = queue.stats()
    assert (stats.visible, stats.in_flight) == (0, 0)

    resized = threading.Event()
    names["resize"] = lambda job: resized.set()
    exec(compile(replaced(web, url), "worker.md", "exec"), names)

    async def serve() -> bool:
        async with names["lifespan"](names["app"]):
            await asyncio.to_thread(queue.send, "4.png")
            return await asyncio.to_thread(resized.wait, 30)

    assert asyncio.run(serve())
    stats = queue.stats()
    assert (stats.visible, stats.in_flight) == (0, 0)


def test_the_workers_program_is_a_module_for_the_command(veilmq_server: LocalServer, tmp_path: Path) -> None:
    """As the page says: the same file, named as a module, and its worker at the top level does not run."""
    veilmq_server.connect("images").send_batch(["1.png 2.png", "3.png"])
    (tmp_path / "images.py").write_text(code("worker.md")[0])
    (command,) = re.findall(r"^    veilmq (work images:resize .*)$", (PAGES / "worker.md").read_text(), re.MULTILINE)
    words = replaced(command, ("veil://127.0.0.1:9324/images", veilmq_server.queue_url("images"))).split()
    veilmq = [sys.executable, "-c", "from veilmq.cli import main; main()", *words, "--until-empty", "--wait", "200ms"]
    done = subprocess.run(veilmq, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "received 2, done 2\n"), done.stderr


def test_a_module_that_starts_its_worker_when_it_is_imported_is_told(tmp_path: Path) -> None:
    program = code("worker.md")[0].replace('if __name__ == "__main__":\n    ', "")
    program = replaced(
        program,
        ("veil://127.0.0.1:9324/images", f"veil://{tmp_path}/data?queue=images&create=1"),
        ("concurrency=8, prefetch=16", 'kind="processes"'),
    )
    (tmp_path / "images.py").write_text(program)
    done = subprocess.run([sys.executable, "images.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert 'belongs below if __name__ == "__main__":' in done.stderr


def test_the_checkpoints_page(veilmq_server: LocalServer, tmp_path: Path) -> None:
    convert, guard = code("checkpoint.md")
    names: dict[str, Any] = {}
    exec(compile(convert, "checkpoint.md", "exec"), names)
    queue = veilmq_server.connect("pages")
    queue.send("book")
    assert Worker(queue, names["convert"], wait=0.2).run(until_empty=True).outcomes == {"done": 1}

    charged: list[str] = []
    queue.send_batch([Message("charge", attributes={"order": "7"})] * 2)
    names = {"queue": queue, "charge": lambda job: charged.append(job.body)}
    text = replaced(guard, ("/var/lib/shop/done", f"{tmp_path}/done"), ("guard_key=", "wait=0.2,\n    guard_key="))
    exec(compile(text, "checkpoint.md", "exec"), names)
    names["worker"].run(until_empty=True)
    assert charged == ["charge"]


def test_every_page_with_code_is_run_by_a_test() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*pages.py"))
    pages = {page.stem for page in PAGES.glob("*.md") if "```python" in page.read_text()}
    assert {page for page in pages if f'"{page}"' not in tests and f'"{page}.md"' not in tests} == set()
