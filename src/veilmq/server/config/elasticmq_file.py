"""Reads the queues that ElasticMQ's configuration declares: `queues { orders { delay = 5 seconds ... } }`.

Strategy: a small reader of the part of HOCON that such files use: objects, `=` and `:`, dotted and quoted keys, values
that end with the line, `#` and `//` comments. Other top-level objects (ports, storage) are skipped with a warning. Only
`aws` is read: it names the account and region; without it the region is `elasticmq`, which ElasticMQ's documentation
tells clients to sign with. An account id that is not twelve digits is an alias that clients may use in queue URLs.
References and lists are allowed in skipped objects and refused elsewhere, with the line; multi-line strings are refused
everywhere. Source: the specification of HOCON (lightbend/config); its sections are named where they apply.
"""

import json
import re
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from veilmq.server.auth import ACCOUNT_ID
from veilmq.server.config import FileInvalid

DEPTH_MAX: Final = 16
REGION_DEFAULT: Final = "elasticmq"
_ACCOUNT_ALIAS: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")

_TOKEN: Final = re.compile(
    r"""(?P<skip>[^\S\n]+|(?:\#|//)[^\n]*)
    |(?P<end>[\n,])
    |(?P<open>\{)|(?P<close>\})
    |(?P<opening>\[)|(?P<closing>\])
    |(?P<reference>\$\{[^{}\n]*\})
    |(?P<equals>[=:])
    |(?P<quoted>"(?:[^"\\\n]|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}))*")
    |(?P<bare>(?:(?!//)[^\s{}\[\]"=:,\#$+`^?!@*&\\])+)""",
    re.VERBOSE,
)
_DURATION: Final = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)\s*([a-zA-Z]*)")
_MS: Final = {
    **dict.fromkeys(("ns", "nano", "nanos", "nanosecond", "nanoseconds"), 1e-6),
    **dict.fromkeys(("us", "micro", "micros", "microsecond", "microseconds"), 1e-3),
    # A bare number is in milliseconds (HOCON, Units format).
    **dict.fromkeys(("", "ms", "milli", "millis", "millisecond", "milliseconds"), 1),
    **dict.fromkeys(("s", "second", "seconds"), 1_000),
    **dict.fromkeys(("m", "minute", "minutes"), 60_000),
    **dict.fromkeys(("h", "hour", "hours"), 3_600_000),
    **dict.fromkeys(("d", "day", "days"), 86_400_000),
}
_DURATIONS: Final = {
    "defaultVisibilityTimeout": "visibility_timeout",
    "delay": "delay",
    "receiveMessageWait": "wait",
}
_BOOLEANS: Final = {"fifo": "fifo", "contentBasedDeduplication": "content_deduplication"}
_WORDS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NOT_DONE: Final = ("copyTo", "moveTo")
_STATE: Final = ("created", "lastModified")
"""Keys that ElasticMQ writes into its own file of queues (`queues-storage`)."""
_KEYS: Final = (*_DURATIONS, *_BOOLEANS, *_NOT_DONE, "deadLettersQueue", "tags")


class Found(NamedTuple):
    """Tables like `[[queue]]` of queues_file.py, the line of each, and what was skipped."""

    tables: list[dict[str, Any]]
    lines: list[int]
    warnings: list[str]
    account_alias: str | None
    """What a queue URL may contain instead of the account id."""
    account: str | None
    """The account id that it names, if that is one."""
    region: str
    names_region: bool


class _Value(NamedTuple):
    text: str
    line: int


class _Unread(NamedTuple):
    """A value with a list or a reference in it."""

    what: str
    line: int


class _Object(NamedTuple):
    members: dict[str, "_Any"]
    line: int


_Any: TypeAlias = _Value | _Unread | _Object


class _Token(NamedTuple):
    kind: str
    text: str
    line: int
    start: int
    end: int


def read(path: Path, text: str) -> Found:
    """The queues in the text of such a file. Raises FileInvalid with the line."""
    parser = _Parser(path, text)
    whole = parser.whole()
    reader = _Queues(path)
    aws = whole.members.get("aws")
    named = reader.place(aws) if isinstance(aws, _Object) else {}
    place = {"region": REGION_DEFAULT} | named
    account_alias = None if ACCOUNT_ID.fullmatch(place.get("account", "0" * 12)) else place.pop("account")
    if account_alias is not None and not _ACCOUNT_ALIAS.fullmatch(account_alias):
        expected = "aws: accountId: expected 12 digits, or up to 64 of A-Z, a-z, 0-9, _, - and ."
        raise FileInvalid(path, expected, aws.line if aws is not None else None)
    reader.warnings += [
        f"{path}: line {value.line}: {name} is not about queues and is left out"
        for name, value in whole.members.items()
        if name not in {"aws", "queues"}
    ]
    queues = whole.members.get("queues", _Object({}, 1))
    if not isinstance(queues, _Object):
        raise FileInvalid(path, "queues: expected { ... }", queues.line)
    tables = [place | reader.queue(name, value) for name, value in queues.members.items()]
    _suffix(tables)
    lines = [value.line for value in queues.members.values()]
    warnings = parser.warnings + reader.warnings
    return Found(tables, lines, warnings, account_alias, place.get("account"), place["region"], "region" in named)


