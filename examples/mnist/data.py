"""Handwritten digits as tensors: scikit-learn's, which need no network, or MNIST's own files."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's training pixels, scaled to 0..1
HELD_OUT = 1000  # images that test where a folder has the t10k files alone
SPLIT_SEED = 0  # which images test never depends on --seed


@dataclass(frozen=True)
class Digits:
    """Images to train on and images to test on, all on the CPU.

    images  float32 [N, 1, 28, 28], normalised as MNIST's usually are
    labels  int64 [N], each 0..9
    """

    name: str
    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load(folder: Path | None) -> Digits:
    """MNIST from the IDX files in `folder`; scikit-learn's digits where there is no folder."""
    return scikit_learn_digits() if folder is None else mnist(Path(folder))


def scikit_learn_digits() -> Digits:
    """1797 real digits of 8x8 pixels, enlarged to 28x28; a fifth of them test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit(
            "The default data are scikit-learn's handwritten digits, and scikit-learn is not "
            "installed. Install it with: pip install 'ltc[examples]', or pass --data-dir with a "
            "folder of MNIST's IDX files."
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    small = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) / 16  # the set counts to 16
    images = F.interpolate(small, size=(28, 28), mode="bilinear")
    labels = torch.from_numpy(labels).long()
    return split("scikit-learn digits", normalised(images), labels, held_out=len(labels) // 5)


def mnist(folder: Path) -> Digits:
    """MNIST from its four files, each gzipped or not.

    Where only the two t10k files are there, all but HELD_OUT of their images train.
    Raises FileNotFoundError naming the missing files, ValueError naming a file that is not what
    its name says.
    """
    test_images, test_labels = labelled_images(folder, "t10k")
    if find(folder, "train-images-idx3-ubyte") or find(folder, "train-labels-idx1-ubyte"):
        train_images, train_labels = labelled_images(folder, "train")
        return Digits("MNIST", train_images, train_labels, test_images, test_labels)
    if len(test_labels) <= HELD_OUT:
        raise ValueError(
            f"{folder} has t10k files of {len(test_labels)} images and no training files: "
            f"{HELD_OUT} are held out for testing, so none would be left to train on. "
            f"Add the train files."
        )
    return split("MNIST t10k", test_images, test_labels, HELD_OUT)


def split(name: str, images: torch.Tensor, labels: torch.Tensor, held_out: int) -> Digits:
    """The digits with `held_out` of them, always the same ones, kept for testing."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    test, train = order[:held_out], order[held_out:]
    return Digits(name, images[train], labels[train], images[test], labels[test])


def labelled_images(folder: Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The images and labels of one part ("train" or "t10k"), checked against each other."""
    image_file = require(folder, f"{part}-images-idx3-ubyte")
    label_file = require(folder, f"{part}-labels-idx1-ubyte")
    images, labels = read_idx(image_file, dimensions=3), read_idx(label_file, dimensions=1)
    if images.shape[1:] != (28, 28):
        raise ValueError(
            f"{image_file} holds images of {list(images.shape[1:])} pixels, not [28, 28]. "
            f"Is it a file of MNIST?"
        )
    if len(images) != len(labels):
        raise ValueError(
            f"{image_file} holds {len(images)} images and {label_file} {len(labels)} labels: "
            f"they do not belong together. Download both again."
        )
    if len(labels) and labels.max() > 9:
        raise ValueError(f"{label_file} holds the label {int(labels.max())}; digits go to 9.")
    return normalised(images.float().unsqueeze(1) / 255), labels.long()


def normalised(images: torch.Tensor) -> torch.Tensor:
    """The images moved from 0..1 to about mean 0 and deviation 1."""
    return (images - MEAN) / DEVIATION


def find(folder: Path, name: str) -> Path | None:
    """The file of that name, or of that name with .gz; None where neither is there."""
    candidates = (folder / name, folder / f"{name}.gz")
    return next((path for path in candidates if path.is_file()), None)


def require(folder: Path, name: str) -> Path:
    """The file of that name; raises FileNotFoundError saying what was looked for."""
    path = find(folder, name)
    if path is None:
        raise FileNotFoundError(
            f"{folder} has neither {name} nor {name}.gz. --data-dir takes a folder with MNIST's "
            f"four IDX files, or with the two t10k files."
        )
    return path


def read_idx(path: Path, dimensions: int) -> torch.Tensor:
    """The unsigned bytes of an IDX file, in its own shape.

    The format: two zero bytes, 8 for unsigned bytes, the number of dimensions, each size as a
    big-endian 32-bit number, then the bytes (http://yann.lecun.com/exdb/mnist, "file formats").
    """
    content = content_of(path)
    header = 4 + 4 * dimensions
    expected = bytes((0, 0, 8, dimensions))
    if content[:4] != expected:
        raise ValueError(
            f"{path} starts with bytes {content[:4].hex(' ')}, not {expected.hex(' ')}: it is no "
            f"IDX file of {dimensions}-dimensional unsigned bytes."
        )
    if len(content) < header:
        raise ValueError(f"{path} ends inside its header, after {len(content)} bytes.")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    if len(content) - header != math.prod(shape):
        raise ValueError(
            f"{path} promises {math.prod(shape)} bytes of shape {list(shape)} and holds "
            f"{len(content) - header}. Download it again."
        )
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8)  # bytearray: writable
    return values[header:].reshape(shape)


def content_of(path: Path) -> bytes:
    """The file's bytes, unzipped where it is gzipped, whatever its name."""
    content = path.read_bytes()
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is gzipped and damaged ({error}). Download it again.") from error
