"""Logging under vLLM's own logger, so that messages look like vLLM's and obey its level."""

import logging

logger = logging.getLogger("vllm.w8a8")

_said: set[str] = set()


def once(message: str, level: int = logging.INFO) -> None:
    """Log `message` the first time it comes up in this process."""
    if message not in _said:
        _said.add(message)
        logger.log(level, message, stacklevel=2)
