"""Files: what reads an artifact's description and certificates, given whatever a fuzzer makes of them.

Targets as those of `fuzz.targets`. May import: service, source.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from fuzz.source import Source

from service.artifact import open_description
from service.errors import StartupError


class OnFiles:
    """Targets that read files of a folder."""

    def __init__(self, folder: Path, artifact: Path, pair: tuple[bytes, bytes] | None = None) -> None:
        import json

        self._folder = folder
        self._described: dict[str, Any] = json.loads((artifact / "artifact.json").read_bytes())
        self._pair = pair

    def description(self, data: bytes) -> str:
        """A description of an artifact is read or refused; one that is read can be told to clients."""
        import json

        from service.codec_model import encode_model_info
        from service.config import ServiceConfig
        from service.placement import Placement
        from service.served import _model_info

        source = Source(data)
        if source.chance(60):
            written = source.data(source.left)
        else:
            values = dict(self._described)
            for _ in range(1 + source.few() % 4):
                values[source.pick(sorted(values))] = _json_value(source)
            written = json.dumps(values).encode()
        (self._folder / "artifact.json").write_bytes(written)
        try:
            artifact = open_description(self._folder)
        except StartupError:
            return "refused"
        config = ServiceConfig(model="m", _cli_parse_args=False)  # type: ignore[call-arg]
        info = _model_info(config, "m", artifact, Placement("cpu", "float32", "asked for"))
        encode_model_info(info).SerializeToString()
        return "read"

    def certificates(self, data: bytes) -> str:
        """Files of a certificate and its key are read or refused, with no word of what is in the key."""
        import base64

        from service import pem

        assert self._pair is not None
        source, (cert, key) = Source(data), self._pair
        if source.chance(200):
            der = bytearray(base64.b64decode(b"".join(cert.splitlines()[1:-1])))
            for _ in range(1 + source.few() % 4):
                der[source.below(len(der))] = source.byte()
            cert = b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(bytes(der)) + b"-----END CERTIFICATE-----\n"
        else:
            cert, key = (_damaged(source, part) for part in (cert, key))
        paths = (self._folder / "cert.pem", self._folder / "key.pem")
        for path, content in zip(paths, (cert, key), strict=True):
            path.write_bytes(content)
        with suppress(ValueError):
            pem.read_authorities(str(paths[0]), "--tls-client-ca")
        try:
            pair = pem.read_pair(str(paths[0]), str(paths[1]), "--tls-cert", "--tls-key")
        except ValueError as error:
            return "told a secret" if self._pair[1].splitlines()[1].decode() in str(error) else "refused"
        pem.not_after(pair.cert)
        return "read"


def _damaged(source: Source, content: bytes) -> bytes:
    made = bytearray(content)
    for _ in range(source.few() % 5):
        made[source.below(len(made))] = source.byte()
    return bytes(made[: source.below(len(made))] if source.chance(60) else made)


def _json_value(source: Source) -> Any:
    kind = source.below(12)
    if kind == 0:
        return [_json_value(source) for _ in range(source.below(4))]
    if kind == 1:
        return {source.text(): _json_value(source) for _ in range(source.below(4))}
    odd = (
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**32,
        2**63,
        2**64,
        1.5,
        float("nan"),
        "",
        "\ud800",
        "..",
        "a\0b",
        [],
        {},
        [[]],
    )
    return source.pick(odd) if kind < 9 else source.text() if kind < 11 else source.unsigned(64)
