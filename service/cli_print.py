"""What the commands print as JSON. Imports nothing of the service."""

import json
import sys
from typing import Any


def print_json(value: dict[str, Any]) -> None:
    """Print one object on one line, escaped where the terminal's encoding is not UTF-8."""
    plain = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    sys.stdout.write(json.dumps(value, ensure_ascii=plain) + "\n")


def result_json(item: Any, *, tensors: bool = True) -> dict[str, Any]:
    """Turn one input's result into plain JSON values."""
    plain: dict[str, Any] = {
        "num_tokens": item.num_tokens,
        "original_num_tokens": item.original_num_tokens,
        "truncated": item.truncated,
    }
    if item.tokens is not None:
        plain["tokens"] = item.tokens.texts
        plain["char_spans"] = item.tokens.char_spans
    if tensors and item.token_embeddings is not None:
        plain["token_embeddings"] = item.token_embeddings.tolist()
    return plain
