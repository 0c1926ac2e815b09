"""Scripts under launchers, without any line for distributed training."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import launched
from tests.distributed.doors import finetuned

TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]


def run(launchers: list[list[str]], what: str, folder: Path) -> list[dict[str, torch.Tensor]]:
    """The final weights of each rank; output goes to a file. All launchers run at the same time."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_CONFIG_FILE": ""}
    outputs = [(folder / f"printed-{at}").open("w+") for at in range(len(launchers))]
    commands = [[sys.executable, "-m", *launcher, launched.__file__, what, str(folder)] for launcher in launchers]
    common: dict[str, Any] = {"env": environment, "stderr": subprocess.STDOUT, "start_new_session": True}
    started = [subprocess.Popen(command, stdout=to, **common) for command, to in zip(commands, outputs, strict=True)]
    try:
        for each in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(120)
    finally:
        for each in started:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()
    printed = []
    for output in outputs:
        output.seek(0)
        printed.append(output.read())
        output.close()
    assert all(each.returncode == 0 for each in started), "".join(printed)[-4000:]
    (folder / "printed").write_text("".join(printed))
    return [torch.load(folder / f"weights-{rank}.pt") for rank in range(2)]


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@pytest.mark.slow(15)
@pytest.mark.usefixtures("one_thread")
def test_torchrun_starts_finetune(tmp_path: Path) -> None:
    found = run([TORCHRUN], "finetune", tmp_path)
    expected = finetuned("llama", tmp_path / "one", accumulation=2, rows=8, epochs=1)["weights"]
    for weights in found:
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
    printed = (tmp_path / "printed").read_text()
    assert printed.count("the model is in") == printed.count("loading transformers and datasets") == 1


@pytest.mark.slow(15)
@pytest.mark.usefixtures("one_thread")
def test_accelerate_launch_starts_a_loop_with_its_loader_and_finetune(tmp_path: Path) -> None:
    found = run([ACCELERATE], "accelerate", tmp_path)
    expected = launched.loop()
    finetune = finetuned("llama", tmp_path / "one", accumulation=2, rows=8, epochs=1)["weights"]
    for rank, weights in enumerate(found):
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
        own = torch.load(tmp_path / f"finetuned-{rank}.pt")
        assert all(torch.equal(own[name], value) for name, value in finetune.items())
        assert "wrapped in DistributedDataParallel, which is not needed" in (tmp_path / f"error-{rank}").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_two_nodes_train_what_one_process_trains(tmp_path: Path) -> None:
    """Two torchrun agents over loopback; their ranks report different hosts."""
    where = ["--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", free_port()]
    nodes = [["torch.distributed.run", "--nnodes", "2", "--node-rank", str(node), *where] for node in range(2)]
    expected = launched.loop()
    for weights in run(nodes, "loop", tmp_path):
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_the_deepspeed_launcher_starts_a_loop(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    world = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    launcher = ["deepspeed.launcher.launch", "--no_local_rank", "--master_port", free_port(), f"--world_info={world}"]
    expected = launched.loop()
    for weights in run([launcher], "loop", tmp_path):
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
