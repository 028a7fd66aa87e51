"""For every test against other frameworks: no hub, one seed, and their warnings are theirs."""

import os
import random

import numpy as np
import pytest
import torch

# Read when huggingface_hub and tokenizers are imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else a warning at every fork


def pytest_configure(config):
    # The later line wins: of all warnings, which pyproject.toml makes errors, ours stay errors.
    config.addinivalue_line("filterwarnings", "ignore")
    config.addinivalue_line("filterwarnings", "error:::klfast")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """The models are tiny, and pytest has a process for each core."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed_all():
    """What trainers draw from beside torch, which ``tests/conftest.py`` seeds."""
    random.seed(0)
    np.random.seed(0)
