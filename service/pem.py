"""Pem: files of certificates and keys, read and held against each other before anything is made of them.

No error repeats what is in a file. May import: small_files, ssl.
"""

import re
import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime

from service.small_files import read_small

_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_KEY = re.compile(rb"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----")
_ENCRYPTED = re.compile(rb"-----BEGIN ENCRYPTED PRIVATE KEY-----|Proc-Type: 4,ENCRYPTED")
_VERSION, _UTC_TIME = 0xA0, 0x17  # tags of DER
# Object identifiers in DER: RFC 3279, section 2.3.1, and RFC 5480, section 2.1.1. With keys of other kinds, Ed25519 and
# P-521 among them, two gRPC peers find no signature in common.
_RSA, _EC = bytes.fromhex("2a864886f70d010101"), bytes.fromhex("2a8648ce3d0201")
_CURVES = (bytes.fromhex("2a8648ce3d030107"), bytes.fromhex("2b81040022"))  # P-256, P-384


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate, with those between it and its CA, and its private key.

    Attributes:
        cert: PEM.
        key: PEM; not shown by `repr`.
    """

    cert: bytes
    key: bytes = field(repr=False)


def read_pair(cert_path: str, key_path: str, cert_name: str, key_name: str) -> Pair:
    """Read a certificate and its key.

    Args:
        cert_path: File of the certificate.
        key_path: File of the key.
        cert_name: What the reader of a message knows the certificate's file by.
        key_name: The same for the key's.

    Raises:
        ValueError: A file is not there, cannot be read, holds something else, or the two are no pair.
    """
    pair = Pair(_read(cert_path, cert_name), _read(key_path, key_name))
    if not _CERTIFICATE.search(pair.cert):
        raise ValueError(f"{cert_name}: {cert_path!r} holds no certificate in PEM (-----BEGIN CERTIFICATE-----)")
    if _ENCRYPTED.search(pair.key):
        raise ValueError(f"{key_name}: the key in {key_path!r} wants a password; give one without")
    if not _KEY.search(pair.key):
        raise ValueError(f"{key_name}: {key_path!r} holds no private key in PEM (-----BEGIN PRIVATE KEY-----)")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_path, key_path, password=lambda: b"")
    except ssl.SSLError as error:
        if "MISMATCH" in (error.reason or ""):
            raise ValueError(
                f"{key_name}: the key in {key_path!r} does not match the certificate in {cert_path!r}"
            ) from error
        raise ValueError(
            f"{cert_name}, {key_name}: {cert_path!r} and {key_path!r} are no certificate and key that can be used: "
            f"{error.reason or 'not PEM'}"
        ) from error
    try:
        usable, _ = _usable(pair.cert), when_invalid(pair.cert)
    except (ValueError, LookupError) as error:  # OpenSSL does not look at all that it loads
        raise ValueError(
            f"{cert_name}: the certificate in {cert_path!r} has no key or no time that can be read; make it anew"
        ) from error
    if not usable:
        raise ValueError(
            f"{cert_name}: the key of the certificate in {cert_path!r} is of a kind that gRPC does not take; it must "
            "be RSA, or ECDSA on P-256 or P-384"
        )
    if pair != Pair(_read(cert_path, cert_name), _read(key_path, key_name)):
        raise ValueError(f"{cert_name}, {key_name}: the files were replaced while they were read")
    return pair


def read_authorities(path: str, name: str) -> bytes:
    """Read the certificates of CAs that are trusted.

    Args:
        path: Their file.
        name: What the reader of a message knows it by.

    Raises:
        ValueError: It is not there, cannot be read, or holds something else.
    """
    content = _read(path, name)
    found = _CERTIFICATE.findall(content)
    if not found:
        raise ValueError(f"{name}: {path!r} holds no certificate in PEM (-----BEGIN CERTIFICATE-----)")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=b"\n".join(found).decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: {path!r} holds a certificate that cannot be read") from error
    return content


def not_after(cert: bytes) -> datetime:
    """Give the end of a certificate's validity.

    Args:
        cert: PEM that a TLS library has read; of several certificates the first counts.

    Raises:
        ValueError: It is no time as RFC 5280 has it.
    """
    _, end = _parts(_fields(cert)["validity"])
    return _moment(*end)


def when_invalid(cert: bytes) -> str:
    """Say in words that a certificate has expired, or is not valid yet; empty where it is valid now.

    Args:
        cert: As for `not_after`.

    Raises:
        ValueError: Its times are none as RFC 5280 has them.
    """
    begin, end = (_moment(*time) for time in _parts(_fields(cert)["validity"]))
    now = datetime.now(UTC)
    if end < now:
        return f"expired on {minute(end)}"
    return f"is not valid before {minute(begin)}" if begin > now else ""


def minute(moment: datetime) -> str:
    """Write a moment for people."""
    return moment.strftime("%Y-%m-%d %H:%M UTC")


def _moment(kind: int, digits: bytes) -> datetime:
    """Read a time of a certificate: its tag in DER, and its content."""
    words = digits.decode("ascii")
    if kind == _UTC_TIME:  # section 4.1.2.5.1: from 50 on it is the last century
        words = ("19" if words[:2] >= "50" else "20") + words
    return datetime.strptime(words, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _usable(cert: bytes) -> bool:
    """Tell whether gRPC's clients and servers take signatures of a certificate's key."""
    (_, algorithm), _ = _parts(_fields(cert)["subjectPublicKeyInfo"])
    (_, kind), *parameters = _parts(algorithm)
    return kind == _RSA or (kind == _EC and parameters[0][1] in _CURVES)


def _fields(cert: bytes) -> dict[str, bytes]:
    """Give what the first certificate in PEM says: the fields of tbsCertificate in RFC 5280, section 4.1."""
    found = _CERTIFICATE.search(cert)
    assert found is not None
    ((_, certificate),) = _parts(ssl.PEM_cert_to_DER_cert(found[0].decode("ascii")))
    fields = _parts(_parts(certificate)[0][1])
    if fields[0][0] == _VERSION:
        del fields[0]
    names = ("serialNumber", "signature", "issuer", "validity", "subject", "subjectPublicKeyInfo")
    return {name: content for name, (_, content) in zip(names, fields, strict=False)}


def _read(path: str, name: str) -> bytes:
    try:
        return read_small(path)
    except OSError as error:
        raise ValueError(f"{name}: cannot read {path!r}: {error.strerror}") from error


def _parts(der: bytes) -> list[tuple[int, bytes]]:
    """Split DER (X.690) into its elements, each a tag of one byte and its content."""
    parts = []
    while der:
        tag, length, start = der[0], der[1], 2
        if length & 0x80:
            start += length & 0x7F
            length = int.from_bytes(der[2:start], "big")
        parts.append((tag, der[start : start + length]))
        der = der[start + length :]
    return parts
