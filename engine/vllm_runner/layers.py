"""How vLLM divides a model's layers: among pipeline stages, and on a CPU into groups with pages of their own. Pure."""

# pyright: strict

from collections.abc import Sequence

from kvstore.window_groups import NO_GROUPS, WindowGroups


def of_stages(layers: int, stages: int) -> list[range]:
    """Return the layers of each stage. Those that are left over go to the last stages but one, each one more."""
    least, more = divmod(layers, stages)
    begin, result = 0, list[range]()
    for stage in range(stages):
        count = least + (stages - 1 - more <= stage < stages - 1)
        result.append(range(begin, begin + count))
        begin += count
    return result


def of_groups(windows: Sequence[int | None], page_size: int) -> tuple[int, WindowGroups]:
    """Return the layers of a group, and the groups with a window, of layers with these windows. A model has none unless
    all its windows are alike and stand beside at most as many layers without one."""
    main, windowed = windows.count(None), len(windows) - windows.count(None)
    widths = [window for window in set(windows) if window is not None]
    if len(widths) != 1 or not 0 < main <= windowed:
        return len(windows), NO_GROUPS
    layers = windowed if windowed < 1.5 * main else main
    return layers, WindowGroups(-(-windowed // layers), widths[0], page_size)
