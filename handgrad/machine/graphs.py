"""Launches captured as CUDA graphs. The first call runs them eagerly, which loads and compiles their kernels; the next
captures them; later calls replay the graph. Launches must not read memory that the host changes; what they allocate
belongs to the graph.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence

import torch


class Replayed:
    """A sequence of launches that one CUDA graph replays."""

    def __init__(self, launches: Sequence[Callable[[], object]]):
        self.launches = launches
        self.launched = False
        self.graph: torch.cuda.CUDAGraph | None = None

    def __iter__(self) -> Iterator[Callable[[], object]]:
        """Yields the launches, from the second time on the graph's replay: looping over them adds no stack frame."""
        if self.graph is None and not self.launched:
            self.launched = True
            return iter(self.launches)
        return iter((self.capture().replay,))

    def __call__(self) -> None:
        for launch in self:
            launch()

    def capture(self) -> torch.cuda.CUDAGraph:
        """The graph of the launches, captured on the first call. They must have run eagerly before."""
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            # Other threads (a sampler of the GPU's power, say) may call the driver during the capture.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"), no_collection():
                for launch in self.launches:
                    launch()
        return self.graph


def capture(launches: Sequence[Callable[[], object]], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Captures launches that have run eagerly before. (`torch.cuda.graph` would collect garbage before each capture.)"""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), no_collection():
        graph.capture_begin(capture_error_mode="thread_local")
        for launch in launches:
            launch()
        graph.capture_end()
    return graph


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Keeps the garbage collector from freeing graphs, events and pinned memory, which would invalidate a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
