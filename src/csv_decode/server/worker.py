"""One thread that runs the model, and the requests that wait for it.

A model writes one text at a time. Requests are served in the order they came; at most `waiting` wait. A request whose
client has left is dropped before its next token.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

__all__ = ["BusyError", "Worker"]

logger = logging.getLogger("csv_decode")
_END = object()


class BusyError(RuntimeError):
    """Too many requests wait already."""


class _Job:
    def __init__(self, work: Callable[[], Iterator[Any]], loop: asyncio.AbstractEventLoop) -> None:
        self.work, self.loop = work, loop
        self.results: asyncio.Queue[Any] = asyncio.Queue()
        self.cancelled = threading.Event()

    def tell(self, result: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(self.results.put_nowait, result)
        except RuntimeError:  # the loop has ended
            self.cancelled.set()


class Worker:
    """Runs generators of results, one after another, in a thread of its own."""

    def __init__(self, waiting: int) -> None:
        self._jobs: queue.Queue[_Job | None] = queue.Queue(waiting)
        self._thread = threading.Thread(target=self._run, name="csv-decode", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return self._jobs.qsize()

    def close(self) -> None:
        """Ends the thread after the work at hand."""
        self._jobs.put(None)
        self._thread.join()

    async def stream(self, work: Callable[[], Iterator[Any]]) -> AsyncIterator[Any]:
        """What `work` yields, once it is its turn. Leaving early cancels it. Raises BusyError, or as the work does."""
        job = _Job(work, asyncio.get_running_loop())
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise BusyError(f"{self._jobs.maxsize} requests wait already; try again later") from None
        try:
            while (result := await job.results.get()) is not _END:
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            job.cancelled.set()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.cancelled.is_set():
                continue
            try:
                results = job.work()
                for result in results:
                    job.tell(result)
                    if job.cancelled.is_set():
                        break
            except Exception as error:  # belongs to whoever asked
                job.tell(error)
            job.tell(_END)
