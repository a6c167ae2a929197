"""Where Triton runs: on the GPU if there is one, else interpreted on the processor."""

import numpy as np
import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels are tried."""
    if not torch.cuda.is_available() and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("Triton's interpreter needs numpy below 2.4, and there is no GPU")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
