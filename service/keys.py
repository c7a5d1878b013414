"""Keys: the file of API keys, which holds their hashes and never the keys themselves.

A key is 256 random bits. Nobody finds such a number by trying, as they would a password, so that one SHA-256 hides it
well enough and costs a call no time. No error repeats what a file holds, but for the name of a key.
May import: small_files, errors.
"""

import os
import re
import secrets
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from math import inf, isfinite
from pathlib import Path
from typing import Any

from service.errors import ConfigError
from service.small_files import MOST_BYTES, read_small

_PREFIX = "atc_"  # by which scanners for secrets, and people, know what they found
_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")  # too short for a key, which must not end up in its place
_NAME_RULE = "1 to 32 letters, digits, dots, dashes and underscores, the first a letter or a digit"
_HASH = re.compile(r"[0-9a-fA-F]{64}")
_PLACE = re.compile(r"at line \d+, column \d+|at end of document")
_MOST_KEYS = 1000  # each is compared with at every call, at some 60 ns
_WAIT_S, _AGAIN_S = 3.0, 0.02  # for others who make keys
_LEAST_WEIGHT, _MOST_WEIGHT = 0.01, 100.0
_FIELDS = ("name", "sha256", "requests_per_second", "burst", "max_concurrent", "weight")


@dataclass(frozen=True, slots=True)
class Key:
    """A key, and what may be done with it.

    Attributes:
        name: What its caller is called in messages and in turns at the device.
        digest: SHA-256 of the key, 32 bytes; not shown by `repr`.
        requests_per_second: Requests and items of streams that may come each second, in the long run.
        burst: How many may come at once after a pause.
        max_concurrent: How many may be in work at one time; None for any number.
        weight: Its share of the device beside other callers.
    """

    name: str
    digest: bytes = field(repr=False)
    requests_per_second: float = inf
    burst: float = inf
    max_concurrent: int | None = None
    weight: float = 1.0


def digest_of(key: str) -> bytes:
    """Hash a key as it was sent, whatever it is."""
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


def read_keys(path: str) -> tuple[Key, ...]:
    """Read a file of keys.

    Raises:
        ConfigError: It cannot be read, is malformed, or holds no key.
    """
    try:
        content = read_small(path)
    except OSError as error:
        raise ConfigError(f"--api-keys: cannot read {path!r}: {error.strerror}") from error
    try:
        return _keys(content)
    except _Fault as fault:
        raise ConfigError(f"--api-keys: {path!r} {fault}") from None  # what caused it may quote the file


