"""Where a checkpoint comes from: a folder, or a stand-in for the Hugging Face hub on this machine."""

import hashlib
import json
import os
import pty
import re
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from model.errors import CheckpointError
from model.hub import Source, locate

ROOT = Path(__file__).parents[2]
OLD, NEW = "0" * 39 + "1", "0" * 39 + "2"
NOWHERE = "http://127.0.0.1:9"  # the discard port, where nobody listens
LOCATE = """
import json, sys
from model.errors import CheckpointError
from model.hub import locate
try:
    source = locate(*sys.argv[1:])
    print(json.dumps([str(source.folder), source.model_id, source.revision]))
except CheckpointError as error:
    print(json.dumps(str(error)))
"""
Files = dict[str, bytes]


class Hub(ThreadingHTTPServer):
    """A stand-in for the hub on a free port of this machine.

    Attributes:
        commits: Model id to commit to files.
        refs: Model id to branch or tag to commit.
        fetched: Names of the files whose content was sent.
        url: Where processes that are told of this hub look for it.
        hangs_up: Whether it closes connections without an answer.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.commits: dict[str, dict[str, Files]] = {}
        self.refs: dict[str, dict[str, str]] = {}
        self.fetched: list[str] = []
        self.hangs_up = False
        self.url = f"http://127.0.0.1:{self.server_port}"

    def publish(self, model_id: str, files: Files, commit: str = NEW, *refs: str) -> None:
        """Put files under a commit, which is the default branch's from now on."""
        self.commits.setdefault(model_id, {})[commit] = files
        self.refs.setdefault(model_id, {}).update(dict.fromkeys(("main", *refs), commit))

    def find(self, model_id: str, revision: str) -> tuple[str, Files | None]:
        """Give a revision's commit and files; None for files that are not there."""
        commit = self.refs.get(model_id, {}).get(revision, revision)
        return commit, self.commits.get(model_id, {}).get(commit)

    def environment(self, home: Path) -> dict[str, str]:
        """Give the variables of a process that knows this hub alone; huggingface_hub reads them on import."""
        others = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        ours = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
        return others | ours

    def locate(self, home: Path, *arguments: str) -> Any:
        """Call `locate` in a process of its own: its Source, or the message of its CheckpointError."""
        command = [sys.executable, "-c", LOCATE, *arguments]
        answer = json.loads(subprocess.check_output(command, env=self.environment(home), cwd=ROOT))
        return answer if isinstance(answer, str) else Source(Path(answer[0]), answer[1], answer[2])


