"""Disentangled attention: its buckets, its pairs, what its configs and checkpoints may say."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pieces
import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from transformers import DebertaV2Tokenizer
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

import families
from model.checkpoint import load_encoder, read_json
from model.disentangled import RelativeEmbeddings, by_pair, log_buckets
from model.errors import CheckpointError, ExportError
from model.export import export
from model.families import read_config
from model.sentence import read_tokenizer

RAW = {
    "model_type": "deberta-v2",
    "vocab_size": 60,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 512,
    "hidden_act": "gelu",
    "relative_attention": True,
    "pos_att_type": "p2c|c2p",
    "position_buckets": 256,
}


@pytest.mark.parametrize(
    ("buckets", "longest"), [(256, 512), (8, 80), (16, 80), (32, 128), (2, 40), (3, 40), (5, 17), (7, 33), (48, 26)]
)
def test_buckets_are_those_of_transformers(buckets: int, longest: int):
    """Every distance up to four times the longest has the row that DeBERTa-v2's own code takes, on both sides."""
    config = read_config({**RAW, "position_buckets": buckets, "max_relative_positions": longest})
    seq = 4 * longest
    place = torch.arange(2 * seq) - seq
    theirs = make_log_bucket_position(place, buckets, longest).long()
    positions = RelativeEmbeddings(config)(seq)
    assert torch.equal(positions.query_rows, (theirs + buckets).clamp(0, 2 * buckets - 1))
    assert torch.equal(positions.key_rows, (buckets - theirs).clamp(0, 2 * buckets - 1))


def test_near_distances_have_a_bucket_each():
    """Distances up to half the buckets are their own number, and the longest has the last."""
    numbers = log_buckets(16, 64).tolist()
    assert numbers[:10] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert numbers[-1] == 16
    assert numbers == sorted(numbers)
    assert len(numbers) == 65


@pytest.mark.parametrize("seq", [1, 2, 5])
def test_by_pair(seq: int):
    """Row i's number for column j is the one at place j - i + seq."""
    numbers = torch.arange(2 * 3 * seq * 2 * seq).view(2, 3, seq, 2 * seq)
    pairs = by_pair(numbers)
    for i in range(seq):
        for j in range(seq):
            assert torch.equal(pairs[..., i, j], numbers[..., i, j - i + seq])


@pytest.mark.parametrize("case", ["deberta-v2, as v3", "deberta-v2, convolution, own projections"])
def test_real_buckets_at_real_lengths(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, export_artifact: Callable[[Path], Path], case: str
):
    """With 256 buckets up to 512, lengths at borders of buckets give transformers' numbers, in torch and in ONNX."""
    family, settings = families.CASES[case]
    real = {**settings, "position_buckets": 256, "max_position_embeddings": 512, "num_hidden_layers": 1}
    monkeypatch.setitem(families.CASES, case, (family, real))
    model = families.save(case, tmp_path)
    encoder, artifact = load_encoder(tmp_path), export_artifact(tmp_path)
    for lengths in ((128, 129, 130), (511, 257), (512, 4)):
        ids, mask = families.padded_batch(model, lengths)
        expected = families.oracle(model, ids, mask)
        with torch.inference_mode():
            ours = encoder(ids, mask, output_attentions=True)
        fed = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        graphs = families.run_graphs(artifact, fed)
        real_rows = mask.bool()
        pairs = real_rows[:, None, :, None] & real_rows[:, None, None, :]
        torch.testing.assert_close(
            ours.last_hidden_state[real_rows], expected.last_hidden_state[real_rows], atol=1e-5, rtol=0
        )
        torch.testing.assert_close(ours.attentions[0] * pairs, expected.attentions[0] * pairs, atol=1e-5, rtol=0)
        for name, theirs, kept in (
            ("last_hidden_state", expected.last_hidden_state, real_rows[..., None]),
            ("attentions_0", expected.attentions[0], pairs),
        ):
            np.testing.assert_allclose(graphs[name] * kept.numpy(), (theirs * kept).numpy(), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("position_buckets", 1),
        ("position_buckets", 1022),
        ("position_buckets", "256"),
        ("max_relative_positions", 10**40),
        ("max_relative_positions", 2.5),
        ("pos_att_type", "c2p|p2p"),
        ("pos_att_type", ["C2P"]),
        ("pos_att_type", 7),
        ("norm_rel_ebd", "batch_norm"),
        ("share_att_key", "yes"),
        ("relative_attention", 1),
        ("position_biased_input", "no"),
        ("attention_head_size", 16),
        ("conv_kernel_size", 4),
        ("conv_groups", 5),
        ("conv_groups", 0),
        ("conv_act", "swiglu"),
        ("hidden_act", "swiglu"),
        ("embedding_size", 0),
        ("type_vocab_size", -1),
        ("max_position_embeddings", 0),
        ("is_decoder", True),
    ],
)
def test_a_field_of_no_use_is_named(field: str, value: object):
    """What transformers' own model does not compute, or cannot, is refused with the field's name."""
    with pytest.raises(CheckpointError, match=rf"config field .*{field}"):
        read_config({**RAW, "conv_kernel_size": 3, field: value})


