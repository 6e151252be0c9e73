"""Texts of Hugging Face models through a certified head, and a server of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import csv_decode.head
from csv_decode.integrations.writer import HuggingFaceVocabulary, TransformersModel
from csv_decode.models import LoadedModel, ModelError

from .tiny import tiny_model, tiny_tokenizer

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return LoadedModel(tiny_model(), tokenizer, "tiny", None)


@pytest.fixture(scope="module")
def writer(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransformersModel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CSV_DECODE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(csv_decode.head, "SMALL_HEAD", 0)
        patch.setattr("csv_decode.calibration.DEFAULT_STATES", 200)
        with TransformersModel(loaded, threads=1) as made:
            yield made


def stock(loaded: LoadedModel, ids: list[int], tokens: int) -> list[int]:
    out = loaded.model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=tokens, pad_token_id=0)
    return [int(token) for token in out[0, len(ids) :]]


def test_it_writes_what_generate_writes(writer: TransformersModel, loaded: LoadedModel) -> None:
    for text in ("w5 w9 w3", "w40 w41 w42 w40 w41 w42", "w5 w9 w8"):  # the last one takes up a part of the first
        ids = writer.vocabulary.encode(text)
        run = writer.generate(ids, 30).run()
        assert run.ids == stock(loaded, ids, 30)
        assert writer.generate(text, 30, speculate=True).run().ids == run.ids
    assert loaded.model.get_output_embeddings()(torch.zeros(1, 64)).abs().sum() == 0  # its own head again


def test_draws_repeat_and_masks_hold(writer: TransformersModel) -> None:
    def ids(**more: Any) -> list[int]:
        return writer.generate("w7 w8", 20, temperature=1.0, **{"seed": 3, **more}).run().ids

    assert ids() == ids() == ids(speculate=True)
    assert ids() != ids(seed=4)
    assert all(token % 3 == 1 for token in ids(allowed=lambda tokens: np.arange(512) % 3 == 1))
    chat = writer.chat([{"role": "user", "content": "w7 w8"}])
    assert chat == writer.vocabulary.tokenizer("w7 w8 ")["input_ids"]


def test_models_that_cannot_write(loaded: LoadedModel) -> None:
    with pytest.raises(ModelError, match="has no tokenizer"):
        TransformersModel(LoadedModel(loaded.model, None, "bare", None))
    tokenizer = tiny_tokenizer()
    assert HuggingFaceVocabulary(tokenizer, loaded.model).ends(2)


@pytest.mark.parametrize("kind", ["bytes", "spaces"])
def test_pieces_are_the_bytes_of_the_text(kind: str) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    text = "Der Straße – naïve  two\nlines 😊 end"
    inner = Tokenizer(models.BPE(byte_fallback=kind == "spaces", unk_token=None))
    if kind == "bytes":
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        special = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=special, special_tokens=["<s>"])
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        names = ["<s>", *(f"<0x{i:02X}>" for i in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=names, limit_alphabet=20)
    inner.train_from_iterator([text.replace("😊", "")] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")
    vocabulary = HuggingFaceVocabulary(tokenizer, tiny_model())
    ids = vocabulary.encode(text, begin=False)
    assert b"".join(vocabulary.piece(token) for token in ids).decode() == text
    assert vocabulary.piece(tokenizer.bos_token_id) == b""
    assert vocabulary.piece(tokenizer.bos_token_id, special=True) == b"<s>"


def test_it_is_served(writer: TransformersModel) -> None:
    pytest.importorskip("fastapi")
    from fastapi.testclient import TestClient

    from csv_decode.server import create_app

    app = create_app(writer, "tiny", speculate=True)
    with TestClient(app) as client:
        asked = {"model": "tiny", "prompt": "w5 w9 w3", "max_tokens": 9, "temperature": 0, "logprobs": 2}
        answer = client.post("/v1/completions", json=asked).json()
        assert answer["usage"]["completion_tokens"] == 9
        choice = answer["choices"][0]
        assert choice["text"] == writer.generate("w5 w9 w3", 9).run().text
        assert len(choice["logprobs"]["tokens"]) == 9
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "w1"}], "max_tokens": 4, "stream": True}
        lines = client.post("/v1/chat/completions", json=chat).text
        assert lines.strip().endswith("data: [DONE]")
        assert client.post("/v1/completions", json={**asked, "prompt": ""}).status_code == 400
    app.state.worker.close()


def test_serve_takes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi")
    import uvicorn
    from typer.testing import CliRunner

    from csv_decode.cli import app

    from .tiny import save_tiny

    monkeypatch.setenv("CSV_DECODE_CACHE", str(tmp_path / "cache"))
    seen: list[Any] = []
    monkeypatch.setattr(uvicorn, "run", lambda app, **more: seen.append((app, more)))
    folder = str(save_tiny(tmp_path / "model"))
    result = CliRunner().invoke(app, ["serve", folder, "--threads", "1"])
    assert result.exit_code == 0, result.output
    assert seen[0][1]["host"] == "127.0.0.1"
    assert "model at http://127.0.0.1:8080" in result.stderr
    assert CliRunner().invoke(app, ["serve", folder, "--engine", "llama.cpp"]).exit_code == 2
    assert CliRunner().invoke(app, ["serve", folder, "--speculate", "x"]).exit_code == 2
