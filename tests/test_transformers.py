"""The transformers integration: the stock model's tokens, certified where they can be, dense where they cannot."""

from __future__ import annotations

import ast
import copy
import inspect
import io
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    PhiConfig,
    PhiForCausalLM,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

import csv_decode as cd  # noqa: E402
from csv_decode.integrations import accelerate, accelerated, head_spec, restore  # noqa: E402

VOCAB, WIDTH = 1500, 64
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
GPT2 = GPT2Config(
    vocab_size=VOCAB, n_embd=WIDTH, n_layer=1, n_head=2, n_positions=128, bos_token_id=1, eos_token_id=2, pad_token_id=0
)
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama untied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)),
    "gemma2 (soft cap)": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SHAPE, head_dim=32, query_pre_attn_scalar=32, final_logit_softcapping=30.0)
    ),
    "cohere (logit scale)": lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.0625)),
    "granite (logit divisor)": lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=8.0)),
    "phi (bias)": lambda: PhiForCausalLM(PhiConfig(**SHAPE)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2),
}
PROMPTS = torch.tensor([[5, 9, 300, 77], [8, 12, 44, 1023]])
LEFT_PADDED = {
    "input_ids": torch.tensor([[0, 0, 9, 300, 77], [7, 8, 12, 44, 1023]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
}
GREEDY = {"do_sample": False, "max_new_tokens": 8}
SAMPLING = {"do_sample": True, "top_k": 50, "max_new_tokens": 8}
STATES = np.random.default_rng(0).normal(size=(200, WIDTH)).astype(np.float32)


@pytest.fixture(autouse=True)
def cascade(monkeypatch):
    """Heads of this size are dense by default; here the cascade is what is tested."""
    monkeypatch.setattr("csv_decode.head.SMALL_HEAD", 0)


@pytest.fixture(scope="module")
def zoo():
    """Stock models and an index for each, made once."""
    made = {}

    def get(name):
        if name not in made:
            torch.manual_seed(0)
            model = FAMILIES[name]().eval()
            if name == "phi (bias)":
                torch.nn.init.normal_(model.lm_head.bias, std=0.5)
            states = np.random.default_rng(0).normal(size=(200, WIDTH)).astype(np.float32)
            made[name] = model, cd.build_index(head_spec(model), states, seed=0)
        return made[name]

    return get


@pytest.fixture
def pair(zoo):
    """A stock model and an accelerated copy of it."""

    def get(name="llama"):
        stock, index = zoo(name)
        return stock, accelerate(copy.deepcopy(stock), index, budget=None)

    return get


def generate(model, seed=0, inputs=None, **settings):
    torch.manual_seed(seed)
    inputs = {"input_ids": PROMPTS} if inputs is None else inputs
    return model.generate(**inputs, **settings)


def assert_certified(stock, fast, **settings):
    """The same ids, and every step certified without a dense product inside the head."""
    before = fast.csv_decode.certified_steps
    expected = generate(stock, **settings)
    assert torch.equal(generate(fast, **settings), expected)
    state = fast.csv_decode
    assert state.certified_steps - before > 0
    assert state.dense_steps == {}
    assert state.statistics.fallbacks == {}
    return expected


def assert_dense(stock, fast, reason, **settings):
    """The same ids, and every step counted as dense under this reason."""
    fast.csv_decode.certified_steps, fast.csv_decode.dense_steps = 0, {}
    expected = generate(stock, **settings)
    got = generate(fast, **settings)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected)
    else:
        assert torch.equal(got.sequences, expected.sequences)
    assert set(fast.csv_decode.dense_steps) == {reason}
    assert fast.csv_decode.certified_steps == 0
    return got


# What is certified.


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_decoding_gives_the_stock_tokens(pair, name):
    stock, fast = pair(name)
    ids = assert_certified(stock, fast, **GREEDY)
    assert fast.csv_decode.certified_steps == ids.shape[1] - PROMPTS.shape[1]  # prefill and steps, one position each
    assert fast.csv_decode.statistics.states == 2 * fast.csv_decode.certified_steps


@pytest.mark.parametrize("name", FAMILIES)
def test_default_sampling_gives_the_stock_tokens(pair, name):
    assert_certified(*pair(name), **SAMPLING)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"temperature": 1.5, "top_p": 0.9},
        {"min_p": 0.05},
        {"typical_p": 0.9},  # runs after top_k, like every processor below
        {"epsilon_cutoff": 0.01, "eta_cutoff": 0.01},
        {"renormalize_logits": True},
        {"num_return_sequences": 2},
        {"top_k": VOCAB + 5},
    ],
    ids=str,
)
def test_everything_after_top_k_is_certified(pair, settings):
    stock, fast = pair()
    assert_certified(stock, fast, **SAMPLING | settings)


