"""Attention graph: one layer's attention as a function of the layer's input, its weights, and what else tells it apart.

One graph serves all layers of an encoder: what of a layer is no weight, how its positions turn and how far it looks,
is fed as numbers too. May import: disentangled, encoder, masks, rotary, torch.
"""

import torch
from torch import Tensor, nn

from model.disentangled import RelativePositions
from model.encoder import Encoder, Terms
from model.masks import additive, padding_mask
from model.rotary import rotation

OWN = ("layer.", "kind.")
"""Beginnings of names of what is a layer's own, in an `AttentionGraph`."""

_EVERYWHERE = 1e9  # places that a global layer reaches: more than any text has


class LayerKind(nn.Module):
    """What of a layer is no weight and differs between layers, as numbers: float32, each fed to the attention graph.

    Attributes:
        frequencies: How far a place turns queries and keys, (head_dim / 2,), of encoders with rotary positions.
        reach: How many places away a token looks, (1,), of encoders with local layers.
        normed: Above 0 where a norm stands before the attention, (1,), of encoders whose first layer lacks it.
    """

    def __init__(self, encoder: Encoder, number: int) -> None:
        """Read the kind of the layer at a depth."""
        super().__init__()
        config, local = encoder.config, number in encoder.config.local_layers
        if (frequencies := encoder.frequencies(local=local)) is not None:
            self.register_buffer("frequencies", frequencies)
        if config.local_layers:
            self.register_buffer("reach", torch.tensor([float(config.local_reach) if local else _EVERYWHERE]))
        if not config.first_norm and config.num_hidden_layers > 1:
            self.register_buffer("normed", torch.tensor([float(number > 0)]))

    def terms(self, terms: Terms, attention_mask: Tensor) -> Terms:
        """Give a layer's terms, of those that all have."""
        seq, found = attention_mask.shape[1], dict(self.named_buffers())
        if (frequencies := found.get("frequencies")) is not None:
            terms = terms._replace(rotation=rotation(frequencies, seq))
        if (reach := found.get("reach")) is not None:
            places = torch.arange(seq, device=reach.device).to(torch.float32)
            near = (places[:, None] - places[None, :]).abs() <= reach
            terms = terms._replace(mask=additive(padding_mask(attention_mask) & near, terms.mask.dtype))
        return terms


class AttentionGraph(nn.Module):
    """One layer's attention, as a function from the layer's input, the mask and its weights to named outputs."""

    file = "attention.onnx"
    inputs = ("hidden_state", "attention_mask")
    outputs = ("attention", "query_vectors", "key_vectors")

    def __init__(self, encoder: Encoder, number: int) -> None:
        """Wrap the layer of an encoder at a depth, counted from 0."""
        super().__init__()
        self.encoder = encoder
        self.number = number
        self.layer = encoder.layer(number)
        self.kind = LayerKind(encoder, number)

    def example(self) -> tuple[Tensor, ...]:
        """Give tensors to trace with."""
        return torch.zeros(2, 3, self.encoder.config.hidden_size), torch.ones(2, 3, dtype=torch.int64)

    def forward(self, hidden_state: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inspect the layer; shapes as `EncoderLayer.inspect` has them."""
        terms = self.kind.terms(self.encoder.terms(attention_mask, hidden_state.dtype)[False], attention_mask)
        if isinstance(terms.position_bias, RelativePositions):  # their projections are inputs, not made beforehand
            terms = terms._replace(position_bias=terms.position_bias.narrowed())
        return self.layer.inspect(hidden_state, terms, dict(self.kind.named_buffers()).get("normed"))


def weight_of(encoder: Encoder, number: int, name: str) -> str:
    """Name a layer's own weight, or number, of the attention graph among those of the weights file."""
    if name == "kind.normed":
        return f"{name}.{'first' if number == 0 else 'others'}"
    if name.startswith("kind."):
        return f"{name}.{'local' if number in encoder.config.local_layers else 'global'}"
    if isinstance(encoder.layer(number).attention_norm, nn.Identity) and name.startswith("layer.attention_norm."):
        number += encoder.config.num_hidden_layers > 1  # what is fed there is not used
    return f"encoder.{encoder.layer_name(number)}.{name.removeprefix('layer.')}"


def kind_numbers(encoder: Encoder, names: set[str]) -> dict[str, Tensor]:
    """Give the numbers of all layers' kinds, each once, by their names in the weights file."""
    numbers: dict[str, Tensor] = {}
    for layer in range(encoder.config.num_hidden_layers):
        found = dict(LayerKind(encoder, layer).named_buffers(prefix="kind"))
        numbers |= {weight_of(encoder, layer, name): tensor for name, tensor in found.items() if name in names}
    return numbers


def own_name(name: str) -> str:
    """Give the name of a layer's weight or number as it is fed."""
    return name.removeprefix(OWN[0])
