"""A folder's disk at assumed rates: for a machine that was not measured, and for what a refusal proposes."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from offloadkit.device.state_file import unfit_for_states
from offloadkit.errors import OutputError
from offloadkit.hardware import Hardware
from offloadkit.planner import Plan

ASSUMED_DISK = 1.5e9
"""Bytes a second, for reading and for writing."""


def with_disk(machine: Hardware, folder: str) -> Hardware:
    """The machine with the disk of `folder`, whose rates are assumed. Ranks of the host share it.

    Raises:
        OutputError: there is no such folder.
    """
    if not os.path.isdir(folder):
        raise OutputError(f"{folder} is no folder: name one on a local disk, for optimizer states")
    rate = ASSUMED_DISK / machine.num_ranks
    return replace(
        machine,
        disk_folder=folder,
        disk_free_bytes=shutil.disk_usage(folder).free,
        disk_read_bytes_per_second=rate,
        disk_write_bytes_per_second=rate,
    )


def proposing_disk(plan: Plan) -> Plan:
    """The plan. If it does not fit, it has a disk that a refusal may propose (`Basis.with_disk`): that of the system's
    folder for temporary files, or of the current folder."""
    machine = plan.basis.hardware
    if plan.fits or machine is None or machine.device == "cpu" or plan.basis.config.disk:
        return plan
    folder = next((name for name in (tempfile.gettempdir(), ".") if not unfit_for_states(Path(name))), None)
    return plan if folder is None else replace(plan, basis=replace(plan.basis, with_disk=with_disk(machine, folder)))