@pytest.mark.parametrize("settings", [GREEDY, SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_left_padding(pair, name, settings):
    assert_certified(*pair(name), inputs=LEFT_PADDED, **settings)


def test_one_prompt_long_prefill_in_chunks_and_no_cache(pair):
    stock, fast = pair()
    inputs = {"input_ids": torch.arange(3, 63)[None]}
    assert_certified(stock, fast, inputs=inputs, **GREEDY)
    assert_certified(stock, fast, inputs=inputs, prefill_chunk_size=16, **GREEDY)
    assert_certified(stock, fast, inputs=inputs, use_cache=False, **GREEDY)


@pytest.mark.parametrize("base", [GREEDY, SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.5},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 4},
        {"min_length": 9},
        {"suppress_tokens": [5, 77, 1499]},
        {"begin_suppress_tokens": [3, 300]},
        {"forced_eos_token_id": 2},
        {"sequence_bias": [[[7], 9.0], [[8, 9], 50.0], [[300], -9.0]]},
        {"bad_words_ids": [[5], [9, 300]]},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 3, "sequence_bias": [[[7], 4.0]]},
    ],
    ids=str,
)
def test_processors_that_change_known_ids_are_certified(pair, settings, base):
    stock, fast = pair()
    assert_certified(stock, fast, **base | settings)
    assert_certified(stock, fast, inputs=LEFT_PADDED, **base | settings)


def test_chunks_of_a_prompt_are_not_all_ids(pair):
    """A prefill in chunks prepares with parts of the prompt, but the penalty sees all of it."""
    stock, fast = pair()
    for seed in range(8):
        ids = torch.randint(3, VOCAB, (1, 24), generator=torch.Generator().manual_seed(seed))
        for _ in range(4):  # until the best token stands early in the prompt
            best = int(generate(stock, inputs={"input_ids": ids}, do_sample=False, max_new_tokens=1)[0, -1])
            ids[0, 1] = best
        settings = GREEDY | {"repetition_penalty": 5.0, "prefill_chunk_size": 8}
        expected = generate(stock, inputs={"input_ids": ids}, **settings)
        assert torch.equal(generate(fast, inputs={"input_ids": ids}, **settings), expected)
    assert fast.csv_decode.dense_steps == {"ids so far not known": 8 * 3}  # three chunks
    assert fast.csv_decode.certified_steps == 8 * 7


def test_a_bias_that_decides_is_certified(pair):
    stock, fast = pair()
    ids = assert_certified(stock, fast, sequence_bias=[[[7], 1000.0]], **GREEDY)
    assert (ids[:, PROMPTS.shape[1] :] == 7).all()


@pytest.mark.parametrize("name", ["llama", "cohere (logit scale)", "granite (logit divisor)", "phi (bias)"])
@pytest.mark.parametrize(
    "settings", [{"min_p": 0.05}, {"min_p": 0.3, "temperature": 1.7}, {"min_p": 0.01, "typical_p": 0.9}]
)
def test_min_p_needs_no_top_k(pair, name, settings):
    stock, fast = pair(name)
    assert_certified(stock, fast, do_sample=True, top_k=0, max_new_tokens=8, **settings)


def test_min_p_under_a_soft_cap_is_dense(pair):
    settings = {"do_sample": True, "top_k": 0, "min_p": 0.1, "max_new_tokens": 6}
    assert_dense(*pair("gemma2 (soft cap)"), "MinPLogitsWarper", **settings)


def test_an_edge_of_min_p_is_the_warpers_to_decide(zoo):
    stock = copy.deepcopy(zoo("llama untied")[0])
    with torch.no_grad():
        stock.lm_head.weight[1:] = stock.lm_head.weight[0]
    fast = accelerate(copy.deepcopy(stock), cd.build_index(head_spec(stock), seed=0), budget=None)
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 4}
    assert_certified(stock, fast, min_p=0.9, **settings)
    assert_dense(stock, fast, "edge of min-p", min_p=0.99999, **settings)


