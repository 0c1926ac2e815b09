"""Communication between the processes that train one model: `Solo` for world size 1, `Group` for larger ones.

Values that must be equal on all ranks are summed in rank order by the rank that owns them, because a library may choose
any order of summation.

| operations | calling thread | process group |
|---|---|---|
| `exchange`, `gather`, `broadcast` | main thread, or autograd's while that waits in backward | the device's |
| `exchange_parts` | the GPU's stepping thread, during a loan | the device's |
| `agree`, `broadcast_from` | main thread | gloo |
| `sum`, `meet` | stepping thread | gloo |
| detecting ranks that ended | a thread of `Watch` | gloo |

Every rank must call the operations of a group in the same order. No two threads use a group at the same time: the
main thread's operations wait while the device's group is lent to an update. Received bytes are counted on the host when
the operation is issued.
"""

from __future__ import annotations

import os
import sys
import threading
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

from offloadkit.device import watchdog
from offloadkit.device.host_memory import file_in_ram
from offloadkit.device.streams import CopyStream
from offloadkit.distributed.stepped import Stepped, SteppedLayers
from offloadkit.distributed.watch import Watch
from offloadkit.errors import ConfigError, RankError
from offloadkit.facts import hardware
from offloadkit.facts.fitted import NCCL_BYTES, NCCL_BYTES_EACH
from offloadkit.facts.threads import Thread
from offloadkit.facts.units import rounded
from offloadkit.planner.ranks import GPUS_PER_HOST

_T = TypeVar("_T")

CONNECTING_BYTES = 32 << 20
"""Size of the warm-up all-gather: about a large layer, because NCCL chooses its algorithm by size."""
BROADCAST_BYTES = 64 * 2**20
"""Chunk size of broadcasts of tensors that are not on the device."""


class Ranks(Protocol):
    """Collective operations of the ranks that train together.

    Attributes:
        is_failing: whether an error is propagating to the caller, so that the other ranks must be told.
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

    def broadcast_from(self, make: Callable[[], _T], *, by: int = 0) -> _T: ...

    def sum(self, numbers: NDArray[np.float64]) -> None: ...

    def together(self, what: str) -> AbstractContextManager[None]: ...

    def explain(self, error: RuntimeError) -> None: ...

    def fail(self) -> None: ...

    def close(self) -> None: ...


class Solo:
    """World size 1: every operation returns at once."""

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

    def broadcast_from(self, make: Callable[[], _T], *, by: int = 0) -> _T:
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
    """A `Group` over torch.distributed's default group, or `SOLO` without a group or at world size 1.

    Every rank must call this at the same point, because it creates process groups.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return SOLO
    return Group(device)


_HANDLED = "_offloadkit_handled"
"""Set on an error that was already being handled when the group was created."""


class Loan:
    """The device's group in the hands of an update, which sets `returned`. If `failed`, ranks may have stopped at
    different operations.
    """

    def __init__(self) -> None:
        self.returned, self.failed = threading.Event(), False


