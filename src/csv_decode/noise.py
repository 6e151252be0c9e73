"""The noise of exact sampling: one number for each (seed, stream, position, token), the same on every machine.

Gumbel-max: with independent standard Gumbel g_i, ``argmax_i (l_i + T g_i)`` is a draw from softmax(l / T). The g_i here
are a fixed sequence of IEEE float64 operations on counter-based random bits, so the race is a deterministic function of
the logits and the key, and any part of it can be replayed.

    bits    Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers, SC 2011), key (seed low, seed high),
            counter (i // 4, position, stream, part); token i takes word i % 4; part 0 gives high, part 1 gives low
    r       (high << 20) | (low >> 12): 52 bits
    u       (2 r + 1) 2^-53: an odd multiple of 2^-53, exact in float64, neither 0 nor 1
    g       -log(-log(u)), with the `log` below

`upper_noise` in the kernels bounds g from above by the high bits alone. With y = 1 - u = (2^53 - 2r - 1) 2^-53 and
m = floor(~high / 2), an integer of 31 bits, y >= m 2^-31, and y >= 2^-53 where m = 0. -log(u) >= y, so g <= -log(y) up
to the rounding of g (2^-45), and for y = 2^e (1 + f), -log2(y) <= -e - f, because log2(1 + f) >= f on [0, 1]. e + f is
what the bits of y as a float32 say. 2^-16 is added for the roundings in float32, the temperature comes 2^-20 too large.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["gumbel", "log", "philox", "uniform"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox(seed: int, counter: tuple[U64, int, int, int]) -> list[U64]:
    """Philox4x32-10 of the counters (block, position, stream, part): four arrays of 32-bit words."""
    block = np.asarray(counter[0], np.uint64)
    c = [block, *(np.full_like(block, word) for word in counter[1:])]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        p, q = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (q >> _SHIFT) ^ c[1] ^ np.uint64(key[0]),
            q & _LOW,
            (p >> _SHIFT) ^ c[3] ^ np.uint64(key[1]),
            p & _LOW,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def uniform(seed: int, stream: int, position: int, ids: I64) -> F64:
    """u of tokens ids (n,): multiples of 2^-53 strictly between 0 and 1."""
    block, word = (ids // 4).astype(np.uint64), (ids % 4)[None]
    high, low = (
        np.take_along_axis(np.stack(philox(seed, (block, position, stream, part))), word, axis=0)[0] for part in (0, 1)
    )
    r = (high << np.uint64(20)) | (low >> np.uint64(12))
    return (np.uint64(2) * r + np.uint64(1)).astype(np.float64) * 2.0**-53


def log(x: F64) -> F64:
    """Natural logarithm of positive normal numbers, within 4 ulp, by a sequence of operations that IEEE fixes.

    x = m 2^e with m in [sqrt(1/2), sqrt(2)] and s = (m - 1) / (m + 1): log m = 2 s (1 + s^2/3 + s^4/5 + ...). m - 1 is
    exact, and the eleventh power of s^2 < 0.0295 is below 2^-55.
    """
    m, e = np.frexp(x)
    low = m + m <= float.fromhex("0x1.6a09e667f3bcdp+0")
    m, e = np.where(low, m + m, m), np.where(low, e - 1, e).astype(np.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = np.zeros_like(z)
    for k in range(10, 0, -1):
        p = (p + 1.0 / (2 * k + 1)) * z
    tail = (s + s) * p + e * float.fromhex("0x1.a39ef35793c76p-33")
    return np.asarray(e * float.fromhex("0x1.62e42fee00000p-1") + ((s + s) + tail))


def gumbel(seed: int, stream: int, position: int, ids: I64) -> F64:
    """g of tokens ids (n,). seed: 64 bits, stream and position: 32 bits each."""
    return -log(-log(uniform(seed, stream, position, ids)))
