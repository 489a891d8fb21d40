"""Chat over HTTP with the official client: pip install openai

serve run deployments:app
python examples/openai_stream.py "Explain gravity to a child."
"""

import os
import sys

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "not needed"),
)
stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": " ".join(sys.argv[1:]) or "Explain gravity to a child."}],
    max_tokens=64,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n{chunk.usage.completion_tokens} tokens")
