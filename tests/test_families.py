"""Every family of models: its real class, small and random, writes the same tokens through the certified head.

The heads here are just above `SMALL_HEAD`, so they take the path that a real head takes.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import nn  # noqa: E402

import csv_decode as cd  # noqa: E402
from csv_decode.calibration import collect_states  # noqa: E402
from csv_decode.head import SMALL_HEAD  # noqa: E402
from csv_decode.integrations import accelerate, accelerated, head_spec, restore  # noqa: E402

VOCAB, WIDTH = 4200, 64
assert VOCAB * WIDTH >= SMALL_HEAD
LENGTH = 6
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SPREAD = {"initializer_range": 0.3}  # logits some units apart, as in a trained model
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    **SPECIAL,
    **SPREAD,
}
GEMMA = {**SHAPE, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}
DEEPSEEK = {
    **SHAPE,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
T5 = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "d_kv": 32,
    "d_ff": 64,
    "feed_forward_proj": "gated-gelu",
    "num_layers": 1,
    "num_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 128,
    "init_std": 0.3,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    **SPECIAL,
}


VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


def gemma3_multimodal() -> Any:
    config = transformers.Gemma3Config(
        text_config=GEMMA,
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=VOCAB - 1,
        boi_token_index=VOCAB - 2,
        eoi_token_index=VOCAB - 3,
        **SPECIAL,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def aya_vision() -> Any:
    """Cohere's language model, whose scale this class leaves out."""
    config = transformers.AyaVisionConfig(
        text_config={**SHAPE, "model_type": "cohere2", "logit_scale": 0.25},
        vision_config={**VISION, "model_type": "siglip_vision_model"},
        image_token_id=VOCAB - 1,
    )
    return transformers.AyaVisionForConditionalGeneration(config)


def muse() -> Any:
    """A scale and a soft cap at once."""
    config = transformers.MuseGlimmerConfig(
        text_config={**SHAPE, "head_dim": 32, "output_multiplier": 0.25, "final_logit_softcapping": 20.0},
        vision_config={key: VISION[key] for key in list(VISION)[:4]},
        out_hidden_size=64,
        projector_hidden_size=64,
    )
    return transformers.MuseGlimmerForConditionalGeneration(config)


def t5gemma() -> Any:
    config = transformers.T5GemmaConfig(
        encoder=dict(GEMMA), decoder={**GEMMA, "final_logit_softcapping": 20.0}, vocab_size=VOCAB, **SPECIAL
    )
    return transformers.T5GemmaForConditionalGeneration(config)


def t5(scaled: bool) -> Any:
    """The first T5 ties its layers and scales the states before the output layer; T5 1.1 does neither."""
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, tie_word_embeddings=scaled))
    if not scaled:
        model.lm_head.weight = nn.Parameter(torch.randn(VOCAB, WIDTH) / 3)
    return model


def one_of(model: str, config: str, settings: dict[str, Any], **more: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**{**settings, **more}))


class Family(NamedTuple):
    """make: a model of the family. scale, softcap, bias: what its output layer has. seq2seq: an encoder reads first."""

    make: Callable[[], Any]
    scale: float = 1.0
    softcap: float | None = None
    bias: bool = False
    seq2seq: bool = False


