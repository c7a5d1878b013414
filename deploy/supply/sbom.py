"""Write bills of materials, CycloneDX 1.6 in JSON: `make sbom`.

    python deploy/supply/sbom.py FOLDER [NAME ...]        sets of deploy/constraints; all of them if none is named

FOLDER/serving.json is what this environment serves with: attencode and all that its extras need, with licences, and
what needs what. FOLDER/NAME.json is a set that images are built from: every package with version, purl and the hashes
that an install demands, and the licence where the same version is installed here. Each is held to CycloneDX's schema,
and the same environment gives the same bytes. An image has its own in /opt/attencode/sbom.json.
"""

import argparse
import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "deploy/constraints"
RUNTIMES = ("cpu", "openvino", "amd", "gpu")
Bom = dict[str, Any]


def generate(*arguments: str) -> Bom:
    """Have cyclonedx-bom write one."""
    form = ["--of", "JSON", "--sv", "1.6", "--output-reproducible", "--no-validate"]  # `write` does
    command = [sys.executable, "-m", "cyclonedx_py", *arguments, *form]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if ended.returncode:
        raise SystemExit(ended.stderr)
    bom: Bom = json.loads(ended.stdout)
    return bom


def needed(name: str, extras: frozenset[str]) -> set[str]:
    """List the packages that are installed for a package and some of its extras, itself among them."""
    found, left = set(), [(canonicalize_name(name), extras)]
    seen = set(left)
    while left:
        package, chosen = left.pop()
        try:
            lines = requires(package) or []
        except PackageNotFoundError:  # for another platform, or an extra that is not installed
            continue
        found.add(str(package))
        for requirement in map(Requirement, lines):
            asked = {"", *chosen}
            if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in asked):
                continue
            further = (canonicalize_name(requirement.name), frozenset(requirement.extras))
            if further not in seen:
                seen.add(further)
                left.append(further)
    return found


def serving(installed: Bom) -> Bom:
    """Cut what is installed down to what serves."""
    names = needed("attencode", frozenset({*RUNTIMES, "otel"}))
    kept = [one for one in installed["components"] if canonicalize_name(one["name"]) in names]
    references = {one["bom-ref"] for one in kept} | {installed["metadata"]["component"]["bom-ref"]}
    arrows = [
        {**one, "dependsOn": [other for other in one.get("dependsOn", ()) if other in references]}
        for one in installed["dependencies"]
        if one["ref"] in references
    ]
    return {**installed, "components": kept, "dependencies": arrows}


def identity(component: dict[str, Any]) -> tuple[str, str | None]:
    """Give a package's name, in the one spelling for which there are several, and its version."""
    return canonicalize_name(component["name"]), component.get("version")


def locked(path: Path, installed: Bom) -> Bom:
    """Describe a set of locked packages."""
    licences = {identity(one): one.get("licenses") for one in installed["components"]}
    bom = generate("requirements", str(path))
    for one in bom["components"]:
        one.pop("description", None)  # the line itself
        if known := licences.get(identity(one)):
            one["licenses"] = known
    return bom


def write(path: Path, bom: Bom) -> None:
    """Validate one and write it."""
    text = json.dumps(bom, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise SystemExit(f"{path}: {error}")
    path.write_text(text, encoding="utf-8")
    without = sum("licenses" not in one for one in bom["components"])
    print(f"{path}: {len(bom['components'])} packages, {without} without a licence that is known here")


def main() -> None:
    """Write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("names", nargs="*", metavar="NAME", help="amd, for instance")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    installed = generate("environment", sys.executable, "--pyproject", str(ROOT / "pyproject.toml"))
    write(arguments.folder / "serving.json", serving(installed))
    for name in arguments.names or sorted(path.stem for path in CONSTRAINTS.glob("*.txt")):
        write(arguments.folder / f"{name}.json", locked(CONSTRAINTS / f"{name}.txt", installed))


if __name__ == "__main__":
    main()
