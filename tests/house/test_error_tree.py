"""One tree of errors: who catches the model's class catches what the client raises under the same name."""

import re
from collections.abc import Iterator
from pathlib import Path

import veilmq.client.documents  # noqa: F401
from veilmq.client import errors as client
from veilmq.model import errors as model
from veilmq.model.errors import UsageError, VeilError


def below(root: type[VeilError]) -> Iterator[type[VeilError]]:
    for each in root.__subclasses__():
        yield each
        yield from below(each)


def test_two_errors_of_one_name_are_of_one_family() -> None:
    found: dict[str, type[VeilError]] = {}
    for each in below(VeilError):
        other = found.setdefault(each.__name__, each)
        assert issubclass(each, other) or issubclass(other, each), f"{each} and {other}"


def test_the_page_of_the_client_has_every_error() -> None:
    page = (Path(__file__).parents[2] / "docs" / "client.md").read_text()
    section = page.partition("\n## Errors\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"\b[A-Z]\w+", section))
    ours = {each.__name__ for each in below(VeilError) if each.__module__ in {client.__name__, model.__name__}}
    assert len(ours) > 40
    assert ours - named == set()


def test_the_names_of_topics_errors_are_in_both_places() -> None:
    assert client.TopicMissing is model.TopicMissing
    assert client.SubscriptionExists is model.SubscriptionExists
    exists = client.TopicExists(topic="news", reason="it is half made")
    assert isinstance(exists, model.TopicExists)
    assert isinstance(exists, UsageError)
    assert (exists.setting, str(exists)) == ("definition", "topic news exists: it is half made")
