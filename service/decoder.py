"""Decoder: what an artifact of an encoder-decoder says of the decoder beside the encoder, read and checked.

May import: graph_file, errors.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from service.errors import ArtifactError
from service.graph_file import FLOAT, INT64, Port

DECODER_GRAPH = "decoder.onnx"
TARGET_TOKENIZER = "target_tokenizer.json"
_MOST_LAYERS = 1000  # an export writes no more
_MOST_32_BITS = 2**32 - 1  # in which numbers are told


@dataclass(frozen=True, slots=True)
class Decoder:
    """What an artifact of an encoder-decoder says of the decoder.

    Attributes:
        path: Of its graph.
        num_layers: Its layers, each of which looks at the source.
        num_heads: Heads of each layer.
        vocab_size: Token ids of a target are below this.
        start_token_id: Stands before a target's tokens.
        eos_token_id: Ends a target.
        pad_token_id: Fills padded places.
        max_tokens: Longest target in tokens; None where positions set no limit.
        tokenizer: Name of the file of the target's tokenizer.
    """

    path: Path
    num_layers: int
    num_heads: int
    vocab_size: int
    start_token_id: int
    eos_token_id: int
    pad_token_id: int
    max_tokens: int | None
    tokenizer: str


def read_decoder(path: Path, raw: Any, most_tokens: int) -> Decoder:
    """Read what a description says of the decoder.

    Args:
        path: The description's file.
        raw: Its object.
        most_tokens: Of one sequence.

    Raises:
        ArtifactError: It is not what an export writes.
    """
    names = [field.name for field in fields(Decoder) if field.name != "path"]
    missing = [name for name in names if name not in raw] if isinstance(raw, dict) else names
    if missing:
        raise ArtifactError(f"{path} lacks {', '.join(f'decoder.{name}' for name in missing)}; export the model again")
    decoder = Decoder(path.with_name(DECODER_GRAPH), **{name: raw[name] for name in names})
    ids = ("start_token_id", "eos_token_id", "pad_token_id")
    checks = {
        "num_layers": _is_count(decoder.num_layers, 1, _MOST_LAYERS),
        "num_heads": _is_count(decoder.num_heads, 1, _MOST_32_BITS),
        "vocab_size": _is_count(decoder.vocab_size, 1, _MOST_32_BITS),
        **{name: _is_count(getattr(decoder, name), 0, _MOST_32_BITS) for name in ids},
        "max_tokens": decoder.max_tokens is None or _is_count(decoder.max_tokens, 1, most_tokens),
        "tokenizer": decoder.tokenizer in ("tokenizer.json", TARGET_TOKENIZER),
    }
    wrong = [name for name, right in checks.items() if not right]
    if not wrong:
        wrong = [name for name in ids if getattr(decoder, name) >= decoder.vocab_size]
    if wrong:
        listed = ", ".join(f"decoder.{name}" for name in wrong)
        raise ArtifactError(f"{path} has values that no export writes for {listed}; export the model again")
    return decoder


def decoder_ports(decoder: Decoder, hidden_size: int) -> tuple[dict[str, Port], dict[str, Port]]:
    """Give the inputs and outputs of the decoder's graph: `DecoderGraph` of `model.graphs`."""
    pair = Port(INT64, (None, None))
    states = Port(FLOAT, (None, None, hidden_size))
    inputs = {"decoder_input_ids": pair, "encoder_hidden_states": states, "attention_mask": pair}
    looked = Port(FLOAT, (None, decoder.num_heads, None, None))
    return inputs, {f"cross_attention.{layer}": looked for layer in range(decoder.num_layers)}


def _is_count(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most
