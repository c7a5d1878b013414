"""Export: a checkpoint to an artifact folder, the only thing that the service reads.

    encode.onnx                 the encoder, its poolings and the hidden states that are asked for
    attention.onnx              what a layer's heads look at, from that layer's input and weights
    long.onnx                   the first for long texts, of models that take them
    decoder.onnx                of an encoder-decoder: what its decoder's heads look at in the source
    weights.bin                 their weights, shared
    encode.cuda.onnx            with float16: the first graph for CUDA, fused, with the last hidden state alone
    pooled.cuda.onnx            the same, with the model's own pooling alone
    weights.cuda.bin            their weights
    tokenizer.json              Hugging Face tokenizers' own format
    target_tokenizer.json       the same for the decoder, where it has one of its own
    artifact.json               what the service must know, and a digest of each file above

The folder is written aside, checked against the torch encoder, and then renamed into place: at any
moment there is a whole artifact under the given name, or none.
May import: every module of `model`, onnxruntime.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from tokenizers import Tokenizer

from model.attention_graph import AttentionGraph
from model.checkpoint import load_decoder, load_encoder
from model.decoder import Decoder
from model.encoder import Encoder, EncoderOutput
from model.errors import CheckpointError, ExportError
from model.folder import refuse_foreign, write_description, written_aside
from model.fused import FusedEncoder
from model.graphs import (
    CUDA_POOLED_FILE,
    CUDA_WEIGHTS_FILE,
    WEIGHTS_FILE,
    DecoderGraph,
    EncoderGraph,
    Graph,
    Places,
    long_graphs,
    prune,
    write_graphs,
)
from model.head import SentenceHead
from model.hub import Source, locate
from model.sentence import SentenceSettings, encoder_folder, read_sentence, read_target_tokenizer, read_tokenizer

FORMAT_VERSION = 5
TARGET_TOKENIZER = "target_tokenizer.json"
PRECISIONS = ("float32", "float16")
MAX_DIFFERENCE = 1e-4  # float32, any output, any value, against torch
MIN_COSINES = {"pooled": 0.9999, "token": 0.999}  # float16, the worst vector, against torch in float32
_CHECK_LENGTHS = ((1,), (7, 3, 12), (16, 33, 5, 64))  # sequence lengths of each padded check batch


def export(
    model: str,
    output: Path,
    *,
    revision: str | None = None,
    model_id: str | None = None,
    precision: str = "float32",
    report: Callable[[str], None] = print,
) -> Path:
    """Turn a checkpoint into an artifact.

    Args:
        model: A checkpoint's folder or hub id.
        output: The artifact's folder: absent, empty, or an older artifact, which is replaced.
        revision: Branch, tag or commit on the hub.
        model_id: What the artifact says it was made from; the hub id or the folder's name when None.
        precision: One of `PRECISIONS`; `float16` adds a graph for CUDA to those in float32.
        report: Called with a line for each finished step.

    Returns:
        `output`.

    Raises:
        CheckpointError: The checkpoint cannot be loaded exactly.
        ExportError: The output folder holds something else, or the graphs differ from torch by more
            than `MAX_DIFFERENCE`, one in float16 by more than `MIN_COSINES`.
        OSError: The disk refuses.
    """
    refuse_foreign(output)
    source = locate(model, revision)
    if model_id is not None:
        source = replace(source, model_id=model_id)
    place = encoder_folder(source.folder)
    encoder = load_encoder(place)
    settings, head = read_sentence(source.folder, encoder.config)
    tokenizer = read_tokenizer(place, encoder.config)
    decoder, target_tokenizer = _read_decoder(place, encoder, tokenizer)
    _check_exportable(source, encoder, settings, tokenizer, precision)
    report(f"loaded {source.model_id}: {_size_line(encoder, decoder)}")
    with written_aside(output) as folder:
        plain = EncoderGraph(encoder, head, pool_prompt=settings.pool_prompt)
        crossed = DecoderGraph(encoder, decoder) if decoder is not None else None
        places = write_graphs(folder, plain, WEIGHTS_FILE, encoder, crossed)
        (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
        if target_tokenizer is not tokenizer:
            (folder / TARGET_TOKENIZER).write_text(target_tokenizer.to_str(pretty=False), encoding="utf-8")
        difference = check(folder, plain, places, crossed)
        report(f"checked against torch: largest difference {difference:.1e} (at most {MAX_DIFFERENCE:.0e})")
        parity = {"float32_max_difference": difference}
        if precision == "float16":
            parity |= _write_float16(folder, encoder, head, plain, pool_prompt=settings.pool_prompt)
            report(f"checked float16 for CUDA: smallest cosine of a token {parity['float16_min_token_cosine']:.6f}")
        described = _description(source, plain, settings, parity, places)
        write_description(
            folder, {**described, "decoder": _described_decoder(decoder, own=target_tokenizer is not tokenizer)}
        )
    report(f"wrote {output}")
    return output


def _check_exportable(
    source: Source, encoder: Encoder, settings: SentenceSettings, tokenizer: Tokenizer, precision: str
) -> None:
    """Refuse a precision that the encoder's graphs cannot have, and sequences without room for a token."""
    if precision == "float16" and not encoder.config.fusible:
        raise ExportError(
            f"{encoder.config.family} as {source.folder} sets it computes what no graph for CUDA in float16 has; "
            "export it without --precision float16, and CUDA runs its graphs in float32"
        )
    special = tokenizer.num_special_tokens_to_add(is_pair=False)
    if settings.max_tokens <= special:
        raise CheckpointError(
            f"{source.folder} allows sequences of {settings.max_tokens} tokens, which its {special} special tokens fill"
        )


