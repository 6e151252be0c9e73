"""`csv-decode bench` and `csv-decode advise` on a tiny model: what they count and say, never how long it took."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import csv_decode as cd

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from csv_decode.bench import generation, machine, peers, run, states, steps  # noqa: E402
from csv_decode.calibration import OPENINGS  # noqa: E402
from csv_decode.cli import app  # noqa: E402
from csv_decode.models import load_model  # noqa: E402

from .conftest import make_head  # noqa: E402
from .tiny import VOCABULARY, WIDTH, forge_top_k, save_tiny, tiny_model, tiny_tokenizer  # noqa: E402

pytestmark = pytest.mark.usefixtures("cascade")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def index_file(folder: Path, tmp_path: Path) -> Path:
    weight = load_model(str(folder)).model.get_output_embeddings().weight
    path = tmp_path / "tiny.index"
    cd.build_index(weight, seed=0).save(path)
    return path


@pytest.fixture(autouse=True)
def quick_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cache of its own, a small sweep of the processor's cache, and torch's threads as they were."""
    monkeypatch.setenv("CSV_DECODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CSV_DECODE_DEBUG", raising=False)
    monkeypatch.setattr(machine, "_LEAST_SWEEP", 1 << 12)
    monkeypatch.setattr(machine, "_MOST_SWEEP", 1 << 12)
    threads = torch.get_num_threads()
    yield
    peers.set_threads(threads)


