"""Images to inputs of a network, on the device and in batches: random crops and mirroring, normalised.

All randomness is drawn beforehand on the CPU, so that a training step that augments can be replayed as a CUDA graph.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from xkfac.experiments.data.digits import Batch, Part, stream

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
TRIES = 10


@dataclass(frozen=True)
class Augmentation:
    """How images [N, 3, S, S] of bytes become inputs [N, 3, pixels, pixels].

    scale: the range of a random crop's area, as a share of the image's; (1, 1) means no crop. flip: mirror every
    other image, at random.
    """

    pixels: int
    scale: tuple[float, ...] = (0.08, 1.0)
    flip: bool = True

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return draws [*shape, 5], float32 on the CPU: centre x and y, width and height of a crop, -1 to mirror or 1.

        Lengths are relative to the image's side. The distribution is that of torchvision's RandomResizedCrop on a
        square image: area and log ratio are uniform, the first of ten tries that fits is taken, else the whole
        image. Crops are not rounded to whole pixels of the image.
        """

        def uniform(*size: int, least: float = 0.0, greatest: float = 1.0) -> Tensor:
            return torch.rand(*size, generator=generator, device="cpu").mul_(greatest - least).add_(least)

        area = uniform(TRIES, *shape, least=self.scale[0], greatest=self.scale[1])
        ratio = uniform(TRIES, *shape, least=math.log(3 / 4), greatest=math.log(4 / 3)).exp_()
        sizes = torch.stack(((area * ratio).sqrt(), (area / ratio).sqrt()), -1)
        fits = (sizes <= 1).all(-1)
        first = fits.to(torch.uint8).argmax(0)[None, ..., None].expand(1, *shape, 2)
        found = fits.any(0)[..., None]
        size = torch.where(found, sizes.gather(0, first)[0], 1.0)
        centre = torch.where(found, size / 2 + uniform(*shape, 2) * (1 - size), 0.5)
        mirror = uniform(*shape, 1).lt(0.5) if self.flip else torch.zeros(*shape, 1, dtype=torch.bool, device="cpu")
        return torch.cat((centre, size, 1.0 - 2.0 * mirror), -1)

    def augmented(self, x: Tensor, draws: Tensor) -> Tensor:
        """Return images x [N, 3, S, S], uint8, cropped and mirrored by `draws` [N, 5], and normalised.

        The draws are on the device of the images. The result [N, 3, pixels, pixels] is float32 in the memory format
        channels_last. A crop is resized by one bilinear resampling that takes nothing from beyond its border, as
        torchvision's `resized_crop(antialias=False)` does.
        """
        # Coordinates are those of grid_sample: the image goes from -1 to 1, so that half a pixel is 1 / S.
        centre, size, mirror = draws[:, :2], draws[:, 2:4], draws[:, 4:]
        steps = torch.linspace(1 / self.pixels - 1, 1 - 1 / self.pixels, self.pixels, device=x.device)
        border = (size - 1 / x.shape[-1]).clamp(min=0)[..., None]
        offset = torch.clamp(size[..., None] * steps, -border, border)
        middle = 2 * centre - 1
        across = torch.addcmul(middle[:, :1], offset[:, 0], mirror)
        down = middle[:, 1:] + offset[:, 1]
        shape = (len(x), self.pixels, self.pixels)
        grid = torch.stack((across[:, None, :].expand(shape), down[:, :, None].expand(shape)), -1)
        return self._normalised(F.grid_sample(x.float(), grid, padding_mode="border", align_corners=False))

    def plain(self, x: Tensor) -> Tensor:
        """Return the centre of images x [N, 3, S, S], uint8, for evaluation: float32 [N, 3, pixels, pixels].

        Normalised, in the memory format channels_last.
        """
        start = round((x.shape[-1] - self.pixels) / 2)
        return self._normalised(x[..., start : start + self.pixels, start : start + self.pixels])

    def _normalised(self, x: Tensor) -> Tensor:
        """Return images x [N, 3, p, p] of values up to 255 as float32, normalised as for ImageNet."""
        result = torch.empty(x.shape, device=x.device, memory_format=torch.channels_last)
        for channel, (mean, std) in enumerate(zip(IMAGENET_MEAN, IMAGENET_STD, strict=True)):
            # A number on the CPU is an argument of the kernel: nothing is copied to the device, which no graph allows.
            shift = torch.tensor(-mean / std, device="cpu")
            torch.add(shift, x[:, channel], alpha=1 / (255 * std), out=result[:, channel])
        return result


@dataclass(eq=False)
class ImageExamples:
    """Images to train on, augmented by draws that `redraw` makes for each of them, or as evaluation sees them."""

    images: Part
    augmentation: Augmentation
    augmented: bool

    def __post_init__(self) -> None:
        self.device = self.images.x.device
        self._draws = torch.zeros(len(self.images) if self.augmented else 0, 5, device=self.device)

    def __len__(self) -> int:
        return len(self.images)

    def redraw(self, *key: int) -> None:
        """Draw the crop and the side of each image anew, in place, so that a captured graph finds them."""
        if self.augmented:
            self._draws.copy_(self.augmentation.draw((len(self),), stream("augmentation", *key)))

    def take(self, index: Tensor) -> Batch:
        """Return the images `index` [N] as inputs [N, 3, pixels, pixels] and labels [N]."""
        x, y = self.images.x.index_select(0, index), self.images.y.index_select(0, index)
        if self.augmented:
            return self.augmentation.augmented(x, self._draws.index_select(0, index)), y
        return self.augmentation.plain(x), y

    def chunks(self) -> Iterable[Batch]:
        """Yield all of them in their order."""
        for index in torch.split(torch.arange(len(self), device=self.device), 256):
            yield self.take(index)
