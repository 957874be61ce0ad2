"""LiteLLM's SDK, by the provider that people use for such endpoints."""

import json
import os

import litellm

litellm.telemetry = False
base = {
    "model": f"openai/{os.environ['MODEL']}",
    "api_base": os.environ["OPENAI_BASE_URL"],
    "api_key": os.environ["OPENAI_API_KEY"],
    "messages": [{"role": "user", "content": "Say a few words."}],
    "max_tokens": 8,
    "seed": 1,
    "num_retries": 0,
}
whole = litellm.completion(**base)
text, usage = "", None
for chunk in litellm.completion(**base, stream=True, stream_options={"include_usage": True}):
    usage = getattr(chunk, "usage", None) or usage
    text += "".join(choice.delta.content or "" for choice in chunk.choices)
try:
    litellm.completion(**{**base, "model": "openai/no/such"})
except litellm.NotFoundError as error:
    missing = error.status_code
print(
    json.dumps(
        {
            "text": whole.choices[0].message.content,
            "usage": whole.usage.completion_tokens,
            "finish": whole.choices[0].finish_reason,
            "stream": {"text": text, "usage": usage.completion_tokens},
            "no_model": missing,
        }
    )
)
