"""Service properties, the CORS rules among them and what they do, and statistics."""

from typing import Any

import msgspec

from veilmq.model.settings.topic import SETTINGS_QUEUES
from veilmq.protocols.azure.call import SERVICE_QUEUE
from veilmq.testing.for_each import for_each

TARGET = "/?restype=service&comp=properties"
DOCUMENT = "<StorageServiceProperties>{}</StorageServiceProperties>"
KEEP = "<RetentionPolicy><Enabled>true</Enabled><Days>{}</Days></RetentionPolicy>"
DROP = "<RetentionPolicy><Enabled>false</Enabled></RetentionPolicy>"
LOGGING = f"<Logging><Version>1.0</Version><Delete>true</Delete><Read>false</Read><Write>TRUE</Write>{KEEP}</Logging>"
METRICS = "<{0}><Version>1.0</Version><Enabled>true</Enabled><IncludeAPIs>false</IncludeAPIs>" + DROP + "</{0}>"
RULE = (
    "<CorsRule><AllowedOrigins>{origins}</AllowedOrigins><AllowedMethods>{methods}</AllowedMethods>"
    "<AllowedHeaders>{allowed}</AllowedHeaders><ExposedHeaders>{exposed}</ExposedHeaders>"
    "<MaxAgeInSeconds>{age}</MaxAgeInSeconds></CorsRule>"
)
DEFAULTS = {
    "origins": "https://app.example",
    "methods": "GET,PUT",
    "allowed": "x-ms-*,content-type",
    "exposed": "*",
    "age": 60,
}


def rules(*changes: dict[str, Any]) -> str:
    return DOCUMENT.format(f"<Cors>{''.join(RULE.format(**(DEFAULTS | change)) for change in changes)}</Cors>")


def test_no_subscription_keeps_its_pushes_where_the_properties_are() -> None:
    assert SERVICE_QUEUE in SETTINGS_QUEUES


def test_a_new_account_has_the_defaults(wire: Any) -> None:
    shown = wire.ask("GET", TARGET)
    assert shown.status == 200
    assert [node.tag for node in shown.xml] == ["Logging", "HourMetrics", "MinuteMetrics", "Cors"]
    assert shown.text("Logging/Version") == "1.0"
    assert shown.text("HourMetrics/Enabled") == "false"
    assert list(shown.xml.find("Cors")) == []


def test_parts_are_set_one_by_one(wire: Any) -> None:
    assert wire.ask("PUT", TARGET, DOCUMENT.format(LOGGING.format(365))).status == 202
    assert wire.ask("PUT", TARGET, DOCUMENT.format(METRICS.format("HourMetrics"))).status == 202
    assert wire.ask("PUT", TARGET, rules({}, {"origins": "*"})).status == 202
    shown = wire.ask("GET", TARGET)
    assert [shown.text(f"Logging/{name}") for name in ("Delete", "Read", "Write")] == ["true", "false", "true"]
    assert shown.text("Logging/RetentionPolicy/Days") == "365"
    assert shown.text("HourMetrics/IncludeAPIs") == "false"
    assert shown.text("MinuteMetrics/Enabled") == "false"
    assert shown.texts("Cors/CorsRule/AllowedOrigins") == ["https://app.example", "*"]
    assert wire.ask("PUT", TARGET, DOCUMENT.format("<Cors/>")).status == 202
    assert wire.ask("GET", TARGET).texts("Cors/CorsRule") == []
    wire.stage.reopen(kill=True)
    assert wire.ask("GET", TARGET).text("Logging/RetentionPolicy/Days") == "365"


def test_logging_has_a_second_version(wire: Any) -> None:
    """ "Storage Analytics log format": 2.0, of the Blob and Queue services, has who bore a token."""
    for version in ("2.0", "1.0"):
        assert wire.ask("PUT", TARGET, DOCUMENT.format(LOGGING.format(7).replace("1.0", version))).status == 202
        assert wire.ask("GET", TARGET).text("Logging/Version") == version


