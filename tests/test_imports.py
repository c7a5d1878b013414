"""The architecture as a test: imports point downward, and each install needs only what it says."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Each module of the service, and what else of the service it may import.
ALLOWED = {
    "errors": set(),
    "confined": {"errors"},
    "graph_file": {"errors"},
    "decoder": {"graph_file", "errors"},
    "artifact": {"confined", "decoder", "graph_file", "errors"},
    "config": {"errors"},
    "small_files": set(),
    "following": {"metrics"},
    "pem": {"small_files"},
    "tls": {"metrics", "pem", "small_files", "errors"},
    "keys": {"small_files", "errors"},
    "keyring": {"callers", "keys", "errors"},
    "access": {"callers", "keyring", "metrics", "errors"},
    "reflection": {"access", "calls", "errors"},
    "transport": {"config"},
    "metrics": set(),
    "memory": set(),
    "connections": set(),
    "scrape": set(),
    "callers": set(),
    "busy": set(),
    "tracing": {"errors"},
    "logs": {"tracing"},
    "tokenizer_file": {"confined", "errors"},
    "tokenization": {"artifact", "decoder", "tokenizer_file", "request", "errors"},
    "spans": {"attention", "request", "errors"},
    "reduce": {"attention", "request", "spans", "errors"},
    "cross": {"reduce"},
    "batching": {"callers", "cross", "tokenization"},
    "admission": {"batching", "callers", "errors"},
    "outputs": {"artifact", "attention", "batching", "reduce", "request", "spans", "tokenization", "errors"},
    "openvino": {"errors"},
    "cuda": {"artifact", "errors"},
    "placement": {"openvino", "cuda", "artifact", "errors"},
    "session": {"artifact", "batching", "cross", "placement", "reduce", "openvino", "cuda", "errors"},
    "causes": set(),
    "finite": {"batching"},
    "inference": {"batching", "causes", "cross", "finite", "reduce", "session"},
    "watchdog": set(),
    "device": {"causes"},
    "ending": {"logs", "errors"},
    "integrity": {"artifact", "errors"},
    "supervision": {"metrics", "errors"},
    "runner": {"batching", "device", "ending", "inference", "session", "watchdog", "request", "errors"},
    "engine": {
        *(
            "admission",
            "batching",
            "callers",
            "causes",
            "cross",
            "errors",
            "inference",
            "metrics",
            "outputs",
            "reduce",
            "runner",
        ),
        *("tokenization", "tracing"),
    },
    "attention": set(),
    "request": {"attention"},
    "values": {"errors"},
    "plain": {"attention", "request", "values", "errors"},
    "plain_align": {"attention", "plain", "request", "values", "errors"},
    "codec_enums": {"pb", "attention", "request", "errors"},
    "codec_outputs": {"pb", "codec_enums", "attention", "request", "values", "errors"},
    "codec": {"pb", "codec_enums", "codec_outputs", "attention", "request", "values", "errors"},
    "codec_model": {"pb", "codec_enums", "request", "values"},
    "codec_align": {"pb", "codec", "codec_enums", "codec_outputs", "attention", "request", "values", "errors"},
    "pairing": {"artifact", "attention", "cross", "outputs", "reduce", "request", "spans", "tokenization", "errors"},
    "served": {
        *("admission", "artifact", "batching", "config", "engine", "errors", "metrics", "outputs", "pairing"),
        *("placement", "request", "runner", "tokenization"),
    },
    "chunks": {"pb", "codec", "codec_enums", "request", "errors"},
    "stream": {"errors"},
    "threads": {"stream"},
    "intake": {"admission", "errors"},
    "encoding": {
        *(
            "callers",
            "errors",
            "intake",
            "memory",
            "metrics",
            "outputs",
            "reduce",
            "request",
            "served",
            "stream",
            "threads",
        ),
        *("tokenization", "tracing"),
    },
    "aligning": {"attention", "cross", "encoding", "errors", "metrics", "pairing", "request", "served"},
    "calls": {"metrics", "errors"},
    "servicer": {
        *(
            "access",
            "admission",
            "aligning",
            "callers",
            "calls",
            "chunks",
            "codec",
            "codec_align",
            "codec_model",
            "encoding",
            "errors",
            "intake",
            "metrics",
            "pb",
        ),
        *("request", "served", "stream", "tracing"),
    },
    "backend": {
        *("artifact", "config", "device", "errors", "integrity", "metrics", "placement", "runner", "served", "session"),
        "supervision",
    },
    "cache": {"artifact", "config", "errors"},
    "scaling": set(),
    "replicas": {
        *(
            "artifact",
            "batching",
            "config",
            "decoder",
            "device",
            "ending",
            "integrity",
            "placement",
            "runner",
            "scaling",
            "session",
        ),
    },
    "fleet": {
        *(
            "artifact",
            "batching",
            "busy",
            "config",
            "decoder",
            "errors",
            "inference",
            "metrics",
            "replicas",
            "request",
            "runner",
        ),
        "watchdog",
        "served",
    },
    "cluster": {"artifact", "config", "errors", "fleet", "placement", "replicas", "served", "supervision"},
    "statuses": {"errors"},
    "credentials": {"pem", "values", "errors"},
    "resumption": {"pb", "codec", "request", "statuses", "values", "errors"},
    "destination": {"errors"},
    "bulk_files": {"errors"},
    "bulk_partial": {"bulk_files", "destination", "errors"},
    "bulk_pipeline": {"bulk_files", "client", "plain", "request", "errors"},
    "bulk": {"bulk_files", "bulk_partial", "bulk_pipeline", "client", "destination", "request", "errors"},
    "cli_encode": {"bulk", "bulk_files", "cli_client", "errors"},
    "view": {"destination", "values", "errors"},
    "pages": {"view"},
    "matrix": {"attention", "request", "values", "errors", "view"},
    "attended": {"attention", "matrix", "request", "errors", "pages", "view"},
    "aligned": {"attention", "matrix", "request", "values", "errors", "view"},
    "answers": {
        *("pb", "aligned", "attended", "chunks", "codec", "codec_align", "resumption", "statuses", "request"),
        "errors",
    },
    "client": {
        *(
            "pb",
            "aligned",
            "answers",
            "codec",
            "codec_align",
            "codec_model",
            "chunks",
            "credentials",
            "resumption",
            "attended",
            "attention",
            "plain",
            "plain_align",
            "request",
            "statuses",
        ),
        *("tracing", "values", "errors"),
    },
    "cli_print": set(),
    "cli_client": {"client", "credentials", "small_files", "errors"},
    "cli_keys": {"keys"},
    "cli_families": {"cli_print"},
    "cli_attend": {"attention", "cli_client", "cli_print", "errors"},
    "cli_align": {"attention", "cli_attend", "cli_client", "cli_print", "view"},
    "cli_health": {"cli_client", "credentials", "statuses", "errors"},
    "cli_view": {"attention", "cli_attend", "cli_client", "cli_print", "view", "errors"},
}
PB_IMPORTERS = {"answers", "chunks", "resumption", "codec", "codec_align", "codec_enums", "codec_model"} | {
    *("codec_outputs", "servicer", "server", "client")
}


def imports_of(path: Path) -> set[str]:
    """List the dotted names that a file imports, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def service_modules() -> dict[str, set[str]]:
    """Map each module of the service to those of the service that it imports."""
    modules = {path.stem for path in (ROOT / "service").glob("*.py")} | {"pb"}
    return {
        path.stem: {
            parts[1] for name in imports_of(path) if (parts := name.split("."))[0] == "service" and len(parts) > 1
        }
        & modules
        for path in (ROOT / "service").glob("*.py")
    }


