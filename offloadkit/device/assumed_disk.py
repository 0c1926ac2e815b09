"""A disk at assumed rates, for machines that were not measured and for proposals of plans that do not fit."""

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
"""Bytes per second of reading and of writing."""


def with_disk(machine: Hardware, folder: str) -> Hardware:
    """Add the disk of `folder` to the machine, at assumed rates that the ranks of the host share.

    Raises:
        OutputError: `folder` is not a folder.
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
    """Give a plan that does not fit a disk to propose (`Basis.with_disk`): the disk of the temporary folder or of the
    current folder. Other plans are returned unchanged.
    """
    machine = plan.basis.hardware
    if plan.fits or machine is None or machine.device == "cpu" or plan.basis.config.disk:
        return plan
    folder = next((name for name in (tempfile.gettempdir(), ".") if not unfit_for_states(Path(name))), None)
    return plan if folder is None else replace(plan, basis=replace(plan.basis, with_disk=with_disk(machine, folder)))
