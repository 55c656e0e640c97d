"""Progress of `transformers.Trainer` as steps of a round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from edgefl.client.round import Round


class StepCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """Reports the loss whenever the Trainer logs it (``logging_steps``), and ends training that is not wanted."""

    def __init__(self, this: Round) -> None:
        self._round = this

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """A step, of the logged loss."""
        if logs and "loss" in logs:
            self._round.step(logs["loss"], epoch=int(state.epoch or 0), step=state.global_step, steps=state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave off between two logged losses."""
        if self._round.losses:
            self._round.on_step(int(state.epoch or 0), state.global_step, state.max_steps, self._round.losses[-1])
