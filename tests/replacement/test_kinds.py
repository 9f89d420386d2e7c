"""A choice is what a person may write in a plan, and nothing else."""

from __future__ import annotations

import copy

import pytest

from headwise.errors import InputError
from headwise.replacement import KINDS, SOFTMAX, Choice


@pytest.mark.parametrize("kind", KINDS)
def test_written_and_read_again(kind: str) -> None:
    choice = Choice(kind)
    assert Choice.from_dict(choice.to_dict()) == choice == copy.deepcopy(choice)
    assert hash(Choice.from_dict(choice.to_dict())) == hash(choice)


def test_defaults_are_filled_in() -> None:
    assert Choice("window").to_dict() == {"kind": "window", "width": 65, "leading": 0}
    assert Choice("window", {"leading": 0, "width": 65}) == Choice("window")
    assert Choice("window", {"leading": 1}) != Choice("window")
    assert len({Choice("window", {"width": 9.0}), Choice("window", {"width": 9})}) == 1
    assert str(Choice("window", {"width": 9})) == "window width=9 leading=0"


@pytest.mark.parametrize(
    "given, sentence",
    [
        ({"kind": "wndow"}, "unknown kind of operator 'wndow'; the registered kinds are softmax, uniform,"),
        ({"kind": "window", "size": 3}, "window: unknown option 'size'; its options are width, leading"),
        ({"kind": "softmax", "width": 3}, "softmax: unknown option 'width'; its options are none"),
        ({"kind": "window", "width": 0}, "window: width must be at least 1, but is 0"),
        ({"kind": "window", "width": 2.5}, "window: width must be a whole number, but is 2.5"),
        ({"kind": "window", "width": "wide"}, "window: width must be a number, but is 'wide'"),
        ({"kind": "window", "width": True}, "window: width must be a number, but is True"),
        ({"kind": "efficient", "sharpness": float("nan")}, "sharpness must be a number, but is nan"),
        ({"width": 3}, 'an operator is written {"kind": "window", "width": 65}, but the plan has'),
        ("window", "but the plan has 'window'"),
    ],
)
def test_what_cannot_be_used_is_a_sentence(given, sentence: str) -> None:
    with pytest.raises(InputError) as error:
        Choice.from_dict(given)
    assert sentence in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_costs_are_those_of_one_head(kind: str) -> None:
    choice = Choice(kind)
    short, long = (choice.cost(n, 64, False).multiply_adds for n in (512, 4096))
    assert long <= SOFTMAX.cost(4096, 64, False).multiply_adds
    if kind not in ("softmax", "offset"):
        assert 0 < short < long < 16 * short  # not quadratic
