"""Is the draft worth it? The same questions with and without it, by a service with models of one's own.

serve run deployments:app config=examples/config.yaml
python examples/compare.py
"""

import os

from openai import OpenAI

QUESTIONS = ("Write a Python function that adds two numbers.", "Name five animals.", "What is the sun?")

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "not needed"),
)
model = client.models.list().data[0].id


def ask(question: str, *, draft: bool) -> tuple[str, float]:
    """The answer and its tokens per second."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0.0,
        max_tokens=48,
        extra_body={"duo": {"draft": draft}},
    )
    return answer.choices[0].message.content or "", answer.timings["predicted_per_second"]  # type: ignore[attr-defined]


for question in QUESTIONS:
    (drafted, fast), (plain, slow) = ask(question, draft=True), ask(question, draft=False)
    same = "same answer" if drafted == plain else "another answer (a tie between two tokens)"
    print(f"{fast / slow:.2f} times as fast, {same}: {question}")
