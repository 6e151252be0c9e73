"""Counts for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..certificate import Certificate

__all__ = ["Metrics"]

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/steps")


class Metrics:
    """One set for each application."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("csv_decode_requests", "Requests", ["path", "status"], registry=registry)
        self._latency = Histogram(
            "csv_decode_request_seconds", "From a request to its last token", buckets=_SECONDS, registry=registry
        )
        self._token_latency = Histogram(
            "csv_decode_token_seconds", "A token, body and head", buckets=_SECONDS, registry=registry
        )
        self._tokens = Counter("csv_decode_tokens", "Tokens written", registry=registry)
        self._certified = Counter("csv_decode_certified_tokens", "Of these with a proof", registry=registry)
        self._fallbacks = Counter("csv_decode_fallbacks", "Steps that scored every row", ["reason"], registry=registry)
        self._read = Counter("csv_decode_bytes_read", "Bytes that the head has read", registry=registry)
        self._saved = Counter(
            "csv_decode_bytes_saved", "Bytes that a bfloat16 head would have read on top", registry=registry
        )
        self.waiting = Gauge("csv_decode_waiting", "Requests that wait", registry=registry)
        self.cancelled = Counter("csv_decode_cancelled", "Requests whose client left", registry=registry)

    def request(self, path: str, status: int, seconds: float | None = None) -> None:
        self._requests.labels(path if path in _PATHS else "other", str(status)).inc()
        if seconds is not None:
            self._latency.observe(seconds)

    def step(self, proof: Certificate, seconds: float) -> None:
        self._tokens.inc()
        self._certified.inc(bool(proof.certified))
        self._read.inc(proof.bytes_read)
        self._saved.inc(max(0, proof.bytes_dense - proof.bytes_read))
        self._token_latency.observe(seconds)
        if proof.fallback is not None:
            self._fallbacks.labels(proof.fallback).inc()

    def text(self) -> bytes:
        return bytes(generate_latest(self._registry))