def _write_float16(
    folder: Path, encoder: Encoder, head: SentenceHead, plain: EncoderGraph, *, pool_prompt: bool
) -> dict[str, float]:
    """Write the graphs for CUDA and give how near they are to the plain one, by the description's names."""
    fused = EncoderGraph(FusedEncoder(encoder, torch.float16), head, pool_prompt=pool_prompt)
    write_graphs(folder, fused, CUDA_WEIGHTS_FILE)
    whole = onnx.load_model(folder / fused.file, load_external_data=False)
    onnx.save_model(prune(whole, ["last_hidden_state", f"pooled_{head.pooling}"]), folder / CUDA_POOLED_FILE)
    cosines = check_float16(folder, fused, plain)
    return {f"float16_min_{kind}_cosine": cosine for kind, cosine in cosines.items()}


def check(folder: Path, plain: EncoderGraph, places: Places, decoder: DecoderGraph | None = None) -> float:
    """Compare the graphs with the torch encoder, and decoder if there is, on padded batches of random tokens.

    Returns:
        The largest difference over all outputs, padded places left out; of an output with values above 10
        in tenths of its largest value.

    Raises:
        ExportError: It exceeds `MAX_DIFFERENCE`, or ONNX Runtime is not installed.
    """
    worst = 0.0
    encoder = plain.encoder
    assert isinstance(encoder, Encoder)
    outputs: dict[tuple[int, ...], EncoderOutput] = {}
    looks = (AttentionGraph(encoder, layer) for layer in range(len(places)))
    inspected: list[Graph] = [plain, *long_graphs(plain), *looks]
    for graph in [*inspected, *([decoder] if decoder is not None else [])]:
        weights = _weights_at(folder, places[graph.number]) if isinstance(graph, AttentionGraph) else {}
        for _, exact, ours in _compared(folder, graph, graph, weights, outputs):
            # T5's hidden states reach the thousands, where float32 itself is no finer than 1e-4.
            unit = max(1.0, float(np.abs(exact).max()) / 10)
            worst = max(worst, float(np.abs(exact - ours).max()) / unit)
    if not worst <= MAX_DIFFERENCE:
        raise ExportError(
            f"the exported graphs differ from torch by {worst:.1e}, at most {MAX_DIFFERENCE:.0e} is allowed"
        )
    return worst


