"""Take each check of tests/mutants/*.toml out of a copy of the tree and see whether the tests that are named fail.

    python tests/mutate.py [NAME ...] [--grep WORD]

NAME is a file of tests/mutants without its ending; all of them if none is given. Ends with 1 if a mutant survives.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "mutants"
TIMEOUT_S = 300.0
_TESTS_FAILED = 1  # of pytest's exit codes; others say that it could not run them


@dataclass(frozen=True)
class Mutant:
    """One check that is taken out.

    Attributes:
        what: What is then no longer so.
        file: Relative to the root.
        old: The check, exactly once in the file.
        new: What stands there instead.
        tests: Of which one must fail, as pytest names them.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def mutants(name: str) -> list[Mutant]:
    """Read the entries of one file."""
    entries = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def names() -> list[str]:
    """List the files."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def copy_tree(folder: Path) -> None:
    """Copy what git knows of, as it lies here."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def verdict(folder: Path, mutant: Mutant) -> str:
    """Apply a mutant, run its tests, and take it back; gives what became of it, `killed` if all is well."""
    path = folder / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        return f"NOT APPLIED: `old` stands {text.count(mutant.old)} times in {mutant.file}"
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return "killed (the tests hung)"
    finally:
        path.write_text(text, encoding="utf-8")
    if done.returncode == _TESTS_FAILED:
        return "killed"
    word = "SURVIVED" if done.returncode == 0 else "NOT RUN"
    return f"{word}: pytest ended with {done.returncode}\n{done.stdout[-1500:]}{done.stderr[-500:]}"


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*names(), []])
    parser.add_argument("--grep", default="", metavar="WORD", help="only those whose description has it")
    arguments = parser.parse_args()
    chosen = [
        mutant for name in arguments.names or names() for mutant in mutants(name) if arguments.grep in mutant.what
    ]
    alive = 0
    with tempfile.TemporaryDirectory() as name:
        copy_tree(Path(name))
        for mutant in chosen:
            told = verdict(Path(name), mutant)
            alive += not told.startswith("killed")
            print(f"{mutant.what}: {told}", flush=True)
    print(f"{len(chosen)} mutants, {alive} not killed")
    sys.exit(alive > 0)


if __name__ == "__main__":
    main()
