"""What `vllm-w8a8 doctor` reports: versions, devices, Triton's assembler, kernels by rows, what vLLM sees of the plugin."""

import importlib.metadata
import os
from dataclasses import dataclass, field

import vllm_w8a8_plugin
from vllm_w8a8_plugin import compat, envs, stock_int8

ENTRY_POINT_GROUP = "vllm.general_plugins"
ENTRY_POINT = "w8a8"
ROWS = (1, 16, 64, 256, 512, 1024, 4096)
# The weight that the kernel table speaks of: a square projection of an 8B model.
EXAMPLE_N = EXAMPLE_K = 4096


@dataclass
class Diagnosis:
    """Facts for the report: (name, value) lines, the kernel table, and what must be mended (empty: all is well)."""

    facts: list[tuple[str, str]] = field(default_factory=list)
    kernels: list[tuple[str, str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def diagnose() -> Diagnosis:
    """Look at this machine and environment. Initializes CUDA where there is a GPU."""
    result = Diagnosis()
    version = compat.installed_vllm()
    result.facts.append(("vllm-w8a8-plugin", vllm_w8a8_plugin.__version__))
    result.facts.append(("vllm", version or "not installed"))
    for package in ("torch", "triton", "transformers", "gguf", "compressed-tensors"):
        result.facts.append((package, _version(package)))
    problem = compat.vllm_problem(version)
    if problem is not None:
        result.problems.append(problem)
    _diagnose_entry_point(result)
    if version is not None:
        compat.load_vllm_ops()
    _diagnose_kernels(result)
    if version is not None:
        _diagnose_int8_schemes(result)
        _diagnose_attention(result)
    return result


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _diagnose_entry_point(result: Diagnosis) -> None:
    found = [e for e in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP) if e.name == ENTRY_POINT]
    allowed = os.environ.get("VLLM_PLUGINS")
    if not found:
        result.facts.append(("entry point", "not found"))
        result.problems.append(
            f"vLLM cannot see the plugin: no entry point {ENTRY_POINT!r} in {ENTRY_POINT_GROUP!r}. Install it with pip; a "
            "folder on PYTHONPATH has no entry points"
        )
    elif allowed is not None and ENTRY_POINT not in allowed.split(","):
        result.facts.append(("entry point", f"excluded by VLLM_PLUGINS={allowed!r}"))
        result.problems.append(f"VLLM_PLUGINS={allowed!r} leaves the plugin out: add {ENTRY_POINT!r} to it or unset it")
    else:
        result.facts.append(("entry point", f"{found[0].value}, visible to vLLM"))


def _diagnose_kernels(result: Diagnosis) -> None:
    import torch

    from w8a8_kernels.ops import choose_scaled_mm, device_facts
    from w8a8_kernels.select import select_quantize
    from w8a8_kernels.tiles import kernel_for

    if torch.cuda.is_available():
        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        for device in devices:
            major, minor = torch.cuda.get_device_capability(device)
            result.facts.append((str(device), f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"))
        _diagnose_ptxas(result, _capabilities())
        device = devices[0]
    else:
        device = torch.device("cpu")
        result.facts.append(("device", f"CPU ({torch.backends.cpu.get_cpu_capability()}), no GPU visible to PyTorch"))
    try:
        envs.check()
        # Reads VLLM_W8A8_CONFIG_DIR on every machine; below, only a GPU with kernels beside Triton's does.
        kernel_for(1, EXAMPLE_N, EXAMPLE_K, device_name=device.type, capability=(0, 0))
    except ValueError as error:
        result.problems.append(str(error))
    facts = device_facts(device)
    try:
        for rows in ROWS:
            quantizer, product = select_quantize(facts), choose_scaled_mm(device, rows, EXAMPLE_N, EXAMPLE_K)
            result.kernels.append((str(rows), f"{quantizer.kernel} + {product.kernel}", product.reason))
    except ValueError as error:
        if str(error) not in result.problems:
            result.problems.append(str(error))


def _capabilities() -> list[tuple[int, int]]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return sorted({torch.cuda.get_device_capability(torch.device("cuda", i)) for i in range(count)})


def _diagnose_int8_schemes(result: Diagnosis) -> None:
    """What runs int8 layers of checkpoints that stay on vLLM's own path."""
    name = "int8 layers of vLLM's own schemes"
    try:
        enabled = envs.enabled()
    except ValueError:
        return  # said before
    if not enabled:
        result.facts += [(name, said) for said in map(stock_int8.failure, _capabilities()) if said is not None]
        return
    try:
        compat.int8_kernels()
    except LookupError as error:
        result.problems.append(f"{envs.ENABLE}=1 cannot bring this plugin's kernels to {name}: {error}")
    else:
        result.facts.append((name, f"run on this plugin's kernels: {envs.ENABLE}=1"))


def _diagnose_attention(result: Diagnosis) -> None:
    """Where the attention backend runs, and on what."""
    import torch
    from vllm.platforms import current_platform

    from vllm_w8a8_plugin.attention import prefill, registration

    name = "attention backend"
    try:
        asked = f"with W8A8 ({envs.ATTENTION}=1), or " if envs.attention() else ""
        choice = prefill.choose_here(envs.prefill_attention(), prefill.Layer(head_size=128), torch.bfloat16)
    except ValueError as error:
        if str(error) not in result.problems:
            result.problems.append(str(error))
        return
    if not current_platform.is_cuda():
        result.facts.append((name, "for NVIDIA GPUs; here attention stays on vLLM's own"))
        return
    result.facts.append(
        (
            name,
            f"{asked}with --attention-backend {registration.NAME}: triton; queries of more than "
            f"{prefill.SHORT_QUERIES} tokens: {choice.kernel} ({choice.reason})",
        )
    )


def _diagnose_ptxas(result: Diagnosis, capabilities: list[tuple[int, int]]) -> None:
    from w8a8_kernels.ptxas import find_ptxas

    for capability in capabilities:
        try:
            ptxas = find_ptxas(capability)
        except RuntimeError as error:
            result.facts.append(("ptxas", "unknown"))
            if str(error) not in result.problems:  # of another GPU
                result.problems.append(str(error))
            continue
        result.facts.append(("ptxas", str(ptxas)))
        problem = ptxas.problem()
        if problem is not None:
            result.problems.append(problem)
