"""Python imports this first in what tests/distributed/launching.py starts: gives ranks the fault in TEST_FAULT."""

import os

if "TEST_FAULT" in os.environ and {"RANK", "SLURM_STEP_NUM_TASKS"} & os.environ.keys():  # a rank, not its launcher
    from tests.distributed.worker import install

    install(os.environ["TEST_FAULT"])
