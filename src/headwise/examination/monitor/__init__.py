"""Measure the attention of a model while it trains: `headwise.Monitor`, callbacks for trainers, a page."""

from __future__ import annotations

from headwise.examination.monitor.alarms import AlarmRules
from headwise.examination.monitor.history import Alarm, Head, History
from headwise.examination.monitor.monitor import Monitor, MonitoredStep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from headwise.examination.monitor.lightning_callback import LightningMonitorCallback as LightningMonitorCallback
    from headwise.examination.monitor.trainer_callback import MonitorCallback as MonitorCallback

__all__ = [
    "Alarm",
    "AlarmRules",
    "Head",
    "History",
    "LightningMonitorCallback",
    "Monitor",
    "MonitorCallback",
    "MonitoredStep",
]


def __getattr__(name: str) -> object:  # trainers are imported when their callback is
    if name == "LightningMonitorCallback":
        from headwise.examination.monitor.lightning_callback import LightningMonitorCallback

        return LightningMonitorCallback
    if name == "MonitorCallback":
        from headwise.examination.monitor.trainer_callback import MonitorCallback

        return MonitorCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