def test_imports_point_downward() -> None:
    """A module of the service imports only what the table allows."""
    found = service_modules()
    assert ALLOWED.keys() <= found.keys()
    for module, allowed in ALLOWED.items():
        assert found[module] <= allowed, f"service/{module}.py imports {found[module] - allowed}"
    assert not set.union(*(found[module] for module in ALLOWED)) & {"cli", "server"}
    assert {module for module, names in found.items() if "pb" in names} <= PB_IMPORTERS


def test_the_two_halves_do_not_meet() -> None:
    """The model never imports the service; the service reaches it in the commands export and families alone."""
    for path in (ROOT / "model").glob("*.py"):
        assert not {name for name in imports_of(path) if name.split(".")[0] == "service"}, path
    for path in (ROOT / "service").glob("*.py"):
        bridges = {name for name in imports_of(path) if name.split(".")[0] in ("model", "torch", "transformers")}
        tensors = {"torch", "torch.from_numpy"} if path.stem == "attended" else set()  # given to who asks for them
        assert bridges <= tensors or path.stem == "cli", f"{path} imports {bridges}"
    tree = ast.parse((ROOT / "service/cli.py").read_text())
    bridging = [node for node in tree.body if getattr(node, "name", "") in ("_export", "_families")]
    inside = {node.module for part in bridging for node in ast.walk(part) if isinstance(node, ast.ImportFrom)}
    everywhere = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in everywhere if name and name.startswith("model")} <= inside


def test_only_the_config_reads_the_environment() -> None:
    """So it is but for cache.py, which hands it to the export, __main__, which quietens gRPC, and the clients' key."""
    readers = {path.stem for path in (ROOT / "service").glob("*.py") if "os.environ" in path.read_text()}
    assert readers <= {"config", "cache", "cli_client", "__main__"}


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        (
            "attencode",
            {"torch", "transformers", "ray", "onnxruntime", "tokenizers", "pydantic", "prometheus_client"}
            | {"matplotlib", "bertviz", "opentelemetry"},
        ),
        ("service.server", {"torch", "transformers", "ray", "opentelemetry"}),
        ("service.cli", {"opentelemetry", "torch", "transformers", "ray", "onnxruntime", "tokenizers"}),
    ],
)
def test_what_an_import_brings(module: str, forbidden: set[str]) -> None:
    """The client imports gRPC and numpy only; the server neither torch nor ray."""
    code = f"import sys, {module}; print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert not forbidden & set(printed.split())


def test_proto_is_no_package() -> None:
    """A Python package called proto would shadow the one that Ray needs."""
    assert not list((ROOT / "proto").rglob("*.py"))
