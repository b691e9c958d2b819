"""Time on a GPU: CUDA graphs of many calls, since single launches measure the launch."""

import random
import statistics
from collections.abc import Callable

import torch

Calls = list[Callable[[], object]]

REPLAYS = 11
# What is compared takes more turns, and its share of this time before: a card at its power limit changes its clocks from one
# millisecond to the next, and of 11 turns each the same CUTLASS product came out 15 % apart on an H200.
TURNS, TURNS_WARM_UP_MS = 41, 200.0
# Enough that the gap between two replays does not count.
MIN_CALLS = 20
# Replays before the first that counts take so long together.
WARM_UP_MS = 10.0


def _replayer(calls: Calls) -> Callable[[], float]:
    """Capture a CUDA graph of all calls; what comes back replays it and says how many milliseconds that took."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def replay() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    return replay


def graph_us(calls: Calls, warm_up_ms: float = WARM_UP_MS) -> float:
    """Microseconds of one call: median of `REPLAYS` replays of a CUDA graph of all of them, after `warm_up_ms` of others.

    To keep operands out of the L2 cache, give every call its own.
    """
    replay = _replayer(calls)
    warm_ms = 0.0
    while warm_ms < warm_up_ms:
        warm_ms += replay()
    return statistics.median(replay() for _ in range(REPLAYS)) * 1e3 / len(calls)


def compare_us(ways: dict[str, Calls]) -> dict[str, float]:
    """`graph_us` of several ways to do the same, their replays taking turns in an order that is drawn anew every time.

    A card's clocks follow its load and its temperature: one way after the other, the same kernel came out up to 15 % apart
    after large products on an H200, and in turns that always followed the same one 8 %.
    """
    rng = random.Random(0)
    replayers = {name: _replayer(calls) for name, calls in ways.items()}
    warm_ms = 0.0
    while warm_ms < TURNS_WARM_UP_MS:
        warm_ms += sum(replay() for replay in replayers.values())
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name in rng.sample(list(ways), len(ways)):
            times[name].append(replayers[name]() * 1e3 / len(ways[name]))
    return {name: statistics.median(us) for name, us in times.items()}


def call_count(M: int, N: int, K: int, device: torch.device | None = None) -> tuple[int, int]:
    """How many weights [N, K] int8 to rotate, and how many calls to time.

    Returns:
        weights that are together over four times the L2 cache, two at least; calls, each weight once or more. Large products
        are far longer than a launch, so few calls will do.
    """
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    copies = max(2, -(-4 * l2_bytes // (N * K)))
    return copies, max(MIN_CALLS if M * N * K < 2**36 else 4, copies)
