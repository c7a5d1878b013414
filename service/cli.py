"""The `attencode` command, of which each word is one: serve, deploy, export, families, encode, attend and the rest.

Prints for people, or JSON with --json. What goes wrong is one line on stderr and an exit status of 1, or
2 for a command line that cannot be read. The only bridges to `model` are inside `_export` and `_families`.
May import: everything, each command what it needs when it runs.
"""

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from service import cli_align, cli_attend, cli_families, cli_health, cli_keys, cli_view
from service.cli_client import add_connection_arguments, open_client
from service.cli_encode import add_file_arguments, encode_files, wants_files
from service.cli_print import print_json, result_json
from service.errors import AttencodeError, ConfigError
from service.logs import last_line, log_to_stderr

_STARTED = time.perf_counter()
_DEPLOY_HELP = """usage: attencode deploy NAME=MODEL ... [--address HOST:PORT] [settings]

Puts models on the replicas of a Ray cluster that runs already (`--address auto`, this node's, if unset), or
replaces the artifact under a name while it is served: new replicas come first, requests under way are answered
whole by one version, and if the new artifact does not start the old one goes on. MODEL is an artifact folder that
every node has under this path. Settings are these of `attencode serve`: --replicas, --replica-cpus, --replica-gpus,
--replica-batches, --provider, --precision, --streams, --stuck-after-s; what is not given stays as it
runs, or, where nothing runs any more, is as `attencode serve` has it.
"""
_DEPLOY_SETTINGS = {"address", "cache_dir", "log_level", "models", "precision", "provider", "ray", "streams"} | {
    *("log_format", "stuck_after_s"),
    *("replica_batches", "replica_cpus", "replica_gpus", "replicas"),
}
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
        if words[:1] in (["serve"], ["deploy"]):  # their flags are the settings themselves
            before = signal.getsignal(signal.SIGTERM)
            try:
                return _serve(words[1:]) if words[0] == "serve" else _deploy(words[1:])
            finally:
                signal.signal(signal.SIGTERM, before)
        parsed = _parser().parse_args(cli_attend.joined(words))
        status: int = parsed.run(parsed)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever reads our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ModuleNotFoundError as error:
        extra = "ray,cpu" if error.name == "ray" else "cpu"
        sys.stderr.write(f"attencode: the package {error.name} is missing; install attencode[{extra}] to serve\n")
        return 1
    except (AttencodeError, OSError) as error:
        sys.stderr.write(last_line(_one_line(error), __name__) + "\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attencode", description="What a transformer encoder knows about a text, over gRPC."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("serve", help="serve a model; `attencode serve --help` lists the settings")
    commands.add_parser("deploy", help="put a model, or a new artifact of it, on the replicas of a Ray cluster")

    undeploy = commands.add_parser("undeploy", help="take models off a Ray cluster")
    undeploy.add_argument("names", nargs="+", metavar="NAME", help="name of a served model")
    undeploy.add_argument("--address", default="auto", help="the cluster, HOST:PORT; this node's if unset")
    undeploy.set_defaults(run=_undeploy)

    export = commands.add_parser("export", help="turn a checkpoint into an artifact folder")
    export.add_argument("model", metavar="MODEL", help="checkpoint folder or hub id")
    export.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER", help="the artifact's folder")
    export.add_argument("--revision", help="branch, tag or commit on the hub")
    export.add_argument("--model-id", help="what the artifact says it was made from; MODEL's name if unset")
    export.add_argument(
        "--precision",
        choices=("float32", "float16"),
        default="float32",
        help="float16 adds a graph for CUDA in that arithmetic; float32 if unset",
    )
    export.set_defaults(run=_export)

    encode = commands.add_parser("encode", help="encode texts, or a file of them, through a running server")
    help_text = "a text to encode, in quotes where it has blanks"
    encode.add_argument("texts", nargs="*", metavar="TEXT", type=cli_attend.utf8, help=help_text)
    poolings = ("cls", "mean", "max", "last", "sentence")
    encode.add_argument(
        "--pooling", choices=poolings, help="how tokens become one vector; the model's own way if unset"
    )
    scaled = "scale vectors to length 1, or do not; as the model does if unset"
    encode.add_argument("--normalize", action=argparse.BooleanOptionalAction, default=None, help=scaled)
    encode.add_argument("--dimensions", type=int, help="only the first so many of each vector; all if unset")
    encode.add_argument("--token-embeddings", action="store_true", help="print each token's vector too")
    add_file_arguments(encode)
    encode.set_defaults(run=_encode)

    attend = cli_attend.add(commands)
    align = cli_align.add(commands)
    view = cli_view.add(commands)

    info = commands.add_parser("info", help="describe a model that a server serves, and its replicas")
    info.set_defaults(run=_info)

    cli_health.add(commands, _DEFAULT_ADDRESS, _seconds)
    cli_keys.add(commands)
    cli_families.add(commands, _families)

    for command in (encode, attend, align, view, info):
        _add_server_arguments(command)
    for command in (encode, attend, align, view):
        cut = "where a text that is too long is cut; off refuses it; right if unset"
        command.add_argument("--truncation", choices=("right", "left", "off"), default="right", help=cut)
        command.add_argument("--prompt-name", type=cli_attend.utf8, help="prompt of the model; its default if unset")
    return parser


def _add_server_arguments(command: argparse.ArgumentParser) -> None:
    """Add the flags that say which server and model are called, and how."""
    utf8, address = cli_attend.utf8, _DEFAULT_ADDRESS
    command.add_argument("--address", type=utf8, default=address, help=f"the server, {address} if unset")
    command.add_argument("--timeout", type=_seconds, default=30.0, metavar="SECONDS", help="deadline, 30 if unset")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    which = "name of a served model; the first if unset"
    command.add_argument("--model", type=utf8, default="", metavar="NAME", help=which)
    add_connection_arguments(command)


# ---------------------------------------------------------------- serve and export


def _serve(words: list[str]) -> int:
    from service.cache import end_in_order, open_models  # noqa: PLC0415 - heavy, and needs the extra of a server

    signal.signal(signal.SIGTERM, end_in_order)  # until the server itself listens for it
    from service.config import parse_config, prepare_ray_environment  # noqa: PLC0415

    config = parse_config(words)
    log_to_stderr(config.log_level, config.log_format)
    from service.ending import end_now, end_when_lost, show_crashes  # noqa: PLC0415

    show_crashes()
    from service.keys import read_keys  # noqa: PLC0415
    from service.server import serve  # noqa: PLC0415
    from service.tls import Certificates  # noqa: PLC0415

    if config.tls_cert:  # before a model is exported
        Certificates(config.tls_cert, config.tls_key, config.tls_client_ca).check()
    if config.api_keys:
        read_keys(config.api_keys)
    artifacts = open_models(config)
    run = _event_loop_runner()
    if config.ray:
        prepare_ray_environment()
        from service.cluster import (  # noqa: PLC0415 - Ray where it is asked for
            RayBackend,
            ensure_deployed,
            joined,
        )

        with joined(config.address):
            ensure_deployed(config, artifacts)
            run(end_when_lost(serve(config, RayBackend(config, artifacts), _STARTED)))
    else:
        from service.backend import LocalBackend  # noqa: PLC0415

        run(end_when_lost(serve(config, LocalBackend(config, artifacts, end=end_now), _STARTED)))
    return 0


def _deploy(words: list[str]) -> int:
    """Deploy each NAME=MODEL; the flags are those of serve, unset ones stay as they run."""
    from service.cache import end_in_order, open_models  # noqa: PLC0415

    signal.signal(signal.SIGTERM, end_in_order)  # what is half done is taken back
    from service.config import parse_config, prepare_ray_environment  # noqa: PLC0415

    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_DEPLOY_HELP)
        return 0 if words else 2
    if words[0].startswith("-") or "=" not in words[0]:
        raise ConfigError(f"deploy wants NAME=MODEL first, got {words[0]!r}; `attencode deploy --help` says more")
    named = [f"--model={word}" if "=" in word and not word.startswith("-") else word for word in words]
    config = parse_config(["--ray", "--address", "auto", *named])
    if foreign := config.model_fields_set - _DEPLOY_SETTINGS:
        flags = ", ".join(sorted("--" + name.replace("_", "-") for name in foreign))
        raise ConfigError(f"deploy has no use for {flags}; give it to `attencode serve`")
    log_to_stderr(config.log_level, config.log_format)
    artifacts = open_models(config)
    prepare_ray_environment()
    from service.cluster import deploy, describe, joined, settings_for  # noqa: PLC0415

    out = sys.stdout  # Ray's own words go to stderr
    with joined(config.address):
        for name, artifact in artifacts.items():
            before = describe(name)
            description = deploy(name, settings_for(config, artifact, len(artifacts), before), before)
            if description.identity.digest != artifact.digest:
                raise ConfigError(f"{name} was deployed by somebody else at the same time, who came last")
            out.write(f"{name} runs {artifact.digest}, replicas: {description.settings.replicas}\n")
            out.flush()
    return 0


