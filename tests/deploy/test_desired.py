"""Which processes on which node."""

from hypothesis import given
from hypothesis import strategies as st

from baton.config import Config, RouterConfig
from deploy.placement.desired import ClusterScale, ProcessSpec, plan, scale_of

OPEN = Config(router=RouterConfig(host="0.0.0.0"))


def names(specs: list[ProcessSpec]) -> list[str]:
    return [spec.name for spec in specs]


def test_the_default_cluster():
    assert names(plan(Config(), scale_of(Config()), ["here"])) == ["router", "store-0", "prefill-0", "decode-0"]


def test_a_scale_changes_for_one_model() -> None:
    scale = ClusterScale(1, 2, ((0, 3), (4, 5)))
    assert scale.changed(1, None, 7) == ClusterScale(1, 2, ((0, 7), (4, 5)))
    assert scale.changed(0, 0, None) == ClusterScale(0, 2, ((0, 3), (4, 5)))


def test_colocated_has_no_prefill_worker():
    assert names(plan(Config(), ClusterScale(0, 2), ["here"])) == ["router", "store-0", "decode-0", "decode-1"]


def test_a_router_on_loopback_keeps_everything_on_its_node():
    assert {spec.node for spec in plan(Config(), ClusterScale(2, 2), ["a", "b", "c"])} == {"a"}


def test_prefill_goes_on_where_decode_stopped_and_each_node_in_use_has_a_store():
    specs = plan(OPEN, ClusterScale(1, 1), ["a", "b"])
    assert [(s.name, s.node) for s in specs] == [
        ("router", "a"),
        ("store-0", "a"),
        ("store-1", "b"),
        ("prefill-0", "b"),
        ("decode-0", "a"),
    ]


def test_workers_go_round_the_nodes():
    nodes = {spec.name: spec.node for spec in plan(OPEN, ClusterScale(2, 3), ["a", "b", "c", "d"])}
    assert [nodes[f"decode-{index}"] for index in range(3)] == ["a", "b", "c"]
    assert [nodes[f"prefill-{index}"] for index in range(2)] == ["d", "a"]


def test_names_of_one_machine_need_no_open_router():
    specs = plan(Config(), ClusterScale(1, 1), ["a", "b"], {"prefill-0": "a", "decode-0": "b"}, one_machine=True)
    assert {spec.name: spec.node for spec in specs if spec.role != "router"} == {
        "store-0": "a",
        "store-1": "b",
        "prefill-0": "a",
        "decode-0": "b",
    }


@given(
    prefill=st.integers(0, 5),
    decode=st.integers(1, 5),
    nodes=st.lists(st.sampled_from("abcdef"), min_size=1, unique=True),
    lost=st.sets(st.sampled_from("abcdef")),
)
def test_every_plan_is_whole_and_stable(prefill: int, decode: int, nodes: list[str], lost: set[str]):
    specs = plan(OPEN, ClusterScale(prefill, decode), nodes)
    assert len(names(specs)) == len(set(names(specs)))
    in_order = ("router", "store", "prefill", "decode")
    assert [in_order.index(s.role) for s in specs] == sorted(in_order.index(s.role) for s in specs)
    stores = [s.node for s in specs if s.role == "store"]
    assert sorted(stores) == sorted({s.node for s in specs if s.role in ("prefill", "decode")})
    placed = {s.name: s.node for s in specs}
    assert plan(OPEN, ClusterScale(prefill, decode), nodes, placed) == specs
    if left := [node for node in nodes if node not in lost]:
        after = plan(OPEN, ClusterScale(prefill, decode), left, {n: node for n, node in placed.items() if node in left})
        assert {s.node for s in after} <= set(left)
        assert all(s.node == placed[s.name] for s in after if s.role != "store" and placed[s.name] in left)
