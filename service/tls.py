"""Tls: the certificate that a server shows, from files that may be replaced while it serves.

`look` reads the files anew, on a thread that is nobody else's; new connections get what it found last, those that are
there keep what they were opened with. Keys are in no log line and no error.
May import: metrics, pem, small_files, errors, grpc.
"""

import logging
import threading
from dataclasses import dataclass
from typing import Any

import grpc

from service import metrics, pem
from service.errors import ConfigError
from service.small_files import read_small

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Shown:
    """What the files held: the server's pair, and the CAs of its clients."""

    pair: pem.Pair
    client_ca: bytes | None

    def configuration(self) -> Any:
        """Give it to gRPC."""
        return grpc.ssl_server_certificate_configuration([(self.pair.key, self.pair.cert)], self.client_ca)


class Certificates:
    """The files of one server: its certificate, its key and, for mutual TLS, the CA of its clients."""

    def __init__(self, cert: str, key: str, client_ca: str = "") -> None:
        """Keep where they are; nothing is read yet.

        Args:
            cert: PEM file of the server's certificate, with those between it and its CA.
            key: PEM file of its private key.
            client_ca: PEM file of CAs, of one of which every client must show a certificate; empty to ask for none.
        """
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._lock = threading.Lock()  # connections come on threads of gRPC's own; no file is read under it
        self._seen: tuple[bytes, ...] = ()
        self._current: _Shown | None = None
        self._end_s, self._usable = 0.0, True
        self._told = True  # whether gRPC has what is current

    @property
    def mutual(self) -> bool:
        """Whether clients must show a certificate."""
        return bool(self._client_ca)

    def check(self) -> None:
        """Read the files.

        Raises:
            ConfigError: One is missing or unreadable, holds something else, or the key is not the certificate's.
        """
        self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """Read the files; one that is not valid now is a warning.

        Raises:
            ConfigError: As from `check`.
        """
        self._seen = self._contents()
        self._current = self._read()
        self._note_end(self._current)
        metrics.watch_certificate(lambda: self._end_s)
        return grpc.dynamic_ssl_server_credentials(self._current.configuration(), self._changed, self.mutual)

    def _changed(self) -> Any:
        """Give gRPC, which asks at every handshake, what the files hold; None where that is nothing new."""
        with self._lock:
            if self._told or self._current is None:
                return None
            self._told = True
            return self._current.configuration()

    def look(self) -> bool:
        """Read the files anew where they changed; what cannot be used changes nothing, and is False."""
        contents = self._contents()
        if contents == self._seen:
            return self._usable
        self._seen = contents
        try:
            found = self._read()
        except ConfigError as error:
            _LOG.warning("new TLS files cannot be used, so the ones of before stay in use: %s", error)
            self._usable = False
            return False
        self._usable = True
        if found == self._current:
            return True
        with self._lock:
            self._current, self._told = found, False
        _LOG.info("new connections get a new certificate, valid until %s", pem.minute(pem.not_after(found.pair.cert)))
        self._note_end(found)
        return True

    def _contents(self) -> tuple[bytes, ...]:
        """Read the files as they are; what cannot be read is empty."""
        found = []
        for path in (self._cert, self._key, self._client_ca):
            try:
                found.append(read_small(path) if path else b"")
            except OSError:
                found.append(b"")
        return tuple(found)

    def _read(self) -> _Shown:
        try:
            pair = pem.read_pair(self._cert, self._key, "--tls-cert", "--tls-key")
            ca = pem.read_authorities(self._client_ca, "--tls-client-ca") if self._client_ca else None
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return _Shown(pair, ca)

    def _note_end(self, shown: _Shown) -> None:
        """Keep when a certificate ends for the metric; one that is not valid now is a warning."""
        self._end_s = pem.not_after(shown.pair.cert).timestamp()
        if told := pem.when_invalid(shown.pair.cert):
            _LOG.warning("the certificate in %r %s; clients will refuse it", self._cert, told)
