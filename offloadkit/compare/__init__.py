"""How engines compare, what larger batches cost, what offloading costs: measured in fresh processes, drawn and saved.

`work` (what is done), `engines` (by whom), `steps` and `memory` (measuring), `worker` (one task in a process of its
own), `runner` (such processes, their limits, kept rows), `forecast` (what the plan says first), `comparison`,
`sweeping`, `slowdown` (the questions), `knee`, `learning`, `explain`, `words`, `figure`, `sweep_figure` (the answers).
"""

from __future__ import annotations

from offloadkit.compare.comparison import Comparison, compare
from offloadkit.compare.slowdown import Slowdown, measure_slowdown
from offloadkit.compare.sweeping import Sweep, sweep

__all__ = ["Comparison", "Slowdown", "Sweep", "compare", "measure_slowdown", "sweep"]