def new_key(name: str, path: str, limits: dict[str, float]) -> str:
    """Make a key and add its hash to a file, which only its owner may read from then on.

    Args:
        name: Of the key; another one than any in the file.
        path: The file; made if it is not there.
        limits: Further fields of the entry.

    Returns:
        The key, which is kept nowhere.

    Raises:
        ConfigError: The name is none or taken, a limit is out of its range, the file is malformed, or its folder is
            not there or not to be written into.
        OSError: The file cannot be read, or not be written to its end.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"a key's name must be {_NAME_RULE}")
    target = Path(path).resolve()
    _read(target, path)  # what is no file gets no neighbour
    with _replacing(target) as fresh:
        key, content = _added(name, path, _read(target, path), limits)
        _write(fresh, content)
        fresh.replace(target)
    return key


class _Fault(Exception):
    """Say what is wrong with a file, as the rest of a sentence that begins with its name."""


def _read(target: Path, path: str) -> bytes:
    """Give what a file of keys holds; nothing where it is not there yet."""
    try:
        return read_small(str(target))
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ConfigError(f"--file: cannot read {path!r}: {error.strerror}") from error


def _added(name: str, path: str, before: bytes, limits: dict[str, float]) -> tuple[str, bytes]:
    """Make a key; gives it, and what the file holds with it."""
    try:
        known = _keys(before) if before.strip() else ()
    except _Fault as fault:
        raise ConfigError(f"--file: {path!r} {fault}") from None
    if any(key.name == name for key in known):
        raise ConfigError(f"{path!r} has a key {name!r} already; give the new one another name, or remove that entry")
    key = _PREFIX + secrets.token_urlsafe(_BYTES)
    lines = [f'name = "{name}"', f'sha256 = "{digest_of(key).hex()}"']
    lines += [f"{limit} = {value}" for limit, value in limits.items()]
    start = before.rstrip() + b"\n\n" if before.strip() else b""
    content = start + "\n".join(["[[keys]]", *lines, ""]).encode("ascii")
    try:
        _keys(content)
    except _Fault as fault:
        raise ConfigError(f"no key is made: with it {path!r} {fault}") from None
    return key, content


def _keys(content: bytes) -> tuple[Key, ...]:
    if len(content) > MOST_BYTES:
        raise _Fault(f"has more than {MOST_BYTES:,} bytes; remove keys that nobody uses")
    try:
        document = tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        place = _PLACE.search(str(error))
        raise _Fault(f"is no TOML: a mistake {place[0] if place else 'somewhere in it'}") from None
    entries = document.get("keys", [])
    if document.keys() - {"keys"} or not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise _Fault("holds something else than [[keys]], each with name and sha256")
    if not entries:
        raise _Fault("holds no key; make one with `attencode keys new NAME --file FILE`")
    if len(entries) > _MOST_KEYS:
        raise _Fault(f"holds {len(entries)} keys, more than {_MOST_KEYS}; remove those that nobody uses")
    keys = tuple(_key(number, entry) for number, entry in enumerate(entries, 1))
    for what, seen in (("name", [key.name for key in keys]), ("sha256", [key.digest for key in keys])):
        _check_distinct(what, seen)
    return keys


def _check_distinct(what: str, seen: Sequence[object]) -> None:
    places: dict[object, int] = {}
    for number, value in enumerate(seen, 1):
        if value in places:
            raise _Fault(f"has the same {what} in keys {places[value]} and {number}; each must have its own")
        places[value] = number


def _key(number: int, entry: dict[str, Any]) -> Key:
    """Read the entry of one key."""
    name, digest = entry.get("name"), entry.get("sha256")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _Fault(f"gives key {number} no proper name; it must be {_NAME_RULE}")
    which = f"key {number} ({name!r})"
    if unknown := len(entry.keys() - set(_FIELDS)):
        raise _Fault(f"has {unknown} unknown fields in {which}; a key has {', '.join(_FIELDS)}")
    if not isinstance(digest, str) or not _HASH.fullmatch(digest):
        raise _Fault(f"has no sha256 of 64 hexadecimal digits in {which}; it is the hash of the key, not the key")
    rate = _number(entry, "requests_per_second", which, inf)
    if "burst" in entry and rate == inf:
        raise _Fault(f"has a burst without requests_per_second in {which}; add that, or leave burst out")
    burst = _number(entry, "burst", which, max(1.0, rate), least=1.0)
    most = entry.get("max_concurrent")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise _Fault(f"has a max_concurrent in {which} that is no whole number from 1 on")
    weight = _number(entry, "weight", which, 1.0, least=_LEAST_WEIGHT, most=_MOST_WEIGHT)
    return Key(name, bytes.fromhex(digest), rate, burst, most, weight)


def _number(
    entry: dict[str, Any], name: str, which: str, default: float, *, least: float = 1e-6, most: float = 1e9
) -> float:
    """Give a number of an entry, or what it is if unset."""
    value = entry.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise _Fault(f"has a {name} in {which} that is no number from {least:g} to {most:g}")
    assert isfinite(value)
    return float(value)


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Give an empty file, which is to replace another one in one step: who follows that never sees half of it.

    As long as it is there nobody else replaces the other one, so that what was read of that is still true.

    Raises:
        ConfigError: Somebody else has it, and goes on to.
    """
    fresh, until = target.with_name(f"{target.name}.new"), time.monotonic() + _WAIT_S
    while True:
        try:
            os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            break
        except FileExistsError:
            if time.monotonic() > until:
                raise ConfigError(
                    f"{str(fresh)!r} is there: another key is being made, or its making was broken off; remove it if "
                    "not"
                ) from None
            time.sleep(_AGAIN_S)
        except OSError as error:
            raise ConfigError(
                f"cannot write into the folder {str(fresh.parent)!r} of the file of keys: {error.strerror}; make it, "
                "or give --file another place"
            ) from error
    try:
        yield fresh
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def _write(path: Path, content: bytes) -> None:
    """Write a file and wait for the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
