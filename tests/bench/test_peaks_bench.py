"""The peaks: every format has one, from the processor's own instructions where it has them, else
from torch.
"""

import pytest

from bench import peaks


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "ROUNDS", 1000)
    monkeypatch.setattr(peaks, "SIDE", 64)
    monkeypatch.setattr(peaks, "READ_BYTES", 1 << 16)
    monkeypatch.setattr(peaks, "TRIES", 1)


@pytest.mark.parametrize("dtype", peaks.DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_peak_of_products_is_the_better_of_registers_and_library(
    dtype: str, threads: int
) -> None:
    assert peaks.matmul_peak(dtype, threads) > 0
    assert peaks.registers_peak(dtype, threads) >= 0


def test_reading_memory_has_a_rate() -> None:
    assert peaks.read_bandwidth(2) > 0
