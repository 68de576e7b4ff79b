"""The outcome of a finished run, by its curves: diverged, learnt nothing, overfitted, still falling, or what it reached.

Every judgement compares medians of equal stretches of the training loss, or validation losses of the same tokens. A change
counts if it exceeds both its threshold below and the noise of the stretches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from handgrad.networks import NETWORKS
from handgrad.networks.vqvae import psnr
from handgrad.settings.config import RunConfig
from handgrad.settings.objective import DPO

DIVERGED, NOTHING, OVERFITTED, FALLING, REACHED = "diverged", "learnt nothing", "overfitted", "still falling", "reached"
RISE = 0.5  # nats; a rise of the training loss above its lowest stretch, which no healthy schedule makes
NOTHING_SHARE = 0.05  # of ln(vocabulary); the frequencies of the tokens alone are worth several times as much
OVERFIT_SHARE = 0.02  # of the lowest validation loss
NAMED_SHARE = 0.005  # of the lowest loss: a last one so far above it is named beside it
FALLING_SHARE = 0.1  # of the last loss, fallen in the second half of the steps
DEVIATIONS = 5.0  # of the difference of two medians
FEW_STEPS = 200  # the fewest that the advice to train longer names

Points = Sequence[tuple[int, float]]  # (steps done, loss in nats), in order


@dataclass(frozen=True)
class Outcome:
    """One line about a finished run. `advice`: flags of `handgrad train` that help, or none."""

    kind: str
    text: str
    advice: tuple[str, ...] = ()


class Stretches:
    """The training loss as medians of equal stretches: fifty of a long run, eight of a short one."""

    def __init__(self, losses: Points):
        self.size = max(1, min(len(losses) // 8, max(8, len(losses) // 50)))
        parts = [losses[max(0, end - self.size) : end] for end in range(len(losses), 0, -self.size)[::-1]]
        self.ends = [part[-1][0] for part in parts]  # steps
        self.medians = [median(loss for _, loss in part) for part in parts]

    def within(self, steps: float) -> float:
        """The median of the last stretch that ends within so many steps, else of the first."""
        return [value for end, value in zip(self.ends, self.medians, strict=True) if end <= max(steps, self.ends[0])][-1]

    def noise(self, values: Sequence[float]) -> float:
        """The difference of two medians that `values`, single losses, may make by chance. Half of the squared distance of
        neighbours is the variance of one loss; the distances' median ignores slopes and jumps."""
        distances = [abs(after - before) for before, after in pairwise(values)]
        return DEVIATIONS * 1.2533 * 1.4826 * median(distances or [0.0]) / math.sqrt(self.size)


def outcome_of(
    config: RunConfig,
    losses: Points,
    validations: Points,
    uniform: float,
    floor: float | None,
    usual_rate: float,
    best_saved: tuple[int, float] | None,
) -> Outcome | None:
    """The outcome of a run whose steps are done; None without a finite loss. `uniform`: ln(vocabulary), the loss of a
    guess; `floor`: the entropy of the source, if known; `usual_rate`: a learning rate that suits the model; `best_saved`:
    step and validation loss of the best checkpoint."""
    losses = [(step, loss) for step, loss in losses if math.isfinite(loss)]
    validations = [(step, loss) for step, loss in validations if math.isfinite(loss) and not config.overfit_one_batch]
    if not losses:
        return None
    curve, values, steps = Stretches(losses), [loss for _, loss in losses], losses[-1][0]
    first, last, medians = values[0], curve.medians[-1], curve.medians
    lowest = medians.index(min(medians))
    healthy = values[: (lowest + 1) * curve.size]  # before the loss rose, if it did
    noise, ceiling = curve.noise(healthy if len(healthy) > 8 else values), max(uniform, first) + RISE
    above = [number for number, loss in enumerate(medians) if loss > ceiling]
    if last > ceiling or last - medians[lowest] > max(RISE, noise) or len(above) > len(medians) / 4:
        top = last if last - medians[lowest] > RISE else max(medians)
        since = min(lowest, above[0]) if above else lowest
        rose = f"the loss rose from {min(first, *medians[: since + 1]):.3g} to {top:.3g}"
        rose += f", and fell to {last:.3g}" if top > last else ""
        rate = rounded(min(usual_rate, config.learning_rate / 3))
        return Outcome(DIVERGED, f"diverged by step {curve.ends[since]}: {rose}", ("--learning-rate", f"{rate:g}"))

    longer = ("--steps", str(max(2 * config.steps, FEW_STEPS)), "--allow-changes")
    most = first if config.teacher else uniform  # a divergence ends at 0
    if losses[0][0] == 1 and not config.init_from and first - last < NOTHING_SHARE * most:
        slow = config.learning_rate < usual_rate / 5
        moved = f"{'fell' if last <= first else 'rose'} by {abs(first - last):.2g}"
        text = f"learnt nothing: the loss {moved}, from {first:.3f} to {last:.3f}, in {steps} steps"
        return Outcome(NOTHING, text, ("--learning-rate", f"{rounded(usual_rate):g}") if slow else longer)

    measured, name = (validations, "validation") if validations else ([*losses[:1], (steps, last)], "training")
    best_step, best = min(measured, key=lambda point: point[1])
    now, start = measured[-1][1], measured[0][1] if measured[0][0] == 0 else first
    if validations and now - best > OVERFIT_SHARE * best and last < curve.within(best_step):
        text = f"overfitted: the validation loss rose since step {best_step}, from {best:.4f} to {now:.4f}"
        if best_saved and best_saved[1] < now:
            return Outcome(OVERFITTED, f"{text}; {config.out}/best is the checkpoint of step {best_saved[0]}")
        return Outcome(OVERFITTED, text, ("--keep-best",))
    if config.objective == DPO or (config.teacher and not validations):
        units = ""
    elif NETWORKS[config.architecture].pictures:
        units = f" (PSNR {psnr(now):.2f} dB)"
    else:
        units = f" (perplexity {math.exp(min(now, 700)):.4g})"
    reached = f"{name} loss {now:.4f}{units}"
    if not (config.teacher and validations and measured[0][0]):  # else the first loss is a divergence
        reached += f", from {start:.4f} at the start"
    reached += f", {best:.4f} at step {best_step}" if now - best > NAMED_SHARE * best else ""
    earlier = [loss for step, loss in validations if step <= steps / 2] or [curve.within(steps / 2)]
    gain = min(earlier[-1] - now, now - (floor or 0))  # no more than is left
    if len(medians) >= 8 and gain > max(FALLING_SHARE * now, noise) and not config.overfit_one_batch:
        return Outcome(FALLING, f"{reached}, still falling: by {earlier[-1] - now:.2g} in the second half", longer)
    return Outcome(REACHED, f"reached {reached}")


def rounded(rate: float) -> float:
    """A learning rate to one digit, rounded down."""
    power = 10.0 ** math.floor(math.log10(rate)) if rate > 0 else 1.0
    return math.floor(rate / power + 1e-9) * power
