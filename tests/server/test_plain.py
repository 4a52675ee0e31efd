"""A request that is read plainly is the one that llhttp would have read."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from veilmq.accelerator import TWINS
from veilmq.protocols import Request
from veilmq.server.http import Limits
from veilmq.server.http.intake import Intake

LIMITS = Limits(header_bytes_max=4096, body_bytes_max=2000, header_count_max=10)
SCOPE = b"AWS4-HMAC-SHA256 Credential=AKID/20260101/eu/sqs/aws4_request, SignedHeaders=host;x-amz-date, Signature="
POST_ABC = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc"

Read = tuple[list[tuple[Request, int]], int | None, int]


class ParsedIntake(Intake):
    """Leaves every request to llhttp."""

    def read_plain(self, data: bytes) -> Request | None:
        return None


class CountingIntake(Intake):
    """Counts what was read plainly."""

    plain = 0

    def read_plain(self, data: bytes) -> Request | None:
        request = super().read_plain(data)
        self.plain += request is not None
        return request


def read(intake: Intake, pieces: list[bytes]) -> Read:
    """Requests with the flags of their answers, the status of a refusal, and the bytes held for an unfinished one."""
    requests: list[tuple[Request, int]] = []
    for piece in pieces:
        while piece and intake.refusal is None:
            piece = intake.feed(piece)
            while intake.ready:
                requests.append(intake.ready.popleft())
    return requests, intake.refusal and intake.refusal.status, intake.fed_bytes


def agree(pieces: list[bytes]) -> int:
    """Assert that both read the same; return how many requests were read plainly."""
    counting = CountingIntake(LIMITS, "peer", False, lambda: "id")
    got = read(counting, pieces)
    assert got == read(ParsedIntake(LIMITS, "peer", False, lambda: "id"), pieces)
    return counting.plain


def framed(line: bytes, headers: list[bytes], body: bytes, length: bytes | None = None) -> bytes:
    length = b"%d" % len(body) if length is None else length
    return b"\r\n".join([line, *headers, b"Content-Length: " + length, b"", body])


LINES = st.one_of(
    st.sampled_from(
        [
            *(b"POST / HTTP/1.1", b"GET /a/b?c=%20 HTTP/1.1", b"PUT /q HTTP/1.1", b"DELETE /q?x HTTP/1.1"),
            *(b"HEAD / HTTP/1.1", b"POST / HTTP/1.0", b"POST  / HTTP/1.1", b"POST /\xc3\xa4 HTTP/1.1"),
            *(b"POST /#f HTTP/1.1", b"post / HTTP/1.1", b"POST http://h/ HTTP/1.1", b"OPTIONS * HTTP/1.1"),
            *(b"POST / HTTP/1.1 ", b"POST /\t HTTP/1.1", b"PRI * HTTP/2.0"),
        ]
    ),
    st.binary(max_size=12).map(lambda some: b"POST /" + some + b" HTTP/1.1"),
)
NAMES = st.one_of(
    st.sampled_from(
        [
            *(b"Host", b"host", b"X-Amz-Date", b"User-Agent", b"Connection", b"Authorization", b"Content-Length"),
            *(b"Transfer-Encoding", b"Expect", b"Upgrade", b"X-Ms-Meta-Aa", b"Content-Type", b"Proxy-Connection"),
        ]
    ),
    st.binary(max_size=3),
)
VALUES = st.one_of(
    st.sampled_from(
        [
            *(b"h", b"keep-alive", b"Keep-Alive", b"close", b"upgrade", b"keep-alive, upgrade", b"chunked"),
            *(b"100-continue", b"3", b" 3", b"3 ", b"+3", b"03", b"3, 3", b"", b"x y", b"\xe4", b"a\tb", b"a\0b"),
            *(b"a\rb", b"a\nb", b"\x7f", SCOPE, SCOPE + b"0" * 64, SCOPE + b"f" * 64, SCOPE + b"0" * 64 + b" "),
            *(b"[::1]:9", b"[::1", b"h:1", b"h:x", b"h/a", SCOPE + b"-" * 64, SCOPE + b"0" * 65),
        ]
    ),
    st.binary(max_size=4),
)
COLONS = st.sampled_from([b": ", b": ", b":", b" : ", b":\t", b""])
HEADERS = st.builds(lambda name, colon, value: name + colon + value, NAMES, COLONS, VALUES)
REQUESTS = st.builds(
    framed,
    LINES,
    st.lists(HEADERS, max_size=4).map(lambda some: [b"Host: h", *some]),
    st.sampled_from([b"", b"abc", b"\r\n\r\n", b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", b"x" * 1999, b"x" * 2001]),
    st.sampled_from([None, None, None, None, b"0", b"3", b"5", b" 3", b"+3", b"03", b"", b"3 ", b"2 2"]),
)


@settings(max_examples=2_000)
@given(st.lists(REQUESTS, min_size=1, max_size=3), st.booleans(), st.integers(0, 300))
@example([POST_ABC] * 2, True, 0)
@example([framed(b"POST / HTTP/1.1", [b"Host: h", b"Proxy-Connection: close"], b""), POST_ABC], False, 0)
@example([POST_ABC + b"POST / HT", b"TP/1.1\r\nHost: h\r\n\r\n"], False, 0)
@example([framed(b"POST / HTTP/1.1", [b"Host: h", b"Authorization: " + SCOPE + b"0" * 64 + b" "], b"")] * 2, False, 0)
@example([framed(b"POST / HTTP/1.0", [b"Host: h"], b""), framed(b"POST / HTTP/1.1", [b"Host: h"], b"")], False, 0)
def test_both_readers_agree(stream, together, cut):
    if together:
        whole = b"".join(stream)
        stream = [whole[:cut], whole[cut:]]
    agree(stream)


def test_what_sdks_send_is_read_plainly():
    head = [b"Host: 127.0.0.1:9324", b"User-Agent: Boto3/1.43", b"X-Amz-Target: AmazonSQS.SendMessage"]
    signed = [b"Authorization: " + SCOPE + bytes([digit]) * 64 for digit in b"0123"]
    requests = [framed(b"POST / HTTP/1.1", [*head, each, b"Connection: keep-alive"], b"{}") for each in signed]
    azure = b"PUT /devstoreaccount1/q/messages/id?popreceipt=a%3D&visibilitytimeout=0 HTTP/1.1"
    requests += [framed(azure, [*head, b"x-ms-date: now"], b"<a/>"), b"GET /q?x=1 HTTP/1.1\r\nHost: h\r\n\r\n"]
    assert agree(requests) == len(requests)


def test_too_many_headers_and_too_long_bodies_are_left_to_llhttp():
    many = [b"Host: h", *(b"X-%d: y" % number for number in range(8))]
    assert agree([framed(b"POST / HTTP/1.1", many, b"")]) == 1
    assert agree([framed(b"POST / HTTP/1.1", [*many, b"X-9: y"], b"")]) == 0
    assert agree([framed(b"POST / HTTP/1.1", [b"Host: h"], b"x" * 2000)]) == 1
    assert agree([framed(b"POST / HTTP/1.1", [b"Host: h"], b"x" * 2001)]) == 0
    assert agree([framed(b"POST / HTTP/1.1", [b"Host: h", b"X: " + b"y" * 4096], b"")]) == 0
    for length in range(4_000, 4_110):  # around the bound, without the blanks that the intake counts
        short = [b"Host:h", *(b"X%d:y" % number for number in range(7))]
        agree([framed(b"POST / HTTP/1.1", [*short, b"X:" + b"y" * length], b"")])


def test_a_host_that_is_none_is_left_to_llhttp():
    # The accelerator leaves addresses in brackets to llhttp, too.
    assert agree([framed(b"POST / HTTP/1.1", [b"Host: [::1]:9"], b"")] * 2) == (0 if "read_plain" in TWINS else 2)
    for host in (b"h/a", b"u@h", b"h:x", b"[::1", b"h" * 600 + b"/"):
        assert agree([framed(b"POST / HTTP/1.1", [b"Host: " + host], b"")]) == 0
