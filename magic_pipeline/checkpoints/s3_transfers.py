"""Large objects to S3 in parts, a few at a time, so that memory stays flat; all or nothing."""

from __future__ import annotations

import io
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from magic_pipeline.checkpoints.patience import Patience
from magic_pipeline.errors import MissingObjectError, ObjectExistsError, StorageError

if TYPE_CHECKING:
    from magic_pipeline.checkpoints.s3_sink import S3Sink

logger = logging.getLogger("magic_pipeline.checkpoints")

PART = 8 * 2**20  # bytes of a part; with those under way and the one being filled, 40 MiB of memory
AT_ONCE = 4  # parts under way
PUBLICATION = "magic-publication"  # the name in an object's metadata under which it says who made it
_TO_ABORT = 5.0  # seconds
_MOST_PARTS = 9_000  # S3 allows 10,000; the rest is room for sizes that were underestimated


class Upload:
    """A stream that becomes one object: one PUT if it is small, else a multipart upload whose parts go out as they fill."""

    def __init__(self, sink: S3Sink, path: str, *, exclusive: bool, size: int | None) -> None:
        self.written = 0
        self._sink, self._path = sink, path
        self._condition: dict[str, Any] = {"IfNoneMatch": "*"} if exclusive else {}
        self._part = max(PART, -(-(size or 0) // _MOST_PARTS))
        self._filling = io.BytesIO()
        self._token = secrets.token_hex(16)
        self._upload: str | None = None
        self._threads: Threads | None = None
        self._parts: list[Future[str]] = []

    def write(self, content: bytes | memoryview) -> int:
        view = memoryview(content).cast("B")
        for start in range(0, len(view), self._part):
            self._take(view[start : start + self._part])
        return len(view)

    def finish(self) -> None:
        """Publishes what was written. Raises ObjectExistsError and whatever went wrong with any part."""
        if self._upload is None:
            self._commit("put_object", Body=self._filling.getvalue(), Metadata={PUBLICATION: self._token})
            return
        if self._filling.tell():
            self._send()
        parts = [{"PartNumber": number, "ETag": part.result()} for number, part in enumerate(self._parts, 1)]
        if self._threads is not None:
            self._threads.close()
        self._commit("complete_multipart_upload", UploadId=self._upload, MultipartUpload={"Parts": parts})
        self._upload = None

    def abort(self) -> None:
        """Leaves nothing behind, as far as the storage can be reached; the rest goes by age (gc)."""
        if self._threads is not None:
            self._threads.give_up()
        if self._upload is not None:
            try:
                # Soon: an interrupt is waiting for this, or a save that was given up after long patience.
                patience = Patience(min(_TO_ABORT, self._sink.patience().seconds))
                self._sink.abort_upload(self._path, self._upload, patience=patience)
            except StorageError as error:
                logger.warning("%s/%s: its upload stays until gc: %s", self._sink.url, self._path, error)

    def _take(self, content: memoryview) -> None:
        self.written += len(content)
        room = self._part - self._filling.tell()
        self._filling.write(content[:room])
        if self._filling.tell() == self._part:
            self._send()
            self._filling.write(content[room:])

    def _send(self) -> None:
        """Starts the upload of the part that is full, after waiting until not too many are under way."""
        key = self._sink.key(self._path)
        if self._threads is None:
            begun = self._sink.call("create_multipart_upload", self._path, Key=key, Metadata={PUBLICATION: self._token})
            self._upload, self._threads = begun["UploadId"], Threads(self._sink.patience())
        threads = self._threads
        number, body = len(self._parts) + 1, self._filling.getvalue()
        if number > AT_ONCE:
            self._parts[number - 1 - AT_ONCE].result()

        def send() -> str:
            sent = self._sink.call(
                "upload_part",
                self._path,
                patience=threads.patience,
                Key=key,
                UploadId=self._upload,
                PartNumber=number,
                Body=body,
            )
            return str(sent["ETag"])

        self._parts.append(threads.submit(send))
        self._filling = io.BytesIO()

    def _commit(self, method: str, **arguments: Any) -> None:
        """The request that makes the object, or finds that an earlier one with a lost answer has made it."""
        try:
            self._sink.call(method, self._path, Key=self._sink.key(self._path), **arguments, **self._condition)
        except (ObjectExistsError, MissingObjectError):
            if not self._sink.is_published(self._path, self._token):
                raise


class Threads:
    """A few threads for one transfer, none of which outlives it in a retry."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="magic-transfer")

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.give_up()

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._pool.submit(call, *arguments)

    def close(self) -> None:
        self._pool.shutdown()

    def give_up(self) -> None:
        """Ends the retries, and waits for the requests under way."""
        self.patience.given_up.set()
        self._pool.shutdown(cancel_futures=True)
