"""Certified sub-vocabulary decoding: the exact next token from a fraction of the output layer, with a proof.

>>> import csv_decode as cd
>>> index = cd.build_index(weight, calibration=states)
>>> head = cd.CertifiedHead(index, weight)
>>> head.top_k(hidden, k=1).ids
"""

from typing import TYPE_CHECKING, Any

from .certificate import (
    Certificate,
    Certificates,
    Draw,
    LogPartition,
    LogProbs,
    ModelArgmax,
    Scores,
    Softmax,
    Statistics,
    TopK,
    Within,
)
from .head import CertifiedHead
from .index import Index, StaleIndexError
from .index.build import build_index
from .index.storage import IndexFileError, load_index
from .index.verify import verify_index
from .kernels import simd_info
from .perplexity import Perplexity, perplexity
from .spec import HeadSpec
from .verify import VerificationError, VerificationReport, verify

if TYPE_CHECKING:
    from .integrations.transformers import accelerate, restore

__version__ = "0.1.0"

__all__ = [
    "Certificate",
    "Certificates",
    "CertifiedHead",
    "Draw",
    "HeadSpec",
    "Index",
    "IndexFileError",
    "LogPartition",
    "LogProbs",
    "ModelArgmax",
    "Perplexity",
    "Scores",
    "Softmax",
    "StaleIndexError",
    "Statistics",
    "TopK",
    "VerificationError",
    "VerificationReport",
    "Within",
    "accelerate",
    "build_index",
    "load_index",
    "perplexity",
    "restore",
    "simd_info",
    "verify",
    "verify_index",
]


def __getattr__(name: str) -> Any:
    """`accelerate` and `restore` bring torch and transformers, so they wait until they are asked for."""
    if name in ("accelerate", "restore"):
        from .integrations import transformers

        return getattr(transformers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
