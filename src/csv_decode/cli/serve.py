"""`csv-decode serve`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..writer import SEQUENCES, Writer
from .common import Dtype, Threads, Verbose
from .llama import by_llama, speculation
from .terminal import Bars, note, problem, working

__all__ = ["serve"]


def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A .gguf file, demo (Gemma-3-270M), or a model as for the other commands."
        ),
    ],
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
    parallel: Annotated[
        int, typer.Option(min=1, max=64, help="Choices of a request that llama.cpp writes at the same time.")
    ] = SEQUENCES,
    threads: Threads = None,
    dtype: Dtype = "float32",
    engine: Annotated[
        str, typer.Option(help="auto (.gguf files by llama.cpp, where it is installed), llama.cpp or transformers.")
    ] = "auto",
    speculate: Annotated[
        str, typer.Option(help="auto: try several tokens at once where a text repeats itself; or off.")
    ] = "auto",
    verbose: Verbose = False,
) -> None:
    """Serve a model over HTTP, as OpenAI's clients speak: completions, chats, streams, log-probabilities.

    A page at / shows each step of a text; /metrics has counts for Prometheus. Only this machine can connect unless
    --host says otherwise.

    - `csv-decode serve model.gguf`

    - `csv-decode serve ./chat-model --dtype bfloat16`

    - `curl localhost:8080/v1/completions -H "Content-Type: application/json" -d '{"prompt": "The sky is"}'`
    """
    try:
        import uvicorn

        from ..server import Limits, create_app
    except ImportError as error:
        raise ImportError(
            f"serving needs fastapi and uvicorn ({error}); get them with: pip install '.[serve]'"
        ) from None
    from ..models import demo_file

    ahead, native = speculation(speculate), by_llama(model, engine)
    if native and dtype != "float32":
        raise typer.BadParameter("--dtype is about transformers; add --engine transformers")
    loaded: Writer
    with working(f"loading {model}"), Bars() as bars:
        if native:
            from ..llama import LlamaModel

            path = demo_file() if model == "demo" else Path(model)
            loaded = LlamaModel(
                path, context=context, sequences=parallel, threads=threads, progress=bars, verbose=verbose
            )
        else:
            from ..integrations.writer import TransformersModel
            from ..models import load_model

            opened = load_model(model, dtype, verbose)
            loaded = TransformersModel(opened, context=context, threads=threads, progress=bars)
    key = api_key or os.environ.get("CSV_DECODE_API_KEY") or None
    if key is None and host not in ("127.0.0.1", "localhost", "::1"):
        problem(f"anyone who reaches {host} can use this server; set CSV_DECODE_API_KEY", "warning")
    called = name or Path(model).name.removesuffix(".gguf")
    app = create_app(loaded, called, key, Limits(tokens=max_tokens, waiting=waiting), ahead)
    note(f"{called} at http://{host}:{port}, {loaded.context} positions; the page is at /, metrics at /metrics")
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)
    app.state.worker.close()
    loaded.close()
