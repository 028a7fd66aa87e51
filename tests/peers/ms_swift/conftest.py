"""ms-swift's imports work in these tests, with stand-ins for Megatron, which needs a GPU."""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "verl"))

import stand_ins

stand_ins.install("megatron", "mcore_bridge")

importlib.import_module("megatron.core").__version__ = "0.16.0"
