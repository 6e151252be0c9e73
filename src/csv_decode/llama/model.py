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
from ..writer import CONTEXT, SEQUENCES, Writer, shared_start
from .body import Body, Vocabulary
from .calibrate import collect_states, embed
from .files import open_gguf

__all__ = ["LlamaModel"]


class LlamaModel(Writer):
    """A .gguf file, ready to write.

    Args:
        path: of the file. index: of its head; None: from the cache, or calibrated and built now.
        context: positions, for all texts at work together; None: 4096, or fewer where the model was trained for fewer.
        sequences: texts that may be at work together. threads: of llama.cpp and of the head, which take turns.
        progress: called as progress(stage, done, total).
        verbose: show what llama.cpp prints.

    Raises ModelError for files that cannot be run so.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        index: Index | None = None,
        *,
        context: int | None = None,
        sequences: int = SEQUENCES,
        threads: int | None = None,
        calibration_states: int = DEFAULT_STATES,
        progress: Callable[[str, int, int], None] | None = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(whole("sequences", sequences, 1, 64))
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
        self.body = Body(parts.body, parts.width, self.context, self.sequences, self.threads, verbose=verbose)

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

    def _forget(self, sequence: int, start: int) -> None:
        self.body.drop(sequence, start)

    def _copy(self, source: int, sequence: int, count: int) -> None:
        self.body.copy(source, sequence, count)

    def _evaluate(self, texts: Sequence[tuple[int, list[int], list[int]]]) -> list[NDArray[np.float32]]:
        """Of texts that are the same so far only one is computed."""
        inputs, positions, sequences, wanted = list[int](), list[int](), list[int](), list[int]()
        every = [tokens + draft for _, tokens, draft in texts]
        alike = [None if sequence in self._shifted else text for sequence, *text in texts]
        model = [
            next(j for j in range(i + 1) if i == j or (alike[i] and alike[i] == alike[j])) for i in range(len(texts))
        ]
        for i, (sequence, tokens, draft) in enumerate(texts):
            if model[i] == i:
                same = shared_start(self._held[sequence], tokens[:-1])  # the last token always needs its state
                self._drop(sequence, same)
                new = every[i][same:]
                inputs += new
                positions += range(same, len(every[i]))
                sequences += [sequence] * len(new)
                wanted += range(len(inputs) - len(draft) - 1, len(inputs))
        found = self.body.evaluate(embed(self.parts, inputs), positions, sequences, wanted)
        states = list[NDArray[np.float32]]()
        first = 0
        for i, (sequence, _, draft) in enumerate(texts):
            if model[i] == i:
                states.append(found[first : first + len(draft) + 1])
                first += len(draft) + 1
            else:
                states.append(states[model[i]])
                self._drop(sequence)
                self._copy(texts[model[i]][0], sequence, len(every[i]))
            self._held[sequence] = every[i]
        return states

    def _shorten(self, sequence: int, tokens: list[int]) -> list[int]:
        """Drops the older half of what is behind the first token, as llama.cpp's own programs do; the list as it is,
        where the body cannot. Positions that other texts share would move for them too, so these forget."""
        if not self.body.can_shift:
            return tokens
        for other in range(self.sequences):
            if other != sequence:
                self._drop(other)
        self._chunks[sequence] = []
        gone = (len(tokens) - 1) // 2
        self.body.drop(sequence, 1, 1 + gone)
        self.body.shift(sequence, 1 + gone, -gone)
        held = self._held[sequence]
        self._held[sequence] = held[:1] + held[1 + gone :]
        return tokens[:1] + tokens[1 + gone :]
