"""The processes that train one model together: `Solo` where the world size is 1, `Group` where it is larger.

Both have one protocol, `Ranks`, so the engine communicates without asking how many ranks there are. `Solo` starts no
thread, calls nothing of torch.distributed and keeps nothing.

Numbers that must be equal on all ranks are summed in rank order by whoever owns them, never by a library in an order of
its own. So exchanging is all there is: two operations between devices, and two between hosts.

| | issued by | group |
|---|---|---|
| `exchange`, `gather`, `broadcast` | the main thread, or autograd's while that waits in backward | the device's |
| `agree`, `told` | the main thread | gloo, its own |
| `sum`, `meet` | the stepping thread | gloo, its own |
| watching for ranks that end | a thread of `Watch` | gloo, its own |

Every rank must ask for the same operations of a group in the same order. No two threads share a group.

What comes from the others in `exchange`, `gather` and `agree` is counted, on the host, as the operation is issued.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from offloadkit import hardware
from offloadkit.device import watchdog
from offloadkit.device.host_memory import file_in_ram
from offloadkit.device.streams import CopyStream
from offloadkit.distributed.stepped import Stepped, SteppedLayers
from offloadkit.distributed.watch import Watch
from offloadkit.errors import ConfigError, RankError
from offloadkit.planner.fitted import NCCL_BYTES

_T = TypeVar("_T")

CONNECTING_BYTES = 32 << 20
"""What is gathered to connect ranks: as much as of a large layer, since NCCL's choice of an algorithm depends on it."""
_MOST_LIBRARY_BYTES = 2 * NCCL_BYTES
"""What NCCL can have taken at the most; the rest is another process's, which came meanwhile."""
BROADCAST_BYTES = 64 * 2**20
"""A tensor that is not on the device is broadcast in pieces of so many bytes."""


class Ranks(Protocol):
    """What the processes that train together do with each other.

    Attributes:
        rank: this process's number.
        size: how many there are.
        is_failing: whether an error is on its way to the caller, which the other ranks must learn of.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def is_failing(self) -> bool: ...

    def connect(self, most_ctas: int = 0) -> None: ...

    def take_received(self) -> dict[str, int]: ...

    def broadcast(self, tensor: torch.Tensor) -> None: ...

    def agree(self, own: NDArray[np.int64]) -> NDArray[np.int64]: ...

    def told(self, make: Callable[[], _T], *, by: int = 0) -> _T: ...

    def sum(self, numbers: NDArray[np.float64]) -> None: ...

    def together(self, what: str) -> AbstractContextManager[None]: ...

    def explain(self, error: RuntimeError) -> None: ...

    def fail(self) -> None: ...

    def close(self) -> None: ...


class Solo:
    """World size 1. Every operation of `Ranks` returns at once what one rank alone gives."""

    rank = 0
    size = 1
    is_failing = False

    def connect(self, most_ctas: int = 0) -> None:
        pass

    def take_received(self) -> dict[str, int]:
        return {}

    def broadcast(self, tensor: torch.Tensor) -> None:
        pass

    def agree(self, own: NDArray[np.int64]) -> NDArray[np.int64]:
        return own[None]

    def told(self, make: Callable[[], _T], *, by: int = 0) -> _T:
        return make()

    def sum(self, numbers: NDArray[np.float64]) -> None:
        pass

    def together(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def explain(self, error: RuntimeError) -> None:
        pass

    def fail(self) -> None:
        pass

    def close(self) -> None:
        pass


SOLO = Solo()


def joined_ranks(device: torch.device) -> Solo | Group:
    """The ranks of torch.distributed's default group, which train together; `SOLO` where there is one or no group.

    Every rank must call it at the same point: it makes groups.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return SOLO
    return Group(device)


_HANDLED = "_offloadkit_handled"
"""On an error that was being handled when ranks met."""


