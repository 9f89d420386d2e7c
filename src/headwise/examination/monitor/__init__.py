"""Measure the attention of a model while it trains: `headwise.Monitor`, callbacks for trainers, a page of the history."""

from __future__ import annotations

from headwise.examination.monitor.alarms import AlarmRules
from headwise.examination.monitor.history import Alarm, Head, History
from headwise.examination.monitor.monitor import Monitor, MonitoredStep

__all__ = ["Alarm", "AlarmRules", "Head", "History", "Monitor", "MonitoredStep"]
