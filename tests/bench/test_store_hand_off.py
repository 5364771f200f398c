"""The store's benchmark runs, and its figures add up. No figure is judged here: the machine may be busy."""

from bench.store import hand_off


def test_a_hand_off_is_measured_beside_its_limit() -> None:
    results = hand_off.results("hand_off", hand_off.hand_offs(16 * 2**10, 2), 16 * 2**10)
    assert [result.case for result in results] == ["hand-off sealing, 16 KiB pages", "hand-off verifying, 16 KiB pages"]
    assert all(result.value > 0 and result.ratio and result.limit for result in results)


def test_pages_of_int8_are_handed_over_beside_bfloat16() -> None:
    result = hand_off.int8_beside_bfloat16(1)
    assert result.value > 0
    assert result.ratio
    assert result.case == "hand-off verifying, 8,192 tokens in int8 beside bfloat16"


def test_round_trips_are_told_by_call() -> None:
    times = hand_off.round_trips(20)
    assert set(times) == {"Reserve", "Seal", "Acquire", "Release"}
    assert all(len(each) == 20 and min(each) > 0 for each in times.values())
