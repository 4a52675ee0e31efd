"""URLs of queues and accounts: what each form means, what is refused, and that no secret is ever shown."""

import traceback
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veilmq.client.adapters.connect import Address, parse_url
from veilmq.model.errors import ParameterInvalid
from veilmq.testing.client_contract import for_each

GOOD = {
    "veil:///var/lib/veilmq?queue=jobs": Address(kind="embedded", directory="/var/lib/veilmq", queue="jobs"),
    "veil:///a%20b/%C5%BE?queue=jobs&create=1": Address(
        kind="embedded", directory="/a b/ž", queue="jobs", create=True
    ),
    "veil:///data": Address(kind="embedded", directory="/data"),
    "veil:///data?queue=q&account=111111111111&region=eu-west-1&create=0": Address(
        kind="embedded", directory="/data", queue="q", account="111111111111", region="eu-west-1"
    ),
    "veil://127.0.0.1:9324/jobs": Address(kind="veil", host="127.0.0.1", port=9324, queue="jobs"),
    "veil://queues.example/jobs": Address(kind="veil", host="queues.example", queue="jobs"),
    "veil://key:se%2Fcr%40et@[::1]:9324/jobs?tls=1&region=eu-west-1": Address(
        kind="veil", key="key", secret="se/cr@et", host="::1", port=9324, queue="jobs", tls=True, region="eu-west-1"
    ),
    "veil://127.0.0.1:9324/": Address(kind="veil", host="127.0.0.1", port=9324),
    "veil://127.0.0.1:9324": Address(kind="veil", host="127.0.0.1", port=9324),
    "sqs:///jobs?region=eu-west-1": Address(kind="sqs", queue="jobs", region="eu-west-1"),
    "sqs:///": Address(kind="sqs"),
    "sqs:///123456789012/jobs.fifo": Address(kind="sqs", account="123456789012", queue="jobs.fifo"),
    "sqs://AKID:s%2Be%2Fc@127.0.0.1:9324/000000000000/jobs?region=us-east-1&tls=0&create=1": Address(
        kind="sqs", key="AKID", secret="s+e/c", host="127.0.0.1", port=9324, account="000000000000", queue="jobs",
        region="us-east-1", tls=False, create=True,
    ),
    "veil://127.0.0.1/?retries=0": Address(kind="veil", host="127.0.0.1", retries=False),
    "sqs://127.0.0.1:9324/jobs": Address(kind="sqs", host="127.0.0.1", port=9324, queue="jobs"),
    "azure://:k%3D%3D@127.0.0.1:10001/devstoreaccount1/jobs": Address(
        kind="azure", secret="k==", host="127.0.0.1", port=10001, account="devstoreaccount1", queue="jobs"
    ),
    "azure:///account/jobs": Address(kind="azure", account="account", queue="jobs"),
    "azure:///account/": Address(kind="azure", account="account"),
    "azure://:k@/account/jobs": Address(kind="azure", secret="k", account="account", queue="jobs"),
    "mns://id:secret@1.mns.example/jobs?tls=1": Address(
        kind="mns", key="id", secret="secret", host="1.mns.example", queue="jobs", tls=True
    ),
}  # fmt: skip

BAD = [
    "",
    "jobs",
    "http://127.0.0.1/jobs",
    "veil:jobs",
    "veil:/data?queue=jobs",
    "veil:///",
    "veil:///data%00?queue=jobs",
    "veil:///data?queue=",
    "veil:///data?queue=a&queue=b",
    "veil:///data?name=jobs",
    "veil:///data?queue=jobs&create=yes",
    "veil:///data?queue=jobs&create",
    "veil:///data?queue=%FF",
    "veil:///data?queue=100%",
    "veil:///data?queue=a b",
    "veil:///data?queue=a\n",
    "veil://:9324/jobs",
    "veil://host:0/jobs",
    "veil://host:65536/jobs",
    "veil://host:9324x/jobs",
    "veil://host:/jobs",
    "veil://host:9324/a/b",
    "veil://host:9324//jobs",
    "veil://key@host:9324/jobs",
    "veil://key:@host:9324/jobs",
    "veil://:secret@host:9324/jobs",
    "veil://a:b:c@host:9324/jobs",
    "veil://a:b@c@host:9324/jobs",
    "veil://key:secret@/jobs",
    "veil://[::1:9324/jobs",
    "veil://host:9324/jobs#part",
    "veil://host:9324/jobs?queue=other",
    "sqs://key:secret@/jobs",
    "sqs://host/a/b/c",
    "azure://key:secret@host/account/jobs",
    "azure:///account/jobs/more",
    "mns:///jobs",
]


@for_each("url", GOOD)
def test_what_a_url_means(url: str) -> None:
    assert parse_url(url) == GOOD[url]


def test_a_directory_with_two_slashes_is_told_of_the_third() -> None:
    with pytest.raises(ParameterInvalid, match="veil:///DIR"):
        parse_url("veil://data?queue=jobs")


@for_each("url", BAD)
def test_what_is_no_url_of_ours(url: str) -> None:
    with pytest.raises(ParameterInvalid) as refused:
        parse_url(url)
    assert refused.value.parameter == "url"


def test_the_wrong_parameter_is_named_where_it_cannot_be_part_of_a_secret() -> None:
    with pytest.raises(ParameterInvalid, match="not name"):
        parse_url("veil:///data?name=jobs")


# Long and odd enough to stand in no text of ours.
_CHARACTERS = st.one_of(st.sampled_from("/?#&=@:%+[];,. 0"), st.characters(codec="utf-8", exclude_categories=["Cs"]))
SECRETS = st.text(_CHARACTERS, min_size=1, max_size=8).map(lambda text: f"Zq{text}Xj")
PLACES = ["veil://key:{}@host:9324/jobs", "sqs://key:{}@host:9324/000000000000/jobs", "mns://id:{}@host/jobs",
          "azure://:{}@host:10001/account/jobs"]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@given(secret=SECRETS)
def test_a_secret_that_is_encoded_arrives_and_is_not_shown(place: str, secret: str) -> None:
    address = parse_url(place.format(quote(secret, safe="")))
    assert address.secret == secret
    assert secret not in repr(address)
    assert secret not in str(address)


@pytest.mark.parametrize("place", PLACES)
@given(secret=SECRETS)
def test_no_part_of_a_secret_that_is_not_encoded_is_shown(place: str, secret: str) -> None:
    try:
        shown = repr(parse_url(place.format(secret)))
    except ParameterInvalid as error:
        shown = "".join(traceback.format_exception(error)[-1:]) + repr(error)
        hidden = error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)
    else:
        hidden = True
    assert hidden
    assert "Zq" not in shown
    assert "Xj" not in shown
