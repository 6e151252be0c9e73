"""Grammars for texts: JSON schemas, GBNF, Lark and regular expressions, by llguidance.

llguidance says which tokens may come next: all those behind which the text can still become one that the grammar has.
The head proves which of them is the best, or draws from them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .writer import Vocabulary

__all__ = ["Grammar", "Tokens"]

_HEADER = "%llguidance"


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ImportError(f"grammars need llguidance ({error}); get it with: pip install llguidance") from None
    return llguidance


class Grammar:
    """What a text may be: `gbnf`, `json_schema` and `regex` make it from what people write.

    lark: in Lark's syntax, as llguidance reads it. Raises ValueError for what is no grammar.
    """

    def __init__(self, lark: str, what: str = "grammar") -> None:
        self._what = what
        options, rest = {}, lark
        if lark.lstrip().startswith(_HEADER):
            line, _, rest = lark.lstrip().partition("\n")
            try:
                options = dict(json.loads(line.removeprefix(_HEADER)))
            except (ValueError, TypeError):
                raise ValueError(f"the {what} begins with {line!r}, expected {_HEADER} and a JSON object") from None
        # else a text that can go on in one way only would have to do it in one tokenizer's tokens
        self.text = f"{_HEADER} {json.dumps(options | {'no_forcing': True})}\n{rest}"
        wrong = _library().LLMatcher.validate_grammar(self.text)
        if wrong and not wrong.startswith("WARNING"):
            raise ValueError(f"the {what} is not understood: {_first_line(wrong)}")

    @classmethod
    def gbnf(cls, text: str) -> Grammar:
        """Of llama.cpp's grammar files; a text in Lark's syntax is known by its look."""
        try:
            lark = _library().grammar_from("gbnf", text)
        except ValueError as error:
            raise ValueError(f"the grammar is not understood: {_first_line(str(error))}") from None
        return cls(lark)

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any]) -> Grammar:
        """JSON that a schema describes: an object, or its text. {"type": "object"} is any object."""
        try:
            found = json.loads(schema) if isinstance(schema, str) else schema
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the JSON schema is no JSON, or too deep: {error}") from None
        if not isinstance(found, Mapping):
            raise ValueError(f"the JSON schema is {type(found).__name__}, expected an object")
        return cls(f"start: %json {json.dumps(found)}\n", "JSON schema")

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Texts that a regular expression of Rust's syntax matches from end to end."""
        made = json.loads(_library().LLMatcher.grammar_from_regex(pattern))
        return cls(made["grammars"][0]["lark_grammar"], "regular expression")

    def follow(self, tokens: Tokens) -> Callable[[list[int]], NDArray[np.int32]]:
        """A function that gives the mask of the first new token, and then, called once for each new token with the
        tokens so far, the mask of the one behind it."""
        matcher = _library().LLMatcher(tokens.tokenizer, self.text, log_level=0)
        first = True

        def mask(so_far: list[int]) -> NDArray[np.int32]:
            nonlocal first
            if not first and not matcher.consume_token(so_far[-1]):
                raise RuntimeError(f"token {so_far[-1]} is outside of the {self._what}")
            first = False
            bits = matcher.compute_bitmask()
            if matcher.is_error():  # its bits would allow the end of the text
                raise ValueError(
                    f"the {self._what} cannot be followed: the model has no token that may come next, or it is too "
                    f"complex ({_first_line(matcher.get_error())})"
                )
            return np.frombuffer(bits, np.int32)

        return mask


class Tokens:
    """The tokens of a model as grammars read them: made once for a model, in about a second."""

    def __init__(self, vocabulary: Vocabulary, rows: int) -> None:
        library = _library()
        ends = [token for token in range(rows) if vocabulary.ends(token)]
        if not ends:
            raise ValueError("the model has no token that ends a text, which grammars need")
        self.eos_token_id, self.bos_token_id = ends[0], None
        shown = [vocabulary.piece(token) for token in range(rows)]
        self.special_token_ids = [token for token, piece in enumerate(shown) if not piece]
        self.tokens = [piece or vocabulary.piece(token, special=True) for token, piece in enumerate(shown)]
        self.tokenizer = library.LLTokenizer(library.TokenizerWrapper(self), rows, ends)

    def __call__(self, text: bytes) -> list[int]:
        """llguidance asks for tokens of texts that are forced, and here none is."""
        return []


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no reason was given"
