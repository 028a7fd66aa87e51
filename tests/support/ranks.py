"""Real processes, each of them a rank."""

import datetime
import os
import sys

import torch

WORLD_SIZE = 2


class OnRanks:
    """A function of the rank and of arguments, as one of the rank that goes to another process."""

    def __init__(self, work, *arguments):
        self.work, self.arguments = work, arguments

    def __call__(self, rank):
        return self.work(rank, *self.arguments)


def run_rank(rank, work, folder, world_size, timeout, transport="gloo"):
    """A process of the group, which saves what ``work(rank)`` returns, and ends.

    It ends without Python's own end, which a thread of gloo that still has a tensor would abort.
    Groups that a DTensor or a model has had last to the end of the process.
    """
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        transport,
        store=torch.distributed.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    torch.save(work(rank), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def results_of_ranks(work, folder, world_size=WORLD_SIZE, timeout=30, transport="gloo"):
    """The results of ``work(rank)``, a function of a module, on each rank."""
    torch.multiprocessing.spawn(
        run_rank, (work, str(folder), world_size, timeout, transport), nprocs=world_size
    )
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]
