"""What the commands have in common at the terminal: answers in colour, a bar while one waits, errors in one line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from duo_ray.config import Config
from duo_ray.types import DuoRayError, Finished, Origin, Token

errors = Console(stderr=True)

COLOURS = {Origin.ACCEPTED: "green", Origin.CORRECTION: "yellow", Origin.BONUS: "cyan", Origin.PLAIN: "default"}

USAGE_ERROR = 2


def show_stream(stream: Iterator[Token | Finished], colour: bool | None) -> Finished:
    """Print tokens as they come, in colour where wanted, and the figures at the end."""
    console = Console(soft_wrap=True, highlight=False)
    coloured = console.is_terminal if colour is None else colour
    if coloured:
        console = Console(soft_wrap=True, highlight=False, force_terminal=True)
        legend = Text.assemble(*((f" {origin} ", f"reverse {style}") for origin, style in COLOURS.items()))
        console.print(legend)
    for item in stream:
        if isinstance(item, Finished):
            console.print()
            errors.print(_figures(item), style="dim", highlight=False)
            return item
        if coloured:
            console.print(Text(item.text, COLOURS[item.origin]), end="")
        else:
            sys.stdout.write(item.text)
            sys.stdout.flush()
    raise RuntimeError("the stream ended without its end")


def _figures(end: Finished) -> str:
    """One line: what the answer took."""
    stats: dict[str, Any] = end.stats
    share = stats["accepted_tokens"] / stats["draft_tokens"] if stats["draft_tokens"] else 0.0
    return (
        f"{end.completion_tokens} tokens ({end.reason}), {stats['tokens_per_s']:.1f} tokens/s, first after "
        f"{stats['ttft_ms']:.0f} ms; {stats['target_steps']} target steps, {stats['accepted_tokens']} of "
        f"{stats['draft_tokens']} drafted tokens accepted ({share:.0%}); target {stats['t_target_ms']:.0f} ms a step, "
        f"draft {stats['t_draft_ms']:.0f} ms a token, overhead {stats['round_overhead_ms']['p50']:.1f} ms a step"
    )


def prepared(config: Config) -> Any:
    """What `prepare` makes of these settings, with a progress bar on standard error."""
    from duo_ray.actors.prepare import prepare  # noqa: PLC0415 - imports Ray

    with _starting() as progress:
        return prepare(config, progress=progress)


@contextmanager
def started(config: Any) -> Iterator[Any]:
    """A running pipeline of a `Config` or what is `prepared`, with a progress bar on standard error while it starts."""
    from duo_ray.actors.prepare import Prepared, prepare  # noqa: PLC0415 - imports Ray
    from duo_ray.session import Duo  # noqa: PLC0415 - as above

    terminate = signal.getsignal(signal.SIGTERM)
    with _starting() as show:

        def progress(text: str, share: float | None) -> None:
            signal.signal(signal.SIGTERM, terminate)  # Ray puts its own handler there when it starts
            show(text, share)

        ready = config if isinstance(config, Prepared) else prepare(config, progress=progress)
        sizes = "; ".join(f"{name} {size}" for name, size in ready.memory.items())
        errors.print(f"memory to be taken: {sizes}", style="dim", highlight=False, soft_wrap=True)
        duo = Duo(ready, progress=progress)
    with duo:
        yield duo


@contextmanager
def _starting() -> Iterator[Callable[[str, float | None], None]]:
    with progress_bar() as bar:
        task = bar.add_task("starting", total=None)
        yield lambda text, share: bar.update(
            task, description=text, total=None if share is None else 1.0, completed=share or 0.0
        )


def progress_bar(*, quiet: bool = False) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=errors, transient=True, disable=quiet or not errors.is_terminal)


@contextmanager
def user_errors() -> Iterator[None]:
    """Errors a user can mend end as one line and exit code 2; Ctrl-C and SIGTERM clean up first."""
    received: list[int] = []

    def terminate(number: int, _frame: object) -> NoReturn:
        received.append(number)
        raise KeyboardInterrupt  # not SystemExit: Ray's calls turn that into one with exit code 1

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except DuoRayError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(USAGE_ERROR) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise typer.Exit(0) from None
    except (KeyboardInterrupt, Exception) as error:
        if not _from_an_interrupt(error):
            raise
        errors.print("interrupted", style="dim")
        raise typer.Exit(128 + (received or [signal.SIGINT])[0]) from None


def _from_an_interrupt(error: BaseException | None) -> bool:
    """Whether it is one, or what a library made of one while it cleaned up (`torch.save` does)."""
    seen: set[int] = set()
    chain = [error]
    while chain:
        each = chain.pop()
        if isinstance(each, KeyboardInterrupt):
            return True
        if each is not None and id(each) not in seen:  # an error may be its own cause
            seen.add(id(each))
            chain += [each.__cause__, each.__context__]
    return False
