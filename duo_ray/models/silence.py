"""What transformers and what it imports say on the terminal without being asked."""

from __future__ import annotations

import logging
from collections.abc import Callable


def silence_transformers() -> None:
    """Draw no bars into the user's terminal, and let torchao not tell of kernels that nobody asked for."""
    # transformers imports torchao wherever it is installed.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415 - after the lines above

    quiet: Callable[[], None] = disable_progress_bar
    quiet()
