"""An engine that says what a test wants, at once: one id an output, with made-up logprobs, resumed or from the start."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from router.wire import unpack_ids
from workers.client import Generation
from workers.ending import ending
from workers.protocol import EngineInfo, Output, StepReport, Submit, TokenLogprob

__all__ = ["ScriptedEngine", "made_up_logprob"]


def made_up_logprob(id_: int, position: int, num_top: int) -> TokenLogprob:
    """A pure function of its place, so that it is the same wherever it is told. Among the likeliest is one that cannot be."""
    logprob = -((id_ * 31 + position * 17) % 997) / 64
    top = [(id_, logprob), (id_ ^ 1, logprob - 1.5), (1, float("-inf"))]
    return TokenLogprob(logprob, top[:num_top])


class ScriptedEngine:
    """`script`: the ids that follow a prompt, to be cut where the request says it ends. An `EngineClient`."""

    def __init__(self, info: EngineInfo, script: Callable[[Submit], Sequence[int]]) -> None:
        self._info = info
        self._script = script
        self.submitted: list[Submit] = []
        self.num_open = 0

    @property
    def alive(self) -> bool:
        return True

    @property
    def last_tick(self) -> float:
        return time.monotonic()

    async def start(self) -> EngineInfo:
        return self._info

    async def stop(self) -> None:
        pass

    def listen(self, callback: Callable[[StepReport], None]) -> None:
        pass

    def submit(self, submit: Submit) -> Generation:
        self.submitted.append(submit)
        self.num_open += 1
        generation = Generation(submit, self._leave)
        for output in self._outputs(submit):
            generation._put(output)
        return generation

    def _leave(self, _: Generation) -> None:
        self.num_open -= 1

    def _outputs(self, submit: Submit) -> list[Output]:
        outputs: list[Output] = []
        sampling, prompt = submit.sampling, unpack_ids(submit.prompt)
        resumed = unpack_ids(submit.resume).tolist()
        script = list(self._script(submit))
        assert script[: len(resumed)] == resumed, "what is resumed is what was said"
        for num_generated in range(len(resumed) + 1, len(script) + 1):
            id_, place = script[num_generated - 1], len(prompt) + num_generated
            reason = ending(
                id_,
                num_generated=num_generated,
                num_ids=place,
                sampling=sampling,
                eos_ids=self._info.eos_ids,
                max_len=self._info.max_model_len,
            )
            logprobs = [made_up_logprob(id_, place, sampling.logprobs)] if sampling.logprobs is not None else []
            outputs.append(Output(rid=submit.rid, ids=[id_], logprobs=logprobs, finish_reason=reason))
            if reason is not None:
                break
        assert outputs
        assert outputs[-1].finish_reason is not None, "the script is too short"
        if (num_top := sampling.prompt_logprobs) is not None:
            told = [made_up_logprob(id_, place, num_top) for place, id_ in enumerate(prompt) if place]
            outputs[0] = Output(
                rid=submit.rid,
                ids=outputs[0].ids,
                logprobs=outputs[0].logprobs,
                prompt_logprobs=told,
                finish_reason=outputs[0].finish_reason,
            )
        return outputs
