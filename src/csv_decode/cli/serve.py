"""`csv-decode serve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .common import Threads, Verbose
from .llama import speculation
from .terminal import Bars, note, problem, working

__all__ = ["serve"]


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A .gguf file, or demo (Gemma-3-270M).")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8080,
    name: Annotated[str | None, typer.Option(help="What clients call the model.", show_default="the file's")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Clients must send it. Better in CSV_DECODE_API_KEY: other users see a command line."),
    ] = None,
    context: Annotated[int | None, typer.Option(min=8, help="Positions.", show_default="4096 or the model's")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of an answer at most.")] = 4096,
    waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait.")] = 64,
    threads: Threads = None,
    speculate: Annotated[
        str, typer.Option(help="auto: try several tokens at once where a text repeats itself; or off.")
    ] = "auto",
    verbose: Verbose = False,
) -> None:
    """Serve a .gguf model over HTTP, as OpenAI's clients speak: completions, chats, streams, log-probabilities.

    A page at / shows each step of a text; /metrics has counts for Prometheus. Only this machine can connect unless
    --host says otherwise.

    - `csv-decode serve model.gguf`

    - `curl localhost:8080/v1/completions -H "Content-Type: application/json" -d '{"prompt": "The sky is"}'`
    """
    try:
        import uvicorn

        from ..server import Limits, create_app
    except ImportError as error:
        raise ImportError(
            f"serving needs fastapi and uvicorn ({error}); get them with: pip install '.[serve]'"
        ) from None
    from ..llama import LlamaModel
    from ..models import demo_file

    ahead = speculation(speculate)
    path = demo_file() if model == "demo" else Path(model)
    with working(f"loading {path.name}"), Bars() as bars:
        loaded = LlamaModel(path, context=context, threads=threads, progress=bars, verbose=verbose)
    key = api_key or os.environ.get("CSV_DECODE_API_KEY") or None
    if key is None and host not in ("127.0.0.1", "localhost", "::1"):
        problem(f"anyone who reaches {host} can use this server; set CSV_DECODE_API_KEY", "warning")
    called = name or ("demo" if model == "demo" else path.stem)
    app = create_app(loaded, called, key, Limits(tokens=max_tokens, waiting=waiting), ahead)
    note(f"{called} at http://{host}:{port}, {loaded.context} positions; the page is at /, metrics at /metrics")
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)
    app.state.worker.close()
    loaded.close()
