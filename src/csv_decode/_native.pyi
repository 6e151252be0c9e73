from typing import Any

def ieee() -> bool: ...
def supported() -> list[str]: ...

class Plane:
    def __init__(self, words: Any, rho: Any, bias: Any, segments: Any) -> None: ...

def screen(
    isa: str, threads: int, plane: Plane, hi: Any, lo: Any, params: Any, open: Any, centre: Any, upper: Any
) -> None: ...
def refine(
    isa: str, threads: int, plane: Plane, hi: Any, lo: Any, params: Any, rows: Any, start: Any, centre: Any, upper: Any
) -> None: ...
def score(isa: str, threads: int, rows: Any, type: int, ids: Any, h: Any, value: Any, magnitude: Any) -> None: ...
def leaders(isa: str, threads: int, values: Any, m: int) -> Any: ...
def select(isa: str, values: Any, bar: float) -> tuple[Any, float]: ...

class Cascade:
    def __init__(
        self,
        planes: Any,
        rows: Any,
        type: int,
        bias: Any,
        transform: Any,
        transform_type: int,
        mean: Any,
        edges: Any,
        delta: float,
        energy: float,
        rotation_error: float,
        typical: Any,
        sigma: float,
    ) -> None: ...
    def scan(self, isa: str, threads: int, h: Any, k: int, spare: int, budget: int) -> Any: ...
