"""How stiff a function of parameters is: the largest eigenvalue of its Hessian, from gradients alone."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_STEP = 1e-2  # of displacements, all parameters together


@torch.no_grad()
def stiffness(gradients: Callable[[], Iterable[tuple[Tensor, Tensor]]], iterations: int, seed: int = 0) -> float:
    """Return the largest eigenvalue of the Hessian of a function, by power iteration on differences of gradients.

    gradients: returns the parameters, always the same ones in the same order, each with the gradient in it where the
    parameters are now. They are displaced in place meanwhile, and are as they were when this returns.
    """
    parameters = [parameter for parameter, _ in gradients()]
    if not parameters:
        return 0.0
    before = [parameter.clone() for parameter in parameters]
    generator = torch.Generator("cpu").manual_seed(seed)
    direction = [torch.randn(p.shape, generator=generator, device="cpu").to(p.device, p.dtype) for p in parameters]

    def gradient(step: float) -> list[Tensor]:
        for parameter, start, along in zip(parameters, before, direction, strict=True):
            parameter.copy_(start.add(along, alpha=step))
        return [one.clone() for _, one in gradients()]

    largest = torch.zeros(())
    try:
        for _ in range(iterations):
            norm = torch.stack([along.norm() for along in direction]).norm()
            # A product of zero, that of a function without curvature, has no direction and stays zero.
            direction = [along / norm.clamp(min=torch.finfo(norm.dtype).tiny) for along in direction]
            pairs = zip(gradient(_STEP), gradient(-_STEP), strict=True)
            product = [(a - b) / (2 * _STEP) for a, b in pairs]
            largest = torch.stack([(v * h).sum() for v, h in zip(direction, product, strict=True)]).sum()
            direction = product
    finally:
        for parameter, start in zip(parameters, before, strict=True):
            parameter.copy_(start)
    return float(largest)
