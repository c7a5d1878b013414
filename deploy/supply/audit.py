"""Ask the Python Package Index which locked packages have known vulnerabilities: `make audit`.

    python deploy/supply/audit.py [NAME ...]        sets of deploy/constraints; all of them if none is named

pip-audit by itself says "No known vulnerabilities found" of packages that it could not ask about. Here that is no pass:
ends with 1 where a package is known to be vulnerable, with 2 where one could not be asked about, else with 0.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints"
TIMEOUT_S = 600.0
VULNERABLE, NOT_ASKED = 1, 2


def audit(path: Path) -> tuple[list[str], list[str]]:
    """Audit one set: give its known vulnerabilities, and why packages could not be asked about."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(path), "--disable-pip", "--no-deps"]
    ended = subprocess.run(
        [*command, "--format", "json", "--progress-spinner", "off"],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    try:
        found = json.loads(ended.stdout)["dependencies"]
    except (ValueError, KeyError):
        return [], [ended.stderr.strip().rpartition("\n")[2] or f"pip-audit ended with {ended.returncode}"]
    vulnerable = [
        f"{one['name']} {one['version']}: {vulnerability['id']}, mended in {', '.join(vulnerability['fix_versions'])}"
        for one in found
        for vulnerability in one.get("vulns", ())
    ]
    return vulnerable, [one["skip_reason"] for one in found if "skip_reason" in one]


def main() -> None:
    """Audit what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="amd, for instance")
    names = parser.parse_args().names or sorted(path.stem for path in CONSTRAINTS.glob("*.txt"))
    status = 0
    for name in names:
        vulnerable, skipped = audit(CONSTRAINTS / f"{name}.txt")
        for line in vulnerable:
            print(f"{name}: {line}")
        if skipped:
            print(f"{name}: {len(skipped)} packages NOT AUDITED, for instance: {skipped[0]}")
        if not vulnerable and not skipped:
            print(f"{name}: no known vulnerability")
        status = VULNERABLE if vulnerable or status == VULNERABLE else NOT_ASKED if skipped else status
    if status == NOT_ASKED:
        print("the database of vulnerabilities could not be asked; run this where the package index itself is reached")
    sys.exit(status)


if __name__ == "__main__":
    main()