def check_float16(folder: Path, fused: EncoderGraph, plain: EncoderGraph) -> dict[str, float]:
    """Compare the graph for CUDA with the torch encoder in float32, on the same batches.

    The CPU provider runs it too: it rounds to float16 between operators and computes in float32 inside them.

    Args:
        folder: Where the graph lies.
        fused: The graph.
        plain: What it must be close to.

    Returns:
        The smallest cosine over all vectors, `pooled` and `token`.

    Raises:
        ExportError: One is below `MIN_COSINES` or not finite, or ONNX Runtime is not installed.
    """
    worst = dict.fromkeys(MIN_COSINES, 1.0)
    for name, exact, ours in _compared(folder, fused, plain):
        kind = "pooled" if name.startswith("pooled_") else "token"
        lengths = np.linalg.norm(exact, axis=-1) * np.linalg.norm(ours, axis=-1)
        cosine = float(((exact * ours).sum(axis=-1) / np.maximum(lengths, 1e-12)).min())
        worst[kind] = cosine if np.isnan(cosine) else min(worst[kind], cosine)
        if not worst[kind] >= MIN_COSINES[kind]:
            raise ExportError(
                f"in float16 a {kind} vector has a cosine of {cosine:.6f} to float32, at least {MIN_COSINES[kind]} "
                f"is wanted; export this model without --precision float16"
            )
    return worst


