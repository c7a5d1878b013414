"""Artifacts of encoder-decoders whose maker means ill, every digest right: the decoder's part is refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

import families
from service.artifact import ARTIFACT_FILE, open_artifact
from service.decoder import Decoder
from service.errors import ArtifactError
from tests.service.hostile import describe, seal

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, export_artifact: Callable[[Path], Path]) -> Path:
    """Give the artifact of a tiny T5 with its decoder."""
    folder = tmp_path_factory.mktemp("t5")
    families.save("t5, plain", folder, whole=True)
    return export_artifact(folder)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """Give a copy of it."""
    return Path(shutil.copytree(made, tmp_path / "artifact"))


def described(folder: Path) -> Any:
    return json.loads((folder / ARTIFACT_FILE).read_text("utf-8"))


def says(**values: object) -> Change:
    """Change what is said of the decoder."""
    return lambda folder: describe(folder, decoder=described(folder)["decoder"] | values)


def without(name: str) -> Change:
    """Leave something out that is said of the decoder."""
    return lambda folder: describe(
        folder, decoder={key: value for key, value in described(folder)["decoder"].items() if key != name}
    )


def unnamed(name: str) -> Change:
    """Leave a file out of the list."""
    return lambda folder: describe(
        folder, files={key: value for key, value in described(folder)["files"].items() if key != name}
    )


def graph(change: Callable[[onnx.ModelProto], object]) -> Change:
    """Change the decoder's graph, and seal the artifact."""

    def changed(folder: Path) -> None:
        model = onnx.load(folder / "decoder.onnx", load_external_data=False)
        change(model)
        (folder / "decoder.onnx").write_bytes(model.SerializeToString())
        seal(folder)

    return changed


def outside(model: onnx.ModelProto) -> None:
    """Let a weight lie in another file."""
    entry = next(one for one in model.graph.initializer[0].external_data if one.key == "location")
    entry.value = "/etc/passwd"


def with_target_tokenizer(folder: Path) -> None:
    """Give the decoder a tokenizer of its own."""
    shutil.copy(folder / "tokenizer.json", folder / "target_tokenizer.json")
    files = described(folder)["files"]
    describe(folder, files=files | {"target_tokenizer.json": files["tokenizer.json"]})
    says(tokenizer="target_tokenizer.json")(folder)


def test_what_is_said_of_a_decoder(folder: Path) -> None:
    """An artifact with a decoder opens, with a tokenizer for the target too, and says the decoder's numbers."""
    expected = Decoder(folder / "decoder.onnx", 3, 3, 60, 0, 1, 0, None, "tokenizer.json")
    artifact = open_artifact(folder)
    assert artifact.decoder == expected
    assert {"decoder.onnx"} == artifact.optional_files & {"decoder.onnx", "target_tokenizer.json"}
    with_target_tokenizer(folder)
    artifact = open_artifact(folder)
    assert artifact.decoder is not None
    assert artifact.decoder.tokenizer == "target_tokenizer.json"
    assert {"decoder.onnx", "target_tokenizer.json"} <= artifact.digests.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: describe(folder, decoder=[1]), "lacks decoder.num_layers, decoder.num_heads"),
        (without("eos_token_id"), "lacks decoder.eos_token_id"),
        (says(num_layers=0), "no export writes for decoder.num_layers"),
        (says(num_layers=1 << 40), "no export writes for decoder.num_layers"),
        (says(num_layers=True), "no export writes for decoder.num_layers"),
        (says(num_heads="3"), "no export writes for decoder.num_heads"),
        (says(num_heads=2), r"decoder\.onnx is no graph .* output cross_attention\.0 is of type 1 and shape"),
        (says(num_layers=2), r"decoder\.onnx is no graph .*outputs are cross_attention\.0, .*cross_attention\.2"),
        (says(vocab_size=1 << 31), "values for decoder that do not fit"),
        (says(num_heads=1 << 31), "values for decoder that do not fit"),
        (says(start_token_id=60), "no export writes for decoder.start_token_id"),
        (says(eos_token_id=-1), "no export writes for decoder.eos_token_id"),
        (says(pad_token_id=60), "no export writes for decoder.pad_token_id"),
        (says(max_tokens=1 << 62), "no export writes for decoder.max_tokens"),
        (says(max_tokens=0), "no export writes for decoder.max_tokens"),
        (says(tokenizer="/etc/passwd"), "no export writes for decoder.tokenizer"),
        (says(tokenizer=["tokenizer.json"]), "no export writes for decoder.tokenizer"),
        (says(tokenizer="target_tokenizer.json"), r"must name target_tokenizer\.json too"),
        (unnamed("decoder.onnx"), r"must name decoder\.onnx too"),
        (lambda folder: describe(folder, decoder=None), r"names 'decoder\.onnx', which is no file of an artifact"),
        (graph(outside), r"decoder\.onnx is no graph .*lies in '/etc/passwd', not in weights\.bin"),
        (
            graph(lambda model: model.graph.node.append(helper.make_node("PyOp", [], ["taken"], domain="com.evil"))),
            r"decoder\.onnx is no graph .*operator 'com\.evil'\.'PyOp'",
        ),
        (
            graph(
                lambda model: model.graph.input.append(helper.make_tensor_value_info("more", TensorProto.INT64, [1]))
            ),
            r"decoder\.onnx is no graph .*inputs are attention_mask, decoder_input_ids, encoder_hidden_states, more",
        ),
        (lambda folder: (folder / "decoder.onnx").write_bytes(b"changed"), r"decoder\.onnx was changed or damaged"),
        (lambda folder: (folder / "decoder.onnx").unlink(), r"decoder\.onnx"),
    ],
)
def test_decoders_that_no_export_writes(folder: Path, change: Change, message: str) -> None:
    """A number, name or graph of a decoder that cannot be right stops the opening, and the message names it."""
    change(folder)
    with pytest.raises(ArtifactError, match=message):
        open_artifact(folder)