def test_a_rule_may_have_64_origins(wire: Any) -> None:
    origins = ",".join(f"http://{number}" for number in range(64))
    assert wire.ask("PUT", TARGET, rules({"origins": origins})).status == 202
    assert wire.ask("GET", TARGET).texts("Cors/CorsRule/AllowedOrigins") == [origins]


def test_versions_before_cors_have_logging_and_metrics_alone(wire: Any) -> None:
    old = "2012-02-12"
    wire.ask("PUT", TARGET, rules({}))
    both = LOGGING.format(7) + METRICS.format("Metrics")
    assert wire.ask("PUT", TARGET, DOCUMENT.format(both), version=old).status == 202
    shown = wire.ask("GET", TARGET, version=old)
    assert [node.tag for node in shown.xml] == ["Logging", "Metrics"]
    assert shown.text("Metrics/Enabled") == "true"
    now = wire.ask("GET", TARGET)
    assert (now.text("HourMetrics/Enabled"), now.text("MinuteMetrics/Enabled")) == ("true", "false")
    assert len(now.texts("Cors/CorsRule")) == 1
    for inside, code in (
        (LOGGING.format(7), "MissingRequiredXmlNode"),
        (both + "<Cors/>", "UnsupportedXmlNode"),
        (METRICS.format("HourMetrics"), "UnsupportedXmlNode"),
    ):
        refused = wire.ask("PUT", TARGET, DOCUMENT.format(inside), version=old)
        assert (refused.status, refused.code) == (400, code)
    assert wire.ask("PUT", TARGET, DOCUMENT.format(METRICS.format("Metrics"))).code == "UnsupportedXmlNode"


def test_they_are_nobodys_queue(wire: Any) -> None:
    wire.ask("PUT", TARGET, rules({}))
    assert wire.ask("GET", "/?comp=list").texts("Queues/Queue") == []
    assert wire.ask("GET", "/azure%2Fservice?comp=metadata").status == 400
    assert wire.ask("GET", "/azure/service?comp=metadata").status == 400


@for_each(
    ("inside", "code"),
    [
        (LOGGING.format(0), "InvalidXmlNodeValue"),
        (LOGGING.format(366), "InvalidXmlNodeValue"),
        (LOGGING.format("many"), "InvalidXmlNodeValue"),
        (LOGGING.format(7).replace("1.0", "3.0"), "InvalidXmlNodeValue"),
        (METRICS.format("HourMetrics").replace("1.0", "2.0"), "InvalidXmlNodeValue"),
        (LOGGING.format(7).replace("<Read>false</Read>", ""), "MissingRequiredXmlNode"),
        (LOGGING.format(7).replace("false", "no"), "InvalidXmlNodeValue"),
        (LOGGING.format(7) * 2, "InvalidXmlDocument"),
        (LOGGING.format(7).replace("<Enabled>true", "<Enabled>false"), "InvalidXmlDocument"),  # giovanni #60
        (METRICS.format("HourMetrics").replace("<IncludeAPIs>false</IncludeAPIs>", ""), "MissingRequiredXmlNode"),
        (METRICS.format("HourMetrics").replace("<Enabled>true", "<Enabled>false"), "InvalidXmlNodeValue"),
        ("<StaticWebsite/>", "UnsupportedXmlNode"),
        (rules(*[{}] * 6), "InvalidXmlDocument"),
        (rules({"origins": ""}), "InvalidXmlNodeValue"),
        (rules({"origins": "https://" + "x" * 249}), "InvalidXmlNodeValue"),
        (rules({"origins": ",".join(f"http://{number}" for number in range(65))}), "InvalidXmlNodeValue"),
        (rules({"methods": ""}), "InvalidXmlNodeValue"),
        (rules({"methods": "TRACE"}), "InvalidXmlNodeValue"),
        (rules({"methods": "get"}), "InvalidXmlNodeValue"),
        (rules({"allowed": ",".join(f"x{number}" for number in range(65))}), "InvalidXmlNodeValue"),
        (rules({"exposed": "a*,b*,c*"}), "InvalidXmlNodeValue"),
        (rules({"age": -1}), "InvalidXmlNodeValue"),
        (rules({"age": "1h"}), "InvalidXmlNodeValue"),
        (rules({"origins": ",".join(f"https://{number}{'x' * 200}" for number in range(10))}), "InvalidXmlDocument"),
        ("", "InvalidXmlDocument"),
    ],
)
def test_bad_properties_change_nothing(wire: Any, inside: str, code: str) -> None:
    wire.ask("PUT", TARGET, rules({}))
    document = inside if inside.startswith("<StorageServiceProperties") or not inside else DOCUMENT.format(inside)
    refused = wire.ask("PUT", TARGET, document)
    assert (refused.status, refused.code) == (400, code)
    assert len(wire.ask("GET", TARGET).texts("Cors/CorsRule")) == 1


