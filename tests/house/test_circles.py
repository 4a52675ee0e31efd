"""Modules import each other in one direction.

Nowhere a circle at import time. In client, pipeline and protocols neither inside a function nor for the type checker
alone: there a circle hides that two files are one, or that what they share belongs into a third.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from veilmq.testing.for_each import for_each

SOURCE = Path(__file__).parents[2] / "src"
STRICT = ("veilmq.client", "veilmq.pipeline", "veilmq.protocols")
ROOT = "veilmq"
"""Has the version, and opens `connect` on demand: it is left out."""


def name_of(path: Path, source: Path) -> str:
    return ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def statements(body: list[ast.stmt], *, strict: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that count."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not strict:
            continue
        elif strict or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from statements(
                [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)], strict=strict
            )


def imported(path: Path, known: set[str], *, strict: bool) -> set[str]:
    found: set[str] = set()
    for node in statements(ast.parse(path.read_text()).body, strict=strict):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.module:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= members & known
            if members - known:
                found.add(node.module)
    return found & known


def circle(source: Path) -> list[str]:
    """Modules that import each other in a circle; none if there is none."""
    paths = {name_of(path, source): path for path in sorted(source.rglob("*.py"))}
    known = set(paths) - {ROOT}
    graph = {name: imported(paths[name], known - {name}, strict=name.startswith(STRICT)) for name in sorted(known)}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_there_is_no_circle_of_imports() -> None:
    assert circle(SOURCE) == []


@for_each(
    ("room", "text", "is_circle"),
    [
        ("client", "from veilmq.client.b import B", True),
        ("client", "if TYPE_CHECKING:\n    from veilmq.client.b import B", True),
        ("client", "class A:\n    def f(self):\n        if self:\n            import veilmq.client.b", True),
        ("server", "from veilmq.server import b", True),
        ("server", "try:\n    import veilmq.server.b\nexcept ImportError:\n    pass", True),
        ("server", "if TYPE_CHECKING:\n    from veilmq.server.b import B", False),
        ("server", "def f():\n    from veilmq.server.b import B", False),
    ],
)
def test_a_circle_is_found(room: str, text: str, is_circle: bool, tmp_path: Path) -> None:
    source = tmp_path / str(len(list(tmp_path.iterdir())))
    place = source / "veilmq" / room
    place.mkdir(parents=True)
    (place / "a.py").write_text(text)
    (place / "b.py").write_text(f"from veilmq.{room}.a import A")
    assert bool(circle(source)) is is_circle
