"""Growth inside other people's training loops: transformers' Trainer and Lightning's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headwise.growth.callbacks.growth_schedule import GrowthSchedule

if TYPE_CHECKING:
    from headwise.growth.callbacks.lightning_growth import LightningGrowthCallback
    from headwise.growth.callbacks.trainer_growth import GrowthCallback

__all__ = ["GrowthCallback", "GrowthSchedule", "LightningGrowthCallback"]


def __getattr__(name: str) -> Any:
    if name == "GrowthCallback":  # imports transformers
        from headwise.growth.callbacks.trainer_growth import GrowthCallback

        return GrowthCallback
    if name == "LightningGrowthCallback":
        from headwise.growth.callbacks.lightning_growth import LightningGrowthCallback

        return LightningGrowthCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
