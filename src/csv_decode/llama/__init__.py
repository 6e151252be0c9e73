"""GGUF models: llama.cpp computes the body of the model, the certified head the rest."""

from .model import Generation, LlamaModel, Step

__all__ = ["Generation", "LlamaModel", "Step"]
