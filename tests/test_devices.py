"""The device of a run: the memory of freed tensors on a CPU, and the number of GPUs."""

import json
import platform
import subprocess
import sys

import pytest

from benchmarks.record import ROOT
from handgrad.machine import devices

# The page faults of each of five steps whose temporaries take some 50 MB: the logits' chunk of GPT-2's vocabulary, which
# oneDNN's product does not write in place.
COUNT = """
import json, resource, sys
from benchmarks.step import CONTENDERS, config_of, step_of
from handgrad.machine import devices
from handgrad.ops.cpu import linear
linear.MKL_IS_AS_FAST = False
if sys.argv[1] == "as it comes":
    devices.keep_freed_memory = lambda device: None
step = step_of(CONTENDERS["handgrad fp32"], config_of("tiny", 4, 64, "fp32"))
found = []
for number in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(number)
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(json.dumps(found))
"""


def page_faults(allocator: str) -> list[int]:
    command = [sys.executable, "-c", COUNT, allocator]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


@pytest.mark.nightly  # of speed; test_training.py sees the temporaries freed
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_a_step_takes_the_memory_that_the_last_one_freed() -> None:
    """Without asking the system for it, page by page, as it would otherwise."""
    assert max(page_faults("of handgrad")[3:]) < 1000 < 5000 < min(page_faults("as it comes"))


def test_a_gpu_whose_driver_does_not_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for available, count in ((True, 2), (False, 0)):
        monkeypatch.setattr("torch.cuda.is_available", lambda available=available: available)
        assert devices.gpu_count() == count