FAMILIES = {
    "llama": Family(one_of("LlamaForCausalLM", "LlamaConfig", SHAPE)),
    "llama, tied": Family(one_of("LlamaForCausalLM", "LlamaConfig", SHAPE, tie_word_embeddings=True)),
    "mistral": Family(one_of("MistralForCausalLM", "MistralConfig", SHAPE, sliding_window=16)),
    "mixtral": Family(one_of("MixtralForCausalLM", "MixtralConfig", SHAPE, num_local_experts=4)),
    "qwen2": Family(one_of("Qwen2ForCausalLM", "Qwen2Config", SHAPE, tie_word_embeddings=True)),
    "qwen3": Family(one_of("Qwen3ForCausalLM", "Qwen3Config", SHAPE, head_dim=32)),
    "gemma2": Family(
        one_of("Gemma2ForCausalLM", "Gemma2Config", GEMMA, final_logit_softcapping=30.0),
        softcap=30.0,
    ),
    "gemma3": Family(one_of("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA)),
    "gemma3, multimodal": Family(gemma3_multimodal),
    "phi": Family(one_of("PhiForCausalLM", "PhiConfig", SHAPE), bias=True),
    "phi3": Family(one_of("Phi3ForCausalLM", "Phi3Config", SHAPE)),
    "deepseek v2": Family(one_of("DeepseekV2ForCausalLM", "DeepseekV2Config", DEEPSEEK)),
    "deepseek v3": Family(one_of("DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK)),
    "cohere": Family(one_of("CohereForCausalLM", "CohereConfig", SHAPE, logit_scale=0.0625), scale=0.0625),
    "cohere2": Family(one_of("Cohere2ForCausalLM", "Cohere2Config", SHAPE, logit_scale=0.25), scale=0.25),
    "aya vision": Family(aya_vision),
    "granite": Family(one_of("GraniteForCausalLM", "GraniteConfig", SHAPE, logits_scaling=8.0), scale=1 / 8),
    "muse glimmer": Family(muse, scale=0.25, softcap=20.0),
    "olmo2": Family(one_of("Olmo2ForCausalLM", "Olmo2Config", SHAPE)),
    "gpt2": Family(
        one_of("GPT2LMHeadModel", "GPT2Config", SPECIAL, vocab_size=VOCAB, n_embd=WIDTH, n_layer=1, n_head=2, **SPREAD)
    ),
    "gpt-neox": Family(one_of("GPTNeoXForCausalLM", "GPTNeoXConfig", SHAPE)),
    "falcon": Family(one_of("FalconForCausalLM", "FalconConfig", SHAPE)),
    "t5, scaled": Family(lambda: t5(scaled=True), seq2seq=True),
    "t5, untied": Family(lambda: t5(scaled=False), seq2seq=True),
    "t5gemma": Family(t5gemma, softcap=20.0, seq2seq=True),
    "bart": Family(one_of("BartForConditionalGeneration", "BartConfig", BART), seq2seq=True),
}
INPUTS = {
    "one prompt": {"input_ids": torch.tensor([[5, 9, 300, 77, 4100]])},
    "left padding": {
        "input_ids": torch.tensor([[0, 0, 9, 300, 77], [7, 8, 12, 44, 4023]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
    },
}
GREEDY = {"do_sample": False, "max_new_tokens": LENGTH}
SAMPLING = {"do_sample": True, "top_k": 50, "max_new_tokens": LENGTH}


@functools.cache
def _made(name: str) -> tuple[Any, cd.Index]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = FAMILIES[name].make().eval()
        model.generation_config.eos_token_id = None  # every text has its full length, and every step is counted
        for parameter, value in model.named_parameters():
            if parameter.endswith("lm_head.bias"):
                nn.init.normal_(value, std=0.5)
            elif parameter.endswith("post_feedforward_layernorm.weight"):  # beside large embeddings, whose own token
                nn.init.constant_(value, 20)  # a tied output layer would repeat for ever
            elif parameter.endswith("DenseReluDense.wo.weight"):
                nn.init.normal_(value)
        return model, index_of(model)


def tokenizer(text: str, verbose: bool = True) -> dict[str, list[int]]:
    return {"input_ids": torch.randint(3, VOCAB, (120,), generator=torch.Generator().manual_seed(0)).tolist()}


def index_of(model: Any) -> cd.Index:
    return cd.build_index(head_spec(model), collect_states(model, tokenizer, text="any"), seed=0)


def stock_and_index(name: str) -> tuple[Any, cd.Index]:
    """A stock model that the test may change, and an index for it."""
    model, index = _made(name)
    return copy.deepcopy(model), index


def pair(name: str) -> tuple[Any, Any]:
    """A stock model and an accelerated one."""
    model, index = _made(name)
    return model, accelerate(copy.deepcopy(model), index, budget=None)


def generate(model: Any, inputs: str = "left padding", **settings: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(**INPUTS[inputs], **settings)


def assert_certified(stock: Any, fast: Any) -> None:
    """The stock ids, every step certified, none by a dense product inside the head."""
    state = fast.csv_decode
    for inputs, settings in (("one prompt", GREEDY), ("left padding", GREEDY), ("left padding", SAMPLING)):
        steps, states = state.certified_steps, state.statistics.states
        expected = generate(stock, inputs, **settings)
        assert torch.equal(generate(fast, inputs, **settings), expected)
        assert state.certified_steps - steps == LENGTH
        assert state.statistics.states - states == len(expected) * LENGTH
    assert state.dense_steps == {}
    assert state.statistics.fallbacks == {}
    assert state.last.certificates.certified.all()


def assert_dense(stock: Any, fast: Any, reason: str, model: Any = None) -> None:
    """The stock ids, every step counted as dense under this reason; `model`: what generates, if not `fast` itself."""
    state = fast.csv_decode
    state.certified_steps, state.dense_steps = 0, {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*since accelerate")
        for settings in (GREEDY, SAMPLING):
            expected = generate(stock, **settings)
            assert torch.equal(generate(model or fast, **settings), expected)
    assert state.dense_steps == {reason: 2 * LENGTH}
    assert state.certified_steps == 0


# The families.


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_certified(name):
    family = FAMILIES[name]
    stock, fast = pair(name)
    spec = head_spec(stock)
    assert (spec.scale, spec.softcap, spec.bias is not None) == (family.scale, family.softcap, family.bias)
    assert stock.config.is_encoder_decoder == family.seq2seq
    assert_certified(stock, fast)
    assert accelerated(stock) is None
    assert type(restore(fast)) is type(stock)
    assert torch.equal(generate(fast, **GREEDY), generate(stock, **GREEDY))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_texts_of_a_family_tell_heads_apart(name):
    """A constant text would be the same through any head."""
    new = generate(_made(name)[0], **SAMPLING)[:, -LENGTH:]
    assert len(new.unique()) > LENGTH


@pytest.mark.parametrize("name", ["t5, scaled", "bart", "gemma3, multimodal"])
def test_a_model_of_any_kind_calibrates_itself(name):
    """(The indexes of these tests are of states on a text.)"""
    assert collect_states(_made(name)[0], count=50).shape == (50, WIDTH)


def test_what_an_encoder_and_decoder_cannot_prove_is_dense():
    stock, fast = pair("t5, untied")
    for settings in (GREEDY | {"num_beams": 2}, GREEDY | {"remove_invalid_values": True}):
        assert torch.equal(generate(fast, **settings), generate(stock, **settings))
    assert set(fast.csv_decode.dense_steps) == {"beam search", "InfNanRemoveLogitsProcessor"}
    assert fast.csv_decode.certified_steps == 0


# Families that do to their logits what the configuration does not tell.


def test_logits_that_are_changed_otherwise_are_refused():
    model, index = stock_and_index("bart")
    model.final_logits_bias += torch.linspace(-5, 5, VOCAB)  # of the model, not of its layer
    with pytest.raises(ValueError, match="changes its logits after the output layer"):
        accelerate(model, index)
    assert accelerated(model) is None


def test_a_model_that_does_not_read_text_is_refused():
    config = transformers.WhisperConfig(
        vocab_size=VOCAB,
        d_model=WIDTH,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=16,
        **SPECIAL,
    )
    with pytest.raises(ValueError, match="WhisperForConditionalGeneration does not run on a token alone"):
        accelerate(transformers.WhisperForConditionalGeneration(config))


# Padded vocabularies.


def pad(model: Any) -> int:
    """Resizes the vocabulary to whole blocks of 64 and makes the rows of no token the loudest."""
    torch.manual_seed(1)
    model.resize_token_embeddings(pad_to_multiple_of=64)
    layer = model.get_output_embeddings()
    with torch.no_grad():
        layer.weight[VOCAB:] = 2 * layer.weight[: len(layer.weight) - VOCAB]
    return len(layer.weight)


@pytest.mark.parametrize("name", ["llama", "llama, tied", "gemma2", "phi", "t5, untied"])
def test_rows_that_pad_the_vocabulary_are_rows_like_others(name):
    stock, _ = stock_and_index(name)
    assert pad(stock) == 4224
    fast = accelerate(copy.deepcopy(stock), index_of(stock), budget=None)
    assert_certified(stock, fast)
    assert generate(fast, **SAMPLING).max() >= VOCAB


@pytest.mark.parametrize("name", ["llama", "llama, tied"])
def test_padding_an_accelerated_model_is_noticed(name):
    _, fast = pair(name)
    pad(fast)
    stock = copy.deepcopy(fast)
    assert_dense(stock, fast, "weights changed" if name == "llama, tied" else "output layer replaced")
    with pytest.raises(cd.StaleIndexError):
        accelerate(fast, fast.csv_decode.head.index)
    assert_certified(stock, accelerate(fast, index_of(fast), budget=None))


# Adapters.


class Lora(nn.Module):
    """The layer inside, and a low-rank term added to what it returns."""

    def __init__(self, base_layer: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base_layer = base_layer
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, VOCAB, bias=False)
        nn.init.normal_(self.up.weight)

    @property
    def weight(self) -> Any:
        return self.base_layer.weight

    @property
    def bias(self) -> Any:
        return self.base_layer.bias

    def forward(self, hidden: Any) -> Any:
        return self.base_layer(hidden) + self.up(self.down(hidden))


class LinearLora(nn.Linear):
    """The same as a kind of linear layer."""

    def forward(self, hidden: Any) -> Any:
        return super().forward(hidden) + self.term(hidden)


def wrapped(model: Any) -> None:
    model.set_output_embeddings(Lora(model.get_output_embeddings()))


def subclassed(model: Any) -> None:
    old = model.get_output_embeddings()
    new = LinearLora(WIDTH, VOCAB, bias=False)
    new.weight = old.weight
    lora = Lora(old)
    new.term = nn.Sequential(lora.down, lora.up)
    model.set_output_embeddings(new)


def patched(model: Any) -> None:
    layer = model.get_output_embeddings()
    stock, lora = layer.forward, Lora(nn.Identity())
    layer.forward = lambda hidden: stock(hidden) + lora.up(lora.down(hidden))


def hooked(model: Any) -> None:
    lora = Lora(nn.Identity())
    model.get_output_embeddings().register_forward_hook(lambda _, args, out: out + lora.up(lora.down(args[0])))


def around_the_model(model: Any) -> None:
    stock, term = model.forward, torch.linspace(-9, 9, VOCAB)

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        out = stock(*args, **kwargs)
        out.logits = out.logits + term
        return out

    model.forward = forward


ADAPTERS = {
    wrapped: ("output layer replaced", r"output layer of \w+ is \S+\.Lora, expected a plain"),
    subclassed: ("output layer replaced", r"output layer of \w+ is \S+\.LinearLora, expected a plain"),
    patched: ("forward replaced", "expected a plain"),
    around_the_model: ("forward replaced", "changes its logits"),
    hooked: ("forward hook", None),
}


@pytest.mark.parametrize("name", ["llama", "llama, tied", "t5, untied"])
@pytest.mark.parametrize("adapt", ADAPTERS)
def test_an_adapter_on_the_head_of_an_accelerated_model_is_dense(name, adapt):
    stock, fast = stock_and_index(name)[0], pair(name)[1]
    plain = generate(stock, **GREEDY)
    adapt(stock)
    adapt(fast)
    assert not torch.equal(generate(stock, **GREEDY), plain)
    assert_dense(stock, fast, ADAPTERS[adapt][0])
    assert torch.equal(generate(restore(fast), **GREEDY), generate(stock, **GREEDY))


@pytest.mark.parametrize("adapt", ADAPTERS)
def test_a_head_with_an_adapter_is_refused_or_dense(adapt):
    stock, index = stock_and_index("llama")
    adapt(stock)
    refused = ADAPTERS[adapt][1]
    if refused is None:  # a hook may be taken off again
        fast, _ = stock_and_index("llama")
        adapt(fast)
        assert_dense(stock, accelerate(fast, index), ADAPTERS[adapt][0])
    else:
        with pytest.raises(ValueError, match=refused):
            accelerate(stock, index)


def lora(model: Any, **settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, about tied layers
        return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **settings)).eval()


ON_THE_HEAD = [
    {"target_modules": ["lm_head"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
]


@pytest.mark.parametrize("name", ["llama", "llama, tied"])
@pytest.mark.parametrize("settings", ON_THE_HEAD, ids=str)
def test_peft_on_the_head_is_refused_before_and_dense_after(name, settings):
    stock, index = stock_and_index(name)
    stock = lora(stock, **settings)
    with pytest.raises(ValueError, match=r"output layer of LlamaForCausalLM is peft\."):
        accelerate(stock.get_base_model(), index)
    fast = pair(name)[1]
    assert_dense(stock, fast, "output layer replaced", lora(fast, **settings))


@pytest.mark.parametrize("name", ["llama", "llama, tied"])
def test_peft_beside_the_head_is_certified(name):
    settings = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
    stock, index = stock_and_index(name)
    plain = generate(stock, **SAMPLING)
    stock = lora(stock, **settings)
    assert not torch.equal(generate(stock, **SAMPLING), plain)
    with pytest.raises(ValueError, match="PeftModel is not a causal language model"):
        accelerate(stock, index)
    for first in (False, True):
        base, _ = stock_and_index(name)
        if first:
            accelerate(base, index, budget=None)
        fast = lora(base, **settings)
        if not first:
            accelerate(fast.get_base_model(), index, budget=None)
        for choice in (GREEDY, SAMPLING):
            assert torch.equal(generate(fast, **choice), generate(stock, **choice))
        state = fast.get_base_model().csv_decode
        assert (state.certified_steps, state.dense_steps) == (2 * LENGTH, {})


def test_peft_that_was_merged_is_noticed():
    base = pair("llama")[1]
    merged = lora(base, target_modules=["lm_head"]).merge_and_unload()
    assert merged is base
    assert_dense(copy.deepcopy(base), base, "weights changed")


# Types, copies, files.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "phi", "gemma2", "gpt2", "t5, scaled"])
def test_a_narrow_model_gives_its_own_tokens(name, dtype):
    """Greedy: certified by the bound on its arithmetic, or by its stock head. Bias, scale and cap round once more."""
    stock, _ = stock_and_index(name)
    stock.to(dtype)
    fast = accelerate(copy.deepcopy(stock), index_of(stock), budget=None)
    state, kind = fast.csv_decode, f"{str(dtype).removeprefix('torch.')} output layer"
    for inputs, settings in (("one prompt", GREEDY), ("left padding", GREEDY), ("left padding", SAMPLING)):
        assert torch.equal(generate(fast, inputs, **settings), generate(stock, inputs, **settings))
    if name in ("phi", "gemma2"):
        assert state.dense_steps == {kind: 3 * LENGTH}
    else:
        assert state.dense_steps.pop(kind) == LENGTH  # sampling
        assert set(state.dense_steps) <= {"rounding does not decide"}
        assert state.certified_steps > LENGTH


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["llama, tied", "phi"])
def test_a_change_of_type_is_noticed(name, dtype):
    stock, fast = pair(name)
    stock = copy.deepcopy(stock).to(dtype)
    assert_dense(stock, fast.to(dtype), "weights changed")
    if dtype == torch.float64:
        with pytest.raises(ValueError, match="weight has dtype float64, expected float32"):
            accelerate(fast)
    else:
        assert accelerate(fast, index_of(stock)).csv_decode.reference == "model"
    stock.float()
    fast = accelerate(fast.float(), index_of(fast), budget=None)  # the weights as they were rounded
    assert_certified(stock, fast)


@pytest.mark.parametrize("name", ["llama, tied", "gemma3, multimodal", "phi", "gpt2", "t5, scaled"])
def test_copies_and_files_are_of_the_stock_model(name, tmp_path):
    stock, fast = pair(name)
    index = fast.csv_decode.head.index
    fast.save_pretrained(tmp_path)
    for again in (copy.deepcopy(fast), type(stock).from_pretrained(tmp_path)):
        assert accelerated(again) is None
        assert type(again) is type(stock)
        assert type(again.get_output_embeddings()) is nn.Linear
        assert torch.equal(generate(again, **SAMPLING), generate(stock, **SAMPLING))
        again.generation_config.eos_token_id = None
        assert_certified(stock, accelerate(again, index, budget=None))
    assert fast.csv_decode.certified_steps == 0  # of the original
    assert_certified(stock, fast)
