"""What can go wrong between a chat and its token ids.

    ValueError
    ├── PromptError      this prompt cannot be rendered, encoded or decoded: the client's mistake, a 400
    └── TokenizerError   a model's tokenizer or template files are unusable: its replica cannot be served

Messages name what is wrong and never quote the prompt.
"""

from __future__ import annotations

__all__ = ["PromptError", "TokenizerError"]


class PromptError(ValueError):
    """`code` and `param` are OpenAI's: what kind of mistake, and in which field."""

    def __init__(self, message: str, *, code: str = "invalid_prompt", param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class TokenizerError(ValueError):
    pass
