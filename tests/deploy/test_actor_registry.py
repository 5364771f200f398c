"""What nodes are called."""

from deploy.control_plane.actor_registry import name_nodes


def test_a_node_is_called_by_its_hostname_whenever_ray_is_started():
    assert name_nodes({"id1": "dgx-1", "id2": "dgx-2"}, {}) == {"id1": "dgx-1", "id2": "dgx-2"}


def test_no_two_live_nodes_share_a_name():
    assert name_nodes({"a": "h", "b": "h", "c": "h"}, {}) == {"a": "h", "b": "h-2", "c": "h-3"}
    assert name_nodes({"b": "h", "d": "h"}, {"a": "h", "b": "h-2"}) == {"d": "h"}


def test_a_node_keeps_its_name():
    assert name_nodes({"b": "h"}, {"a": "h", "b": "h-2"}) == {}
