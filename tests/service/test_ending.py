"""The last line of a process that ends itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
from service.ending import end_now
from service.logs import log_to_stderr

log_to_stderr("info", {form!r})
end_now("weights.bin was written into")
"""


def ended(form: str) -> str:
    code = CODE.format(form=form)
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 3
    return process.stderr


def test_the_last_line_has_the_form_of_the_log() -> None:
    """For programs it is one JSON object with a time, for people one line with the program's name."""
    assert ended("text") == "attencode: weights.bin was written into\n"
    (line,) = ended("json").splitlines()
    told = json.loads(line)
    assert told["time"].startswith("20")
    assert (told["level"], told["logger"]) == ("critical", "service.ending")
    assert told["message"] == "weights.bin was written into"


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_start_that_fails(form: str, tmp_path: Path) -> None:
    """What keeps a server from its start has that form too."""
    words = ["serve", str(tmp_path), "--api-keys", "/dev/zero", "--log-format", form]
    line = [sys.executable, "-m", "service", *words]
    process = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 1
    (told,) = process.stderr.splitlines()
    message = json.loads(told)["message"] if form == "json" else told.removeprefix("attencode: ")
    assert message.startswith("--api-keys: cannot read '/dev/zero': it is a character device")
