"""What a process does again and again beside its requests.

What must hold: a time that fails is told and is not the last one. Whoever started it ends it by cancelling.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Never

__all__ = ["repeat"]


async def repeat(step: Callable[[], Awaitable[None]], every_s: float, log: logging.Logger, what: str) -> Never:
    """Wait, then take the step, for ever. A failure is logged as one of `what`, and only once until a step succeeds again."""
    is_told = False
    while True:
        await asyncio.sleep(every_s)
        try:
            await step()
        except Exception:
            if not is_told:
                log.exception("%s failed, and is tried again every %g s", what, every_s)
            is_told = True
        else:
            is_told = False
