"""Fleet: the replicas of one model as a gateway sees them, and the runner that sends them batches.

Encoding is idempotent, so a batch whose replica died runs again on another one. A batch that dies with its
replica again and again is taken apart: its rows run one by one, and only the row that kills is failed.
Replicas may change to another artifact under way; a batch runs on a replica of its own artifact or not at all.
May import: replicas, served, watchdog, inference, runner, batching, busy, artifact, decoder, config, request, metrics,
errors, ray.
"""

import asyncio
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError

from service import metrics
from service.artifact import ARTIFACT_FILE, Artifact, open_description
from service.batching import Batch
from service.busy import BusyShare
from service.config import ServiceConfig
from service.decoder import TARGET_TOKENIZER
from service.errors import ClusterLost, DeadlineExceeded, InternalFault, Outdated, Unavailable
from service.inference import BatchResult, NotFinite, join
from service.replicas import (
    ENCODER,
    Answer,
    Backlog,
    Description,
    Identity,
    application_name,
    handle_on_this_loop,
    method,
)
from service.request import ReplicaInfo
from service.served import Models, ServedModel
from service.watchdog import patience

_LOG = logging.getLogger(__name__)

_ROLL_CALL_S = 1.0
_ROLL_CALL_REPLICA_S = 0.05  # more for each replica: at 0.4 ms of this process's core each, 1 % of it in all
_ROLL_CALL_TIMEOUT_S = 5.0
_ADOPTION_TIMEOUT_S = 60.0
_MOST_FAILURES = 4  # of roll calls, before the cluster itself is asked whether it is still there
_PAUSE_S = 0.05  # before a batch is sent again, so that Serve's router hears of a death first
_MOST_VERSION_MISSES = 20
_BUSY_SHARE = 0.6  # of a core, from which a gateway sends no more small batches beside others
# By gRPC a call takes half the time and half the work of an actor call, which puts large arrays into the object
# store; with several MB the copies of gRPC cost more than that saves.
_BY_GRPC_BYTES = 2 * 2**20


class _Lost(Exception):
    """A batch's replica died, or hung, as often as a batch may be tried."""