def test_statistics_are_of_the_secondary(wire: Any) -> None:
    shown = wire.ask("GET", "/examplename-secondary?restype=service&comp=stats")
    assert shown.status == 200
    assert shown.text("GeoReplication/Status") == "live"
    assert shown.text("GeoReplication/LastSyncTime") == wire.date()
    refused = wire.ask("GET", "/?restype=service&comp=stats")
    assert (refused.status, refused.code) == (400, "InvalidQueryParameterValue")


class TestCors:
    """What a web page gets."""

    def preflight(self, wire: Any, origin: str = "https://app.example", method: str = "GET", asked: str = "") -> Any:
        headers = {"origin": origin, "access-control-request-method": method}
        if asked:
            headers["access-control-request-headers"] = asked
        headers = {name: value for name, value in headers.items() if value}
        return wire.ask("OPTIONS", "/orders/messages", headers=headers, auth=None, version=None)

    def test_a_preflight_that_fits(self, wire: Any) -> None:
        wire.ask("PUT", TARGET, rules({"origins": "https://one.example"}, {}))
        answer = self.preflight(wire, asked="X-MS-Version, content-type")
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert answer.headers["access-control-allow-methods"] == "GET"
        assert answer.headers["access-control-allow-headers"] == "X-MS-Version,content-type"
        assert answer.headers["access-control-max-age"] == "60"
        assert answer.headers["access-control-allow-credentials"] == "true"
        assert "vary" not in answer.headers, "no cache keeps it"

    @for_each(
        ("method", "asked", "status"),
        [("PUT", "x-ms-one", 200), ("GET", "x-ms-one", 200), ("GET", "x-ms-three", 403)],
    )
    def test_the_first_rule_of_origin_and_method_decides(self, wire: Any, method: str, asked: str, status: int) -> None:
        first = {"methods": "PUT,HEAD", "allowed": "x-ms-one"}
        second = {"origins": "*", "methods": "PUT,GET", "allowed": "x-ms-one"}
        wire.ask("PUT", TARGET, rules(first, second, {"methods": "GET", "allowed": "x-ms-three"}))
        assert self.preflight(wire, method=method, asked=asked).status == status

    @for_each(
        ("origins", "origin", "allowed", "varies"),
        [
            (None, None, None, False),
            ("https://app.example", None, None, True),
            ("*", None, "*", False),
            (None, "https://app.example", None, False),
            ("https://app.example", "https://app.example", "https://app.example", True),
            ("https://app.example", "https://evil.example", None, True),
            ("*", "https://app.example", "*", False),
        ],
        fresh="wire",
    )
    def test_what_caches_are_told(
        self, wire: Any, origins: str | None, origin: str | None, allowed: str | None, varies: bool
    ) -> None:
        """The table of "Understanding how the Vary header is set"."""
        headers = {} if origin is None else {"origin": origin}
        assert "vary" not in wire.ask("GET", "/?comp=list").headers
        if origins is not None:
            wire.ask("PUT", TARGET, rules({"origins": origins, "exposed": "x-ms-*"}))
        queue = wire.queue()
        for target in ("/?comp=list", f"{queue}/messages", "/none?comp=metadata"):
            shown = wire.ask("GET", target, headers=headers).headers
            assert shown.get("access-control-allow-origin") == allowed
            assert ("access-control-expose-headers" in shown) is (allowed is not None)
            assert ("vary" in shown) is varies
        changed = wire.ask("PUT", f"{queue}?comp=metadata", headers=headers)
        assert "vary" not in changed.headers, "no cache keeps it"
        wire.ask("PUT", TARGET, DOCUMENT.format("<Cors/>"))
        assert "vary" not in wire.ask("GET", "/?comp=list", headers=headers).headers

    @for_each(
        ("origin", "method", "asked"),
        [
            ("https://app.example.evil", "GET", ""),
            ("http://app.example", "GET", ""),
            ("null", "GET", ""),
            ("https://app.example", "DELETE", ""),
            ("https://app.example", "GET", "authorization"),
            ("https://app.example", "GET", "x-ms-date, x-other"),
        ],
    )
    def test_a_preflight_that_does_not(self, wire: Any, origin: str, method: str, asked: str) -> None:
        wire.ask("PUT", TARGET, rules({}))
        refused = self.preflight(wire, origin, method, asked)
        assert (refused.status, refused.code) == (403, "CorsPreflightFailure")

    def test_without_rules_there_is_none(self, wire: Any) -> None:
        assert self.preflight(wire).code == "CorsPreflightFailure"
        for lacking in (wire.ask("OPTIONS", "/", auth=None, version=None), self.preflight(wire, method="")):
            assert (lacking.status, lacking.code) == (400, "InvalidHeaderValue")
            assert lacking.text("Message").startswith("A required CORS header is not present.")
        assert self.preflight(wire, asked="\u00e9").code == "InvalidHeaderValue"

    def test_everybody(self, wire: Any) -> None:
        wire.ask("PUT", TARGET, rules({"origins": "*", "allowed": "*"}))
        answer = self.preflight(wire, "https://any.example", asked="authorization,x-anything")
        assert answer.headers["access-control-allow-origin"] == "https://any.example", "that of the request"
        assert answer.headers["access-control-allow-credentials"] == "true", "always"
        shown = wire.ask("GET", "/?comp=list", headers={"origin": "https://any.example"}).headers
        assert shown["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in shown

    def test_an_origin_counts_byte_for_byte(self, wire: Any) -> None:
        wire.ask("PUT", TARGET, rules({"origins": "https://App.example,https://*.House.example"}))
        for origin in ("https://app.example", "HTTPS://App.example", "https://a.house.example"):
            assert self.preflight(wire, origin).code == "CorsPreflightFailure"
            assert (
                "access-control-allow-origin" not in wire.ask("GET", "/?comp=list", headers={"origin": origin}).headers
            )
        for origin in ("https://App.example", "https://a.House.example"):
            assert self.preflight(wire, origin).status == 200

    def test_a_wildcard_stands_for_subdomains(self, wire: Any) -> None:
        wire.ask("PUT", TARGET, rules({"origins": "https://*.example"}))
        assert self.preflight(wire, "https://a.b.example").status == 200
        for origin in ("https://example", "https://badexample", "http://a.example"):
            assert self.preflight(wire, origin).status == 403

    def test_an_answer_to_a_page_has_headers_if_a_rule_fits(self, wire: Any) -> None:
        wire.ask("PUT", TARGET, rules({"exposed": "x-ms-*"}))
        for origin, shown in (("https://app.example", True), ("https://evil.example", False)):
            answer = wire.ask("GET", "/?comp=list", headers={"origin": origin})
            assert answer.status == 200
            assert ("access-control-allow-origin" in answer.headers) is shown
        answer = wire.ask("GET", "/none?comp=metadata", headers={"origin": "https://app.example"})
        assert answer.code == "QueueNotFound"
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert answer.headers["access-control-expose-headers"] == "x-ms-error-code,x-ms-request-id,x-ms-version"
        assert "access-control-allow-origin" not in wire.ask("GET", "/?comp=list").headers

    @for_each(
        ("exposed", "names"),
        [
            ("x-ms-meta-*", "x-ms-meta-colour"),
            ("X-Ms-Meta-C*,x-ms-approx*", "x-ms-approximate-messages-count,x-ms-meta-colour"),
            ("Server,x-ms-version,x-ms-v*", "Server,x-ms-version"),
            ("x-other*", None),
            ("", None),
            (
                "*",
                "x-ms-approximate-messages-count,x-ms-meta-colour,x-ms-request-id,x-ms-version,cache-control,"
                "Content-Type,Content-Length,Date",
            ),
        ],
        fresh="wire",
    )
    def test_a_browser_is_told_names_of_headers_and_no_prefixes(
        self, wire: Any, exposed: str, names: str | None
    ) -> None:
        queue = wire.queue()
        wire.ask("PUT", f"{queue}?comp=metadata", headers={"x-ms-meta-colour": "red"})
        wire.ask("PUT", TARGET, rules({"exposed": exposed}))
        answer = wire.ask("GET", f"{queue}?comp=metadata", headers={"origin": "https://app.example"})
        assert answer.headers.get("access-control-expose-headers") == names

    def test_for_headers_alone_rules_are_asked_for_once(self, wire: Any) -> None:
        def questions() -> int:
            return sum(call.question for call in wire.calls)

        for _ in range(3):
            wire.ask("GET", "/?comp=list")
            wire.ask("PUT", "/orders")
        assert questions() == 1
        wire.ask("PUT", TARGET, rules({"origins": "*"}))
        for _ in range(3):
            assert wire.ask("GET", "/?comp=list").headers["access-control-allow-origin"] == "*"
        assert questions() == 2
        # A credentials file that is read again may give the name to another account.
        wire.ring.named[wire.account.name] = msgspec.structs.replace(wire.account)
        wire.ask("GET", "/?comp=list")
        assert questions() == 3

    @for_each(
        ("how", "code"),
        [
            ({"auth": None}, "NoAuthenticationInformation"),
            ({"secret": b"of somebody else"}, "AuthenticationFailed"),
            ({"target": "/?comp=nothing"}, "InvalidQueryParameterValue"),
            ({"target": "/?comp=list&timeout=soon"}, "InvalidQueryParameterValue"),
        ],
    )
    def test_a_page_may_read_why_it_was_refused(self, wire: Any, how: dict[str, Any], code: str) -> None:
        wire.ask("PUT", TARGET, rules({"exposed": "x-ms-error-code"}))
        target, how = how.get("target", "/?comp=list"), {name: how[name] for name in how if name != "target"}
        for origin, shown in (("https://app.example", True), ("https://evil.example", False)):
            refused = wire.ask("GET", target, headers={"origin": origin}, **how)
            assert refused.code == code
            assert (refused.headers.get("access-control-allow-origin") == origin) is shown
            assert (refused.headers.get("access-control-expose-headers") == "x-ms-error-code") is shown
        asked = len(wire.calls)
        assert "access-control-allow-origin" not in wire.ask("GET", target, **how).headers
        other = "http://127.0.0.1:10001/nobody/?comp=list"
        assert wire.ask("GET", other, headers={"origin": "https://app.example"}, auth=None).status >= 400
        assert len(wire.calls) == asked, "nothing to ask of an account that there is not"

    def test_in_development_mode_no_other_page_comes_in(self, wire: Any) -> None:
        wire.ring.checks = False
        queue = wire.queue()
        wire.put(queue)
        for origin in ("https://app.example", "null", "http://127.0.0.1"):
            refused = wire.get(queue, headers={"origin": origin})
            assert (refused.status, refused.code) == (403, "AuthorizationFailure")
        assert wire.get(queue, "?peekonly=true").texts("QueueMessage/DequeueCount") == ["0"]
        wire.ask("PUT", TARGET, rules({}))
        assert wire.get(queue, "?peekonly=true", headers={"origin": "https://app.example"}).status == 200
        assert wire.get(queue, headers={"origin": "http://127.0.0.1:10001"}).status == 200, "its own origin"


@for_each(
    ("body", "code"),
    [
        ("", "InvalidXmlDocument"),
        ("text", "InvalidXmlDocument"),
        ("<QueueMessage>", "InvalidXmlDocument"),
        ("<QueueMessage/>", "MissingRequiredXmlNode"),
        ("<Message><MessageText>x</MessageText></Message>", "InvalidXmlDocument"),
        ("<QueueMessage><Text>x</Text></QueueMessage>", "UnsupportedXmlNode"),
        ("<QueueMessage><MessageText>a</MessageText><MessageText>b</MessageText></QueueMessage>", "InvalidXmlDocument"),
        ("<!DOCTYPE x><QueueMessage><MessageText>x</MessageText></QueueMessage>", "InvalidXmlDocument"),
        (
            '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><QueueMessage><MessageText>&b;</MessageText>'
            "</QueueMessage>",
            "InvalidXmlDocument",
        ),
        (
            '<!DOCTYPE x SYSTEM "file:///etc/passwd"><QueueMessage><MessageText/></QueueMessage>',
            "InvalidXmlDocument",
        ),
        ("<QueueMessage><MessageText>&nbsp;</MessageText></QueueMessage>", "InvalidXmlDocument"),
        ("<a>" * 100 + "</a>" * 100, "InvalidXmlDocument"),
        ("<QueueMessage>" + "<x/>" * 2_000 + "</QueueMessage>", "InvalidXmlDocument"),
        ("<QueueMessage><MessageText>x</MessageText></QueueMessage><more/>", "InvalidXmlDocument"),
        ('<?xml version="1.0" encoding="klingon"?><QueueMessage><MessageText/></QueueMessage>', "InvalidXmlDocument"),
        (b"<QueueMessage><MessageText>\xff</MessageText></QueueMessage>", "InvalidXmlDocument"),
        ("x" * 500_000, "RequestBodyTooLarge"),
    ],
    fresh="wire",
)
def test_xml_that_is_none(wire: Any, body: str | bytes, code: str) -> None:
    queue = wire.queue()
    refused = wire.ask("POST", f"{queue}/messages", body)
    assert refused.code == code
    assert wire.get(queue).texts("QueueMessage") == []


@for_each(
    ("body", "text"),
    [
        ("<QueueMessage><MessageText></MessageText></QueueMessage>", ""),
        ("<QueueMessage><MessageText>  two  </MessageText></QueueMessage>", "  two  "),
        ("<?xml version='1.0'?>\n<QueueMessage>\n  <MessageText><![CDATA[<&]]></MessageText>\n</QueueMessage>\n", "<&"),
        ('<q:QueueMessage xmlns:q="u:x"><q:MessageText>x</q:MessageText></q:QueueMessage>', "x"),
        ("<QueueMessage><MessageText>a<b x='1'>b<i>c</i>d</b>e<br/></MessageText></QueueMessage>", "abcde"),
        (
            "<QueueMessage><MessageText>" + "a<b>" * 1_000 + "</b>" * 1_000 + "</MessageText></QueueMessage>",
            "a" * 1_000,
        ),
        ("<QueueMessage><MessageText>" + "a<br/>" * 2_000 + "</MessageText></QueueMessage>", "a" * 2_000),
        ("<!-- first --><QueueMessage><MessageText>a<!-- no -->b</MessageText></QueueMessage>", "ab"),
        ("<QueueMessage><MessageText>\u20ac</MessageText></QueueMessage>".encode("utf-16"), "\u20ac"),
        ("\ufeff<QueueMessage><MessageText>x</MessageText></QueueMessage>", "x"),
    ],
    fresh="wire",
)
def test_xml_in_its_many_forms(wire: Any, body: str | bytes, text: str) -> None:
    queue = wire.queue()
    assert wire.ask("POST", f"{queue}/messages", body).status == 201
    assert wire.get(queue).texts("QueueMessage/MessageText") == [text]
