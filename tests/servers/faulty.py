"""A proxy on loopback before an S3 server that breaks what it is told to: refuses, loses answers, damages bytes, is away.

It passes on what it gets, header by header, the host's name among them, so that signatures stay valid.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import urlsplit

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "te", "upgrade"}


@dataclass(frozen=True)
class Answer:
    """An answer in place of the server's, which never hears of the request."""

    status: int
    code: str
    message: str = "injected"

    def body(self) -> bytes:
        return f'<?xml version="1.0"?><Error><Code>{self.code}</Code><Message>{self.message}</Message></Error>'.encode()


class Break(Enum):
    """What is done to a request or to its answer."""

    LOSE_REQUEST = "the connection ends before the server hears of the request"
    LOSE_ANSWER = "the request takes effect, and the connection ends before the answer"
    BREAK_OFF = "the connection ends after half of the answer's body"
    SHORTEN = "half of the answer's body, with a header that says so"
    FLIP_A_BIT = "one bit in the middle of the answer's body is the other way round"


@dataclass(frozen=True)
class Delay:
    """The request is passed on after this many seconds."""

    seconds: float


@dataclass(frozen=True)
class Outage:
    """The request is lost, and from then on the proxy is down for this many seconds."""

    seconds: float


Fault = Answer | Break | Delay | Outage

SLOW_DOWN = Answer(503, "SlowDown", "Please reduce your request rate.")
INTERNAL_ERROR = Answer(500, "InternalError", "We encountered an internal error. Please try again.")
# S3 may find out that it cannot complete an upload after it has begun to answer.
ERROR_AFTER_200 = Answer(200, "InternalError", "We encountered an internal error. Please try again.")
EXPIRED = Answer(400, "ExpiredToken", "The provided token has expired.")
DENIED = Answer(403, "AccessDenied", "Access Denied")
QUOTA = Answer(507, "QuotaExceeded", "The quota is used up.")


@dataclass
class Rule:
    """Which requests a fault befalls.

    Attributes:
        method: the HTTP methods, a regular expression.
        path: found in path and query, a regular expression.
        login: found in the header Authorization, a regular expression.
        after: matching requests that pass first.
        every: of those that follow, every how manieth is struck.
        times: so many in all; None: without an end.
        struck: how many have been.
    """

    fault: Fault
    method: str = ""
    path: str = ""
    login: str = ""
    after: int = 0
    every: int = 1
    times: int | None = 1
    struck: int = 0
    seen: int = 0

    def befalls(self, method: str, path: str, login: str) -> bool:
        """Counts the request if it matches, and says whether it is one to strike."""
        asked = ((self.method, method), (self.path, path), (self.login, login))
        if not all(re.search(pattern, text) for pattern, text in asked):
            return False
        self.seen += 1
        if self.seen <= self.after or (self.seen - self.after) % self.every:
            return False
        if self.times is not None and self.struck >= self.times:
            return False
        self.struck += 1
        return True


@dataclass(frozen=True)
class Exchange:
    """A request as it was dealt with. `status` is None where the client got no answer."""

    method: str
    path: str
    status: int | None
    fault: Fault | None


@dataclass
class FaultyProxy:
    """The proxy: rules can be added at any time, and the first that matches a request strikes.

    Attributes:
        exchanges: what was asked and answered, in order.
    """

    upstream: str  # host:port
    rules: list[Rule] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    port: int = 0
    _server: _Listener | None = None
    _rising: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def strike(self, fault: Fault, **where: Any) -> Rule:
        """A new rule, with Rule's arguments."""
        rule = Rule(fault, **where)
        with self._lock:
            self.rules.append(rule)
        return rule

    def heal(self) -> None:
        """No more rules."""
        with self._lock:
            self.rules.clear()

    def start(self) -> None:
        """Listens, if it does not: at a free port, and later at the same one again."""
        if self._server is not None:
            return
        self._server = _Listener(("127.0.0.1", self.port), self)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Is wholly down: what is under way breaks off, and connections are refused."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server.break_off()
            self._server = None

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Down while the context lasts."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def down_for(self, seconds: float) -> threading.Thread:
        """Down from now on, and up again after some seconds, in the thread given. `faulty` waits for it at its end."""
        self.stop()

        def rise() -> None:
            time.sleep(seconds)
            self.start()

        rising = threading.Thread(target=rise, daemon=True)
        self._rising.append(rising)
        rising.start()
        return rising

    def fault_for(self, method: str, path: str, login: str) -> Fault | None:
        """What befalls this request."""
        with self._lock:
            return next((rule.fault for rule in self.rules if rule.befalls(method, path, login)), None)

    def note(self, exchange: Exchange) -> None:
        with self._lock:
            self.exchanges.append(exchange)


@contextlib.contextmanager
def faulty(endpoint_url: str) -> Iterator[FaultyProxy]:
    """A proxy before the server at this URL."""
    proxy = FaultyProxy(urlsplit(endpoint_url).netloc)
    proxy.start()
    try:
        yield proxy
    finally:
        for rising in proxy._rising:
            rising.join()
        proxy.stop()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], proxy: FaultyProxy) -> None:
        self.proxy = proxy
        self._open: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that ends in the middle is what this is for."""

    def break_off(self) -> None:
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class _Reply:
    status: int
    headers: list[tuple[str, str]]
    body: bytes
    breaks_off: bool = False


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle_any(self) -> None:
        proxy = cast(_Listener, self.server).proxy
        body = self._body()
        fault = proxy.fault_for(self.command, self.path, self.headers.get("Authorization", ""))
        if isinstance(fault, Outage):
            proxy.down_for(fault.seconds)
        reply = self._reply(proxy.upstream, body, fault)
        # Before the client can go on, so that it finds the exchange noted.
        proxy.note(Exchange(self.command, self.path, None if reply is None else reply.status, fault))
        self.close_connection = reply is None or reply.breaks_off
        if reply is not None:
            self._send(reply)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815 - the base class's names

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Exchanges are noted, not printed."""

    def _reply(self, upstream: str, body: bytes, fault: Fault | None) -> _Reply | None:
        if isinstance(fault, Answer):
            return _Reply(fault.status, [("Content-Type", "application/xml")], fault.body())
        if isinstance(fault, Delay):
            time.sleep(fault.seconds)
        if fault is Break.LOSE_REQUEST or isinstance(fault, Outage):
            return None
        reply = self._ask(upstream, body)
        content = reply.body
        if fault is Break.LOSE_ANSWER:
            return None
        if fault in (Break.SHORTEN, Break.BREAK_OFF):
            content = content[: len(content) // 2]
        if fault is Break.FLIP_A_BIT:
            middle = len(content) // 2
            content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        return replace(reply, body=content, breaks_off=fault is Break.BREAK_OFF)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass  # trailers
        return b"".join(chunks)

    def _ask(self, upstream: str, body: bytes) -> _Reply:
        connection = http.client.HTTPConnection(upstream, timeout=60)
        with contextlib.closing(connection):
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _HOP_BY_HOP | {"content-length"}:
                    connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            return _Reply(answer.status, answer.getheaders(), answer.read())

    def _send(self, reply: _Reply) -> None:
        told = {name.lower(): value for name, value in reply.headers}
        length = str(len(reply.body))
        # The answer to HEAD tells the length of a body that does not come, and one that breaks off that of the whole.
        if self.command == "HEAD" or reply.breaks_off:
            length = told.get("content-length", "0")
        self.send_response_only(reply.status)
        for name, value in reply.headers:
            if name.lower() not in _HOP_BY_HOP | {"content-length"}:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)
