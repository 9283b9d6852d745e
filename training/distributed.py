"""Processes and devices: the only module that reads torchrun's variables and writes cuBLAS's.

With one process there is no process group and every collective is the identity.
"""

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from attention.user_error import discard
from errors import UserError, invalid, warn
from training.signals import STARTED_BY

DeviceChoice = Literal["auto", "cpu", "cuda"]
T = TypeVar("T")

# The one workspace setting that torch's deterministic mode accepts besides the smaller :16:8.
_CUBLAS_VARIABLE, _CUBLAS_DETERMINISTIC = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


@dataclass(frozen=True, kw_only=True)
class DistContext:
    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def print0(self, text: str) -> None:
        """Print on rank 0, above a progress bar if there is one. Where the output is closed (``| head``) or a file on a full disk, the run
        goes on without it, after a warning on stderr."""
        if not self.is_main:
            return
        try:
            tqdm.write(text)
            sys.stdout.flush()  # not at the end of the run, which would then count as failed
        except OSError as error:
            discard(sys.stdout)
            warn(f"standard output takes no more lines ({error.strerror}); the run goes on")


def start(device: DeviceChoice, timeout: float = 600.0) -> DistContext:
    """Find this process's rank and device, and join the others (gloo on CPU, NCCL on CUDA) when there are any.

    ``auto`` is CUDA where torch sees one. Started without torchrun, this is rank 0 of 1. Raises ``UserError`` where CUDA is asked for and
    absent, and for more processes on this host than it has GPUs; ``TimeoutError`` where the others do not come within ``timeout`` seconds.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, local_rank, world_size = (
        int(os.environ.get(*v)) for v in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))
    )
    _die_with_launcher()
    owned = torch.device("cpu")
    if device == "cuda":
        if not torch.cuda.is_available():
            raise invalid("run.device", device, f"cpu or auto: torch {torch.__version__} finds no CUDA device here")
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"torchrun --nproc_per_node: local rank {local_rank} has no GPU of its own; "
                f"start at most {torch.cuda.device_count()} processes on this host"
            )
        owned = torch.device("cuda", local_rank)
        torch.cuda.set_device(owned)
        # The host only moves batches. torch wakes all its threads for a copy of more than 32,768 elements, the one into pinned memory
        # too, and where they are more than the cores that costs milliseconds.
        torch.set_num_threads(1)
    if world_size > 1:
        limit = timedelta(seconds=timeout)
        # torchrun --max-restarts keeps its store: there the processes would find the addresses of those that have died.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(attempt, next(dist.rendezvous("env://", timeout=limit))[0])
        _wait_for_all(store, world_size, timeout)
        backend, device_id = ("nccl", owned) if device == "cuda" else ("gloo", None)
        place: dict[str, Any] = {"rank": rank, "world_size": world_size, "device_id": device_id}
        dist.init_process_group(backend, store=store, timeout=limit, **place)
    return DistContext(rank=rank, world_size=world_size, device=owned)


def _wait_for_all(store: dist.Store, world_size: int, timeout: float) -> None:
    """Wait until all processes have come to ``store``. The wait is Python's: what joins the group would hear no signal."""
    give_up = time.monotonic() + timeout
    here = store.add("here", 1)
    while here < world_size:
        if time.monotonic() > give_up:
            raise TimeoutError(
                f"{here} of {world_size} processes have started within run.timeout = {timeout:g} seconds"
            )
        time.sleep(0.05)
        here = store.add("here", 0)


def _die_with_launcher() -> None:
    """Let the kernel ask this process to save and exit when torchrun dies, were it of SIGKILL. Linux only."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ask_at_parents_death = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(ask_at_parents_death, signal.SIGTERM)
        if os.getppid() != STARTED_BY:  # it has died before
            os.kill(os.getpid(), signal.SIGTERM)


def stop_launcher() -> None:
    """Where torchrun would start this process again (``--max-restarts``), ask it to end: for an error that would only come again."""
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and os.getppid() == STARTED_BY:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it on; this process is about to exit
        os.kill(STARTED_BY, signal.SIGTERM)


def is_rank_0() -> bool:
    """Whether torchrun, if there is one, has started this process as the main one."""
    return os.environ.get("RANK", "0") == "0"


def stop() -> None:
    if dist.is_initialized():
        gc.collect()  # buffers that other processes reach go before the group
        dist.destroy_process_group()


def exit_where_device_is_lost() -> None:
    """Where a CUDA error has ended this process's use of its GPU, print the error being handled and exit with code 1.

    Closing NCCL's communicators waits without end then, and torchrun, which stops the other processes once this one is gone, with it.
    """
    if not (dist.is_initialized() and torch.cuda.is_initialized()):
        return
    try:
        torch.cuda.current_stream().query()  # waits for nothing
    except RuntimeError:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def all_reduce_max(tensor: Tensor) -> Tensor:
    """A copy, the elementwise maximum over processes, on the tensor's own device whatever the backend needs."""
    if not dist.is_initialized():
        return tensor.detach().clone()
    result = tensor.detach().to("cuda" if dist.get_backend() == "nccl" else "cpu", copy=True)
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return result.to(tensor.device)


def add_up(tensors: list[Tensor]) -> None:
    """Replace ``tensors``, of one dtype and device, by their sums over processes: one all-reduce, through a copy of them all."""
    if dist.is_initialized():
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        pieces = flat.split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_(tensors, [piece.view_as(x) for piece, x in zip(pieces, tensors, strict=True)])


def any_rank(flag: bool) -> bool:
    """Whether ``flag`` is true on any process: the same answer on all of them."""
    return bool(all_reduce_max(torch.tensor(int(flag))).item())


