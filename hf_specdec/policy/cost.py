"""Cost of a step, measured while decoding: seconds of drafting and of the target as functions of their sizes."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque

import numpy as np


class FittedCost:
    """Seconds as a non-negative combination of features, fitted to recent measurements.

    Each size is represented by the lower median of its last few measurements, so a step delayed by a busy machine changes
    nothing. The first measurements are dropped: they may have compiled kernels or packed weights. The fit minimises relative
    errors over the sizes seen (large errors count linearly, not squared), with decaying weights and a weak pull towards `prior`.

    Args:
        prior: float [F], initial coefficients, relative to a typical measurement.
        memory: number of sizes kept.
        stiffness: float [F], how much more than usual each coefficient is pulled to its prior.
        dropped: how many measurements are dropped.
    """

    # measurements kept of a size and in which a size's weight halves; strength of the prior; how much longer than expected the first
    # measurement of a size may be; most measurements between two fits; rounds of a fit
    _SAMPLES, _HALF_LIFE, _PULL, _OUTLIER, _REFIT, _ROUNDS = 7, 200, 0.03, 2.0, 16, 4

    def __init__(self, prior: np.ndarray, memory: int = 64, dropped: int = 1, stiffness: np.ndarray | None = None):
        self.prior, self.memory = prior, memory
        self.stiffness = np.ones_like(prior) if stiffness is None else stiffness
        self._sizes: OrderedDict[tuple, deque[tuple[float, np.ndarray]]] = OrderedDict()
        self._last: dict[tuple, int] = {}
        self.count, self._fitted_at = -dropped, 0
        self._taken, self._kind = Counter[int](), 0  # measurements of each kind, and the kind of the last one
        self._coefficients: np.ndarray | None = None

    def __bool__(self) -> bool:
        return self.count > 0

    def observe(self, size: tuple, features: np.ndarray, seconds: float, kind: int = 0) -> None:
        """Record the time of a step of this size, with features [F]; while a kind has few measurements, a new one soon causes a new fit."""
        self.count += 1
        if self.count <= 0:
            return
        # The first step of a size may have compiled kernels or allocated memory.
        if self._sizes and size not in self._sizes:
            seconds = min(seconds, self._OUTLIER * max(float(features @ self.coefficients), 1e-9))
        self._kind = kind
        self._taken[kind] += 1
        self._sizes.setdefault(size, deque(maxlen=self._SAMPLES)).append((max(seconds, 1e-9), features))
        self._sizes.move_to_end(size)
        self._last[size] = self.count
        if len(self._sizes) > self.memory:
            del self._last[self._sizes.popitem(last=False)[0]]

    def largest(self, part: int) -> int:
        """The largest value of one part of the sizes seen; 0: none was seen."""
        return max((size[part] for size in self._sizes), default=0)

    @property
    def coefficients(self) -> np.ndarray:
        """float [F], seconds per feature; zeros before the first measurement."""
        if not self:
            return np.zeros_like(self.prior)
        is_old = self.count - self._fitted_at > min(self._taken[self._kind] // 8, self._REFIT)
        if self._coefficients is None or is_old:
            self._coefficients, self._fitted_at = self._fit(), self.count
        return self._coefficients

    def state(self) -> list[list]:
        """The median measurement of each size, as JSON."""
        return [[list(size), *self._median(samples)] for size, samples in self._sizes.items()]

    def load(self, state: list[list]) -> None:
        """Go on from an earlier `state`; raises OverflowError, TypeError or ValueError if it is of another cost or not valid."""
        sizes: OrderedDict[tuple, deque[tuple[float, np.ndarray]]] = OrderedDict()
        for size, seconds, features in state:
            values = np.asarray(features, dtype=np.float64)
            if values.shape != self.prior.shape or not (abs(values) < 1e9).all() or not 0.0 < seconds < 1e6:
                raise ValueError("invalid times, or times of another cost")
            sizes[tuple(map(int, size))] = deque([(float(seconds), values)], maxlen=self._SAMPLES)
        if sizes:
            self._sizes, self._last, self._coefficients = sizes, dict.fromkeys(sizes, 0), None
            self.count = self._fitted_at = len(sizes)

    @staticmethod
    def _median(samples: deque[tuple[float, np.ndarray]]) -> tuple[float, list[float]]:
        seconds, features = sorted(samples, key=lambda sample: sample[0])[(len(samples) - 1) // 2]
        return seconds, features.tolist()

    def _fit(self) -> np.ndarray:
        seconds, features = map(np.array, zip(*map(self._median, self._sizes.values()), strict=True))
        typical = float(np.median(seconds))
        seen = features.any(0)  # features that never occurred keep their prior
        solution = self.prior * typical
        solution[seen] = self._fit_to(seconds, features[:, seen], self.prior[seen], self.stiffness[seen], typical)
        return solution

    def _fit_to(
        self, seconds: np.ndarray, features: np.ndarray, prior: np.ndarray, stiffness: np.ndarray, typical: float
    ) -> np.ndarray:
        age = self.count - np.array([self._last[size] for size in self._sizes])
        counts = np.array([len(samples) for samples in self._sizes.values()])
        # weights of relative errors
        weights = counts * 0.5 ** (age / self._HALF_LIFE) / np.maximum(seconds, 0.05 * typical) ** 2
        # scaled so that the units of the features do not matter
        pull = (self._PULL * stiffness * np.maximum(features.max(0), 1.0) / typical) ** 2
        trust, solution = np.ones(len(seconds)), np.zeros_like(prior)
        for _ in range(self._ROUNDS):
            weighted = (features * (weights * trust)[:, None]).T
            gram, moment = weighted @ features + np.diag(pull), weighted @ seconds + pull * prior * typical
            solution = non_negative_solution(gram, moment)
            errors = np.abs(seconds - features @ solution) / seconds
            before, tolerated = trust, max(2.0 * np.median(errors), 0.02)
            trust = np.minimum(1.0, tolerated / np.maximum(errors, 1e-9))
            if (trust == before).all():
                break
        return solution


def non_negative_solution(gram: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """x >= 0 [F] that nearly solves gram [F, F] (positive definite) @ x = moment [F]: negative entries are removed one by one."""
    solution, used = np.zeros(len(moment)), np.arange(len(moment))
    while len(used):
        best = np.linalg.solve(gram[np.ix_(used, used)], moment[used])
        if (best >= 0).all():
            solution[used] = best
            break
        used = np.delete(used, best.argmin())
    return solution


class DraftingCost(FittedCost):
    """Seconds of drafting: by depth (a drafter's forwards run one after another), by draft tokens asked for, and by tokens that the
    drafter has to catch up with.
    """

    # Drafts of much fewer tokens do not show what a token costs, nor do such backlogs, and the fit pulls that towards 0: a drafter's
    # forward is a batch, too. After one draft of a token, 32 are expected to take twice as long.
    ASKED, BACKLOG = 4, 64

    def __init__(self, dropped: int = 1):
        super().__init__(np.zeros(4), dropped=dropped)

    def observe_draft(self, depth: int, num_asked: int, backlog: int, seconds: float) -> None:
        """Record the time of one draft."""
        features = np.array([1.0, depth, num_asked / self.ASKED, backlog / self.BACKLOG])
        self.observe((depth, num_asked, backlog.bit_length()), features, seconds)

    def of_draft(self, depth, num_asked, backlog=0):
        """Seconds for numbers or arrays that broadcast; 0 where nothing is asked for."""
        fixed, per_depth, per_token, behind = self.coefficients
        seconds = fixed + per_depth * depth + behind / self.BACKLOG * backlog
        return (num_asked > 0) * seconds + per_token / self.ASKED * num_asked


class StepCost:
    """Seconds of a decoding step without drafting.

    By rows and by packed tokens, piecewise linear between `KNOTS` (the cost grows in steps: the second token may cost much, tokens
    up to the next multiple of a tile nothing). Beyond the most tokens seen, and from `LINEAR` on, a token costs as much as those before
    it, or as the tokens of prompts that ran as steps do: on a CPU a hundred take many times as long as eight. Attention
    adds what each row and each packed token costs for every token of context.

    Attributes:
        context: mean length of the texts, in units of `CONTEXT` tokens, of the steps that are observed or asked for next.
        octave: 0 up to `CONTEXT` / 4 tokens of mean length, and one more for each doubling. Times are kept apart by it.
    """

    KNOTS = np.array([1.0, 2.0, 3.0, 4.0, 6.0, *2.0 ** np.arange(3, 13)])  # up to 4096 tokens
    CONTEXT = 4096  # tokens; texts that are much shorter do not show what context costs ..
    _OF_CONTEXT = 5.0  # .. so it is pulled to 0 that much more: noise of 10 % at 100 tokens is not a cost of context
    LINEAR = 16  # tokens from which steps are small against the rest
    _OCTAVE = 0.1  # initial guess: how much longer a forward gets when its tokens double

    def __init__(self):
        prior = np.concatenate([[0.8, 0.01, 0.0, 0.0], self._OCTAVE * np.diff(np.log2(self.KNOTS))])
        stiffness = np.ones_like(prior)
        stiffness[2:4] = self._OF_CONTEXT
        self.target = FittedCost(prior, stiffness=stiffness)
        self.context, self.octave = 0.0, 0
        self._prompts = 0, 0.0  # tokens and seconds of the forward that read prompts in the least time per token
        self._reaches: dict[int, np.ndarray] = {}  # by number of tokens
        self._count = 0  # measurements at the time of the fit
        self._fit: np.ndarray | None = None  # the fit that `_plain` and `_curve` were computed from
        self._plain: dict[tuple[int, int], float] = {}  # seconds of a plain step, by rows and octave
        self._curve = np.zeros(len(self.KNOTS))  # seconds that the tokens up to each knot add

    def look_at(self, num_rows: int, num_context: int) -> None:
        """The next observations and questions are about steps of `num_rows` rows whose texts have `num_context` tokens together."""
        self.context = num_context / (max(num_rows, 1) * self.CONTEXT)
        self.octave = int(4 * self.context).bit_length()

    def observe_target(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Record the time of the target and the rest of the loop, for `num_rows` rows with `num_tokens` tokens in all."""
        features = np.empty_like(self.target.prior)
        features[:4] = 1.0, num_rows, num_rows * self.context, num_tokens * self.context
        features[4:] = self._reach(num_tokens)
        self.target.observe((self.octave, num_rows, num_tokens), features, seconds, self.octave)

    def observe_prompts(self, num_tokens: int, seconds: float) -> None:
        """Record the time of a forward that read prompts, `num_tokens` in all; few of them do not show what a token costs."""
        best, least = self._prompts
        if num_tokens >= 2 * self.LINEAR and (not best or seconds / num_tokens < least / best):
            self._prompts, self._fit = (num_tokens, seconds), None

    def _reach(self, num_tokens: int) -> np.ndarray:
        """float [knots - 1]: how far into each octave the tokens reach, from 0 to 1."""
        if num_tokens not in self._reaches:
            low, high = self.KNOTS[:-1], self.KNOTS[1:]
            self._reaches[num_tokens] = np.clip((num_tokens - low) / (high - low), 0.0, 1.0)
        return self._reaches[num_tokens]

    def of_plain(self, num_rows: int) -> float:
        """Seconds of a plain step, as a measure of small times. It is computed once for each fit, number of rows and octave."""
        if self._count != self.target.count:
            self._refit()
            self._count = self.target.count
        key = num_rows, self.octave
        if key not in self._plain:
            self._plain[key] = float(self.of_target(num_rows, num_rows))
        return self._plain[key]

    def of_target(self, num_rows: int, num_tokens):
        """Seconds of the target (above 0) for packed token counts: a number or an array, fractions allowed."""
        fixed, per_row, per_read, per_product = self._refit()[:4]
        seconds = fixed + per_row * num_rows + np.interp(num_tokens, self.KNOTS, self._curve)
        return np.maximum(seconds + self.context * (per_read * num_rows + per_product * num_tokens), 1e-9)

    def _refit(self) -> np.ndarray:
        """The coefficients of the fit, and what is computed once for it."""
        coefficients = self.target.coefficients
        if coefficients is not self._fit:
            self._fit, self._plain, octaves = coefficients, {}, coefficients[4:].copy()
            seen, lengths = self.target.largest(2), np.diff(self.KNOTS)
            num_read, seconds = self._prompts
            short = coefficients[0] + octaves[self.KNOTS[1:] <= self.LINEAR].sum()
            of_prompts = (seconds - short) / (num_read - self.LINEAR) if num_read else 0.0
            for octave in np.flatnonzero(self.KNOTS[:-1] >= max(seen, self.LINEAR)):
                of_token = max(octaves[octave - 1] / lengths[octave - 1], of_prompts)
                octaves[octave] = max(octaves[octave], of_token * lengths[octave])
            self._curve = np.cumsum([0.0, *octaves])
        return coefficients
