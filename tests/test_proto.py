"""The committed code in service/pb is what the contract generates."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_generated_code_is_current(tmp_path: Path) -> None:
    """Generating again changes nothing; `make proto` is the mend."""
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iservice/pb=proto/attencode/v1"]
    command += [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([*command, "service/pb/encoder.proto"], cwd=ROOT, check=True)
    for name in ("encoder_pb2.py", "encoder_pb2.pyi", "encoder_pb2_grpc.py"):
        assert (tmp_path / "service/pb" / name).read_text() == (ROOT / "service/pb" / name).read_text(), name
