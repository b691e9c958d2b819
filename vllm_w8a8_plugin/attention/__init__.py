"""vLLM's attention on this plugin's kernels. Importing this touches neither torch nor vLLM."""

INT8_CACHE = "int8_per_token_head"  # vLLM's name of it


def unsupported(problem: str) -> ValueError:
    """The error that refuses a model, with what to do."""
    return ValueError(f"W8A8 attention backend: {problem}: choose another with --attention-backend")
