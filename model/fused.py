"""Fused: an encoder in the operators that ONNX Runtime's CUDA provider has single kernels for.

The weights of a loaded `Encoder`, in float16 or float32. Its graph holds one `Attention` a layer, whose three
projections are one product, and behind a post-norm sublayer one `SkipLayerNormalization`; ONNX Runtime's own
optimizer finds no attention in our graphs, so the operators are written here by name. Each has its meaning in
torch beside it, which is what the tracing runs.

What float16 (largest number 65504, eleven bits) cannot hold stays in float32: everything after the last layer,
and in pre-norm encoders (T5) the sum that runs through all layers, the norms of it, and the second feed-forward
product, whose values reach the ten thousands (as transformers' `_keep_in_fp32_modules`).
Padding must be on the right, as the service pads. May import: attention, config, encoder, masks, norms, torch.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from model.attention import MultiHeadAttention, fuse_projections, merge_heads, scaled_dot_product_attention, split_heads
from model.encoder import Encoder, EncoderLayer, EncoderOutput, FeedForward
from model.masks import additive, padding_mask

# Widths of a head that the kernel without a score matrix takes; others fall back to one that would read the
# mask's second part as something else (onnxruntime, contrib_ops/cuda/bert: has_memory_efficient_attention and
# the unfused softmax), so those get their padding as an additive bias.
_HEAD_DIM_STEP = 8
_HEAD_DIM_MAX = 1024


class FusedEncoder(nn.Module):
    """An encoder's numbers behind the same call as `Encoder`, without hidden states and attention weights."""

    def __init__(self, encoder: Encoder, dtype: torch.dtype) -> None:
        """Copy the weights.

        Args:
            encoder: Whose numbers these are; it is not changed.
            dtype: Of weights and arithmetic, float16 or float32.
        """
        super().__init__()
        self.config = config = encoder.config
        assert config.fusible, f"no fused operators compute what {config.family} computes"
        self.dtype = dtype
        self.embeddings = copy.deepcopy(encoder.embeddings).to(dtype)
        self.position_bias = copy.deepcopy(encoder.position_bias)
        kind = _PreNormLayer if config.pre_norm else _PostNormLayer
        names = [encoder.layer_name(number) for number in range(config.num_hidden_layers)]
        own = list(dict.fromkeys(names))
        self.layers = nn.ModuleList(kind(encoder.layer(names.index(name)), config.hidden_act, dtype) for name in own)
        self.order = [own.index(name) for name in names]
        self.final_norm = copy.deepcopy(encoder.final_norm)
        self.by_length = (
            self.position_bias is None and config.head_dim % _HEAD_DIM_STEP == 0 and config.head_dim <= _HEAD_DIM_MAX
        )
        self.eval().requires_grad_(requires_grad=False)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        *,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> EncoderOutput:
        """Encode a batch that is padded on the right.

        Shape:
            input_ids, attention_mask (1 = token, 0 = padding), token_type_ids: (batch, seq) int64
            returns: last_hidden_state (batch, seq, hidden) float32, nothing else
        """
        assert not output_hidden_states, "a fused encoder has no hidden states"
        assert not output_attentions, "a fused encoder has no attention weights"
        hidden = self.embeddings(input_ids, token_type_ids)  # (batch, seq, hidden)
        if self.config.pre_norm:
            hidden = hidden.float()
        mask = _length_mask(attention_mask) if self.by_length else self._bias_mask(attention_mask)
        for place in self.order:
            hidden = self.layers[place](hidden, mask)
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)
        return EncoderOutput(hidden.float(), (), ())

    def _bias_mask(self, attention_mask: Tensor) -> Tensor:
        """Give padding and position bias in one, (batch, heads, query, key) of the arithmetic's dtype."""
        seq = attention_mask.shape[1]
        bias = additive(padding_mask(attention_mask), self.dtype)  # (batch, 1, 1, key)
        if self.position_bias is not None:
            position_bias: Tensor = self.position_bias(seq, seq)
            return position_bias.to(self.dtype) + bias  # (batch, heads, query, key)
        return bias.expand(-1, -1, seq, -1)  # (batch, 1, query, key)