class Fleet:
    """The replicas of one model: who is there, what they serve, and the version of the model that fits them."""

    def __init__(self, config: ServiceConfig, name: str, models: Models) -> None:
        """Store what is needed; `watch` begins to look."""
        self.config = config
        self.name = name
        self.suspects = asyncio.Lock()  # batches that may be deadly run one at a time
        self._models = models
        self._id = uuid4().hex
        self._handle: Any = None
        self._run: dict[bool, Any] = {}  # the handle's method, by whether large arrays go through the object store
        self._present: dict[str, Identity] = {}
        self._serving: Counter[str] = Counter()  # how many of them serve each artifact
        self._served: ServedModel | None = None
        self._streams = 1  # of each replica
        self._wake: Callable[[], None] = lambda: None
        self._look = asyncio.Event()
        self._failures = 0  # roll calls in succession

    @property
    def backlog(self) -> Backlog:
        """What waits here."""
        return Backlog(self._id, self._served.engine.waiting_tokens if self._served else 0)

    def count(self, digest: str) -> int:
        """Count the replicas that serve an artifact."""
        return self._serving[digest]

    def replicas(self) -> list[ReplicaInfo]:
        """List the replicas that answered the last roll call."""
        return [
            ReplicaInfo(identity.id, identity.node, identity.device, "RUNNING", identity.digest)
            for identity in sorted(self._present.values(), key=lambda identity: (identity.node, identity.id))
        ]

    def look_again(self) -> None:
        """Call the roll soon: something has happened."""
        self._look.set()

    def heard(self, identity: Identity) -> None:
        """Take note of a replica that has just spoken."""
        if identity.id not in self._present:
            self._present[identity.id] = identity
            self._serving[identity.digest] += 1

    async def send(self, digest: str, batch: Batch, *, large: bool) -> Answer:
        """Send a batch to a replica of Serve's choice; large arrays go through the object store."""
        response = self._run[large].remote(digest, batch, self.backlog)
        try:
            answer: Answer = await response
        except asyncio.CancelledError:
            response.cancel()  # by actor call the replica would go on
            raise
        return answer

    async def watch(self) -> None:
        """Call the roll for ever, and follow what the replicas serve; ends only with the cluster."""
        while not self._models.lost.done():
            self._look.clear()
            pause_s = max(_ROLL_CALL_S, _ROLL_CALL_REPLICA_S * len(self._present))
            try:
                async with asyncio.timeout(_ROLL_CALL_TIMEOUT_S):
                    await self._call_the_roll()
                if digest := self._new_version():
                    async with asyncio.timeout(_ADOPTION_TIMEOUT_S):
                        await self._adopt(digest)
                self._failures = 0
            except Exception as error:  # noqa: BLE001 - Ray raises its own kinds; whatever it is may pass
                await self._note_failure(error)
            await asyncio.sleep(pause_s / 10)
            try:
                async with asyncio.timeout(pause_s):
                    await self._look.wait()
            except TimeoutError:
                pass

    async def _note_failure(self, error: Exception) -> None:
        """Wait for better times, unless the whole cluster is gone."""
        self._failures += 1
        if self._failures == 1:
            _LOG.warning("the replicas of %s cannot be reached: %s", self.name, str(error) or type(error).__name__)
        if not isinstance(error, TimeoutError) or self._failures >= _MOST_FAILURES:
            self._update({})  # else one of them hangs, and the others are as they were
        if self._failures % _MOST_FAILURES == 0 and not self._models.lost.done():
            try:
                async with asyncio.timeout(_ROLL_CALL_TIMEOUT_S):
                    await asyncio.to_thread(serve.status)
            except Exception as trouble:  # noqa: BLE001 - as above
                lost = ClusterLost(
                    f"the Ray cluster does not answer any more: {str(trouble) or type(trouble).__name__}"
                )
                self._models.lost.set_exception(lost)

    async def _call_the_roll(self) -> None:
        if self._handle is None:
            await asyncio.to_thread(serve.get_deployment_handle, ENCODER, application_name(self.name))  # is it there?
            handle = handle_on_this_loop(self.name)
            self._run = {large: method(handle, "run", large=large) for large in (False, True)}
            self._handle = handle
        call = method(self._handle, "identify", large=False).broadcast("identify", self.backlog)
        answers = await call.results_async(return_exceptions=True)
        present = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not present:
            raise Unavailable("none of them answers")
        self._update({identity.id: identity for identity, _ in present})
        for identity, in_flight in present:
            metrics.record_replica_in_flight(self.name, identity.id, identity.node, in_flight)

    def _update(self, present: dict[str, Identity]) -> None:
        before, self._present = self._present, present
        self._serving = Counter(identity.digest for identity in present.values())
        for identity in before.values():
            if identity.id not in present:
                metrics.record_replica_gone(self.name, identity.id, identity.node)
        metrics.record_replicas(self.name, len(present), self._streams)
        self._models.set_ready(self.name, ready=bool(present) and self._served is not None)
        if present.keys() - before.keys():
            self._wake()

    def _new_version(self) -> str:
        """Name the artifact that this gateway should change to: what most replicas serve; empty to stay.

        A majority, so that during a change at most every other batch meets a replica of the wrong version.
        """
        if not self._present:
            return ""
        digest, count = self._serving.most_common(1)[0]
        present = "" if self._served is None else self._served.artifact.digest
        return digest if digest != present and (not present or 2 * count > len(self._present)) else ""

    async def _adopt(self, digest: str) -> None:
        """Serve another artifact from now on; its description comes from a replica."""
        while True:
            description: Description = await method(self._handle, "describe", large=True).remote()
            if description.identity.digest == digest:
                break
            await asyncio.sleep(_PAUSE_S)
        served = await asyncio.to_thread(self._assemble, description)
        await served.engine.start()
        self._served = served
        self._models.put(served)
        self._models.set_ready(self.name, ready=bool(self._present))
        _LOG.info("%s is served by artifact %s", self.name, digest)

    def _assemble(self, description: Description) -> ServedModel:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / ARTIFACT_FILE).write_bytes(description.artifact)
            (folder / "tokenizer.json").write_bytes(description.tokenizer)
            if description.target_tokenizer is not None:
                (folder / TARGET_TOKENIZER).write_bytes(description.target_tokenizer)
            artifact = open_description(folder)
            self._streams = description.streams
            batches = description.settings.replica_batches * description.streams
            runner = RayRunner(self, artifact, batches=batches)
            placement, threads = description.placement, description.threads
            return ServedModel(self.config, self.name, artifact, runner, placement=placement, threads=threads)

    def listen(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when there are more replicas than before."""
        self._wake = wake


class RayRunner:
    """Runs the batches of one version of a model on the replicas that serve it."""

    def __init__(self, fleet: Fleet, artifact: Artifact, *, batches: int) -> None:
        """Store the parts; a replica gets so many `batches` at once."""
        self._fleet = fleet
        self._artifact = artifact
        self._digest = artifact.digest
        self._batches = batches
        self._attempts = fleet.config.batch_attempts
        self._timeout_s = fleet.config.batch_timeout_s
        self._busy = BusyShare()

    @property
    def capacity(self) -> int:
        """So many batches for each replica of this version; 0 while there is none."""
        return self._batches * self._fleet.count(self._digest)

    @property
    def eager(self) -> bool:
        """Whether this process has time for batches of a few rows."""
        return self._busy.share() <= _BUSY_SHARE

    def replicas(self) -> list[ReplicaInfo]:
        """List the model's replicas."""
        return self._fleet.replicas()

    async def start(self, wake: Callable[[], None]) -> None:
        """Ask to be told of more replicas."""
        self._fleet.listen(wake)

    async def stop(self) -> None:
        """Do nothing: the replicas are not ours."""

    async def run(
        self,
        batch: Batch,
        *,
        alone: bool = False,  # noqa: ARG002 - no device is near
        deadline_s: float | None = None,
        wanted: Callable[[int], bool] = lambda _row: True,
    ) -> BatchResult:
        """Run a batch on a replica, and again on others while replicas die; at most until the deadline."""
        try:
            async with asyncio.timeout(None if deadline_s is None else deadline_s - time.monotonic()):
                return await self._run(batch, wanted)
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed while the request waited for a replica, or ran") from error

    async def _run(self, batch: Batch, wanted: Callable[[int], bool]) -> BatchResult:
        rows = len(batch.lengths)
        try:
            attempts = self._attempts if rows == 1 else max(1, self._attempts - 1)
            return _result(await self._send(batch, attempts, lambda: any(map(wanted, range(rows)))))
        except _Lost:
            if rows == 1:
                raise
        _LOG.warning("a batch of %d inputs was lost with its replica each time; its inputs run one by one", rows)
        async with self._fleet.suspects:
            return await self._run_rows(batch, wanted)

    async def _run_rows(self, batch: Batch, wanted: Callable[[int], bool]) -> BatchResult:
        """Run each row that is wanted alone, so that only a deadly one is failed."""
        parts: list[tuple[list[int], BatchResult]] = []
        failed: dict[int, Exception] = {}
        for row in range(len(batch.lengths)):
            try:
                parts.append(([row], _result(await self._send(batch.part([row]), 1, partial(wanted, row)))))
            except DeadlineExceeded as error:
                failed[row] = error
            except _Lost as error:
                failed[row] = _fault(error)
        joined = join(batch, parts)
        return replace(joined, failed={**joined.failed, **failed})

    async def _send(self, batch: Batch, attempts: int, wanted: Callable[[], bool]) -> Answer:
        """Send a batch until a replica of its version answers.

        Raises:
            DeadlineExceeded: Nobody waits for it any more.
            _Lost: Its replica died or hung so many times.
            Outdated: The replicas serve another version now.
        """
        lost = misses = 0
        large = max(answer_bytes(batch, self._artifact), 4 * batch.input_ids.nbytes) > _BY_GRPC_BYTES
        while True:
            if not wanted():
                raise DeadlineExceeded("the deadline passed, or the caller left, before the model had run")
            try:
                async with asyncio.timeout(self._timeout_s * patience(batch.input_ids.size)):
                    answer = await self._fleet.send(self._digest, batch, large=large)
            except DeploymentUnavailableError:  # no replica was reached
                self._fleet.look_again()
                await asyncio.sleep(_PAUSE_S)
                continue
            except Exception as error:  # what the model itself raises comes in the answer
                hung = isinstance(error, TimeoutError)
                if not hung or self.capacity:  # else it waited for a replica to come
                    lost += 1
                    metrics.record_retry(self._fleet.name, "hung" if hung else "died")
                    _LOG.warning("a batch was lost (%s): %s", "no answer" if hung else type(error).__name__, error)
                self._fleet.look_again()
                if lost >= attempts:
                    raise _Lost from error
                await asyncio.sleep(_PAUSE_S)
                continue
            self._fleet.heard(answer.identity)
            if answer.arrays is not None or answer.error:
                self._count(answer, batch)
                return answer
            misses += 1
            metrics.record_retry(self._fleet.name, "other_version")
            self._fleet.look_again()
            if misses >= _MOST_VERSION_MISSES or not self._fleet.count(self._digest):
                await asyncio.sleep(_PAUSE_S)
                raise Outdated

    def _count(self, answer: Answer, batch: Batch) -> None:
        identity = answer.identity
        metrics.record_replica_batch(
            self._fleet.name,
            identity.id,
            identity.node,
            tokens=batch.input_ids.size,
            seconds=answer.inference_s,
            in_flight=answer.in_flight,
            failed=bool(answer.error),
        )


def answer_bytes(batch: Batch, artifact: Artifact) -> int:
    """Count the bytes of a batch's outputs: float32 with padding, and what is wanted of rows' attention."""
    rows, seq = batch.input_ids.shape
    numbers = 0
    for name in batch.outputs:
        if name.startswith("pooled_"):
            numbers += rows * artifact.pooled_size(name.removeprefix("pooled_"))
        else:
            numbers += len(batch.rows_of(name)) * seq * artifact.hidden_size
    return 4 * numbers + sum(look.bytes for look in batch.looks if look is not None)


def _result(answer: Answer) -> BatchResult:
    where = f"replica {answer.identity.id} on {answer.identity.node}"
    if answer.error:
        raise RuntimeError(f"{where}: {answer.error}")
    failed = {row: NotFinite(f"{where}: {reason}") for row, reason in answer.failed.items()}
    arrays, replica = answer.arrays or {}, answer.identity.id
    return BatchResult(arrays, answer.inference_s, answer.looked, failed, replica, answer.again)


def _fault(error: Exception) -> InternalFault:
    """Make the error of a row that takes its replica down, and log it under its id."""
    fault = InternalFault()
    told = {"error_id": fault.id}
    _LOG.error("an input was lost with its replica each time that it ran (%s)", fault.id, exc_info=error, extra=told)
    return fault
