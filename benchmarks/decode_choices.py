"""Milliseconds of a decoding step of one text, by position in the context, under every choice that its kernels have.

A step is a CUDA graph of decode_step and the choice of the token, replayed `REPLAYS` times; random weights, greedy,
bf16. The first row is as shipped, and each other row differs from it in what it says.

    python -m benchmarks.decode_choices d12 --out h200-decode-step-124m.json       (d48: 1558M; needs a GPU)
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from benchmarks.measuring import launch_milliseconds
from benchmarks.record import keep_commit, write_record
from benchmarks.sampling import Handgrad, sizes
from handgrad.generation.generate import Decoder
from handgrad.machine import devices
from handgrad.machine.graphs import Replayed
from handgrad.memory.rows import count_parameters
from handgrad.models import parameter_table
from handgrad.ops.cuda import attention_decode, row_gemms
from handgrad.tools.speeds import copy_bandwidth

POSITIONS, REPLAYS = (64, 150, 512, 1000), 100
ATTENTIONS = (attention_decode, "FEW_ATTENTIONS"), (attention_decode, "FEW_OF_128")
CHOICES: dict[str, dict[tuple[ModuleType, str], object]] = {
    "as shipped": {},
    "a program for each tile": {(row_gemms, "MOST_OF_ONE_TILE"): 1 << 30},
    **{f"{n} stages": {(row_gemms, "STAGES"): n, (row_gemms, "STAGES_OF_MANY"): n} for n in (2, 3, 4)},
    **{
        f"attention of {numbers} numbers at once, {warps} warps": dict.fromkeys(ATTENTIONS, (numbers, warps))
        for numbers, warps in ((16384, 16), (16384, 8), (8192, 8), (8192, 4), (4096, 4), (4096, 2))
    },
    **{f"{n} programs at most": {(row_gemms, "RESIDENT"): n} for n in (528, 792, 1056)},
    **{f"{n} programs at most for a vocabulary": {(row_gemms, "MOST_OF_A_VOCABULARY"): n} for n in (660, 792, 1320)},
    "1056 programs at most, of SwiGLU too": {(row_gemms, "MOST_OF_ONE_SWIGLU_TILE"): 792, (row_gemms, "RESIDENT"): 1056},
    "small tiles of one warp": {(row_gemms, "FEWEST_WARPS"): 1},
    "tiles of 16384 numbers": {(row_gemms, "TILE_ELEMENTS"): 16384},
    "tiles of 4096 numbers": {(row_gemms, "TILE_ELEMENTS"): 4096},
    "twice the warps": {(row_gemms, "ELEMENTS_PER_WARP"): 1024, (row_gemms, "FEWEST_WARPS"): 8},
    "registers without a limit": {(row_gemms, "REGISTERS"): 255, (row_gemms, "REGISTERS_OF_SEVERAL"): 255},
    **{f"{n} parts of keys at most": {(attention_decode, "MOST_PARTS"): n} for n in (1, 2)},
}


@contextmanager
def chosen(choice: dict[tuple[ModuleType, str], object]) -> Iterator[None]:
    before = {place: getattr(*place) for place in choice}
    for place, value in choice.items():
        setattr(*place, value)
    try:
        yield
    finally:
        for place, value in before.items():
            setattr(*place, value)


def milliseconds(decoder: Decoder, position: int) -> float:
    """Of a step at this position. Afterwards the state of the sequence means nothing."""
    buf = decoder.buf
    buf.active.zero_()
    buf.positions.fill_(position)
    step = Replayed([decoder.launch_step])
    for _ in range(3):
        step()
    return launch_milliseconds(step, REPLAYS)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Milliseconds of a decoding step of one text, by its kernels' choices.")
    parser.add_argument("model", help="d12, d48, Llama-3.2-1B, ...")
    parser.add_argument("--choices", type=int, default=len(CHOICES), help="the first so many")
    parser.add_argument("--out", default="", help="the results file")
    options = parser.parse_args(given)
    keep_commit()
    device, shape = devices.resolve_device("cuda"), sizes(options.model)
    devices.set_arithmetic(device, "bf16")
    weight_bytes, bandwidth = 2 * count_parameters(parameter_table(shape)), copy_bandwidth(device)
    limit = 1e3 * weight_bytes / bandwidth
    print(f"{options.model}, bf16, one text: milliseconds of a step, at positions {POSITIONS}; {devices.describe(device)}")
    print(f"reading the weights at the speed of a copy: {limit:.4f} ms")
    rows, decoder = [], Handgrad(shape, device, "bf16").decoder_of(1)
    for choice, settings in list(CHOICES.items())[: options.choices]:
        with chosen(settings):
            times = [milliseconds(decoder, position) for position in POSITIONS]
        shares = f"{limit / times[1]:>8.1%} of the limit at {POSITIONS[1]}"
        print(f"{choice:<44}" + "".join(f"{time:>9.4f}" for time in times) + shares, flush=True)
        steps = {str(position): round(time, 4) for position, time in zip(POSITIONS, times, strict=True)}
        rows.append({"choice": choice, "milliseconds_by_position": steps})
    if options.out:
        counted = {
            "copy_bytes_per_second": round(bandwidth),
            "weight_bytes": weight_bytes,
            "limit_milliseconds": round(limit, 4),
        }
        write_record(options.out, device, model=options.model, **counted, rows=rows)


if __name__ == "__main__":
    main()