def _undeploy(parsed: argparse.Namespace) -> int:
    from service.config import prepare_ray_environment  # noqa: PLC0415

    prepare_ray_environment()
    from service.cluster import joined, undeploy  # noqa: PLC0415

    with joined(parsed.address):
        for name in parsed.names:
            undeploy(name)
    return 0


def _event_loop_runner() -> Any:
    """Give uvloop's run where it is installed, else asyncio's."""
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        import asyncio  # noqa: PLC0415

        return asyncio.run
    return uvloop.run


def _families(parsed: argparse.Namespace) -> int:
    from model.families import table  # noqa: PLC0415

    cli_families.print_families(table(), as_json=parsed.json)
    return 0


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
            precision=parsed.precision,
            report=_print_line,
        )
    except ModelError as error:
        raise ConfigError(str(error)) from error
    return 0


# ---------------------------------------------------------------- encode, info


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


def _encode(parsed: argparse.Namespace) -> int:
    if wants_files(parsed):
        return encode_files(parsed)
    with open_client(parsed) as client:
        result = client.encode(
            parsed.texts,
            pooled=True,
            pooling=parsed.pooling,
            normalize=parsed.normalize,
            dimensions=parsed.dimensions,
            token_embeddings=parsed.token_embeddings,
            truncation=parsed.truncation,
            prompt_name=parsed.prompt_name,
            model=parsed.model,
        )
    if parsed.json:
        print_json(
            {
                "model": result.model,
                "model_digest": result.model_digest,
                "pooled": result.pooled.tolist(),
                "results": [result_json(item) for item in result.results],
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


def _info(parsed: argparse.Namespace) -> int:
    from dataclasses import asdict  # noqa: PLC0415

    with open_client(parsed) as client:
        facts = asdict(client.get_model(parsed.model))
    if parsed.json:
        print_json(facts)
        return 0
    width = max(len(name) for name in facts)
    replicas = facts.pop("replicas")
    for name, value in facts.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        if name == "decoder":
            told = "{num_layers} layers, {num_heads} heads, targets of at most {max_tokens} tokens"
            shown = told.format(**value) if value else "none"
        sys.stdout.write(f"{name:<{width}}  {shown}\n")
    for replica in replicas:
        words = (replica["id"], replica["node"], replica["device"], replica["state"], replica["digest"][:12])
        sys.stdout.write(f"{'replica':<{width}}  {'  '.join(words)}\n")
    return 0


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
