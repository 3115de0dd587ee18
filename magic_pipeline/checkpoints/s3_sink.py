"""An S3 bucket as storage, through s3fs: conditional writes, multipart uploads that are completed or aborted, ranged reads.

An object appears with its one PUT or with the completion of its multipart upload, never before; `exclusive` is
`If-None-Match: *`. Every request is repeated while the storage is away (patience.py). An answer that got lost may have
been a success, so each publication carries a token in the object's metadata, by which it knows its own object again.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
import secrets
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, BinaryIO

from magic_pipeline.checkpoints.failures import storage_error, surfaced
from magic_pipeline.checkpoints.patience import Patience, at_most
from magic_pipeline.checkpoints.s3_errors import UnsupportedError, call_s3
from magic_pipeline.checkpoints.s3_transfers import AT_ONCE, PART, PUBLICATION, Threads, Upload
from magic_pipeline.checkpoints.sinks import Names, StoredObject, Write
from magic_pipeline.errors import InputError, MissingObjectError, ObjectExistsError

if TYPE_CHECKING:
    import s3fs

logger = logging.getLogger("magic_pipeline.checkpoints")

# s3fs's arguments that make sense for checkpoints, and ours: region.
_OPTIONS = frozenset(
    [
        "anon",
        "endpoint_url",
        "profile",
        "region",
        "key",
        "secret",
        "token",
        "use_ssl",
        "client_kwargs",
        "config_kwargs",
        "requester_pays",
        "s3_additional_kwargs",
    ]
)
# A name, or the ARN of an access point.
_TO_REACH = 60.0  # seconds for the first answer of all: a mistyped host is no outage, and nothing is lost yet
_BUCKET = re.compile(r"[A-Za-z0-9._-]{1,255}|arn:[^/]+")


class S3Sink:
    """A bucket and a prefix in it.

    Args:
        location: "bucket/prefix".
        options: endpoint_url, profile, region, and s3fs's arguments; what is missing comes from the environment.
        patience: how long requests are repeated while the storage is away.

    Raises:
        InputError: an unknown option or no bucket.
    """

    reads_back = False

    def __init__(self, location: str, options: Mapping[str, Any], *, patience: Patience | None = None) -> None:
        self._bucket, _, prefix = location.rstrip("/").partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        if "@" in self._bucket or (":" in self._bucket and not self._bucket.startswith("arn:")):
            raise InputError(
                "expected s3://bucket/prefix, found a login in it; key and secret belong in a profile or the environment",
                field="storage",
            )
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            raise InputError(
                f"S3 has no option {', '.join(unknown)}; known are {', '.join(sorted(_OPTIONS))}",
                field="storage_options",
            )
        if not _BUCKET.fullmatch(self._bucket) or any(c in location for c in "?#*"):
            raise InputError(f"expected s3://bucket/prefix, found s3://{location}", field="storage")
        if prefix and any(part in ("", ".", "..") for part in prefix.split("/")):
            raise InputError(f"expected a prefix without empty parts, . and .., found s3://{location}", field="storage")
        _check_endpoint(options)
        self._options = dict(options)
        self._patience = patience or Patience()
        self._connected: tuple[int, s3fs.S3FileSystem] | None = None
        self._connecting = threading.Lock()
        self._conditional = True
        self._was_reached = False

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def publish(self, path: str, write: Write, *, exclusive: bool, size: int | None = None) -> None:
        handled = sys.exception()
        upload = Upload(self, path, exclusive=exclusive and self._conditional, size=size)
        if exclusive and not self._conditional and self.exists(path):
            raise ObjectExistsError(f"{self.url}/{path}: exists already, and is written only once")
        try:
            write(upload)  # type: ignore[arg-type]  # it has `write`, which is all that a writer may use
            upload.finish()
        except BaseException as error:
            upload.abort()
            if isinstance(error, UnsupportedError) and exclusive and self._conditional:
                logger.info("%s: %s", self.url, error)
                self._conditional = False
                return self.publish(path, write, exclusive=True, size=size)
            reason = surfaced(error, handled, f"{self.url}/{path}", upload.written, size)
            if reason is error:
                raise
            raise reason from (error if isinstance(reason, Exception) else None)

    @contextmanager
    def fetch(self, path: str) -> Iterator[BinaryIO]:
        with tempfile.SpooledTemporaryFile(PART) as spool:
            try:
                self._download(path, spool)
            except OSError as error:
                raise storage_error(error, f"{self.url}/{path}: the copy in {tempfile.gettempdir()}") from error
            spool.seek(0)
            yield spool  # type: ignore[misc]  # it has all that a BinaryIO's readers call

    def list(self, folder: str) -> Names:
        prefix = self._folder(folder)
        pages = self._pages("list_objects_v2", folder, Prefix=prefix, Delimiter="/")
        names = {
            found.get("Key", found.get("Prefix")).removeprefix(prefix).rstrip("/")
            for page in pages
            for found in [*page.get("Contents", []), *page.get("CommonPrefixes", [])]
        }
        return sorted(names - {""})

    def exists(self, path: str) -> bool:
        return self._head(path) is not None

    def size(self, path: str) -> int | None:
        head = self._head(path)
        return None if head is None else int(head["ContentLength"])

    def delete(self, path: str) -> None:
        with suppress(MissingObjectError):
            self.call("delete_object", path, Key=self.key(path))

    def tree(self, folder: str) -> Iterator[StoredObject]:
        for page in self._pages("list_objects_v2", folder, Prefix=self._folder(folder)):
            for found in page.get("Contents", []):
                if not found["Key"].endswith("/"):
                    path = found["Key"].removeprefix(self._prefix)
                    yield StoredObject(path, found["Size"], found["LastModified"].timestamp())

    def unfinished(self, folder: str) -> Names:
        paths = (key.removeprefix(self._folder(folder)) for key, _, _ in self._uploads(folder))
        return sorted({path for path in paths if "/" not in path})

    def discard_unfinished(self, folder: str, name: str) -> None:
        path = f"{folder}/{name}".lstrip("/")
        for key, upload, _ in self._uploads(folder):
            if key == self.key(path):
                self.abort_upload(path, upload)

    def unfinished_tree(self, folder: str) -> Iterator[StoredObject]:
        for key, _, begun in self._uploads(folder):
            yield StoredObject(key.removeprefix(self._prefix), 0, begun)

    def free_bytes(self) -> int | None:
        return None

    def creates_exclusively(self) -> bool:
        """Tries a second exclusive creation of one throw-away object: it has to fail."""
        path = f"probe-{secrets.token_hex(8)}.json"

        def write(stream: BinaryIO) -> None:
            stream.write(b"{}")

        def create() -> None:
            self.publish(path, write, exclusive=True)

        try:
            create()
            if self._conditional:
                create()
        except ObjectExistsError:
            return True
        finally:
            self.delete(path)
        self._conditional = False
        return False

    def key(self, path: str) -> str:
        return self._prefix + path

    def call(self, method: str, path: str, *, patience: Patience | None = None, **arguments: Any) -> dict[str, Any]:
        """One request about the object `path`, repeated while the storage is away.

        Raises: MissingObjectError, ObjectExistsError, CredentialsError, StorageFullError, StorageError; InputError when
            the bucket is not there.
        """
        request = functools.partial(
            call_s3, self._files, method, f"{self.url}/{path}", Bucket=self._bucket, **arguments
        )
        with nullcontext() if self._was_reached else at_most(_TO_REACH):
            response = (patience or self._patience).outlast(request, f"{self.url}/{path}")
        self._was_reached = True
        return response

    def abort_upload(self, path: str, upload: str, *, patience: Patience | None = None) -> None:
        with suppress(MissingObjectError):
            self.call("abort_multipart_upload", path, patience=patience, Key=self.key(path), UploadId=upload)

    def is_published(self, path: str, token: str) -> bool:
        """Whether the object is there and is the one that was published with this token."""
        head = self._head(path)
        return head is not None and head.get("Metadata", {}).get(PUBLICATION) == token

    def patience(self) -> Patience:
        """That of one transfer, which can be ended without ending another's."""
        return dataclasses.replace(self._patience, given_up=threading.Event())

    def _files(self) -> s3fs.S3FileSystem:
        """The connection of this process: a fork has to make its own."""
        with self._connecting:
            if self._connected is None or self._connected[0] != os.getpid():
                self._connected = (os.getpid(), _connect(self._options))
            return self._connected[1]

    def _folder(self, folder: str) -> str:
        return self.key(f"{folder}/" if folder else "")

    def _head(self, path: str) -> dict[str, Any] | None:
        try:
            return self.call("head_object", path, Key=self.key(path))
        except MissingObjectError:
            return None

    def _pages(self, method: str, folder: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        more: dict[str, Any] = {}
        while True:
            page = self.call(method, folder, **arguments, **more)
            yield page
            if not page.get("IsTruncated"):
                return
            if method == "list_objects_v2":
                more = {"ContinuationToken": page["NextContinuationToken"]}
            else:
                more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _uploads(self, folder: str) -> Iterator[tuple[str, str, float]]:
        """Key, upload id and time of beginning of the multipart uploads below the folder."""
        prefix = self._folder(folder)
        for page in self._pages("list_multipart_uploads", folder, Prefix=prefix):
            for found in page.get("Uploads", []):
                if found["Key"].startswith(prefix):
                    yield found["Key"], found["UploadId"], found["Initiated"].timestamp()

    def _download(self, path: str, spool: Any) -> None:
        """The object's bytes, in ranges of one version of it; several at once after the first."""
        first = self._range(path, 0, PART - 1, None)
        spool.write(first["Body"])
        size, tag = first["Size"], first.get("ETag")
        starts = range(len(first["Body"]), size, PART)  # a server that ignores ranges has sent it all
        if not starts:
            return
        with Threads(self.patience()) as threads:
            waiting: list[Future[dict[str, Any]]] = []
            for start in starts:
                if len(waiting) == AT_ONCE:
                    spool.write(waiting.pop(0).result()["Body"])
                last = min(start + PART, size) - 1
                waiting.append(threads.submit(self._range, path, start, last, tag, threads.patience))
            for part in waiting:
                spool.write(part.result()["Body"])

    def _range(
        self, path: str, first: int, last: int, tag: str | None, patience: Patience | None = None
    ) -> dict[str, Any]:
        same: dict[str, Any] = {} if tag is None else {"IfMatch": tag}
        part = f"bytes={first}-{last}"
        return self.call("get_object", path, Key=self.key(path), Range=part, patience=patience, **same)


def _check_endpoint(options: Mapping[str, Any]) -> None:
    """Raises InputError for an endpoint that no request can go to: otherwise it would be waited for, as if it were away."""
    names = {"storage_options.endpoint_url": options.get("endpoint_url")}
    if not options.get("endpoint_url"):
        names = {name: os.environ.get(name) for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")}
    for name, endpoint in names.items():
        if not endpoint:
            continue
        if "@" in str(endpoint):
            raise InputError("found a login in it; key and secret belong in a profile or the environment", field=name)
        if not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", str(endpoint)):
            raise InputError(f"expected http://host:port or https://host:port, found {endpoint!r}", field=name)


def _connect(options: Mapping[str, Any]) -> s3fs.S3FileSystem:
    import s3fs

    given = dict(options)
    profile = given.pop("profile", None)
    client = dict(given.pop("client_kwargs", {}))
    # botocore itself looks at AWS_DEFAULT_REGION only.
    region = given.pop("region", None) or os.environ.get("AWS_REGION")
    if region:
        client.setdefault("region_name", region)
    # Repetition is decided in one place, patience.py: botocore's and s3fs's own would multiply it. What is read is checked
    # by the store, against digests that were made before the bytes left the process that wrote them.
    config = {
        "retries": {"total_max_attempts": 1},
        "response_checksum_validation": "when_required",
        "connect_timeout": 10,
        "read_timeout": 60,
        "max_pool_connections": 32,
    }
    config |= given.pop("config_kwargs", {})
    files = s3fs.S3FileSystem(
        **given,
        **({"profile": profile} if profile else {}),
        client_kwargs=client,
        config_kwargs=config,
        use_listings_cache=False,
        skip_instance_cache=True,
    )
    files.retries = 1
    return files