def test_position_embeddings_that_the_config_does_not_use_are_left(tmp_path: Path):
    """Published v3 weights hold a position table though position_biased_input is false; another tensor is refused."""
    model = families.save("deberta-v2, as v3", tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path) | {"embeddings.position_embeddings.weight": torch.ones(80, 24)}
    save_file(state, path)
    ids, mask = families.padded_batch(model, (5,))
    last = load_encoder(tmp_path)(ids, mask).last_hidden_state
    torch.testing.assert_close(last, families.oracle(model, ids, mask).last_hidden_state, atol=1e-5, rtol=0)
    save_file(state | {"encoder.conv.conv.bias": torch.ones(24)}, path)
    with pytest.raises(CheckpointError, match=r"unexpected tensor encoder\.conv\.conv\.bias"):
        load_encoder(tmp_path)


def test_float16_for_cuda_is_refused(tmp_path: Path):
    """The fused operators have no terms of position; the export says what to do, and writes nothing."""
    families.save("deberta-v2, as v3", tmp_path / "checkpoint")
    with pytest.raises(ExportError, match=r"deberta-v2 .* without --precision float16"):
        export(str(tmp_path / "checkpoint"), tmp_path / "artifact", precision="float16")
    assert not (tmp_path / "artifact").exists()


@pytest.fixture
def spm(tmp_path: Path) -> Path:
    """Give a DeBERTa-v3 checkpoint as it is published: spm.model, and no tokenizer.json."""
    families.save("deberta-v2, as v3", tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    names = {"pad_piece": "[PAD]", "bos_piece": "[CLS]", "eos_piece": "[SEP]", "unk_piece": "[UNK]"}
    numbers = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
    pieces.save_spm(tmp_path / "spm.model", pieces.ENGLISH[:9], vocab_size=50, **names, **numbers)
    settle(tmp_path, vocab_type="spm")
    return tmp_path


def settle(folder: Path, **settings: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


def tokenizer_of(folder: Path) -> Any:
    return read_tokenizer(folder, read_config(read_json(folder / "config.json")))


@pytest.mark.parametrize("settings", [{}, {"do_lower_case": True}, {"split_by_punct": True}], ids=str)
def test_pieces_alone_give_transformers_ids(spm: Path, settings: dict[str, Any]):
    """Of spm.model alone the tokenizer is the one that transformers' class makes of the same pieces and scores."""
    settle(spm, **settings)
    model = sentencepiece.SentencePieceProcessor(str(spm / "spm.model"))
    vocab = [(model.IdToPiece(number), model.GetScore(number)) for number in range(model.GetPieceSize())]
    theirs, ours = DebertaV2Tokenizer(vocab=vocab, unk_id=model.unk_id(), **settings), tokenizer_of(spm)
    for pair in (
        ("the  old man",),
        ("River, boats!\n", "a\u0300 \u5b57."),
        ("[CLS] by [MASK]the",),
        ("",),
        (" the ",),
    ):
        expected, got = theirs(*pair), ours.encode(*pair)
        assert (expected["input_ids"], expected["token_type_ids"]) == (got.ids, got.type_ids)
    assert ours.token_to_id("[MASK]") == theirs.mask_token_id == len(vocab)


def test_pieces_that_are_broken_or_absent(spm: Path):
    """So is a folder of this family without pieces, for which transformers would make up an empty tokenizer."""
    (spm / "spm.model").write_bytes(b"\x00no protobuf")
    with pytest.raises(CheckpointError, match=r"spm\.model"):
        tokenizer_of(spm)
    (spm / "spm.model").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer"):
        tokenizer_of(spm)


@pytest.mark.parametrize(
    "settings",
    [
        {"cls_token": "<s>"},
        {"mask_token": {"content": "<mask>"}},
        {"added_tokens_decoder": {"51": {"content": "[NEW]"}}},
    ],
    ids=str,
)
def test_tokens_beyond_the_pieces_are_refused(spm: Path, settings: dict[str, Any]):
    """Special tokens of another name, and further ones, ask for the tokenizer.json that has them."""
    settle(spm, **settings)
    with pytest.raises(CheckpointError, match=r"adds the tokens .*save its tokenizer as tokenizer\.json"):
        tokenizer_of(spm)
