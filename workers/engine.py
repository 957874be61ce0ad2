"""The engine: take requests, schedule a step, run it, emit what it made.

Does no I/O and keeps no thread: whoever owns it calls `step` again and again (`workers.engine_process` in a process of its
own, `workers.client` in the event loop for the simulator). Everything that computes is behind `workers.step.Runner`.

What must hold: each submitted request gets outputs of which exactly one, the last, has a finish reason, unless it was
aborted. A step that fails ends its own sequences and nobody else's.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Final

from router.blocks import root_name
from router.wire import unpack_ids
from workers.block_pool import BlockPool
from workers.ending import ending
from workers.grammar_queue import BUILD_LOOK_S, Compiler, GrammarError, GrammarQueue
from workers.protocol import EngineInfo, FinishReason, Output, Sampling, StepReport, Submit
from workers.rates import Rates
from workers.refusal import refusal
from workers.scheduler import Scheduler, Slice
from workers.sequence import Seq
from workers.step import RowResult, Runner, ScheduledSeq

__all__ = ["DEFAULT_TOKEN_BUDGET", "Engine"]

_logger = logging.getLogger(__name__)

DEFAULT_TOKEN_BUDGET: Final = 512
"""Tokens a step on a CPU: a longer chunk makes prefill no faster there, and those who generate wait for it."""

_FAILURES_TO_GIVE_UP: Final = 2
"""Steps in a row. One failure may be a request's own doing; the next step with other sequences, or a probe, tells."""

_PROBE_AFTER_S: Final = 30.0
"""So long without a step nobody knows whether one would succeed."""


