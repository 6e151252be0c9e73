"""Several texts at once, and texts that obey a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp")

import csv_decode as cd
import csv_decode.head
from csv_decode.grammar import Grammar
from csv_decode.llama import LlamaModel
from csv_decode.writer import Generation

from . import tiny_gguf

#: Prompts with and without a start in common, and settings.
TEXTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("the of and to the of and", {}),
    ("the of and to the of and", {"temperature": 1.0, "seed": 2**63, "stream": 1}),
    ("the of and to the of and", {"temperature": 1.0, "seed": 5, "stream": 2}),
    ("the of and to", {"temperature": 0.7, "top_p": 0.8, "seed": 5}),
    ("a s e t", {"bias": {300: 2.0, 301: -np.inf}}),
    ("a s e t", {"temperature": 2.0, "top_k": 20, "order": "llama.cpp", "seed": 9}),
    ("in ing", {"stop": ["word"]}),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("together")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CSV_DECODE_CACHE", str(folder / "cache"))
        patch.setattr(csv_decode.head, "SMALL_HEAD", 0)
        yield tiny_gguf.write(folder / "tiny.gguf")


def opened(path: Path, **more: Any) -> LlamaModel:
    return LlamaModel(path, threads=1, calibration_states=300, **more)


def begin(model: LlamaModel, tokens: int, **more: Any) -> list[Generation]:
    return [model.generate(prompt, tokens, **settings, **more) for prompt, settings in TEXTS]


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize(("sequences", "context"), [(1, 96), (3, 96), (8, 96), (8, 60)])
def test_texts_are_those_they_are_alone(path: Path, sequences: int, context: int, speculate: bool) -> None:
    """With a small context they wait for one another, and what was begun is computed again."""
    with opened(path, sequences=sequences, context=context) as model:
        alone = [run.run() for run in begin(model, 24, speculate=speculate)]
        runs = begin(model, 24, speculate=speculate)
        order = [number for number, _ in model.together(runs)]
        for a, b in zip(alone, runs, strict=True):
            assert (a.ids, a.text, a.finish) == (b.ids, b.text, b.finish)
        assert (order == sorted(order)) == (sequences == 1)
        assert [order.count(i) for i in range(len(runs))] == [len(run.ids) for run in runs]


def test_equal_texts_are_computed_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path, context=400) as model:
        inputs = []
        evaluate = model.body.evaluate
        monkeypatch.setattr(model.body, "evaluate", lambda h, *rest: (inputs.append(len(h)), evaluate(h, *rest))[1])
        prompt = (model.vocabulary.encode(TEXTS[0][0]) * 4)[:75]
        runs = [model.generate(prompt, 6, temperature=3.0, seed=1, stream=i) for i in range(4)]
        for _ in model.together(runs):
            pass
        assert inputs[:2] == [64, 11]  # a chunk, and the end of all four
        assert 2 <= max(inputs[2:]) <= 4


def test_only_whole_chunks_serve_another_text(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may round a token by how many others it computes with it, so a text is read in the same batches
    whatever was read or written before."""
    with opened(path, context=400) as model:
        prompt = (model.vocabulary.encode(TEXTS[0][0]) * 12)[:200]
        seen: list[tuple[int, int]] = []
        evaluate = model.body.evaluate

        def watched(h: np.ndarray, positions: list[int], *rest: Any) -> np.ndarray:
            seen.append((positions[0], len(h)))
            return evaluate(h, positions, *rest)

        monkeypatch.setattr(model.body, "evaluate", watched)

        def batches(tokens: list[int]) -> list[tuple[int, int]]:
            seen.clear()
            run = model.generate(tokens, 3, temperature=1.0, seed=1).run()
            assert run.ids == texts.setdefault(tuple(tokens), run.ids)
            return seen[: len(seen) - len(run.ids) + 1]

        texts: dict[tuple[int, ...], list[int]] = {}
        for at in (200, 129, 64):
            model.forget()
            batches(prompt[:at])
        assert batches(prompt) == [(0, 64), (64, 64), (128, 64), (192, 8)]
        assert batches(prompt) == [(192, 8)]
        assert batches(prompt[:129]) == [(128, 1)]
        assert batches(prompt) == [(128, 64), (192, 8)]
        assert batches(prompt[:64]) == [(0, 64)]  # its end is no chunk for others
        assert batches(prompt[:130]) == [(0, 64), (64, 64), (128, 2)]
        other = iter(model.generate(prompt[:150], 9))
        next(other)
        assert batches(prompt) == [(128, 64), (192, 8)]
        next(other)  # takes back its positions, and what it has read now is no chunk
        assert batches(prompt)[0] == (128, 64)


