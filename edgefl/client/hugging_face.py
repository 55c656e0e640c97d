"""Progress of `transformers.Trainer` as steps of a round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from transformers import TrainerCallback


class Reported(Protocol):
    """A round that steps are reported to (``edgefl.client.Round``)."""

    losses: list[float]

    @property
    def on_step(self) -> Callable[[int, int, int, float], None]:
        """Take epoch, step, steps and loss; may raise to end the round."""
        ...

    def step(self, loss: float, *, epoch: int, step: int, steps: int) -> None:
        """Report one step."""
        ...


class StepCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """Callback that reports each logged loss (``logging_steps``), and ends a round that is left off."""

    def __init__(self, this: Reported) -> None:
        self._round = this

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Have a loss that is not finite logged as it is, not as 0."""
        args.logging_nan_inf_filter = False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Report the loss logged."""
        if logs and "loss" in logs:
            self._round.step(logs["loss"], epoch=int(state.epoch or 0), step=state.global_step, steps=state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave off between two logged losses."""
        if self._round.losses:
            self._round.on_step(int(state.epoch or 0), state.global_step, state.max_steps, self._round.losses[-1])
