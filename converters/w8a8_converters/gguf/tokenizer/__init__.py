"""Rebuilds tokenizer and generation defaults from a GGUF file's metadata."""

from w8a8_converters.gguf.tokenizer.build import TokenizerFiles, build_tokenizer

__all__ = ["TokenizerFiles", "build_tokenizer"]
