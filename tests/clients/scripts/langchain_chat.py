"""LangChain's chat model for OpenAI: whole, streamed, in a batch; usage as it understands it."""

import json
import os

from langchain_openai import ChatOpenAI

chat = ChatOpenAI(model=os.environ["MODEL"], max_tokens=8, seed=1, max_retries=0, stream_usage=True)
whole = chat.invoke("Say a few words.")
pieces = list(chat.stream("Say a few words."))
total = pieces[0]
for piece in pieces[1:]:
    total += piece
print(
    json.dumps(
        {
            "text": whole.content,
            "usage": whole.usage_metadata["output_tokens"],
            "finish": whole.response_metadata["finish_reason"],
            "stream": {"text": total.content, "usage": total.usage_metadata["output_tokens"]},
            "batch": len(chat.batch(["one", "two", "three"])),
        }
    )
)
