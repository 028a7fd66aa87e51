"""The processes that run the experiment together: one, or as many as ``torchrun`` starts.

Prompts are dealt out to the ranks. Every rank draws the random numbers of the whole batch and uses
its own, weighs its gradient by the count of all, and gathers the others' results for the records:
the curves are those of one process but for rounding.
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from klfast.rollout.stats import RolloutStats
from klfast.stats import KLStats
from lab.settings import CompareError, LeadersError, Settings

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PARALLEL = ("ddp", "fsdp2")
"""How several processes train one policy."""

TIMEOUT = 600.0
"""Seconds that ranks wait for one that does not answer."""

_LONGEST = 1e9


@dataclass(frozen=True)
class Share:
    """The rows of a batch that are this rank's, and how many there are on all ranks."""

    rows: slice
    total: int


class Team:
    """All ranks; this process alone where there is no ``parallel``."""

    def __init__(self, parallel: str | None = None) -> None:
        self.parallel = parallel
        self.group: ProcessGroup | None = None
        self.rank, self.size = 0, 1
        if parallel is not None:
            self.group = distributed.group.WORLD
            self.rank, self.size = distributed.get_rank(), distributed.get_world_size()

    @property
    def leads(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0

    def check(self, settings: Settings) -> None:
        """Raise unless every rank has a prompt.

        Raises:
            CompareError: there are more ranks than prompts.
        """
        if self.size > settings.prompts:
            raise CompareError(
                f"a run with {settings.prompts} prompts needs at most as many processes, got "
                f"{self.size}"
            )

    def share(self, count: int, each: int = 1) -> Share:
        """This rank's part of ``count`` things with ``each`` rows apiece; parts differ by one."""
        begin, end = (count * (self.rank + i) // self.size for i in (0, 1))
        return Share(slice(begin * each, end * each), count * each)

    def gather(self, own: Tensor, share: Share) -> Tensor:
        """The rows of all ranks; exactly, for numbers that fit into fp64."""
        if self.group is None:
            return own
        table = torch.zeros(share.total, *own.shape[1:], dtype=torch.float64)
        table[share.rows] = own.detach().double()
        distributed.all_reduce(table)
        return table.to(own.dtype)

    def gather_stats(self, stats: KLStats, share: Share) -> KLStats:
        """The statistics of all ranks' sequences."""
        return KLStats(*(self.gather(field, share) for field in stats))

    def gather_rollout(self, stats: RolloutStats, share: Share) -> RolloutStats:
        """The same of sampler and policy."""
        return RolloutStats.of_table(self.gather(stats.table().mT, share).mT)

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on any rank."""
        if self.group is None:
            return flag
        flags = torch.tensor([float(flag)])
        distributed.all_reduce(flags)
        return bool(flags.item() > 0)

    def agree(self, work: Callable[[], None]) -> None:
        """``work`` on the leading rank, while the others wait; its error on all of them.

        Raises:
            CompareError: that of ``work``.
        """
        error: CompareError | OSError | None = None
        if self.leads:
            try:
                work()
            except (CompareError, OSError) as caught:
                error = caught
        if self.group is not None:
            said = [None if error is None else str(error)]
            distributed.broadcast_object_list(said, src=0)
            if said[0] is not None and error is None:
                error = LeadersError(said[0])
        if error is not None:
            raise error

    def equalise(self, model: nn.Module) -> None:
        """Gives every rank the weights of the first: processors differ in their last digits."""
        if self.group is not None:
            for tensor in model.state_dict().values():
                distributed.broadcast(tensor, src=0)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module that gradients are taken through: the model, its DDP, or sharded in place."""
        if self.parallel == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        if self.parallel == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (self.size,))
            for block in model.get_submodule("blocks").children():
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        return model


ALONE = Team()


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """The weights, whole on every rank, whatever trains them; with several ranks all must call."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """State of both, whole, whatever trains them; with several ranks all must call."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_state_dict(model, optimizer, options=options)


def load_whole_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, weights: Any, moments: Any
) -> None:
    """Loads the result of :func:`whole_state`, on any number of ranks."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    set_state_dict(
        model,
        optimizer,
        model_state_dict=weights,
        optim_state_dict=moments,
        options=StateDictOptions(full_state_dict=True),
    )


@contextmanager
def assembled(parallel: str | None, timeout: float = TIMEOUT) -> Iterator[Team]:
    """The team that ``torchrun`` started, by default under DDP; this process alone without it.

    A rank that waits for another longer than ``timeout`` seconds, or for one that has died, gets
    the RuntimeError of ``torch.distributed``.

    Raises:
        CompareError: ``parallel`` is given, and there is no ``torchrun``; ``timeout`` is not a
            number of seconds > 0 and <= 1e9.
    """
    if not 0 < timeout <= _LONGEST:
        raise CompareError(
            f"timeout must be a number of seconds > 0 and <= {_LONGEST:g}, got {timeout!r}"
        )
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        if parallel is not None:
            raise CompareError(
                f"--parallel {parallel} needs several processes: torchrun --nproc-per-node 2 "
                "-m lab compare"
            )
        yield ALONE
        return
    # Torch imports it for DDP; its defaults would keep a group that is there by then.
    importlib.import_module("torch.distributed.nn")
    distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    try:
        yield Team(parallel or "ddp")
    finally:
        # The group's threads end with the last model that has it (FSDP2's last, in torch's caches).
        # A thread that gives a tensor back while Python ends aborts the process.
        gc.collect()
        distributed.destroy_process_group()
