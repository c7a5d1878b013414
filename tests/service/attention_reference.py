"""What the contract says of attention, written as it reads: loops over whole tensors, nothing else."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from attencode import Attention, Tokens

Axis = list[list[int]]


def expected(whole: NDArray[np.float64], asked: Attention, tokens: Tokens) -> tuple[NDArray[np.float64], Axis, Axis]:
    """Compute what is asked from all weights (layers, heads, tokens, tokens), before top_k.

    Returns:
        The weights, and for each row and each column the tokens that it stands for.
    """
    layers = [layer % len(whole) for layer in asked.layers] or list(range(len(whole)))
    heads = [head % whole.shape[1] for head in asked.heads] or list(range(whole.shape[1]))
    reduce: dict[Any, Any] = {"mean": np.mean, "max": np.max}
    weights = whole[layers][:, heads]
    if asked.rollout:
        flow = np.eye(whole.shape[-1])
        for layer in np.argsort(layers):
            one = reduce[asked.reduce_heads or "mean"](weights[layer], axis=0)
            flow = (one / one.sum(axis=1, keepdims=True) + np.eye(len(one))) / 2 @ flow
        weights = flow
    else:
        if asked.reduce_heads:
            weights = reduce[asked.reduce_heads](weights, axis=1)
        if asked.reduce_layers:
            weights = reduce[asked.reduce_layers](weights, axis=0)
    kept = [token for token in range(len(tokens)) if asked.special_tokens == "keep" or not tokens.special[token]]
    weights = weights[..., kept, :][..., kept]
    if asked.special_tokens == "renormalize":
        weights = weights / weights.sum(axis=-1, keepdims=True)
    groups = _words(tokens, kept) if asked.words else [[token] for token in kept]
    places = [[kept.index(token) for token in group] for group in groups]
    weights = np.stack([weights[..., place].sum(axis=-1) for place in places], axis=-1)
    weights = np.stack([weights[..., place, :].mean(axis=-2) for place in places], axis=-2)
    rows, columns = _chosen(asked.queries, groups, tokens), _chosen(asked.keys, groups, tokens)
    return weights[..., rows, :][..., columns], [groups[row] for row in rows], [groups[column] for column in columns]


def _words(tokens: Tokens, kept: list[int]) -> Axis:
    groups: Axis = []
    for token in kept:
        last = groups[-1][-1] if groups else None
        same = last is not None and tokens.words[last] == tokens.words[token] >= 0
        if same and last is not None and tokens.sequences[last] == tokens.sequences[token]:
            groups[-1].append(token)
        else:
            groups.append([token])
    return groups


def _chosen(places: Any, groups: Axis, tokens: Tokens) -> list[int]:
    named = {token % len(tokens) for token in places.tokens}
    for start, end, sequence in places.spans:
        for token, (first, last) in enumerate(tokens.char_spans):
            inside = not tokens.special[token] and tokens.sequences[token] == sequence
            if inside and max(first, start) < min(last, end):
                named.add(token)
    everything = not places.tokens and not places.spans
    return [place for place, group in enumerate(groups) if everything or named & set(group)]
