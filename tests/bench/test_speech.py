"""benchmarks/speech.py: counting word errors, and a small run on real speech."""

from __future__ import annotations

import shutil

import pytest
from benchmarks import speech


@pytest.mark.parametrize(
    ("heard", "said", "errors"),
    [("the whale", "the whale", 0), ("a whale rose", "the whale", 2), ("", "the whale", 2), ("the the", "the", 1)],
)
def test_word_errors_are_the_edit_distance(heard: str, said: str, errors: int) -> None:
    assert speech.word_errors(speech.words(heard), speech.words(said)) == errors


def test_sentences_are_drawn_once_each_and_are_speakable() -> None:
    drawn = speech.sentences(40)
    assert len(set(drawn)) == 40
    assert all(7 <= len(speech.words(sentence)) <= 16 for sentence in drawn)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")
def test_a_wide_window_hears_what_exact_attention_hears_and_the_mean_does_not() -> None:
    recogniser = speech.Recogniser()
    texts = speech.sentences(5)
    fitting = speech.speak(recogniser, texts[:1], speech.FIT_VOICES)
    test = speech.speak(recogniser, texts[1:], speech.TEST_VOICES)
    rows = {row.operator: row for row in speech.measure(recogniser, fitting, test, steps=2)}
    assert rows["exact"].features < 1e-5
    assert rows["exact"].word_error_rate < 0.3  # synthetic voices are hard for the smallest model
    assert rows["window 257, 1 leading"].word_error_rate < 0.5
    assert rows["uniform"].word_error_rate > 0.7
    assert rows["window 257, 1 leading"].features < rows["window 65, 1 leading"].features < rows["uniform"].features