class Group:
    """World size 2 or more: the ranks of torch.distributed's default group.

    An operation raises `RankError` when another rank does not join it within the timeout of `init_process_group`, or at
    once when another rank has died or failed. Ranks that hang then print the stacks of their threads. `stream`: the
    stream of the operations between devices.
    """

    _watch: Watch | None = None
    _loan: Loan | None = None
    """The newest loan of the device's group."""
    _stepped: SteppedLayers | None = None
    _library_bytes = 0
    _most_ctas: int | None = None

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size, self._device = dist.get_rank(), dist.get_world_size(), device
        if (error := sys.exception()) is not None:
            vars(error)[_HANDLED] = True  # a reference to the error would keep its frames alive
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
        """Create the NCCL group of the GPUs; a no-op without GPUs.

        Connecting now, not at the first operation, makes NCCL's VRAM known (`hardware.library_bytes`) before anything
        is placed.

        Args:
            most_ctas: NCCL's maximum number of thread blocks, equal on all ranks; 0 is NCCL's default. A changed value
                reconnects, so no operation may be in flight. NCCL_MAX_CTAS in the environment overrides it.

        Raises:
            RankError: `most_ctas` differs between ranks, a rank has ended, or NCCL cannot connect.
        """
        if self._device.type != "cuda":
            return
        with watchdog.uninterruptible("the GPU's work"):
            torch.cuda.synchronize(self._device)
        if len({*self.agree(np.array([most_ctas]))[:, 0].tolist()}) > 1:  # a barrier too: the old group is idle
            raise RankError(
                "the ranks' plans have different numbers of NCCL thread blocks: make the plan on one rank and give it "
                "to all, or let the ranks plan together"
            )
        if most_ctas == self._most_ctas:
            return
        with self._explained("connecting the GPUs"):
            self._connect(most_ctas)

    def _connect(self, most_ctas: int) -> None:
        torch.cuda.empty_cache()  # NCCL allocates outside of torch's cache
        before = hardware.own_vram_outside_bytes(self._device)
        self._disconnect()
        self._took_vram(min(0, hardware.own_vram_outside_bytes(self._device) - before))
        counted = self._received.copy()
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        if most_ctas:
            options.config.max_ctas = most_ctas
        before = hardware.own_vram_outside_bytes(self._device)
        self._between_devices = dist.new_group(backend="nccl", timeout=self._timeout, pg_options=options)
        piece = CONNECTING_BYTES // self.size
        cuts = [at * piece for at in range(self.size + 1)]
        sent = torch.zeros(cuts[-1] + 1, dtype=torch.uint8, device=self._device)
        received = torch.empty_like(sent)
        self.exchange(received[: cuts[-1]], sent[: cuts[-1]], cuts)
        for last in (0, 1):  # ranges of equal lengths, then of unequal lengths
            self.gather(sent[: cuts[-1] + last], [*cuts[:-1], cuts[-1] + last])
        with watchdog.uninterruptible("the GPU's work"):
            torch.cuda.synchronize(self._device)
        del sent, received
        torch.cuda.empty_cache()
        took = hardware.own_vram_outside_bytes(self._device) - before
        self._took_vram(min(took, _most_library_bytes(self.size)))
        self._received, self._most_ctas = counted, most_ctas

    def _took_vram(self, num_bytes: int) -> None:
        change = max(num_bytes, -self._library_bytes)
        self._library_bytes += change
        hardware.library_bytes[self._device.index or 0] += change

    def _disconnect(self) -> None:
        group, self._most_ctas = self._between_devices, None
        if group is not None and dist.is_initialized():
            with suppress(ValueError):  # the program has destroyed all groups
                dist.destroy_process_group(group)
        self._between_devices = None  # set last, so that `_abort` can still abort the group

    def take_received(self) -> dict[str, int]:
        """Bytes received since the last call, by kind of operation."""
        taken, self._received = self._received, Counter()
        return dict(taken)

    # ---- between devices: operations on raw bytes (gloo has no bf16), on the current stream -------------------------

    def lend(self) -> Loan:
        """Lend the device's group to an update. Waits until the last update has returned the group.

        After an update that failed, `exchange`, `gather` and `broadcast` do nothing: the engine raises the update's
        error before it uses their results.
        """
        self._has_group()
        self._loan = Loan()
        return self._loan

    def _has_group(self) -> bool:
        """Wait until the last update has returned the device's group; False if that update failed."""
        if self._loan is None:
            return True
        watchdog.wait(self._loan.returned, "the update's operations with the other ranks")
        return not self._loan.failed

    def exchange_parts(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_lengths: Sequence[int],
        sent_lengths: Sequence[int],
    ) -> None:
        """All-to-all of parts of any length: send rank r the next `sent_lengths[r]` elements of `sent`, and receive
        `received_lengths[r]` elements from rank r. `sent` and `received` are 1-D.
        """
        size = sent.element_size()
        out, into = ([size * length for length in each] for each in (sent_lengths, received_lengths))
        with self._explained("exchanging updates of matrices"):
            dist.all_to_all_single(_bytes(received), _bytes(sent), into, out, group=self._between_devices)

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, cuts: Sequence[int]) -> None:
        """All-to-all: send rank r its range of `sent`, and receive this rank's range from every rank.

        Args:
            received: 1-D, size * (cuts[rank + 1] - cuts[rank]) elements: the received ranges in rank order.
            sent: 1-D, cuts[-1] elements; rank r receives elements cuts[r] to cuts[r + 1].
            cuts: boundaries of the ranges, starting with 0, equal on all ranks.
        """
        size = sent.element_size()
        lengths = [(end - start) * size for start, end in pairwise(cuts)]
        own = [lengths[self.rank]] * self.size
        if not self._has_group():
            return
        self._received["exchange"] += (self.size - 1) * lengths[self.rank]
        with self._explained("exchanging gradients"):
            dist.all_to_all_single(_bytes(received), _bytes(sent), own, lengths, group=self._between_devices)

    def gather(self, flat: torch.Tensor, cuts: Sequence[int]) -> None:
        """All-gather the ranks' ranges of `flat`, in place. `cuts` as for `exchange`."""
        if not self._has_group():
            return
        self._received["gather"] += flat.nbytes - (cuts[self.rank + 1] - cuts[self.rank]) * flat.element_size()
        pieces = [_bytes(flat[start:end]) for start, end in pairwise(cuts)]
        sizes = {piece.numel() for piece in pieces}
        with self._explained("gathering new weights"):
            if self._device.type == "cpu" or 0 in sizes:
                for owner, piece in enumerate(pieces):
                    if piece.numel():
                        dist.broadcast(piece, owner, group=self._between_devices)
            elif len(sizes) > 1:  # NCCL issues these as one group of broadcasts
                dist.all_gather(pieces, pieces[self.rank], group=self._between_devices)
            else:
                gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # named so since 2.13
                gather(_bytes(flat), pieces[self.rank], group=self._between_devices)

    @torch.no_grad()
    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast from rank 0, in place. Any device and dtype; shapes must be equal on all ranks."""
        if tensor.numel() == 0 or not self._has_group():
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
        if flat.data_ptr() != tensor.data_ptr():  # `flat` is a copy, because the tensor is not contiguous
            tensor.detach().copy_(flat.view(tensor.shape))

    # ---- between hosts ---------------------------------------------------------------------------------------------

    def agree(self, own: NDArray[np.int64]) -> NDArray[np.int64]:
        """All-gather 1-D int64 arrays of equal length; returns int64 [size, len(own)]."""
        self._received["agreement"] += (self.size - 1) * own.nbytes
        found = [torch.empty(len(own), dtype=torch.int64) for _ in range(self.size)]
        with self._explained("comparing notes"):
            dist.all_gather(found, torch.from_numpy(own), group=self._of_main)
        return torch.stack(found).numpy()

    def broadcast_from(self, make: Callable[[], _T], *, by: int = 0) -> _T:
        """Call `make` on rank `by` alone and broadcast the pickled result.

        Raises:
            RankError: `make` failed on rank `by`, which raises the original error itself.
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
        """All-reduce fp64 `numbers` in place. The order is irrelevant if at most one rank's number is not zero."""
        with self._explained("summing the gradient norm"):
            dist.all_reduce(torch.from_numpy(numbers), group=self._of_stepping)

    def meet(self) -> None:
        """Barrier of the stepping threads: afterwards the gradient sums in RAM are complete."""
        with self._explained("adding up gradients"):
            dist.all_reduce(torch.zeros(1), group=self._of_stepping)

    # ---- shared RAM of ranks on one host, for the main thread --------------------------------------------------------

    def share(self, sizes: Sequence[int]) -> list[int]:
        """Descriptors of in-memory files of `sizes` bytes, shared by all ranks. The caller closes them.

        Raises `ConfigError` if the ranks are on several hosts, and `RankError` if a rank cannot open rank 0's files.
        """
        made = [file_in_ram(size) if self.rank == 0 else -1 for size in sizes]
        names = [os.fstat(file).st_ino if self.rank == 0 else 0 for file in made]
        told = self.agree(np.array([host(), os.getpid(), *made, *names]))
        if len({*told[:, 0].tolist()}) > 1:
            for file in filter(lambda file: file >= 0, made):
                os.close(file)
            raise ConfigError(
                "the ranks are on several hosts, but RAM can be shared only within one: choose a placement with "
                "weights='vram', and with accumulation also gradients='vram' or exchange='micro_batch'"
            )
        process, (files, expected) = int(told[0, 1]), told[0, 2:].reshape(2, -1).tolist()
        with self.together("opening memory that the ranks share"):
            return made if self.rank == 0 else _opened(process, files, expected)

    def stepped(self, num_layers: int) -> list[Stepped]:
        (file,) = self.share([8 * self.size * (num_layers + 1)])
        seconds = self._timeout.total_seconds()
        self._stepped = SteppedLayers(file, self.rank, self.size, num_layers, seconds, self.lost)
        return self._stepped.layers

    def lost(self) -> int | None:
        return None if self._watch is None else self._watch.lost

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run the body on all ranks; when it exits, every rank has succeeded.

        A rank whose body fails raises the original error, the other ranks a `RankError`.
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
        """Whether an error is propagating, other than one already being handled when the group was created."""
        error = sys.exception()
        return error is not None and _HANDLED not in vars(error)

    def fail(self) -> None:
        if self._watch is not None:
            self._watch.fail()

    def close(self) -> None:
        """Destroy the groups. Ranks that still wait for this rank get an error. This rank counts as failed if it
        `is_failing`.
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
                with suppress(ValueError):  # the program has destroyed all groups
                    dist.destroy_process_group(group)
        self._of_main = self._of_stepping = None

    def explain(self, error: RuntimeError) -> None:
        """Explain an error of torch.distributed raised outside the engine, for example by a Trainer.

        Raises:
            RankError: `error` comes from torch.distributed, and another rank has failed.
        """
        is_of_ranks = isinstance(error, dist.DistError) or "gloo" in str(error)
        lost = self._watch.who_is_lost() if is_of_ranks and self._watch is not None else None
        if lost is not None:
            raise RankError(f"an operation with the other ranks failed: rank {lost} has {_ENDED}") from error

    def _abort(self) -> None:
        """Abort device operations that wait for a dead rank. gloo's operations fail by themselves.

        Every group is aborted by a thread of its own: NCCL frees a group's memory when the GPU is idle, and the GPU is
        not idle before the group of the waiting operation is aborted.
        """
        if self._device.type == "cuda":
            made = () if self._between_devices is None else (self._between_devices,)
            for group in (*made, dist.group.WORLD):  # a Trainer uses the default group too
                Thread(target=self._abort_group, args=(group,), name="offloadkit-abort", daemon=True).start()

    def _abort_group(self, group: Any) -> None:
        with suppress(RuntimeError, AttributeError):  # the group is closed or has no GPU backend
            group._get_backend(self._device).abort()

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        if self._watch is not None and self._watch.lost is not None:
            raise RankError(f"{what} was not begun: rank {self._watch.lost} has {_ENDED}")
        try:
            yield
        except RankError:  # from a nested operation
            raise
        except RuntimeError as error:
            lost = None if self._watch is None else self._watch.who_is_lost()
            if self._watch is not None:
                self._watch.fail()
            raise RankError(
                f"{what} with the other ranks failed: rank {lost} has {_ENDED}"
                if lost is not None
                else (
                    f"{what} with the other ranks failed: a rank has ended, has raised an error, or did not arrive "
                    f"here within {rounded(self._timeout.total_seconds())} seconds (ddp_timeout of finetune and "
                    "TrainingArguments, timeout of init_process_group). Every rank must call the engine alike. Look at "
                    "the other ranks' errors, and resume from a checkpoint"
                )
            ) from error


_ENDED = "died or raised an error: look at that, and resume from a checkpoint"


def _most_library_bytes(num_ranks: int) -> int:
    """Upper bound of NCCL's VRAM: twice the planned bytes. Growth beyond it comes from another process, where NVML does
    not tell them apart.
    """
    return 2 * (NCCL_BYTES + (min(num_ranks, GPUS_PER_HOST) - 2) * NCCL_BYTES_EACH)


def host() -> int:
    """A number shared by the processes of one running system."""
    return zlib.crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes())


def _opened(process: int, files: Sequence[int], expected: Sequence[int]) -> list[int]:
    """Open `files` of another process and check their inodes against `expected`; raises `RankError`."""
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
            f"the ranks of a host share weights and sums in RAM, but rank 0's memory cannot be opened: {error}. Start "
            "all ranks as one user and in one container, or choose a placement with weights='vram', and with "
            "accumulation also gradients='vram' or exchange='micro_batch'"
        ) from error
    return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
