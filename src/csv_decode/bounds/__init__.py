"""The mathematics: upper bounds on logits and their rounding. No files, no frameworks. See docs/mathematics.md."""
