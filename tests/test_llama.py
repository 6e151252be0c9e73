"""GGUF models: llama.cpp's body and the exact head, beside stock llama.cpp on the same small files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import csv_decode as cd
from csv_decode.llama.files import ARCHITECTURES, open_gguf
from csv_decode.models import ModelError

pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")

from csv_decode.llama import LlamaModel
from csv_decode.llama.body import Vocabulary
from csv_decode.llama.stock import Stock
from csv_decode.lookup import Lookup
from csv_decode.writer import _Text

from . import tiny_gguf

pytestmark = pytest.mark.usefixtures("cascade")
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CSV_DECODE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Iterator[LlamaModel]:
    path = tiny_gguf.write(tmp_path / "tiny.gguf", template=TEMPLATE)
    with LlamaModel(path, threads=1, calibration_states=300) as made:
        yield made


def exact(model: LlamaModel, states: Any) -> list[int]:
    top = cd.CertifiedHead(None, model.parts.spec).top_k(np.stack(states), 1)
    return np.asarray(top.ids)[:, 0].tolist()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_is_that_of_llama_cpp(architecture: str, tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf", architecture, tied=architecture.startswith("gemma"))
    with LlamaModel(path, threads=1, calibration_states=200) as model:
        stock = Stock(path, model.context, 1)
        for text in ("the of and", "a", "Zürich 漢"):
            prompt = model.vocabulary.encode(text)
            run = model.generate(prompt, 24)
            steps = list(run)
            assert run.ids == list(stock.write(prompt, 24))
            assert all(step.certificate.certified for step in steps)
            assert run.ids == exact(model, [step.state for step in steps])
        stock.close()


@pytest.mark.parametrize("kind", ["Q8_0", "F16", "BF16", "Q4_0"])
def test_the_reference_is_what_the_gguf_package_makes_of_the_file(kind: str, tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf", kind=kind)
    with LlamaModel(path, threads=1, calibration_states=200) as model:
        import gguf

        reader = gguf.GGUFReader(path)
        tensor = next(t for t in reader.tensors if t.name == "output.weight")
        wide = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(600, tiny_gguf.WIDTH)
        assert np.array_equal(model.parts.spec.rows.float32(), wide)
        assert model.parts.spec.rows.kind == {"Q8_0": "q8_0", "F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")
        steps = list(model.generate("the of", 16))
        assert [s.token for s in steps] == exact(model, [s.state for s in steps])


def test_the_body_is_derived_once_and_holds_no_vocabulary(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf")
    first = open_gguf(path)
    before = first.body.stat()
    assert open_gguf(path).body.stat().st_mtime_ns == before.st_mtime_ns
    assert before.st_size < path.stat().st_size - 2 * 600 * tiny_gguf.WIDTH * 4 + 4096
    # another file of that name has another body
    tiny_gguf.write(path, "qwen2")
    assert open_gguf(path).body != first.body
    (first.body.parent / "about.json").write_text("{")
    assert open_gguf(path).architecture == "qwen2"


def test_sampling_is_keyed_and_repeats(model: LlamaModel) -> None:
    def ids(**more: Any) -> list[int]:
        return model.generate("the of", 20, **{"temperature": 1.0, "seed": 5, **more}).run().ids

    assert ids() == ids()
    assert ids() != ids(seed=6)
    assert ids() != ids(stream=1)
    assert ids(temperature=1e-3, top_p=0.5) == ids(temperature=0)
    assert ids(speculate=True) == ids()
    assert ids(temperature=3.0, top_p=0.6, order="llama.cpp") != ids(temperature=3.0, top_p=0.6)
    fresh = model.generate("the of", 3, temperature=1.0)
    assert fresh.run().ids == model.generate("the of", 3, temperature=1.0, seed=fresh.seed).run().ids


def test_speculation_changes_no_token(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the head is told what is probably right, of no more states than were drafted."""
    top_k, drafted, guessed = model.head.top_k, 0, 0

    def noted(states: Any, k: int, **more: Any) -> Any:
        nonlocal guessed
        if more["guess"] is not None:
            assert more["guess"].shape == (len(states),)
            guessed += len(states) - 1
        return top_k(states, k, **more)

    monkeypatch.setattr(model.head, "top_k", noted)
    for prompt in ("the of and the of and the of", "a s e t a s e t a s e t", "in in in in in"):
        plain = model.generate(prompt, 40).run()
        fast = model.generate(prompt, 40, speculate=True).run()
        assert fast.ids == plain.ids
        assert 0 <= fast.accepted <= fast.drafted
        drafted += fast.drafted
    assert 0 < guessed <= drafted