@contextmanager
def all_or_none(otherwise: str) -> Iterator[None]:
    """Where a ``UserError`` ends the block on one process, all raise it, the others as ``otherwise``: one that waits for a dead process
    would hang. Every process must come here."""
    failure = None
    try:
        yield
    except UserError as error:
        failure = error
    if any_rank(failure is not None):
        raise failure or UserError(otherwise)


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(value: T) -> list[T]:
    """Each process's value, such as a tensor on the CPU of any shape, in order of rank, on every process."""
    if not dist.is_initialized():
        return [value]
    received: list[Any] = [None] * world_size()
    dist.all_gather_object(received, value)
    return received


class PairSum:
    """Add up tensors over processes: ranks 0 and 1, ranks 2 and 3 ..., then pairs of pairs. A power of two of processes.

    Each process adds a share of all elements, so that as much is sent as by a ring all-reduce. The GPUs of one host read and write each
    other's memory, if all of them can; else collectives send the shares. The bits are the same.
    ``timeout``: seconds to wait for the other processes.
    """

    def __init__(self, timeout: float = 600.0):
        self._milliseconds = int(1000 * timeout)
        self._flat: Tensor | None = None
        self._peers: Any = None
        """Of ``_flat``, where the processes reach each other's."""

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        """The sums, views of a buffer that the next call overwrites; with one process the tensors themselves.

        ``tensors`` are of one dtype and device, and of the same shapes in each call.
        """
        if world_size() == 1:
            return tensors
        # Aligned as torch's own allocations are: kernels choose by alignment, which is to be that of one process.
        aligned = 512 // tensors[0].element_size()
        lengths = [-(-tensor.numel() // aligned) * aligned for tensor in tensors]
        share = -(-sum(lengths) // (aligned * world_size())) * aligned
        if self._flat is None:
            self._flat, self._peers = _shared_zeros(tensors[0], share * world_size())
        flat = self._flat
        pieces = flat.split([*lengths, len(flat) - sum(lengths)])[:-1]
        views = [piece[: tensor.numel()].view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]
        torch._foreach_copy_(views, tensors)
        if self._peers is None:
            self._by_collectives(flat, share)
        else:
            self._in_place(share, flat.dtype)
        return views

    def _by_collectives(self, flat: Tensor, share: int) -> None:
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat)
        # torch 2.13 renamed it and warns at the old name; 2.11 knows the old one only.
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        gather(flat, _add_in_pairs(list(received.view(world_size(), share))))

    def _in_place(self, share: int, dtype: torch.dtype) -> None:
        """Read this rank's share of all buffers and write the sum into all of them. Ranks begin at different ones: links stay even."""
        peers, rank = self._peers, dist.get_rank()
        shares = [peers.get_buffer(of, (share,), dtype, rank * share) for of in range(world_size())]
        peers.barrier(channel=0, timeout_ms=self._milliseconds)
        total = _add_in_pairs(shares, first=rank)
        for turn in range(world_size()):
            shares[(rank + turn) % world_size()].copy_(total)
        peers.barrier(channel=1, timeout_ms=self._milliseconds)


def _add_in_pairs(terms: list[Tensor], first: int = 0) -> Tensor:
    """The sum of 2^k tensors as a tree; at each level the pair number ``first`` is added before the others."""
    while len(terms) > 1:
        pairs, sums = len(terms) // 2, [*terms[::2]]
        for index in ((first + turn) % pairs for turn in range(pairs)):
            sums[index] = terms[2 * index] + terms[2 * index + 1]
        terms = sums
    return terms[0]


def _shared_zeros(like: Tensor, length: int) -> tuple[Tensor, Any]:
    """Zeros, and the handle by which processes reach each other's; None where they cannot."""
    apart = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) < world_size()  # torchrun sets it
    if like.device.type != "cuda" or any_rank(apart or not _reaches_all(like.device)):
        return like.new_zeros(length), None
    from torch.distributed import _symmetric_memory as symmetric_memory  # of CUDA builds; others may lack it

    group = dist.group.WORLD
    assert group is not None
    flat = symmetric_memory.empty(length, dtype=like.dtype, device=like.device)
    peers = symmetric_memory.rendezvous(flat, group)
    return flat.zero_(), peers


def _reaches_all(device: torch.device) -> bool:
    """Whether this process's GPU can address the memory of those of all ranks of this host, rank r's being GPU r."""
    others = [rank for rank in range(world_size()) if rank != device.index]
    return torch.cuda.device_count() >= world_size() and all(
        torch.cuda.can_device_access_peer(device, rank) for rank in others
    )


def set_deterministic(on: bool) -> None:
    """Choose torch's deterministic kernels, an error where an operation has none. Call it before CUDA is used."""
    if on and os.environ.get(_CUBLAS_VARIABLE) != _CUBLAS_DETERMINISTIC:
        if torch.cuda.is_initialized():
            raise RuntimeError("set_deterministic(True) must be called before anything uses CUDA")
        os.environ[_CUBLAS_VARIABLE] = _CUBLAS_DETERMINISTIC
    torch.use_deterministic_algorithms(on)
    # Filling new tensors with NaN costs time and has no use in a run.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = on
    torch.backends.cudnn.benchmark = False


def set_tf32(on: bool) -> None:
    """Let CUDA's FP32 matrix products and convolutions round their inputs to TF32 (10 mantissa bits), or forbid it."""
    torch.backends.cuda.matmul.allow_tf32 = on
    torch.backends.cudnn.allow_tf32 = on
