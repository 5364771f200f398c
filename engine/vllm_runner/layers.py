"""How vLLM divides a model's layers: among pipeline stages, and on a CPU into groups with pages of their own. Pure."""

# pyright: strict

from collections.abc import Mapping, Sequence
from typing import Any

from engine.models.config_file import ConfigFile
from engine.vllm_runner.pages import attending_layers, group_layers, has_states, states_only
from kvstore.window_groups import NO_GROUPS, WindowGroups

STATE_WINDOW = 2
"""A recurrent state as a window: a token looks at the state after the one before it."""


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


def of_config(config: Mapping[str, Any], page_size: int, more: int = 0) -> tuple[int, WindowGroups]:
    """Return the same from a model's config, with so many `more` layers without a window. Raises ModelError for sizes
    that are none."""
    layers = ConfigFile(config).count("num_hidden_layers")
    if not has_states(config):
        window, kinds = config.get("sliding_window"), config.get("layer_types") or ["full_attention"] * layers
        windows = [window if kind == "sliding_attention" else None for kind in kinds]
        return of_groups([*windows, *[None] * more], page_size)
    main = group_layers(layers) if states_only(config) else attending_layers(config)
    return main, WindowGroups(layers // max(1, main) - 1, STATE_WINDOW, page_size, states=True)
