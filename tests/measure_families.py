"""Print the tables of measured differences from transformers that stand in model/README.md.

python tests/measure_families.py
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import families  # noqa: E402
from model.checkpoint import load_decoder, load_encoder  # noqa: E402
from model.decoder import shift_right  # noqa: E402
from model.export import export  # noqa: E402
from model.families import FAMILIES  # noqa: E402

LENGTHS = ((5, 17, 3), (40, 8, 64, 2))


def differences(got: dict[str, Any], expected: Any, mask: torch.Tensor) -> tuple[float, float]:
    """Give the largest difference of hidden states and of attention weights at real places."""
    real = mask.bool().numpy()
    rows = real[:, None, :, None] & real[:, None, None, :]
    states = max(
        float(np.abs(got[f"hidden_states_{layer}"] - theirs.numpy())[real].max())
        for layer, theirs in enumerate(expected.hidden_states)
    )
    weights = max(
        float(np.abs((got[f"attentions_{layer}"] - theirs.numpy()) * rows).max())
        for layer, theirs in enumerate(expected.attentions)
    )
    return states, weights


def measure(case: str, folder: Path) -> list[float]:
    """Measure one case: torch's two differences, then ONNX's."""
    model = families.save(case, folder / "checkpoint")
    encoder = load_encoder(folder / "checkpoint")
    artifact = export(str(folder / "checkpoint"), folder / "artifact", report=lambda _line: None)
    worst = np.zeros(4)
    for lengths in LENGTHS:
        ids, mask = families.padded_batch(model, lengths)
        expected = families.oracle(model, ids, mask)
        types = torch.zeros_like(ids)
        with torch.inference_mode():
            output = encoder(ids, mask, types, output_hidden_states=True, output_attentions=True)
        ours = {f"hidden_states_{layer}": state.numpy() for layer, state in enumerate(output.hidden_states)}
        ours |= {f"attentions_{layer}": weights.numpy() for layer, weights in enumerate(output.attentions)}
        fed = {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), "token_type_ids": types.numpy()}
        exported = families.run_graphs(artifact, fed)
        worst = np.maximum(worst, [*differences(ours, expected, mask), *differences(exported, expected, mask)])
    return [float(value) for value in worst]


def measure_decoder(case: str, folder: Path) -> list[float]:
    """Measure one case's cross-attention: torch's difference, then ONNX's."""
    model = families.save(case, folder / "checkpoint", whole=True)
    encoder = load_encoder(folder / "checkpoint")
    decoder = load_decoder(folder / "checkpoint", encoder)
    assert decoder is not None
    artifact = export(str(folder / "checkpoint"), folder / "artifact", report=lambda _line: None)
    session = onnxruntime.InferenceSession(artifact / "decoder.onnx", providers=["CPUExecutionProvider"])
    worst = np.zeros(2)
    for lengths in LENGTHS:
        ids, mask = families.padded_batch(model, lengths)
        real = families.targets(model, lengths[::-1])
        read = shift_right(real.clamp(min=0), 5)
        with torch.inference_mode():
            expected = model(input_ids=ids, attention_mask=mask, decoder_input_ids=read, output_attentions=True)
            states = encoder(ids, mask).last_hidden_state
            ours = decoder(read, states, mask).cross_attentions
        fed = {"decoder_input_ids": read, "encoder_hidden_states": states, "attention_mask": mask}
        exported = session.run(None, {name: tensor.numpy() for name, tensor in fed.items()})
        for layer, theirs in enumerate(expected.cross_attentions):
            rows = (real >= 0)[:, None, :, None].numpy()
            found = [np.abs((one - theirs.numpy()) * rows).max() for one in (ours[layer].numpy(), exported[layer])]
            worst = np.maximum(worst, found)
    return [float(value) for value in worst]


def main() -> None:
    """Measure every case and print Markdown tables."""
    print("| checkpoint | torch: hidden states | attention | ONNX: hidden states | attention |")
    print("|---|---|---|---|---|")
    for case in families.CASES:
        with tempfile.TemporaryDirectory() as folder:
            row = measure(case, Path(folder))
        print(f"| {case} | " + " | ".join(f"{value:.0e}" for value in row) + " |", flush=True)
    print("\n| checkpoint | torch: cross-attention | ONNX |")
    print("|---|---|---|")
    for case in [case for case, (family, _) in families.CASES.items() if FAMILIES[family].decoder]:
        with tempfile.TemporaryDirectory() as folder:
            row = measure_decoder(case, Path(folder))
        print(f"| {case} | " + " | ".join(f"{value:.0e}" for value in row) + " |", flush=True)


if __name__ == "__main__":
    main()
