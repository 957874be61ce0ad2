"""A tokenizer and a chat template that need no files: 4 bytes of UTF-8 are one id.

For simulated replicas and tests. Prompts get about as many ids as a real vocabulary would give them, a longer talk starts
with the ids of the shorter one, and a character may lie across two ids, as it may in real ones.

The last id of a text is filled up with zero bytes, and decoding leaves zero bytes out: a text comes back, its NUL
characters apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from router.escape import Escaper
from router.prompt_errors import PromptError
from router.wire import unpack_ids

__all__ = ["CHAT_TEMPLATE", "EOS_ID", "TrivialTokenizer"]

_ID_BYTES: Final = 4

EOS_ID: Final = 0xFFFF_FFFF
"""No text contains it: UTF-8 has no byte 0xFF."""

_EOS_TEXT: Final = b"<|im_end|>"

CHAT_TEMPLATE: Final = """\
{%- if tools %}{{ '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.content is string %}{{ message.content }}
    {%- else %}{% for part in message.content or [] %}{{ part.text }}{% endfor %}{% endif %}
    {%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


class TrivialTokenizer:
    is_native: bool = True
    vocab_size: int = 1 << 32
    max_id: int = EOS_ID
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset({EOS_ID})
    special_ids: frozenset[int] = frozenset({EOS_ID})
    added_tokens: Mapping[str, bool] = MappingProxyType({})
    cuts: tuple[str, ...] = ()

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise PromptError("the prompt has half of a surrogate pair, which is no character") from error
        return unpack_ids(data + bytes(-len(data) % _ID_BYTES)).tobytes()

    def encode_escaped(self, rendered: str, escaper: Escaper) -> bytes:
        """No text has a special id here, marked or not."""
        return self.encode(rendered, add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        eos = b"" if skip_special_tokens else _EOS_TEXT
        try:
            data = b"".join(eos if id_ == EOS_ID else id_.to_bytes(_ID_BYTES, "little") for id_ in ids)
        except (OverflowError, AttributeError) as error:
            raise PromptError("token ids must be integers from 0 to 2**32 - 1") from error
        return data.replace(b"\0", b"").decode(errors="replace")

    def token_bytes(self, id_: int) -> bytes:
        return _EOS_TEXT if id_ == EOS_ID else id_.to_bytes(_ID_BYTES, "little").replace(b"\0", b"")
