"""Quantized Hugging Face checkpoints as sources: dequantized, one small file per format."""