def made(n: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(300, 600, n)]


def test_a_full_context_makes_texts_wait(path: Path) -> None:
    """What is remembered of texts that have ended, or are not gone on with, makes room for others."""
    with opened(path, sequences=3, context=256) as model:
        runs = [model.generate(made(20, 1), 1), model.generate(made(120, 2), 10), model.generate(made(200, 3), 5)]
        for _ in model.together(runs):
            pass
        assert [len(run.ids) for run in runs] == [1, 10, 5]
        held_up = model.together([model.generate(made(20, 1), 100), model.generate(made(200, 2), 9)])
        next(held_up)
        assert len(model.generate(made(150, 3), 5).run().ids) == 5
        assert len(list(held_up)) == 108


def test_a_shifted_text_keeps_what_it_remembers(path: Path) -> None:
    """The positions that a shift leaves depend on those dropped, so such a text is never the one that waits."""
    with opened(path, sequences=2, context=96) as model:
        settings: dict[str, Any] = {"temperature": 1.0, "seed": 1}
        alone = model.generate(made(95, 1), 80, **settings).run().ids
        runs = [model.generate(made(1, 2), 60, **settings), model.generate(made(95, 1), 80, **settings)]
        for _ in model.together(runs):
            pass
        assert runs[1].ids == alone
        assert len(runs[0].ids) == 60


def test_a_closed_model_says_so(path: Path) -> None:
    model = opened(path, sequences=2)
    several = model.together([model.generate("a", 9), model.generate("the", 9)])
    one = iter(model.generate("a", 9))
    next(several)
    model.close()
    for call in (lambda: next(several), lambda: next(one), lambda: model.generate("a")):
        with pytest.raises(RuntimeError, match="the model is closed"):
            call()
    model.close()


def test_texts_are_written_once(path: Path) -> None:
    with opened(path) as model, opened(path) as other:
        run = model.generate("the", 3)
        with pytest.raises(ValueError, match="text 0 has been begun already, or belongs to another model"):
            other.together([run])
        run.run()
        with pytest.raises(ValueError, match="text 1 has been begun"):
            model.together([model.generate("the", 3), run])
        assert list(run) == []


#: How to make it, its text, its texts, and what a token may be that such a text begins with.
GRAMMARS = {
    "gbnf": (Grammar.gbnf, 'root ::= "the " [a-f]+ (" yes" | " no") "."', r"the [a-f]+ (yes|no)\.", "t|th|the|the "),
    "lark": (Grammar, "start: WORD (/,/ WORD)*\nWORD: /[xyz]{2}/", r"[xyz]{2}(,[xyz]{2})*", r"[xyz]{1,2},?"),
    "regex": (Grammar.regex, r"[0-9]{2}/[0-9]{2}", r"\d{2}/\d{2}", r"\d{1,2}"),
}


