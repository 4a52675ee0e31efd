"""What grants cover: as shell patterns do, and at the same cost for ten thousand of them as for one."""

from fnmatch import fnmatchcase

from hypothesis import given
from hypothesis import strategies as st

from veilmq.model.settings.access import EVERYTHING, AccessKey, Action, Grant, _names_of, names_of
from veilmq.testing.for_each import for_each

ACCOUNT = "111111111111"
PATTERNS = st.text("ab*?[]!-", min_size=1, max_size=5)
MANY = 10_000


def key(*grants: Grant) -> AccessKey:
    return AccessKey("AKEXAMPLE", "secret", ACCOUNT, grants=grants)


@given(st.lists(PATTERNS, max_size=5), st.text("ab[]!-\n", max_size=5))
def test_a_grant_covers_what_its_shell_patterns_match(patterns: list[str], name: str) -> None:
    asked = key(*(Grant(frozenset({Action.SEND}), (pattern,)) for pattern in patterns))
    assert asked.allows(Action.SEND, name) is any(fnmatchcase(name, pattern) for pattern in patterns)
    assert asked.allows(Action.SEND, None) is bool(patterns)
    assert not asked.allows(Action.RECEIVE, name)
    assert asked.patterns(Action.SEND) == (None if "*" in patterns else tuple(patterns))
    beginnings = names_of(tuple(patterns)).beginnings
    assert sum(name.startswith(each) for each in beginnings) == 1 or not asked.allows(Action.SEND, name)


def test_grants_add_up() -> None:
    asked = key(Grant(frozenset({Action.SEND}), ("a", "b*")), Grant(frozenset({Action.SEND, Action.PEEK}), ("c?",)))
    assert [name for name in ("a", "aa", "b", "bb", "c", "cc") if asked.allows(Action.SEND, name)] == [
        "a",
        "b",
        "bb",
        "cc",
    ]
    assert [name for name in ("a", "b", "cc") if asked.allows(Action.PEEK, name)] == ["cc"]
    assert AccessKey("k", "s", ACCOUNT, grants=EVERYTHING).allows(Action.SEND, "any")
    assert not AccessKey("k", "s", ACCOUNT).allows(Action.SEND, "any")


@for_each("pattern", ["queue-{}", "queue-{}-*"])
def test_many_grants_are_sorted_out_once_and_none_of_them_is_tried(pattern: str) -> None:
    asked = key(*(Grant(frozenset({Action.SEND}), (pattern.format(number),)) for number in range(MANY)))
    asked.allows(Action.SEND, "first")
    before = _names_of.cache_info()
    assert asked.allows(Action.SEND, f"queue-{MANY - 1}" + pattern[len("queue-{}") :].replace("*", "x"))
    assert not asked.allows(Action.SEND, f"queue-{MANY}")
    assert _names_of.cache_info() == before
    names = asked._names[Action.SEND]
    assert names._others is None
    assert len(names._lengths) <= len(str(MANY))