class Handler(BaseHTTPRequestHandler):
    """Answers what huggingface_hub asks when it downloads a model."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if asked := re.fullmatch(r"/api/models/(.+)/(revision|tree)/([^/]+)", path):
            self.answer_api(*asked.groups())
        elif asked := re.fullmatch(r"/(.+)/resolve/([^/]+)/(.+)", path):
            self.answer_file(*asked.groups())
        else:
            self.send(404, b"", {})

    def do_HEAD(self) -> None:
        self.do_GET()

    def answer_api(self, model_id: str, kind: str, revision: str) -> None:
        """Answer about a `revision` (its commit) or its `tree` (its files)."""
        commit, files = self.server.find(model_id, revision)
        if files is None:
            missing = "Revision" if model_id in self.server.commits else "Repo"
            self.send(404, b"{}", {"X-Error-Code": f"{missing}NotFound"})
        elif kind == "tree":
            rows = [{"type": "file", "path": name, "size": len(files[name]), "oid": name} for name in files]
            self.send(200, json.dumps(rows).encode(), {})
        else:
            about = {"id": model_id, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
            self.send(200, json.dumps(about).encode(), {})

    def answer_file(self, model_id: str, revision: str, name: str) -> None:
        """Answer a file's headers, and its content when that is asked for."""
        commit, files = self.server.find(model_id, revision)
        if files is None or name not in files:
            self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        if self.command == "GET":
            self.server.fetched.append(name)
        digest = hashlib.sha256(files[name]).hexdigest()
        self.send(200, files[name], {"ETag": f'"{digest}"', "X-Repo-Commit": commit})

    def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        if self.server.hangs_up:
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_arguments: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    """Give an empty stand-in hub that answers."""
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def read_files(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------- a folder


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder is found under any spelling, is called by its own name, and has no revision."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(folder)
    for spelling in (str(folder), "~/my-model", ".", "../my-model"):
        source = locate(spelling)
        assert source.folder.samefile(folder)
        assert (source.model_id, source.revision) == ("my-model", None)


def test_a_folder_has_no_revision(tmp_path: Path):
    """A revision of a local folder is refused."""
    with pytest.raises(CheckpointError, match="is a local folder; a revision is for hub ids"):
        locate(str(tmp_path), "main")


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "./absent", "../absent", "~/absent", "a/b/c", "a file", "~nobody/x", ""]
)
def test_what_can_be_no_hub_id_is_not_looked_up(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A path without a folder is refused at once, by its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a file").touch()
    with pytest.raises(CheckpointError, match="is not a folder") as caught:
        locate(model)
    assert str(caught.value).startswith(model)


@pytest.mark.parametrize("model", ["no spaces", "-dash", "org/na:me", "x..y"])
def test_a_name_that_no_model_can_have(model: str):
    """A name that the hub does not allow is refused in one line that holds it."""
    with pytest.raises(CheckpointError) as caught:
        locate(model)
    assert str(caught.value).startswith(f"{model} is neither a local folder nor could it be fetched")
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- a download

# Contents differ, since files of the same content are fetched once.
CONFIG: Files = {"config.json": b"{}", "tokenizer.json": b"{ }", "vocab.txt": b"a", "1_Pooling/config.json": b"{  }"}
SAFETENSORS: Files = {"model.safetensors": b"safe" * 1000}
BIN: Files = {"pytorch_model.bin": b"pickle"}
BESIDE: Files = {"modeling_x.py": b"boom", "tf_model.h5": b"tf", "onnx/model.onnx": b"onnx", "README.md": b"# x"}


def test_default_revision(hub: Hub, tmp_path: Path):
    """Without a revision the default branch is fetched, and its commit is known afterwards."""
    hub.publish("org/name", {**CONFIG, **SAFETENSORS, "vocab.txt": b"old"}, OLD)
    hub.publish("org/name", {**CONFIG, **SAFETENSORS})
    source = hub.locate(tmp_path, "org/name")
    assert (source.model_id, source.revision) == ("org/name", NEW)
    assert read_files(source.folder) == {**CONFIG, **SAFETENSORS}


@pytest.mark.parametrize("revision", [OLD, "v1"])
def test_pinned_revision(hub: Hub, tmp_path: Path, revision: str):
    """A commit or a tag is fetched as it was, and its commit is known afterwards."""
    old = {**CONFIG, **SAFETENSORS, "vocab.txt": b"old"}
    hub.publish("org/name", old, OLD, "v1")
    hub.publish("org/name", {**CONFIG, **SAFETENSORS})
    source = hub.locate(tmp_path, "org/name", revision)
    assert source.revision == OLD
    assert read_files(source.folder) == old


def test_only_data_is_fetched(hub: Hub, tmp_path: Path):
    """Of the weights safetensors alone are fetched; pickles, code and other frameworks' files are not."""
    hub.publish("org/name", {**CONFIG, **BESIDE, **BIN, **SAFETENSORS})
    hub.locate(tmp_path, "org/name")
    assert sorted(hub.fetched) == sorted({**CONFIG, **SAFETENSORS})


def test_pickles_where_there_is_nothing_else(hub: Hub, tmp_path: Path):
    """A model without safetensors is fetched with its `.bin` file."""
    hub.publish("org/name", {**CONFIG, **BESIDE, **BIN})
    source = hub.locate(tmp_path, "org/name")
    assert read_files(source.folder) == {**CONFIG, **BIN}
    assert sorted(hub.fetched) == sorted({**CONFIG, **BIN})


def test_shards_are_fetched_with_their_index(hub: Hub, tmp_path: Path):
    """All shards come, and the index that names them."""
    shards = {f"model-0000{n}-of-00002.safetensors": b"%d" % n for n in (1, 2)}
    shards["model.safetensors.index.json"] = b"[]"
    hub.publish("org/name", {**CONFIG, **shards, **BIN})
    hub.locate(tmp_path, "org/name")
    assert sorted(hub.fetched) == sorted({**CONFIG, **shards})


def test_what_was_fetched_is_kept(hub: Hub, tmp_path: Path):
    """A second time nothing is sent again, and without a hub the same files are found."""
    hub.publish("org/name", {**CONFIG, **SAFETENSORS})
    first = hub.locate(tmp_path, "org/name")
    hub.fetched.clear()
    assert hub.locate(tmp_path, "org/name") == first
    assert hub.fetched == []
    hub.url = NOWHERE
    assert hub.locate(tmp_path, "org/name") == first


@pytest.mark.parametrize(
    ("model", "revision"), [("org/absent", None), ("absent", None), ("org/name", "v9"), ("org/name", "3" * 40)]
)
def test_what_the_hub_does_not_have(hub: Hub, tmp_path: Path, model: str, revision: str | None):
    """An unknown model or revision is one CheckpointError of one line that names what was asked for."""
    hub.publish("org/name", {**CONFIG, **SAFETENSORS})
    message = hub.locate(tmp_path, model, *([revision] if revision else []))
    asked, reason = (f"{model} at revision {revision}", "revision") if revision else (model, "model, or it is private")
    assert message.startswith(f"{asked} is neither a local folder nor could it be fetched from the Hugging Face hub: ")
    assert message.endswith(f"there is no such {reason}")


@pytest.mark.parametrize("name", ["../../../../evil.json", "HERE/evil.json", "x/../../../../../evil.json"])
def test_a_hub_that_names_files_elsewhere(hub: Hub, tmp_path: Path, name: str):
    """A file whose name leads out of the model's folder is not written, there or anywhere."""
    hub.publish("org/name", {**CONFIG, **SAFETENSORS, name.replace("HERE", str(tmp_path)): b"{   }"})
    home = tmp_path / "a/b/home"
    message = hub.locate(home, "org/name")
    assert isinstance(message, str)
    assert message.startswith("org/name is neither a local folder nor could it be fetched")
    assert not list(tmp_path.rglob("evil.json"))


@pytest.mark.parametrize("hangs_up", [False, True])
def test_a_hub_that_cannot_be_reached(hub: Hub, tmp_path: Path, hangs_up: bool):
    """A hub that is not there, or that hangs up, is one CheckpointError of one line."""
    hub.hangs_up = hangs_up
    hub.url = hub.url if hangs_up else NOWHERE
    message = hub.locate(tmp_path, "org/name")
    assert message.startswith("org/name is neither a local folder nor could it be fetched")
    assert "\n" not in message


def read_terminal(screen: int) -> bytes:
    """Read what was shown; empty when the last writer is gone."""
    try:
        return os.read(screen, 4096)
    except OSError:  # how Linux says that the other end is closed
        return b""


def test_export_from_the_hub(hub: Hub, tmp_path: Path, make_bert: Callable[..., Path]):
    """`export ORG/NAME` downloads with progress bars and writes an artifact that names model and commit."""
    hub.publish("org/name", read_files(make_bert()))
    output = tmp_path / "artifact"
    screen, terminal = pty.openpty()  # progress bars are for people: they show on a terminal only
    termios.tcsetwinsize(terminal, (24, 100))
    command = [sys.executable, "-m", "service", "export", "org/name", "-o", str(output)]
    process = subprocess.Popen(
        command, stderr=terminal, stdout=subprocess.PIPE, env=hub.environment(tmp_path), cwd=ROOT
    )
    os.close(terminal)
    shown = b"".join(iter(lambda: read_terminal(screen), b""))
    printed, _ = process.communicate()
    os.close(screen)
    assert process.returncode == 0, shown
    described = json.loads((output / "artifact.json").read_text("utf-8"))
    assert (described["model_id"], described["revision"]) == ("org/name", NEW)
    assert printed.decode().splitlines()[-1] == f"wrote {output}"
    assert b"Fetching 4 files: 100%" in shown
    assert b"weights.bin: 100%" in shown
