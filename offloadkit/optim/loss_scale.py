"""Loss scaling for fp16 working weights, because their gradients would otherwise underflow.

The dynamic scale falls after overflows and rises after long runs without overflow (Micikevicius et al., "Mixed
Precision Training"; start, window and hysteresis as in DeepSpeed).
"""

from __future__ import annotations

from typing import Any, Literal

from offloadkit.facts.config import DynamicLossScale


class LossScale:
    def __init__(self, choice: Literal["dynamic"] | float | DynamicLossScale) -> None:
        """`choice`: "dynamic", settings of the dynamic scale, or a fixed factor."""
        how = DynamicLossScale() if choice == "dynamic" else choice
        self._how = how if isinstance(how, DynamicLossScale) else None
        self.scale = float(how.start if isinstance(how, DynamicLossScale) else how)
        self._patience = 0 if self._how is None else self._how.hysteresis
        self._num_good = 0

    @property
    def can_fall(self) -> bool:
        """Whether a lower scale may cure an overflow. If not, the gradients themselves are not finite."""
        return self._how is not None and (self.scale > self._how.minimum or self._patience > 1)

    def update(self, *, overflow: bool) -> None:
        """Adjust the scale after a step.

        As in DeepSpeed's `DynamicLossScaler.update_scale`, the first good step after an overflow does not count towards
        the window.
        """
        how = self._how
        if how is None:
            return
        if not overflow:
            rises = self._num_good > 0 and self._num_good % how.window == 0
            self._num_good += 1
            if rises:
                self.scale *= 2
            if rises or how.consecutive_hysteresis:
                self._patience = how.hysteresis
            return
        self._num_good = 0
        self._patience -= 1
        if self._patience <= 0:
            self.scale = max(self.scale / 2, how.minimum)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "patience": self._patience, "num_good": self._num_good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict()`. A fixed scale does not change."""
        if self._how is not None:
            self.scale, self._patience = float(state["scale"]), int(state["patience"])
            self._num_good = int(state["num_good"])
