"""GGUF files as a source of Hugging Face checkpoints."""
