"""int8 weights times int8 activations (W8A8) for vLLM. Importing this touches neither torch, vLLM nor a GPU."""

__version__ = "0.1.0"


def register() -> None:
    """Entry point `vllm.general_plugins`: vLLM calls it in every process it starts. Calling it again changes nothing."""
    from vllm_w8a8_plugin.registration import register_plugin

    register_plugin()
