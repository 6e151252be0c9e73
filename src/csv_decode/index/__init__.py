"""The index of a head: built once offline, stored in one file, refused for any other weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bounds.centroid import CentroidBound
from ..bounds.shadow import ShadowBound
from ..spec import HeadSpec

__all__ = ["Index", "StaleIndexError"]


class StaleIndexError(ValueError):
    """The index belongs to other weights."""


@dataclass(frozen=True, eq=False, repr=False)
class Index:
    """Bounds for the rows of one head.

    fingerprint: SHA-256 of the head (`HeadSpec.fingerprint`). kind, shape, n_rows: type, shape and valid rows of the
    weights. row_ids: (n_rows,) token id of each index row, None when they are the same. settings: how it was built.
    """

    fingerprint: str
    kind: str
    shape: tuple[int, int]
    n_rows: int
    row_ids: NDArray[np.int64] | None
    centroid: CentroidBound | None
    shadow: ShadowBound | None
    settings: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        rows, width = self.shape
        return f"Index(bounds={self.bounds}, rows={rows}, width={width}, weights={self.fingerprint[:8]}..)"

    @property
    def bounds(self) -> tuple[str, ...]:
        """Names of the cascade's bounds, coarse to fine."""
        return tuple(name for name in ("centroid", "shadow") if getattr(self, name) is not None)

    def check(self, spec: HeadSpec) -> None:
        """Raises StaleIndexError unless the index was built for exactly these weights (their SHA-256 decides)."""
        mine = (self.kind, *self.shape, self.n_rows)
        yours = (spec.rows.kind, *spec.rows.shape, spec.n_rows)
        now = spec.fingerprint if spec.remembered else spec.digest()  # the weights as they are, not as they were
        if mine != yours or self.fingerprint != now:
            raise StaleIndexError(
                f"index was built for {_describe(self.fingerprint, *mine)}, not {_describe(now, *yours)}; "
                "rebuild it with build_index (or: csv-decode build MODEL)"
            )

    def save(self, path: Any) -> None:
        """Writes one safetensors file, atomically; see `csv_decode.index.storage`."""
        from .storage import save

        save(self, path)


def _describe(fingerprint: str, kind: str, rows: int, width: int, valid: int) -> str:
    return f"weights {fingerprint[:8]}.. (V={rows}, d={width}, {kind}, {valid} valid rows)"
