"""The runner that computes with torch: `workers.step.Runner` over a decoder, its KV memory and the sampler.

Owns everything that takes memory. One call of `step` is one forward pass of all rows, decodes and prefill chunks alike, then
one call of the sampler and one transfer of ids.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final, Self

import torch

from workers.adjust import Draw
from workers.attention import Attention, Heights, KVCache, choose_heights
from workers.load_gguf import load_gguf
from workers.load_safetensors import load_safetensors
from workers.logprobs import token_logprobs
from workers.model import Decoder
from workers.plan import plan_memory
from workers.protocol import EngineInfo, TokenLogprob
from workers.quant import choose_precision, supports_bf16
from workers.sampler import sample
from workers.step import RowResult, ScheduledSeq
from workers.tokenizer_files import generation_eos_ids
from workers.vector_math import settle_vector_math
from workers.weights import Weights

__all__ = ["TorchRunner"]

_COMPUTATION: Final = "2"
"""Raise it with every change here that can change a bit of an answer."""

_LOGPROB_ROWS: Final = 64
"""Prompt rows whose logits are in memory at a time."""


class TorchRunner:
    """Answers do not depend on batch, chunking or cache hits in precision int8; elsewhere up to rounding."""

    def __init__(
        self,
        weights: Weights,
        *,
        name: str,
        eos_ids: frozenset[int],
        num_tokens: int | None = None,
        precision: str = "auto",
        kv_bytes: int,
        threads: int = 1,
        max_num_seqs: int,
        max_model_len: int | None = None,
        block_size: int,
    ) -> None:
        """`num_tokens`: ids that the tokenizer knows, if not all of the embedding's (`workers.model.Decoder`). `threads` sets
        torch's for the whole process. Raises ModelError, or ValueError for sizes that do not fit.
        """
        torch.set_num_threads(threads)
        settle_vector_math()
        config = weights.config
        num_tokens = min(num_tokens or config.vocab_size, config.vocab_size)
        chosen = choose_precision(precision)
        kv_fp32 = chosen == "fp32" or not supports_bf16()
        plan = plan_memory(
            config, chosen, kv_bytes=kv_bytes, block_size=block_size, max_model_len=max_model_len, kv_fp32=kv_fp32
        )
        dtype = torch.float32 if kv_fp32 else torch.bfloat16
        heights = Heights()
        if chosen == "int8":  # elsewhere the linear layers' bits depend on the batch anyway
            heights = choose_heights(
                num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=dtype
            )
        self._decoder = Decoder(weights, chosen, plan.max_model_len, num_tokens)
        self._cache = KVCache(
            num_layers=config.num_layers,
            num_blocks=plan.num_blocks + 1,  # the last one is for the engine's probe
            block_size=block_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
        )
        self._attention = Attention(
            num_heads=config.num_heads,
            cache=self._cache,
            heights=heights,
            windows=config.windows,
            scale=config.attention_scale,
        )
        self.info = EngineInfo(
            model=name,
            revision="",
            precision=chosen,
            numerics=_numerics(f"{weights.digest} {config}", num_tokens, chosen, dtype, heights, threads),
            block_size=block_size,
            num_blocks=plan.num_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=plan.max_model_len,
            vocab_size=config.vocab_size,
            eos_ids=sorted(eos_ids),
            weights_bytes=plan.weights_bytes,
            kv_bytes_per_token=plan.kv_bytes_per_token,
        )

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        num_tokens: int | None = None,
        precision: str = "auto",
        kv_bytes: int,
        threads: int = 1,
        max_num_seqs: int,
        max_model_len: int | None = None,
        block_size: int,
    ) -> Self:
        """From a .gguf file or a Hugging Face folder."""
        runner = cls(
            load_safetensors(path) if path.is_dir() else load_gguf(path),
            name=path.name if path.is_dir() else path.stem,
            eos_ids=generation_eos_ids(path),
            num_tokens=num_tokens,
            precision=precision,
            kv_bytes=kv_bytes,
            threads=threads,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
        )
        _give_back_free_memory()
        return runner

    @torch.inference_mode()
    def step(self, batch: Sequence[ScheduledSeq]) -> list[RowResult]:
        hidden = self._decoder.forward(
            torch.tensor([token for seq in batch for token in seq.tokens]),
            torch.tensor([p for seq in batch for p in range(seq.start, seq.start + len(seq.tokens))]),
            cache=self._cache,
            attention=self._attention,
            plan=self._attention.plan(batch),
        )
        ends = list(accumulate(len(seq.tokens) for seq in batch))
        results = [RowResult()] * len(batch)
        sampling = [number for number, seq in enumerate(batch) if seq.sample]
        if sampling:
            logits = self._decoder.logits(hidden[[ends[number] - 1 for number in sampling]])
            for number, result in zip(sampling, self._choose(logits, [batch[n] for n in sampling]), strict=True):
                results[number] = result
        for number, (seq, end) in enumerate(zip(batch, ends, strict=True)):
            if seq.num_prompt_logprobs:
                told = self._prompt_logprobs(seq, hidden[end - len(seq.tokens) : end])
                results[number] = results[number]._replace(prompt_logprobs=told)
        return results

    def _choose(self, logits: torch.Tensor, seqs: Sequence[ScheduledSeq]) -> list[RowResult]:
        draws = [Draw(seq.sampling, seq.start + len(seq.tokens), seq.ids, seq.prompt_len, seq.allowed) for seq in seqs]
        tokens = sample(logits, draws, self.info.eos_ids)
        results = [RowResult(token) for token in tokens]
        asking = [row for row, seq in enumerate(seqs) if seq.sampling.logprobs is not None]
        if asking:
            chosen = [tokens[row] for row in asking]
            counts = [seqs[row].sampling.logprobs or 0 for row in asking]
            for row, logprob in zip(asking, token_logprobs(logits[asking], chosen, counts), strict=True):
                results[row] = RowResult(tokens[row], logprob)
        return results

    def _prompt_logprobs(self, seq: ScheduledSeq, hidden: torch.Tensor) -> list[TokenLogprob]:
        """`hidden`: of the sequence's rows. Logits of all rows of a chunk at once could take 300 MB."""
        told: list[TokenLogprob] = []
        for first in range(0, seq.num_prompt_logprobs, _LOGPROB_ROWS):
            rows = hidden[first : min(first + _LOGPROB_ROWS, seq.num_prompt_logprobs)]
            follow = seq.start + first + 1
            targets = seq.ids[follow : follow + len(rows)]
            counts = [seq.sampling.prompt_logprobs or 0] * len(rows)
            told += token_logprobs(self._decoder.logits(rows), targets, counts)
        return told


def _give_back_free_memory() -> None:
    """glibc keeps what loading freed, 100 MB of 550 for the default model. Other C libraries have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _numerics(model: str, num_tokens: int, precision: str, dtype: torch.dtype, heights: Heights, threads: int) -> str:
    """Everything that decides the bits of an answer. Conservative: machines that differ here may still agree."""
    features = sorted(name for name, has in torch.cpu.get_capabilities().items() if has is True)
    parts = (
        _COMPUTATION,
        model,
        precision,
        f"tiles {heights.single} {heights.most} {dtype}",
        f"tokens {num_tokens}",
        # Products of int8 are exact and all else gives whole rows to a thread; other products share their sums out.
        "any threads" if precision == "int8" else f"threads {threads}",
        f"torch {torch.__version__}",
        torch.backends.cpu.get_cpu_capability(),
        *features,
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
