"""Simulated times are those that anybody can add up by hand."""

import pytest

from tests.simulator.simulated import CALL, COPY, MESSAGE, PAGE, STEP, cluster, request, serve


@pytest.mark.parametrize("runs", [False, True])
def test_one_worker_alone(runs: bool) -> None:
    measures = serve(cluster("1D", runs=runs), [request(0.0, prompt=100, output=11)])
    row = {name: values[0] for name, values in measures.table().items()}
    steps = [STEP.fixed + STEP.row + known * STEP.context for known in range(101, 111)]
    assert row["ttft"] == pytest.approx(2 * MESSAGE + STEP.fixed + 100 * STEP.token)
    assert row["tpot"] == pytest.approx(sum(steps) / 10)
    assert row["tbt"] == pytest.approx(max(steps), rel=0.01), "one gap in ten is the longest"
    assert (row["output"], row["cached"], row["attempts"], row["finished"]) == (11, 0, 1, 1)


def test_a_hand_off() -> None:
    measures = serve(cluster("1P+1D", per_node=2), [request(0.0, prompt=2 * PAGE + 1, output=1)])
    (ttft,) = measures.table()["ttft"]
    messages = 3 * MESSAGE  # Decode, Accepted, Prefill
    looked = 2 * CALL  # the store has nothing
    computed = STEP.fixed + 2 * PAGE * STEP.token
    shipped = 2 * COPY + 2 * CALL + 2 * COPY + 2 * CALL  # out, sealed and granted, in, released
    first_token = STEP.fixed + STEP.row + (2 * PAGE + 1) * STEP.context
    assert ttft == pytest.approx(messages + looked + computed + shipped + first_token + MESSAGE)


def test_what_is_cached_is_not_computed() -> None:
    same = [request(at, prompt=3 * PAGE + 1, output=2) for at in (0.0, 5.0)]
    measures = serve(cluster("1P+1D", per_node=2), same)
    table = measures.table()
    assert list(table["cached"]) == [0, 3 * PAGE]
    assert table["ttft"][1] == pytest.approx(2 * MESSAGE + STEP.fixed + STEP.row + (3 * PAGE + 1) * STEP.context)


def test_a_run_of_steps_ends_at_an_arrival() -> None:
    long, late = request(0.0, 100, 200), request(0.5, 100, 2, blocks=(7,))
    together, one_by_one = (serve(cluster("1D", runs=runs), [long, late]).table() for runs in (True, False))
    # Gaps of a run are told as equal; its worker learns nearly the same from them, and may cut a prompt elsewhere.
    for name in ("ttft", "tpot", "tbt", "seconds"):
        assert together[name] == pytest.approx(one_by_one[name], rel=1e-2), name


def test_steps_in_a_row_are_as_steps_one_by_one_in_a_busy_cluster() -> None:
    load = [request(n / 7, 300 + 97 * n % 1_500, 20 + 31 * n % 90, (n, n + 1, n + 2, n + 3)) for n in range(40)]
    together, one_by_one = (serve(cluster("1P+2D", runs=runs), load).table() for runs in (True, False))
    for name in ("ttft", "tpot", "tbt"):
        assert together[name].mean() == pytest.approx(one_by_one[name].mean(), rel=0.05), name
