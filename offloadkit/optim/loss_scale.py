"""Loss scaling for fp16 working weights, whose gradients would underflow otherwise.

The loss is multiplied by the scale before backward, and the step divides the gradients by it again. A step whose scaled
gradients overflow is skipped. The dynamic scale goes down after overflows and up after long runs without one
(Micikevicius et al., "Mixed Precision Training"; start, window and hysteresis as DeepSpeed has them).
"""

from __future__ import annotations

from typing import Any, Literal

START = 2.0**16
WINDOW = 1000
"""Steps without an overflow after which the scale doubles."""
HYSTERESIS = 2
"""Overflows, since the scale last rose, until it is halved; from then on every one halves it."""
MINIMUM = 1.0


class LossScale:
    """The scale of the next loss.

    Attributes:
        scale: the factor; a power of two where it is dynamic, so that it changes no digit.
    """

    def __init__(self, choice: Literal["dynamic"] | float) -> None:
        """choice: "dynamic", or a fixed factor."""
        self.dynamic = choice == "dynamic"
        self.scale = START if choice == "dynamic" else float(choice)
        self._patience = HYSTERESIS
        self._num_good = 0

    @property
    def can_fall(self) -> bool:
        """Whether an overflow may be the scale's fault: else the gradients themselves are not finite."""
        return self.dynamic and self.scale > MINIMUM

    def update(self, *, overflow: bool) -> None:
        """Learn how the last step ended."""
        if not self.dynamic:
            return
        if not overflow:
            self._num_good += 1
            if self._num_good % WINDOW == 0:
                self.scale *= 2
                self._patience = HYSTERESIS
            return
        self._num_good = 0
        self._patience -= 1
        if self._patience <= 0:
            self.scale = max(self.scale / 2, MINIMUM)

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides the next scales."""
        return {"scale": self.scale, "patience": self._patience, "num_good": self._num_good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict()`; a fixed scale stays as it is."""
        if self.dynamic:
            self.scale, self._patience = float(state["scale"]), int(state["patience"])
            self._num_good = int(state["num_good"])