class _PostNormLayer(nn.Module):
    """LayerNorm(x + Sublayer(x)) twice, in seven operators."""

    def __init__(self, layer: EncoderLayer, hidden_act: str, dtype: torch.dtype) -> None:
        """Copy a layer's weights."""
        super().__init__()
        self.attention = _Attention(layer.attention, dtype)
        self.attention_norm = copy.deepcopy(layer.attention_norm).to(dtype)
        self.feed_forward = _FeedForward(layer.feed_forward, hidden_act, dtype, dtype)
        self.feed_forward_norm = copy.deepcopy(layer.feed_forward_norm).to(dtype)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Transform (batch, seq, hidden)."""
        hidden = _add_and_norm(self.attention(hidden, mask), hidden, self.attention.output, self.attention_norm)
        inner = self.feed_forward(hidden)
        return _add_and_norm(inner, hidden, self.feed_forward.output, self.feed_forward_norm)


class _PreNormLayer(nn.Module):
    """x + Sublayer(Norm(x)) twice; x, the norms and the last product in float32."""

    def __init__(self, layer: EncoderLayer, hidden_act: str, dtype: torch.dtype) -> None:
        """Copy a layer's weights."""
        super().__init__()
        self.dtype = dtype
        self.attention = _Attention(layer.attention, dtype)
        self.attention_norm = copy.deepcopy(layer.attention_norm)
        self.feed_forward = _FeedForward(layer.feed_forward, hidden_act, dtype, torch.float32)
        self.feed_forward_norm = copy.deepcopy(layer.feed_forward_norm)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Transform (batch, seq, hidden) float32."""
        context = self.attention(self.attention_norm(hidden).to(self.dtype), mask)
        hidden = hidden + self.attention.output(context).float()
        inner = self.feed_forward(self.feed_forward_norm(hidden).to(self.dtype))
        output: Tensor = self.feed_forward.output(inner.float())
        return hidden + output


class _Attention(nn.Module):
    """Multi-head attention up to the merged heads; `output` is the projection that is still to come."""

    def __init__(self, attention: MultiHeadAttention, dtype: torch.dtype) -> None:
        """Stack the three projections; one without a bias gets zeros."""
        super().__init__()
        projection = fuse_projections(attention).to(dtype)
        zeros = torch.zeros(projection.out_features, dtype=dtype)
        self.weight = projection.weight
        self.bias = nn.Parameter(zeros if projection.bias is None else projection.bias.detach())
        self.output = copy.deepcopy(attention.output).to(dtype)
        self.num_heads = attention.num_heads
        self.scale = attention.scale

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Attend: (batch, seq, hidden) -> (batch, seq, heads * head_dim)."""
        return _apply(_AttentionOperator, hidden, self.weight.t(), self.bias, mask, self.num_heads, self.scale)