def _suffix(tables: list[dict[str, Any]]) -> None:
    """ElasticMQ appends .fifo to the name of a FIFO queue that lacks it; references to it for dead letters follow."""
    plain = {table["name"] for table in tables if table.get("fifo") and not table["name"].endswith(".fifo")}
    for table in tables:
        for named, key in ((table, "name"), (table.get("dead_letter", {}), "queue")):
            if named.get(key) in plain:
                named[key] += ".fifo"


class _Queues:
    """Translates the file's keys to ours."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.warnings: list[str] = []

    def place(self, aws: _Object) -> dict[str, str]:
        names = {"region": "region", "accountId": "account"}
        return {names[key]: self._text(f"aws: {key}", value) for key, value in aws.members.items() if key in names}

    def queue(self, name: str, given: _Any) -> dict[str, Any]:
        if not isinstance(given, _Object):
            raise FileInvalid(self._path, f"queue {name}: expected {{ ... }}", given.line)
        table: dict[str, Any] = {"name": name}
        for key, value in given.members.items():
            who = f"queue {name}: {key}"
            if key in _DURATIONS:
                table[_DURATIONS[key]] = self._seconds(who, value)
            elif key in _BOOLEANS:
                table[_BOOLEANS[key]] = self._boolean(who, value)
            elif key == "deadLettersQueue":
                table["dead_letter"] = self._dead_letter(who, value)
            elif key == "tags":
                table["tags"] = {
                    tag: self._text(f"{who}.{tag}", text) for tag, text in self._object(who, value).items()
                }
            elif key in _NOT_DONE:
                self._text(who, value)
                self.warnings.append(
                    f"{self._path}: line {value.line}: {who}: VeilMQ forwards no messages between queues; left out"
                )
            elif key not in _STATE:
                raise FileInvalid(self._path, f"{who}: unknown key; the keys are {', '.join(_KEYS)}", value.line)
        return table

    def _dead_letter(self, who: str, value: _Any) -> dict[str, Any]:
        members = self._object(who, value)
        for key in members:
            if key not in {"name", "maxReceiveCount"}:
                raise FileInvalid(self._path, f"{who}: unknown key {key}", members[key].line)
        if set(members) != {"name", "maxReceiveCount"}:
            raise FileInvalid(self._path, f"{who}: expected name and maxReceiveCount", value.line)
        count = self._text(who, members["maxReceiveCount"])
        if not count.isdecimal() or len(count) > 9:
            raise FileInvalid(self._path, f"{who}: maxReceiveCount: expected a number", members["maxReceiveCount"].line)
        return {"queue": self._text(who, members["name"]), "receive_count_max": int(count)}

    def _seconds(self, who: str, value: _Any) -> float:
        text = self._text(who, value)
        found = _DURATION.fullmatch(text)
        if found is None or found[2] not in _MS:
            raise FileInvalid(self._path, f"{who}: expected a duration such as 10 seconds, not {text}", value.line)
        return float(found[1]) * _MS[found[2]] / 1_000

    def _boolean(self, who: str, value: _Any) -> bool:
        text = self._text(who, value)
        if text not in _WORDS:
            raise FileInvalid(self._path, f"{who}: expected true or false, not {text}", value.line)
        return _WORDS[text]

    def _text(self, who: str, value: _Any) -> str:
        if isinstance(value, _Unread):
            raise FileInvalid(self._path, f"{who}: {value.what} is not supported here", value.line)
        if isinstance(value, _Object):
            raise FileInvalid(self._path, f"{who}: expected a value, not {{ ... }}", value.line)
        return value.text

    def _object(self, who: str, value: _Any) -> dict[str, _Any]:
        if not isinstance(value, _Object):
            raise FileInvalid(self._path, f"{who}: expected {{ ... }}", value.line)
        return value.members


class _Parser:
    """A recursive-descent parser of a text."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self.warnings: list[str] = []
        self._tokens = self._split(text)
        self._at = 0

    def _split(self, text: str) -> list[_Token]:
        tokens = []
        at, line = 0, 1
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise FileInvalid(self._path, f"cannot read {text[at]!r} here", line)
            kind = found.lastgroup
            assert kind is not None
            if kind != "skip":
                tokens.append(_Token(kind, found[0], line, at, found.end()))
            line += found[0].count("\n")
            at = found.end()
        tokens.append(_Token("stop", "", line, at, at))
        return tokens

    def _next(self) -> _Token:
        token = self._tokens[self._at]
        self._at += token.kind != "stop"
        return token

    def _skip_ends(self, ends: str = "\n,") -> None:
        while self._tokens[self._at].kind == "end" and self._tokens[self._at].text in ends:
            self._at += 1

    def whole(self) -> _Object:
        self._skip_ends()
        braced = self._tokens[self._at].kind == "open"
        self._at += braced
        members = self._members("close" if braced else "stop", 0)
        self._skip_ends()
        rest = self._next()
        if rest.kind != "stop":
            raise FileInvalid(self._path, f"cannot read {rest.text!r} after the end", rest.line)
        return _Object(members, 1)

    def _members(self, until: str, depth: int) -> dict[str, _Any]:
        members: dict[str, _Any] = {}
        while True:
            self._skip_ends()
            token = self._next()
            if token.kind == until:
                return members
            if token.kind == "bare" and token.text == "include":
                included = ""
                while self._tokens[self._at].kind not in {"end", "stop"}:
                    included += self._next().text
                if "application.conf" not in included:  # ElasticMQ's own, of which nothing is missed
                    self.warnings.append(f"{self._path}: line {token.line}: include {included} is left out")
                continue
            if token.kind not in {"bare", "quoted"}:
                what = "the end of the file" if token.kind == "stop" else repr(token.text)
                raise FileInvalid(self._path, f"expected a key, not {what}", token.line)
            path = self._path_of(token)
            self._put(members, path, self._member(token, depth), token)

    def _path_of(self, first: _Token) -> list[str]:
        """The parts of a key: dots outside quotes separate them ("Path expressions")."""
        path, quoted = [""], [False]
        token = first
        while True:
            if token.kind == "quoted":
                path[-1] += _unquoted(token)
                quoted[-1] = True
            else:
                joined, *others = token.text.split(".")
                path[-1] += joined
                path += others
                quoted += [False] * len(others)
            following = self._tokens[self._at]
            if following.kind not in {"bare", "quoted"} or following.start != token.end:
                break
            token = self._next()
        if not all(name or is_quoted for name, is_quoted in zip(path, quoted, strict=True)):
            raise FileInvalid(self._path, f"cannot read the key {first.text}", first.line)
        if len(path) > DEPTH_MAX:
            raise FileInvalid(self._path, "too deep", first.line)
        return path

    def _put(self, members: dict[str, _Any], path: list[str], value: _Any, key: _Token) -> None:
        for name in path[:-1]:
            inner = members.setdefault(name, _Object({}, key.line))
            if not isinstance(inner, _Object):
                raise FileInvalid(self._path, f"{name} is a value above", key.line)
            members = inner.members
        _join(members, path[-1], value)

    def _member(self, key: _Token, depth: int) -> _Any:
        self._skip_ends("\n")
        if self._tokens[self._at].kind == "equals":
            self._at += 1
            self._skip_ends("\n")
            if self._tokens[self._at].kind != "open":
                return self._value(key, depth)
        opened = self._next()
        if opened.kind != "open":
            raise FileInvalid(self._path, f"expected = or {{ after {key.text}", key.line)
        if depth >= DEPTH_MAX:
            raise FileInvalid(self._path, "too deep", opened.line)
        return _Object(self._members("close", depth + 1), key.line)

    def _value(self, key: _Token, depth: int) -> _Value | _Unread:
        parts, unread = [], ""
        while (kind := self._tokens[self._at].kind) in {"bare", "quoted", "reference", "opening"}:
            token = self._next()
            if kind == "opening":
                self._pass_list(token, depth + 1)
            unread = unread or {"opening": "a list", "reference": f"the reference {token.text}"}.get(kind, "")
            parts.append(_unquoted(token))
        following = self._tokens[self._at]
        if not parts or following.kind not in {"end", "close", "closing", "stop"}:
            raise FileInvalid(self._path, f"cannot read the value of {key.text}", key.line)
        return _Unread(unread, key.line) if unread else _Value(" ".join(parts), key.line)

    def _pass_list(self, opened: _Token, depth: int) -> None:
        """Skip the list."""
        if depth >= DEPTH_MAX:
            raise FileInvalid(self._path, "too deep", opened.line)
        while True:
            self._skip_ends()
            token = self._tokens[self._at]
            if token.kind == "closing":
                self._at += 1
                return
            if token.kind == "open":
                self._at += 1
                self._members("close", depth + 1)
            elif token.kind == "stop":
                raise FileInvalid(self._path, "a list without its end", opened.line)
            else:
                self._value(token, depth)


def _join(members: dict[str, _Any], name: str, value: _Any) -> None:
    """Set a member; objects of the same name are merged recursively ("Duplicate keys")."""
    before = members.get(name)
    if isinstance(before, _Object) and isinstance(value, _Object):
        for inner, each in value.members.items():
            _join(before.members, inner, each)
    else:
        members[name] = value


def _unquoted(token: _Token) -> str:
    return str(json.loads(token.text, strict=False)) if token.kind == "quoted" else token.text
