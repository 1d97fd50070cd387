"""How far a ratio may drop by chance, from the rounds that were measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SMALLEST_DROP = 0.05  # of a ratio, that counts: from one run to the next a machine drifts by some per cent
_PROBABILITY = 0.005  # of a false alarm, at most, in one comparison
# Student's t, quantile 1 - _PROBABILITY, by degrees of freedom (Abramowitz and Stegun, table 26.10).
_T = {1: 63.657, 2: 9.925, 3: 5.841, 4: 4.604, 5: 4.032, 6: 3.707, 7: 3.499, 8: 3.355, 9: 3.250, 10: 3.169, 12: 3.055}
_T |= {15: 2.947, 20: 2.845, 30: 2.750, 60: 2.660, 120: 2.617}


@dataclass(frozen=True)
class Estimate:
    """An estimated variance: the square of a standard deviation of logarithms, and its degrees of freedom."""

    variance: float
    freedom: float


def center(logs: Sequence[float]) -> float:
    """Their median: a disturbed round or two do not move it."""
    return statistics.median(logs)


def variance_of_median(count: int) -> float:
    """Of so many values of variance 1. The mean's for one or two; else the normal distribution's limit for many,
    pi / (2 n), which is more than it is for few (Kenney and Keeping, "Mathematics of Statistics", 1962, p. 211)."""
    return 1 / count if count < 3 else math.pi / (2 * count)


def scatter(runs: Sequence[Sequence[float]]) -> Estimate:
    """The variance of a round's logarithm, pooled over runs, each about its own mean."""
    freedom = sum(len(run) - 1 for run in runs)
    squares = sum(statistics.variance(run) * (len(run) - 1) for run in runs if len(run) > 1)
    return Estimate(squares / freedom if freedom else 0.0, freedom)


def drift(series: Sequence[Sequence[Sequence[float]]]) -> Estimate:
    """The variance between runs, beyond what the scatter of their rounds explains, pooled over what was measured.

    `series`: of each task and side, the logarithms of the rounds of each baseline. At least 0, and 0 of one baseline:
    the analysis of variance's estimate for one random factor.
    """
    excess, freedom = 0.0, 0
    for runs in series:
        if len(runs) > 1:
            inner = scatter(runs).variance
            explained = statistics.fmean(inner * variance_of_median(len(run)) for run in runs)
            excess += (statistics.variance(map(center, runs)) - explained) * (len(runs) - 1)
            freedom += len(runs) - 1
    return Estimate(max(0.0, excess / freedom) if freedom else 0.0, freedom)


def allowed_drop(baselines: Sequence[Sequence[float]], new: Sequence[float], between: Estimate) -> float | None:
    """How far, in logarithms, the new median may lie below the mean of the baselines' medians by chance.

        t(f) * sqrt(s^2 (v(n) + sum of v(n_i) / k^2) + d^2 (1 + 1 / k))

    where s^2 is the `scatter` of all rounds and d^2 the drift `between` runs, v `variance_of_median`, n the new rounds,
    n_i those of the k baselines; t is Student's, for the variance is estimated from few rounds: with 3 standard errors,
    as of a known one, three rounds each would give a false alarm in 50 comparisons. Its degrees of freedom f follow
    Welch and Satterthwaite (Biometrics Bulletin 2, 1946). Where the formula gives less, SMALLEST_DROP. None if there
    was one round in each: nothing is known of the noise.
    """
    runs = [*baselines, new]
    inner, count = scatter(runs), len(baselines)
    if not inner.freedom:
        return None
    weight = variance_of_median(len(new)) + sum(variance_of_median(len(run)) for run in baselines) / count**2
    parts = [(inner.variance * weight, inner.freedom), (between.variance * (1 + 1 / count), between.freedom)]
    total = sum(part for part, _ in parts)
    below = sum(part**2 / freedom for part, freedom in parts if freedom)
    freedom = total**2 / below if below else inner.freedom
    return max(student(freedom) * math.sqrt(total), -math.log(1 - SMALLEST_DROP))


def student(freedom: float) -> float:
    """The quantile for so many degrees of freedom, or the next fewer in the table."""
    return _T[max((known for known in _T if known <= freedom), default=1)]
