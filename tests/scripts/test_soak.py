"""What a soak calls a problem; `tests/engine/test_soak.py` runs one."""

from dataclasses import replace

import pytest
import soak

GOOD = soak.Result(
    seconds=30,
    requests={"short": 9},
    failures=[],
    log_lines=[],
    memory=[{"server": 10**9, "worker": 10**9}] * 30,
    quiet=[20.0, 20.0],
    loaded=[20.1, 19.9],
    wasted=2,
    preempted=0,
    left={"num_requests_running": 0.0, "num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.0},
)


def growing(by: float) -> list[dict[str, int]]:
    """Memory of two processes of which one grows in steps; together by so much from the first third to the last."""
    return [{"server": 10**9, "worker": int(10**9 * (1 + by * (i // 10)))} for i in range(30)]


def test_nothing_is_wrong() -> None:
    assert GOOD.problems() == []
    assert replace(GOOD, memory=growing(0.018)).problems() == []
    assert replace(GOOD, memory=growing(-0.5)).problems() == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"failures": ["short: Wrong: status 500"]}, "short: Wrong: status 500"),
        ({"log_lines": ["ERROR it broke"]}, "the server's log: ERROR it broke"),
        (
            {"memory": growing(0.05)},
            "memory grew by 5.0%, 2% is the limit: server from 1000 to 1000 MB, worker from 1000 to 1100",
        ),
        ({"memory": GOOD.memory[:2]}, "too short: 2 samples of memory"),
        ({"loaded": []}, "too short: 30 samples of memory, 0 passes"),
        ({"loaded": [20.1, 20.3]}, "perplexity changed by +1.50%, 1% is the limit"),
        ({"loaded": [20.1, float("nan")]}, "perplexity changed by +nan%"),
        ({"quiet": [20.0, 19.7]}, "perplexity changed by -1.50%"),
        ({"wasted": 900}, "an answer of 900 tokens went on for 900 after its reader had gone"),
        ({"left": {**GOOD.left, "num_requests_running": 1.0}}, "after the load the server still counts"),
        ({"left": {**GOOD.left, "kv_cache_usage_perc": 0.03}}, "after the load the server still counts"),
    ],
)
def test_problems(changes: dict, problem: str) -> None:
    (found,) = replace(GOOD, **changes).problems()
    assert problem in found


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("(EngineCore pid=1) ERROR 11-30 13:57:59 [core.py:1] it broke", True),
        ("Traceback (most recent call last):", True),
        ("(APIServer pid=1) INFO 11-30 13:57:59 [loggers.py:335] Engine 000: Running: 3 reqs", False),
        ('INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 400 Bad Request', False),
    ],
)
def test_lines_of_the_log(line: str, bad: bool) -> None:
    assert bool(soak.BAD_LINE.search(line)) == bad
