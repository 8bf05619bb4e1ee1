"""scripts/test-gpu on a CPU device with tiny shapes: every step that needs no GPU, and what it writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[1]
SCRIPT = REPOSITORY / "scripts" / "test-gpu"


def test_the_script_can_be_started():
    assert os.access(SCRIPT, os.X_OK)
    compile(SCRIPT.read_text(), str(SCRIPT), "exec")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "--out", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "device cuda is missing: torch sees no NVIDIA GPU here; --device cpu --tiny tests this script\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_dry_run_goes_through_all_steps(tmp_path):
    command = [sys.executable, SCRIPT, "--device", "cpu", "--tiny", "--tokens", "6", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "emulated-on-the-cpu.json").read_text())
    assert list(found) == ["gpu", "date", "python", "versions", "kernels", "decode block", "accelerate"]
    assert {row["name"] for row in found["kernels"]} == {"device copy", "torch dense", "ffn torch"}
    decoded = found["decode block"]
    assert list(decoded["cards"]) == ["8", "12", "24"]
    assert len(decoded["plans"]) == 6
    assert all(plan["measured_tokens_per_second"] > 0 for plan in decoded["plans"])
    assert list(found["accelerate"]) == ["8"]
    assert found["accelerate"]["8"]["tokens_per_second"] > 0
    text = (tmp_path / "emulated-on-the-cpu.md").read_text()
    assert text.startswith("# emulated on the CPU\n")
    assert "2 of 4 layers of relullama-7b's shape" in text
