"""API keys: their file, how one is made, compared and limited, and a file that changes."""

import os
import stat
import statistics
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from service import keyring
from service.cli import main
from service.errors import ConfigError, QueueFull, Unauthenticated
from service.keyring import Bucket, Grant, KeyRing, match
from service.keys import Key, digest_of, new_key, read_keys
from service.small_files import MOST_BYTES

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
    assert ring_of(path).find(shown(printed.strip())).key.requests_per_second == 5.0
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
    """One that is not there, a folder, a pipe, a device or too long a file is said by its name, and at once."""
    pipe, long, link = (path.with_name(name) for name in ("pipe", "long", "link"))
    os.mkfifo(pipe)
    path.with_name("pipe.new").touch()  # which nobody looks at, as a pipe is not to be replaced
    long.write_bytes(b"#" * (MOST_BYTES + 1))
    link.symlink_to(pipe)
    for place, words in (
        (path, "No such file"),
        (path.parent, "Is a directory; name a regular file"),
        (pipe, "it is a named pipe; name a regular file, or a link to one"),
        (link, "it is a named pipe"),
        (Path("/dev/zero"), "it is a character device"),
        (long, "it has more than 1,048,576 bytes, the most that are read"),
    ):
        with pytest.raises(ConfigError, match=f"--api-keys: cannot read '{place}': {words}"):
            read_keys(str(place))
        if place != path:
            with pytest.raises(ConfigError, match=f"--file: cannot read '{place}': {words}"):
                new_key("search", str(place), {})
    assert {found.name for found in path.parent.iterdir()} == {"pipe", "pipe.new", "long", "link"}


def test_a_link_to_a_file(path: Path) -> None:
    """It is followed, as a volume of Kubernetes has them, and a new key goes into the file behind it."""
    link = path.with_name("link")
    link.symlink_to(path)
    key = new_key("search", str(link), {})
    assert link.is_symlink()
    assert ring_of(link).find(shown(key)).key.name == "search"


def test_what_a_caller_must_show(path: Path) -> None:
    """The key as a bearer's, once; one answer for every key that is not known, and nothing of it is repeated."""
    key = new_key("search", str(path), {})
    ring = ring_of(path)
    for metadata in (shown(key), [("x", "y"), ("authorization", f"bearer  {key} ")]):
        assert ring.find(metadata).caller.name == "search"
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
            ring.find(metadata)
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
            ring.find(metadata)
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

    ratios: list[float] = []
    while len(ratios) < 5 and not any(ratio < 1.5 for ratio in ratios):  # another process may come between
        found = medians()
        ratios.append(max(found) / min(found))
    assert min(ratios) < 1.5, ratios


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


def test_a_file_that_changes(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Keys that are added are known, removed ones are not, and what the others have in work still counts."""
    search, bulk = (new_key(name, str(path), {}) for name in ("search", "bulk"))
    ring = ring_of(path)
    grant, gone = ring.find(shown(search)), ring.find(shown(bulk))
    grant.begin(0.0)
    found = read_keys(str(path))[0]
    path.write_text(f"[[keys]]\nname = 'search'\nsha256 = '{found.digest.hex()}'\nmax_concurrent = 1\nweight = 3\n")
    late = new_key("late", str(path), {})
    with caplog.at_level("INFO", "service.keyring"):
        assert ring.look()
        assert ring.look()
    ring.check(grant)
    assert ring.find(shown(late)).caller.name == "late"
    assert caplog.text.count("1 added, 1 removed, 2 in all") == 1
    with pytest.raises(Unauthenticated, match="any more"):
        ring.check(gone)
    with pytest.raises(Unauthenticated, match="does not know"):
        ring.find(shown(bulk))
    assert ring.find(shown(search)) is grant
    assert grant.caller.weight == 3.0
    with pytest.raises(QueueFull, match="has 1 requests in work"):
        grant.begin(0.0)


def test_a_file_whose_size_and_time_stay(path: Path) -> None:
    """One that is put in another's place with its date is noticed all the same."""
    keys = [new_key("search", str(path), {})]
    ring, before = ring_of(path), path.stat()
    content = path.read_text().replace(digest_of(keys[0]).hex(), digest_of("other").hex())
    path.write_text(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert ring.look()
    assert ring.find(shown("other")).key.name == "search"


def test_a_broken_file_changes_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The keys of before stay; each version of the file is one warning, which repeats nothing of it."""
    key = new_key("search", str(path), {})
    before = path.read_bytes()
    ring = ring_of(path)
    for number, spoil in enumerate((lambda: path.write_text("secret"), path.unlink, lambda: os.mkfifo(path)), 1):
        spoil()
        for _ in range(3):
            assert not ring.look()
            assert ring.find(shown(key)).key.name == "search"
        assert caplog.text.count("the keys of before stay") == number
    assert "it is a named pipe" in caplog.text
    assert "secret" not in caplog.text
    path.unlink()
    path.write_bytes(before)
    assert ring.look()
    path.write_text(f"[[keys]]\nname = 'a'\nsha256 = '{HASH}'\n")
    assert ring.look()
    with pytest.raises(Unauthenticated):
        ring.find(shown(key))


def test_many_who_make_keys_at_once(path: Path) -> None:
    """Each key that is printed is in the file, and nothing else is left behind."""
    path = path.resolve()
    code = "import sys; from service.keys import new_key; print(new_key(sys.argv[1], sys.argv[2], {}))"
    words = [sys.executable, "-c", code]
    for start in range(0, 24, 8):
        made = [
            subprocess.Popen([*words, f"k{number}", str(path)], stdout=subprocess.PIPE, text=True)
            for number in range(start, start + 8)
        ]
        printed = [process.communicate(timeout=60)[0].strip() for process in made]
        assert [process.returncode for process in made] == [0] * 8
        assert {digest_of(key) for key in printed} <= {key.digest for key in read_keys(str(path))}
    assert len(read_keys(str(path))) == 24
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_a_key_would_make_too_large(path: Path) -> None:
    """It stays as it is, so that a server can still read it."""
    new_key("first", str(path), {})
    content = path.read_text()
    path.write_text(content + "#" * (MOST_BYTES - len(content)))
    with pytest.raises(ConfigError, match=r"no key is made: with it .* has more than 1,048,576 bytes"):
        new_key("second", str(path), {})
    assert path.stat().st_size == MOST_BYTES


def test_a_file_that_others_may_change(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is a warning at the start; one that they may read is not."""
    new_key("search", str(path), {})
    for mode, told in ((0o444, 0), (0o620, 1), (0o602, 2)):
        path.chmod(mode)
        ring_of(path)
        assert caplog.text.count("let themselves in") == told
