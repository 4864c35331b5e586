"""Adaptive alpha_s and alpha_t: keep penalty and loss of a training step at similar values."""

import torch
from torch import Tensor

from xkfac.errors import XkfacError


class Balance:
    """Adaptive alpha_s and alpha_t, which bring ls * L_s and lt * (L_t - floor) to similar values while training.

    Every `interval` steps the means of the two over the interval are compared: alpha_t grows by 1 as long as the
    penalty is the larger and returns to 1 when it no longer is; alpha_s likewise in the opposite case. `floor` is
    C_t, the loss that fine-tuning reaches on the target. A step whose loss is not finite, as a gradient scaler skips
    it, does not count. All state lives on the device and no step synchronises it.
    """

    def __init__(self, floor: float = 0.0, interval: int = 10) -> None:
        if interval < 1:
            raise XkfacError(f"the interval of a balance must be at least 1 step, not {interval}")
        self.floor, self.interval = floor, interval
        self.alpha_s, self.alpha_t = torch.ones(()), torch.ones(())
        self._excess, self._steps = torch.zeros(()), torch.zeros(())

    def to(self, device: torch.device) -> None:
        """Move the state to a device."""
        for name, tensor in self.state_dict().items():
            setattr(self, name, tensor.to(device))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state, to be stored with a training checkpoint."""
        return {name: getattr(self, name) for name in ("alpha_s", "alpha_t", "_excess", "_steps")}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take a state up again."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])

    @torch.no_grad()
    def update(self, penalty: Tensor, loss: Tensor, importance: tuple[float, float]) -> None:
        """Take the L_s and L_t of a step; at the end of an interval adapt alpha_s and alpha_t."""
        source, target = importance
        excess = source * penalty - target * (loss - self.floor)
        self._excess += excess.nan_to_num(0.0, 0.0, 0.0)
        self._steps += 1
        due = self._steps >= self.interval
        raise_t = (self._excess > 0) & (self.alpha_s == 1)
        raise_s = (self._excess < 0) & (self.alpha_t == 1)
        one = torch.ones_like(self.alpha_s)
        alpha_s = torch.where(raise_s, self.alpha_s + 1, one)
        alpha_t = torch.where(raise_t, self.alpha_t + 1, one)
        self.alpha_s.copy_(torch.where(due, alpha_s, self.alpha_s))
        self.alpha_t.copy_(torch.where(due, alpha_t, self.alpha_t))
        self._excess.mul_(~due)
        self._steps.mul_(~due)
