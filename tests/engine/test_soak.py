"""A server under mixed load keeps its answers and its memory: `scripts/soak.py` on SmolLM2."""

from collections.abc import Callable
from pathlib import Path

import pytest
import soak

pytestmark = pytest.mark.engine

KINDS = {
    "short", "long_prompt", "long_answer", "sampled", "streamed_sampled", "left_stream", "given_up", "cut_off", "refused",
    "probe",
}  # fmt: skip


@pytest.mark.parametrize("seconds", [pytest.param(180, id="3 min"), pytest.param(1800, id="30 min", marks=pytest.mark.slow)])
def test_soak(smollm2: Callable[[str], Path], seconds: int, request: pytest.FixtureRequest) -> None:
    if seconds > 180 and not request.config.getoption("--soak-full", default=False):
        pytest.skip("takes half an hour: --soak-full")
    result = soak.soak(smollm2("w8a8"), seconds)
    print(soak.summary(result))
    assert result.problems() == []
    assert set(result.requests) == KINDS
