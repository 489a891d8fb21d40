"""The running service from Python, through Ray and without HTTP.

    serve run deployments:app
    python examples/client.py

On another machine: RAY_ADDRESS=ray://HEAD:10001 python examples/client.py
"""

from duo_ray import DuoClient
from duo_ray.types import Finished

with DuoClient() as client:
    answer = client.generate("Name three colours.", temperature=0.0, max_tokens=24)
    print(answer.text, f"({answer.stats['accepted_tokens']} of {answer.completion_tokens} tokens were drafted)")

    for item in client.stream([{"role": "user", "content": "Count to ten."}], max_tokens=32):
        print("" if isinstance(item, Finished) else item.text, end="", flush=True)
    print()
