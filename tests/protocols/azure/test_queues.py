"""Queues: create, delete, metadata, access policies, lists; names and where a request is addressed to."""

from typing import Any

from veilmq.model.settings.queue import QueueKey
from veilmq.testing.for_each import for_each

ACL = "<?xml version='1.0'?><SignedIdentifiers>{}</SignedIdentifiers>"
POLICY = "<SignedIdentifier><Id>{}</Id><AccessPolicy>{}</AccessPolicy></SignedIdentifier>"


@for_each("name", ["abc", "a-b", "1-2-3", "a" * 63, "000"])
def test_names_that_are_allowed(wire: Any, name: str) -> None:
    assert wire.ask("PUT", f"/{name}").status == 201


@for_each(
    ("name", "code"),
    [
        ("ab", "OutOfRangeInput"),
        ("a" * 64, "OutOfRangeInput"),
        ("Abc", "InvalidResourceName"),
        ("a--b", "InvalidResourceName"),
        ("-abc", "InvalidResourceName"),
        ("abc-", "InvalidResourceName"),
        ("a_b", "InvalidResourceName"),
        ("a.b.fifo", "InvalidResourceName"),
        ("%C3%A9%C3%A9%C3%A9", "InvalidResourceName"),
        ("abc%0A", "InvalidResourceName"),
    ],
)
def test_names_that_are_not(wire: Any, name: str, code: str) -> None:
    refused = wire.ask("PUT", f"/{name}")
    assert (refused.status, refused.code) == (400, code)


def test_a_queue_is_met_again_if_its_metadata_is_the_same(wire: Any) -> None:
    for headers, status in (
        ({"x-ms-meta-color": "blue", "x-ms-meta-a_1": ""}, 201),
        ({"x-ms-meta-color": "blue", "x-ms-meta-a_1": ""}, 204),
        ({"x-ms-meta-color": "red", "x-ms-meta-a_1": ""}, 409),
        ({"x-ms-meta-color": "blue"}, 409),
        ({}, 409),
    ):
        answer = wire.ask("PUT", "/orders", headers=headers)
        assert answer.status == status, headers
        assert answer.code == (None if status < 400 else "QueueAlreadyExists")


def test_a_queue_of_another_protocol_is_met_whatever_its_settings(wire: Any) -> None:
    wire.stage.create("orders", retention_us=60_000_000, visibility_timeout_us=1)
    assert wire.ask("PUT", "/orders").status == 204
    assert wire.stage.describe(QueueKey("000000000000", "us-east-1", "orders")).settings.retention_us == 60_000_000


def test_metadata(wire: Any) -> None:
    queue = wire.queue()
    assert wire.ask("PUT", f"{queue}?comp=metadata", headers={"x-ms-meta-one": "1", "x-ms-meta-two": "2"}).status == 204
    for method in ("GET", "HEAD"):
        shown = wire.ask(method, f"{queue}?comp=metadata")
        assert shown.status == 200
        assert {name: value for name, value in shown.headers.items() if "-meta-" in name} == {
            "x-ms-meta-one": "1",
            "x-ms-meta-two": "2",
        }
        assert shown.headers["x-ms-approximate-messages-count"] == "0"
    assert wire.ask("PUT", f"{queue}?comp=metadata", headers={"x-ms-meta-three": "3"}).status == 204
    assert [name for name in wire.ask("GET", f"{queue}?comp=metadata").headers if "-meta-" in name] == [
        "x-ms-meta-three"
    ]
    assert wire.ask("PUT", f"{queue}?comp=metadata").status == 204
    assert [name for name in wire.ask("GET", f"{queue}?comp=metadata").headers if "-meta-" in name] == []


@for_each(
    ("headers", "code"),
    [
        ({"x-ms-meta-": "x"}, "EmptyMetadataKey"),
        ({"x-ms-meta-1a": "x"}, "InvalidMetadata"),
        ({"x-ms-meta-a-b": "x"}, "InvalidMetadata"),
        ({"x-ms-meta-a.b": "x"}, "InvalidMetadata"),
        ({"x-ms-meta-a": "\u00e9"}, "InvalidMetadata"),
        ({"x-ms-meta-a": "\x01"}, "InvalidMetadata"),
        ({"x-ms-meta-a": "x" * 8_192}, "MetadataTooLarge"),
    ],
)
def test_bad_metadata(wire: Any, headers: dict[str, str], code: str) -> None:
    for target in ("/orders", "/orders?comp=metadata"):
        refused = wire.ask("PUT", target, headers=headers)
        assert (refused.status, refused.code) == (400, code)
    assert wire.ask("GET", "/?comp=list").texts("Queues/Queue/Name") == []


