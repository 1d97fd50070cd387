"""The spectrogram of a long sound, computed where whisper looks at it: all of it takes 9 GB for ten hours."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from whisper import audio
from whisper.audio import HOP_LENGTH, N_FFT

_AT_ONCE = 6000  # frames, a minute


class Spectrogram:
    """What `whisper.log_mel_spectrogram` returns, as far as `whisper.transcribe` uses it: a shape, and frames.

    The numbers are the same but for rounding: no more than 8 below the largest of the whole sound.
    """

    def __init__(self, samples: np.ndarray[Any, Any], bands: int, padding: int) -> None:
        """`samples`: float32 `[samples]`, at 16 kHz; `padding`: zeros behind, 200 or more."""
        self._samples, self._bands = samples, bands
        self.shape = bands, (len(samples) + padding) // HOP_LENGTH
        ends = range(0, len(samples) // HOP_LENGTH + 2, _AT_ONCE)
        self._largest = max(self._logarithms(start, start + _AT_ONCE).max() for start in ends)

    def __getitem__(self, place: tuple[slice, slice]) -> Tensor:
        """Frames `[:, start:end]`, float32 `[bands, end - start]`."""
        _, frames = place
        start, end, _ = frames.indices(self.shape[1])
        if start >= end:
            return torch.zeros(self._bands, 0, device="cpu")
        found = torch.maximum(self._logarithms(start, end), self._largest - 8.0)
        return (found + 4.0) / 4.0

    def take(self, indices: range, axis: int) -> Tensor:
        """The first frames: what whisper finds out the language from."""
        return self[:, indices.start : indices.stop]

    def _logarithms(self, start: int, end: int) -> Tensor:
        """Logarithms of the bands' power in these frames, `[bands, end - start]`."""
        half = N_FFT // 2
        first, last = start * HOP_LENGTH - half, (end - 1) * HOP_LENGTH + half
        read = self._samples[max(first, 0) : max(last, half + 1)]
        part = torch.from_numpy(np.array(read, np.float32))
        if first < 0:  # the sound begins with its own reflection
            part = torch.cat([part[1 : 1 - first].flip(0), part])[: last - first]
        part = torch.nn.functional.pad(part, (0, last - first - len(part)))
        window = torch.hann_window(N_FFT, device=part.device)
        power = torch.stft(part, N_FFT, HOP_LENGTH, window=window, center=False, return_complex=True).abs() ** 2
        return torch.clamp(audio.mel_filters(part.device, self._bands) @ power, min=1e-10).log10()
