"""moto's S3 server in a process of its own, on loopback. It keeps everything in memory and accepts any credentials."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tests.servers.children import ROOT, running
from tests.servers.s3_server import S3Server, make_bucket


@contextlib.contextmanager
def running_moto() -> Iterator[S3Server]:
    """moto on a free port, with a bucket. Raises RuntimeError with its output when it does not start."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        server = S3Server(f"http://127.0.0.1:{listening.getsockname()[1]}")
        # Not the machine's environment: an AWS profile or a proxy in it would be moto's too.
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": str(ROOT),
            "AWS_ACCESS_KEY_ID": server.key,
            "AWS_SECRET_ACCESS_KEY": server.secret,
        }
        command = [sys.executable, "-m", "tests.servers.moto", str(listening.fileno())]
        with running(command, environment=environment, keep=[listening.fileno()]) as child:
            listening.close()  # the child's now, so that a connection is refused once it has ended
            make_bucket(server, child.check)
            yield server


def one_at_a_time(application: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """The WSGI application, asked by one thread at a time.

    moto looks whether an object is there and makes it in two steps, so that two threads can both create it; S3 cannot.
    Only whole requests wait for the lock: a client that stops in the middle of its body holds up nobody.
    """
    lock = threading.Lock()

    def serialised(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        length = environ.get("CONTENT_LENGTH")
        body = environ["wsgi.input"]
        if length or environ.get("wsgi.input_terminated"):
            environ["wsgi.input"] = io.BytesIO(body.read(int(length)) if length else body.read())
        with lock:
            return list(application(environ, start_response))

    return serialised


def know_no_upload_that_is_gone() -> None:
    """A part for an upload that was aborted is answered with NoSuchUpload, as S3 does; moto breaks down with a KeyError."""
    from moto.s3.exceptions import NoSuchUpload
    from moto.s3.models import S3Backend

    def checked(call: Callable[..., Any]) -> Callable[..., Any]:
        def checking(backend: S3Backend, bucket_name: str, multipart_id: str, *rest: Any, **named: Any) -> Any:
            if multipart_id not in backend.get_bucket(bucket_name).multiparts:
                raise NoSuchUpload(upload_id=multipart_id)
            return call(backend, bucket_name, multipart_id, *rest, **named)

        return checking

    for name in ("upload_part", "complete_multipart_upload"):
        setattr(S3Backend, name, checked(getattr(S3Backend, name)))


def serve(descriptor: int) -> None:
    """Answers on a listening socket that was inherited, until it is killed."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    know_no_upload_that_is_gone()
    application = one_at_a_time(DomainDispatcherApplication(create_backend_app))
    server = make_server(
        "127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler, fd=descriptor
    )  # fmt: skip
    server.serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
