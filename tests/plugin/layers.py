"""vLLM's parallel linear layers outside an engine: one process a rank, gloo between them."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import forked
import torch


@contextlib.contextmanager
def tensor_parallel(rank: int, world: int, port: int) -> Iterator[None]:
    """Everything that vLLM's layers need around them, on the CPU."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        parallel_state.init_distributed_environment(world, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        parallel_state.initialize_model_parallel(world)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_ranks(world: int, test: Callable[[int, int], None]) -> None:
    """Run `test(rank, world)` in a process for each rank; an assertion that fails in one fails here."""
    forked.started()
    arguments = (world, free_port(), test, dict(os.environ))
    torch.multiprocessing.start_processes(_rank, arguments, nprocs=world, start_method=forked.METHOD)


def _rank(rank: int, world: int, port: int, test: Callable[[int, int], None], environment: dict[str, str]) -> None:
    forked.take_environment(environment)
    torch.set_num_threads(1)
    os.environ["VLLM_DIST_IDENT"] = str(port)  # names the shared memory between ranks on the CPU build
    with tensor_parallel(rank, world, port):
        test(rank, world)


def load(layer: torch.nn.Module, tensors: dict[str, torch.Tensor], shard: str | int | None = None) -> None:
    """Hand a checkpoint's tensors to the layer's parameters as vLLM's model loader does."""
    for name, tensor in tensors.items():
        parameter = getattr(layer, name)
        args = () if shard is None else (shard,)
        parameter.weight_loader(parameter, tensor, *args)


def finish(layer: torch.nn.Module) -> None:
    """What follows when all weights are loaded."""
    layer.quant_method.process_weights_after_loading(layer)


def experts(
    activation: str = "silu", has_bias: bool = False, all2all: bool = False, ranks: int = 1, **swiglu
) -> torch.nn.Module:
    """As much of vLLM's layer `RoutedExperts`, of 4 experts, top 2, as our methods look at."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    layer = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(layer)
    layer.layer_name, layer.global_num_experts, layer.top_k = "model.layers.3.mlp.experts", 4, 2
    layer.apply_router_weight_on_input, layer.quant_method, layer._expert_map = False, None, None
    layer.rocm_aiter_fmoe_enabled = False  # its expert_map asks for this on 0.27.1
    layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name = "gate_proj", "up_proj", "down_proj"
    parallel = SimpleNamespace(use_all2all_kernels=all2all, tp_size=ranks)
    layer.moe_config = SimpleNamespace(activation=activation, has_bias=has_bias, moe_parallel_config=parallel)
    for name, value in swiglu.items():
        setattr(layer, name, value)
    return layer
