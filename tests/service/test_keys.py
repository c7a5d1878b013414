"""API keys: their file, how one is made, compared and limited, and a file that changes."""

import stat
import statistics
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from service import keyring
from service.cli import main
from service.errors import ConfigError, QueueFull, Unauthenticated
from service.keyring import Bucket, Grant, KeyRing, match
from service.keys import Key, digest_of, new_key, read_keys

HASH = "0123456789abcdef" * 4


def shown(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def ring_of(path: Path) -> KeyRing:
    ring = KeyRing(str(path))
    ring.load()
    return ring


def test_a_new_key(path: Path) -> None:
    """It is 256 random bits; the file gets its hash alone, with its limits, and belongs to its owner."""
    first = new_key("search", str(path), {})
    path.chmod(0o644)
    limits = {"requests_per_second": 2.5, "burst": 10.0, "max_concurrent": 4, "weight": 2.0}
    second = new_key("bulk", str(path), limits)
    assert first != second
    assert len(first.removeprefix("atc_")) == 43  # 32 bytes in base64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = path.read_text()
    assert first not in content
    assert second not in content
    search, bulk = read_keys(str(path))
    assert search == Key("search", digest_of(first))
    assert bulk == Key("bulk", digest_of(second), 2.5, 10.0, 4, 2.0)
    assert tomllib.loads(content)["keys"][1]["weight"] == 2.0
    assert list(path.parent.iterdir()) == [path]
    assert digest_of(first).hex() not in repr(search)


def test_the_command_for_a_key(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints the key alone; a name that is taken or none, or a limit that is none, changes nothing."""
    words = ["keys", "new", "search", "--file", str(path)]
    assert main([*words, "--requests-per-second", "5"]) == 0
    printed = capsys.readouterr().out
    assert ring_of(path).find(shown(printed.strip()), 0.0).key.requests_per_second == 5.0
    before = path.read_bytes()
    for name, flags, told in (
        ("search", [], "has a key 'search' already"),
        ("se arch", [], "a key's name must be"),
        ("x" * 33, [], "a key's name must be"),
        ("other", ["--burst", "3"], "a burst without requests_per_second"),
        ("other", ["--weight", "nan"], f"with it {str(path)!r} has a weight in key 2 ('other') that is no number from"),
        ("other", ["--max-concurrent", "0"], "no whole number from 1 on"),
    ):
        assert main(["keys", "new", name, "--file", str(path), *flags]) == 1
        assert told in capsys.readouterr().err
        assert path.read_bytes() == before
    fresh = path.with_name("keys.toml.new")
    fresh.touch()
    assert main(["keys", "new", "other", "--file", str(path)]) == 1
    assert "another key is being made" in capsys.readouterr().err
    assert fresh.exists()


def test_a_key_for_a_folder_that_is_not_there(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the folder, not a file that nobody has heard of."""
    absent = path.parent / "absent"
    assert main(["keys", "new", "search", "--file", str(absent / "keys.toml")]) == 1
    printed = capsys.readouterr().err
    assert f"cannot write into the folder {str(absent)!r}" in printed
    assert "No such file or directory; make it" in printed
    assert ".new" not in printed


BROKEN = [
    ("", "holds no key; make one"),
    ("keys = []", "holds no key; make one"),
    ("secret = 1", "holds something else than"),
    ("keys = ['secret']", "holds something else than"),
    ("[[keys]]\nname = 'a'\nsecret\n", "is no TOML: a mistake at line 3, column 7"),
    ("\x00secret", "is no TOML: a mistake at line 1, column 1"),
    ("[" * 3000, "is no TOML"),
    (f"[[keys]]\nsha256 = '{HASH}'", "gives key 1 no proper name"),
    (f"[[keys]]\nname = 'secret secret'\nsha256 = '{HASH}'", "gives key 1 no proper name"),
    (f"[[keys]]\nname = '{'secret' * 6}'\nsha256 = '{HASH}'", "gives key 1 no proper name"),
    ("[[keys]]\nname = 'a'", "has no sha256 of 64 hexadecimal digits in key 1 ('a')"),
    ("[[keys]]\nname = 'a'\nsha256 = 'secret'", "it is the hash of the key, not the key"),
    (f"[[keys]]\nname = 'a'\nsha256 = '{HASH}'\nsecret = 1", "has 1 unknown fields in key 1 ('a')"),
    (f"[[keys]]\nname = 'a'\nsha256 = '{HASH}'\nrequests_per_second = 'secret'", "a requests_per_second in key 1"),
    (f"[[keys]]\nname = 'a'\nsha256 = '{HASH}'\nrequests_per_second = 0", "no number from 1e-06 to 1e"),
    (f"[[keys]]\nname = 'a'\nsha256 = '{HASH}'\nrequests_per_second = true", "a requests_per_second in key 1"),
    (f"[[keys]]\nname = 'a'\nsha256 = '{HASH}'\nrequests_per_second = 1\nburst = 0.5", "a burst in key 1"),
    (f"[[keys]]\nname = 'a'\nsha256 = '{HASH}'\nburst = 5", "a burst without requests_per_second"),
    (f"[[keys]]\nname = 'a'\nsha256 = '{HASH}'\nmax_concurrent = 1.5", "no whole number from 1 on"),
    (f"[[keys]]\nname = 'a'\nsha256 = '{HASH}'\nweight = inf", "a weight in key 1"),
    (
        f"[[keys]]\nname = 'a'\nsha256 = '{HASH}'\n[[keys]]\nname = 'a'\nsha256 = '{HASH[::-1]}'",
        "the same name in keys 1 and 2",
    ),
    (
        f"[[keys]]\nname = 'a'\nsha256 = '{HASH}'\n[[keys]]\nname = 'b'\nsha256 = '{HASH.upper()}'",
        "the same sha256 in keys 1 and 2",
    ),
    ("#" * 2**20 + "#", "more than 1,048,576 bytes"),
    (
        "".join(f"[[keys]]\nname = 'k{number}'\nsha256 = '{number:064x}'\n" for number in range(1001)),
        "holds 1001 keys, more than 1000",
    ),
]


@pytest.mark.parametrize(("content", "words"), BROKEN, ids=[words for _, words in BROKEN])
def test_a_file_that_is_none(path: Path, content: str, words: str) -> None:
    """What is wrong is said with its place, and nothing that stands in the file but a key's name."""
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_keys(str(path))
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"--api-keys: {str(path)!r} ")
    assert "secret" not in str(caught.value)
    assert HASH not in str(caught.value)
    assert caught.value.__cause__ is None  # a traceback would quote the file


def test_a_file_that_cannot_be_read(path: Path) -> None:
    """One that is not there, or a folder, is said by its name."""
    for place, words in ((path, "No such file"), (path.parent, "Is a directory")):
        with pytest.raises(ConfigError, match=words):
            read_keys(str(place))


def test_what_a_caller_must_show(path: Path) -> None:
    """The key as a bearer's, once; one answer for every key that is not known, and nothing of it is repeated."""
    key = new_key("search", str(path), {})
    ring = ring_of(path)
    for metadata in (shown(key), [("x", "y"), ("authorization", f"bearer  {key} ")]):
        assert ring.find(metadata, 0.0).caller.name == "search"
    told = []
    for metadata in (
        shown("swordfish"),
        shown(key[:-1]),
        shown(key + "A"),
        shown(key.swapcase()),
        shown("\u00fc\ud800"),
        shown(digest_of(key).hex()),
    ):
        with pytest.raises(Unauthenticated) as caught:
            ring.find(metadata, 0.0)
        told.append(str(caught.value))
    assert set(told) == {"this server does not know the API key; ask whoever runs it for one"}
    for metadata, words in (
        ([], "wants an API key; send it as metadata, `authorization: Bearer KEY`"),
        ([("authorization", key)], "not where it should be; send it as metadata"),
        ([("authorization", f"Basic {key}")], "not where it should be"),
        ([("authorization", "Bearer ")], "not where it should be"),
        ([("authorization", "")], "not where it should be"),
        ([*shown(key), *shown(key)], "not where it should be"),
        ([("authorization", b"\xff")], "not where it should be"),
    ):
        with pytest.raises(Unauthenticated, match=words) as caught:
            ring.find(metadata, 0.0)
        assert key not in str(caught.value)


def test_every_key_is_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever matches, or none, each hash is compared by the function that never stops early."""
    compared = []
    compare = keyring.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return compare(one, other)

    monkeypatch.setattr(keyring, "compare_digest", counting)
    grants = [Grant(Key(f"k{number}", digest_of(str(number)))) for number in range(5)]
    for wanted in ("0", "2", "4", "none of them"):
        compared.clear()
        found = match(digest_of(wanted), grants)
        assert compared == [grant.digest for grant in grants]
        assert found is next((grant for grant in grants if grant.digest == digest_of(wanted)), None)


def test_the_time_says_nothing_of_a_prefix() -> None:
    """What differs in its first byte, its last or nowhere takes as long, in hashes so long that a stop would show."""
    size = 2**17
    known = bytes(size)
    grants = [Grant(Key("long", known))]
    wrong = {"first": b"\1" + known[1:], "last": known[:-1] + b"\1", "none": bytes(known)}

    def medians() -> list[float]:
        times: dict[str, list[float]] = {name: [] for name in wrong}
        for number in range(600):
            for name in (*wrong, *reversed(wrong)) if number % 2 else (*reversed(wrong), *wrong):
                began = time.perf_counter()
                match(wrong[name], grants)
                times[name].append(time.perf_counter() - began)
        return [statistics.median(found) for found in times.values()]

    ratios = []
    for _ in range(5):  # another process may come between
        found = medians()
        ratios.append(max(found) / min(found))
        if ratios[-1] < 1.5:
            return
    pytest.fail(f"medians differ by factors of {ratios}")


def test_a_bucket() -> None:
    """It begins full, gives a burst and then its rate, says how long to wait, and never holds more than a burst."""
    bucket = Bucket(2.0, 3.0)
    assert [bucket.take(10.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert bucket.take(10.25) == 0.25
    assert bucket.take(10.5) == 0.0
    assert bucket.take(10.5) == 0.5
    assert [bucket.take(1000.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert bucket.take(999.0) == 0.5  # a clock that stands still, or worse
    free = Bucket(float("inf"), float("inf"))
    assert not any(free.take(0.0) for _ in range(10_000))


def test_what_a_key_may_have_in_work() -> None:
    """So many requests at once, and what is refused for that takes nothing of the rate."""
    grant = Grant(Key("search", b"", requests_per_second=1.0, burst=3.0, max_concurrent=2))
    grant.begin(0.0)
    grant.begin(0.0)
    for _ in range(5):
        with pytest.raises(QueueFull, match="has 2 requests in work") as caught:
            grant.begin(0.0)
        assert caught.value.reason == "key_concurrency"
        assert caught.value.retry_delay_s > 0
    grant.end()
    grant.begin(0.0)
    grant.end()
    with pytest.raises(QueueFull, match="1 times a second, 3 times at once") as caught:
        grant.begin(0.25)
    assert (caught.value.reason, caught.value.retry_delay_s) == ("key_rate", 0.75)


@pytest.fixture
def clock() -> Callable[[], float]:
    """Give a clock on which each look is late enough for the file to be looked at again."""
    now = time.monotonic()

    def later() -> float:
        nonlocal now
        now += 2.0
        return now

    return later


def test_a_file_that_changes(path: Path, clock: Callable[[], float], caplog: pytest.LogCaptureFixture) -> None:
    """Keys that are added are known, removed ones are not, and what the others have in work still counts."""
    search, bulk = (new_key(name, str(path), {}) for name in ("search", "bulk"))
    ring = ring_of(path)
    grant, gone = ring.find(shown(search), clock()), ring.find(shown(bulk), clock())
    grant.begin(0.0)
    found = read_keys(str(path))[0]
    path.write_text(f"[[keys]]\nname = 'search'\nsha256 = '{found.digest.hex()}'\nmax_concurrent = 1\nweight = 3\n")
    late = new_key("late", str(path), {})
    with caplog.at_level("INFO", "service.keyring"):
        ring.check(grant, clock())
    assert ring.find(shown(late), clock()).caller.name == "late"
    assert "1 added, 1 removed, 2 in all" in caplog.text
    with pytest.raises(Unauthenticated, match="any more"):
        ring.check(gone, clock())
    with pytest.raises(Unauthenticated, match="does not know"):
        ring.find(shown(bulk), clock())
    assert ring.find(shown(search), clock()) is grant
    assert grant.caller.weight == 3.0
    with pytest.raises(QueueFull, match="has 1 requests in work"):
        grant.begin(0.0)


def test_a_broken_file_changes_nothing(
    path: Path, clock: Callable[[], float], caplog: pytest.LogCaptureFixture
) -> None:
    """The keys of before stay; each version of the file is one warning, which repeats nothing of it."""
    key = new_key("search", str(path), {})
    before = path.read_bytes()
    ring = ring_of(path)
    for number, spoil in enumerate((lambda: path.write_text("secret"), path.unlink), 1):
        spoil()
        for _ in range(3):
            assert ring.find(shown(key), clock()).key.name == "search"
        assert caplog.text.count("the keys of before stay") == number
    assert "secret" not in caplog.text
    path.write_bytes(before)
    ring.find(shown(key), clock())
    path.write_text(f"[[keys]]\nname = 'a'\nsha256 = '{HASH}'\n")
    with pytest.raises(Unauthenticated):
        ring.find(shown(key), clock())


def test_the_file_is_looked_at_once_a_second(path: Path) -> None:
    """Calls that follow each other soon do not ask the disk."""
    key = new_key("search", str(path), {})
    ring = ring_of(path)
    now = time.monotonic() + 5.0
    ring.find(shown(key), now)
    path.write_text(f"[[keys]]\nname = 'a'\nsha256 = '{HASH}'\n")
    ring.find(shown(key), now + 0.9)
    with pytest.raises(Unauthenticated):
        ring.find(shown(key), now + 1.1)


def test_a_file_that_others_may_change(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is a warning at the start; one that they may read is not."""
    new_key("search", str(path), {})
    for mode, told in ((0o444, 0), (0o620, 1), (0o602, 2)):
        path.chmod(mode)
        ring_of(path)
        assert caplog.text.count("let themselves in") == told
