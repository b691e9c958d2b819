"""How the attention backend is found (`--attention-backend CUSTOM`) and asked for. Light: imported in every vLLM process."""

import logging

from vllm_w8a8_plugin import envs, log
from vllm_w8a8_plugin.attention import INT8_CACHE

NAME = "CUSTOM"  # vLLM's member for backends of others
CLASS_PATH = "vllm_w8a8_plugin.attention.backend.W8A8AttentionBackend"


def registered() -> str | None:
    """Path of the class that `--attention-backend CUSTOM` selects, or None."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum.CUSTOM.get_path() if AttentionBackendEnum.CUSTOM.is_overridden() else None


def register() -> None:
    """Make `CUSTOM` this plugin's backend, unless it is another plugin's and VLLM_W8A8_ATTENTION does not ask for ours."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    present = registered()
    if present == CLASS_PATH:
        return
    if present is not None:
        if not _attention_is_asked_for():
            log.once(
                f"--attention-backend {NAME} is {present}, of another plugin; {envs.ATTENTION}=1 makes it this plugin's",
                logging.WARNING,
            )
            return
        log.once(f"{envs.ATTENTION}=1: --attention-backend {NAME} is this plugin's, no more {present}", logging.WARNING)
    register_backend(AttentionBackendEnum.CUSTOM, CLASS_PATH)


def _attention_is_asked_for() -> bool:
    try:
        return envs.attention()
    except ValueError:  # raised where a model asks for W8A8
        return False


def select(engine_args, asked: bool) -> None:
    """Choose our backend for a model, if VLLM_W8A8_ATTENTION says so and no other was chosen.

    Args:
        engine_args: vLLM's `EngineArgs`, before it looks at its attention options.
        asked: whether the model is served in W8A8, or VLLM_W8A8_ENABLE is set.

    Raises:
        ValueError: W8A8 is asked for, and the variable is neither a yes nor a no; or an int8 cache is asked for on a CPU.
    """
    chosen = _chosen(engine_args)
    wanted = envs.attention() if asked else _attention_is_asked_for()
    if wanted and not asked:
        log.once(
            f"{envs.ATTENTION}=1 has no effect on {engine_args.model}, which is not served in W8A8: --quantization w8a8, "
            f"{envs.ENABLE}=1 or --attention-backend {NAME} asks for it",
            logging.WARNING,
        )
        return
    if wanted and chosen not in (None, NAME):
        log.once(f"{envs.ATTENTION}=1: attention stays on {chosen}, which was chosen by name")
        return
    if not wanted and (chosen != NAME or registered() != CLASS_PATH):
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        if engine_args.kv_cache_dtype == INT8_CACHE:
            # vLLM's CPU attention takes the option and answers with noise (0.32).
            raise ValueError(
                f"--kv-cache-dtype {INT8_CACHE}: got a device without NVIDIA GPU, expected one, as the kernels that read such "
                "a cache are for these: leave the option out"
            )
        log.once("W8A8: the attention backend is for NVIDIA GPUs; here attention stays on vLLM's own", logging.WARNING)
        return
    if chosen is None:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        register()  # a plugin that was loaded after ours may have taken the name
        engine_args.attention_backend = AttentionBackendEnum.CUSTOM
        log.once(f"{envs.ATTENTION}=1: attention runs on this plugin's backend, as with --attention-backend {NAME}")


def _chosen(engine_args) -> str | None:
    """Name of the backend that the user chose, or None."""
    backend = engine_args.attention_backend
    if backend is None:
        backend = engine_args.attention_config.backend
    name = getattr(backend, "name", backend)
    return None if name is None or name.upper() == "AUTO" else name.upper()
