"""An HTTP proxy that spoils some of the traffic: every n-th request meets a fault, in a seeded order.

with fault_proxy("http://127.0.0.1:9000", faults=["reset", "500"], every=3) as proxy:
    ... use proxy.url ...
proxy.injected  # how often each fault happened
"""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

# What each does: an error status (with Retry-After, or S3's words), a connection reset before or after the server has
# seen the request, a body that comes in drops, one that ends too soon, and JSON that is whole as HTTP and cut as JSON.
FAULTS = ("429", "500", "503", "reset", "reset_after", "slow", "truncated", "half_json")
SLOW_DOWN = b'<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>'


class FaultProxy(ThreadingHTTPServer):
    """Counts requests and faults."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, upstream: str, faults: Sequence[str], every: int, seed: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urlsplit(upstream)
        self.faults, self.every = list(faults), every
        self._random, self._lock = random.Random(seed), threading.Lock()
        self.requests: list[tuple[str, str]] = []
        self.injected: Counter[str] = Counter()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that are killed, or hang up on a spoiled answer, are what this is for."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def next_fault(self, method: str, path: str) -> str | None:
        with self._lock:
            self.requests.append((method, path))
            if not self.faults or len(self.requests) % self.every:
                return None
            fault = self._random.choice(self.faults)
            self.injected[fault] += 1
            return fault


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultProxy
    wbufsize = -1
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def handle_expect_100(self) -> bool:
        # Output is buffered, and the client sends its body only after this.
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def _serve(self) -> None:
        body = self._body()
        fault = self.server.next_fault(self.command, self.path)
        if fault == "reset":
            self._reset()
        elif fault in ("429", "500", "503"):
            self._error(int(fault))
        else:
            self._forward(body, fault)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return b"".join(parts)
        length = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # the client was killed: a server would not take half a body for a whole one
            raise ConnectionAbortedError
        return body

    def _forward(self, body: bytes, fault: str | None) -> None:
        upstream = self.server.upstream
        connection = http.client.HTTPConnection(upstream.hostname or "", upstream.port, timeout=60)
        kept = {
            k: v for k, v in self.headers.items() if k.lower() not in ("transfer-encoding", "content-length", "expect")
        }
        # Even without a body: S3 refuses a PUT that does not say how long it is.
        connection.request(self.command, self.path, body, {**kept, "Content-Length": str(len(body))})
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        if fault == "reset_after":
            self._reset()
            return
        self.send_response_only(answer.status)
        skipped = ("transfer-encoding", "content-length", "connection")
        for name, value in answer.getheaders():
            if name.lower() not in skipped:
                self.send_header(name, value)
        sent = data[: len(data) // 2] if fault in ("truncated", "half_json") else data
        length = len(sent) if fault == "half_json" else len(data)
        if self.command == "HEAD":
            length = int(answer.getheader("content-length") or 0)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command == "HEAD":
            return
        self._send(sent, drip=fault == "slow")
        if fault == "truncated" and data:
            self.wfile.flush()
            self._reset()

    def _send(self, data: bytes, drip: bool) -> None:
        if not drip:
            self.wfile.write(data)
            return
        step = max(1, len(data) // 10)
        for start in range(0, len(data), step):
            self.wfile.write(data[start : start + step])
            self.wfile.flush()
            time.sleep(0.02)

    def _error(self, status: int) -> None:
        self.send_response(status)
        data = SLOW_DOWN if status == 503 else b'{"error": "injected"}'
        if status == 429:
            self.send_header("Retry-After", "0")
        self.send_header("Content-Length", "0" if self.command == "HEAD" else str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)
        self.connection.close()


@contextlib.contextmanager
def fault_proxy(
    upstream: str, *, faults: Sequence[str] = FAULTS, every: int = 3, seed: int = 0
) -> Iterator[FaultProxy]:
    """A proxy in front of `upstream` while the block runs."""
    proxy = FaultProxy(upstream, faults, every, seed)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
