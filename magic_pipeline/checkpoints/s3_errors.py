"""One request to S3, with its failure told apart: missing, taken, away for a while, refused, full. Nothing secret in any message."""

from __future__ import annotations

import errno
import ssl
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from magic_pipeline.checkpoints.patience import TransientError
from magic_pipeline.errors import (
    CredentialsError,
    InputError,
    MissingObjectError,
    ObjectExistsError,
    StorageError,
    StorageFullError,
)

if TYPE_CHECKING:
    import s3fs

_MISSING = frozenset({"404", "NoSuchKey", "NoSuchUpload", "NotFound"})
_TAKEN = frozenset({"412", "PreconditionFailed"})
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"})
_REFUSED = frozenset(
    [
        "401",
        "403",
        "AccessDenied",
        "AccountProblem",
        "AllAccessDisabled",
        "InvalidAccessKeyId",
        "InvalidToken",
        "InvalidClientTokenId",
        "NotSignedUp",
        "SignatureDoesNotMatch",
        "UnauthorizedAccess",
    ]
)
_FULL = frozenset(
    [
        "QuotaExceeded",
        "QuotaExceededException",
        "XMinioAdminBucketQuotaExceeded",  # a 400
        "XMinioStorageFull",
        "InsufficientStorage",
        "507",
    ]
)
# 409 is the answer to one of two writers that create the same object at once; asked again, it is told who won.
_AWAY = frozenset(
    [
        "408",
        "409",
        "429",
        "ConditionalRequestConflict",
        "OperationAborted",
        "RequestTimeout",
        "RequestTimeoutException",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "RequestLimitExceeded",
        "BandwidthLimitExceeded",
        # What arrived is not what was sent, and the server noticed: sent again, it will be.
        "BadDigest",
        "IncompleteBody",
        "XAmzContentChecksumMismatch",
        "XAmzContentSHA256Mismatch",
    ]
)
# By name, for aiobotocore, aiohttp and urllib3 each bring their own: all of them mean that no whole answer came.
_NO_ANSWER = frozenset(
    [
        "HTTPClientError",
        "ConnectionError",
        "ClientError",
        "ClientPayloadError",
        "ClientConnectionError",
        "IncompleteRead",
        "IncompleteReadError",
        "ResponseParserError",
        "ResponseStreamingError",
        "FSTimeoutError",
        "TimeoutError",
        "AioAwsChunkedWrapperError",
    ]
)
_NO_CREDENTIALS = frozenset(["NoCredentialsError", "PartialCredentialsError"])
_EXPIRED_LOGIN = frozenset(
    [
        "CredentialRetrievalError",
        "TokenRetrievalError",
        "UnauthorizedSSOTokenError",
        "SSOTokenLoadError",
        "LoginRefreshRequired",
    ]
)


class UnsupportedError(StorageError):
    """The server does not know this kind of request. Never leaves this room."""


def call_s3(files: Callable[[], s3fs.S3FileSystem], method: str, name: str, **arguments: Any) -> dict[str, Any]:
    """The response of one request; of get_object its bytes (`Body`), the whole object's `Size` and its `ETag`.

    Credentials that have expired are read anew once: a profile's file or the instance's role may hold fresh ones.

    Args:
        name: the object, for messages.

    Raises: TransientError; MissingObjectError, ObjectExistsError, CredentialsError, StorageFullError, UnsupportedError, StorageError;
        InputError when the bucket is not there.
    """
    try:
        return _request(files(), method, arguments)
    except Exception as error:
        if not _is_expired(error):
            raise translated(error, method, name) from error
    try:
        files().connect(refresh=True)
        return _request(files(), method, arguments)
    except Exception as error:
        raise translated(error, method, name) from error


