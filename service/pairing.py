"""Pairing: what a model with a decoder makes of a request to align, before it waits and after it has run.

Sources are tokenized as for Encode, targets as the decoder takes them. May import: artifact, attention, cross, outputs,
reduce, request, spans, tokenization, errors.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from service.artifact import Artifact
from service.attention import Attention
from service.cross import Cross, shifted
from service.errors import AnswerTooLarge, InvalidRequest
from service.outputs import Row, check_places, check_spans, resolve, smaller_attention
from service.reduce import look_across
from service.request import AlignRequest, InputResult, PairResult, TextInput, TokenizeRequest
from service.spans import Uncovered, why_uncovered
from service.tokenization import Sequence, TextTokenizer


@dataclass(frozen=True, slots=True)
class Pair:
    """One pair's sequences, their tokens described."""

    source: Sequence
    target: Sequence


class Pairing:
    """One model's decoder and tokenizers, and what they make of pairs."""

    def __init__(self, artifact: Artifact, sources: TextTokenizer) -> None:
        """Load the targets' tokenizer.

        Raises:
            ArtifactError: It cannot be loaded.
        """
        assert artifact.decoder is not None, "pairs are for models with a decoder"
        self.decoder = artifact.decoder
        self._sources = sources
        self._targets = sources.for_targets()

    @property
    def max_tokens(self) -> int:
        """Longest target in tokens, special tokens included."""
        return self._targets.max_tokens

    def select(self, request: AlignRequest) -> Attention:
        """Resolve what is wanted of the cross-attention: layers and heads become numbers from 0.

        Raises:
            InvalidRequest: The decoder does not have it, or it has no meaning between two sequences.
        """
        asked = request.attention
        if asked.rollout:
            raise InvalidRequest(
                "rollout multiplies the attention of a sequence to itself through the layers, and cross-attention is "
                "that of a target to its source; leave rollout out, or reduce the layers with reduce_layers"
            )
        check_spans(asked)
        check_places(asked.places, len(request.pairs), "pairs")
        layers = resolve("decoder layer", asked.layers, self.decoder.num_layers)
        return replace(asked, layers=layers, heads=resolve("decoder head", asked.heads, self.decoder.num_heads))

    def tokenize(self, request: AlignRequest) -> list[Sequence]:
        """Tokenize all sources, then all targets, each in the order of the pairs.

        Raises:
            InvalidRequest: One is empty, too long with truncation off, or holds token ids that the model cannot take;
                a target is two texts; an unknown prompt.
        """
        for place, (_, target) in enumerate(request.pairs):
            if isinstance(target, TextInput) and target.pair is not None:
                raise InvalidRequest(
                    f"target: input {place} is two texts, and the decoder is given one; send each with its own source"
                )
        sides = ((self._sources, request.prompt_name, "source"), (self._targets, "", "target"))
        sequences = []
        for side, (tokenizer, prompt, name) in enumerate(sides):
            inputs = tuple(pair[side] for pair in request.pairs)
            asked = TokenizeRequest(inputs, request.model, request.truncation, prompt)
            try:
                sequences += tokenizer.tokenize(asked, describe=True)
            except InvalidRequest as error:
                raise InvalidRequest(f"{name}: {error}") from error
        return sequences

    def cross(self, request: AlignRequest, asked: Attention, place: int, pair: Pair) -> Cross:
        """Say what is wanted of a pair.

        Args:
            request: The request.
            asked: What `select` made of it.
            place: The pair's number in it.
            pair: Its sequences.

        Raises:
            InvalidRequest: A token or a span that the pair does not have.
        """
        source, target = pair.source.tokens, pair.target.tokens
        assert source is not None, "a source's tokens were not described"
        assert target is not None, "a target's tokens were not described"
        try:
            look = look_across(asked, target, source, data_type=request.data_type)
        except Uncovered as error:
            side, tokens = (pair.target, target) if error.name == "queries" else (pair.source, source)
            cut = side.original_length > side.length
            reason = why_uncovered(error, side.texts, tokens, truncated=cut)
            raise InvalidRequest(f"pair {place}: {reason}") from error
        except InvalidRequest as error:
            raise InvalidRequest(f"pair {place}: {error}") from error
        ids = shifted(pair.target.input_ids, self.decoder.start_token_id)
        return Cross(look, ids, self.decoder.pad_token_id)


def check_answer(asked: Attention, request: AlignRequest, size: int, most: int) -> None:
    """Refuse, before anything is computed, an answer that is larger than a message may be.

    Args:
        asked: What `Pairing.select` made of the request.
        request: The request.
        size: Bytes of the answer's tensors.
        most: Of a message.

    Raises:
        AnswerTooLarge: It would be larger; the message names the options that make it fit.
    """
    if size <= most:
        return
    advice = ["fewer pairs"] if len(request.pairs) > 1 else []
    advice += smaller_attention(asked)
    advice += ["data_type float16"] if request.data_type == "float32" else []
    raise AnswerTooLarge(
        f"the answer would hold {size:,} bytes of tensors, more than this server's {most:,} for one message; "
        f"ask for {' or '.join([*advice, 'shorter texts'])}",
        fits_stream=False,
    )


def paired(sequences: SequenceOf[Sequence]) -> list[Pair]:
    """Put sources and targets, as `Pairing.tokenize` gives them, together."""
    half = len(sequences) // 2
    return [Pair(source, target) for source, target in zip(sequences[:half], sequences[half:], strict=True)]


def result(pair: Pair, cross: Cross, row: Row) -> PairResult:
    """Give one pair's answer from its row."""
    look = cross.look
    return PairResult(
        source=_described(pair.source),
        target=_described(pair.target),
        attention=row["attention"],
        attention_keys=row.get("attention_keys"),
        query_axis=look.axis(look.queries),
        key_axis=look.axis(look.keys),
    )


def _described(sequence: Sequence) -> InputResult:
    return InputResult(sequence.length, sequence.original_length, sequence.tokens)
