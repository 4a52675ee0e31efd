"""Object stores for the tests: S3 by moto (s3_side.py), Azure's blobs by azurite; both are told by the environment."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar
from urllib.request import Request, urlopen

import boto3
import fsspec
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake
from tests.pipeline import delta_side, s3_side
from tests.support.azurite import azurite as emulator

from veilmq.client.adapters.connect import DEVELOPMENT_KEYS
from veilmq.pipeline.places.delta import write_parted
from veilmq.pipeline.sinks.delta import Written, add_files

T = TypeVar("T")

SCHEMA = pa.schema([("n", pa.int64())])
BUCKET = "tables"
((ACCOUNT, KEY),) = DEVELOPMENT_KEYS.items()


class Store:
    """A bucket of an S3 store that can fail, or a container of Azurite; a table of it is made with a name."""

    def __init__(self, scheme: str, environment: dict[str, str], endpoint: str = "") -> None:
        self.scheme, self.environment, self.endpoint = scheme, environment, endpoint

    @property
    def url(self) -> str:
        return f"{self.scheme}://{BUCKET}"

    def storage(self, **more: str) -> dict[str, str]:
        """For deltalake."""
        return self.environment | more

    def make(self, name: str) -> str:
        write_deltalake(f"{self.url}/{name}", SCHEMA.empty_table(), storage_options=self.storage())
        return f"{self.url}/{name}"

    def put(self, table: str, name: str, numbers: list[int]) -> Written:
        """As an executor writes it."""
        files, path = fsspec.core.url_to_fs(f"{table}/{name}")
        with files.open(path, "wb") as file:
            pq.write_table(pa.table({"n": numbers}, SCHEMA), file)
        return Written(name, files.size(path), len(numbers), delta_side.QUERY)

    def fault(self, **given: str) -> None:
        """See s3_side.py."""
        query = "&".join(f"{name}={value}" for name, value in given.items())
        with urlopen(Request(f"{self.endpoint}/fault?{query}", method="POST")) as answer:
            assert answer.status == 200

    def is_armed(self) -> bool:
        """Whether the fault is still to come."""
        with urlopen(f"{self.endpoint}/armed") as answer:
            return bool(answer.read() == b"yes")

    def rows(self, table: str) -> list[int]:
        found: list[int] = DeltaTable(table, storage_options=self.storage()).to_pyarrow_table()["n"].to_pylist()
        return sorted(found)


def commit_parted(place: str, rows: pa.Table, batch: int, partitions: Sequence[str]) -> None:
    """As a task and the driver do, without Spark."""
    parts = write_parted(iter(rows.to_batches(max_chunksize=2)), place, rows.schema, partitions, 0)
    add_files(place, rows.schema, [Written(*part, "q", frozenset(), values) for part, values in parts], "q", batch)


def falls_asleep(lock: str) -> None:
    """The holder of that lock is on another machine, and did not renew it for too long."""
    files, path = fsspec.core.url_to_fs(lock)
    parent, _, name = path.rpartition("/")
    (found,) = (each for each in files.ls(parent, detail=False, refresh=True) if f"/{name}.0" in each)
    content = json.loads(files.cat_file(found))
    content["owner"] |= {"place": "elsewhere", "seconds": -60.0}
    files.pipe_file(found, json.dumps(content, separators=(",", ":")).encode())


def taken_over(lock: str, take: Callable[[], T], taken: type[Exception]) -> T:
    """What `take` returns once the holder of that lock has fallen asleep; again, if it renewed its hold before that."""
    while True:
        falls_asleep(lock)
        with suppress(taken):
            return take()


@contextmanager
def faulty(*upstream: str) -> Iterator[str]:
    """The endpoint of s3_side.py."""
    process = subprocess.Popen(
        [sys.executable, s3_side.__file__, *upstream], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(30)


@contextmanager
def moto() -> Iterator[Store]:
    secrets = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"}
    with faulty() as endpoint:
        with told(secrets | {"AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"}) as environment:
            boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=BUCKET)
        yield Store("s3", environment, endpoint)


@contextmanager
def azurite() -> Iterator[Store]:
    with emulator("blob") as url, faulty(url.removeprefix("http://")) as endpoint:
        secrets = {
            "AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};"
            f"AccountKey={KEY};BlobEndpoint={endpoint}/{ACCOUNT};",
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": f"{endpoint}/{ACCOUNT}",
            "AZURE_ALLOW_HTTP": "true",
        }
        with told(secrets) as environment:
            fsspec.filesystem("abfs").mkdir(BUCKET)
        yield Store("abfs", environment, endpoint)


@contextmanager
def told(environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """What speaks to stores by the environment knows this one alone: fsspec keeps its file systems."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    for scheme in ("s3", "abfs"):
        fsspec.get_filesystem_class(scheme).clear_instance_cache()
    try:
        yield environment
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        for scheme in ("s3", "abfs"):
            fsspec.get_filesystem_class(scheme).clear_instance_cache()
