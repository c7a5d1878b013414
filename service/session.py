"""Session: an artifact on an execution provider. Arrays in, arrays out.

ONNX Runtime is the one runtime; what differs is the provider. There is no silent fallback from one to another.
May import: artifact, batching, cross, placement, reduce, openvino, cuda, errors, onnxruntime, numpy.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from threading import Lock
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from service import cuda, openvino
from service.artifact import LONG_TOKENS, WEIGHTS_FILE, Artifact
from service.batching import HIDDEN_STATES, Batch
from service.cross import padded_targets, runs
from service.errors import ProviderError
from service.placement import Placement
from service.reduce import Look, Reducer

_LOG = logging.getLogger(__name__)

Graph = Literal["encode", "long", "attention", "decoder"]

_WARM_UP_LENGTHS = (16, 32, 64, 128)  # on the ladder of padded lengths
_WARM_UP_TOKENS = 256


class Session:
    """The graphs of an artifact on one provider; all but `encode` are loaded when they are first needed.

    Runs may come from several threads at once. With several streams the plain graph is loaded twice: side by side,
    batches run on a few threads each, which costs no waiting of threads for one another; a batch that is alone runs
    on all of them, which is soonest done.
    """

    def __init__(self, artifact: Artifact, placement: Placement, *, threads: int, streams: int = 1) -> None:
        """Store what is needed; `load` does the work.

        Args:
            artifact: The model.
            placement: Where it runs.
            threads: Threads of all streams together.
            streams: Runs of the plain graph that go on side by side.
        """
        self.artifact = artifact
        self.placement = placement
        self._threads = threads
        self.streams = 1 if placement.provider == "cuda" else streams  # there runs share one session
        self._sessions: dict[tuple[str, int], Any] = {}  # by graph and streams
        self._mapped: dict[int, Mapping[str, NDArray[np.float32]]] = {}
        self._lock = Lock()
        self._exact: Self | None = None

    def in_float32(self) -> Self | None:
        """Give a session of the same model and provider in float32, made at the first call; None where this is one.

        It takes float32's weights in memory beside the others.
        """
        if self.placement.precision == "float32":
            return None
        with self._lock:
            if self._exact is None:
                _LOG.warning(
                    "an input of %s overflows %s and is computed again in float32, as will be others like it; it costs "
                    "time, and memory for a second copy of the weights. With many such inputs give --precision float32",
                    *(self.artifact.model_id, self.placement.device),
                )
                exact = replace(self.placement, precision="float32")
                self._exact = type(self)(self.artifact, exact, threads=self._threads)
                self._exact.share(self._mapped)
            return self._exact

    def share(self, mapped: dict[int, Mapping[str, NDArray[np.float32]]]) -> None:
        """Take over what another session of the artifact has mapped, and maps: the file's numbers are float32 for both.

        Args:
            mapped: Layer -> its own weights by name.
        """
        self._mapped = mapped

    def load(self, graph: Graph = "encode") -> None:
        """Load a graph if it is not loaded yet.

        Raises:
            ProviderError: The provider refuses it.
        """
        if graph != "long":
            self._loaded(graph, 1)
        if graph in ("encode", "long"):
            self._loaded(graph, self.streams)

    def warm_up(self) -> None:
        """Run the plain graph on common shapes, so that the first caller waits for no compilation."""
        for longest in _WARM_UP_LENGTHS:
            length = min(longest, self.artifact.max_tokens)
            for rows, alone in product((1, max(1, _WARM_UP_TOKENS // length)), (False, True)):
                self.check(self.run(self.trial(rows, length), alone=alone))

    def try_out(self) -> None:
        """Run a tiny batch.

        Raises:
            ProviderError: What it yields is not finite.
        """
        self.check(self.run(self.trial(1, 2)))

    def trial(self, rows: int, length: int) -> Batch:
        """Give a batch to try the plain graph with."""
        ids = np.full((rows, length), self.artifact.vocab_size - 1, dtype=np.int64)
        ones, zeros = np.ones_like(ids), np.zeros_like(ids)
        return Batch((f"pooled_{self.artifact.pooling}",), (length,) * rows, ids, ones, zeros, ones)

    def check(self, arrays: Mapping[str, NDArray[np.float32]]) -> None:
        """Refuse what a trial yielded unless all of it is finite.

        Raises:
            ProviderError: Some of it is not.
        """
        if not all(np.isfinite(array).all() for array in arrays.values()):
            raise ProviderError(f"{self.placement.provider} computes NaN or infinity for a trial batch")

    def run(self, batch: Batch, *, alone: bool = False) -> dict[str, NDArray[np.float32]]:
        """Run one batch.

        Args:
            batch: The batch.
            alone: Whether no other batch runs beside it.

        Returns:
            The batch's outputs by name, and `hidden_states`, which `look` takes, or `last_hidden_state`, which `align`
            takes, float32, padding included.
        """
        graph = self.artifact.graph_for(batch.input_ids.shape[1])
        streams = 1 if alone and graph == "encode" else self.streams  # a long text leaves room for those that come
        session = self._sessions.get((graph, streams)) or self._loaded(graph, streams)
        feeds = {name: getattr(batch, name) for name in self.artifact.inputs}
        states = {name for name in batch.outputs if name.startswith(HIDDEN_STATES)}
        names = [name for name in batch.outputs if name not in states]
        if states or batch.state_rows.size:
            names.append("hidden_states")
        if padded_targets(batch.looks) and "last_hidden_state" not in names:
            names.append("last_hidden_state")
        arrays = dict(zip(names, session.run(names, feeds, *self._run_options(graph)), strict=True))
        for name in states:  # copies, so that an answer does not keep all layers in memory
            arrays[name] = arrays["hidden_states"][int(name.removeprefix(HIDDEN_STATES))].copy()
        return arrays

    def look(
        self, batch: Batch, hidden_states: NDArray[np.float32], *, alone: bool = False
    ) -> dict[int, Mapping[str, NDArray[Any]]]:
        """Compute the attention that is wanted of a batch's rows, each row by itself.

        Args:
            batch: The batch.
            hidden_states: What `run` gave for it: (layers + 1, state_rows, seq, hidden).
            alone: Whether no other batch runs beside it.

        Returns:
            Row -> arrays by the names of `InputResult`.
        """
        looks = {row: look for row, look in enumerate(batch.looks) if isinstance(look, Look)}
        reducers = {row: Reducer(look) for row, look in looks.items()}
        session = self._loaded("attention", 1 if alone else self.streams)
        places = {int(row): place for place, row in enumerate(batch.state_rows)}
        for layer in sorted({layer for look in looks.values() for layer in look.layers}):
            weights = self._weights(layer)
            for row, reducer in reducers.items():
                look = looks[row]
                if layer not in look.layers:
                    continue
                states = hidden_states[layer, places[row], None, : look.length]
                feeds = {"hidden_state": states, "attention_mask": np.ones((1, look.length), np.int64)}
                names = look.outputs(layer)
                outputs = dict(zip(names, session.run(names, {**feeds, **weights}), strict=True))
                reducer.add(layer, {name: array[0] for name, array in outputs.items()})
        return {row: reducer.arrays() for row, reducer in reducers.items()}

    def align(
        self, batch: Batch, last_hidden_state: NDArray[np.float32], *, alone: bool = False
    ) -> dict[int, Mapping[str, NDArray[Any]]]:
        """Compute the cross-attention that is wanted of a batch's targets to its rows.

        Args:
            batch: The batch.
            last_hidden_state: What `run` gave for it: (batch, seq, hidden).
            alone: Whether no other batch runs beside it.

        Returns:
            Row -> arrays by the names of `InputResult`.
        """
        decoder = self.artifact.decoder
        assert decoder is not None, "a target came to a model that has no decoder"
        session = self._loaded("decoder", 1 if alone else self.streams)
        found: dict[int, Mapping[str, NDArray[Any]]] = {}
        for part in runs(batch.looks, layers=decoder.num_layers, heads=decoder.num_heads):
            found |= part.reduced(session.run(part.outputs, part.feeds(last_hidden_state, batch.attention_mask)))
        return found

    def _weights(self, layer: int) -> Mapping[str, NDArray[np.float32]]:
        """Map a layer's own weights from the artifact."""
        if layer not in self._mapped:
            path = self.artifact.folder / WEIGHTS_FILE
            mapped = {
                name: np.memmap(path, np.float32, "r", place["offset"], tuple(place["shape"]))
                for name, place in self.artifact.attention_weights[layer].items()
            }
            self.artifact.check_unchanged(WEIGHTS_FILE)
            self._mapped[layer] = mapped
        return self._mapped[layer]

    def _loaded(self, graph: str, streams: int) -> Any:
        with self._lock:
            if (graph, streams) not in self._sessions:
                session = self._create(graph, streams)
                self.artifact.check_unchanged(f"{graph}.onnx", WEIGHTS_FILE)  # what was opened is what was verified
                self._sessions[graph, streams] = session
            return self._sessions[graph, streams]

    def _run_options(self, graph: str) -> tuple[Any, ...]:
        """Have a long text's run give its gigabyte of memory back at its end.

        Without ONNX Runtime's arena it would be more: of blocks of 25 MB the C library leaves holes that it cannot use.
        """
        if graph != "long" or self.placement.provider == "cuda":
            return ()
        import onnxruntime  # noqa: PLC0415

        options = onnxruntime.RunOptions()
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        return (options,)

    def _create(self, graph: str, streams: int) -> Any:
        import onnxruntime  # noqa: PLC0415

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = max(1, self._threads // streams)
        path = str(self.artifact.folder / f"{graph}.onnx")
        provider = self.placement.provider
        if graph in ("attention", "decoder"):  # short runs, in between others
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if graph == "long":  # rare runs, no two of one length
            options.enable_mem_pattern = False
            if provider == "openvino":
                _LOG.info(
                    "texts of more than %d tokens of %s run on ONNX Runtime's own provider in float32, whose memory is "
                    "given back after each",
                    *(LONG_TOKENS, self.artifact.model_id),
                )
        try:
            if provider == "openvino" and graph == "encode":
                return openvino.create(path, options, self.placement.precision, self._threads, streams)
            if provider == "cuda":
                return cuda.open_graph(self.artifact, graph, self.placement.precision, options)
            return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except ProviderError:
            raise
        except Exception as error:  # ONNX Runtime raises a kind of its own for each status
            raise ProviderError(f"{provider} cannot load {path}: {error}") from error
