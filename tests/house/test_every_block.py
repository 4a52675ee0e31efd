"""Every code block of every page is run by a test, or the table here says why not.

Strategy: a row of the table is a page (or a pattern of pages) and a language. It names the test that runs such blocks
there, or the reason why nothing does. A new block that no row covers fails, and so does a row that covers none.
Indented blocks are commands and output for people: the commands in them are held against the application by
test_commands_on_pages.py, and they are not run, because they serve, need root, or need another machine.
"""

from fnmatch import fnmatch
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DATA = {"", "text", "json", "xml", "http"}
"""What a block shows or prints, and no program."""
RUN = {
    ("README.md", "bash|python"): "tests/house/test_readme.py",
    ("docs/azure.md", "python"): "tests/house/test_protocol_pages.py",
    ("docs/checking.md", "bash|python"): "tests/checking/test_page.py",
    ("docs/client.md", "python"): "tests/house/test_protocol_pages.py",
    ("docs/concepts.md", "python"): "tests/house/test_quick_start.py",
    ("docs/deploy.md", "toml"): "tests/house/test_deploy_page.py",
    ("docs/migrate/*.md", "bash|python"): "tests/house/test_migrate_pages.py",
    ("docs/mns.md", "python"): "tests/house/test_protocol_pages.py",
    ("docs/observability.md", "python"): "tests/house/test_protocol_pages.py",
    ("docs/patterns/adaptive-timeout.md", "python"): "tests/client/test_queue_pattern_pages.py",
    ("docs/patterns/checkpoint.md", "python"): "tests/client/test_worker_pages.py",
    ("docs/patterns/encrypted-queue.md", "bash|python"): "tests/client/test_queue_pattern_pages.py",
    ("docs/patterns/large-messages.md", "python"): "tests/client/test_queue_pattern_pages.py",
    ("docs/patterns/lease-keeper.md", "python"): "tests/client/test_keeper_pages.py",
    ("docs/patterns/o*.md", "python"): "tests/client/test_ordered_pages.py",
    ("docs/patterns/pull-topic.md", "python"): "tests/client/test_queue_pattern_pages.py",
    ("docs/patterns/receiver.md", "python"): "tests/client/test_keeper_pages.py",
    ("docs/patterns/routed-queue.md", "python"): "tests/client/test_queue_pattern_pages.py",
    ("docs/patterns/transaction-queue.md", "python"): "tests/client/test_ordered_pages.py",
    ("docs/patterns/worker.md", "python"): "tests/client/test_worker_pages.py",
    ("docs/pipeline*.md", "python"): "tests/pipeline/test_pages.py",
    ("docs/quick-start.md", "bash|js|python"): "tests/house/test_quick_start.py",
    ("docs/sqs.md", "python"): "tests/house/test_protocol_pages.py",
    ("docs/testing.md", "python"): "tests/client/test_testing_page.py",
}
NOT_RUN = {
    ("docs/checking.md", "sh"): "it restarts a server of a service manager",
    ("docs/deploy.md", "nginx"): "tests/clients/test_behind_a_proxy.py has a proxy of its own",
    ("docs/migrate/frameworks.md", "*"): "settings of frameworks in other languages, marked there as not tried",
    ("docs/operations.md", "yaml"): "a fragment of prometheus.yml; the alarms are files that promtool loads",
}


def blocks() -> set[tuple[str, str]]:
    """(page, language) of all fenced blocks that are programs or settings."""
    found = set()
    for page in PAGES:
        for token in MarkdownIt().parse(page.read_text()):
            language = token.info.split(" ")[0]
            if token.type == "fence" and language not in DATA:
                found.add((page.relative_to(ROOT).as_posix(), language))
    return found


def covers(row: tuple[str, str], block: tuple[str, str]) -> bool:
    return fnmatch(block[0], row[0]) and any(fnmatch(block[1], each) for each in row[1].split("|"))


def test_every_block_is_run_or_marked() -> None:
    every = blocks()
    assert len(every) > 30
    assert sorted(block for block in every if not any(covers(row, block) for row in [*RUN, *NOT_RUN])) == []


def test_every_row_covers_a_block_and_names_a_test_that_knows_the_page() -> None:
    every = blocks()
    assert [row for row in [*RUN, *NOT_RUN] if not any(covers(row, block) for block in every)] == []
    for (pattern, _), test in RUN.items():
        text = (ROOT / test).read_text()
        for page in {page for page, _ in every if fnmatch(page, pattern)}:
            names = (Path(page).stem, '"migrate"' if "/migrate/" in page else f"{Path(page).stem}.md")
            assert any(name in text for name in names), f"{test} does not name {page}"
