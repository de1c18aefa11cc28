"""The features of sound against transformers' own code in numpy."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("transformers", reason="the references are transformers' features")

from mlcpipe.sound.log_mel import log_mel


@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("count", [201, 500, 48_077, 64 * 16_000 + 5], ids=["short", "three", "three_s", "minute"])
def test_features_are_those_of_transformers(mels: int, count: int) -> None:
    from transformers import WhisperFeatureExtractor

    rng, t = np.random.default_rng(count), np.arange(count) / 16_000
    samples = (0.3 * np.sin(2 * np.pi * (200 + 300 * t) * t) + 0.01 * rng.standard_normal(count)).astype(np.float32)
    expected = WhisperFeatureExtractor(feature_size=mels)._np_extract_fbank_features(samples[None], "cpu")[0].T
    found = log_mel(samples, mels)
    assert found.shape == (count // 160, mels) and found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


def test_silence_and_a_sound_without_a_frame() -> None:
    assert log_mel(np.zeros(159, np.float32), 80).shape == (0, 80)
    np.testing.assert_array_equal(log_mel(np.zeros(160, np.float32), 80), np.full((1, 80), -1.5, np.float32))
