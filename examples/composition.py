"""A Serve application of your own that uses the running one: each question is answered and the answer then shortened.

serve run deployments:app
python examples/composition.py "What is a lighthouse?"
"""

import sys

from ray import serve


@serve.deployment(num_replicas=1, ray_actor_options={"num_cpus": 0})
class Shortened:
    """Two calls to the pipeline for each of its own."""

    def __init__(self) -> None:
        self._pipeline = serve.get_app_handle("default")

    async def ask(self, question: str) -> dict[str, str]:
        long = await self._pipeline.generate.remote(question, temperature=0.0, max_tokens=64)
        short = await self._pipeline.generate.remote(
            f"Say this in five words: {long['text']}", temperature=0.0, max_tokens=16
        )
        return {"long": long["text"], "short": short["text"]}


handle = serve.run(Shortened.bind(), name="shortened", route_prefix=None)
answer = handle.ask.remote(" ".join(sys.argv[1:]) or "What is a lighthouse?").result()
print(f"long:  {answer['long']}\nshort: {answer['short']}")
serve.delete("shortened")
