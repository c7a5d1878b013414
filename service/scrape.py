"""Scrape: the HTTP port for Prometheus, which nobody can hold up.

Each connection has a thread, as with prometheus_client's own server; but here it has some seconds in all, whatever it
says in them, and of too many the oldest gives way. May import: prometheus_client.
"""

import logging
import socket
import threading
import time
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app

_LOG = logging.getLogger(__name__)
_MOST_CONNECTIONS = 32
_WHOLE_S = 10.0  # for a request and its answer, which take some milliseconds


class Scrape:
    """A port that answers with all metrics."""

    def __init__(self, host: str, port: int) -> None:
        """Bind the port and serve.

        Raises:
            OSError: The port cannot be had.
        """
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        server = type("_Server", (_Server,), {"address_family": family})
        self._server: _Server = server(address[:2], _Handler)
        self._server.set_app(make_wsgi_app())
        self.port = int(self._server.server_port)
        threading.Thread(target=self._server.serve_forever, name="scrape", daemon=True).start()

    def close(self) -> None:
        """Serve no more, and let go of the port."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(WSGIRequestHandler):
    """Reads a request and logs nothing."""

    server: "_Server"

    def parse_request(self) -> bool:
        """Read the request; one that was ended in the middle looks like a whole one and is not worth a page."""
        return super().parse_request() and self.server.holds(self.connection)

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


class _Server(ThreadingMixIn, WSGIServer):
    """Connections that may take so long, and be so many."""

    daemon_threads = True
    request_queue_size = 1024  # who comes to a full one believes itself connected, and waits for many seconds

    def __init__(self, *arguments: Any) -> None:
        self._open: dict[socket.socket, float] = {}  # since when, oldest first
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection its thread, in place of the oldest one's if there are too many."""
        with self._lock:
            if len(self._open) >= _MOST_CONNECTIONS:
                _end(next(iter(self._open)))
                del self._open[next(iter(self._open))]
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def holds(self, request: socket.socket) -> bool:
        """Say whether a connection is still to be answered."""
        with self._lock:
            return request in self._open

    def service_actions(self) -> None:
        """End what takes too long; called twice a second."""
        before = time.monotonic() - _WHOLE_S
        with self._lock:
            for request in [request for request, since_s in self._open.items() if since_s < before]:
                _end(request)
                del self._open[request]

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, _request: Any, client_address: Any) -> None:
        """Note a connection that broke; it is its caller's business, not worth a traceback."""
        _LOG.debug("a connection to the metrics port from %s broke", client_address, exc_info=True)


def _end(request: socket.socket) -> None:
    """Wake a connection's thread, which then closes it."""
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