def test_a_top_k_among_the_users_own_processors_counts(pair):
    stock, fast = pair()

    def bias_odd_ids(input_ids, scores):
        return scores + 2.0 * (torch.arange(scores.shape[1]) % 2)

    settings = GREEDY | {"logits_processor": LogitsProcessorList([TopKLogitsWarper(7), bias_odd_ids])}
    assert_certified(stock, fast, **settings)
    assert fast.csv_decode.last.k == 7


def test_ties_at_rank_k_are_kept(zoo):
    stock, _ = zoo("llama untied")
    stock = copy.deepcopy(stock)
    with torch.no_grad():
        stock.lm_head.weight[VOCAB // 2 :] = stock.lm_head.weight[: VOCAB // 2]  # every logit comes twice
    fast = accelerate(copy.deepcopy(stock), cd.build_index(head_spec(stock), seed=0))
    assert_certified(stock, fast, **GREEDY)
    assert_certified(stock, fast, do_sample=True, top_k=5, max_new_tokens=8)
    assert {len(ids) for ids in fast.csv_decode.last.ids} == {6}


def test_results_check_out_and_time_is_told(pair):
    stock, fast = pair("phi (bias)")
    caught = []
    with fast.lm_head.register_forward_pre_hook(lambda _, args: caught.append(args[0][:, 0].clone())):
        generate(fast, **SAMPLING)
    state = fast.csv_decode
    assert state.last.certificates.certified.all()
    assert cd.verify(state.last, caught[-1], head_spec(stock)).states == 2
    assert state.seconds_certified > 0
    assert state.seconds_dense == 0
    assert "certified_steps=8" in repr(state)


# What is dense.


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"do_sample": True, "top_k": 0, "top_p": 0.9}, "TopPLogitsWarper"),
        ({"do_sample": True, "top_k": 0}, "sampling without top_k"),
        ({"do_sample": True, "top_k": 0, "temperature": 0.5}, "sampling without top_k"),
        ({"do_sample": True, "top_h": 0.5}, "TopHLogitsWarper"),  # runs before top_k
        ({"do_sample": True, "top_k": 0, "repetition_penalty": 1.3}, "sampling without top_k"),
        ({"do_sample": True, "top_k": 0, "repetition_penalty": 1.3, "min_p": 0.1}, "MinPLogitsWarper"),
        (
            {"do_sample": True, "top_k": 0, "exponential_decay_length_penalty": (2, 1.5)},
            "ExponentialDecayLengthPenalty",
        ),
        ({"do_sample": False, "guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor"),
        ({"do_sample": False, "remove_invalid_values": True}, "InfNanRemoveLogitsProcessor"),
        ({"do_sample": False, "num_beams": 3}, "beam search"),
        ({"do_sample": True, "num_beams": 3}, "beam search"),
        ({"do_sample": False, "return_dict_in_generate": True, "output_logits": True}, "scores or logits returned"),
        ({"do_sample": True, "return_dict_in_generate": True, "output_scores": True}, "scores or logits returned"),
    ],
    ids=str,
)
def test_everything_else_is_dense_and_says_why(pair, settings, reason):
    assert_dense(*pair(), reason, max_new_tokens=6, **settings)


def test_returned_logits_are_stock(pair):
    stock, fast = pair()
    settings = GREEDY | {"return_dict_in_generate": True, "output_logits": True}
    for a, b in zip(generate(stock, **settings).logits, generate(fast, **settings).logits, strict=True):
        assert torch.equal(a, b)


def test_assisted_decoding_is_dense(pair):
    stock, fast = pair()
    one = {"input_ids": torch.tensor([[5, 9, 300, 77, 5, 9]])}
    assert_dense(stock, fast, "assisted decoding", inputs=one, prompt_lookup_num_tokens=3, **GREEDY)
    assert_dense(stock, fast, "assisted decoding", inputs=one, assistant_model=copy.deepcopy(stock), **GREEDY)
    # as an assistant it returns its scores
    fast.csv_decode.dense_steps = {}
    expected = generate(stock, inputs=one, assistant_model=stock, **GREEDY)
    assert torch.equal(generate(stock, inputs=one, assistant_model=fast, **GREEDY), expected)
    assert set(fast.csv_decode.dense_steps) == {"scores or logits returned"}


