"""GGUF models: llama.cpp computes the body of the model, the certified head the rest."""

from ..writer import Generation, Step
from .model import LlamaModel

__all__ = ["Generation", "LlamaModel", "Step"]
