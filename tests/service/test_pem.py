"""Pem: a certificate that a TLS library loads, and of which more must be read than that."""

import base64
from pathlib import Path

import pytest
from authority import Authority

from service.pem import read_pair

_TIME = b"\x17\x0d"  # tag and length of DER's UTCTime


@pytest.mark.parametrize("digit", [b"\x80", b"\x00", b"Z"])
def test_an_end_that_cannot_be_read(tmp_path: Path, digit: bytes) -> None:
    """OpenSSL does not look at the time when a certificate ends; here it is refused in words."""
    files = Authority(tmp_path).sign("server")
    der = base64.b64decode(b"".join(files.cert.read_bytes().splitlines()[1:-1]))
    end = der.index(_TIME, der.index(_TIME) + 2) + len(_TIME)
    der = der[: end + 2] + digit + der[end + 3 :]
    files.cert.write_bytes(b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(der) + b"-----END CERTIFICATE-----\n")
    with pytest.raises(ValueError, match=r"--tls-cert: the certificate in .* has no key or no time that can be read"):
        read_pair(str(files.cert), str(files.key), "--tls-cert", "--tls-key")