class Engine:
    def __init__(
        self,
        runner: Runner,
        *,
        info: EngineInfo | None = None,
        grammars: Compiler | None = None,
        token_budget: int = DEFAULT_TOKEN_BUDGET,
        prefills_per_step: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`info` is the runner's unless it is served under another name, which then is in the names of its blocks.

        `grammars`: without it, requests that come with a grammar are rejected.
        """
        self.info = info or runner.info
        self.clock = clock
        self.failed: str | None = None
        """Why no further step can succeed; set by `step`."""
        self._runner = runner
        self._pool = BlockPool(
            self.info.num_blocks,
            self.info.block_size,
            lambda salt: root_name(model=self.info.model, revision=self.info.revision, salt=salt),
        )
        self._scheduler = Scheduler(
            self._pool,
            max_num_seqs=self.info.max_num_seqs,
            token_budget=token_budget,
            prefills_per_step=prefills_per_step,
            prefill_s=self._prefill_s,
        )
        self._token_budget = token_budget
        self._eos_ids = frozenset(self.info.eos_ids)
        self._max_len = min(self.info.max_model_len, self.info.num_blocks * self.info.block_size)
        self._rates = Rates(token_budget)
        self._last_step = self.clock()
        self._seqs: dict[int, Seq] = {}
        self._grammars = GrammarQueue(grammars)
        self._num_submitted = 0
        self._num_generated = 0
        self._failures = 0
        self._outputs: list[Output] = []
        self._admitted: list[str] = []

    def warm_up(self) -> None:
        """Run a full prefill step and a decode step before the first request, so that the first one finds everything loaded
        and everybody who asks finds a measured rate. Writes into blocks that nobody has yet.
        """
        num_tokens = min(self._token_budget, self._max_len - 1)
        prefill = self._own_row(num_tokens, start=0)
        decode = self._own_row(1, start=num_tokens)
        self._runner.step([self._own_row(1, start=0)])  # the very first one loads code, and measures nothing
        for row in (prefill, decode):
            started = self.clock()
            self._runner.step([row])
            self._rates.observe(num_tokens if row is prefill else 0, self.clock() - started)

    def _own_row(self, num_tokens: int, start: int, first_block: int = 0) -> ScheduledSeq:
        """One that no request asks for."""
        num_blocks = -(-(start + num_tokens) // self.info.block_size)
        return ScheduledSeq(
            rid=-1,
            tokens=[0] * num_tokens,
            start=start,
            block_table=range(first_block, first_block + num_blocks),
            sample=True,
            sampling=Sampling(max_tokens=1, temperature=0.0),
            prompt_len=start + num_tokens,
            ids=array("I"),  # nothing is asked for that looks at them
        )

    def submit(self, submit: Submit) -> None:
        assert submit.rid not in self._seqs, "a rid is used once"
        prompt, resumed = unpack_ids(submit.prompt), unpack_ids(submit.resume)
        why_not = refusal(prompt, resumed, submit.sampling, self.info, self._max_len)
        grammar = submit.sampling.grammar
        if grammar is not None and not self._grammars.available:
            why_not = "this replica cannot hold an answer to a grammar"
        if why_not is not None:
            self._reject(submit.rid, why_not)
            return
        self._num_submitted += 1
        seq = Seq(
            rid=submit.rid,
            root=self._pool.root(submit.salt),
            ids=prompt + resumed,
            prompt_len=len(prompt),
            sampling=submit.sampling,
            order=(submit.priority, self._num_submitted),
            arrived_at=self.clock(),
            patience=submit.patience,
            interrupts=submit.interrupts,
        )
        self._seqs[seq.rid] = seq
        if grammar is None:
            self._scheduler.add(seq)
        else:
            self._grammars.add(seq, grammar)
        self._admitted.append(submit.request_id)

    def abort(self, rid: int) -> None:
        """Forget a request. One that has ended meanwhile, or never was, is no error: the two may cross on their way."""
        seq = self._seqs.get(rid)
        if seq is not None:
            self._forget(seq)

    def has_work(self) -> bool:
        """Whether `step` would do or tell something."""
        return self._scheduler.has_work() or bool(self._outputs) or self._failures > 0

    def idle_s(self, most_s: float) -> float:
        """How long to wait for something else before the next `step`, at most so long."""
        if self.has_work():
            return 0.0
        return min(most_s, BUILD_LOOK_S) if self._grammars else most_s

    def step(self) -> StepReport:
        """Run what is due, if anything. Afterwards look at `failed`."""
        for seq, error in self._grammars.take():
            if error is None:
                self._scheduler.add(seq)
            else:
                del self._seqs[seq.rid]
                self._reject(seq.rid, error)
        slices = self._scheduler.schedule()
        if slices:
            self._run(slices)
        elif self._failures or self.clock() - self._last_step >= _PROBE_AFTER_S:
            self._probe()
        return self.report()

    def report(self) -> StepReport:
        """All that happened since the last report, and how things stand."""
        outputs, self._outputs = self._outputs, []
        admitted, self._admitted = self._admitted, []
        delta = self._pool.take_delta()
        scheduler = self._scheduler
        return StepReport(
            outputs=outputs,
            stored=delta.stored,
            removed=delta.removed,
            admitted=admitted,
            waiting=scheduler.num_waiting + len(self._grammars),
            waiting_uncached_tokens=scheduler.num_pending_tokens() + self._grammars.num_tokens,
            running=scheduler.num_running,
            kv_used_blocks=self._pool.num_used,
            kv_cached_blocks=self._pool.num_cached,
            failing=self._failures > 0,
            step_limit_s=self._rates.step_limit_s,
            prefill_tok_s=self._rates.prefill_tok_s,
            step_ms=self._rates.step_ms,
            prompt_tokens_total=scheduler.num_prompt_tokens,
            cached_tokens_total=scheduler.num_cached_tokens,
            generated_tokens_total=self._num_generated,
            preemptions_total=scheduler.num_preemptions,
        )

    def _prefill_s(self, num_tokens: int) -> float:
        rate = self._rates.prefill_tok_s
        return num_tokens / rate if rate else 0.0

    def _run(self, slices: list[Slice]) -> None:
        slices, batch = self._rows(slices)
        if not batch:
            return
        started = self.clock()
        results = self._compute(batch)
        if isinstance(results, str):
            for piece in slices:
                self._end_in_error(piece.seq, results)
            return
        prefill_tokens = sum(piece.num_tokens for piece in slices if piece.seq.prefilling)
        self._rates.observe(prefill_tokens, self._last_step - started)
        for piece, result in zip(slices, results, strict=True):
            seq = piece.seq
            if seq.began_at is None:
                seq.began_at = started
            if result.prompt_logprobs:  # a preempted one computes again what it has
                seq.prompt_logprobs += result.prompt_logprobs[len(seq.prompt_logprobs) - seq.num_computed :]
            self._scheduler.advance(piece)
            if not seq.num_uncomputed:
                try:
                    self._emit(seq, result)
                except GrammarError as error:
                    self._end_by_grammar(seq, error)

    def _compute(self, batch: Sequence[ScheduledSeq]) -> list[RowResult] | str:
        """What came of it, or why nothing did. Two failures in a row are the end."""
        try:
            results = self._runner.step(batch)
        except Exception as error:  # whatever a model can raise, out of memory included
            _logger.exception("a step of %d sequences failed", len(batch))
            message = f"{type(error).__name__}: {error}"
            self._failures += 1
            if self._failures == _FAILURES_TO_GIVE_UP:
                self.failed = f"{self._failures} steps in a row failed, the last one with {message}"
            return message
        finally:
            self._last_step = self.clock()
        self._failures = 0
        return results

    def _probe(self) -> None:
        """One token, in the block that the runner has beyond those of the pool: nobody sees it, and it measures nothing."""
        self._compute([self._own_row(1, start=0, first_block=self.info.num_blocks)])

    def _rows(self, slices: list[Slice]) -> tuple[list[Slice], list[ScheduledSeq]]:
        """What to run, and for which slices: not for those whose grammar does not know what may come next."""
        batch: list[ScheduledSeq] = []
        able: list[Slice] = []
        for piece in slices:
            try:
                batch.append(self._row(piece))
                able.append(piece)
            except GrammarError as error:
                self._end_by_grammar(piece.seq, error)
        return able, batch

    def _row(self, piece: Slice) -> ScheduledSeq:
        seq = piece.seq
        start = seq.num_computed
        end = start + piece.num_tokens
        sample = end == len(seq.ids)
        num_blocks = -(-end // self.info.block_size)
        return ScheduledSeq(
            rid=seq.rid,
            tokens=seq.ids[start:end],
            start=start,
            # Decode rows need all of it: a copy of a thousand numbers for each token would be most of a simulated step.
            block_table=seq.table if num_blocks == len(seq.table) else seq.table[:num_blocks],
            sample=sample,
            sampling=seq.sampling,
            prompt_len=seq.prompt_len,
            ids=seq.ids,
            allowed=seq.grammar.allowed() if sample and seq.grammar is not None else None,
        )

    def _emit(self, seq: Seq, result: RowResult) -> None:
        token = result.token
        assert token is not None, "a runner samples where it is told to"
        is_first = not seq.told
        seq.told = True
        seq.ids.append(token)
        self._num_generated += 1
        reason = self._finish_reason(seq, token)
        if reason is not None:
            self._forget(seq)
        elif seq.grammar is not None:
            seq.grammar.advance([token])
        self._outputs.append(
            Output(
                rid=seq.rid,
                ids=[token],
                logprobs=[result.logprob] if result.logprob is not None else [],
                prompt_logprobs=seq.prompt_logprobs if is_first else [],
                cached_tokens=seq.cached_tokens or 0,
                prefill_s=self._last_step - seq.began_at if is_first and seq.began_at is not None else None,
                finish_reason=reason,
            )
        )

    def _finish_reason(self, seq: Seq, token: int) -> FinishReason | None:
        return ending(
            token,
            num_generated=len(seq.ids) - seq.prompt_len,
            num_ids=len(seq.ids),
            sampling=seq.sampling,
            eos_ids=self._eos_ids,
            max_len=self._max_len,
        )

    def _reject(self, rid: int, message: str) -> None:
        self._outputs.append(Output(rid=rid, ids=[], finish_reason="rejected", message=message))

    def _end_in_error(self, seq: Seq, message: str) -> None:
        self._forget(seq)  # blocks that were sealed stay readable: earlier steps have filled them
        self._outputs.append(
            Output(rid=seq.rid, ids=[], cached_tokens=seq.cached_tokens or 0, finish_reason="error", message=message)
        )

    def _end_by_grammar(self, seq: Seq, error: GrammarError) -> None:
        """It turned out too complex on its way: the request's own doing, and it would fail on any other replica too."""
        self._forget(seq)
        self._reject(seq.rid, f"the grammar failed: {error}")

    def _forget(self, seq: Seq) -> None:
        del self._seqs[seq.rid]
        if seq in self._grammars:
            self._grammars.remove(seq)
        else:
            self._scheduler.remove(seq)
