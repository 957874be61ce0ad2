"""The official Python SDK, whatever its major version: every call that an application makes, synchronous and not."""

import asyncio
import json
import os

import openai

MODEL = os.environ["MODEL"]
MESSAGES = [{"role": "user", "content": "Say a few words."}]
client = openai.OpenAI(max_retries=0)


def error_of(call):
    try:
        call()
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.code, error.param, bool(error.request_id)]
    raise AssertionError("no error")


def stream(**options):
    text, finish, usage = "", [], None
    for chunk in client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8, seed=1, stream=True, **options
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish += [choice.finish_reason] if choice.finish_reason else []
    return {"text": text, "finish": finish, "usage": usage and usage.completion_tokens}


async def concurrently():
    async with openai.AsyncOpenAI(max_retries=0) as client:
        calls = [client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, seed=n) for n in range(8)]
        return len(await asyncio.gather(*calls))


whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, seed=1)
raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, max_tokens=1)
completion = client.completions.create(model=MODEL, prompt="Once", max_tokens=4)
print(
    json.dumps(
        {
            "models": [model.id for model in client.models.list()],
            "model": client.models.retrieve(MODEL).id,
            "text": whole.choices[0].message.content,
            "finish": whole.choices[0].finish_reason,
            "usage": whole.usage.completion_tokens,
            "cached": whole.usage.prompt_tokens_details.cached_tokens,
            "request_id": raw.headers["x-request-id"],
            "completion": bool(completion.choices[0].text),
            "stream": stream(),
            "stream_with_usage": stream(stream_options={"include_usage": True}),
            "concurrently": asyncio.run(concurrently()),
            "no_model": error_of(lambda: client.chat.completions.create(model="no/such", messages=MESSAGES)),
            "bad_value": error_of(
                lambda: client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9, max_tokens=1)
            ),
            "bad_key": error_of(lambda: openai.OpenAI(api_key="wp-no-key", max_retries=0).models.list()),
        }
    )
)
