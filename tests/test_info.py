"""What klfast says about itself."""

from __future__ import annotations

import contextlib
import json

import torch

import klfast
from klfast import backends
from klfast.__main__ import main


def test_info_is_json_and_names_a_backend_for_the_cpu():
    facts = json.loads(json.dumps(klfast.info()))
    assert facts["versions"]["torch"] == torch.__version__
    cpu = facts["backends"]["cpu"]
    assert list(cpu["why_not"]) == list(backends.BACKENDS)
    assert cpu["why_not"][cpu["auto"]] is None
    assert backends.resolve("auto", torch.device("cpu")) is backends.BACKENDS[cpu["auto"]]


def test_info_describes_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, index))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    facts = klfast.info()
    assert facts["devices"]["cuda:1"] == {"name": "GPU 1", "capability": "9.1"}
    assert list(facts["backends"]) == ["cpu", "cuda:0", "cuda:1"]
    for choice in facts["backends"].values():
        assert list(choice["why_not"]) == list(backends.BACKENDS)
        assert choice["why_not"][choice["auto"]] is None


def test_build_info_is_kept_beside_the_extension():
    facts = klfast.info()
    assert facts["extension"] is None, "the tests need the extension"
    assert facts["build"]["instruction_sets"][0] == "baseline"
    assert facts["cpu"] in facts["build"]["instruction_sets"]


def test_a_load_failure_is_told_in_one_sentence(monkeypatch):
    monkeypatch.setattr("klfast.ops.load.load_error", lambda: "the extension was not built")
    facts = klfast.info()
    assert facts["extension"] == "the extension was not built"
    assert facts["cpu"] is None
    assert facts["backends"]["cpu"]["auto"] == "reference"


def test_the_command_prints_text_and_json(capsys):
    assert main(["info"]) == 0
    assert "auto: native" in capsys.readouterr().out
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == klfast.info()