def test_unknown_processors_are_dense(pair):
    stock, fast = pair()

    class Mine(TemperatureLogitsWarper):
        def __call__(self, input_ids, scores):
            return -scores

    assert_dense(stock, fast, "Mine", logits_processor=LogitsProcessorList([Mine(0.5)]), **GREEDY)
    raised = LogitsProcessorList([TopKLogitsWarper(5, filter_value=1e9)])
    assert_dense(stock, fast, "TopKLogitsWarper", logits_processor=raised, **GREEDY)
    only = {"prefix_allowed_tokens_fn": lambda batch, ids: [3, 4, 5]}
    assert_dense(stock, fast, "PrefixConstrainedLogitsProcessor", **only, **GREEDY)


def test_custom_loops_are_dense(pair):
    stock, fast = pair()

    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        for _ in range(3):
            inputs = model.prepare_inputs_for_generation(input_ids, use_cache=False)
            input_ids = torch.cat([input_ids, model(**inputs).logits[:, -1].argmin(-1)[:, None]], 1)
        return input_ids

    assert_dense(stock, fast, "custom decoding loop", custom_generate=loop, max_new_tokens=3)


def test_a_model_with_its_own_loop_is_dense(zoo):
    stock, index = zoo("llama")

    class Contrary(LlamaForCausalLM):
        def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
            inputs = self.prepare_inputs_for_generation(input_ids, use_cache=False)
            return self(**inputs).logits[:, -1].argmin(-1)

    stock = copy.deepcopy(stock)
    stock.__class__ = Contrary
    fast = accelerate(copy.deepcopy(stock), index)
    assert_dense(stock, fast, "own decoding loop", **GREEDY)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_models_own_arithmetic_decides(zoo, dtype):
    """Greedy: certified where the bound on that arithmetic decides, else by the stock head."""
    stock = copy.deepcopy(zoo("llama")[0]).to(dtype)
    fast = accelerate(copy.deepcopy(stock), calibration=STATES, reference="model", budget=None)
    state = fast.csv_decode
    for inputs in ({"input_ids": PROMPTS}, LEFT_PADDED, {"input_ids": PROMPTS[:1]}):
        expected = generate(stock, inputs=inputs, **GREEDY)
        assert torch.equal(generate(fast, inputs=inputs, **GREEDY), expected)
    assert state.certified_steps > 3 * 8 * 0.5
    assert set(state.dense_steps) <= {"rounding does not decide"}
    assert_dense(stock, fast, f"{str(dtype)[6:]} output layer", **SAMPLING)
    assert_dense(stock, fast, f"{str(dtype)[6:]} output layer", repetition_penalty=1.3, **GREEDY)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_models_can_decode_by_exact_logits(zoo, dtype):
    """Which are not the stock head's: the tokens are those of the float64 product."""
    model = copy.deepcopy(zoo("llama")[0]).to(dtype)
    fast = accelerate(model, calibration=STATES, reference="exact", budget=None)
    caught = []
    with fast.lm_head.register_forward_pre_hook(lambda _, args: caught.append(args[0][:, 0].double())):
        ids = generate(fast, **GREEDY)[:, PROMPTS.shape[1] :]
    for step, h in enumerate(caught):
        assert torch.equal(ids[:, step], torch.argmax(h @ fast.lm_head.weight.double().T, 1))
    generate(fast, **SAMPLING)
    assert fast.csv_decode.dense_steps == {}


def test_a_head_that_breaks_the_bound_on_its_arithmetic_is_dense(pair, monkeypatch):
    stock, fast = pair()
    fast = accelerate(fast, fast.csv_decode.head.index, reference="model", budget=None)
    monkeypatch.setattr("csv_decode.integrations.transformers.keeps_bound", lambda *_: False)
    assert_dense(stock, fast, "arithmetic of the model's head", **GREEDY)


def test_a_reference_that_is_none_is_refused(pair):
    with pytest.raises(ValueError, match="reference is 'best', expected 'exact', 'model' or None"):
        accelerate(copy.deepcopy(pair()[0]), reference="best")


def test_a_saturated_soft_cap_is_dense(zoo):
    stock, _ = zoo("gemma2 (soft cap)")
    stock = copy.deepcopy(stock)
    stock.config.final_logit_softcapping = 0.05  # float32 tanh is one beyond 9
    fast = accelerate(copy.deepcopy(stock), cd.build_index(head_spec(stock), seed=0))
    assert_dense(stock, fast, "soft cap saturated", **GREEDY)
    assert_dense(stock, fast, "soft cap saturated", **SAMPLING)


def test_a_changed_soft_cap_is_dense(pair):
    _stock, fast = pair("gemma2 (soft cap)")
    fast.config.final_logit_softcapping = 20.0
    generate(fast, **GREEDY)
    assert fast.csv_decode.dense_steps == {"scale or soft cap changed": 8}


