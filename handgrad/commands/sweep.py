"""handgrad sweep: a run for every combination of values, resumable, and one report of all."""

import os
import signal
import sys
from argparse import Namespace

from handgrad.commands.report import leave_out
from handgrad.errors import INTERRUPTED, HandgradError, Preempted, print_message, shown
from handgrad.machine import devices
from handgrad.reports.page import write_report
from handgrad.run.header import warmup_lines
from handgrad.storage.run_files import REPORT_FILE
from handgrad.tools.sweep import Runner, exit_code_of, gpu_places, groups_of, table, write_results


def run(parsed: Namespace) -> int:
    sweep = parsed.sweep
    on_gpus = {one.config.device for one in sweep.runs} & {"auto", "cuda"}
    places = gpu_places(parsed.jobs, devices.gpu_count() if on_gpus else 0, os.environ)
    print(f"sweep      {len(sweep.runs)} runs in {sweep.folder}, {min(len(places), len(sweep.runs))} at once", flush=True)
    for line in dict.fromkeys(line for one in sweep.runs for line in warmup_lines(one.config)):
        print(line, flush=True)
    runner = Runner(sweep, places, lambda line: print(line, flush=True))
    outcomes = runner.run_all()
    results, groups = write_results(sweep, outcomes), groups_of(outcomes)
    if runner.received:
        ended = sum(outcome.code == 0 for outcome in outcomes)
        name = signal.Signals(runner.received[0]).name
        print_message(f"stopped by {name} with {ended} of {len(outcomes)} runs finished; run the same command to resume")
        return INTERRUPTED if signal.SIGINT in runner.received else Preempted.exit_code
    if groups:
        print("\n".join(["", *table(groups), "", f"best       {groups[0].name}: validation loss {groups[0].text()}"]))
        finished = [outcome.run.folder for outcome in outcomes if outcome.code == 0]
        try:
            print(f"report     {write_report(finished, sweep.folder / REPORT_FILE, leave_out)}")
        except HandgradError as error:  # the runs count
            print_message(error)
    print(f"results    {results}")
    for outcome in outcomes:
        if outcome.code:
            print(shown(f"failed     {outcome.run.name} (exit code {outcome.code}): {outcome.error}"), file=sys.stderr)
    return exit_code_of(outcomes)
