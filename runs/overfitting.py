"""Which step had the lowest validation loss, and whether the LoRA memorizes its images since then.

The validation loss is computed at fixed noise, so it jumps far less than the training loss, but it still wanders. An alarm
must therefore be rare where nothing is wrong: a rise counts when it is larger than the noise of the curve itself, larger than
a part of what the run had gained before, has lasted for RISING validations, and happened while the training loss fell.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

RISING = 6  # validations after the lowest one, before an alarm
NOISES = 5.0  # a rise in standard deviations of the curve's noise
EARLIER = 2.0  # a rise in the largest rise before the lowest loss, from which the run has recovered
GAIN_SHARE = 0.15  # a rise as a share of the fall before it
LEAST_SHARE = 0.01  # a rise as a share of the lowest loss
TREND_Z = 2.6  # Mann-Kendall: chance gives it in 1 of 200 curves
LEAST_STEPS = 10  # training losses on each side that are compared


@dataclass(frozen=True)
class Overfitting:
    """A rise of the validation loss since `step`, its lowest value. `count`: validations since then."""

    step: int
    lowest: float
    now: float
    count: int
    train_before: float
    train_now: float

    def text(self) -> str:
        """What it means and what to do."""
        return (
            f"The LoRA is overfitting: since step {self.step:,} the validation loss has risen from {self.lowest:.3g} to "
            f"{self.now:.3g} over {self.count} validations, while the training loss fell from {self.train_before:.3g} to "
            f"{self.train_now:.3g}. It memorizes the training images. Use the LoRA closest to step {self.step:,}. "
            "For a better one, train fewer steps, lower the rank or the learning rate, or add images."
        )


def best(validation: Sequence[tuple[int, float]]) -> tuple[int, float] | None:
    """(step, loss) of the lowest validation loss; of equal ones the first. None without a validation after step 0."""
    trained = [(loss, step) for step, loss in validation if step]
    return None if not trained else (min(trained)[1], min(trained)[0])


def overfitting(
    validation: Sequence[tuple[int, float]], between: Callable[[int, int], Sequence[float]]
) -> Overfitting | None:
    """The rise of the validation loss that counts as overfitting; None while there is none.

    Args:
        validation: (step, loss) in order. between: the training losses of the steps from the first to the last given.
    """
    steps, values = [step for step, _ in validation], [loss for _, loss in validation]
    if len(values) < RISING + 2:
        return None
    smooth = [fmean(values[max(0, i - 1) : i + 2]) for i in range(len(values))]
    low = min(range(len(values)), key=smooth.__getitem__)
    count = len(values) - 1 - low
    if count < RISING:
        return None
    now, lowest = fmean(values[-3:]), smooth[low]
    rise, gain = now - lowest, max(smooth[: low + 1]) - lowest
    usual = max(NOISES * noise(values), EARLIER * earlier_rise(smooth[: low + 1]))
    if rise <= max(usual, GAIN_SHARE * gain, LEAST_SHARE * abs(lowest)):
        return None
    if trend(values[low:]) < TREND_Z:
        return None
    window = max(LEAST_STEPS, (steps[-1] - steps[low]) // 2)
    before, after = between(steps[low] - window + 1, steps[low]), between(steps[-1] - window + 1, steps[-1])
    if len(before) < LEAST_STEPS or len(after) < LEAST_STEPS:
        return None
    fall = fmean(before) - fmean(after)
    error = math.sqrt(stdev(before) ** 2 / len(before) + stdev(after) ** 2 / len(after))
    if fall <= error:
        return None
    return Overfitting(steps[low], lowest, now, count, fmean(before), fmean(after))


def noise(values: Sequence[float]) -> float:
    """The standard deviation of a curve's noise, from its second differences, which a slow trend leaves out.

    1.4826 makes a median of absolute values a standard deviation; the second difference of noise has sqrt(6) times its own.
    """
    second = [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return 1.4826 * median(second) / math.sqrt(6) if second else 0.0


def earlier_rise(values: Sequence[float]) -> float:
    """The largest rise of a curve over its lowest value so far."""
    lowest, largest = math.inf, 0.0
    for value in values:
        lowest = min(lowest, value)
        largest = max(largest, value - lowest)
    return largest


def trend(values: Sequence[float]) -> float:
    """Mann-Kendall's z of a rising trend: 0 for none, above 2 for one that chance gives in 2 of 100 curves."""
    n = len(values)
    signs = sum((b > a) - (b < a) for i, a in enumerate(values) for b in values[i + 1 :])
    spread = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    return 0.0 if not spread or not signs else (signs - math.copysign(1, signs)) / spread
