"""What a program may have done before it runs a graph, and what hangs in a fork that inherits
threads from it.
"""

from datetime import timedelta

import torch
import torch.distributed as dist


def compute() -> None:
    """On two threads, forward and backward; hangs where a pool of threads was inherited."""
    torch.set_num_threads(2)
    # larger, the gradients of softmax are denormal, and slow
    weights = (torch.randn(600, 600) / 25).requires_grad_()
    (weights @ weights).softmax(1).exp().sum().backward()
    assert weights.grad is not None


def drop_a_group() -> None:
    """A process group of torch that only the collector finds; hangs whoever collects it without its
    threads.
    """
    made = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))]
    made.append(made)
