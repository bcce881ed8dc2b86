"""Which denoising step a forward call belongs to, and the lists that are kept from one step to the next."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Call", "Job", "ListKey"]

_MOST_CALLS = 8  # the most calls of a step whose lists are kept; guidance makes two or three


class ListKey(NamedTuple):
    """The layer and the call that a list belongs to."""

    layer: int
    number: int  # of the call within its step: guidance calls the model with several prompts, whose lists differ


class Call(NamedTuple):
    """A forward call of a model."""

    step: int
    number: int


class State(NamedTuple):
    """The state of a `Job` after a forward call has begun."""

    timestep: float | None
    call: Call | None
    lists: dict[ListKey, Any]
    rises: int


class Job:
    """The steps of a video, as one thread computes them.

    A call with a smaller timestep than the call before begins the next step. A call with the same timestep belongs to the same step. A call
    with a larger timestep begins a new video.
    """

    def __init__(self) -> None:
        # A new state replaces this one when a call begins, so that the earlier state can be put back if the call fails.
        self.state = State(None, None, {}, 0)

    @property
    def call(self) -> Call | None:
        """The forward call that has begun last; None before the first one."""
        return self.state.call

    @property
    def lists(self) -> dict[ListKey, Any]:
        """The lists that are kept."""
        return self.state.lists

    @property
    def rises(self) -> int:
        """How many times in a row the timestep has become larger: more than once in a loop whose timesteps rise, as for inversion."""
        return self.state.rises

    def begin(self, timestep: float | None) -> Call:
        """The forward call that begins now. Where a model has no timestep, each call is a step."""
        before, last, lists, rises = self.state
        if last is None or (before is not None and timestep is not None and timestep > before):
            call, lists, rises = Call(0, 0), {}, 0 if last is None else rises + 1
        elif timestep is not None and timestep == before:
            call = Call(last.step, last.number + 1)
        else:
            call, rises = Call(last.step + 1, 0), 0
        self.state = State(timestep, call, {**lists}, rises)
        return call

    def keep(self, key: ListKey, lists: Any) -> None:
        """Keep a list for the next steps."""
        if key.number < _MOST_CALLS:
            self.lists[key] = lists
