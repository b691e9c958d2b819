"""Turns checkpoints into W8A8 checkpoints: symmetric int8 weights with one fp32 scale per output channel.

Needs w8a8_kernels (the rounding of weights), torch, numpy, safetensors, gguf and tokenizers; never vLLM. Submodules import
what they need, this file nothing.
"""
