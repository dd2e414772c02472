"""TrainingError: what every part of training raises."""


class TrainingError(ValueError):
    """Training cannot start or continue; the message says why and what to do."""
