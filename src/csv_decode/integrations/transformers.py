"""Certified decoding inside Hugging Face transformers: `accelerate(model)`, then `model.generate` as before.

How it works. `generate` builds the final list of logits processors and hands it to a decoding loop. If that loop is
`_sample` (greedy or sampling) and the list provably looks at nothing but the top k of a row, the output layer answers
with a row that holds the certified top k and -inf elsewhere; the loop then picks the token it would have picked from
the whole row. How many are needed is read off the list itself:

    greedy, no processors                       1
    temperature, then top_k = k, then anything  k, with every id tied with the k-th: what follows `TopKLogitsWarper`
                                                sees the same row as ever, whatever it does (but for rounding)
    temperature, then min_p, then anything      all within -T log(min_p) of the largest
    penalties, biases, bans before any of these as many of the ids that these cannot touch, and those that they can
    everything else                             all: the stock layer runs, counted under its reason

A call of the model that the loop did not make (``model(ids).logits``, a loss, a user's own loop) is always dense. So is
every step at which the weights are no longer the ones that were indexed.

What the certificate is about: the real value of ``<w, h> + b`` for the float32 numbers stored. Stock float32 logits are
rounded, so they can disagree with it where two logits are equal to within that rounding. In float16 and bfloat16 stock
logits tie often. There greedy search gets the token that the stock head's own arithmetic gives (``reference="model"``),
from bounds on that arithmetic, and the stock head decides where they do not; everything else is dense, unless the exact
logits are asked for (``reference="exact"``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..certificate import ModelArgmax, Statistics, TopK, Within
from ..head import CertifiedHead
from ..index import Index
from ..index.build import build_index
from ..index.storage import load_index
from ..kernels import ieee
from ..narrow import keeps_bound
from ..spec import Array, HeadSpec, as_states

try:
    import torch
    from torch import nn
    from transformers import GenerationMixin, PreTrainedModel
    from transformers.generation import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper
    from transformers.generation import logits_process as process
except ImportError as error:
    raise ImportError(f"{error}; Hugging Face models need the extra: pip install '.[hf]' in the checkout") from error

__all__ = ["Accelerated", "accelerate", "accelerated", "head_spec", "restore"]

Model = TypeVar("Model")
Progress = Callable[[str, int, int], None]

_ATTRIBUTE = "csv_decode"
# Family of models, the name it has for its factor on the logits, and whether it multiplies or divides by it. The names
# alone do not tell: MiniCPM3's logits_scaling acts on the hidden state, MPT's logit_scale on nothing.
_SCALES = (
    ("cohere", "logit_scale", 1),
    ("falcon_h1", "lm_head_multiplier", 1),
    ("granite", "logits_scaling", -1),
    ("hyperclovax", "logits_scaling", 1),
    ("muse", "output_multiplier", 1),
)
# Models around a language model that have its configuration, but use its output layer without its scale and soft cap.
_PLAIN = ("aya_vision", "cohere2_vision", "gemma3", "granite_speech", "granite_speech_plus", "llava_next")
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
#: Whose frames a warning skips, to point at the call of `accelerate` or `generate` that it is about.
_INSIDE = (__name__, "torch", "transformers", "contextlib")
_LARGEST = float(np.finfo(np.float32).max)
# A tanh this close to one is saturated: float32 numbers are 2^-24 apart there, and the model's own arithmetic (scale,
# division, tanh, product, temperature) moves a logit by a few of those, so beyond it logits may fall together.
_SATURATED = 1 - 2.0**-20


def accelerate(
    model: Model,
    index: Index | str | Path | None = None,
    calibration: Array | str | Path | None = None,
    *,
    tokenizer: Any = None,
    threads: int | None = None,
    kernels: str | None = None,
    budget: float | None = 0.25,
    reference: str | None = None,
    progress: Progress | None = None,
) -> Model:
    """Makes ``model.generate`` decode through a certified head, in place.

    Args:
        model: a language model of transformers, causal or encoder-decoder, on the CPU. Accelerating it again replaces
            the index.
        index: from `build_index`, or the path of a saved one. None: the one built last for these weights, from the
            cache (`csv-decode build` puts it there), or built now.
        calibration: what to build the index for: (N, d) hidden states, a text to run the model on, or the Path of such
            a text. None: text that the model writes itself. It decides how fast, never whether the answer is right.
        tokenizer: needed for a calibration text; without a text it lets the model start from varied openings.
        threads, kernels, budget: see `CertifiedHead`.
        reference: whose logits decide. "exact": the real values for the numbers stored. "model": the model's own, in
            its own arithmetic (greedy search only). None: "exact" for a float32 head, "model" for a narrower one.
        progress: called as progress(stage, done, total) while an index is built.

    Returns the model, with ``model.csv_decode`` (an `Accelerated`) for counts, times and the head.
    Raises ValueError for a model that cannot be served, StaleIndexError for an index of other weights.

    >>> model = accelerate(AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32))
    >>> ids = model.generate(**tokenizer("The sky is", return_tensors="pt"), do_sample=False)
    >>> model.csv_decode.certified_steps, model.csv_decode.dense_steps
    """
    if index is not None and calibration is not None:
        raise ValueError("both index and calibration were given; an index is already calibrated, so give one of them")
    spec = head_spec(model)
    scale, softcap = _transform(model)
    raw = spec if (scale, softcap) == (1.0, None) else dataclasses.replace(spec, scale=1.0, softcap=None)
    if isinstance(index, (str, Path)):
        index = load_index(index)
    if reference not in (None, "exact", "model"):
        raise ValueError(f"reference is {reference!r}, expected 'exact', 'model' or None")
    reference = reference or ("exact" if spec.rows.kind == "float32" else "model")
    _check_transform(model, spec)
    if index is None:
        index = _find_index(model, raw, calibration, tokenizer, threads, progress)
    head = CertifiedHead(index, raw, threads=threads, budget=budget, kernels=kernels, engine="torch")
    if reference == "model":
        head.largest_norm  # noqa: B018 (computed once, and not in the first step)
    restore(model)
    layer = _output_layer(model)
    stock: Any = type(model)
    setattr(model, _ATTRIBUTE, Accelerated(head, layer, stock, scale, softcap, vars(model).get("forward"), reference))
    layer.__class__ = _CertifiedLinear
    model.__class__ = _certified_class(stock)
    return model


def restore(model: Model) -> Model:
    """Undoes `accelerate`; a model that is not accelerated is returned as it is."""
    state = accelerated(model)
    if state is not None:
        if type(state.layer) is _CertifiedLinear:  # a parametrized layer has its own class, and needs it
            state.layer.__class__ = nn.Linear  # type: ignore[assignment]
        model.__class__ = state.stock
        delattr(model, _ATTRIBUTE)
    return model


def accelerated(model: Any) -> Accelerated | None:
    """What `accelerate` attached to the model, or None."""
    state = getattr(model, "__dict__", {}).get(_ATTRIBUTE)
    return state if isinstance(state, Accelerated) else None


def head_spec(model: Any) -> HeadSpec:
    """The output layer of a causal language model: weight and bias (the model's memory), scale and soft cap.

    Raises ValueError when there is none, or when it is not a plain `torch.nn.Linear` on the CPU.
    """
    layer = _output_layer(model)
    scale, softcap = _transform(model)
    return HeadSpec(layer.weight, layer.bias, scale=scale, softcap=softcap)


class Accelerated:
    """The certified head of a model and what it did; `accelerate` puts it at ``model.csv_decode``.

    head: the `CertifiedHead`. Its spec has neither scale nor cap, which the model applies itself, after the head.
    layer, stock: the model's output layer, and the class that the model had.
    certified_steps: forward passes of `generate` that the head answered, one a step whatever the batch.
    dense_steps: forward passes of `generate` that the stock layer answered, by reason.
    seconds_certified, seconds_dense: time spent in the two, checks included.
    last: the latest answer of the head, with its certificates.
    reference: "exact" or "model", see `accelerate`.
    """

    def __init__(
        self,
        head: CertifiedHead,
        layer: nn.Linear,
        stock: type[Any],
        scale: float,
        softcap: float | None,
        forward: Any,
        reference: str,
    ) -> None:
        self.reference = reference
        self.head = head
        self.layer = layer
        self.stock = stock
        self.certified_steps = 0
        self.dense_steps: dict[str, int] = {}
        self.seconds_certified = 0.0
        self.seconds_dense = 0.0
        self.last: TopK | Within | ModelArgmax | None = None
        self._shapes: dict[Any, bool] = {}  # shapes and settings at which the stock head was seen to keep its bound
        self._transform = scale, softcap
        self._forward = forward  # the model's own attribute, if it has one: it was there when the logits were checked
        self._parameters = layer.weight, layer.bias
        self._identity = [_identity(p) for p in self._parameters]
        self._contents = _contents(*self._parameters)
        self._warned = False
        self._lock = threading.Lock()  # two threads may generate at once, and totals are read-modify-write

    @property
    def statistics(self) -> Statistics:
        """Running totals of the head: states, rows scored, bytes read, fallbacks inside the head."""
        return self.head.statistics

    def __repr__(self) -> str:
        return f"Accelerated(certified_steps={self.certified_steps}, dense_steps={self.dense_steps})"

    # What must hold before a step may be answered sparsely. Each check returns the reason why it may not, or None.

    def _begin(self, model: Any, processors: Any, config: Any) -> _Run:
        """The contract of one `_sample` call."""
        contract = self._contract(model, processors, config)
        if isinstance(contract, str):
            return _Run(self, model, reason=contract)
        started = time.perf_counter()
        reason = self._moved(model) or self._rewritten()
        self._count(None, time.perf_counter() - started, steps=0)
        return _Run(self, model, contract, reason=reason)

    def _contract(self, model: Any, processors: Any, config: Any) -> _Contract | str:
        """What the loop can look at, or why that is not known.

        A positive temperature keeps the order of logits; a top-k filter with -inf then leaves the same row whether the
        others were finite or -inf, so the rest of the list does not matter. So does a min-p filter. A processor that
        changes no more than a known set of ids leaves the order of the others: its ids are scored whatever they are.
        """
        if _transform(model) != self._transform:
            return "scale or soft cap changed"
        if config.return_dict_in_generate and (config.output_scores or config.output_logits):
            return "scores or logits returned"
        temperature = 1.0
        touched: list[Callable[[torch.Tensor], torch.Tensor]] = []
        contract: _Contract | str = "sampling without top_k" if config.do_sample else _Contract()
        for processor in processors:
            kind = type(processor)
            if kind is TemperatureLogitsWarper and 1e-20 < processor.temperature < 1e20:
                temperature *= float(processor.temperature)
            elif kind is TopKLogitsWarper and processor.filter_value == -float("inf"):
                contract = _Contract(k=min(int(processor.top_k), self.head.spec.n_rows))
                break
            elif kind is MinPLogitsWarper and processor.filter_value == -float("inf"):
                if not 0 < processor.min_p <= 1 or processor.min_tokens_to_keep > 1 or self._transform[1] or touched:
                    return kind.__name__
                contract = _Contract(margin=-temperature * math.log(processor.min_p), temperature=temperature)
                break
            elif kind in _TOUCHES:
                touched.append(functools.partial(_TOUCHES[kind], processor))
            else:
                return kind.__name__
        if isinstance(contract, str):
            return contract
        contract.touched = tuple(touched)
        if self.reference == "model":
            narrow = self.head.spec.rows.kind
            if contract != _Contract() or self._transform != (1.0, None) or self.layer.bias is not None:
                return f"{narrow} output layer"
        return contract

    def _moved(self, model: Any) -> str | None:
        """Is this still the layer that was indexed? Microseconds, at each step. (In-place writes raise _version.)"""
        parameters = self.layer._parameters
        reason = None
        if model.get_output_embeddings() is not self.layer:
            reason = "output layer replaced"
        elif parameters.get("weight") is not self._parameters[0] or parameters.get("bias") is not self._parameters[1]:
            reason = "weights replaced"
        elif [_identity(p) for p in self._parameters] != self._identity:
            reason = "weights changed"
        return self._warn(reason)

    def _rewritten(self) -> str | None:
        """Are the numbers the same? torch does not count writes through ``weight.data`` or numpy (merging an adapter is
        one), so this reads them all: once a `generate`, for about half the price of a dense step."""
        return self._warn(None if _contents(*self._parameters) == self._contents else "weights changed")

    def _warn(self, reason: str | None) -> str | None:
        if reason and not self._warned:
            self._warned = True
            warnings.warn(
                f"{reason} since accelerate(model), so decoding goes on with the dense head; "
                "call accelerate(model) again to index the weights as they are now",
                stacklevel=_outside(),
            )
        return reason

    def _obstacle(self, model: Any, hidden: torch.Tensor) -> str | None:
        reason = self._moved(model)
        if reason:
            return reason
        if not ieee():
            return "subnormal numbers flushed to zero"
        if self.layer._forward_hooks or model._forward_hooks or nn.modules.module._global_forward_hooks:
            return "forward hook"  # it would see the sparse row, or change it
        if "forward" in vars(self.layer) or vars(model).get("forward") is not self._forward:
            return "forward replaced"  # as above
        if hidden.dim() != 3 or hidden.shape[1] != 1:
            return "several positions"
        if hidden.dtype != self._parameters[0].dtype or hidden.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return "autocast"
        if torch.is_grad_enabled() and (hidden.requires_grad or self.layer.weight.requires_grad):
            return "gradients"
        if not torch.isfinite(hidden).all():
            return "state not finite"
        return None

    # The two ways to answer.

    def _logits(self, run: _Run, hidden: torch.Tensor) -> torch.Tensor:
        """What the output layer returns for `hidden` (B, n, d): (B, n, V)."""
        started = time.perf_counter()
        reason = run.reason or self._obstacle(run.model, hidden)
        answer = reason or self._sparse_row(run, hidden)
        if isinstance(answer, str):
            logits = nn.functional.linear(hidden, self.layer.weight, self.layer.bias)
            self._count(answer, time.perf_counter() - started)
            return logits
        self._count(None, time.perf_counter() - started)
        return answer

    def _sparse_row(self, run: _Run, hidden: torch.Tensor) -> torch.Tensor | str:
        """(B, 1, V): the certified logits, -inf elsewhere. Or the reason why that would not do."""
        states, contract = hidden[:, 0], run.contract
        n = len(states)
        forced: list[NDArray[np.int64]] | None = None
        if contract.touched:
            found = run.touched_ids(n, self.head.spec.n_rows)
            if isinstance(found, str):
                return found
            forced = found
        with self._lock:
            answer = self._answer(contract, states, forced)
        if isinstance(answer, str):
            return answer
        ids, logits = answer
        values = np.concatenate(logits)
        scale, softcap = self._transform
        if softcap is not None:
            # the cap turns -inf into -cap, which has to stay below all certified logits
            if not np.abs(np.tanh(values * (scale / softcap))).max() < _SATURATED:
                return "soft cap saturated"
        elif not np.abs(values).max() * max(scale, 1.0) < _LARGEST:
            return "logits overflow"
        row = states.new_full((n, 1, self.layer.weight.shape[0]), -float("inf"), dtype=torch.float32)
        row.numpy()[np.repeat(np.arange(n), [len(some) for some in ids]), 0, np.concatenate(ids)] = values
        return row

    def _answer(
        self, contract: _Contract, states: torch.Tensor, forced: list[NDArray[np.int64]] | None
    ) -> tuple[list[NDArray[np.int64]], list[NDArray[np.float64]]] | str:
        """Ids and logits of each state that the loop can look at."""
        head = self.head
        if self.reference == "model":
            if not self._keeps_bound(states):
                return "arithmetic of the model's head"
            best = self.last = head.model_argmax(states)
            if (best.ids < 0).any():
                return "rounding does not decide"
            return list(best.ids[:, None]), list(best.logits[:, None])
        if contract.margin is not None:
            # the warper's own edge is in float32 and divides by another sum: rows next to it are its to decide
            scale, edge = self._transform[0], 1e-4 * contract.temperature
            near = self.last = head.within(states, (contract.margin + 8 * edge) / scale)
            for some in near.logits:
                rounding = edge + 2.0**-20 * scale * float(np.abs(some).max())
                gap = (some[0] - some) * scale - contract.margin
                if rounding > 8 * edge or (np.abs(gap) < rounding).any():
                    return "edge of min-p"
            return near.ids, near.logits
        allowed = None
        if forced is not None:
            allowed = np.ones((len(states), head.spec.n_rows), bool)
            for b, touched in enumerate(forced):
                allowed[b, touched] = False
            if not allowed.any(axis=1).all():
                return "every id is touched"
        top = self.last = head.top_k(
            states, max(contract.k, 1), ties=contract.k > 0 or forced is not None, allowed=allowed
        )
        ids, logits = list(top.ids), list(top.logits)
        for b, extra in enumerate(forced or []):
            if len(extra):
                ids[b] = np.concatenate([ids[b], extra])
                logits[b] = np.concatenate([logits[b], head.scores(states[b : b + 1], extra[None]).logits[0]])
        return ids, logits

    def _keeps_bound(self, states: torch.Tensor) -> bool:
        """Whether the stock head's logits lie within the bound on its arithmetic. torch chooses its kernel by the
        shape and its settings, so this looks once for each, at every row of the first states that come with it."""
        strides = None if states.is_contiguous() else states.stride()  # of one state, that of its row says nothing
        n = (len(states), strides, torch.get_num_threads(), torch.get_float32_matmul_precision())
        if n not in self._shapes:
            stock = nn.functional.linear(states[:, None], self.layer.weight)[:, 0].to(torch.float64).numpy()
            self._shapes[n] = keeps_bound(self.head.spec, self.head.kernels, as_states(states, states.shape[1]), stock)
        return self._shapes[n]

    def _count(self, reason: str | None, seconds: float, steps: int = 1) -> None:
        with self._lock:
            if reason is None:
                self.certified_steps += steps
                self.seconds_certified += seconds
            else:
                self.dense_steps[reason] = self.dense_steps.get(reason, 0) + steps
                self.seconds_dense += seconds


@dataclasses.dataclass
class _Contract:
    """What a decoding loop can look at, of each row: the k largest logits with those equal to the k-th (0: one, the
    largest), or all within `margin` of the largest; and in any case the ids that `touched` gives for the ids so far."""

    k: int = 0
    margin: float | None = None
    temperature: float = 1.0
    touched: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()


# The ids that a processor can change, for rows of ids (B, n): (B, m), or (m,) for all rows. All other logits pass as
# they are, or all become -inf.
_TOUCHES: dict[type[Any], Callable[[Any, torch.Tensor], torch.Tensor]] = {
    process.RepetitionPenaltyLogitsProcessor: lambda _, ids: ids,
    process.NoRepeatNGramLogitsProcessor: lambda _, ids: ids,
    process.SequenceBiasLogitsProcessor: lambda p, _: torch.tensor([sequence[-1] for sequence in p.sequence_bias]),
    process.NoBadWordsLogitsProcessor: lambda p, _: torch.tensor([sequence[-1] for sequence in p.sequence_bias]),
    process.MinLengthLogitsProcessor: lambda p, _: p.eos_token_id,
    process.MinNewTokensLengthLogitsProcessor: lambda p, _: p.eos_token_id,
    process.SuppressTokensLogitsProcessor: lambda p, _: p.suppress_tokens,
    process.SuppressTokensAtBeginLogitsProcessor: lambda p, _: p.begin_suppress_tokens,
    process.ForcedBOSTokenLogitsProcessor: lambda p, _: torch.tensor([p.bos_token_id]),
    process.ForcedEOSTokenLogitsProcessor: lambda p, _: p.eos_token_id,
}


@dataclasses.dataclass
class _Run:
    """One decoding loop of one model in one thread.

    contract: what it can look at. input_ids: all of them so far, (B, n); known: and these are of this step. reason: why
    every step is dense, or None. armed: the loop has prepared a forward pass that has not reached the head yet. Only
    such a pass may be answered sparsely, so a model that is called from a stopping criterion or a streamer meets its
    stock layer.
    """

    state: Accelerated
    model: Any
    contract: _Contract = dataclasses.field(default_factory=_Contract)
    reason: str | None = None
    armed: bool = False
    input_ids: torch.Tensor | None = None
    known: bool = False

    def arm(self, input_ids: Any) -> None:
        self.close()
        self.armed = True
        if self.contract.touched:
            self.known = self._goes_on(input_ids)
            if self.known:
                self.input_ids = input_ids

    def _goes_on(self, ids: Any) -> bool:
        """Are these all ids so far, which the processors will see? A prefill in chunks prepares with parts of them."""
        last = self.input_ids
        if not isinstance(ids, torch.Tensor) or last is None or ids.dim() != 2 or len(ids) != len(last):
            return False
        n = last.shape[1]
        return ids.shape[1] in (n, n + 1) and torch.equal(ids[:, :n], last)

    def touched_ids(self, n_states: int, n_rows: int) -> list[NDArray[np.int64]] | str:
        """For each state the ids that the processors can change."""
        ids = self.input_ids
        if ids is None or not self.known or len(ids) != n_states:
            return "ids so far not known"
        found = []
        for touches in self.contract.touched:
            some = touches(ids)
            found.append(some.reshape(1, -1).expand(n_states, -1) if some.dim() < 2 else some)
        rows = torch.cat([some.to(torch.int64) for some in found], dim=1).numpy()
        return [np.unique(row[(row >= 0) & (row < n_rows)]) for row in rows]

    def close(self) -> None:
        """Counts a pass that did not come to our layer: it was replaced, or the model is compiled."""
        if self.armed:
            self.armed = False
            self.state._count(self.reason or self.state._moved(self.model) or "output layer not reached", 0.0)


class _Thread(threading.local):
    run: _Run | None = None


_thread = _Thread()


def _within(run: _Run, call: Callable[[], Any]) -> Any:
    outer, _thread.run = _thread.run, run
    try:
        result = call()
        run.close()
        return result
    finally:
        _thread.run = outer


class _CertifiedLinear(nn.Linear):
    """The model's own output layer, the same object with the same parameters, while the model is accelerated."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            run = _thread.run
            if run is not None and run.armed and run.state.layer is self:
                run.armed = False
                return run.state._logits(run, input)
        return nn.Linear.forward(self, input)  # not super(): a bound method may be kept until after `restore`

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the stock layer."""
        return object.__new__, (nn.Linear,), self.__dict__


@functools.cache
def _certified_class(base: type[Any]) -> type[Any]:
    """A subclass of a model class, under the same name, whose decoding loops say what they need from the head.

    (`generate` looks the loop up on the class, so an attribute of the instance would not be found. Wrapped signatures
    stay, because `generate` inspects them.)
    """

    def dense(name: str, reason: str) -> Callable[..., Any]:
        method = getattr(base, name)

        @functools.wraps(method)
        def loop(self: Any, *args: Any, **kwargs: Any) -> Any:
            run = _Run(vars(self)[_ATTRIBUTE], self, reason=reason)
            return _within(run, lambda: method(self, *args, **kwargs))

        return loop

    @functools.wraps(base._sample)
    def sample(
        self: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **rest: Any
    ) -> Any:
        run = vars(self)[_ATTRIBUTE]._begin(self, logits_processor, generation_config)
        run.input_ids = input_ids
        return _within(
            run, lambda: base._sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **rest)
        )

    @functools.wraps(base.prepare_inputs_for_generation)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = _thread.run
        if run is not None and run.model is self:
            run.arm(args[0] if args else kwargs.get("input_ids"))
        return base.prepare_inputs_for_generation(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        """Copies and pickles are of the stock model."""
        return object.__new__, (base,), {key: value for key, value in vars(self).items() if key != _ATTRIBUTE}

    own_loop = base._sample is not GenerationMixin._sample
    members = {
        "_sample": dense("_sample", "own decoding loop") if own_loop else sample,
        "_beam_search": dense("_beam_search", "beam search"),
        "_assisted_decoding": dense("_assisted_decoding", "assisted decoding"),
        "generate": dense("generate", "custom decoding loop"),  # for whatever runs outside the loops above
        "prepare_inputs_for_generation": prepare,
        "__reduce_ex__": reduce,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return type(base.__name__, (base,), members)


def _output_layer(model: Any) -> nn.Linear:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise ValueError(f"{name} is not a causal language model of transformers (a PreTrainedModel with generate)")
    layer = model.get_output_embeddings()
    if type(layer) not in (nn.Linear, _CertifiedLinear) or "forward" in vars(layer):
        raise ValueError(
            f"the output layer of {name} is {type(layer).__module__}.{type(layer).__qualname__}, expected a plain "
            "torch.nn.Linear (not quantized, parametrized or wrapped)"
        )
    weight = layer.weight
    if type(weight) is not nn.Parameter or type(weight.data) is not torch.Tensor:
        raise ValueError(f"the output layer of {name} holds {type(weight.data).__name__}, expected plain numbers")
    if weight.device.type != "cpu":
        raise ValueError(f"the output layer of {name} is on {weight.device}, expected cpu: load the model there first")
    if weight.is_inference():
        raise ValueError(
            f"the weights of {name} were made under torch.inference_mode, where changes cannot be noticed; "
            "load the model outside of it"
        )
    return layer


def _transform(model: Any) -> tuple[float, float | None]:
    """Scale and soft cap that the model applies after its output layer, as its configuration says."""
    if model.config.model_type in _PLAIN:
        return 1.0, None
    config = model.config.get_text_config()
    scale = 1.0
    for family, name, power in _SCALES:
        if config.model_type.startswith(family):
            scale = float(getattr(config, name, None) or 1.0) ** power
    caps = [getattr(config, name, None) for name in _CAPS]
    return scale, next((float(cap) for cap in caps if cap is not None), None)


def _check_transform(model: Any, spec: HeadSpec) -> None:
    """Runs one token through the model with known logits in place of the head's, and looks at what becomes of them: a
    family that does something else to its logits is refused, not guessed at."""
    layer = model.get_output_embeddings()
    names = ["input_ids", "decoder_input_ids"][: 1 + model.config.is_encoder_decoder]
    n_rows = spec.rows.shape[0]
    given = torch.from_numpy(np.random.default_rng(0).permutation(np.linspace(-64, 64, n_rows, dtype=np.float32)))
    handle = layer.register_forward_hook(lambda *_: given[None, None].clone())
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):  # dropout must not use up the caller's random numbers
            got = model(**dict.fromkeys(names, torch.zeros((1, 1), dtype=torch.long))).logits[0, -1].double().numpy()
    except Exception as error:  # whatever the model says about a call without its pictures or sounds
        raise ValueError(f"{type(model).__name__} does not run on a token alone, as it has to: {error}") from error
    finally:
        handle.remove()
    expected = spec.finish(given.double().numpy())
    # a handful of float32 roundings (2^-24 each) stay far below 1e-5; anything else is another formula
    if got.shape != expected.shape or not np.allclose(got, expected, rtol=1e-5, atol=0):
        raise ValueError(
            f"{type(model).__name__} changes its logits after the output layer in a way this library does not know "
            f"(scale {spec.scale} and soft cap {spec.softcap} do not explain it)"
        )


def _find_index(
    model: Any, spec: HeadSpec, calibration: Any, tokenizer: Any, threads: int | None, progress: Progress | None
) -> Index:
    if calibration is not None and not isinstance(calibration, (str, Path)):
        return build_index(spec, calibration, threads=threads, progress=progress)
    from ..cache import get_index, newest_index
    from ..calibration import calibration_key, collect_states

    if calibration is None:
        found = newest_index(spec)
        if found is not None:
            return found[1]
    text = calibration.read_text(encoding="utf-8") if isinstance(calibration, Path) else calibration

    def collect() -> NDArray[np.float32]:
        told = None if progress is None else functools.partial(progress, "states")
        return collect_states(model, tokenizer, text=text, progress=told)

    return get_index(spec, collect, key=calibration_key(text), progress=progress)


def _outside() -> int:
    """The stacklevel, for `warnings.warn` where this is called, of the first frame that is not the libraries' own."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    return level


def _is_inside(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in _INSIDE)


def _identity(parameter: torch.Tensor | None) -> tuple[Any, ...] | None:
    if parameter is None:
        return None
    return (
        parameter.data_ptr(),
        parameter._version,
        parameter.shape,
        parameter.stride(),
        parameter.dtype,
        parameter.device,
    )


def _contents(weight: torch.Tensor, bias: torch.Tensor | None) -> bytes:
    """A sum over the bits of each row, and the bias: enough to notice any write that is not made to deceive."""

    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return b""
    bits = torch.int32 if weight.dtype == torch.float32 else torch.int16
    rows = weight.detach().contiguous()
    wide = rows.shape[1] * rows.element_size() % 8 == 0
    sums = rows.view(torch.int64 if wide else bits).sum(1, dtype=torch.int64)
    return sums.numpy().tobytes() + (b"" if bias is None else bias.detach().contiguous().view(bits).numpy().tobytes())
