"""Settings of all tests against frameworks: no hub, one seed, and their warnings are no errors."""

import os
import random

import numpy as np
import pytest
import torch

# Read when huggingface_hub and tokenizers are imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # otherwise every fork warns


def pytest_configure(config):
    # The later line wins. pyproject.toml makes all warnings errors; here only klfast's stay errors.
    config.addinivalue_line("filterwarnings", "ignore")
    config.addinivalue_line("filterwarnings", "error:::klfast")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """The models are tiny, and pytest has a process for each core."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed_all():
    """Seed what trainers draw from. ``tests/conftest.py`` seeds torch."""
    random.seed(0)
    np.random.seed(0)
