"""Kinds of tokens, means over groups, and how sure they are."""

from __future__ import annotations

import math

import pytest

from duo_ray.diagnosis.positions import Estimate, Kind, Position, by_kind, by_place, by_position, group, kind_of, spread


@pytest.mark.parametrize(
    ("piece", "follows_word", "kind"),
    [
        (" the", True, Kind.WORD),
        ("The", False, Kind.WORD),
        ("ing", True, Kind.INSIDE),
        (" don't", True, Kind.WORD),
        ("城", True, Kind.INSIDE),
        (" 42", True, Kind.NUMBER),
        ("9%", True, Kind.NUMBER),
        ("3rd", False, Kind.WORD),
        (".", True, Kind.PUNCTUATION),
        (',"', True, Kind.PUNCTUATION),
        ("():", True, Kind.CODE),
        ("_name", True, Kind.CODE),
        (" +=", True, Kind.CODE),
        ("\n\n", True, Kind.SPACE),
        ("    ", False, Kind.SPACE),
    ],
)
def test_kinds_by_their_text(piece, follows_word, kind):
    assert kind_of(piece.encode(), special=False, follows_word=follows_word) is kind


def test_half_a_character_is_inside_a_word_and_a_special_token_is_special():
    assert kind_of(b"\xe5\x9f", special=False, follows_word=True) is Kind.INSIDE
    assert kind_of(b"", special=True, follows_word=True) is Kind.SPECIAL


def position(place=0, kind=Kind.WORD, divergence=0.0, agrees=True):
    return Position(place, kind, sampled=False, divergence=divergence, variation=divergence / 2, agrees=agrees,
                    overlap=0.5, confidence=0.5)  # fmt: skip


def test_a_group_holds_means():
    found = group("all", [position(divergence=1.0), position(divergence=3.0, agrees=False)])
    assert (found.count, found.divergence, found.variation, found.agreement, found.overlap) == (2, 2.0, 1.0, 0.5, 0.5)


def test_kinds_come_in_their_order_and_only_those_there_are():
    found = by_kind([position(kind=Kind.SPECIAL), position(kind=Kind.NUMBER), position(kind=Kind.NUMBER)])
    assert [(each.name, each.count) for each in found] == [("number", 2), ("special", 1)]


def test_places_are_grouped_in_stretches_that_double():
    found = by_place([position(place) for place in (0, 3, 4, 7, 8, 15, 16)])
    assert [(each.name, each.count) for each in found] == [("1-4", 2), ("5-8", 2), ("9-16", 2), ("17-32", 1)]


def test_every_position_is_told_by_its_number():
    found = by_position([position(0, divergence=1.0), position(2, divergence=2.0), position(2, divergence=4.0)])
    assert [(each.name, each.count, each.divergence) for each in found] == [("1", 1, 1.0), ("3", 2, 3.0)]


def test_a_share_knows_its_standard_error():
    found = Estimate.of_share(32, 98)
    assert found is not None
    # Smoothed: 33 of 100.
    assert (found.value, found.error) == (32 / 98, pytest.approx(math.sqrt(0.33 * 0.67 / 98)))
    assert Estimate.of_share(0, 0) is None
    assert Estimate.of_share(10, 10).error > 0.0


def test_a_mean_knows_its_standard_error():
    found = Estimate.of_mean([0.0, 1.0, 0.0, 1.0])
    assert found == Estimate(0.5, 0.25, 4)
    assert Estimate.of_mean([]) is None


def test_estimates_differ_only_beyond_their_errors():
    assert Estimate(0.5, 0.03, 9).differs_from(Estimate(0.66, 0.04, 9))  # 0.16 > 3 x 0.05
    assert not Estimate(0.5, 0.03, 9).differs_from(Estimate(0.64, 0.04, 9))


def test_spread_is_that_of_the_beta_distribution_with_the_same_mean_and_variance():
    assert spread([0.2, 0.8]) == pytest.approx(0.25 / 0.09 - 1.0)
    assert spread([0.0, 1.0]) == 0.1  # as decided as can be
    assert spread([0.5, 0.5]) == 20.0
