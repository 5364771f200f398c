"""How much a run of the tests looks at. `make test` takes a share of what `make soak` takes, whose runs of pytest have
the hypothesis profile `thorough`."""

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

_SHARE = 3  # `make test` looks at one example of so many; every run draws others

T = TypeVar("T")


def thorough() -> bool:
    return settings.get_current_profile_name() == "thorough"


def cases(all_of_them: Sequence[T], some: Sequence[T]) -> Sequence[T]:
    """Parameters of a test: all in `make soak`, these few in other runs."""
    return all_of_them if thorough() else some


def examples(count: int) -> settings:
    """Settings of a test with so many drawn examples in `make soak`, and a share of them in other runs."""
    return settings(
        max_examples=count if thorough() else count // _SHARE,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture],
    )


def automaton(count: int, steps: int) -> settings:
    """The same of a state machine, whose examples have up to `steps` steps."""
    return settings(examples(count), stateful_step_count=steps)


def run_machine(machine: type[RuleBasedStateMachine], count: int, steps: int) -> None:
    """Run so many examples of a state machine, the same in each run. Raises the first error, which is not shrunk."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=count, stateful_step_count=steps, deadline=None, derandomize=True, database=None,
            phases=[Phase.generate], report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