class Group:
    """World size 2 or more: the processes of torch.distributed's default group, this one among them.

    An operation that another rank never joins raises `RankError` when the timeout given to `init_process_group` is
    over, or at once where the other rank has died or failed. Ranks that hang then print the stacks of their threads.

    Attributes:
        rank: this process's number.
        size: how many there are.
        stream: where the operations between devices run.
    """

    _watch: Watch | None = None
    _stepped: SteppedLayers | None = None
    _library_bytes = 0
    _most_ctas: int | None = None

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size, self._device = dist.get_rank(), dist.get_world_size(), device
        if (error := sys.exception()) is not None:
            vars(error)[_HANDLED] = True  # held here, it would keep all that its frames hold
        default: Any = dist.group.WORLD
        self._timeout: timedelta = default._get_backend(default._device_types[0]).options._timeout
        timeout = self._timeout
        watchdog.state.ranks_seconds = max(watchdog.state.ranks_seconds, timeout.total_seconds())
        self._between_devices: Any = None
        with self._explained("making process groups"):
            if device.type != "cuda":
                self._between_devices = dist.new_group(backend="gloo", timeout=timeout)
            self._of_main: Any = dist.new_group(backend="gloo", timeout=timeout)
            self._of_stepping: Any = dist.new_group(backend="gloo", timeout=timeout)
            of_watch = dist.new_group(backend="gloo", timeout=timeout)
        self._watch = Watch(self.rank, self.size, of_watch, self._abort)
        self.stream = CopyStream(device, "ranks")
        self._received: Counter[str] = Counter()

    def connect(self, most_ctas: int = 0) -> None:
        """Have NCCL connect this GPU with the others, before anything goes between them. Without GPUs nothing is to do.

        NCCL would do it when they first exchange something. So what it takes of VRAM is known before anything is placed
        (`hardware.library_bytes`).

        Args:
            most_ctas: thread blocks that NCCL may run at once, equal on all ranks; 0: as many as it likes. If it had
                others before, it connects anew: nothing may be under way. NCCL_MAX_CTAS in the environment overrides
                it.

        Raises:
            RankError: the numbers differ, a rank has ended, or NCCL cannot connect.
        """
        if self._device.type != "cuda":
            return
        with watchdog.uninterruptible("the GPU's work"):
            torch.cuda.synchronize(self._device)
        if len({*self.agree(np.array([most_ctas]))[:, 0].tolist()}) > 1:  # else none is still in what went before
            raise RankError(
                "the ranks have plans with different numbers of NCCL's thread blocks: make the plan on one rank and "
                "give it to all, or let the ranks plan together"
            )
        if most_ctas == self._most_ctas:
            return
        with self._explained("connecting the GPUs"):
            self._connect(most_ctas)

    def _connect(self, most_ctas: int) -> None:
        torch.cuda.empty_cache()  # NCCL allocates outside of torch's cache
        before = hardware.vram_outside_bytes(self._device)
        self._disconnect()
        self._took_vram(min(0, hardware.vram_outside_bytes(self._device) - before))
        counted = self._received.copy()
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        if most_ctas:
            options.config.max_ctas = most_ctas
        before = hardware.vram_outside_bytes(self._device)
        self._between_devices = dist.new_group(backend="nccl", timeout=self._timeout, pg_options=options)
        piece = CONNECTING_BYTES // self.size
        cuts = [at * piece for at in range(self.size + 1)]
        sent = torch.zeros(cuts[-1] + 1, dtype=torch.uint8, device=self._device)
        received = torch.empty_like(sent)
        self.exchange(received[: cuts[-1]], sent[: cuts[-1]], cuts)
        for last in (0, 1):  # ranges of one length, and of several
            self.gather(sent[: cuts[-1] + last], [*cuts[:-1], cuts[-1] + last])
        with watchdog.uninterruptible("the GPU's work"):
            torch.cuda.synchronize(self._device)
        del sent, received
        torch.cuda.empty_cache()
        took = hardware.vram_outside_bytes(self._device) - before
        self._took_vram(min(took, _MOST_LIBRARY_BYTES))
        self._received, self._most_ctas = counted, most_ctas

    def _took_vram(self, num_bytes: int) -> None:
        """Count what NCCL has taken; less than nothing where it gave some back."""
        change = max(num_bytes, -self._library_bytes)
        self._library_bytes += change
        hardware.library_bytes[self._device.index or 0] += change

    def _disconnect(self) -> None:
        """Close the connections between devices."""
        group, self._most_ctas = self._between_devices, None
        if group is not None and dist.is_initialized():
            with suppress(ValueError):  # the program has destroyed all groups, and made others
                dist.destroy_process_group(group)
        self._between_devices = None  # until here it is there to be aborted

    def take_received(self) -> dict[str, int]:
        """Bytes received from the other ranks since the last call: "exchange", "gather" and "agreement"."""
        taken, self._received = self._received, Counter()
        return dict(taken)

    # ---- between devices: everything is a matter of bytes (gloo knows no bf16), and runs on the current stream -------

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, cuts: Sequence[int]) -> None:
        """Send each rank its range of `sent`, and receive every rank's of this one's.

        Args:
            received: 1-D of size * (cuts[rank + 1] - cuts[rank]) elements: the ranges in rank order.
            sent: 1-D of cuts[-1] elements; rank r gets those from cuts[r] to cuts[r + 1].
            cuts: the same on all ranks; the first is 0.
        """
        size = sent.element_size()
        lengths = [(end - start) * size for start, end in pairwise(cuts)]
        own = [lengths[self.rank]] * self.size
        self._received["exchange"] += (self.size - 1) * lengths[self.rank]
        with self._explained("exchanging gradients"):
            dist.all_to_all_single(_bytes(received), _bytes(sent), own, lengths, group=self._between_devices)

    def gather(self, flat: torch.Tensor, cuts: Sequence[int]) -> None:
        """Have all ranks' ranges in `flat`, in place. `cuts` as for `exchange`."""
        self._received["gather"] += flat.nbytes - (cuts[self.rank + 1] - cuts[self.rank]) * flat.element_size()
        pieces = [_bytes(flat[start:end]) for start, end in pairwise(cuts)]
        sizes = {piece.numel() for piece in pieces}
        with self._explained("gathering new weights"):
            if self._device.type == "cpu" or 0 in sizes:
                for owner, piece in enumerate(pieces):
                    if piece.numel():
                        dist.broadcast(piece, owner, group=self._between_devices)
            elif len(sizes) > 1:  # NCCL takes them for broadcasts too, all at once
                dist.all_gather(pieces, pieces[self.rank], group=self._between_devices)
            else:
                gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since 2.13
                gather(_bytes(flat), pieces[self.rank], group=self._between_devices)

    @torch.no_grad()
    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give `tensor` rank 0's numbers, in place. It may be anywhere and of any dtype; shapes must be equal."""
        if tensor.numel() == 0:
            return
        flat = tensor.detach().reshape(-1)
        memory = _bytes(flat)
        with self._explained("taking rank 0's weights"):
            for start in range(0, memory.numel(), BROADCAST_BYTES):
                part = memory[start : start + BROADCAST_BYTES]
                piece = part.to(self._device)
                dist.broadcast(piece, 0, group=self._between_devices)
                if piece is not part:
                    part.copy_(piece)
        if flat.data_ptr() != tensor.data_ptr():  # it was not contiguous
            tensor.detach().copy_(flat.view(tensor.shape))

    # ---- between hosts ---------------------------------------------------------------------------------------------

    def agree(self, own: NDArray[np.int64]) -> NDArray[np.int64]:
        """What every rank says: int64 [size, *]. `own` is 1-D and has the same length on all ranks."""
        self._received["agreement"] += (self.size - 1) * own.nbytes
        found = [torch.empty(len(own), dtype=torch.int64) for _ in range(self.size)]
        with self._explained("comparing notes"):
            dist.all_gather(found, torch.from_numpy(own), group=self._of_main)
        return torch.stack(found).numpy()

    def told(self, make: Callable[[], _T], *, by: int = 0) -> _T:
        """What `make()` gives on rank `by`. It is called there alone, and what it gives is pickled for the others.

        Raises:
            RankError: it failed there. On that rank its own error is raised.
        """
        box: list[Any] = [None]
        with self.together(f"what rank {by} does for all ranks"):
            if self.rank == by:
                box = [make()]
        with self._explained(f"hearing from rank {by}"):
            dist.broadcast_object_list(box, by, group=self._of_main)
        value: _T = box[0]
        return value

    def sum(self, numbers: NDArray[np.float64]) -> None:
        """Add all ranks' fp64 `numbers`, in place. Exact in any order where at most one rank's number is not zero."""
        with self._explained("adding up the gradient norm"):
            dist.all_reduce(torch.from_numpy(numbers), group=self._of_stepping)

    def meet(self) -> None:
        """Block the stepping thread until those of all ranks have come here: then their sums in RAM are whole."""
        with self._explained("adding up gradients"):
            dist.all_reduce(torch.zeros(1), group=self._of_stepping)

    # ---- RAM that the ranks share, where all are on one host; the main thread asks for it ---------------------------

    def share(self, sizes: Sequence[int]) -> list[int]:
        """Descriptors of files in RAM, one of each of `sizes` bytes, the same for all ranks. The caller closes them.

        Raises:
            ConfigError: the ranks are on several hosts.
            RankError: this process may not open what is rank 0's, or another rank failed.
        """
        made = [file_in_ram(size) if self.rank == 0 else -1 for size in sizes]
        names = [os.fstat(file).st_ino if self.rank == 0 else 0 for file in made]
        told = self.agree(np.array([host(), os.getpid(), *made, *names]))
        if len({*told[:, 0].tolist()}) > 1:
            for file in filter(lambda file: file >= 0, made):
                os.close(file)
            raise ConfigError(
                "the ranks are on several hosts, and sharing RAM is built for one: choose a placement with "
                "weights='vram', and with gradients='vram' or exchange='micro_batch' where you accumulate"
            )
        process, (files, expected) = int(told[0, 1]), told[0, 2:].reshape(2, -1).tolist()
        with self.together("opening memory that the ranks share"):
            return made if self.rank == 0 else _opened(process, files, expected)

    def stepped(self, num_layers: int) -> list[Stepped]:
        """For each of so many layers, what tells which ranks have stepped it. It may be called once."""
        (file,) = self.share([8 * self.size * (num_layers + 1)])
        seconds = self._timeout.total_seconds()
        self._stepped = SteppedLayers(file, self.rank, self.size, num_layers, seconds, self.lost)
        return self._stepped.layers

    def lost(self) -> int | None:
        """A rank that is known to have died or failed; None while there is none."""
        return None if self._watch is None else self._watch.lost

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A context after which all ranks have done `what`.

        Raises:
            RankError: another rank has failed in it. Where this one fails, its own error is raised.
        """
        try:
            yield
        except BaseException:
            self.agree(np.array([0]))
            raise
        failed = [rank for rank, (done,) in enumerate(self.agree(np.array([1])).tolist()) if not done]
        if failed:
            raise RankError(f"{what} failed on rank {failed[0]}, whose error says why")

    @property
    def is_failing(self) -> bool:
        """Whether an error is on its way to the caller. One that was being handled when the ranks met is not."""
        error = sys.exception()
        return error is not None and _HANDLED not in vars(error)

    def fail(self) -> None:
        """Tell the others that this rank has failed."""
        if self._watch is not None:
            self._watch.fail()

    def close(self) -> None:
        """Give the groups back, which closes their connections: ranks that still wait for this one get an error.

        If it `is_failing`, this rank counts as failed.
        """
        if self._stepped is not None:
            self._stepped.end()
        if self._watch is None:
            return
        if self.is_failing:
            self.fail()
        self._watch.leave()
        self._disconnect()
        self._took_vram(-self._library_bytes)
        if dist.is_initialized():
            for group in (self._of_main, self._of_stepping):
                with suppress(ValueError):  # the program has destroyed all groups, and made others
                    dist.destroy_process_group(group)
        self._of_main = self._of_stepping = None

    def explain(self, error: RuntimeError) -> None:
        """Of an operation of torch.distributed that was not the engine's: a Trainer's, the user's.

        Raises:
            RankError: `error` is of such an operation, and another rank has failed.
        """
        is_of_ranks = isinstance(error, dist.DistError) or "gloo" in str(error)
        lost = self._watch.who_is_lost() if is_of_ranks and self._watch is not None else None
        if lost is not None:
            raise RankError(f"an operation with the other ranks failed: rank {lost} has {_ENDED}") from error

    def _abort(self) -> None:
        """End the device operations that wait for a rank which has ended. (gloo's end by themselves.)"""
        if self._device.type == "cuda":
            made = () if self._between_devices is None else (self._between_devices,)
            groups: list[Any] = [*made, dist.group.WORLD]  # a Trainer uses the default group too
            for group in groups:
                with suppress(RuntimeError, AttributeError):  # it is closed, or has none for GPUs
                    group._get_backend(self._device).abort()

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """
        Raises:
            RankError: torch.distributed failed, or another rank has.
        """
        if self._watch is not None and self._watch.lost is not None:
            raise RankError(f"{what} was not begun: rank {self._watch.lost} has {_ENDED}")
        try:
            yield
        except RankError:  # of an operation within
            raise
        except RuntimeError as error:
            lost = None if self._watch is None else self._watch.who_is_lost()
            if self._watch is not None:
                self._watch.fail()
            raise RankError(
                f"{what} with the other ranks failed: rank {lost} has {_ENDED}"
                if lost is not None
                else f"{what} with the other ranks failed: one has ended, has raised an error, or has not come here "
                f"within {self._timeout.total_seconds():g} seconds (ddp_timeout of finetune and TrainingArguments, "
                "timeout of init_process_group). Every rank must call the engine alike. Look at the other ranks' "
                "errors, and go on from a checkpoint"
            ) from error


_ENDED = "died or raised an error: look at that, and go on from a checkpoint"


def host() -> int:
    """A number that the processes of one running system have in common."""
    return zlib.crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes())


def _opened(process: int, files: Sequence[int], expected: Sequence[int]) -> list[int]:
    """Descriptors for `files` of another process, whose inodes are `expected`.

    Raises:
        RankError: they cannot be opened, or are others.
    """
    found: list[int] = []
    try:
        for file, name in zip(files, expected, strict=True):
            found.append(os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC))
            if os.fstat(found[-1]).st_ino != name:
                raise OSError(f"process {process} is another one here")
    except OSError as error:
        for each in found:
            os.close(each)
        raise RankError(
            f"the ranks of a host share weights and sums in RAM, and rank 0's memory cannot be opened: {error}. "
            "Start all ranks as one user and in one container, or choose a placement with weights='vram', and with "
            "gradients='vram' or exchange='micro_batch' where you accumulate"
        ) from error
    return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
