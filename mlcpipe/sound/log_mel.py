"""Whisper's features of sound in numpy: the logarithm of energies in bands of the mel scale (Radford et al. 2022).

The numbers are those of transformers' `WhisperFeatureExtractor` to 1e-5.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
RATE_HZ = 16_000
FFT = 400  # samples of a window, 25 ms
HOP = 160  # samples of a frame, 10 ms
_BINS = FFT // 2 + 1
_AT_ONCE = 6000  # frames, a minute: spectra of more take much memory
_FLOOR, _RANGE = 1e-10, 8.0  # the least energy; decades below the loudest


@functools.cache
def mel_filters(mels: int) -> NDArray[np.float64]:
    """Triangles f64[201, mels] from 0 to 8 kHz on Slaney's scale, each of the same area."""
    edges_hz = _slaney_hz(np.linspace(0.0, _slaney_mel(RATE_HZ / 2), mels + 2))
    bins_hz = np.linspace(0.0, RATE_HZ / 2, _BINS)
    widths = np.diff(edges_hz)
    slopes = edges_hz[None, :] - bins_hz[:, None]
    triangles = np.maximum(0.0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    return np.asarray(triangles * (2.0 / (edges_hz[2:] - edges_hz[:-2])), np.float64)


def log_mel(samples: Floats, mels: int) -> Floats:
    """Features f32[n, mels] of sound f32[n * 160 + rest] at 16 kHz, from -1 to 1: frame i is around sample 160 i.

    log10 of the energies, at most 8 below the largest of the whole sound, then (x + 4) / 4.
    """
    count = len(samples) // HOP
    if not count:
        return np.zeros((0, mels), np.float32)
    padded = _mirrored(samples)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FFT) / FFT)
    filters = mel_filters(mels)
    frames = np.lib.stride_tricks.sliding_window_view(padded, FFT)[::HOP]
    made = np.empty((count, mels), np.float32)
    for begin in range(0, count, _AT_ONCE):
        spectrum = np.fft.rfft(frames[begin : min(begin + _AT_ONCE, count)] * window)
        energies = (spectrum.real**2 + spectrum.imag**2) @ filters
        made[begin : begin + len(energies)] = np.log10(np.maximum(energies, _FLOOR))
    np.maximum(made, made.max() - np.float32(_RANGE), out=made)
    made += np.float32(4)
    made /= np.float32(4)
    return made


def _mirrored(samples: Floats) -> Floats:
    """The samples with half a window of their mirror image at both ends."""
    half = FFT // 2
    while len(samples) <= half:  # too short for a whole mirror: numpy would mirror several times
        samples = np.concatenate((samples, np.zeros(half, np.float32)))
    return np.pad(samples, half, mode="reflect")


def _slaney_mel(hz: float) -> float:
    """Linear below 1 kHz, logarithmic above (Slaney 1998, Auditory Toolbox)."""
    return 3 * hz / 200 if hz < 1000 else float(15 + 27 * np.log(hz / 1000) / np.log(6.4))


def _slaney_hz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    """The inverse of `_slaney_mel`."""
    return np.where(mel < 15, 200 * mel / 3, 1000 * np.exp(np.log(6.4) * (mel - 15) / 27))
