"""Which plain steps need no decision, and so may be taken at once."""

from __future__ import annotations

from duo_ray.core.probing import Probing, Purse


def test_nothing_rests_before_a_decision() -> None:
    assert Probing(Purse()).ahead == 0


def test_while_the_next_probe_is_not_paid_steps_rest_however_many_are_taken_at_once() -> None:
    probing = Probing(Purse())
    assert probing.due()
    assert not probing.pay(1.0, longest_gap=256)
    calls = 0
    while probing.rests():
        probing.passed(6)
        calls += 1
    assert calls == 4


def test_a_probe_that_is_paid_for_is_not_passed_by() -> None:
    probing = Probing(Purse())
    for _ in range(3):
        while not probing.due():
            probing.passed(probing.ahead)  # all that may be taken at once
            assert probing._wait >= 1
        assert probing.pay(0.0, longest_gap=256)


def test_long_waits_are_rested_in_few_calls() -> None:
    probing = Probing(Purse())
    for _ in range(7):
        while not probing.due():
            pass
        probing.pay(0.0, longest_gap=256)
    calls, steps = 0, 1
    while not probing.due():
        while probing.rests():
            further = min(9, probing.ahead)
            probing.passed(further)
            steps += 1 + further
            calls += 1
        steps += 1
    assert steps == 128
    assert calls <= 16


def test_saving_up_for_it_ends_the_rest() -> None:
    probing = Probing(Purse())
    probing.due()
    probing.pay(1.0, longest_gap=256)
    assert probing.rests()
    probing.save(1.0, most=0.0)
    assert not probing.rests()
