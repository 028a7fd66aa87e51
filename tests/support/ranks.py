"""Real processes over gloo, each of them a rank."""

import datetime

import torch

WORLD_SIZE = 2


def _run(rank, work, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(f"{folder}/store", WORLD_SIZE),
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=datetime.timedelta(seconds=30),
    )
    torch.save(work(rank), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def results_of_ranks(work, folder):
    """The results of ``work(rank)``, a function of a module, on each rank."""
    torch.multiprocessing.spawn(_run, (work, str(folder)), nprocs=WORLD_SIZE)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD_SIZE)]
