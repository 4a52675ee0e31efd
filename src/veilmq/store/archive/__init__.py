"""A folder or object store that keeps snapshots and records: what is written there, and how it is found again.

Strategy: an object is written whole and never changed. What makes others count, a manifest, is written last. So a write
that ends anywhere leaves what was there before, and perhaps objects that nobody names. Local folders need no package;
for everything else fsspec speaks to the store (extra `large`, and the store's own package).
"""

from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

from veilmq.store.files import durable_write, make_directory

_FAULTS: Final = {
    "s3": ("botocore.exceptions.BotoCoreError", "botocore.exceptions.ClientError", "aiohttp.ClientError"),
    "gs": ("aiohttp.ClientError", "gcsfs.retry.HttpError", "google.auth.exceptions.GoogleAuthError"),
    "abfs": ("azure.core.exceptions.AzureError",),
    "oss": ("oss2.exceptions.OssError",),
}
"""What a store's package raises besides OSError."""
_MISSING: Final = object()
_ALIASES: Final = {"s3a": "s3", "gcs": "gs", "az": "abfs", "abfss": "abfs", "adl": "abfs"}


class PlaceUnusable(Exception):
    """The URL cannot be used. The text says what to do."""


class PlaceFailed(OSError):
    """The store did not do it. Trying again may help."""


class Place(Protocol):
    """Objects below a URL, by keys with slashes. Any thread."""

    def write(self, key: str, content: bytes) -> None:
        """Write an object whole and durably. Raises PlaceFailed."""
        ...

    def read(self, key: str) -> bytes | None:
        """An object's content; None: it is not there. Raises PlaceFailed."""
        ...

    def list(self, folder: str) -> list[str]:
        """Names in a folder, sorted, without those of nested folders' content. Raises PlaceFailed."""
        ...

    def remove(self, key: str) -> None:
        """Remove an object, or a folder with all in it, if it is there. Raises PlaceFailed."""
        ...


def place_at(url: str) -> Place:
    """A path, file:///path, s3://bucket/prefix or whatever else fsspec knows. Raises PlaceUnusable."""
    scheme, mark, rest = url.partition("://")
    if not mark or scheme == "file":
        return Folder(Path(rest if mark else url))
    try:
        import fsspec

        return Objects(fsspec.filesystem(_ALIASES.get(scheme, scheme), use_listings_cache=False), scheme, url)
    except ModuleNotFoundError as error:
        advice = "pip install 'veilmq[large]', and s3fs for s3://"
        raise PlaceUnusable(f"{url}: the package {error.name} is missing: {advice}") from None
    except (ImportError, ValueError) as error:
        raise PlaceUnusable(f"{url}: {error}") from None


class Folder:
    """A local folder. See `Place`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, key: str, content: bytes) -> None:
        path = self._path / key
        try:
            make_directory(path.parent, 0o700, 0o700)
            durable_write(path, content)
        except OSError as error:
            raise PlaceFailed(f"{path}: {error.strerror}") from error

    def read(self, key: str) -> bytes | None:
        try:
            return (self._path / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise PlaceFailed(f"{self._path / key}: {error.strerror}") from error

    def list(self, folder: str) -> list[str]:
        try:
            return sorted(each.name for each in (self._path / folder).iterdir() if not each.name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise PlaceFailed(f"{self._path / folder}: {error.strerror}") from error

    def remove(self, key: str) -> None:
        path = self._path / key
        try:
            if path.is_dir():
                for each in path.iterdir():
                    self.remove(f"{key}/{each.name}")
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise PlaceFailed(f"{path}: {error.strerror}") from error


class Objects:
    """An object store, through fsspec. See `Place`."""

    def __init__(self, files: Any, scheme: str, url: str) -> None:
        self._files = files
        self._root = str(files._strip_protocol(url)).rstrip("/")
        names = _FAULTS.get(_ALIASES.get(scheme, scheme), ())
        self._faults: tuple[type[BaseException], ...] = (
            OSError, EOFError, *(fault for name in names for fault in _class_of(name))
        )  # fmt: skip

    def write(self, key: str, content: bytes) -> None:
        if self._try(self._files.pipe_file, self._at(key), content) is _MISSING:
            raise PlaceFailed(f"{self._at(key)}: there is no such bucket")

    def read(self, key: str) -> bytes | None:
        found = self._try(self._files.cat_file, self._at(key))
        return None if found is _MISSING else bytes(found)

    def list(self, folder: str) -> list[str]:
        found = self._try(self._files.ls, self._at(folder), detail=False)
        return [] if found is _MISSING else sorted({str(each).rstrip("/").rpartition("/")[2] for each in found})

    def remove(self, key: str) -> None:
        self._try(self._files.rm, self._at(key), recursive=True)

    def _at(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _try(self, call: Any, *arguments: Any, **options: Any) -> Any:
        """`_MISSING` if it is not there."""
        try:
            return call(*arguments, **options)
        except FileNotFoundError:
            return _MISSING
        except self._faults as error:
            raise PlaceFailed(f"{arguments[0]}: {type(error).__name__}: {error}") from error


def _class_of(name: str) -> list[type[BaseException]]:
    """The class of that name, if its package is there."""
    module, _, attribute = name.rpartition(".")
    try:
        return [getattr(import_module(module), attribute)]
    except ImportError:
        return []