def test_counts_are_of_all_messages(wire: Any) -> None:
    queue = wire.queue()
    for query in ("", "", "?visibilitytimeout=60"):
        wire.put(queue, query=query)
    wire.get(queue)
    assert wire.ask("GET", f"{queue}?comp=metadata").headers["x-ms-approximate-messages-count"] == "3"


def test_a_deleted_queues_name_is_free_after_thirty_seconds(wire: Any) -> None:
    wire.configure(cooldowns=True)
    queue = wire.queue()
    assert wire.ask("DELETE", queue).status == 204
    assert wire.ask("DELETE", queue).code == "QueueNotFound"
    wire.stage.later(29_999_999)
    refused = wire.ask("PUT", queue)
    assert (refused.status, refused.code) == (409, "QueueBeingDeleted")
    wire.stage.later(1)
    assert wire.ask("PUT", queue).status == 201


def test_policies_are_kept_and_their_times_shown_in_one_form(wire: Any) -> None:
    queue = wire.queue()
    assert wire.ask("GET", f"{queue}?comp=acl").xml.tag == "SignedIdentifiers"
    body = ACL.format(
        POLICY.format("all &amp; more", "<Start>2026-01-01</Start><Expiry>2026-12-31T23:59:59.0000001Z</Expiry>"
                      "<Permission>raup</Permission>")
        + "<SignedIdentifier><Id>bare</Id></SignedIdentifier>"
        + POLICY.format("empty", "<Start/><Permission></Permission>")
        + POLICY.format("x" * 64, "") + POLICY.format("fifth", "")
    )  # fmt: skip
    assert wire.ask("PUT", f"{queue}?comp=acl", body).status == 204
    shown = wire.ask("GET", f"{queue}?comp=acl")
    assert shown.texts("SignedIdentifier/Id") == ["all & more", "bare", "empty", "x" * 64, "fifth"]
    assert shown.texts("SignedIdentifier/AccessPolicy/Start") == ["2026-01-01T00:00:00.0000000Z"]
    assert shown.texts("SignedIdentifier/AccessPolicy/Expiry") == ["2026-12-31T23:59:59.0000001Z"]
    assert shown.texts("SignedIdentifier/AccessPolicy/Permission") == ["raup"]
    assert wire.ask("HEAD", f"{queue}?comp=acl").status == 200
    assert wire.ask("PUT", f"{queue}?comp=metadata", headers={"x-ms-meta-a": "1"}).status == 204
    assert len(wire.ask("GET", f"{queue}?comp=acl").texts("SignedIdentifier")) == 5, "metadata leaves them alone"
    assert wire.ask("PUT", f"{queue}?comp=acl").status == 204
    assert wire.ask("GET", f"{queue}?comp=acl").texts("SignedIdentifier") == []
    for method in ("GET", "PUT"):
        assert wire.ask(method, f"{queue}?comp=acl", version="2011-08-18").code == "FeatureVersionMismatch"


@for_each(
    ("inside", "code"),
    [
        ("".join(POLICY.format(number, "") for number in range(6)), "InvalidXmlDocument"),
        (POLICY.format("x" * 65, ""), "InvalidXmlDocument"),
        (POLICY.format("a", "") * 2, "InvalidXmlDocument"),
        (POLICY.format("", ""), "MissingRequiredXmlNode"),
        ("<SignedIdentifier/>", "MissingRequiredXmlNode"),
        (POLICY.format("a", "<Start>yesterday</Start>"), "InvalidXmlDocument"),
        (POLICY.format("a", "<Expiry>2026-02-30</Expiry>"), "InvalidXmlDocument"),
        (POLICY.format("a", "<Expiry>2026-02-03T04:05:06.123Z</Expiry>"), "InvalidXmlDocument"),
        (POLICY.format("a", "<Expiry>2026-02-03T04:05:06.123456Z</Expiry>"), "InvalidXmlDocument"),
        (POLICY.format("a", "<Start>2026-02-03T04:05:06.123456789Z</Start>"), "InvalidXmlDocument"),
        (POLICY.format("a", "<Start>2026-02-03T04:05:06+00:00</Start>"), "InvalidXmlDocument"),
        (POLICY.format("a", "<Start>2026-02-03T04:05:06.1234567-05:00</Start>"), "InvalidXmlDocument"),
        (POLICY.format("a", "<Permission>rx</Permission>"), "InvalidXmlDocument"),
        (POLICY.format("a", "<Permission>rr</Permission>"), "InvalidXmlDocument"),
        (POLICY.format("a", "<Permission>par</Permission>"), "InvalidXmlDocument"),
        (POLICY.format("a", "<Owner/>"), "UnsupportedXmlNode"),
        (POLICY.format("a", "<Start/><Start/>"), "InvalidXmlDocument"),
        ("<Policy/>", "UnsupportedXmlNode"),
    ],
    fresh="wire",
)
def test_bad_policies_change_nothing(wire: Any, inside: str, code: str) -> None:
    queue = wire.queue()
    wire.ask("PUT", f"{queue}?comp=acl", ACL.format(POLICY.format("kept", "")))
    refused = wire.ask("PUT", f"{queue}?comp=acl", ACL.format(inside))
    assert (refused.status, refused.code) == (400, code)
    assert wire.ask("GET", f"{queue}?comp=acl").texts("SignedIdentifier/Id") == ["kept"]


