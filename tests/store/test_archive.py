"""Snapshots at a URL: what is written comes back, and half of it is nothing. In folders, memory, and moto's S3."""

from collections.abc import Iterator
from pathlib import Path

import boto3
import fsspec
import msgspec
import pytest
from moto.server import ThreadedMotoServer
from tests.users import other_user

from veilmq.engine.directory import archive_at
from veilmq.model.instant import Instant
from veilmq.store.archive import (
    PART_BYTES,
    PlaceFailed,
    PlaceUnusable,
    fetch,
    place_at,
    remove_others,
    shown_url,
    snapshots,
    upload,
)
from veilmq.store.archive.shipping import State
from veilmq.store.log import Point, Position, SnapshotBad
from veilmq.testing.client_contract import for_each

POINT = Point(Position(7, 1, 99), Instant(5))


def paced(size: int) -> None:
    """Do not wait."""


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A URL in an S3 that s3fs finds by the environment."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "A")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "s")
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="archive")
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # it may hold one for another endpoint
        yield "s3://archive/veilmq"
    server.stop()


@pytest.mark.slow
def test_a_snapshot_comes_back_from_everywhere(tmp_path: Path, bucket: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"first" * (PART_BYTES // 5 + 1) + b"the last part is short")

    @for_each("url", [str(tmp_path / "place"), f"file://{tmp_path}/other", "memory://archive", bucket])
    def comes_back(url: str) -> None:
        place = place_at(url)
        assert place.list("a/snapshots") == []
        place.write("a/snapshots/0000000000000003-half/00000", b"left by a kill")
        folder, manifest = upload(place, "a", file, POINT, state_format=1, pace=paced, verified_by="two")
        assert snapshots(place, "a") == [(folder, manifest)]
        assert (manifest.point, manifest.verified_by) == (POINT, "two")
        assert fetch(place, folder, manifest, tmp_path / "back") == POINT
        assert (tmp_path / "back").read_bytes() == file.read_bytes()
        remove_others(place, "a", {folder}, POINT.position.lsn)
        assert place.list("a/snapshots") == [folder.rpartition("/")[2]]
        place.write(f"{folder}/00001", place.read(f"{folder}/00000") or b"")
        with pytest.raises(SnapshotBad, match="part 1 of the snapshot"):
            fetch(place, folder, manifest, tmp_path / "back")
        place.remove(f"{folder}/00001")
        with pytest.raises(SnapshotBad, match="lacks part 1"):
            fetch(place, folder, manifest, tmp_path / "back")
        place.write(f"{folder}/manifest.json", b"{")
        assert snapshots(place, "a") == []
        place.remove("a")
        place.remove("a")
        assert place.list("a/snapshots") == []

    comes_back()


def test_a_place_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    with pytest.raises(PlaceUnusable, match="nowhere"):
        place_at("nowhere://bucket")
    (tmp_path / "file").touch()
    with pytest.raises(PlaceFailed, match="file"):
        place_at(str(tmp_path / "file")).write("a", b"")
    mistyped = tmp_path / "mistyped" / "archive"
    with pytest.raises(PlaceUnusable, match=f"because {mistyped.parent} is not there"):
        archive_at(str(mistyped), tmp_path, keep_us=1, every_s=1, wall=Instant(0))
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "state.json").write_bytes(msgspec.json.encode(State(url=str(mistyped))))
    archive_at(str(mistyped), tmp_path, keep_us=1, every_s=1, wall=Instant(0))
    assert not mistyped.parent.exists(), "a disk that is away for now"
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    with other_user(), pytest.raises(PlaceFailed, match=r"closed.*Permission denied"):
        place_at(str(closed / "above" / "archive"), is_new=True).write("a", b"")


def test_a_place_that_needs_more_than_a_url_is_refused_and_no_text_has_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the password holds what should be escaped."""
    with pytest.raises(PlaceUnusable) as refused:
        place_at("ftp://me:sec/re@t@host/a")
    told = "ftp:// needs more than a URL: missing a required argument: 'host'"
    assert str(refused.value) == f"ftp://me:***@host/a: {told}"
    place = place_at("memory://me:secret@host/a")
    place.write("a", b"")
    with pytest.raises(PlaceFailed, match=r"^/me:\*\*\*@host/a/a/b: FileExistsError: /me:\*\*\*@host/a/a$"):
        place.write("a/b", b"")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    for password, bucket in (("secret", r"me:\*\*\*@bucket"), ("sec/ret", r"me:\*\*\*")):
        with pytest.raises(PlaceFailed, match=f'(?s)^me:[*]{{3}}@bucket/a/a: .* bucket name "{bucket}"') as failed:
            place_at(f"s3://me:{password}@bucket/a").write("a", b"")
        assert "sec" not in str(failed.value)
    for url in ("s3://token@host/a", "s3://host:80/a", "/var/a:b@c"):
        assert shown_url(url) == url


@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_a_failure(bucket: str) -> None:
    with pytest.raises(PlaceFailed):
        place_at("s3://elsewhere/veilmq").write("a", b"")