def _compared(
    folder: Path,
    graph: Graph,
    oracle: Graph,
    weights: Mapping[str, np.ndarray[Any, Any]] | None = None,
    outputs: dict[tuple[int, ...], EncoderOutput] | None = None,
) -> Iterator[tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Yield each output's name, and for each row the oracle's values and the graph's, padded places left out."""
    try:
        import onnxruntime  # noqa: PLC0415 - absent with a plain `attencode[export]`
    except ImportError as error:
        raise ExportError("export checks its graphs with ONNX Runtime; install attencode[cpu] too") from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(folder / graph.file, options, providers=["CPUExecutionProvider"])
    limit = graph.encoder.config.max_tokens
    for lengths in _CHECK_LENGTHS:
        kept = tuple(min(length, limit or length) for length in lengths)
        fed = _random_batch(oracle, kept, {} if outputs is None else outputs)
        with torch.inference_mode():
            expected = dict(zip(oracle.outputs, oracle(*fed.values()), strict=True))
        arrays = {name: fed[name].numpy() for name in graph.inputs} | dict(weights or {})
        for name, ours in zip(graph.outputs, session.run(list(graph.outputs), arrays), strict=True):
            for row, length in enumerate(kept):
                place = _place(name, row, length)
                yield name, expected[name].numpy()[place], ours[place]


def _random_batch(
    graph: Graph, lengths: tuple[int, ...], outputs: dict[tuple[int, ...], EncoderOutput]
) -> dict[str, torch.Tensor]:
    """Draw a padded batch of random tokens, and give the graph's inputs for it by name.

    `outputs` keeps what the encoder gave, by lengths, for the graphs of its other layers.
    """
    config = graph.encoder.config
    draw = torch.Generator().manual_seed(len(lengths))
    shape = (len(lengths), max(lengths))
    mask = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(config.vocab_size, shape, generator=draw) * mask + config.pad_token_id * (1 - mask)
    fed = {"input_ids": ids, "attention_mask": mask, "pooling_mask": mask, "state_rows": torch.arange(shape[0])}
    fed["token_type_ids"] = torch.randint(max(config.type_vocab_size, 1), shape, generator=draw) * mask
    if isinstance(graph, AttentionGraph | DecoderGraph):
        segments = fed["token_type_ids"] if config.type_vocab_size else None
        if lengths not in outputs:
            with torch.inference_mode():
                outputs[lengths] = graph.encoder(ids, mask, segments, output_hidden_states=True)
        output = outputs[lengths]
        if isinstance(graph, AttentionGraph):
            fed["hidden_state"] = output.hidden_states[graph.number]
        else:
            fed["encoder_hidden_states"] = output.last_hidden_state
            fed["decoder_input_ids"] = _random_targets(graph, shape, draw)
    return {name: fed[name] for name in graph.inputs}


def _random_targets(graph: DecoderGraph, shape: tuple[int, int], draw: torch.Generator) -> torch.Tensor:
    """Draw targets a little longer than their sources, (batch, target) int64."""
    stack = graph.decoder.config.stack
    length = min(shape[1] + 3, stack.max_tokens or shape[1] + 3)
    return torch.randint(stack.vocab_size, (shape[0], length), generator=draw)


def _place(name: str, row: int, length: int) -> tuple[Any, ...]:
    """Say where one row's tokens are in an output."""
    if name.startswith("pooled_"):
        return (row,)
    if name == "hidden_states":
        return (slice(None), row, slice(length))
    if name == "attention":
        return (row, slice(None), slice(length), slice(length))
    if name in AttentionGraph.outputs:
        return (row, slice(None), slice(length))
    if name.startswith("cross_attention."):
        return (row, slice(None), slice(None), slice(length))
    return (row, slice(length))


def _weights_at(folder: Path, places: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Map one layer's weights as the service does."""
    path = folder / WEIGHTS_FILE
    return {name: np.memmap(path, np.float32, "r", at["offset"], tuple(at["shape"])) for name, at in places.items()}


def _description(
    source: Source, graph: EncoderGraph, settings: SentenceSettings, parity: dict[str, float], places: Places
) -> dict[str, Any]:
    """Build `artifact.json`, digests of files not yet included."""
    config = graph.encoder.config
    return {
        "format_version": FORMAT_VERSION,
        "model_id": source.model_id,
        "revision": source.revision,
        "family": config.family,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "type_vocab_size": config.type_vocab_size,
        "pad_token_id": config.pad_token_id,
        "num_parameters": sum(tensor.numel() for tensor in graph.state_dict().values()),
        **asdict(settings),
        "inputs": graph.inputs,
        "attention_weights": places,
        "pooling": graph.head.pooling,
        "poolings": graph.poolings,
        "sentence_size": graph.head.size(config.hidden_size),
        "parity": parity,
        "exported_by": {"attencode": _version("attencode"), "torch": str(torch.__version__)},
    }


def _read_decoder(place: Path, encoder: Encoder, tokenizer: Tokenizer) -> tuple[Decoder | None, Tokenizer]:
    """Load a checkpoint's decoder and its tokenizer; None, and the encoder's, where there is nothing for Align."""
    decoder = load_decoder(place, encoder)
    target = read_target_tokenizer(place, decoder.config, tokenizer) if decoder is not None else None
    return (decoder, target) if target is not None else (None, tokenizer)


def _described_decoder(decoder: Decoder | None, *, own: bool) -> dict[str, Any] | None:
    """Build what `artifact.json` says of the decoder, with a tokenizer of its `own` or not; None without one."""
    if decoder is None:
        return None
    config = decoder.config
    return {
        "num_layers": config.stack.num_hidden_layers,
        "num_heads": config.stack.num_attention_heads,
        "vocab_size": config.stack.vocab_size,
        "start_token_id": config.start_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.stack.pad_token_id,
        "max_tokens": config.stack.max_tokens,
        "tokenizer": TARGET_TOKENIZER if own else "tokenizer.json",
    }


def _size_line(encoder: Encoder, decoder: Decoder | None) -> str:
    config = encoder.config
    line = (
        f"{config.family}, {config.num_hidden_layers} layers, {config.num_attention_heads} heads, "
        f"hidden {config.hidden_size}"
    )
    if decoder is None:
        return line
    stack = decoder.config.stack
    return f"{line}; a decoder for Align, {stack.num_hidden_layers} layers, {stack.num_attention_heads} heads"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
