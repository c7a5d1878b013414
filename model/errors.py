"""What can go wrong between a checkpoint and an artifact.

    ModelError (ValueError)
    ├── CheckpointError   a folder, config, tokenizer or weights file that cannot be loaded exactly
    └── ExportError       an artifact that could not be written or does not compute what torch computes

Each message says what was expected, what came and what to change.
"""


def first_line(error: BaseException) -> str:
    """Give an error's first line, or its kind where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class ModelError(ValueError):
    """Base of every error that a caller of `model` can act on."""


class CheckpointError(ModelError):
    """Report a checkpoint that the encoder cannot load with exactly its own numbers."""


class ExportError(ModelError):
    """Report an export that failed, or whose graphs differ from the torch encoder."""
