"""Small trees of pictures that a network can learn to tell apart, as folders and as zip files."""

import zipfile

import torch
from PIL import Image

from xkfac.experiments import images

CLASSES = ("ant", "bee", "cat")


def picture(label, number, size=(12, 12), seed=0):
    """Bytes [height, width, 3]: a colour for the class, with noise of its own for each picture."""
    width, height = size
    generator = torch.Generator().manual_seed(1_000_003 * seed + 1009 * label + number)
    colour = torch.tensor([(37 * label) % 128, (91 * label + 50) % 128, (11 * label + 90) % 128])
    return (colour + torch.randint(128, (height, width, 3), generator=generator)).to(torch.uint8)


def save(path, pixels):
    """Write bytes [height, width, 3] as a picture; the ending of the path says of which kind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width, _ = pixels.shape
    Image.frombytes("RGB", (width, height), bytes(pixels.flatten().tolist())).save(path)


def make_tree(folder, classes=CLASSES, train=6, test=2, size=(12, 12), seed=0, ending=".png", test_name="test"):
    """Write a tree of `train` and `test` pictures a class, numbers or one number for each class; return its path."""
    for part, counts in (("train", train), (test_name, test)):
        for label, name in enumerate(classes):
            for number in range(counts if isinstance(counts, int) else counts[label]):
                at = number if part == "train" else 500 + number
                save(folder / part / name / f"{number:04d}{ending}", picture(label, at, size, seed))
    return folder


def zipped(folder, path, top=""):
    """Write all that is in a folder to a zip file, below the folders `top` in there; return its path."""
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, f"{top}{file.relative_to(folder)}")
    return path


def load(path, **settings):
    """Load a tree of this module."""
    return images.load_pictures(path, **{"pixels": 12, "resize": "squash", "validation": 0.25, **settings})


def all_of(parts):
    return parts.train, parts.validation, parts.test


def same(a, b):
    """Whether two loads gave the same."""
    pairs = zip(all_of(a), all_of(b), strict=True)
    return a.classes == b.classes and all(torch.equal(p.x, q.x) and torch.equal(p.y, q.y) for p, q in pairs)


def decodings(monkeypatch):
    """Return a list to which every picture that is decoded from now on is added."""
    seen = []
    whole = images.decoded
    monkeypatch.setattr(images, "decoded", lambda content, *rest: (seen.append(content), whole(content, *rest))[1])
    return seen
