"""Decoders: what they look at in the source is what transformers' do, in torch and in ONNX, whatever the padding."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file

import families
from model.checkpoint import load_decoder, load_encoder
from model.decoder import shift_right
from model.errors import CheckpointError
from model.export import export
from model.families import FAMILIES

CASES = [case for case, (family, _) in families.CASES.items() if FAMILIES[family].decoder]
# An export each: of families that are as another one, one.
EXPORTED = [case for case in CASES if not case.startswith(("mt5,", "mbart,"))]
# Of sources, and of their targets.
LENGTHS = [((1,), (1,)), ((5, 17, 3), (9, 2, 20)), ((40, 8, 64, 2), (3, 50, 7, 64))]
Save = Callable[[str], tuple[Any, Path]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Give a function that saves a case's whole checkpoint once: transformers' model and the folder."""
    made: dict[str, tuple[Any, Path]] = {}

    def get(case: str) -> tuple[Any, Path]:
        if case not in made:
            folder = tmp_path_factory.mktemp("whole")
            made[case] = (families.save(case, folder, whole=True), folder)
        return made[case]

    return get


def oracle(model: Any, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Give transformers' answer for labels, and what its decoder read."""
    config = model.config
    # mBART takes the language's code, which its tokenizers put at the end of the labels.
    start = 5 if config.model_type == "mbart" else config.decoder_start_token_id
    read = shift_right(labels, start).masked_fill(shift_right(labels, 0) == -100, config.pad_token_id)
    fed = {"decoder_input_ids": read} if config.model_type == "mbart" else {"labels": labels}
    with torch.inference_mode():
        return model(input_ids=ids, attention_mask=mask, output_attentions=True, output_hidden_states=True, **fed), read


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_torch_equals_transformers(saved: Save, case: str, lengths: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Cross-attention and hidden states at real places differ by at most 1e-5; rows sum to 1 over the source."""
    model, folder = saved(case)
    encoder = load_encoder(folder)
    decoder = load_decoder(folder, encoder)
    assert decoder is not None
    ids, mask = families.padded_batch(model, lengths[0])
    labels = families.targets(model, lengths[1])
    expected, read = oracle(model, ids, mask, labels)
    with torch.inference_mode():
        got = decoder(read, encoder(ids, mask).last_hidden_state, mask)
    real = labels != -100
    last = expected.decoder_hidden_states[-1]
    torch.testing.assert_close(got.last_hidden_state[real], last[real], atol=1e-5, rtol=0)
    assert len(got.cross_attentions) == len(expected.cross_attentions) == 3
    for ours, theirs in zip(got.cross_attentions, expected.cross_attentions, strict=True):
        assert ours.shape == theirs.shape
        rows = real[:, None, :, None]
        torch.testing.assert_close(ours * rows, theirs * rows, atol=1e-5, rtol=0)
        over_source = (ours * mask[:, None, None, :]).sum(dim=-1)
        torch.testing.assert_close(over_source, torch.ones_like(over_source), atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", EXPORTED)
def test_onnx_equals_transformers(saved: Save, export_artifact: Callable[[Path], Path], case: str) -> None:
    """The graph, fed with what the encoder's graph gives, differs by at most 1e-4."""
    model, folder = saved(case)
    artifact = export_artifact(folder)
    session = onnxruntime.InferenceSession(artifact / "decoder.onnx", providers=["CPUExecutionProvider"])
    names = [put.name for put in session.get_outputs()]
    assert names == ["cross_attention.0", "cross_attention.1", "cross_attention.2"]
    for sources, targets in LENGTHS:
        ids, mask = families.padded_batch(model, sources)
        labels = families.targets(model, targets)
        expected, read = oracle(model, ids, mask, labels)
        states = families.run_graphs(artifact, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        fed = {
            "decoder_input_ids": read.numpy(),
            "encoder_hidden_states": states["last_hidden_state"],
            "attention_mask": mask.numpy(),
        }
        rows = (labels != -100)[:, None, :, None].numpy()
        for ours, theirs in zip(session.run(names, fed), expected.cross_attentions, strict=True):
            np.testing.assert_allclose(ours * rows, theirs.numpy() * rows, atol=1e-4, rtol=0)


def test_a_padded_target_equals_the_target_alone(saved: Save) -> None:
    """What stands behind a target, whatever it is, changes none of its rows."""
    model, folder = saved("t5, plain")
    encoder = load_encoder(folder)
    decoder = load_decoder(folder, encoder)
    assert decoder is not None
    ids, mask = families.padded_batch(model, (6,))
    with torch.inference_mode():
        hidden = encoder(ids, mask).last_hidden_state
        short = decoder(torch.tensor([[0, 11, 12]]), hidden, mask).cross_attentions[-1]
        long = decoder(torch.tensor([[0, 11, 12, 41, 42]]), hidden, mask).cross_attentions[-1]
    torch.testing.assert_close(long[:, :, :3], short, atol=1e-6, rtol=0)


def test_the_description_of_a_decoder(saved: Save, export_artifact: Callable[[Path], Path]) -> None:
    """artifact.json says what a target's tokens may be and where they begin; a table of both sides lies there once."""
    described = json.loads((export_artifact(saved("marian, two tables")[1]) / "artifact.json").read_text("utf-8"))
    assert described["decoder"] == {
        "num_layers": 3,
        "num_heads": 4,
        "vocab_size": 50,
        "start_token_id": 7,
        "eos_token_id": 0,
        "pad_token_id": 7,
        "max_tokens": 80,
        "tokenizer": "tokenizer.json",
    }
    artifact = export_artifact(saved("t5, plain")[1])
    decoder = json.loads((artifact / "artifact.json").read_text("utf-8"))["decoder"]
    assert (decoder["start_token_id"], decoder["eos_token_id"], decoder["max_tokens"]) == (0, 1, None)
    encoder = load_encoder(saved("t5, plain")[1])
    both = load_decoder(saved("t5, plain")[1], encoder)
    assert both is not None
    assert both.embeddings.token.weight is encoder.embeddings.token.weight


def test_the_report_says_that_align_is_there(saved: Save, tmp_path: Path) -> None:
    """The export's first line names the decoder."""
    lines: list[str] = []
    export(str(saved("bart")[1]), tmp_path / "artifact", model_id="bart", report=lines.append)
    assert lines[0] == "loaded bart: bart, 2 layers, 3 heads, hidden 24; a decoder for Align, 3 layers, 4 heads"


def test_a_checkpoint_of_the_encoder_alone_has_no_decoder(tmp_path: Path) -> None:
    """T5EncoderModel's checkpoints load as they are, whatever their config says of a decoder."""
    families.save("t5, plain", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text("utf-8")) | {"is_encoder_decoder": True}
    (tmp_path / "config.json").write_text(json.dumps(raw), "utf-8")
    assert load_decoder(tmp_path, load_encoder(tmp_path)) is None


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("case", "changed", "message"),
    [
        ("bart", {"normalize_before": True}, "normalize_before=True is not supported"),
        ("bart", {"static_position_embeddings": True}, "static_position_embeddings=True is not supported"),
        ("mbart", {"add_final_layer_norm": False}, "add_final_layer_norm=False is not supported"),
        ("marian", {"normalize_embedding": True}, "normalize_embedding=True is not supported"),
        ("marian", {"activation_function": "mish"}, "activation_function='mish' is not supported"),
        ("bart", {"scale_embedding": 2}, "scale_embedding must be true or false, got 2"),
        ("bart", {"decoder_start_token_id": 60}, "decoder_start_token_id=60 is outside the decoder's vocabulary of 60"),
        ("bart", {"eos_token_id": -1}, "eos_token_id=-1 is outside the decoder's vocabulary of 60"),
        ("bart", {"decoder_attention_heads": 5}, "d_model=24 is not divisible by decoder_attention_heads=5"),
        ("bart", {"decoder_layers": 2}, "unexpected tensor model.decoder.layers.2."),
        ("marian", {"decoder_vocab_size": 50}, "decoder_vocab_size=50 is at odds with vocab_size=60"),
        (
            "t5, plain",
            {"relative_attention_max_distance": 16},
            "must be below 2 [*] relative_attention_max_distance=16",
        ),
        ("t5, plain", {"num_decoder_layers": 4}, "missing tensor decoder.block.3.layer.0.SelfAttention"),
        ("t5, plain", {"model_type": "t5gemma"}, "model_type is 't5gemma'; supported families: .*bart.*marian"),
        ("t5, plain", {"model_type": "fsmt"}, "model_type is 'fsmt'; supported families: "),
    ],
)
def test_configs_that_ask_for_something_else(
    saved: Save, tmp_path: Path, case: str, changed: dict[str, object], message: str
) -> None:
    """A config that does not fit the decoder, or asks for another computation, is refused by its field."""
    source = saved(case)[1]
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    raw = json.loads((source / "config.json").read_text("utf-8")) | changed
    (tmp_path / "config.json").write_text(json.dumps(raw), "utf-8")
    with pytest.raises(CheckpointError, match=message):
        load_decoder(tmp_path, load_encoder(tmp_path))


def test_a_decoder_that_lacks_a_tensor(saved: Save, tmp_path: Path) -> None:
    """A decoder is loaded strictly: what is missing or not known is named."""
    source = saved("bart")[1]
    tensors = load_file(source / "model.safetensors")
    moved = tensors.pop("model.decoder.layers.1.encoder_attn.q_proj.weight")
    save_file({**tensors, "model.decoder.layers.1.encoder_attn.r_proj.weight": moved}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"unexpected tensor .*r_proj.* missing tensor .*encoder_attn\.q_proj"):
        load_decoder(tmp_path, load_encoder(tmp_path))
