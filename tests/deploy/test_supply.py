"""The supply chain: bills of materials that hold to their schema, and an audit that never passes unasked."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUPPLY = ROOT / "deploy/supply"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Have the bills written of what serves here and of one set."""
    folder = tmp_path_factory.mktemp("sbom")
    subprocess.run([sys.executable, SUPPLY / "sbom.py", folder, "cpu"], check=True, capture_output=True)
    return folder


def test_what_serves(folder: Path) -> None:
    """What serves is listed with versions, purls and licences, and what only tests need is not."""
    bom = json.loads((folder / "serving.json").read_text("utf-8"))
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    assert bom["metadata"]["component"]["name"] == "attencode"
    components = {one["name"]: one for one in bom["components"]}
    assert {"grpcio", "numpy", "tokenizers", "protobuf"} <= components.keys()
    assert not components.keys() & {"pytest", "torch", "ruff", "transformers"}
    assert components["grpcio"]["purl"] == f"pkg:pypi/grpcio@{components['grpcio']['version']}"
    assert components["grpcio"]["licenses"][0]["license"]["id"] == "Apache-2.0"
    needs = {one["ref"].partition("==")[0]: one.get("dependsOn", ()) for one in bom["dependencies"]}
    assert any(ref.startswith("typing_extensions==") for ref in needs["grpcio"])


def test_a_locked_set(folder: Path) -> None:
    """A set's packages are listed with every hash that an install demands, and with the licences that are known."""
    bom = json.loads((folder / "cpu.json").read_text("utf-8"))
    text = (ROOT / "deploy/constraints/cpu.txt").read_text("utf-8")
    assert {one["name"] for one in bom["components"]} == set(re.findall(r"(?m)^([a-z0-9._-]+)==", text))
    hashes = {
        found["content"]
        for one in bom["components"]
        for reference in one["externalReferences"]
        for found in reference.get("hashes", ())
    }
    assert hashes == set(re.findall(r"sha256:([0-9a-f]{64})", text))
    assert sum("licenses" in one for one in bom["components"]) > len(bom["components"]) / 2


def test_no_pass_without_an_answer() -> None:
    """Where the database of vulnerabilities cannot be asked, the audit says so and does not pass."""
    nowhere = {"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_PROXY": "", "no_proxy": ""}
    ended = subprocess.run(
        [sys.executable, SUPPLY / "audit.py", "build"],
        env=os.environ | nowhere,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 2
    assert "NOT AUDITED" in ended.stdout
    assert "could not be asked" in ended.stdout


def test_images_carry_their_own() -> None:
    """Every image's packages come from a set by hash, and a bill of what came of it is written beside them."""
    script = (ROOT / "deploy/install.sh").read_text("utf-8")
    assert "--require-hashes --no-deps" in script
    assert "--output-file /opt/attencode/sbom.json" in script
    assert re.search(r"(?m)^cyclonedx-bom==", (ROOT / "deploy/constraints/build.txt").read_text("utf-8"))