def test_gradients_autocast_hooks_and_broken_states_are_dense(pair):
    _stock, fast = pair()
    state = fast.csv_decode

    def reasons():
        seen, state.dense_steps = set(state.dense_steps), {}
        return seen

    type(fast).generate.__wrapped__.__wrapped__(fast, PROMPTS, **GREEDY)  # generate without its no_grad
    with torch.autocast("cpu", torch.bfloat16):
        generate(fast, **GREEDY)
        assert reasons() - {"gradients"} == {"autocast"}
    with fast.lm_head.register_forward_hook(lambda *_: None):
        generate(fast, **GREEDY)
        assert reasons() == {"forward hook"}
    seen = []
    with fast.register_forward_hook(lambda _, args, out: seen.append(out.logits)):
        generate(fast, **GREEDY)
    assert reasons() == {"forward hook"}
    with torch.nn.modules.module.register_module_forward_hook(lambda *_: None):
        generate(fast, **GREEDY)
    assert reasons() == {"forward hook"}
    assert all(torch.isfinite(logits).all() for logits in seen)
    with torch.no_grad():
        fast.model.norm.weight[3] = float("nan")
    generate(fast, **GREEDY)
    assert reasons() == {"state not finite"}


def test_several_positions_at_once_are_dense(pair):
    stock, fast = pair()
    settings = GREEDY | {"logits_to_keep": 0}
    assert torch.equal(generate(fast, **settings), generate(stock, **settings))
    assert fast.csv_decode.dense_steps == {"several positions": 1}
    assert fast.csv_decode.certified_steps == 7


# The model outside generate.


def test_forward_loss_and_backward_are_stock(pair):
    stock, fast = pair()
    stock = copy.deepcopy(stock)
    a, b = stock(PROMPTS, labels=PROMPTS), fast(PROMPTS, labels=PROMPTS)
    assert torch.equal(a.logits, b.logits)
    assert torch.equal(a.loss, b.loss)
    a.loss.backward()
    b.loss.backward()
    for p, q in zip(stock.parameters(), fast.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    assert fast.csv_decode.dense_steps == {}


def test_a_forward_call_from_inside_generate_is_stock(pair):
    stock, fast = pair()
    rows = []

    class Nosy(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            rows.append((fast(input_ids).logits, stock(input_ids).logits))
            fast.generate(input_ids, do_sample=False, num_beams=2, max_new_tokens=1)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    settings = GREEDY | {"stopping_criteria": [Nosy()]}
    assert torch.equal(generate(fast, **settings), generate(stock, **GREEDY))
    assert fast.csv_decode.certified_steps == 8
    assert set(fast.csv_decode.dense_steps) == {"beam search"}
    assert all(torch.equal(a, b) for a, b in rows)


def test_threads_do_not_mix(pair):
    stock, fast = pair()
    jobs = [GREEDY | {"num_beams": 2}, GREEDY, GREEDY | {"guidance_scale": 1.5}, GREEDY | {"repetition_penalty": 1.5}]
    expected = [stock.generate(PROMPTS, **job) for job in jobs]
    got = [None] * len(jobs)
    errors = []

    def work(i):
        for _ in range(3):
            got[i] = fast.generate(PROMPTS, **jobs[i])
            if not torch.equal(fast(PROMPTS).logits, stock(PROMPTS).logits):
                errors.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert fast.csv_decode.certified_steps == 2 * 3 * 8
    assert fast.csv_decode.statistics.states == 2 * 2 * 3 * 8
    assert fast.csv_decode.dense_steps["UnbatchedClassifierFreeGuidanceLogitsProcessor"] == 3 * 8


# Changed weights.


def _optimizer_step(model):
    model(PROMPTS, labels=PROMPTS).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def _state_dict(model):
    model.load_state_dict({name: 1.5 * value for name, value in model.state_dict().items()})


def _in_place(model):
    with torch.no_grad():
        model.lm_head.weight[700:] *= -2


def _through_data(model):
    model.lm_head.weight.data[3] += 1.0  # torch does not count this write


def _through_numpy(model):
    model.lm_head.weight.detach().numpy()[17] = 0.5


def _moved_data(model):
    model.lm_head.weight.data = model.lm_head.weight.data.flip(0).clone()


def _new_parameter(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * -1)


def _new_layer(model):
    model.set_output_embeddings(torch.nn.Linear(WIDTH, VOCAB, bias=False))


def _new_bias(model):
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-3, 3, VOCAB))


