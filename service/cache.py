"""Cache: artifacts made from checkpoints, each exported once and then kept.

The export runs in a process of its own, so that a server never holds torch in memory.
May import: artifact, config, errors.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from service.artifact import FORMAT_VERSION, Artifact, is_artifact, open_artifact
from service.config import ServiceConfig
from service.errors import ArtifactError, ConfigError

_MARKS = ("artifact.json", "config.json", "modules.json")  # one of them is in whatever can be opened or exported


def open_models(config: ServiceConfig) -> dict[str, Artifact]:
    """Open every model that the settings name, MODEL first, and export what is no artifact yet.

    Raises:
        StartupError: A model cannot be opened, or two have one name.
    """
    artifacts: dict[str, Artifact] = {}
    for name, model in config.named_models():
        revision = config.revision if model is config.model else None
        artifact = _open_model(config, model, revision)
        served_as = name or artifact.model_id
        if served_as in artifacts:
            raise ConfigError(f"two models are called {served_as!r}; name them: --model NAME=ARTIFACT")
        artifacts[served_as] = artifact
    return artifacts


def _open_model(config: ServiceConfig, model: str, revision: str | None) -> Artifact:
    """Open an artifact, or the cached one of a checkpoint, which is made if it is not there or not whole."""
    folder = _folder(model)
    if is_artifact(folder):
        if revision is not None:
            raise ConfigError(f"{model} is an artifact, which has one revision; leave --revision out")
        return open_artifact(folder)
    if model.startswith((".", "/", "~")) and not folder.is_dir():
        raise ConfigError(f"{model} is not a folder; give an artifact, a checkpoint's folder or a hub id")
    if folder.is_dir() and not any((folder / name).is_file() for name in _MARKS):
        raise ConfigError(
            f"{model} holds neither an artifact (artifact.json) nor a checkpoint (config.json or modules.json); "
            "is this the folder, is the volume mounted, has the export ended?"
        )
    cached = _cached_artifact(config, model, revision)
    try:
        return open_artifact(cached)
    except ArtifactError as error:
        sys.stderr.write(f"attencode: {error}: doing so\n")
        shutil.rmtree(cached)
        return open_artifact(_cached_artifact(config, model, revision))


def _folder(model: str) -> Path:
    """Read a model as a path; `~` of somebody unknown stays as it is."""
    try:
        return Path(model).expanduser()
    except RuntimeError:
        return Path(model)


def _cached_artifact(config: ServiceConfig, model: str, revision: str | None) -> Path:
    """Give the folder of a checkpoint's artifact, which is made if it is not there; with float16 where asked for."""
    further = ["--precision", "float16"] if config.precision == "float16" else []
    name = re.sub(r"[^\w.-]+", "--", model.strip("/")).strip("-.") or "model"
    key = json.dumps([FORMAT_VERSION, model, revision, _fingerprint(_folder(model)), *further])
    folder = config.cache_dir / f"{name[-80:]}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if is_artifact(folder):
        return folder
    sys.stderr.write(f"{model} is not exported yet; exporting it to {folder}\n")
    command = [sys.executable, "-m", "service", "export", model, "-o", str(folder), *further]
    status = _run_export(command + (["--revision", revision] if revision else []))
    if status or not is_artifact(folder):
        raise SystemExit(status or 1)  # the export has said why
    return folder


def _run_export(command: list[str]) -> int:
    """Run an export to its end and give its exit status; SIGTERM ends it together with us."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    early: list[int] = []  # a signal while the child is being made, when it could not be ended yet
    signal.signal(signal.SIGTERM, lambda number, _frame: early.append(number))
    with subprocess.Popen(command, stdout=sys.stderr, env=environment) as child:  # noqa: S603 - our own command line

        def end(*_: object) -> None:
            child.kill()
            sys.exit(0)

        signal.signal(signal.SIGTERM, end)
        if early:
            end()
        status = child.wait()
    signal.signal(signal.SIGTERM, end_in_order)
    return status


def end_in_order(*_: object) -> None:
    """End the process by an exception, so that what was begun is cleaned up; a handler of signals."""
    sys.exit(0)


def _fingerprint(folder: Path) -> list[Any]:
    """Tell a local checkpoint's state by its files' names, sizes and times; empty for a hub id."""
    if not folder.is_dir():
        return []
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    stats = [(str(path.relative_to(folder)), path.stat()) for path in files]
    return [str(folder.resolve()), [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]]
