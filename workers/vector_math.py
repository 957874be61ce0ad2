"""The first call of a vector function, made where nobody can disturb it.

exp, log and log1p are MKL's on x86. In the first such call of a process MKL finds out which of its kernels suits the
processor. If two threads make that first call at once, one of them can get a kernel of 12 bits (relative error 1.5e-4
instead of 6e-8), for this call only: the whole share of one thread is wrong, the same way each time. Seen with torch 2.13 in
2 of 400 and 3 of 1,500 fresh processes on a busy machine.
"""

from __future__ import annotations

import torch

__all__ = ["settle_vector_math"]


def settle_vector_math() -> None:
    """Call it once before the first parallel computation. One element is never shared among threads."""
    one = torch.ones(1)
    for function in (torch.exp, torch.log, torch.log1p):
        function(one)
