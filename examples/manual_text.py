"""English text that every Python carries: the reference manual behind `help()`."""

import re
from pydoc_data.topics import topics

import numpy as np

BLOCK_BYTES = 4096


def train_and_held_out() -> tuple[np.ndarray, np.ndarray]:
    """The text as uint8, every tenth block held out.

    Sections of the manual quote one another, so each paragraph is taken only once: what
    is held out has not been seen in training. (Pythons differ a little in the text.)
    """
    paragraphs: dict[str, str] = {}
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            paragraphs.setdefault(" ".join(paragraph.split()), paragraph.strip("\n"))
    text = np.frombuffer("\n\n".join(paragraphs.values()).encode(), np.uint8)
    is_held_out = np.arange(len(text)) // BLOCK_BYTES % 10 == 9
    return text[~is_held_out], text[is_held_out]


def random_windows(
    text: np.ndarray, size: int, length: int, *, seed: int, step: int
) -> np.ndarray:
    """`[size, length]` int32. The step is all of the data position: no state."""
    start = np.random.default_rng((seed, step)).integers(len(text) - length, size=size)
    return text[start[:, None] + np.arange(length)].astype(np.int32)


def all_windows(text: np.ndarray, size: int, length: int) -> np.ndarray:
    """`[N, size, length]` int32 in order; each begins with the last byte before it.

    So each byte is predicted once. The text's last, incomplete batch is left out.
    """
    stride = length - 1
    count = (len(text) - 1) // (stride * size)
    start = np.arange(count * size).reshape(count, size, 1) * stride
    return text[start + np.arange(length)].astype(np.int32)


def bigram_loss(train: np.ndarray, windows: np.ndarray) -> float:
    """Nats per byte of the byte pairs of `train`, on all but each window's first."""
    counts = np.full((256, 256), 0.05)  # For pairs not seen; about the best value.
    np.add.at(counts, (train[:-1], train[1:]), 1)
    log_p = np.log(counts / counts.sum(axis=1, keepdims=True))
    return float(-log_p[windows[..., :-1], windows[..., 1:]].mean())
