"""An OpenAI-compatible endpoint whose every token has a proof."""

from .app import Limits, create_app

__all__ = ["Limits", "create_app"]
