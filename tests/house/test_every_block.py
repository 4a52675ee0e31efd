"""Every code block of every page is run by a test, or the table here says why not.

Strategy: a row of the table is a page (or a pattern of pages) and a language. It names the test that runs such blocks
there, or the reason why nothing does. A new block that no row covers fails, and so does a row that covers none.
Indented blocks are commands and output for people: test_commands_on_pages.py holds every `veilmq ...` in them against
the application, and a table says for each page whether a test types them, or why none does.
"""

import re
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
    ("docs/checking.md", "bash|python|sh"): "tests/checking/test_page.py",
    ("docs/client.md", "python"): "tests/house/test_protocol_pages.py",
    ("docs/concepts.md", "python"): "tests/house/test_quick_start.py",
    ("docs/deploy.md", "toml"): "tests/house/test_deploy_page.py",
    ("docs/migrate/*.md", "bash|python"): "tests/house/test_migrate_pages.py",
    ("docs/migrate/frameworks.md", "js"): "tests/clients/test_sqs_workers.py",
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
    ("docs/quick-start.md", "bash|js|php|python"): "tests/house/test_quick_start.py",
    ("docs/sqs.md", "python"): "tests/house/test_protocol_pages.py",
    ("docs/testing.md", "python"): "tests/client/test_testing_page.py",
}
NOT_RUN = {
    ("docs/deploy.md", "nginx"): "tests/clients/test_behind_a_proxy.py has a proxy of its own",
    ("docs/migrate/frameworks.md", "*"): "settings of frameworks in other languages, marked there as not tried",
    (
        "docs/quick-start.md",
        "go",
    ): "run by hand with Go 1.24 and Debian 13's SDK (2026-12-01); no machine of the tests has Go",
    ("docs/operations.md", "yaml"): "a fragment of prometheus.yml; the alarms are files that promtool loads",
}

INDENTED = {
    "docs/azure.md": "a connection string; an identity provider: tests/clients/test_azure_accounts.py; a benchmark",
    "docs/cli.md": "run in order by tests/house/test_commands_on_pages.py",
    "docs/cluster-runbooks.md": "typed in order by tests/cluster/test_runbooks.py",
    "docs/cluster.md": "servers of several machines: the same commands are in tests/cluster/test_runbooks.py",
    "docs/console.md": "a browser, and a domain of one's own: tests/console has a server and Chromium of its own",
    "docs/deploy.md": "the certificates by tests/house/test_deploy_page.py, which holds the installation against the "
    "script that `make first-hour` runs as root; others need systemd, a compiler or a container engine",
    "docs/migrate/README.md": "other services: tests/cli/test_bridge.py, tests/cli/test_import.py",
    "docs/migrate/a*.md": "Amazon, Azure, or an Azurite that runs: tests/cli/test_bridge.py, tests/cli/test_import.py",
    "docs/migrate/elasticmq.md": "an ElasticMQ that runs; its file: tests/cli/test_elasticmq.py",
    "docs/migrate/frameworks.md": "a variable of Symfony, marked there as not tried",
    "docs/migrate/localstack.md": "a LocalStack that runs: tests/cli/test_import.py has our own port in its place",
    "docs/migrate/mns.md": "Alibaba Cloud: tests/cli/test_bridge.py",
    "docs/migrate/pgmq.md": "a PostgreSQL with pgmq; the next block sends what it would print",
    "docs/migrate/rabbitmq-celery.md": "a RabbitMQ: `make rabbitmq`",
    "docs/mns.md": "curl at the default port: tests/protocols/mns/test_messages.py sends the same requests",
    "docs/observability.md": "run in order by tests/house/test_commands_on_pages.py, but for an OTLP collector",
    "docs/operations.md": "run in order by tests/house/test_commands_on_pages.py, but for what root does, and for "
    "clusters and archives: tests/cluster/test_runbooks.py, tests/faults/test_archive_kills.py",
    "docs/patterns/ordered-queue.md": "a fragment: `...` stands for the receiver before it",
    "docs/patterns/pull-topic.md": "one line of a handler of errors",
    "docs/patterns/worker.md": "a picture, a line of Python, and a module of the reader's: tests/cli/test_work.py",
    "docs/performance.md": "benchmarks of minutes to an hour, on a quiet machine",
    "docs/pipeline-demo.md": "some minutes of Spark: tests/pipeline/test_demo.py has a short one",
    "docs/pipeline.md": "plans in order by tests/house/test_commands_on_pages.py; Spark: tests/pipeline",
    "docs/quick-start.md": "servers: tests/house/test_readme.py starts the same",
    "docs/releases.md": "it cuts a release, with a commit and a tag; wheel and sources: tests/house/test_packaging.py",
    "docs/reliability.md": "suites of half an hour and more",
    "docs/veil-protocol.md": "a grammar",
    "docs/which-timeout.md": "a picture",
}
"""Whether the indented blocks of a page are typed by a test, and why not."""


def blocks() -> set[tuple[str, str]]:
    """(page, language) of all fenced blocks that are programs or settings."""
    found = set()
    for page in PAGES:
        for token in MarkdownIt().parse(page.read_text()):
            language = token.info.split(" ")[0]
            if token.type == "fence" and language not in DATA:
                found.add((page.relative_to(ROOT).as_posix(), language))
    return found


def indented() -> set[str]:
    """The pages that have indented blocks."""
    return {
        page.relative_to(ROOT).as_posix()
        for page in PAGES
        if any(token.type == "code_block" for token in MarkdownIt().parse(page.read_text()))
    }


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


def test_every_page_with_indented_blocks_says_who_types_them_and_the_tests_that_it_names_are_there() -> None:
    pages = indented()
    assert sorted(page for page in pages if not any(fnmatch(page, row) for row in INDENTED)) == []
    assert [row for row in INDENTED if not any(fnmatch(page, row) for page in pages)] == []
    named = {word for why in INDENTED.values() for word in re.findall(r"tests/[a-z_/]+(?:\.py)?", why)}
    assert sorted(name for name in named if not (ROOT / name).exists()) == []
