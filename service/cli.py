"""The `attencode` command: serve | export | encode | attend | info.

Prints for people, or JSON with --json. What goes wrong is one line on stderr and an exit status of 1, or
2 for a command line that cannot be read. The only bridge to `model` is inside `_export`.
May import: everything, each command what it needs when it runs.
"""

import argparse
import hashlib
import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.errors import ArtifactError, AttencodeError, ConfigError

if TYPE_CHECKING:
    from service.artifact import Artifact
    from service.config import ServiceConfig

_STARTED = time.perf_counter()
_DEFAULT_ADDRESS = "127.0.0.1:50051"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The command line after `attencode`; the process's own when None.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may not know every script
    try:
        if words[:1] == ["serve"]:  # its flags are the settings themselves
            before = signal.getsignal(signal.SIGTERM)
            try:
                return _serve(words[1:])
            finally:
                signal.signal(signal.SIGTERM, before)
        parsed = _parser().parse_args(words)
        status: int = parsed.run(parsed)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever reads our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ModuleNotFoundError as error:
        sys.stderr.write(f"attencode: the package {error.name} is missing; install attencode[cpu] to serve\n")
        return 1
    except (AttencodeError, OSError) as error:
        sys.stderr.write(f"attencode: {_one_line(error)}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attencode", description="What a transformer encoder knows about a text, over gRPC."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("serve", help="serve a model; `attencode serve --help` lists the settings")

    export = commands.add_parser("export", help="turn a checkpoint into an artifact folder")
    export.add_argument("model", metavar="MODEL", help="checkpoint folder or hub id")
    export.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="the artifact's folder")
    export.add_argument("--revision", help="branch, tag or commit on the hub")
    export.add_argument("--model-id", help="what the artifact says it was made from; MODEL's name if unset")
    export.set_defaults(run=_export)

    encode = commands.add_parser("encode", help="encode texts through a running server")
    encode.add_argument("texts", nargs="+", metavar="TEXT")
    encode.add_argument("--pooling", choices=("cls", "mean", "max", "last", "sentence"))
    encode.add_argument("--normalize", action=argparse.BooleanOptionalAction, default=None)
    encode.add_argument("--dimensions", type=int)
    encode.add_argument("--token-embeddings", action="store_true")
    encode.set_defaults(run=_encode)

    attend = commands.add_parser("attend", help="print who attends to whom, token by token")
    attend.add_argument("text", metavar="TEXT")
    attend.add_argument("pair", metavar="TEXT_B", nargs="?", help="second text of a pair")
    attend.add_argument("--layer", type=int, default=-1, help="negative from the end; the last if unset")
    attend.add_argument("--head", type=int, help="negative from the end; the mean over heads if unset")
    attend.set_defaults(run=_attend)

    info = commands.add_parser("info", help="describe the model that a server serves")
    info.set_defaults(run=_info)

    for command in (encode, attend, info):
        command.add_argument("--address", default=_DEFAULT_ADDRESS, help=f"the server, {_DEFAULT_ADDRESS} if unset")
        command.add_argument("--timeout", type=_seconds, default=30.0, metavar="SECONDS", help="deadline, 30 if unset")
        command.add_argument("--json", action="store_true", help="print one JSON object")
    for command in (encode, attend):
        command.add_argument("--truncation", choices=("right", "left", "off"), default="right")
        command.add_argument("--prompt-name", help="prompt of the model; its default if unset")
    return parser


# ---------------------------------------------------------------- serve and export


def _serve(words: list[str]) -> int:
    signal.signal(signal.SIGTERM, _end_in_order)  # until the server itself listens for it
    from service.config import parse_config  # noqa: PLC0415 - heavy, and needs the extra of a server

    config = parse_config(words)
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    from service.server import serve  # noqa: PLC0415

    artifact = _open_model(config)
    run = _event_loop_runner()
    run(serve(config, artifact, _STARTED))
    return 0


def _open_model(config: "ServiceConfig") -> "Artifact":
    """Open an artifact, or the cached one of a checkpoint, which is made if it is not there or not whole."""
    from service.artifact import is_artifact, open_artifact  # noqa: PLC0415

    folder = _folder(config.model)
    if is_artifact(folder):
        if config.revision is not None:
            raise ConfigError(f"{config.model} is an artifact, which has one revision; leave --revision out")
        return open_artifact(folder)
    if config.model.startswith((".", "/", "~")) and not folder.is_dir():
        raise ConfigError(f"{config.model} is not a folder; give an artifact, a checkpoint's folder or a hub id")
    cached = _cached_artifact(config.model, config.revision, config.cache_dir)
    try:
        return open_artifact(cached)
    except ArtifactError as error:
        sys.stderr.write(f"attencode: {_one_line(error)}: doing so\n")
        shutil.rmtree(cached)
        return open_artifact(_cached_artifact(config.model, config.revision, config.cache_dir))


def _folder(model: str) -> Path:
    """Read a model as a path; `~` of somebody unknown stays as it is."""
    try:
        return Path(model).expanduser()
    except RuntimeError:
        return Path(model)


def _event_loop_runner() -> Any:
    """Give uvloop's run where it is installed, else asyncio's."""
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        import asyncio  # noqa: PLC0415

        return asyncio.run
    return uvloop.run


def _cached_artifact(model: str, revision: str | None, cache_dir: Path) -> Path:
    """Give the artifact of a checkpoint, made once and then kept.

    The export runs in a process of its own, so that the server never holds torch in memory.
    """
    from service.artifact import FORMAT_VERSION, is_artifact  # noqa: PLC0415

    name = re.sub(r"[^\w.-]+", "--", model.strip("/")).strip("-.") or "model"
    key = json.dumps([FORMAT_VERSION, model, revision, _fingerprint(_folder(model))])
    folder = cache_dir / f"{name[-80:]}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if is_artifact(folder):
        return folder
    sys.stderr.write(f"{model} is not exported yet; exporting it to {folder}\n")
    command = [sys.executable, "-m", "service", "export", model, "-o", str(folder)]
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
    signal.signal(signal.SIGTERM, _end_in_order)
    return status