class _FeedForward(nn.Module):
    """A feed-forward block up to the activation; `output` is the product that is still to come."""

    def __init__(self, block: FeedForward, hidden_act: str, dtype: torch.dtype, output_dtype: torch.dtype) -> None:
        """Copy the weights, those of `output` in a dtype of their own; `hidden_act` is the activation's name."""
        super().__init__()
        self.intermediate = copy.deepcopy(block.intermediate).to(dtype)
        self.gate = copy.deepcopy(block.gate).to(dtype) if block.gate is not None else None
        self.output = copy.deepcopy(block.output).to(output_dtype)
        self.activation = block.activation
        self.tanh = {"gelu": False, "gelu_new": True}.get(hidden_act)  # the two that have a kernel with the bias

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, seq, hidden) to (batch, seq, intermediate)."""
        if self.tanh is not None and self.intermediate.bias is not None:
            product = functional.linear(hidden, self.intermediate.weight)
            inner = _apply(_BiasGeluOperator, product, self.intermediate.bias, self.tanh)
        else:
            inner = self.activation(self.intermediate(hidden))
        return inner if self.gate is None else inner * self.gate(hidden)


def _add_and_norm(inner: Tensor, residual: Tensor, output: nn.Linear, norm: nn.Module) -> Tensor:
    """Compute Norm(residual + inner W + b) over (batch, seq, hidden)."""
    if not isinstance(norm, nn.LayerNorm) or output.bias is None:
        normed: Tensor = norm(residual + output(inner))
        return normed
    product = functional.linear(inner, output.weight)
    return _apply(_SkipLayerNormOperator, product, residual, norm.weight, norm.bias, output.bias, norm.eps)


def _length_mask(attention_mask: Tensor) -> Tensor:
    """Say where each row's tokens end, in the one layout that the kernel without a score matrix takes.

    Shape:
        attention_mask: (batch, seq) int64
        returns: (3 * batch + 2,) int32: the lengths, then twice where each padded row starts, and where the
            last one ends (onnxruntime's Attention, `mask_index`)
    """
    batch, seq = attention_mask.shape
    starts = torch.arange(batch + 1, device=attention_mask.device) * seq
    return torch.cat([attention_mask.sum(dim=1), starts, starts]).to(torch.int32)


# ---------------------------------------------------------------- the operators: their names, and their meaning


def _apply(operator: type[Function], *values: Any) -> Tensor:
    """Run an operator, or record it while a graph is traced."""
    output: Tensor = operator.apply(*values)  # type: ignore[no-untyped-call]
    return output


class _AttentionOperator(Function):
    """com.microsoft.Attention: projection, softmax(Q K^T * scale + bias) V, heads merged."""

    @staticmethod
    def forward(
        _ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, num_heads: int, scale: float
    ) -> Tensor:
        """Attend, in float32 between the projection and the result.

        Shape:
            hidden: (batch, seq, hidden); weight: (hidden, 3 * heads * head_dim); bias: (3 * heads * head_dim,)
            mask: lengths as of `_length_mask`, or additive, (batch, heads or 1, query, key)
            returns: (batch, seq, heads * head_dim)
        """
        batch, seq, _ = hidden.shape
        parts = (hidden @ weight + bias).float().chunk(3, dim=-1)
        query, key, value = (split_heads(part, num_heads) for part in parts)
        short = (torch.arange(seq) < mask[:batch, None])[:, None, None, :] if mask.dim() == 1 else mask.float()
        return merge_heads(scaled_dot_product_attention(query, key, value, short, scale=scale)[0]).to(hidden.dtype)

    @staticmethod
    def symbolic(g: Any, hidden: Any, weight: Any, bias: Any, mask: Any, num_heads: int, scale: float) -> Any:
        """Write the operator; an additive mask is its sixth input, lengths are its fourth."""
        inputs = [hidden, weight, bias]
        if mask.type().dim() == 1:
            inputs.append(mask)
        else:
            absent = g.op("prim::Constant")
            absent.setType(torch._C.OptionalType.ofTensor())  # noqa: SLF001 - how the exporter writes an input left out
            inputs += [absent, absent, mask]
        widths = [weight.type().sizes()[1] // 3] * 3
        context = g.op(
            "com.microsoft::Attention", *inputs, num_heads_i=num_heads, scale_f=scale, qkv_hidden_sizes_i=widths
        )
        context.setType(hidden.type().with_sizes([None, None, widths[0]]))
        return context


class _SkipLayerNormOperator(Function):
    """com.microsoft.SkipLayerNormalization: LayerNorm(x + skip + bias)."""

    @staticmethod
    def forward(
        _ctx: Any, product: Tensor, skip: Tensor, weight: Tensor, beta: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        """Add and normalize (batch, seq, hidden), sums in float32."""
        total = product.float() + skip.float() + bias.float()
        return functional.layer_norm(total, weight.shape, weight.float(), beta.float(), eps).to(product.dtype)

    @staticmethod
    def symbolic(g: Any, product: Any, skip: Any, weight: Any, beta: Any, bias: Any, eps: float) -> Any:
        """Write the operator."""
        normed = g.op("com.microsoft::SkipLayerNormalization", product, skip, weight, beta, bias, epsilon_f=eps)
        normed.setType(skip.type())
        return normed


class _BiasGeluOperator(Function):
    """com.microsoft.BiasGelu, exact, or FastGelu, by tanh: gelu(x + bias)."""

    @staticmethod
    def forward(_ctx: Any, product: Tensor, bias: Tensor, tanh: bool) -> Tensor:
        """Activate (batch, seq, intermediate)."""
        return functional.gelu((product + bias).float(), approximate="tanh" if tanh else "none").to(product.dtype)

    @staticmethod
    def symbolic(g: Any, product: Any, bias: Any, tanh: bool) -> Any:
        """Write the operator."""
        activated = g.op("com.microsoft::FastGelu" if tanh else "com.microsoft::BiasGelu", product, bias)
        activated.setType(product.type())
        return activated
