"""Launches that are recorded as CUDA graphs: made once as they are, which loads and compiles what they need, then recorded,
then replayed. They must not allocate, and must not read what the host changes.
"""

from collections.abc import Callable, Iterator

import torch

from handgrad.models.transformer import Pause


class Replayed:
    """A sequence of launches."""

    def __init__(self, launch: Callable[[], None]):
        self.launch = launch
        self.launched = False
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if not self.launched:
            self.launch()
            self.launched = True
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            # Other threads (a sampler of the GPU's power, say) may call the driver during the recording.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.launch()
        self.graph.replay()


class ReplayedStages:
    """A sequence of launches with pauses, each stretch between two of those that count a graph of its own."""

    def __init__(self, stages: Callable[[], Iterator[Pause]], counts: Callable[[Pause], bool], *, graphs: bool):
        self.stages, self.counts, self.graphs = stages, counts, graphs
        self.launched = False
        self.recorded: list[tuple[torch.cuda.CUDAGraph, Pause | None]] = []

    def __call__(self, at: Callable[[Pause], None]) -> None:
        """Goes through all stages; at each pause that counts `at` does what is to be done there."""
        if not (self.graphs and self.launched):
            for pause in self.paused():
                at(pause)
            self.launched = True
            return
        if not self.recorded:
            self.record()
        for graph, pause in self.recorded:
            graph.replay()
            if pause is not None:
                at(pause)

    def paused(self) -> Iterator[Pause]:
        return (pause for pause in self.stages() if self.counts(pause))

    def record(self) -> None:
        """Records every stretch without running it. (`torch.cuda.graph` would collect garbage before each.)"""
        stages = self.paused()
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            more = True
            while more:
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(capture_error_mode="thread_local")
                pause = next(stages, None)
                graph.capture_end()
                self.recorded.append((graph, pause))
                more = pause is not None