def _end_in_order(*_: object) -> None:
    sys.exit(0)


def _fingerprint(folder: Path) -> list[Any]:
    """Tell a local checkpoint's state by its files' names, sizes and times; empty for a hub id."""
    if not folder.is_dir():
        return []
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    stats = [(str(path.relative_to(folder)), path.stat()) for path in files]
    return [str(folder.resolve()), [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]]


def _export(parsed: argparse.Namespace) -> int:
    try:
        from model.errors import ModelError  # noqa: PLC0415
        from model.export import export  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"exporting needs the package {error.name}; install attencode[export]") from error
    try:
        export(
            parsed.model,
            parsed.output,
            revision=parsed.revision,
            model_id=parsed.model_id,
            report=_print_line,
        )
    except ModelError as error:
        raise ConfigError(str(error)) from error
    return 0


# ---------------------------------------------------------------- encode, attend, info


def _seconds(word: str) -> float:
    """Read a deadline.

    Raises:
        ArgumentTypeError: It is not a number of seconds above 0 and up to a day.
    """
    try:
        seconds = float(word)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"must be seconds above 0 and up to 86400, got {word!r}")
    return seconds


def _client(parsed: argparse.Namespace) -> Any:
    from service.client import Client  # noqa: PLC0415

    return Client(parsed.address, timeout_s=parsed.timeout)


def _encode(parsed: argparse.Namespace) -> int:
    with _client(parsed) as client:
        result = client.encode(
            parsed.texts,
            pooled=True,
            pooling=parsed.pooling,
            normalize=parsed.normalize,
            dimensions=parsed.dimensions,
            token_embeddings=parsed.token_embeddings,
            truncation=parsed.truncation,
            prompt_name=parsed.prompt_name,
        )
    if parsed.json:
        _print_json(
            {
                "model": result.model,
                "model_digest": result.model_digest,
                "pooled": result.pooled.tolist(),
                "results": [_result_json(item) for item in result.results],
            }
        )
        return 0
    for text, vector, item in zip(parsed.texts, result.pooled, result.results, strict=True):
        numbers = " ".join(f"{number: .4f}" for number in vector[:6])
        cut = f", cut from {item.original_num_tokens}" if item.truncated else ""
        dots = " ..." if len(vector) > 6 else ""
        sys.stdout.write(f"{text!r}: {item.num_tokens} tokens{cut}, {len(vector)} dimensions: {numbers}{dots}\n")
        if item.token_embeddings is not None:
            for token, embedding in zip(item.tokens.texts, item.token_embeddings, strict=True):
                numbers = " ".join(f"{number: .4f}" for number in embedding[:6])
                sys.stdout.write(f"    {token:<16} {numbers} ...\n")
    return 0


def _attend(parsed: argparse.Namespace) -> int:
    text = parsed.text if parsed.pair is None else (parsed.text, parsed.pair)
    heads = () if parsed.head is None else [parsed.head]
    with _client(parsed) as client:
        result = client.attend(
            text,
            layers=[parsed.layer],
            heads=heads,
            truncation=parsed.truncation,
            prompt_name=parsed.prompt_name,
        )
    weights = result.attention[0].mean(axis=0)  # (query, key)
    if parsed.json:
        shown = {"layer": parsed.layer, "head": parsed.head, "weights": weights.tolist()}
        _print_json({**shown, **_result_json(result, tensors=False)})
        return 0
    head = "mean over heads" if parsed.head is None else f"head {parsed.head}"
    sys.stdout.write(f"layer {parsed.layer}, {head}: each row's weights over the columns, in percent\n")
    sys.stdout.write(_matrix(result.tokens.texts, weights))
    return 0


def _matrix(tokens: list[str], weights: Any) -> str:
    """Lay out weights (query, key) under and beside their tokens."""
    widths = [max(len(token), 3) for token in tokens]
    margin = max(len(token) for token in tokens)
    header = " ".join(f"{token:>{width}}" for token, width in zip(tokens, widths, strict=True))
    lines = [f"{'':>{margin}}  {header}"]
    for token, row in zip(tokens, weights, strict=True):
        cells = " ".join(f"{100 * weight:>{width}.0f}" for weight, width in zip(row, widths, strict=True))
        lines.append(f"{token:>{margin}}  {cells}")
    return "\n".join(lines) + "\n"


def _info(parsed: argparse.Namespace) -> int:
    from dataclasses import asdict  # noqa: PLC0415

    with _client(parsed) as client:
        facts = asdict(client.get_model())
    if parsed.json:
        _print_json(facts)
        return 0
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        sys.stdout.write(f"{name:<{width}}  {shown}\n")
    return 0


def _result_json(item: Any, *, tensors: bool = True) -> dict[str, Any]:
    """Turn one input's result into plain JSON values."""
    plain: dict[str, Any] = {
        "num_tokens": item.num_tokens,
        "original_num_tokens": item.original_num_tokens,
        "truncated": item.truncated,
    }
    if item.tokens is not None:
        plain["tokens"] = item.tokens.texts
        plain["char_spans"] = item.tokens.char_spans
    if tensors and item.token_embeddings is not None:
        plain["token_embeddings"] = item.token_embeddings.tolist()
    return plain


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _print_json(value: dict[str, Any]) -> None:
    plain = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    sys.stdout.write(json.dumps(value, ensure_ascii=plain) + "\n")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
