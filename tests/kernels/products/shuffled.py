"""Rows of a product beside others: in any order, so many at once, on any number of threads."""

from collections.abc import Callable

import torch
from torch import Tensor

THREADS = (1, 2, 3, 4)
COUNTS = (1, 3, 16, 77)


def check_shuffled(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Each row has the bits that it has among all of x on one thread, which are returned."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = product(x)
        for threads in THREADS:
            torch.set_num_threads(threads)
            for count in COUNTS:
                rows = torch.randperm(len(x))[:count]
                assert torch.equal(product(x[rows]), whole[rows]), (threads, count)
    finally:
        torch.set_num_threads(before)
    return whole
