"""Rows of what a plan says for a machine that was measured before; nothing runs."""

from __future__ import annotations
def plan_cases(*a,**k): ...
