"""Texts that try to be more than text: markup, code, formulas, headers, paths. Any queue takes them (XML 1.0)."""

from html.parser import HTMLParser
from typing import Any

_PAYLOADS = ["<img src=x onerror=alert(1)>", "<svg/onload=alert(1)>", "<script>alert(1)</script>"]
_ENDS = [
    '"', "'", '">', "'>", "</td>", "</title>", "</textarea>", "</script>", "</style>", "-->", "]]>", "</svg>",
    "</text>", "</pre>", "</option></select>", "</a>", "&quot;>", "`", '\\">', "</noscript>", "<!--", "<![CDATA[",
]  # fmt: skip
_TAGS = [
    "<b>bold</b>", "<iframe src=javascript:alert(1)>", "<object data=x>", "<embed src=x>",
    "<link rel=stylesheet href=x>", "<meta http-equiv=refresh content=0;url=//evil.example>",
    "<base href=//evil.example>", "<form action=//evil.example>", "<input autofocus onfocus=alert(1)>",
    "<style>*{display:none}</style>", "<template>", "<math><mi xlink:href=x>", "<details open ontoggle=alert(1)>",
    "<video><source onerror=alert(1)>", "<audio src onerror=alert(1)>", "<body onload=alert(1)>",
    "<marquee onstart=alert(1)>", "<svg><animate onbegin=alert(1)>", "<foreignObject>",
    "<a href=javascript:alert(1)>x</a>", "<noscript>", "<plaintext>", "<xmp>",
    "<button formaction=javascript:alert(1)>", "<img src='x' srcset='//evil.example/x'>",
    "<use href=data:image/svg+xml,x>", "<set attributeName=onclick>", "<?php x ?>", "<!DOCTYPE x>",
    "<script/src=//evil.example>", "< script>", "<scr<script>ipt>", "<ScRiPt>alert(1)</sCrIpT>",
]  # fmt: skip
_ATTRIBUTES = [
    '" onmouseover="alert(1)', "' onmouseover='alert(1)", '" autofocus onfocus=alert(1) x="', '"/onclick=alert(1)//',
    '" style="position:fixed', '" data-live="visible', '" data-copy="x', '" formaction="//evil.example',
    "x onerror=alert(1)",
]  # fmt: skip
_ADDRESSES = [
    "javascript:alert(1)", "JaVaScRiPt:alert(1)", "java\tscript:alert(1)", "&#106;avascript:alert(1)",
    "data:text/html,<b>", "vbscript:x", "//evil.example/x", "https://evil.example", "\\\\evil.example",
    "/console/sign-out", "?state=hidden#x",
]  # fmt: skip
_TEMPLATES = [
    "{{ 7*7 }}", "{% raw %}", "{# x #}", "${7*7}", "#{7*7}", "<%= 7*7 %>", "{{ ''.__class__ }}",
    "{{ visit.session.csrf }}", "%s%n", "{0}", "{% include 'sign-in.html' %}", "{{ x | safe }}", "}}{{",
]  # fmt: skip
_FORMULAS = [
    "=1+1", "=cmd|' /C calc'!A0", "=HYPERLINK(\"//evil.example\")", "@SUM(1)", "+1", "-1", "\t=1", "\n=1", "\r=1",
    "\uff1d1+1", "\uff0b1", "\uff0d1", "\uff20SUM(1)", "+cmd|x", "-2+3+cmd|x", "@x",
]  # fmt: skip
_CELLS = ['"=1', "'=1", ";=1", ",=1", '"",=1', " =1", '1","=1', "1\r\n=1", "a;b|c", "1e999", "0x10", "TRUE", "#REF!"]
_JSON = [
    "\u2028", "\u2029", "\\u003cscript>", '{"__proto__": {"x": 1}}', '"}', "\\", '\\"', "9007199254740993", "NaN",
    "null", '{"a": 1, "a": 2}', "[[[[[[[[", "\\x3cb>",
]  # fmt: skip
_UNICODE = [
    "\u202eright to left", "\u2066x\u2069", "\u200b", "\ufeff=1", "a\u0300" * 50, "宽" * 80, "\U0001f600" * 20,
    "\ufffd", "\x85", "\xa0", "\uff1cscript\uff1e", "\u2039b\u203a", "\u212a", "\ue000", "\U000e0041", "\u061c",
    "\u0130", "\ufb01", "ﷺ" * 10, "\u3164", "i\u0307\u0323" * 30,
]  # fmt: skip
_PATHS = [
    "../../etc/passwd", "..\\..\\x", "C:\\x", "con", "a\r\nSet-Cookie: x=1", 'a"; filename="evil.exe', "%00",
    "%0d%0aX-Evil: 1", "%2e%2e%2f", "a/b", "&a=b", "+", "%", "a%20b", "~", ".", "x; rm -rf /", "$(id)", "`id`",
    "| id",
]  # fmt: skip
_ENTITIES = [
    "&lt;b&gt;", "&#60;b&#62;", "&amp;", "&", "<", ">", '"', "'", "&nbsp", "&#x3c;script&#x3e;", "%3Cscript%3E",
]  # fmt: skip
HOSTILE = [
    *(end + payload for end in _ENDS for payload in _PAYLOADS), *_TAGS, *_ATTRIBUTES, *_ADDRESSES, *_TEMPLATES,
    *_FORMULAS, *_CELLS, *_JSON, *_UNICODE, *_PATHS, *_ENTITIES,
]  # fmt: skip
SOME = HOSTILE[::9]
"""For a page whose texts come the same way as those of another one, which is tested with all."""


class _Tags(HTMLParser):
    """Tags and attributes of a page, where they lead, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []
        self.text: list[str] = []
        self.values: list[str] = []
        self.targets: set[str] = set()
        """Pages, scripts, pictures: whatever a browser would ask for or go to."""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, tuple(sorted(name for name, _ in attrs))))
        self.values += [value for _, value in attrs if value]
        self.targets |= {value or "" for name, value in attrs if name in {"href", "src", "action", "formaction"}}

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def tags(page: str) -> _Tags:
    parser = _Tags()
    parser.feed(page)
    parser.close()
    return parser
