"""Numbers in S3 objects, through S3's own protocol."""

from collections.abc import Iterator
from datetime import timedelta

import boto3
import pytest
from moto.backends import get_backend
from moto.core import DEFAULT_ACCOUNT_ID
from moto.server import ThreadedMotoServer

from veilmq.client.errors import StorageHeld, StorageLost
from veilmq.client.ordered import ObjectStorage
from veilmq.testing.client_contract.stage import MovableClock

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Of an S3 server with the bucket `numbers`."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    client = boto3.client(
        "s3", endpoint_url=url, aws_access_key_id="any", aws_secret_access_key="any", region_name="us-east-1"
    )
    client.create_bucket(Bucket="numbers")
    client.close()
    yield url
    server.stop()


def storage(endpoint: str, clock: MovableClock, name: str) -> ObjectStorage:
    return ObjectStorage(f"s3://numbers/{name}", clock=clock, key="any", secret="any", endpoint_url=endpoint)


def pass_time(name: str, clock: MovableClock, seconds: float) -> None:
    """For the clock, and for what the service has written."""
    clock.advance(seconds)
    objects = get_backend("s3")[DEFAULT_ACCOUNT_ID]["aws"].buckets["numbers"].keys
    for key in [key for key in objects if key.startswith(name)]:
        objects[key].last_modified -= timedelta(seconds=seconds)


def test_a_second_holder_is_refused_and_a_silent_one_fenced(endpoint: str) -> None:
    clock = MovableClock()
    first, second = (storage(endpoint, clock, "orders") for _ in range(2))
    first.acquire()
    assert first.load() is None
    first.save(b"[1]")
    with pytest.raises(StorageHeld):
        second.acquire()
    pass_time("orders", clock, 31)
    second.acquire()
    assert second.load() == b"[1]"
    with pytest.raises(StorageLost):
        first.save(b"[2]")
    second.save(b"[3]")
    second.release()
    first.release()
    third = storage(endpoint, clock, "orders")
    third.acquire()
    assert third.load() == b"[3]"
    third.release()


def test_creation_is_exclusive(endpoint: str) -> None:
    """Two take over in the same instant: one of them is refused."""
    clock = MovableClock()
    first, second = (storage(endpoint, clock, "race") for _ in range(2))
    listing = second._generations

    def late() -> list[int]:
        found = listing()
        second._generations = listing  # type: ignore[method-assign]
        first.acquire()
        return found

    second._generations = late  # type: ignore[method-assign]
    with pytest.raises(StorageHeld):
        second.acquire()
    first.save(b"[1]")
    first.release()
