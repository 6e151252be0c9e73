"""A GGUF model that decodes exactly: llama.cpp's body, our head."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cache import get_index, newest_index
from ..calibration import DEFAULT_STATES
from ..head import CertifiedHead
from ..index import Index
from ..kernels import thread_count
from ..models import ModelError
from ..spec import whole
from ..writer import CONTEXT, Writer, shared_start
from .body import Body, Vocabulary
from .calibrate import collect_states, embed
from .files import open_gguf

__all__ = ["LlamaModel"]


class LlamaModel(Writer):
    """A .gguf file, ready to write.

    Args:
        path: of the file. index: of its head; None: from the cache, or calibrated and built now.
        context: positions; None: 4096, or fewer where the model was trained for fewer.
        threads: of llama.cpp and of the head, which take turns. progress: called as progress(stage, done, total).
        verbose: show what llama.cpp prints.

    Raises ModelError for files that cannot be run so.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        index: Index | None = None,
        *,
        context: int | None = None,
        threads: int | None = None,
        calibration_states: int = DEFAULT_STATES,
        progress: Callable[[str, int, int], None] | None = None,
        verbose: bool = False,
    ) -> None:
        self.threads = thread_count(threads)
        self.parts = parts = open_gguf(path)
        self.vocabulary: Vocabulary = Vocabulary(parts.path, verbose)
        if self.vocabulary.size > parts.spec.n_rows:
            raise ModelError(
                f"{parts.path.name} has {self.vocabulary.size} tokens but {parts.spec.n_rows} rows of its output layer"
            )
        trained = parts.context or CONTEXT
        self.context = min(trained, CONTEXT) if context is None else whole("context", context, 8, 2**24)
        if index is None:
            index = self._index(calibration_states, progress)
        self.head = CertifiedHead(index, parts.spec, threads=self.threads, engine="llama_cpp")
        self.body = Body(parts.body, parts.width, self.context, 1, self.threads, verbose=verbose)
        self._held: list[int] = []  # tokens whose positions the body remembers

    def _index(self, count: int, progress: Callable[[str, int, int], None] | None) -> Index:
        found = newest_index(self.parts.spec, self.parts.source)
        if found is not None:
            return found[1]

        def collect() -> Any:
            report = (lambda done, total: progress("calibrating", done, total)) if progress else None
            return collect_states(self.parts, self.vocabulary, count, self.threads, progress=report)

        key = f"llama-{count}"
        return get_index(self.parts.spec, collect, key=key, source=self.parts.source, progress=progress)

    def close(self) -> None:
        """Frees llama.cpp's memory."""
        self.body.close()
        self.vocabulary.close()

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, by the file's own chat template."""
        template = self.vocabulary.chat_template()
        if template is None:
            raise ModelError(f"{self.parts.path.name} has no chat template; give it a text to continue")
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        names = [self.vocabulary.piece(t, True).decode() for t in (self.vocabulary.end, self.vocabulary.begin)]
        prompt = Jinja2ChatFormatter(template, names[0], names[1])(messages=list(messages)).prompt
        # a template usually writes the first token itself
        return self.vocabulary.encode(prompt, begin=not prompt.startswith(names[1]))

    def _evaluate(self, tokens: list[int], draft: list[int]) -> NDArray[np.float32]:
        """States after the last token, and after each drafted one. What the body remembers is not computed again."""
        every = tokens + draft
        same = shared_start(self._held, every[: len(tokens) - 1])  # the last token always needs its state
        if same < len(self._held):
            self.body.drop(0, same)
        new = every[same:]
        self._held = every[:same]
        wanted = list(range(len(new) - len(draft) - 1, len(new)))
        states = self.body.evaluate(embed(self.parts, new), list(range(same, len(every))), [0] * len(new), wanted)
        self._held = every
        return states

    def _shorten(self, tokens: list[int]) -> list[int]:
        """Drops the older half of what is behind the first token, as llama.cpp's own programs do; the list as it is,
        where the body cannot."""
        if not self.body.can_shift:
            return tokens
        gone = (len(tokens) - 1) // 2
        self.body.drop(0, 1, 1 + gone)
        self.body.shift(0, 1 + gone, -gone)
        self._held = self._held[:1] + self._held[1 + gone :]
        return tokens[:1] + tokens[1 + gone :]