def test_a_prompt_that_repeats_is_read_with_a_draft(model: LlamaModel) -> None:
    prompt = model.vocabulary.encode("the of and to the of and to the of and to")
    run = model.generate(prompt, 20, speculate=True)
    drafted = run.drafted
    assert drafted > 0
    assert model.generate(prompt, 1, speculate=True).drafted == 0, "there is no room for one"
    assert model.generate(prompt, 20).drafted == 0
    assert run.run().ids == model.generate(prompt, 20).run().ids
    assert run.drafted >= drafted


def test_what_is_remembered_changes_no_token(model: LlamaModel) -> None:
    fresh = {text: model.generate(text, 12).run().ids for text in ("the of and", "the of", "the of and to", "a")}
    for text in ("the of", "the of and", "a", "the of and to", "the of"):
        assert model.generate(text, 12).run().ids == fresh[text]
    abandoned = iter(model.generate("the of and", 12))
    next(abandoned)
    assert model.generate("the of and", 12).run().ids == fresh["the of and"]


def test_a_full_context_goes_on_without_its_older_half(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf")
    with LlamaModel(path, threads=1, context=32, calibration_states=200) as model:
        run = model.generate("the of and", 80)
        steps = list(run)
        assert len(run.ids) == 80 or run.finish == "stop"
        assert [s.token for s in steps] == exact(model, [s.state for s in steps])
        drawn = list(model.generate("the of and", 60, temperature=1.0, seed=8))
        first = len(model.vocabulary.encode("the of and"))
        for i, step in enumerate(drawn):  # no position's noise is used twice
            again = model.head.sample(step.state, 1.0, seed=8, position=first + i, stream=[0])
            assert again.ids[0] == step.token
        with pytest.raises(ValueError, match="the context 32 positions"):
            model.generate([5] * 32)


def test_stop_strings_and_ends(model: LlamaModel) -> None:
    run = model.generate("the of and", 30).run()
    assert run.finish in ("length", "stop")
    assert run.text == "".join(step.text for step in model.generate("the of and", 30))
    middle = run.text[len(run.text) // 2 :][:4]
    if middle:
        cut = model.generate("the of and", 30, stop=[middle]).run()
        assert cut.finish == "stop"
        assert cut.text == run.text[: run.text.index(middle)]
    only_end = np.zeros(600, bool)
    only_end[tiny_gguf.END] = True
    ended = model.generate("the", 5, allowed=lambda tokens: only_end).run()
    assert (ended.ids, ended.text, ended.finish) == ([tiny_gguf.END], "", "stop")


def test_text_holds_back_what_may_become_a_stop_string() -> None:
    text = _Text(("END", "xy"))
    assert text.add(b"abE") == ("ab", False)
    assert text.add(b"N") == ("", False)
    assert text.add(b"Q") == ("ENQ", False)
    assert text.add("é".encode()[:1]) == ("", False)
    assert text.add("é".encode()[1:]) == ("é", False)
    assert text.add(b"zxyEND") == ("z", True)
    text = _Text(("END",))
    assert text.add(b"aEN\xe9") == ("a", False)  # the byte may begin a character
    assert text.close() == "EN\ufffd"


def test_look_up() -> None:
    """A long match is tried far, a short one that keeps failing is not tried, and a loop goes round."""
    text = list(range(40))
    lookup = Lookup([*text, 99, *text[:12]])
    assert lookup.draft(6) == text[12:18]
    assert lookup.draft(0) == []
    assert len(lookup.draft(100)) > 4
    assert Lookup([1, 2, 3]).draft(9) == []
    assert Lookup([]).draft(9) == []
    loop = Lookup([7, 8, 9] * 8)
    draft = loop.draft(20)
    assert draft == ([7, 8, 9] * 7)[: len(draft)]
    assert len(draft) > 4
    wrong = Lookup([1, 2, 3])
    for i in range(30):  # 1 2 occurs again and again, and goes on another way each time
        for token in (1, 2, 100 + i):
            wrong.add(token)
    wrong.add(1)
    wrong.add(2)
    assert wrong.draft(9) == []
    wrong.reset([*text, *text[:12]])
    assert wrong.draft(3) == text[12:15]


def test_chat_uses_the_template_of_the_file(model: LlamaModel, tmp_path: Path) -> None:
    ids = model.chat([{"role": "user", "content": "the of"}])
    assert ids == model.vocabulary.encode("<s>user: the of", begin=False)
    assert ids[0] == 1
    bare = Vocabulary(tiny_gguf.write(tmp_path / "bare.gguf", rows=400))
    assert bare.chat_template() is None
    bare.close()


def test_the_command_line_runs_gguf_files_by_llama_cpp(tmp_path: Path, capsys: Any) -> None:
    from typer.testing import CliRunner

    from csv_decode.cli import app

    path = str(tiny_gguf.write(tmp_path / "tiny.gguf", template=TEMPLATE))
    index = tmp_path / "index"
    LlamaModel(path, threads=1, calibration_states=200).close()
    common = ["generate", path, "-p", "the of", "-n", "9", "--threads", "1"]

    def run(*more: str, status: int = 0) -> Any:
        result = CliRunner().invoke(app, [*common, *more])
        assert result.exit_code == status, result.output
        return result

    plain = run("--compare")
    assert plain.stdout.startswith("the of")
    assert "9 of 9 steps" in plain.stderr
    assert "stock tokens" in plain.stderr
    assert run("--sample", "--seed", "3").stdout == run("--sample", "--seed", "3").stdout
    assert run("--chat").stdout != plain.stdout
    assert "--engine is 'x'" in run("--engine", "x", status=2).stderr
    assert "--engine" in run("--dense", status=2).stderr
    assert "--speculate is 'x'" in run("--speculate", "x", status=2).stderr
    (tmp_path / "answer.gbnf").write_text('root ::= "yes" | "no"')
    assert run("--grammar", str(tmp_path / "answer.gbnf"), "--sample").stdout.strip().endswith(("yes", "no"))
    assert "give one of them" in run("--grammar", "a", "--json-schema", "b", status=2).stderr
    assert "No such file" in run("--grammar", str(tmp_path / "nothing"), status=1).stderr
    assert run("--speculate", "off").stdout == plain.stdout
    next((tmp_path / "cache" / "indexes").iterdir()).rename(index)
    assert run("--index", str(index)).stdout == plain.stdout
    assert not list((tmp_path / "cache" / "indexes").iterdir())  # none was built beside the one given


def test_masks_are_obeyed(model: LlamaModel) -> None:
    mask = np.arange(600) % 7 == 3
    run = model.generate("the of", 12, allowed=lambda tokens: mask).run()
    assert all(token % 7 == 3 for token in run.ids)
    words = np.packbits(np.pad(mask, (0, -len(mask) % 32)), bitorder="little").view(np.int32)
    banned = run.ids[0]
    for form in (mask, words):  # the same with a ban on top
        again = model.generate("the of", 12, allowed=lambda tokens, form=form: form, bias={banned: -np.inf}).run()
        assert banned not in again.ids
        assert all(token % 7 == 3 for token in again.ids)


def test_what_cannot_be_run_is_refused(tmp_path: Path, model: LlamaModel) -> None:
    with pytest.raises(ModelError, match="no file"):
        open_gguf(tmp_path / "nothing.gguf")
    (tmp_path / "text.gguf").write_text("no model at all")
    with pytest.raises(ModelError, match="cannot be read"):
        open_gguf(tmp_path / "text.gguf")
    odd = tiny_gguf.write(tmp_path / "odd.gguf", "bloom")
    with pytest.raises(ModelError, match="a bloom model"):
        open_gguf(odd)
    for bad in (
        lambda: model.generate([]),
        lambda: model.generate([600]),
        lambda: model.generate("a", 0),
        lambda: model.generate("a", temperature=-1.0),
        lambda: model.generate("a", stop=[""]),
        lambda: model.generate("a", seed=-1),
    ):
        with pytest.raises(ValueError, match=r"prompt|max_tokens|temperature|stop|seed"):
            bad()