def test_lists_are_alphabetical_and_come_in_pages(wire: Any) -> None:
    names = sorted(f"queue-{number}" for number in range(12))
    for name in reversed(names):
        wire.ask("PUT", f"/{name}")
    for name in ("Upper", "under_score", "a.fifo", "x" * 80):
        wire.stage.create(name)
    wire.stage.create("elsewhere", region="eu-west-1")
    wire.stage.create("foreign", account="111111111111")
    whole = wire.ask("GET", "/?comp=list")
    assert whole.texts("Queues/Queue/Name") == names
    assert whole.text("NextMarker") == ""
    assert whole.xml.get("ServiceEndpoint") == "http://127.0.0.1:10001/examplename/"
    found: list[str] = []
    marker = ""
    for _ in range(20):
        page = wire.ask("GET", f"/?comp=list&maxresults=5&prefix=queue&marker={marker}")
        assert page.text("Prefix") == "queue"
        assert page.text("MaxResults") == "5"
        assert (page.text("Marker") or "") == marker
        found += page.texts("Queues/Queue/Name")
        marker = page.text("NextMarker")
        if not marker:
            break
    assert found == names
    assert wire.ask("GET", "/?comp=list&prefix=queue-1").texts("Queues/Queue/Name") == [
        "queue-1",
        "queue-10",
        "queue-11",
    ]


def test_a_queue_whose_name_is_not_allowed_is_listed_by_its_alias(wire: Any) -> None:
    for name, alias in (("Upper", "b-queue"), ("z.fifo", "d-queue"), ("under_score", None)):
        wire.stage.create(name, alias=alias)
    for name in ("a-queue", "c-queue", "e-queue"):
        wire.queue(name)
    names = [f"{letter}-queue" for letter in "abcde"]
    assert wire.ask("GET", "/?comp=list").texts("Queues/Queue/Name") == names
    found: list[str] = []
    marker = ""
    while True:
        page = wire.ask("GET", f"/?comp=list&maxresults=2&marker={marker}")
        found += page.texts("Queues/Queue/Name")
        marker = page.text("NextMarker")
        if not marker:
            break
    assert found == names
    assert wire.ask("GET", "/?comp=list&prefix=d").texts("Queues/Queue/Name") == ["d-queue"]
    shown = wire.ask("GET", "/?comp=list&prefix=b", version="2012-02-12")
    assert shown.text("Queues/Queue/Url") == "http://127.0.0.1:10001/examplename/b-queue"


def test_lists_show_metadata_if_asked(wire: Any) -> None:
    wire.ask("PUT", "/orders", headers={"x-ms-meta-color": 'a<b>&"c"'})
    assert wire.ask("GET", "/?comp=list").xml.find("Queues/Queue/Metadata") is None
    shown = wire.ask("GET", "/?comp=list&include=metadata")
    assert shown.text("Queues/Queue/Metadata/color") == 'a<b>&"c"'


def test_lists_of_old_versions_have_urls(wire: Any) -> None:
    wire.queue()
    shown = wire.ask("GET", "/?comp=list", version="2012-02-12")
    assert shown.xml.get("AccountName") == "http://127.0.0.1:10001/examplename/"
    assert shown.text("Queues/Queue/Url") == "http://127.0.0.1:10001/examplename/orders"


