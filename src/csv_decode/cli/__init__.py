"""The command line: `csv-decode build | generate | serve | verify | bench | advise | perplexity | cache | info`.

Commands are thin. Results go to stdout, progress and notes to stderr. Exit status: 0; 1 for an error or a check that
fails; 2 for wrong usage; 130 when interrupted; 141 when whoever read the output has gone (`| head`). Heavy imports wait
until a command needs them.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .advise import advise
from .bench import bench
from .build import build
from .generate import generate
from .manage import cache, info
from .perplexity import perplexity
from .serve import serve
from .terminal import note, problem, speak
from .verify import verify

__all__ = ["app", "main"]

_SIGPIPE = 128 + 13  # as shells report a command that the signal ended
_EXPECTED = (ValueError, OSError, ImportError, AssertionError, MemoryError)


class _Group(TyperGroup):
    """Turns whatever a command raises into one paragraph and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # or a reader that has gone shows only after the end
            return result
        except KeyboardInterrupt:
            note("interrupted")
            raise typer.Exit(130) from None
        except BrokenPipeError:
            # Whoever read our output has gone. Nothing to say, now or when Python flushes at its end.
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):  # no file behind it
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            raise typer.Exit(_SIGPIPE) from None
        except Exception as error:
            if isinstance(error, (typer.Exit, typer.Abort)) or hasattr(error, "format_message"):
                raise  # typer's own, usage errors among them
            if os.environ.get("CSV_DECODE_DEBUG"):
                raise
            text = " ".join(str(error).split())
            if not isinstance(error, _EXPECTED) or not text:
                text = f"{type(error).__name__}: {text}. See where with: csv-decode --debug ..."
            problem(text)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("csv-decode"))
        raise typer.Exit


@app.callback()
def _main(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Exact next-token decoding from a fraction of the output layer, with a proof for each token.

    Try it on a small model:

    - `csv-decode generate demo -p "The sky is" --compare`

    - `csv-decode verify demo`

    The index of a model is built on first use (a few minutes) and kept in a cache folder, which CSV_DECODE_CACHE
    moves.
    """
    if debug:
        os.environ["CSV_DECODE_DEBUG"] = "1"
    speak(bool(os.environ.get("CSV_DECODE_DEBUG")))


for _command in (build, generate, serve, verify, bench, advise, perplexity, cache, info):
    app.command()(_command)


def main() -> None:
    """Entry point of `csv-decode`."""
    app(prog_name="csv-decode")
