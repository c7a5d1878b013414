"""Served: the models that a server answers for, each an artifact under a name.

A name's model may be replaced by a newer version while the server runs: whoever looks it up gets the present
one, and what the old one still holds ends there or begins anew.
May import: artifact, admission, tokenization, engine, outputs, pairing, runner, placement, batching, config, request,
metrics, errors.
"""

import asyncio
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version

from service import metrics
from service.admission import QueueLimits, not_accepting
from service.artifact import Artifact
from service.batching import BatchLimits
from service.config import ServiceConfig
from service.engine import Engine
from service.errors import InvalidRequest, Lost
from service.outputs import Selection, select
from service.pairing import Pairing
from service.placement import Placement
from service.request import DecoderInfo, ModelInfo, Outputs
from service.runner import Runner
from service.tokenization import TextTokenizer

_MOST_PLACES_KEPT = 64  # tokens and spans that a request names; of 65,536 each it would be 17 MB for every one kept


class ServedModel:
    """One version of one model: its artifact's description, its tokenizer and its engine."""

    def __init__(
        self,
        config: ServiceConfig,
        name: str,
        artifact: Artifact,
        runner: Runner,
        *,
        placement: Placement,
        threads: int,
    ) -> None:
        """Wire the parts; nothing runs yet.

        Args:
            config: The server's settings.
            name: What requests call the model by.
            artifact: Its description; the folder must hold the tokenizer.
            runner: Runs its batches.
            placement: Where the runner runs them.
            threads: Threads that one batch has.

        Raises:
            ArtifactError: The tokenizer cannot be loaded.
        """
        self.name = name
        self.artifact = artifact
        self.placement = placement
        self.runner = runner
        self.tokenizer = TextTokenizer(artifact)
        self.pairing = Pairing(artifact, self.tokenizer) if artifact.decoder else None
        self._select = lru_cache(maxsize=256)(partial(select, artifact=artifact))  # callers repeat themselves
        limits = BatchLimits(
            max_batch_tokens=_max_batch_tokens(config, placement, threads),
            max_batch_size=config.max_batch_size,
            max_queue_delay_ms=config.max_queue_delay_ms,
            pad_to_multiple_of=config.pad_to_multiple_of,
            few_shapes=placement.provider == "openvino",
            max_length=artifact.max_tokens,
        )
        self.engine = Engine(
            runner,
            limits,
            model=name,
            pad_token_id=artifact.pad_token_id,
            queue=QueueLimits(config.max_queue_size, config.max_queue_tokens),
        )
        self._info = replace(_model_info(config, name, artifact, placement), decoder=_decoder_info(self.pairing))

    def select(self, outputs: Outputs) -> Selection:
        """Resolve what a request asks for.

        Raises:
            InvalidRequest: The model does not have it.
        """
        if outputs.places > _MOST_PLACES_KEPT:
            return select(outputs, self.artifact)
        return self._select(outputs)

    def info(self, names: SequenceOf[str]) -> ModelInfo:
        """Describe the model, beside the names of all that are served."""
        return replace(self._info, models=list(names), replicas=self.runner.replicas())


class Models:
    """The served models by name, in an order of which the first is the default."""

    def __init__(self, names: SequenceOf[str]) -> None:
        """Store the names; `put` brings the models."""
        self.names = tuple(names)
        self.stopping = asyncio.Event()
        self.changed = asyncio.Event()  # for the one who tells others whether models are ready
        self.lost: asyncio.Future[None] = asyncio.Future()  # fails when the models are gone for good
        self._served: dict[str, ServedModel] = {}
        self._ready: dict[str, bool] = dict.fromkeys(names, False)
        for name in names:
            metrics.prepare_model(name)

    def find(self, name: str) -> ServedModel:
        """Give the present version of a model; of the default for an empty name.

        Raises:
            InvalidRequest: No such model is served.
            Unavailable: It is not there yet, or the server is stopping.
        """
        if name and name not in self.names:
            raise InvalidRequest(f"model {name!r} is not served here; served: {', '.join(self.names)}")
        served = self._served.get(name or self.names[0])
        if served is None:
            raise not_accepting()
        served.engine.check_accepting()
        return served

    def put(self, served: ServedModel) -> None:
        """Take in a model whose engine is started; the version that it replaces gives back what waits."""
        before = self._served.get(served.name)
        self._served[served.name] = served
        facts = {"digest": served.artifact.digest, "version": _version()}
        where = {"provider": served.placement.provider, "precision": served.placement.precision}
        metrics.record_model(served.name, facts | where)
        if before is not None:
            before.engine.outdate()

    def set_ready(self, name: str, *, ready: bool) -> None:
        """Say whether a model's batches can run at present."""
        ready = ready and not self.lost.done()
        if self._ready[name] != ready:
            self._ready[name] = ready
            metrics.record_ready(name, ready=ready)
            self.changed.set()

    def is_ready(self, name: str) -> bool:
        """Tell whether a model's batches can run at present."""
        return self._ready[name] and not self.stopping.is_set()

    def lose(self, error: Lost) -> None:
        """Note that the models are gone for good: not ready, what waits is given back, no more is taken in."""
        if not self.lost.done():
            self.lost.set_exception(error)
        for name in self.names:
            self.set_ready(name, ready=False)
        for served in self._served.values():
            served.engine.give_up()

    def all(self) -> list[ServedModel]:
        """List the present versions, the default's first."""
        return [self._served[name] for name in self.names if name in self._served]

    def refuse(self) -> None:
        """Take no more requests in; the accepted ones go on."""
        self.stopping.set()
        self.changed.set()
        for name, served in self._served.items():
            served.engine.refuse()
            metrics.record_ready(name, ready=False)


def _model_info(config: ServiceConfig, name: str, artifact: Artifact, placement: Placement) -> ModelInfo:
    return ModelInfo(
        model=name,
        model_digest=artifact.digest,
        model_id=artifact.model_id,
        revision=artifact.revision or "",
        family=artifact.family,
        hidden_size=artifact.hidden_size,
        num_hidden_layers=artifact.num_hidden_layers,
        num_attention_heads=artifact.num_attention_heads,
        vocab_size=artifact.vocab_size,
        num_parameters=artifact.num_parameters,
        max_tokens=artifact.max_tokens,
        default_pooling=artifact.pooling,
        default_normalize=artifact.normalize,
        default_prompt_name=artifact.default_prompt_name or "",
        prompts=dict(artifact.prompts),
        provider=placement.provider,
        precision=placement.precision,
        provider_reason=placement.reason,
        max_inputs=config.max_inputs,
        max_message_bytes=config.max_message_bytes,
        server_version=_version(),
        models=[name],
        pooled_size=artifact.pooled_size(artifact.pooling),
        replicas=[],
        max_answer_bytes=config.max_answer_bytes,
        max_request_bytes=config.max_request_bytes,
    )


def _decoder_info(pairing: Pairing | None) -> DecoderInfo | None:
    if pairing is None:
        return None
    return DecoderInfo(pairing.decoder.num_layers, pairing.decoder.num_heads, pairing.max_tokens)


def _max_batch_tokens(config: ServiceConfig, placement: Placement, threads: int) -> int:
    """Give the token budget of a batch.

    256 tokens a thread: on two cores, with a batch on each, 512 brought bulk clients 6 % more, but 64 callers of short
    texts 11 % less. A GPU wants many more (read, not measured).
    """
    if config.max_batch_tokens != "auto":
        return config.max_batch_tokens
    return 16_384 if placement.provider == "cuda" else 256 * threads


def _version() -> str:
    try:
        return version("attencode")
    except PackageNotFoundError:
        return "unknown"