def command(*args: Any, status: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == status, result.output + repr(result.exception)
    assert "Traceback" not in result.output
    assert "\x1b" not in result.output, "control codes without a terminal"
    return result


# The command


def test_bench_measures_every_case_and_writes_tables_figures_and_pictures(
    folder: Path, index_file: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    file, pictures = tmp_path / "figures.json", tmp_path / "deep" / "pictures"
    options = ["--states", 6, "--k", "1,3", "--batch", "1,4", "--threads", "1", "--quick", "--index", index_file]
    result = command("bench", folder, *options, "--json", file, "--plots", pictures)
    report = json.loads(file.read_text())
    ours = [f for f in report["figures"] if f["method"] == run.OURS]
    assert [(f["k"], f["batch"], f["states"]) for f in ours] == [(1, 1, 6), (3, 1, 6), (1, 4, 4)]
    assert report["wrong"] == 0
    assert report["compared"] == 16
    assert "16 answers of ours compared with the exact ones, 0 differ" in result.stdout
    assert all(f["lines"]["mean"] >= f["bytes"]["mean"] * 0.9 for f in ours)
    assert "whole cache lines of 64 bytes" in result.stdout
    assert report["kind"] == "real"
    assert "RANDOM" not in result.stdout
    for name in ("torch float32", "torch bfloat16"):
        assert name in result.stdout
        assert [f["exact"] for f in report["figures"] if f["method"] == name] == [False] * 3
    assert set(report["machine"]["versions"]) >= {"python", "torch", "csv-decode"}
    assert {path.name for path in pictures.iterdir()} == {
        "time_by_k.png", "time_by_batch.png", "survivors.png", "bytes_by_stage.png"
    }  # fmt: skip
    for path in pictures.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")


def test_bench_without_quick_sweeps_v_and_has_the_papers_bound(
    folder: Path, index_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    faiss = pytest.importorskip("faiss")
    assert faiss
    monkeypatch.setattr("csv_decode.calibration.collect_states.__defaults__", (None, None, 64, 0, None))
    file = tmp_path / "figures.json"
    options = ["--states", 3, "--k", 2, "--batch", 1, "--threads", 1, "--index", index_file]
    result = command("bench", folder, *options, "--json", file, "--plots", tmp_path)
    report = json.loads(file.read_text())
    sizes = [f["rows"] for f in report["against_v"] if f["method"] == run.OURS]
    assert sizes == [VOCABULARY // 4, VOCABULARY // 2, VOCABULARY]
    assert set(report["fit"][run.OURS]) == {"ms", "ms_per_million_rows"}
    (centroid,) = (f for f in report["figures"] if f["method"] == run.CENTROID)
    assert (centroid["wrong"], centroid["states"]) == (0, 1)
    assert "Time against V" in result.stdout
    assert (tmp_path / "time_by_v.png").exists()


def test_random_states_are_called_random(folder: Path, index_file: Path) -> None:
    options = ["--states", 2, "--k", 1, "--batch", 1, "--threads", 1, "--quick", "--index", index_file]
    assert "RANDOM" in command("bench", folder, *options, "--random").stdout


def test_a_wrong_answer_of_ours_makes_the_status_1(
    folder: Path, index_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "exact_ids", lambda spec, h, k, progress=None: np.full((len(h), k), -1))
    options = ["--states", 2, "--k", 1, "--batch", 1, "--threads", 1, "--quick", "--index", index_file]
    result = command("bench", folder, *options, status=1)
    assert "2 of 2 answers of the certified head differ from the exact ones" in result.stderr


@pytest.mark.parametrize("option", [["--k", "1,x"], ["--batch", "0"], ["--threads", ""], ["--k", VOCABULARY + 1]])
def test_numbers_that_make_no_sense_are_usage_errors(folder: Path, index_file: Path, option: list[Any]) -> None:
    command("bench", folder, "--index", index_file, *option, status=2)


def test_a_file_that_could_not_be_written_is_refused_at_once(folder: Path, tmp_path: Path) -> None:
    command("bench", folder, "--json", tmp_path / "missing" / "figures.json", status=2)


# The measurement


def test_stages_add_up_to_the_bytes_read_and_exact_rows_are_what_the_certificate_says() -> None:
    weight, h = make_head(2000, 64)
    head = cd.CertifiedHead(cd.build_index(weight, h, seed=0), weight)
    for batch in (1, 5):
        found = head.top_k(h[:batch], 3).certificates
        stages = run.bytes_by_stage(head, found)
        assert list(stages) == ["transform", "plane 0", "plane 1", "plane 2", "exact rows"]
        np.testing.assert_allclose(sum(stages.values()), found.bytes_read, rtol=1e-12)
        np.testing.assert_allclose(stages["exact rows"], found.rows_scored * 64 * 4, atol=1)


def test_lines_are_counted_from_where_the_rows_lie() -> None:
    weight, h = make_head(2000, 64)
    head = cd.CertifiedHead(cd.build_index(weight, h, seed=0), weight)
    assert head.index is not None
    assert head.index.shadow is not None
    plane = head.index.shadow.planes[1]
    for batch in (1, 5):
        found = head.top_k(h[:batch], 3).certificates
        stages, lines = run.bytes_by_stage(head, found), run.lines_by_stage(head, found)
        assert list(lines) == list(stages)
        for name in ("transform", "plane 0"):
            assert ((lines[name] >= stages[name]) & (lines[name] < stages[name] + run.LINE)).all(), name
        starts = plane.words.ctypes.data + np.arange(2000) * plane.words.strides[0]
        touched = (starts + plane.words_per_row * 4 - 1) // 64 - starts // 64 + 1
        most = 2000 * plane.words.strides[0] + 64
        expected = np.minimum(found.survivors[:, 0] * touched.mean() * 64, most)
        np.testing.assert_allclose(lines["plane 1"], expected, rtol=0.01)
        each = 4 if weight.ctypes.data % 64 == 0 else 5
        np.testing.assert_allclose(lines["exact rows"], found.rows_scored * each * 64)


def test_rows_with_padding_count_their_own_bytes_in_lines() -> None:
    room = np.zeros(100 * 64 + 64, np.uint8)
    room = room[-room.ctypes.data % 64 :][: 100 * 64]
    tight, padded = room[: 100 * 40].reshape(100, 40), room.reshape(100, 64)
    rows = np.array([0.0, 10.0])
    np.testing.assert_array_equal(run._row_lines(padded, 40, rows), [0, 640])
    np.testing.assert_array_equal(run._row_lines(tight, 40, rows), [0, 640 * 1.5])  # 4 of 8 rows lie across two lines
    assert run._row_lines(tight, 40, np.array([100.0])) == 100 * 40 + 64, "no more than the table"


def test_stages_of_a_fallback_are_the_dense_product() -> None:
    weight, h = make_head(2000, 64)
    index = cd.build_index(weight, h, seed=0)
    head = cd.CertifiedHead(index, weight, budget=1e-9)
    found = head.top_k(h[:2], 1).certificates
    assert found.fallback == ["budget"] * 2
    stages = run.bytes_by_stage(head, found)
    np.testing.assert_allclose(sum(stages.values()), found.bytes_read, rtol=1e-12)
    assert (stages["dense product"] >= weight.nbytes / 2).all()
    assert not stages["exact rows"].any()
    dense = cd.CertifiedHead(None, weight)
    assert set(run.bytes_by_stage(dense, dense.top_k(h, 1).certificates)) == {"exact rows", "dense product"}


def test_each_state_is_answered_once_by_each_method_and_differences_are_counted() -> None:
    weight, h = make_head(500, 64)
    spec = cd.HeadSpec(weight)
    want = run.exact_ids(spec, h[:7], 2)
    np.testing.assert_array_equal(want, np.argsort(-(h[:7].astype(float) @ weight.T.astype(float)), 1)[:, :2])
    seen: list[int] = []

    def swapped(states: Any, k: int) -> Any:
        seen.append(len(states))
        return run.exact_ids(spec, states, k)[:, ::-1]

    ours = run.Method(run.OURS, cd.CertifiedHead(None, spec))
    other = run.Method("swapped", peer=peers.Peer("swapped", swapped, 0))
    mine, theirs = run.measure([ours, other], h[:7], want, batch=3)
    assert seen == [3, 3, 3], "one call to warm up, then two whole batches"
    assert (mine["wrong"], mine["calls"], mine["states"], mine["times_ours"]) == (0, 2, 6, 1.0)
    assert (theirs["argmax_differs"], theirs["set_differs"]) == (6, 0)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bias", [False, True])
def test_peers_find_a_clear_winner(kind: str, bias: bool) -> None:
    weight, _ = make_head(300, 64)
    h = (weight[:4] * 3).astype(np.float32)
    tensor = torch.from_numpy(weight).to(getattr(torch, kind))
    spec = cd.HeadSpec(tensor, torch.linspace(0, 1, 300) if bias else None)
    found, skipped = peers.build_peers(spec)
    assert {peer.name for peer in found} | set(skipped) == {recipe.name for recipe in peers.PEERS}
    assert {"torch float32", "torch bfloat16", "torch int8, weight only"} <= {peer.name for peer in found}
    for peer in found:
        np.testing.assert_array_equal(peer.call(h, 1), np.arange(4)[:, None], err_msg=peer.name)
        assert peer.call(h, 5).shape == (4, 5)


def test_a_peer_that_would_not_fit_into_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "free_bytes", lambda: 300 * 64 * 3)
    found, skipped = peers.build_peers(cd.HeadSpec(make_head(300, 64)[0]))
    assert next(peer.name for peer in found) == "torch float32", "it uses the model's own memory"
    assert "faiss flat" in skipped
    assert "of memory are free" in skipped["faiss flat"]


def test_cuts_of_a_head() -> None:
    assert run.cuts(262144) == [32768, 65536, 131072]
    assert run.cuts(49152) == [12288, 24576]
    assert run.cuts(1) == []


def test_states_come_from_other_openings_and_leave_torchs_random_state_alone() -> None:
    assert not set(states.PROMPTS) & set(OPENINGS)
    model, before = tiny_model(), torch.get_rng_state()
    found = states.decode_states(model, tiny_tokenizer(), 30)
    assert (found.shape, found.dtype) == ((30, WIDTH), np.float32)
    np.testing.assert_array_equal(found, states.decode_states(model, tiny_tokenizer(), 30))
    assert torch.equal(before, torch.get_rng_state())
    assert states.decode_states(model, None, 5).shape == (5, WIDTH)


# End to end


def test_end_to_end_compares_three_heads_on_the_same_tokens(folder: Path, index_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, pictures = tmp_path / "figures.json", tmp_path / "pictures"
    options = ["--end-to-end", "--quick", "--tokens", 5, "--threads", 1, "--index", index_file]
    result = command("bench", folder, *options, "--json", file, "--plots", pictures)
    report = json.loads(file.read_text())
    assert (report["dtype"], report["tokens"]) == ("float32", 5)
    (found,) = report["end_to_end"]
    assert (found["prompts"], found["wrong"], found["dense_steps"]) == (6, 0, {})
    assert found["certified_steps"] == found["tokens"] > 6
    figures = {f["method"]: f for f in found["figures"]}
    assert list(figures) == [generation.STOCK, run.OURS, generation.FREE]
    for f in figures.values():
        assert f["first_ms"] > 0
        assert 0 < f["ms"]["p50"] <= f["ms"]["p90"] <= f["ms"]["p99"]
    assert figures[generation.STOCK]["speedup"] == figures[generation.FREE]["of_ceiling"] == 1
    assert f"certified  {found['tokens']} of {found['tokens']} steps" in result.stdout
    assert "equal to stock's on 6 of 6 prompts" in result.stdout
    assert (pictures / "end_to_end.png").read_bytes().startswith(b"\x89PNG")


def test_end_to_end_counts_what_a_bfloat16_head_decides_itself(folder: Path, tmp_path: Path) -> None:
    options = ["--end-to-end", "--quick", "--tokens", 3, "--threads", 1, "--dtype", "bfloat16"]
    result = command("bench", folder, *options, "--json", tmp_path / "figures.json")
    (found,) = json.loads((tmp_path / "figures.json").read_text())["end_to_end"]
    assert found["certified_steps"] + sum(found["dense_steps"].values()) == found["tokens"]
    assert set(found["dense_steps"]) <= {"rounding does not decide"}
    assert "equal to stock's on 6 of 6 prompts" in result.stdout


def test_the_three_heads_get_the_same_prompts_and_leave_the_model_as_it_was() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    layer, kind = model.get_output_embeddings(), type(model)
    index = cd.build_index(layer.weight, seed=0)
    prompts = ["w1 w2", "w3", "w4 w5 w6"]
    found = generation.measure_generation(model, tokenizer, index, 1, prompts, tokens=4)
    assert (found["differ"], found["prompts"]) == (0, 3)
    assert type(model) is kind
    assert type(layer) is torch.nn.Linear
    assert "forward" not in vars(layer)
    assert not hasattr(model, "csv_decode")


def test_a_wrong_token_end_to_end_is_told_from_rounding(
    folder: Path, index_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forge_top_k(monkeypatch)
    options = ["--end-to-end", "--quick", "--tokens", 3, "--threads", 1, "--index", index_file]
    assert "on 6 prompts the certified head writes other tokens" in command("bench", folder, *options, status=1).stderr


def test_a_difference_within_the_rounding_of_the_stock_head_is_none() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    with torch.no_grad():
        model.lm_head.weight[1::2] = model.lm_head.weight[::2]  # every row has a twin
    prompt = tokenizer("w7 w8", return_tensors="pt")
    spec = cd.HeadSpec(model.lm_head.weight)
    with torch.no_grad():
        best = int(model(**prompt).logits[0, -1].argmax())
        assert generation._rounded(model, spec, prompt, [best], [best ^ 1])
        assert not generation._rounded(model, spec, prompt, [best], [(best + 2) % VOCABULARY])
        assert not generation._rounded(model, spec, prompt, [best], [best, best])


@pytest.mark.parametrize("option", [["--k", 1], ["--batch", 1], ["--states", 5], ["--random"]])
def test_what_does_not_go_end_to_end_is_a_usage_error(folder: Path, option: list[Any]) -> None:
    command("bench", folder, "--end-to-end", *option, status=2)
    command("bench", folder, "--tokens", 5, status=2)


# advise


def test_advise_reports_each_batch_size_the_calibration_and_one_advice(folder: Path, index_file: Path) -> None:
    result = command("advise", folder, "--steps", 2, "--threads", 1, "--index", index_file)
    lines = result.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("batch"))
    assert [line.split()[0] for line in lines[at + 1 : at + 5]] == ["1", "2", "4", "8"]
    assert f"csv-decode build {folder} --calibration TEXTFILE" in result.stdout
    (advice,) = (line for line in lines if line.startswith("advice"))
    assert "worth it" in advice.lower()


def test_a_model_without_tokenizer_can_be_taken_apart() -> None:
    model = tiny_model()
    head = cd.CertifiedHead(None, model.get_output_embeddings().weight)
    step = steps.decode_steps(model, None, head, batch=2, steps=2)
    assert step.batch == 2
    assert min(step.body, step.stock_head, step.our_head) > 0


def test_one_slow_step_does_not_move_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are medians: of five steps, one takes a second more in each part."""
    ticks, slow = [0.0], iter([0, 0, 0, 0, 1, 0, 0, 0])

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            ticks[0] += 0.001 + late[0]
            return ticks[0]

    late = [0.0]
    honest = cd.CertifiedHead.top_k

    def top_k(self: Any, hidden: Any, k: int = 1, ties: bool = False) -> Any:
        late[0] = float(next(slow))
        return honest(self, hidden, k, ties)

    monkeypatch.setattr(steps, "time", Clock)
    monkeypatch.setattr(cd.CertifiedHead, "top_k", top_k)
    model = tiny_model()
    head = cd.CertifiedHead(None, model.get_output_embeddings().weight)
    step = steps.decode_steps(model, None, head, batch=1, steps=5)
    assert (step.body, step.stock_head, step.our_head) == pytest.approx((0.001, 0.001, 0.001))


def test_advice_follows_the_figures() -> None:
    fast = steps.Step(1, body=1.0, stock_head=1.0, our_head=0.1)
    slow = steps.Step(8, body=1.0, stock_head=1.0, our_head=2.0)
    small = steps.Step(1, body=1.0, stock_head=0.01, our_head=0.001)
    said = steps.advice([fast, slow])
    assert said.startswith("Worth it at batch 1: the head takes 50% of a step")
    assert "1.82 times as fast" in said
    assert "at batch 8 leave the stock head in place" in said
    some = steps.Step(4, body=1.0, stock_head=1.0, our_head=0.8)
    assert steps.advice([fast, some]).startswith("Worth it at batch 1, 4: "), "a small gain is no reason to go back"
    assert steps.advice([some]).startswith("Hardly worth it: the best is 1.11 times the speed, at batch 4")
    assert "even a head that cost nothing" in steps.advice([small])
    assert "ours needs 2000.00 ms where the stock one needs 1000.00 ms" in steps.advice([slow])
    assert steps.advice([fast], "it is tiny") == "Not worth it: it is tiny."


@pytest.mark.parametrize(
    ("energy", "said"), [(1.0, "fits the text"), (1.5, "fits the text"), (3.7, "fits roughly"), (6.1, "does not fit")]
)
def test_energy_is_explained_with_the_command_to_calibrate_again(energy: float, said: str) -> None:
    text = steps.energy_advice(energy, "my-model")
    assert said in text
    assert "csv-decode build my-model --calibration TEXTFILE" in text


# benchmarks/threads.py


@pytest.fixture
def threads_benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    return importlib.import_module("threads")


def test_two_loops_are_timed_alone_in_turns_and_at_once(threads_benchmark: Any) -> None:
    calls = {"other": 0, "head": 0, "shared": 0}

    def call(name: str) -> Any:
        def work() -> None:
            calls[name] += 1

        return work

    figures = threads_benchmark.measure("torch", call("other"), call("head"), call("shared"), seconds=0.01)
    assert [(f["what"], f["case"]) for f in figures] == [
        (what, case)
        for what in ("torch", "csv-decode")
        for case in ("alone", "alone, paused", "in turns", "in turns, shared", "at once")
    ]
    assert all(f["calls"] > 0 and set(f["ms"]) >= {"mean", "p50", "p99"} for f in figures)
    turns = [f["calls"] for f in figures if f["case"] == "in turns"]
    assert turns[0] == turns[1] >= threads_benchmark.LEAST
    assert min(calls.values()) > 4


def test_a_loop_that_fails_at_once_is_an_error(threads_benchmark: Any) -> None:
    def broken() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        threads_benchmark.at_once([broken, lambda: None], 0.01)


def test_llama_is_measured_only_where_it_is_installed(threads_benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_benchmark.importlib.util, "find_spec", lambda name: None)
    assert "llama-cpp-python is not installed" in threads_benchmark.llama(2)
