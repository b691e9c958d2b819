"""Time on a GPU: CUDA graphs of many calls, since single launches measure the launch."""

import statistics
from collections.abc import Callable

import torch

REPLAYS = 11
# Enough that the gap between two replays does not count.
MIN_CALLS = 20
# Replays before the first that counts take so long together.
WARM_UP_MS = 10.0


def graph_us(calls: list[Callable[[], object]], warm_up_ms: float = WARM_UP_MS) -> float:
    """Microseconds of one call: median of `REPLAYS` replays of a CUDA graph of all of them, after `warm_up_ms` of others.

    To keep operands out of the L2 cache, give every call its own.
    """
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def replay_ms() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    warm_ms = 0.0
    while warm_ms < warm_up_ms:
        warm_ms += replay_ms()
    return statistics.median(replay_ms() for _ in range(REPLAYS)) * 1e3 / len(calls)


def call_count(M: int, N: int, K: int, device: torch.device | None = None) -> tuple[int, int]:
    """How many weights [N, K] int8 to rotate, and how many calls to time.

    Returns:
        weights that are together over four times the L2 cache, two at least; calls, each weight once or more. Large products
        are far longer than a launch, so few calls will do.
    """
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    copies = max(2, -(-4 * l2_bytes // (N * K)))
    return copies, max(MIN_CALLS if M * N * K < 2**36 else 4, copies)
