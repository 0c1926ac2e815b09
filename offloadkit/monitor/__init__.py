"""A training run to look at: `Monitor`, from what telemetry recorded.

`history` (records added up), `figures` (what is shown, as numbers), `words`, `svg` and `page` (as text, charts, HTML),
`notebook` and `terminal` (where it is shown), `stop` (button and interrupt), `monitor` (the thread that draws).
"""

from __future__ import annotations

from offloadkit.monitor.figures import Figures
from offloadkit.monitor.monitor import Monitor

__all__ = ["Figures", "Monitor"]
