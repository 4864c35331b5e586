"""What a model's output means: draw labels, negative log likelihood, and the roots of the output's Fisher.

The loss of an example is L_n = -log p(y_n | output_n). Where an example has several predictions (the pixels of a
segmentation), L_n is their mean, as the usual losses take it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from xkfac.errors import XkfacError


class Likelihood(ABC):
    """The distribution of labels given a model's output [N, ...]; subclass it for one of your own.

    `sample` and `nll` are enough. `root` serves the exact Fisher, `random_root` an estimate with less noise than labels
    that are drawn, and `score` may replace automatic differentiation.
    """

    name: str = "custom"

    @property
    def arguments(self) -> dict[str, float]:
        """What the constructor was given, so that a memory file can name the likelihood in full."""
        return {}

    @abstractmethod
    def sample(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Draw labels, one per example (and prediction), from the model's own distribution."""

    @abstractmethod
    def nll(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return the negative log likelihood [N], summed over the predictions of an example."""

    def predictions(self, output: Tensor) -> int:
        """Return how many predictions an example has; the curvature is that of the mean loss over them."""
        return 1

    def check_labels(self, labels: Tensor, shape: torch.Size) -> None:  # noqa: B027
        """Raise XkfacError for true labels that outputs of a shape [N, ...] cannot have; the default takes all."""

    def check(self, output: Tensor) -> None:  # noqa: B027 -- a subclass need not check anything
        """Raise XkfacError for an output that is none of this likelihood's; called once per pass."""

    def score(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return d(sum_n L_n)/d output, shaped as `output`."""
        with torch.enable_grad():
            leaf = output.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.nll(leaf, labels).sum(), leaf)
        return gradient

    def random_root(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Return random v, shaped as `output`, of mean zero, with E[v v^T] the Fisher of each example's output.

        Examples are independent of each other. Unless a subclass knows better, v is the score of labels that are drawn.
        """
        return self.score(output, self.sample(output, generator))

    def root(self, output: Tensor) -> Iterator[Tensor]:
        """Yield v_k, shaped as `output`, with sum_k v_k v_k^T the Fisher of each example's output."""
        raise XkfacError(f"the likelihood '{self.name}' has no root(); implement it, or use labels='sampled'")


class Categorical(Likelihood):
    """Class probabilities softmax(output) over dimension 1 of [N, C] or [N, C, ...]."""

    name = "categorical"

    def _flat(self, output: Tensor) -> Tensor:
        if output.dim() < 2:
            raise XkfacError(
                f"the categorical likelihood takes outputs [N, classes, ...], not {list(output.shape)}; for one number "
                "an example use likelihood='bernoulli' or 'gaussian'"
            )
        if output.shape[1] == 1:
            raise XkfacError(
                f"the output {list(output.shape)} has one column, and of a single class there is nothing to learn; use "
                "likelihood='bernoulli' if it is the logit of a yes, 'gaussian' if it is a number"
            )
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output

    def check(self, output: Tensor) -> None:
        """Raise XkfacError for probabilities, whose softmax is another distribution."""
        flat = self._flat(output.detach())
        if flat.shape[1] > 1 and bool((flat >= 0).all()) and bool(((flat.sum(1) - 1).abs() < 1e-3).all()):
            raise XkfacError(
                "the outputs of the network are probabilities, and the categorical likelihood takes logits; leave the "
                "softmax out of the network, and give the logits to F.cross_entropy as well"
            )

    def predictions(self, output: Tensor) -> int:
        """Return the number of positions."""
        return math.prod(self._flat(output).shape[2:])

    def sample(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Draw classes [N, ...] by the Gumbel trick, without a host synchronisation."""
        logits = self._flat(output.detach())
        noise = torch.empty_like(logits).exponential_(generator=generator)
        return torch.sub(logits, noise.log_(), out=noise).argmax(1)

    def check_labels(self, labels: Tensor, shape: torch.Size) -> None:
        """Raise XkfacError for labels that are not classes [N, ...] of outputs of a shape [N, C, ...]."""
        if labels.dtype == torch.bool or labels.dtype.is_floating_point or labels.dtype.is_complex:
            raise XkfacError(
                f"the true labels are {labels.dtype}; the categorical likelihood takes classes, which are whole "
                "numbers, so give them as torch.int64"
            )
        _check_shape(labels, torch.Size([shape[0], *shape[2:]]), shape, self.name)
        _check_range(labels, shape[1] - 1, f"one of the {shape[1]} classes 0 to {shape[1] - 1} of the output")

    def nll(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy [N]."""
        loss = F.cross_entropy(self._flat(output), labels, reduction="none")
        return loss.reshape(output.shape[0], -1).sum(1)

    def score(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return softmax(output) - onehot(labels)."""
        score = self._flat(output.detach()).softmax(1)
        labels = labels.long().unsqueeze(1)
        return score.scatter_add_(1, labels, score.new_full((), -1.0).expand(labels.shape)).to(output.dtype)

    def random_root(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Return sum_c z_c sqrt(p_c) (p - e_c) with random signs z_c: never huge, unlike the score of a rare label."""
        p = self._flat(output.detach()).softmax(1)
        signed = p.sqrt() * random_signs(p, generator)
        return (p * signed.sum(1, keepdim=True) - signed).to(output.dtype)

    def root(self, output: Tensor) -> Iterator[Tensor]:
        """Yield sqrt(p_c) (p - e_c) for every class c, position by position."""
        logits = self._flat(output.detach())
        p = logits.softmax(1).flatten(2) if logits.dim() > 2 else logits.softmax(1).unsqueeze(2)
        for position in range(p.shape[2]):
            for label in range(p.shape[1]):
                root = torch.zeros_like(p)
                root[:, :, position] = p[:, :, position]
                root[:, label, position] -= 1
                yield (root * p[:, label, position].sqrt()[:, None, None]).reshape(output.shape)


class Bernoulli(Likelihood):
    """Independent binary labels with logits `output` [N, ...]; L_n is the sum over the labels of an example.

    With `mean` it is their mean, as `F.binary_cross_entropy_with_logits` takes it.
    """

    name = "bernoulli"

    def __init__(self, mean: bool = False) -> None:
        self.mean = bool(mean)

    @property
    def arguments(self) -> dict[str, float]:
        """Whether losses are means; a file of before there was a choice says nothing."""
        return {"mean": 1.0} if self.mean else {}

    def predictions(self, output: Tensor) -> int:
        """Return the number of labels of an example where L_n is their mean."""
        return math.prod(output.shape[1:]) if self.mean else 1

    def sample(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Draw labels, 0 or 1, shaped as `output`."""
        p = output.detach().sigmoid()
        return torch.bernoulli(p, generator=generator)

    def check_labels(self, labels: Tensor, shape: torch.Size) -> None:
        """Raise XkfacError for labels that are not between 0 and 1, or of another shape than the output."""
        _check_shape(labels, shape, shape, self.name)
        _check_range(labels, 1, "between 0 and 1, as the bernoulli likelihood takes them")

    def nll(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return the binary cross-entropy [N]."""
        loss = F.binary_cross_entropy_with_logits(output, labels.to(output.dtype), reduction="none")
        return loss.reshape(output.shape[0], -1).sum(1)

    def score(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return sigmoid(output) - labels."""
        return output.detach().sigmoid() - labels.to(output.dtype)

    def random_root(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Return sqrt(p (1 - p)) with random signs."""
        p = output.detach().sigmoid()
        return (p * (1 - p)).sqrt() * random_signs(p, generator)

    def root(self, output: Tensor) -> Iterator[Tensor]:
        """Yield sqrt(p (1 - p)) along every output."""
        p = output.detach().sigmoid()
        yield from _axes((p * (1 - p)).sqrt())


class Gaussian(Likelihood):
    """Labels with mean `output` [N, ...] and a fixed variance; L_n = |y_n - output_n|^2 / (2 variance) + constant.

    The mean squared error over K outputs, as `F.mse_loss` takes it, is the case variance = K / 2.
    """

    name = "gaussian"

    def __init__(self, variance: float = 1.0) -> None:
        if not variance > 0:
            raise XkfacError(f"the variance of a Gaussian likelihood must be positive, not {variance}")
        self.variance = variance

    @property
    def arguments(self) -> dict[str, float]:
        """The variance."""
        return {"variance": self.variance}

    def sample(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Draw labels shaped as `output`."""
        noise = torch.empty_like(output.detach()).normal_(generator=generator)
        return torch.add(output.detach(), noise, alpha=self.variance**0.5)

    def check_labels(self, labels: Tensor, shape: torch.Size) -> None:
        """Raise XkfacError for labels of another shape than the output."""
        _check_shape(labels, shape, shape, self.name)

    def nll(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return half the squared error over the variance [N]."""
        return (output - labels).square().reshape(output.shape[0], -1).sum(1) / (2 * self.variance)

    def score(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return (output - labels) / variance."""
        score: Tensor = (output.detach() - labels) / self.variance
        return score

    def random_root(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Return 1 / sqrt(variance) with random signs."""
        root: Tensor = random_signs(output.detach(), generator) / self.variance**0.5
        return root

    def root(self, output: Tensor) -> Iterator[Tensor]:
        """Yield 1 / sqrt(variance) along every output."""
        yield from _axes(torch.full_like(output.detach(), self.variance**-0.5))


def random_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return +1 and -1, each with probability one half, shaped as `like`."""
    signs: Tensor = torch.empty_like(like).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
    return signs


def _check_shape(labels: Tensor, expected: torch.Size, output: torch.Size, name: str) -> None:
    if labels.shape != expected:
        raise XkfacError(
            f"the true labels have shape {list(labels.shape)}; for outputs {list(output)} the {name} likelihood takes "
            f"{list(expected)}"
        )


def _check_range(labels: Tensor, most: int, what: str) -> None:
    wrong = labels[~((labels >= 0) & (labels <= most))]
    if wrong.numel():
        raise XkfacError(f"the true label {wrong[0].item()} is not {what}; correct it, or leave its example out")


def _axes(scale: Tensor) -> Iterator[Tensor]:
    """Yield `scale` [N, ...] restricted to one output after the other."""
    flat = scale.reshape(scale.shape[0], -1)
    for index in range(flat.shape[1]):
        root = torch.zeros_like(flat)
        root[:, index] = flat[:, index]
        yield root.reshape(scale.shape)


LIKELIHOODS: dict[str, type[Likelihood]] = {
    "categorical": Categorical,
    "bernoulli": Bernoulli,
    "gaussian": Gaussian,
}


def get_likelihood(likelihood: str | Likelihood) -> Likelihood:
    """Return a likelihood by its name, or the given one."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    if likelihood not in LIKELIHOODS:
        raise XkfacError(
            f"likelihood '{likelihood}' is not known; it is one of {', '.join(LIKELIHOODS)}, or an instance of a "
            "Likelihood of your own"
        )
    return LIKELIHOODS[likelihood]()
