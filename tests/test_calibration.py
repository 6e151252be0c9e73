"""Calibration states are what the head sees, and collecting them disturbs nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from csv_decode.calibration import OPENINGS, calibration_key, collect_states  # noqa: E402

from .tiny import tiny_model, tiny_tokenizer  # noqa: E402

TEXT = " ".join(f"w{i % 97} w{i % 31}" for i in range(600))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.mark.parametrize("text", [None, TEXT])
def test_shape_type_and_count(model: Any, tokenizer: Any, text: str | None) -> None:
    seen: list[tuple[int, int]] = []
    states = collect_states(model, tokenizer, text, count=300, progress=lambda *at: seen.append(at))
    assert states.shape == (300, 64)
    assert states.dtype == np.float32
    assert seen[-1] == (300, 300)
    assert seen == sorted(seen)


def test_without_a_tokenizer_the_model_writes_from_random_tokens(model: Any) -> None:
    assert collect_states(model, count=100).shape == (100, 64)


def test_the_seed_decides(model: Any, tokenizer: Any) -> None:
    first = collect_states(model, tokenizer, count=100, seed=3)
    assert np.array_equal(first, collect_states(model, tokenizer, count=100, seed=3))
    assert not np.array_equal(first, collect_states(model, tokenizer, count=100, seed=4))


def test_torch_random_state_and_training_mode_are_untouched(model: Any, tokenizer: Any) -> None:
    before = torch.get_rng_state()
    model.train()
    collect_states(model, tokenizer, count=50)
    assert model.training
    model.eval()
    assert torch.equal(before, torch.get_rng_state())
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_states_on_a_text_are_the_inputs_of_the_head(model: Any, tokenizer: Any) -> None:
    """The head's weight times a state is the model's own logit row, for every position but the first of a window."""
    short = "w1 w2 w3 w4 w5 w6"
    states = collect_states(model, tokenizer, short, count=1000)
    ids = tokenizer(short, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits[0, 1:].numpy()
    weight = model.get_output_embeddings().weight.detach().numpy()
    assert states.shape == (ids.shape[1] - 1, 64)
    np.testing.assert_allclose(states @ weight.T, logits, atol=1e-5)


def replay(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, count: int) -> list[Any]:
    """The sequences (with padding) of each batch that `collect_states` lets the model write."""
    written = []
    generate = type(model).generate

    def spy(self: Any, **kwargs: Any) -> Any:
        written.append((generate(self, **kwargs), kwargs["attention_mask"]))
        return written[-1][0]

    monkeypatch.setattr(type(model), "generate", spy)
    written.append((collect_states(model, tokenizer, count=count), None))
    return written


def test_states_while_writing_equal_those_of_unpadded_sequences(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding has no part in them: each is what the model computes for its sequence alone, up to its end token."""
    *batches, (states, _) = replay(model, tokenizer, monkeypatch, 400)
    head = model.get_output_embeddings()
    expected = []
    for ids, mask in batches:
        prompt = mask.shape[1]
        rows = []
        for row, row_mask in zip(ids, mask, strict=True):
            alone = row[prompt - int(row_mask.sum()) :]
            start = int(row_mask.sum()) - 1
            ends = (alone[start + 1 :] == 2).nonzero()
            last = start + (int(ends[0]) + 1 if len(ends) else len(alone) - start - 1)
            caught: list[Any] = []
            handle = head.register_forward_pre_hook(lambda _, args, to=caught: to.append(args[0]))
            with torch.no_grad():
                model(alone[None])
            handle.remove()
            rows.append(caught[0][0, start:last].numpy())
        steps = max(len(row) for row in rows)
        expected += [row[t] for t in range(steps) for row in rows if t < len(row)]
    np.testing.assert_allclose(states, np.array(expected)[: len(states)], atol=1e-4)
    assert any((mask == 0).any() for _, mask in batches), "some prompt should be shorter than another"


def test_tokens_are_drawn_from_the_softmax() -> None:
    """Frequencies over many draws match the probabilities within five standard deviations."""
    from csv_decode.calibration import _Draw

    class Tap:
        def take(self) -> Any:
            return torch.zeros(20000, 1, 4)

    draw = _Draw([], torch.Generator().manual_seed(0), Tap(), lambda n: None)
    draw.start([0.5] * 20000)
    logits = torch.tensor([0.0, 1.0, -1.0, float("-inf"), 0.5])
    chosen = draw(torch.zeros(20000, 1), logits.expand(20000, 5)).argmax(-1).numpy()
    p = torch.softmax(logits / 0.5, -1).numpy()
    frequency = np.bincount(chosen, minlength=5) / 20000
    assert frequency[3] == 0
    assert (np.abs(frequency - p) <= 5 * np.sqrt(p * (1 - p) / 20000) + 1e-9).all()


def test_bfloat16_states_are_kept_exactly(tokenizer: Any) -> None:
    model = tiny_model().to(torch.bfloat16)
    states = collect_states(model, tokenizer, count=60)
    assert states.dtype == np.float32
    assert np.array_equal(states, torch.from_numpy(states).to(torch.bfloat16).float().numpy())


def test_a_model_that_stops_at_once_is_asked_again(tokenizer: Any) -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = list(range(model.config.vocab_size))
    assert len(collect_states(model, tokenizer, count=70)) == 70


def test_gpt2_with_few_positions(tokenizer: Any) -> None:
    config = transformers.GPT2Config(vocab_size=512, n_embd=32, n_layer=1, n_head=2, n_positions=24)
    model = transformers.GPT2LMHeadModel(config)
    assert collect_states(model, tokenizer, count=90).shape == (90, 32)
    assert collect_states(model, tokenizer, TEXT, count=90).shape == (90, 32)


def test_errors_say_what_to_do(model: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="pass tokenizer="):
        collect_states(model, None, "a text")
    with pytest.raises(ValueError, match="count is 0"):
        collect_states(model, tokenizer, count=0)
    with pytest.raises(ValueError, match="has 1 tokens"):
        collect_states(model, tokenizer, "w1")
    bert = transformers.BertModel(
        transformers.BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=1)
    )
    with pytest.raises(ValueError, match="no output embeddings"):
        collect_states(bert, tokenizer)


def test_the_key_names_text_count_and_seed() -> None:
    keys = {
        calibration_key(),
        calibration_key(seed=1),
        calibration_key(count=5),
        calibration_key("a"),
        calibration_key("b"),
    }
    assert len(keys) == 5
    assert len(OPENINGS) > 50
