"""Cross: what is wanted of a pair's cross-attention, and how the pairs of a batch go through the decoder.

A pair waits, runs and fails as any sequence does: its source is a row of a batch like others, and behind the encoder
the rows that have a target go through the decoder, whose inputs are made here. Pure numpy: no clock, no I/O.
May import: reduce.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.reduce import Look, Reducer

CROSS_ATTENTION = "cross_attention."
"""What names of the decoder's outputs begin with; the layer's number follows."""

# Of the weights that one run of the decoder yields, all layers together, which are there at one time; a single pair may
# have more.
_MOST_RUN_BYTES = 64 * 2**20
_WEIGHT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Cross:
    """What is wanted of one pair.

    Attributes:
        look: Rows are the target's tokens, columns the source's.
        decoder_input_ids: The target as the decoder takes it, shifted right behind the start token; (target,) int64.
        pad_token_id: Fills padded places of it.
    """

    look: Look
    decoder_input_ids: NDArray[np.int64]
    pad_token_id: int

    @property
    def bytes(self) -> int:
        """Bytes of all tensors that are answered."""
        return self.look.bytes

    @property
    def target_tokens(self) -> int:
        """Tokens of the target."""
        return len(self.decoder_input_ids)


Wanted = Look | Cross
"""What is wanted of one sequence's attention: to itself, or that of a target to it."""


def shifted(labels: NDArray[np.int64], start_token_id: int) -> NDArray[np.int64]:
    """Give what the decoder takes so that its row t is that of `labels[t]`: teacher forcing; both (target,) int64."""
    return np.concatenate((np.asarray([start_token_id], dtype=np.int64), labels[:-1]))


def costs(lengths: SequenceOf[int], wanted: SequenceOf[Wanted | None]) -> list[int]:
    """Count what each sequence costs a batch in tokens: its own, and those of its target.

    Pairs wait by what both sides cost together. Where of two pairs of one cost the one has a long source and the other
    a long target, a batch of them is padded to at most twice of it; a translation is about as long as its source.
    """
    if not wanted:
        return list(lengths)
    return [
        length + (item.target_tokens if isinstance(item, Cross) else 0)
        for length, item in zip(lengths, wanted, strict=True)
    ]


def padded_targets(wanted: SequenceOf[Wanted | None]) -> int:
    """Count the places of a batch's targets, padding included; 0 where no row has one."""
    targets = [item.target_tokens for item in wanted if isinstance(item, Cross)]
    return len(targets) * max(targets, default=0)


@dataclass(frozen=True, slots=True)
class Run:
    """Some pairs of a batch that go through the decoder together.

    Attributes:
        rows: Their rows in the batch, ascending.
        crosses: What is wanted of each.
    """

    rows: tuple[int, ...]
    crosses: tuple[Cross, ...]

    @property
    def outputs(self) -> list[str]:
        """Name the outputs that some pair wants, by ascending layer."""
        return [
            f"{CROSS_ATTENTION}{layer}"
            for layer in sorted({layer for cross in self.crosses for layer in cross.look.layers})
        ]

    def feeds(self, hidden_states: NDArray[np.float32], attention_mask: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Give the decoder's inputs.

        Shape:
            hidden_states: (batch, seq, hidden), the last of the encoder; attention_mask: (batch, seq)
            decoder_input_ids: (rows, target), padding on the right, which no token before it sees
            encoder_hidden_states: (rows, source, hidden); attention_mask: (rows, source)
        """
        rows, source = list(self.rows), max(cross.look.keys.length for cross in self.crosses)
        shape = (len(rows), max(cross.target_tokens for cross in self.crosses))
        ids = np.full(shape, self.crosses[0].pad_token_id, dtype=np.int64)
        for place, cross in enumerate(self.crosses):
            ids[place, : cross.target_tokens] = cross.decoder_input_ids
        return {
            "decoder_input_ids": ids,
            "encoder_hidden_states": np.ascontiguousarray(hidden_states[rows, :source]),
            "attention_mask": np.ascontiguousarray(attention_mask[rows, :source]),
        }

    def reduced(self, arrays: SequenceOf[NDArray[np.float32]]) -> dict[int, Mapping[str, NDArray[Any]]]:
        """Cut each pair's weights out of the outputs' (rows, heads, target, source), and reduce them as it is asked.

        Returns:
            Row of the batch -> arrays by the names of `InputResult`.
        """
        reducers = [Reducer(cross.look) for cross in self.crosses]
        for name, array in zip(self.outputs, arrays, strict=True):
            layer = int(name.removeprefix(CROSS_ATTENTION))
            for place, (cross, reducer) in enumerate(zip(self.crosses, reducers, strict=True)):
                look = cross.look
                part = array[place, :, : look.queries.length, : look.keys.length]
                reducer.add(layer, {"attention": part})
        return {row: reducer.arrays() for row, reducer in zip(self.rows, reducers, strict=True)}


def runs(wanted: SequenceOf[Wanted | None], *, layers: int, heads: int) -> Iterator[Run]:
    """Part a batch's pairs, in their order, so that what one run yields is not too much at one time.

    Args:
        wanted: What is wanted of each row.
        layers: Of the decoder, which yields the weights of all of them.
        heads: Of each layer.
    """
    rows: list[int] = []
    target = source = 0
    crosses = {row: item for row, item in enumerate(wanted) if isinstance(item, Cross)}
    for row, cross in crosses.items():
        target, source = max(target, cross.target_tokens), max(source, cross.look.keys.length)
        if rows and (len(rows) + 1) * target * source * layers * heads * _WEIGHT_BYTES > _MOST_RUN_BYTES:
            yield Run(tuple(rows), tuple(crosses[number] for number in rows))
            rows, target, source = [], cross.target_tokens, cross.look.keys.length
        rows.append(row)
    if rows:
        yield Run(tuple(rows), tuple(crosses[number] for number in rows))
