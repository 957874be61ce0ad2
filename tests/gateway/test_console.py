"""The tables of `warmpath replicas`; the commands run whole in `tests/system/test_up.py`."""

from __future__ import annotations

import io

from rich.console import Console

from gateway.commands.replicas import ReplicaTable


def test_a_models_name_is_shown_as_it_is() -> None:
    replica = {
        "id": "r",
        "model": "[red]odd[/x]",
        "healthy": True,
        "draining": False,
        "cordoned": False,
        "trust": "LEARNING",
        "inflight": 0,
        "load": None,
    }
    shown = io.StringIO()

    Console(file=shown, width=200).print(ReplicaTable().render([replica], 0.0))

    assert "[red]odd[/x]" in shown.getvalue()