def _request(files: s3fs.S3FileSystem, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
    from fsspec.asyn import sync

    try:
        response: dict[str, Any] = files.call_s3(method, **arguments)
    except OSError as error:
        if method == "get_object" and _code(error) in ("416", "InvalidRange"):
            return {"Body": b"", "Size": 0}  # an empty object has no first byte
        raise
    if method != "get_object":
        return response
    content = sync(files.loop, _whole, response["Body"])
    if len(content) != response["ContentLength"]:
        raise TransientError(f"{len(content)} of {response['ContentLength']} bytes arrived")
    size = response.get("ContentRange", f"/{len(content)}").rpartition("/")[2]
    return {"Body": content, "Size": int(size), "ETag": response.get("ETag")}


async def _whole(body: Any) -> bytes:
    """Every byte; the connection is given back also when it broke off in the middle."""
    try:
        content: bytes = await body.read()
    finally:
        body.close()
    return content


def translated(error: Exception, method: str, name: str) -> Exception:
    """The error in this project's terms, naming the object and the request."""
    if isinstance(error, TransientError | StorageError):
        return error
    code, status = _code(error), _status(error)
    reason = f"{code or type(error).__name__} ({method})"
    if _is_expired(error):
        return CredentialsError(f"{name}: the credentials have expired: {reason}; renew them and run again")
    if not code:
        return _unanswered(error, reason, name)
    if code == "NoSuchBucket":
        return InputError(
            f"there is no bucket {name.split('/')[2]!r}, or these credentials cannot see it", field="storage"
        )
    if code in _MISSING:
        return MissingObjectError(f"{name}: is not there")
    if code in _TAKEN and method == "get_object":
        return StorageError(f"{name}: was replaced while it was read")
    if code in _TAKEN:
        return ObjectExistsError(f"{name}: exists already, and is written only once")
    return _unwilling(error, code, status, reason, name)


def _unwilling(error: Exception, code: str, status: int, reason: str, name: str) -> Exception:
    """The server answered that it will not do it, or not now."""
    if code in _FULL or status == 507:
        return StorageFullError(f"{name}: no space left: {reason}; free space or raise the quota, and run again")
    if code == "RequestTimeTooSkewed":
        return CredentialsError(f"{name}: access is refused: {reason}: this machine's clock or the server's is wrong")
    if code in _REFUSED or status in (401, 403):
        return CredentialsError(f"{name}: access is refused: {reason}")
    if code == "NotImplemented" or status == 501:
        return UnsupportedError(f"{name}: the server does not know this request: {reason}")
    if code in _AWAY or status == 429 or status >= 500:
        return TransientError(reason)
    return StorageError(f"{name}: {reason}: {_message(error)}")


def _unanswered(error: Exception, reason: str, name: str) -> Exception:
    """No answer came."""
    if isinstance(error, FileExistsError):
        return ObjectExistsError(f"{name}: exists already, and is written only once")
    if _is_any(error, _NO_CREDENTIALS):
        return CredentialsError(
            f"{name}: no credentials were found; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    distrust = _distrust(error)
    if distrust:
        return StorageError(
            f"{name}: {reason}: the server's certificate is not trusted: {distrust}; AWS_CA_BUNDLE can name another authority"
        )
    if _is_any(error, _NO_ANSWER) or _is_away(error):
        return TransientError(f"no answer: {reason}")
    return StorageError(f"{name}: {reason}: {_message(error)}")


def _is_expired(error: BaseException) -> bool:
    return _code(error) in _EXPIRED or _is_any(error, _EXPIRED_LOGIN)


def _is_away(error: BaseException) -> bool:
    away = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
    return any(isinstance(link, OSError) and link.errno in away for link in _chain(error))


def _distrust(error: BaseException) -> str:
    """Why the server's certificate was refused, which no waiting mends; "" when it was not."""
    link: BaseException | None = error
    while link is not None:
        # aiohttp's error is of ssl's class without its words, which are below it, and botocore's knows it by context only.
        if isinstance(link, ssl.SSLCertVerificationError) and hasattr(link, "verify_message"):
            return str(link.verify_message)
        link = link.__cause__ or link.__context__
    return ""


def _is_any(error: BaseException, names: frozenset[str]) -> bool:
    return any(base.__name__ in names for link in _chain(error) for base in type(link).__mro__)


def _code(error: BaseException) -> str:
    return next((str(r.get("Error", {}).get("Code", "")) for r in _responses(error)), "")


def _status(error: BaseException) -> int:
    found = next((r.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) for r in _responses(error)), 0)
    return int(found or 0)


def _message(error: BaseException) -> str:
    told = next((str(r.get("Error", {}).get("Message", "")) for r in _responses(error)), str(error))
    return " ".join(told.split())  # one line


def _responses(error: BaseException) -> Iterator[dict[str, Any]]:
    """What the server answered, by botocore's ClientError, which s3fs hides below its own."""
    for link in _chain(error):
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            yield response


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__