def _resize(model):
    model.resize_token_embeddings(VOCAB + 64, mean_resizing=False)


def _pruned(model):
    from torch.nn.utils import prune

    model.requires_grad_(False)
    prune.random_unstructured(model.lm_head, "weight", amount=0.5)


def _parametrized(model):
    class Negative(torch.nn.Module):
        def forward(self, weight):
            return -weight

    torch.nn.utils.parametrize.register_parametrization(model.lm_head, "weight", Negative())


class _Adapter(torch.nn.Module):
    """As PEFT does it: the stock layer inside, a low-rank term added to its output."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.a = torch.nn.Parameter(torch.randn(WIDTH, 4))
        self.b = torch.nn.Parameter(torch.randn(4, VOCAB))

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, hidden):
        return self.base_layer(hidden) + hidden @ self.a @ self.b


def _adapter(model):
    model.lm_head = _Adapter(model.lm_head)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_optimizer_step, "weights changed"),
        (_state_dict, "weights changed"),
        (_in_place, "weights changed"),
        (_through_data, "weights changed"),
        (_through_numpy, "weights changed"),
        (_moved_data, "weights changed"),
        (_new_parameter, "weights replaced"),
        (_new_bias, "weights replaced"),
        (_pruned, "weights replaced"),
        (_parametrized, "weights replaced"),
        (_new_layer, "output layer replaced"),
        (_resize, "output layer replaced"),
        (_adapter, "output layer replaced"),
    ],
)
@pytest.mark.parametrize("name", ["llama", "llama untied"])
def test_changed_weights_are_noticed(zoo, name, change, reason):
    stock, index = zoo(name)
    fast = accelerate(copy.deepcopy(stock), index)
    torch.manual_seed(1)
    change(fast)
    if change is _resize and name == "llama":
        reason = "weights changed"  # tied: the parameter is resized in place and the layer stays
    now = copy.deepcopy(fast)  # a copy is a stock model
    assert accelerated(now) is None
    with pytest.warns(UserWarning, match=f"{reason} since accelerate"):
        assert_dense(now, fast, reason, **GREEDY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # told once
        assert_dense(now, fast, reason, **SAMPLING)


def test_warnings_point_at_the_call_they_are_about(pair):
    _, fast = pair("llama untied")
    _in_place(fast)
    with pytest.warns(UserWarning, match="weights changed") as told:
        generate(fast, **GREEDY)
    assert {warning.filename for warning in told} == {__file__}


def test_the_documentation_has_every_reason(pair):
    """Of steps that go dense; those that are class names of processors are described in words."""
    source = ast.parse(inspect.getsource(sys.modules[accelerate.__module__]))
    places = {
        "_contract",
        "_answer",
        "touched_ids",
        "_moved",
        "_rewritten",
        "_obstacle",
        "_sparse_row",
        "arm",
        "close",
        "dense",
        "_certified_class",
    }
    found = set()
    for function in (node for node in ast.walk(source) if isinstance(node, ast.FunctionDef) and node.name in places):
        for node in ast.walk(function):
            if isinstance(node, (ast.Return, ast.Assign, ast.AnnAssign, ast.Call)):
                for text in ast.walk(node):
                    if isinstance(text, ast.Constant) and isinstance(text.value, str) and " " in text.value:
                        found.add(text.value)
    found -= {ast.get_docstring(node, clean=False) for node in ast.walk(source) if isinstance(node, ast.FunctionDef)}
    assert {"weights changed", "beam search", "own decoding loop", "logits overflow", "sampling without top_k"} <= found
    page = (Path(__file__).parent.parent / "docs" / "transformers.md").read_text()
    assert not {reason for reason in found if reason.strip() not in page}
    from csv_decode.head import CertifiedHead

    for reason in ("no index", "small head", "vanishing state", "overflow", "budget"):  # inside the head
        assert reason in inspect.getsource(CertifiedHead)
        assert f"`{reason}`" in page


def test_weights_changed_during_generate_are_noticed(pair):
    stock, fast = pair("llama untied")
    stock = copy.deepcopy(stock)

    def changing(model):
        class Change(transformers.StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                if input_ids.shape[1] == 6:
                    with torch.no_grad():
                        model.lm_head.weight.neg_()
                return torch.zeros(len(input_ids), dtype=torch.bool)

        return [Change()]

    expected = generate(stock, stopping_criteria=changing(stock), **GREEDY)
    with pytest.warns(UserWarning, match="weights changed"):
        assert torch.equal(generate(fast, stopping_criteria=changing(fast), **GREEDY), expected)
    assert (fast.csv_decode.certified_steps, fast.csv_decode.dense_steps) == (2, {"weights changed": 6})


def test_an_adapter_that_was_merged_is_noticed(pair):
    _, fast = pair("llama untied")
    head = fast.lm_head
    fast.lm_head = _Adapter(head)
    head.weight.data += (fast.lm_head.a @ fast.lm_head.b).T.detach()
    fast.lm_head = head  # the same module, the same memory, the same version
    with pytest.warns(UserWarning, match="weights changed"):
        assert_dense(copy.deepcopy(fast), fast, "weights changed", **GREEDY)


def test_accelerating_again_certifies_the_new_weights(pair):
    _, fast = pair()
    old = fast.csv_decode
    _in_place(fast)
    with pytest.raises(cd.StaleIndexError):
        accelerate(fast, old.head.index)
    assert fast.csv_decode is old
    accelerate(fast, calibration=np.random.default_rng(0).normal(size=(100, WIDTH)))
    assert fast.csv_decode is not old
    assert_certified(copy.deepcopy(fast), fast, **GREEDY)


def test_moves_that_move_nothing_stay_certified(pair):
    stock, fast = pair()
    fast.to("cpu").float().eval().requires_grad_(False).tie_weights()
    assert_certified(stock, fast, **GREEDY)


def test_a_compiled_forward_is_dense(pair):
    stock, fast = pair()
    fast.forward = torch.compile(fast.forward, backend="eager")
    assert_dense(stock, fast, "output layer not reached", **GREEDY)


# The model as an object.


@pytest.mark.parametrize("name", ["llama", "llama untied", "phi (bias)"])
def test_saving_and_loading(pair, tmp_path, name):
    stock, fast = pair(name)
    expected = stock.state_dict()
    assert fast.state_dict().keys() == expected.keys()
    stock.save_pretrained(tmp_path / "stock")
    fast.save_pretrained(tmp_path / "fast")
    for file in (tmp_path / "stock").iterdir():
        assert file.read_bytes() == (tmp_path / "fast" / file.name).read_bytes(), file.name
    again = type(stock).from_pretrained(tmp_path / "fast")
    assert type(again) is type(stock)
    assert_certified(stock, accelerate(again, fast.csv_decode.head.index), **GREEDY)


def test_copies_and_pickles_are_stock_models(pair):
    stock, fast = pair()
    buffer = io.BytesIO()
    torch.save(fast, buffer)
    buffer.seek(0)
    for model in (copy.deepcopy(fast), torch.load(buffer, weights_only=False)):
        assert accelerated(model) is None
        assert type(model) is type(stock)
        assert type(model.lm_head) is torch.nn.Linear
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(generate(model, **GREEDY), generate(stock, **GREEDY))
    assert fast.csv_decode.certified_steps == 0
    assert_certified(stock, fast, **GREEDY)


def test_restore_gives_the_stock_model_back(pair):
    stock, fast = pair()
    head, state = fast.lm_head, fast.csv_decode
    assert isinstance(fast, LlamaForCausalLM)
    assert type(fast).__name__ == "LlamaForCausalLM"
    assert restore(fast) is fast
    assert (type(fast), type(head)) == (LlamaForCausalLM, torch.nn.Linear)
    assert fast.lm_head is head
    assert accelerated(fast) is None
    assert not hasattr(fast, "csv_decode")
    assert torch.equal(generate(fast, **GREEDY), generate(stock, **GREEDY))
    assert state.certified_steps == 0
    assert restore(fast) is fast


def test_accelerating_twice_replaces(pair):
    stock, fast = pair()
    first = fast.csv_decode
    accelerate(fast, first.head.index)
    assert fast.csv_decode is not first
    assert_certified(stock, fast, **GREEDY)
    assert type(restore(fast)) is type(stock)


def test_an_index_may_be_a_file(pair, tmp_path):
    stock, fast = pair()
    fast.csv_decode.head.index.save(tmp_path / "head.idx")
    assert_certified(stock, accelerate(restore(fast), tmp_path / "head.idx"), **GREEDY)
    with pytest.raises(FileNotFoundError):
        accelerate(fast, str(tmp_path / "none.idx"))


def test_without_an_index_the_cache_has_one(zoo, tmp_path, monkeypatch):
    monkeypatch.setenv("CSV_DECODE_CACHE", str(tmp_path))
    stock, _ = zoo("llama")
    stages = []
    fast = accelerate(copy.deepcopy(stock), budget=None, progress=lambda stage, done, total: stages.append(stage))
    assert "states" in stages
    assert_certified(stock, fast, **GREEDY)
    stages.clear()
    assert_certified(
        stock, accelerate(copy.deepcopy(stock), budget=None, progress=lambda *at: stages.append(at)), **GREEDY
    )
    assert stages == []  # found, not built


def test_a_text_calibrates(zoo, tmp_path, monkeypatch):
    monkeypatch.setenv("CSV_DECODE_CACHE", str(tmp_path))
    asked = []
    states = np.random.default_rng(0).normal(size=(100, WIDTH))
    monkeypatch.setattr("csv_decode.calibration.collect_states", lambda *args, text, **_: asked.append(text) or states)
    stock, _ = zoo("llama")
    (tmp_path / "text").write_text("from a file", encoding="utf-8")
    for calibration in ("in so many words", tmp_path / "text"):
        assert_certified(stock, accelerate(copy.deepcopy(stock), calibration=calibration, budget=None), **GREEDY)
    assert asked == ["in so many words", "from a file"]


def test_restore_after_a_parametrization(pair):
    _, fast = pair("llama untied")
    _parametrized(fast)
    now = copy.deepcopy(fast)
    assert torch.equal(generate(restore(fast), **GREEDY), generate(now, **GREEDY))


# The spec, and what is refused.


def test_head_spec_shares_memory_and_knows_scale_and_cap(zoo):
    def spec(name):
        return head_spec(zoo(name)[0])

    stock = zoo("llama")[0]
    assert spec("llama").rows.data.__array_interface__["data"][0] == stock.lm_head.weight.data_ptr()
    assert (spec("llama").scale, spec("llama").softcap, spec("llama").bias) == (1.0, None, None)
    assert spec("gemma2 (soft cap)").softcap == 30.0
    assert spec("cohere (logit scale)").scale == 0.0625
    assert spec("granite (logit divisor)").scale == 1 / 8
    assert torch.equal(torch.from_numpy(spec("phi (bias)").bias32), zoo("phi (bias)")[0].lm_head.bias)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_spec_gives_the_models_logits(zoo, name):
    stock, index = zoo(name)
    caught = []
    with stock.lm_head.register_forward_pre_hook(lambda _, args: caught.append(args[0][:, -1])), torch.no_grad():
        logits = stock(PROMPTS).logits[:, -1].double()
    top = cd.CertifiedHead(index, head_spec(stock)).top_k(caught[0], 3)
    np.testing.assert_allclose(top.logits, logits.topk(3).values, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(top.ids, logits.topk(3).indices)


def test_an_unknown_change_of_the_logits_is_refused(zoo):
    class Biased(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits + torch.arange(VOCAB)
            return out

    stock, index = zoo("llama")
    model = copy.deepcopy(stock)
    model.__class__ = Biased
    with pytest.raises(ValueError, match="changes its logits after the output layer"):
        accelerate(model, index)
    assert accelerated(model) is None


def test_what_cannot_be_accelerated_says_why(zoo):
    stock, index = zoo("llama untied")
    with pytest.raises(ValueError, match="Linear is not a causal language model"):
        accelerate(torch.nn.Linear(3, 3))
    with pytest.raises(ValueError, match="BertModel is not a causal language model"):
        accelerate(
            transformers.BertModel(
                transformers.BertConfig(
                    vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
                )
            )
        )
    with pytest.raises(ValueError, match="is on meta, expected cpu"):
        accelerate(copy.deepcopy(stock).to("meta"))
    quantized = copy.deepcopy(stock)
    quantized.lm_head.__class__ = type("Int8Linear", (torch.nn.Linear,), {})
    with pytest.raises(ValueError, match=r"expected a plain torch.nn.Linear \(not quantized"):
        accelerate(quantized)
    with pytest.raises(ValueError, match="both index and calibration"):
        accelerate(copy.deepcopy(stock), index, calibration="text")
    with torch.inference_mode():
        made_there = LlamaForCausalLM(LlamaConfig(**SHAPE))
    with pytest.raises(ValueError, match=r"torch\.inference_mode"):
        accelerate(made_there, index)


def test_import_does_not_load_torch():
    import subprocess
    import sys

    code = "import sys, csv_decode, csv_decode.integrations; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
