"""Many requests at once: the target verifies the blocks of all of them in one pass.

serve run deployments:app
python examples/many.py 8
"""

import asyncio
import sys
import time

from duo_ray import DuoClient

CITIES = ("Paris", "Rome", "Cairo", "Lima", "Oslo", "Delhi", "Quito", "Seoul")


async def main(count: int) -> None:
    with DuoClient() as client:
        began = time.monotonic()
        questions = [f"What is {CITIES[i % len(CITIES)]} known for?" for i in range(count)]
        answers = await asyncio.gather(*(client.agenerate(question, max_tokens=32) for question in questions))
        seconds = time.monotonic() - began
    for question, answer in zip(questions, answers, strict=True):
        print(f"{question} {answer.text!r}")
    tokens = sum(answer.completion_tokens for answer in answers)
    print(f"{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.1f} tokens/s")


asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 8))