@for_each(
    ("query", "code"),
    [
        ("maxresults=0", "OutOfRangeQueryParameterValue"),
        ("maxresults=5001", "OutOfRangeQueryParameterValue"),
        ("maxresults=many", "InvalidQueryParameterValue"),
        ("marker=garbage", "InvalidMarker"),
        ("marker=1!", "InvalidMarker"),
        ("marker=1!b3J%01kZXJz", "InvalidMarker"),
        ("prefix=%00", "InvalidQueryParameterValue"),
        ("prefix=a%EF%BF%BF", "InvalidQueryParameterValue"),
        ("marker=1!%C3%A9", "InvalidMarker"),
        ("marker=1!%25%25%25%25x", "InvalidMarker"),
        ("include=everything", "InvalidQueryParameterValue"),
        ("timeout=soon", "InvalidQueryParameterValue"),
    ],
)
def test_bad_lists(wire: Any, query: str, code: str) -> None:
    refused = wire.ask("GET", f"/?comp=list&{query}")
    assert (refused.status, refused.code) == (400, code)


@for_each(
    "host",
    [
        "examplename.queue.core.windows.net",
        "examplename.queue.localhost:10001",
        "examplename.localhost:10001",
        "ExampleName.queues.example",
    ],
    fresh="wire",
)
def test_host_style(wire: Any, host: str) -> None:
    wire.configure(base_domain="queues.example")
    assert wire.ask("PUT", "/orders", host=host, path_style=False).status == 201
    shown = wire.ask("GET", "/?comp=list", host=host, path_style=False)
    assert shown.texts("Queues/Queue/Name") == ["orders"]
    assert shown.xml.get("ServiceEndpoint") == f"http://{host}/"
    secondary = wire.ask(
        "GET", "/?comp=list", host=host.replace("name.", "name-secondary.", 1).lower(), path_style=False
    )
    # A secondary host's name is signed as the account's own.
    assert secondary.status == 200


@for_each("host", ["veilmq.queue:10001", "veilmq.queue.svc", "VEILMQ.queue.svc.cluster.local:10001"], fresh="wire")
def test_a_kubernetes_service_in_a_namespace_of_that_name_names_no_account(wire: Any, host: str) -> None:
    assert wire.ask("PUT", "/examplename/orders", host=host).status == 201
    assert wire.ask("GET", "/examplename?comp=list", host=host).texts("Queues/Queue/Name") == ["orders"]


@for_each("path", ["", "/", "/examplename"])
def test_the_service_itself(wire: Any, path: str) -> None:
    answer = wire.ask("GET", f"{path}?comp=list", path_style=False, host="127.0.0.1")
    assert answer.status == (200 if path == "/examplename" else 400)


@for_each("path", ["/orders/other", "/orders/messages/x/y", "/orders//messages", "//orders", "/a/b/c/d/e"])
def test_paths_that_name_nothing(wire: Any, path: str) -> None:
    refused = wire.ask("GET", f"/examplename{path}")
    assert refused.status == 400
    assert refused.code in {"InvalidUri", "MissingRequiredQueryParameter", "OutOfRangeInput"}


def test_a_slash_at_the_end_changes_nothing(wire: Any) -> None:
    queue = wire.queue()
    assert wire.put(f"{queue}").status == 201
    assert wire.get(f"{queue}", "/").status == 200
    assert wire.ask("GET", f"{queue}/?comp=metadata").status == 200


def test_a_secondary_before_the_path_of_the_primary(wire: Any) -> None:
    wire.queue("orders")
    listed = wire.ask("GET", "/examplename-secondary/examplename?comp=list")
    assert listed.status == 200
    assert listed.xml.get("ServiceEndpoint").endswith("/examplename-secondary/")
    assert wire.ask("GET", "/examplename-secondary/examplename/orders/messages?peekonly=true").status == 200
    assert wire.ask("GET", "/examplename-secondary/another/orders/messages?peekonly=true").status == 400
    assert wire.ask("GET", "/examplename/examplename/orders/messages?peekonly=true").status == 400


def test_the_secondary_endpoint_only_reads(wire: Any) -> None:
    queue = wire.queue()
    wire.put(queue, "seen from both")
    there = "/examplename-secondary"
    assert wire.ask("GET", f"{there}/orders/messages?peekonly=true").texts("QueueMessage/MessageText") == [
        "seen from both"
    ]
    assert wire.ask("GET", f"{there}?comp=list").xml.get("ServiceEndpoint").endswith("/examplename-secondary/")
    for method, target in (("GET", "/orders/messages"), ("DELETE", "/orders/messages"), ("PUT", "/other")):
        refused = wire.ask(method, f"{there}{target}")
        assert (refused.status, refused.code) == (403, "InsufficientAccountPermissions")
