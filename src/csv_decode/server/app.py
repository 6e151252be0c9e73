"""The endpoints: completions, chats, models, health, metrics, and a page that shows each step.

Errors are objects as OpenAI's clients expect them; no path and no traceback leaves the process.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..models import ModelError
from ..writer import Step, Writer
from .metrics import Metrics
from .schema import ChatRequest, CompletionRequest, Sampling
from .worker import BusyError, Worker

__all__ = ["Limits", "create_app"]

logger = logging.getLogger("csv_decode")
_LOG_WIDTH = 1e-3


@dataclass(frozen=True)
class Limits:
    """body: bytes of a request. tokens: new ones of an answer. waiting: requests that may wait. choices: n times
    prompts. stops: strings."""

    body: int = 1 << 20
    tokens: int = 4096
    waiting: int = 64
    choices: int = 16
    stops: int = 16


class _RequestError(HTTPException):
    """An error object for the client."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(status, message)
        self.code, self.param = code, param


def _error(status: int, message: str, code: str | None = None, param: str | None = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": code}}, status)


class _BodyLimit:
    """Refuses bodies above a size, whether they say so or not."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body, more = b"", True
        length = dict(scope["headers"]).get(b"content-length", b"0")
        too_long = not length.isdigit() or int(length) > self.most
        while more and not too_long:
            message = await receive()
            if message["type"] != "http.request":
                return None  # the client has left
            body += message.get("body", b"")
            more = message.get("more_body", False)
            too_long = len(body) > self.most
        if too_long:
            answer = _error(413, f"the request is larger than {self.most} bytes", "request_too_large")
            return await answer(scope, receive, send)
        given = False

        async def again() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, again, send)
        return None


class _StepsRequest(BaseModel):
    prompt: str = Field(min_length=1)
    max_tokens: int = Field(48, ge=1)
    temperature: float = Field(0.0, ge=0, le=100)
    seed: int | None = Field(None, ge=0, lt=2**63)


@dataclass
class _Choice:
    """One text on its way. prompt: token ids. stream: of the noise."""

    index: int
    prompt: list[int]
    stream: int


def create_app(
    model: Writer, name: str, api_key: str | None = None, limits: Limits | None = None, speculate: bool = False
) -> FastAPI:
    """The application. name: of the model, for clients. api_key: if set, /v1 and the page's data want it. speculate:
    see `Writer.generate`."""
    most = Limits() if limits is None else limits
    app = FastAPI(title="csv-decode", docs_url=None, redoc_url=None, openapi_url=None)
    worker, metrics, started = Worker(most.waiting), Metrics(), int(time.time())
    app.add_middleware(_BodyLimit, most=most.body)
    app.state.worker = worker

    def authorised(request: Request) -> None:
        if api_key is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {api_key}".encode()):
            raise _RequestError(401, "the API key is missing or wrong", "invalid_api_key")

    @app.exception_handler(StarletteHTTPException)
    async def _http(request: Request, error: StarletteHTTPException) -> Response:
        metrics.request(request.url.path, error.status_code)
        return _error(error.status_code, str(error.detail), getattr(error, "code", None), getattr(error, "param", None))

    @app.exception_handler(404)
    async def _missing(request: Request, error: Any) -> Response:
        if isinstance(error, _RequestError):
            return await _http(request, error)
        return _error(404, f"there is no {request.method} {request.url.path}", "not_found")

    @app.exception_handler(405)
    async def _method(request: Request, error: Any) -> Response:
        return _error(405, f"{request.url.path} does not take {request.method}", "method_not_allowed")

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        metrics.request(request.url.path, 400)
        return _error(400, f"{where or 'the request'}: {first['msg']}", "invalid_value", where or None)

    @app.exception_handler(BusyError)
    async def _busy(request: Request, error: BusyError) -> Response:
        metrics.request(request.url.path, 503)
        return _error(503, str(error), "overloaded")

    @app.exception_handler(ValueError)
    async def _value(request: Request, error: ValueError) -> Response:
        metrics.request(request.url.path, 400)
        return _error(400, str(error), "invalid_value")

    @app.exception_handler(Exception)
    async def _internal(request: Request, error: Exception) -> Response:
        logger.error("%s failed: %s: %s", request.url.path, type(error).__name__, error)
        metrics.request(request.url.path, 500)
        return _error(500, "the server failed on this request", "internal_error")

    def check(wanted: Sampling, choices: int) -> None:
        if wanted.model is not None and wanted.model != name:
            raise _RequestError(
                404, f"there is no model {wanted.model!r} here, only {name!r}", "model_not_found", "model"
            )
        if choices > most.choices:
            raise _RequestError(
                400, f"n times the prompts is {choices}, at most {most.choices} here", "invalid_value", "n"
            )
        if len(wanted.stops) > most.stops:
            raise _RequestError(
                400, f"{len(wanted.stops)} stop strings, at most {most.stops} here", "invalid_value", "stop"
            )

    def write(wanted: Sampling, choices: list[_Choice], tokens: int, seed: int, top: int | None) -> Iterator[Any]:
        """(choice, step, logprobs) for each token of each choice, and behind its last (choice, finish reason, None)."""
        bias = {token: -np.inf if value <= -100 else value for token, value in (wanted.logit_bias or {}).items()}
        grammar = wanted.obeys()
        runs = [
            model.generate(
                choice.prompt,
                tokens,
                temperature=wanted.temperature,
                top_k=wanted.top_k,
                top_p=wanted.top_p,
                min_p=wanted.min_p,
                seed=seed,
                stream=choice.stream,
                stop=wanted.stops,
                bias=bias,
                grammar=grammar,
                speculate=speculate,
            )
            for choice in choices
        ]
        before = time.perf_counter()
        for number, step in model.together(runs):
            metrics.step(step.certificate, time.perf_counter() - before)
            yield choices[number], step, None if top is None else _logprobs(model, step, top)
            if runs[number].finish is not None:
                yield choices[number], runs[number].finish, None
            before = time.perf_counter()

    def prepare(
        wanted: Sampling, prompts: list[list[int]], tokens: int | None, top: int | None
    ) -> tuple[Callable[[], Iterator[Any]], int]:
        """What the worker runs for a request, and how many tokens its prompts have."""
        check(wanted, wanted.n * len(prompts))
        if not prompts:
            raise _RequestError(400, "there is no prompt", "invalid_value", "prompt")
        for prompt in prompts:
            if not prompt:
                raise _RequestError(400, "the prompt has no token", "invalid_value", "prompt")
            if len(prompt) >= model.context:
                raise _RequestError(
                    400,
                    f"the prompt has {len(prompt)} tokens and the context {model.context}",
                    "context_length_exceeded",
                    "prompt",
                )
        room = min(most.tokens, model.context - max(len(prompt) for prompt in prompts))
        if tokens is not None and tokens > most.tokens:
            raise _RequestError(
                400, f"max_tokens is {tokens}, at most {most.tokens} here", "invalid_value", "max_tokens"
            )
        count = room if tokens is None else min(tokens, room)
        seed = secrets.randbits(63) if wanted.seed is None else wanted.seed
        choices = [
            _Choice(p * wanted.n + i, prompt, p * wanted.n + i)
            for p, prompt in enumerate(prompts)
            for i in range(wanted.n)
        ]

        def work() -> Iterator[Any]:
            return write(wanted, choices, count, seed, top)

        return work, sum(len(prompt) for prompt in prompts)

    async def watched(request: Request, work: Callable[[], Iterator[Any]]) -> AsyncIterator[Any]:
        """Results, until the client leaves."""
        async for result in worker.stream(work):
            if await request.is_disconnected():
                metrics.cancelled.inc()
                return
            yield result

    async def answer(request: Request, wanted: Sampling, work: Any, prompt_tokens: int, shape: _Shape) -> Response:
        before = time.perf_counter()
        if wanted.stream:
            # the first result before the headers, so that what is wrong with a request still has a status
            results = watched(request, work).__aiter__()
            try:
                first = await results.__anext__()
            except StopAsyncIteration:
                return Response(status_code=499)

            async def events() -> AsyncIterator[str]:
                usage, result = 0, first
                try:
                    begun = set[int]()
                    while True:
                        choice, step, logprobs = result
                        if shape.chat and choice.index not in begun:
                            begun.add(choice.index)
                            yield _event(shape.first(choice.index))
                        usage += isinstance(step, Step)
                        yield _event(shape.chunk(choice.index, step, logprobs))
                        try:
                            result = await results.__anext__()
                        except StopAsyncIteration:
                            break
                    if (wanted.stream_options or {}).get("include_usage"):
                        yield _event(shape.envelope([], usage=_usage(prompt_tokens, usage)))
                    yield "data: [DONE]\n\n"
                except Exception as error:
                    logger.error("a stream failed: %s: %s", type(error).__name__, error)
                    yield _event({"error": {"message": "the server failed on this request", "type": "server_error"}})
                finally:
                    await results.aclose()  # type: ignore[attr-defined]
                    metrics.request(request.url.path, 200, time.perf_counter() - before)

            return StreamingResponse(events(), media_type="text/event-stream")
        texts: dict[int, list[tuple[Step, Any]]] = {}
        ends: dict[int, str | None] = {}
        async for choice, step, logprobs in watched(request, work):
            if isinstance(step, Step):
                texts.setdefault(choice.index, []).append((step, logprobs))
            else:
                ends[choice.index] = step
        metrics.request(request.url.path, 200, time.perf_counter() - before)
        usage = _usage(prompt_tokens, sum(len(steps) for steps in texts.values()))
        whole = [shape.whole(i, texts.get(i, []), ends[i]) for i in sorted(ends)]
        return JSONResponse(shape.envelope(whole, usage=usage, streamed=False))

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "waiting": worker.waiting}

    @app.get("/metrics")
    async def scrape() -> Response:
        metrics.waiting.set(worker.waiting)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models", dependencies=[Depends(authorised)])
    async def models() -> dict[str, Any]:
        entry = {"id": name, "object": "model", "created": started, "owned_by": "csv-decode"}
        return {"object": "list", "data": [entry]}

    @app.post("/v1/completions", dependencies=[Depends(authorised)])
    async def completions(request: Request, wanted: CompletionRequest) -> Response:
        prompts = [model.vocabulary.encode(p) if isinstance(p, str) else p for p in wanted.prompts]
        work, count = prepare(wanted, prompts, wanted.max_tokens, wanted.logprobs)
        return await answer(request, wanted, work, count, _Shape(model, name, chat=False))

    @app.post("/v1/chat/completions", dependencies=[Depends(authorised)])
    async def chat(request: Request, wanted: ChatRequest) -> Response:
        try:
            prompt = model.chat([{"role": m.role, "content": m.text} for m in wanted.messages])
        except ModelError as error:
            raise _RequestError(400, str(error), "no_chat_template") from None
        if wanted.top_logprobs is not None and not wanted.logprobs:
            raise _RequestError(400, "top_logprobs goes with logprobs", "invalid_value", "top_logprobs")
        top = (wanted.top_logprobs or 0) if wanted.logprobs else None
        work, count = prepare(wanted, [prompt], wanted.max_completion_tokens or wanted.max_tokens, top)
        return await answer(request, wanted, work, count, _Shape(model, name, chat=True))

    @app.post("/steps", dependencies=[Depends(authorised)])
    async def steps(request: Request, wanted: _StepsRequest) -> Response:
        """What the page shows: a line of JSON for each token."""
        sampling = Sampling(temperature=wanted.temperature, seed=wanted.seed)
        work, _ = prepare(sampling, [model.vocabulary.encode(wanted.prompt)], wanted.max_tokens, None)

        def shown() -> Iterator[dict[str, Any]]:  # in the worker: it asks the head once more
            return (_shown(model, step) for _, step, _ in work() if isinstance(step, Step))

        async def lines() -> AsyncIterator[str]:
            async for step in watched(request, shown):
                yield json.dumps(step) + "\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return files(__package__).joinpath("page.html").read_text(encoding="utf-8").replace("{{model}}", _escape(name))

    return app


def _escape(text: str) -> str:
    import html

    return html.escape(text)


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _usage(prompt: int, new: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _token(model: Writer, token: int) -> tuple[str, list[int]]:
    data = model.vocabulary.piece(token, special=True)
    return data.decode("utf-8", "replace"), list(data)


def _logprobs(model: Writer, step: Step, top: int) -> dict[str, Any]:
    """True log-probabilities of the token and the most likely ones, each the middle of a certified interval."""
    ids = [step.token]
    if top:
        ids += np.asarray(model.head.top_k(step.state, top).ids)[0].tolist()
    found = model.head.log_probs(step.state, np.array([ids]), _LOG_WIDTH)
    middle = ((found.low + found.high) / 2)[0].tolist()
    entries = []
    for token, value in zip(ids, middle, strict=True):
        text, data = _token(model, token)
        entries.append({"token": text, "logprob": min(value, 0.0), "bytes": data})
    return {**entries[0], "top_logprobs": entries[1:]}


def _shown(model: Writer, step: Step) -> dict[str, Any]:
    """One step for the page: the token, the runners-up with exact logits, and what deciding took."""
    top = model.head.top_k(step.state, 6)
    proof = step.certificate
    ids, logits = np.asarray(top.ids)[0].tolist(), np.asarray(top.logits)[0].tolist()
    rivals = [
        {"token": _token(model, token)[0], "id": token, "logit": logit}
        for token, logit in zip(ids, logits, strict=True)
    ]
    return {
        "token": _token(model, step.token)[0],
        "id": step.token,
        "logit": step.logit,
        "text": step.text,
        "top": rivals,
        "margin": logits[0] - logits[1],
        "certified": bool(proof.certified),
        "rows_scored": int(proof.rows_scored),
        "rows": model.head.spec.n_rows,
        "bytes_read": int(proof.bytes_read),
        "bytes_dense": int(proof.bytes_dense),
        "fallback": proof.fallback,
    }


class _Shape:
    """Answers of completions and of chats."""

    def __init__(self, model: Writer, name: str, chat: bool) -> None:
        self.model, self.name, self.chat = model, name, chat
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex[:24]}"
        self.created = int(time.time())

    def envelope(
        self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None, streamed: bool = True
    ) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if self.chat else "text_completion"
        out = {"id": self.id, "object": kind, "created": self.created, "model": self.name, "choices": choices}
        return out if usage is None else out | {"usage": usage}

    def first(self, index: int) -> dict[str, Any]:
        """What a streamed choice of a chat begins with."""
        delta = {"role": "assistant", "content": ""}
        return self.envelope([{"index": index, "delta": delta, "finish_reason": None}])

    def chunk(self, index: int, step: Step | str | None, logprobs: Any) -> dict[str, Any]:
        text = step.text if isinstance(step, Step) else ""
        finish = None if isinstance(step, Step) else step
        if self.chat:
            delta = {"content": text} if isinstance(step, Step) else {}
            choice = {"index": index, "delta": delta, "finish_reason": finish}
            return self.envelope([choice | ({} if logprobs is None else {"logprobs": {"content": [logprobs]}})])
        found = None if logprobs is None else self._flat([logprobs])
        return self.envelope([{"index": index, "text": text, "logprobs": found, "finish_reason": finish}])

    def whole(self, index: int, steps: list[tuple[Step, Any]], finish: str | None) -> dict[str, Any]:
        text = "".join(step.text for step, _ in steps)
        found = [logprobs for _, logprobs in steps if logprobs is not None]
        if self.chat:
            message = {"role": "assistant", "content": text}
            logs = {"content": found} if found else None
            return {"index": index, "message": message, "logprobs": logs, "finish_reason": finish}
        return {"index": index, "text": text, "logprobs": self._flat(found) if found else None, "finish_reason": finish}

    def _flat(self, found: list[dict[str, Any]]) -> dict[str, Any]:
        """The older form of log-probabilities."""
        offsets = np.cumsum([0, *[len(entry["token"]) for entry in found]])[:-1].tolist()
        return {
            "tokens": [entry["token"] for entry in found],
            "token_logprobs": [entry["logprob"] for entry in found],
            "top_logprobs": [{e["token"]: e["logprob"] for e in entry["top_logprobs"]} for entry in found],
            "text_offset": offsets,
        }
