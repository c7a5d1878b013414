"""A CA of the tests' own, and the certificates that it signs. May import: cryptography."""

import socket
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey


@dataclass(frozen=True)
class Files:
    """A certificate and its key in files, and its serial number."""

    cert: Path
    key: Path
    serial: int


class Authority:
    """A CA with a folder, its own certificate in `ca.pem`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"CA of {folder.name}")])
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        made = _builder(self._name, self._key, 1).issuer_name(self._name).add_extension(constraints, critical=True)
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def sign(
        self, name: str, *, days: float = 1, since: float = -30, password: bytes | None = None, key: Key | None = None
    ) -> Files:
        """Make a certificate for 127.0.0.1 and `server.test`, a new key if none is given, as NAME.pem and NAME.key.

        It is valid from `since` to `days`, both in days from now.
        """
        key = key or ec.generate_private_key(ec.SECP256R1())
        names = [x509.IPAddress(ip_address("127.0.0.1")), x509.DNSName("server.test")]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = _builder(subject, key, days, since).issuer_name(self._name)
        made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = made.sign(self._key, hashes.SHA256())
        files = Files(self._folder / f"{name}.pem", self._folder / f"{name}.key", certificate.serial_number)
        files.cert.write_bytes(certificate.public_bytes(Encoding.PEM))
        encryption = NoEncryption() if password is None else BestAvailableEncryption(password)
        files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
        return files


def serial_of(certificate: str) -> int:
    """Give the serial number of a certificate in PEM."""
    return x509.load_pem_x509_certificate(certificate.encode()).serial_number


def _builder(name: x509.Name, key: Key, days: float, since: float = -30) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now + timedelta(days=since)).not_valid_after(now + timedelta(days=days))


def shown_serial(address: str) -> int:
    """Open a new connection and give the serial number of the certificate that the server shows."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 5) as plain, context.wrap_socket(plain) as wrapped:
        return serial_of(ssl.DER_cert_to_PEM_cert(wrapped.getpeercert(binary_form=True) or b""))