@pytest.mark.parametrize("kind", list(GRAMMARS))
@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_texts_obey_grammars(path: Path, kind: str, temperature: float) -> None:
    pytest.importorskip("llguidance")
    make, text, pattern, start = GRAMMARS[kind]
    grammar = make(text)
    with opened(path) as model:
        settings = {"temperature": temperature, "grammar": grammar, "speculate": True}
        runs = [model.generate("the of", 60, seed=seed, **settings) for seed in range(4)]
        steps = [[] for _ in runs]
        for number, step in model.together(runs):
            steps[number].append(step)
        dense = cd.CertifiedHead(None, model.parts.spec)
        pieces = [model.vocabulary.piece(token).decode("utf-8", "replace") for token in range(600)]
        for run, mine in zip(runs, steps, strict=True):
            if run.finish == "stop":
                assert re.fullmatch(pattern, run.text)
            allowed = grammar.follow(model._tokens_of_grammars)
            for i, step in enumerate(mine):
                mask = allowed(run.ids[:i])
                bits = np.unpackbits(mask.view(np.uint8), count=600, bitorder="little")
                assert bits[step.token]
                assert step.certificate.certified
                if i == 0:  # every token that may begin such a text, and no other
                    assert bits.tolist() == [re.fullmatch(start, piece) is not None for piece in pieces]
                if not temperature:
                    assert step.token == np.asarray(dense.top_k(step.state, 1, allowed=mask).ids)[0, 0]
        assert any(run.finish == "stop" for run in runs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_stays_within_the_mask(path: Path, temperature: float) -> None:
    digits = range(3 + 48, 3 + 58)  # tokens that are one byte
    with opened(path) as model:

        def text(bias: dict[int, float], **more: Any) -> Any:
            return model.generate("the", 4, temperature=temperature, seed=1, bias=bias, **more).run()

        for mask in (np.arange(600) == 7, np.isin(np.arange(600), [7, 9])):
            run = text({300: 50.0, 7: 9.0}, allowed=lambda tokens, mask=mask: mask)
            assert mask[run.ids].all()
        pytest.importorskip("llguidance")
        number = Grammar.regex("[0-9]{2}")
        assert text({300: 50.0}, grammar=number).text.isdigit()
        best = text(dict.fromkeys(digits, 0.5), grammar=number)
        assert best.text == text({}, grammar=number).text  # all the same on top, and nothing else allowed
        assert text(dict.fromkeys(digits, 0.5) | {digits[3]: 90.0}, grammar=number).text == "33"
        with pytest.raises(ValueError, match="bias bans every token that the mask or the grammar allows"):
            text(dict.fromkeys(digits, -np.inf), grammar=number)


def test_json_by_schema(path: Path) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22]}},
        "required": ["ok", "n"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    with opened(path) as model:
        for form in (schema, json.dumps(schema)):
            run = model.generate("the", 60, temperature=1.0, seed=3, grammar=Grammar.json_schema(form)).run()
            assert run.finish == "stop"
            found = json.loads(run.text)
            assert isinstance(found["ok"], bool)
            assert found["n"] in (1, 22)


def test_what_is_no_grammar_is_refused(path: Path) -> None:
    pytest.importorskip("llguidance")
    for make, text, said in (
        (Grammar.gbnf, "root ::= foo", "the grammar is not understood: .*Rule 'foo' not found"),
        (Grammar, "start: foo", 'the grammar is not understood: .*unknown name: "foo"'),
        (Grammar, "%llguidance 3\nstart: /a/", "expected %llguidance and a JSON object"),
        (Grammar.regex, "(a", "the regular expression is not understood"),
        (Grammar.json_schema, {"type": "strange"}, "the JSON schema is not understood: .*strange"),
        (Grammar.json_schema, "{", "the JSON schema is no JSON"),
        (Grammar.json_schema, '{"items":' * 50000 + "{}" + "}" * 50000, "the JSON schema is no JSON, or too deep"),
        (Grammar.json_schema, "3", "the JSON schema is int, expected an object"),
    ):
        with pytest.raises(ValueError, match=said):
            make(text)
    with opened(path) as model:
        with pytest.raises(ValueError, match="grammar and allowed are both masks"):
            model.generate("a", grammar=Grammar.regex("a"), allowed=lambda tokens: None)
        run = model.generate("a", 9, grammar=Grammar.regex("[^\\x00-\\x{10FFFF}]"))
        with pytest.raises(ValueError, match="cannot be followed"):
            run.run()
        assert model.generate("a", 3).run().ids  # and the next one is none the worse
