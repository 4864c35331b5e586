"""The benchmark beside other libraries: its brute force, its eye for traces, its page. No other library is needed."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch.func import functional_call, jacrev

import xkfac

FOLDER = Path(__file__).parents[1] / "benchmarks" / "peers"
CASES = ("bn", "plain", "grouped", "dilated")


@pytest.fixture(scope="module", autouse=True)
def _on_the_path():
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


@pytest.fixture
def conduct():
    return importlib.import_module("conduct")


def make(conduct, name):
    return conduct.CASES[name][1]()


@pytest.mark.parametrize("name", CASES)
def test_exact_fisher_is_that_of_the_jacobian(conduct, name):
    case = make(conduct, name)
    layer = {key: p.detach() for key, p in case.net.named_parameters() if key.startswith("0.")}
    rest = {key: p.detach() for key, p in case.net.named_parameters() if key not in layer}
    rest |= {key: buffer.clone() for key, buffer in case.net.named_buffers()}

    def log_p(parameters):
        buffers = {key: value.clone() for key, value in rest.items()}
        return functional_call(case.net, {**buffers, **parameters}, case.inputs).log_softmax(1)

    p = log_p(layer).exp()
    jacobian = torch.cat([part.flatten(2) for part in jacrev(log_p)(layer).values()], 2)
    wanted = torch.einsum("nc,ncp,ncq->pq", p, jacobian, jacobian) / len(p)
    assert torch.allclose(conduct.exact(case), wanted, atol=1e-6 * float(wanted.max()) + 1e-9, rtol=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_kfac_by_definition_is_what_this_library_makes_of_exact_labels(conduct, name):
    case = make(conduct, name)
    found = xkfac.estimate(case.net, [case.inputs], "kfac", labels="exact", merge=False)
    unit = next(unit for unit in found.coverage.units if unit.name == "0")
    groups, rows, columns = unit.shape
    identity = torch.eye(groups * rows * columns).view(-1, groups, rows, columns)
    products = torch.stack([found.curvature.blocks["0"].product(one) for one in identity])
    apart = [torch.cat([one[..., :-1].flatten(), one[..., -1].flatten()]) for one in products]
    order = torch.stack([torch.cat([one[..., :-1].flatten(), one[..., -1].flatten()]) for one in identity]).argmax(1)
    wanted = torch.stack(apart)[order.argsort()]
    assert conduct.distance(conduct.by_definition(case), wanted) < 1e-5


def test_a_bias_in_front_of_a_bn_has_no_curvature_but_kfac_gives_it_some(conduct):
    case = make(conduct, "bn")
    assert conduct.share(conduct.exact(case), case.net) < 1e-10
    assert conduct.share(conduct.by_definition(case), case.net) > 0.01


def test_this_library_leaves_no_trace_and_a_careless_peer_all_of_them(conduct):
    class Careless(conduct.Peer):
        def curvature(self, net, data):
            for x, y in data:
                torch.nn.functional.cross_entropy(net(x), y).backward()
            torch.rand(1)
            net.eval()
            net.left = 1

    for peer, changed in ((conduct.PEERS["xkfac"], False), (Careless(), True)):
        found = conduct.Conduct()
        conduct.behaviour(peer, make(conduct, "bn"), found)
        assert found.notices == "runs"
        assert len(found.traces) == 5
        assert set(found.traces.values()) == {changed}


def test_a_refusal_of_bn_is_told_and_the_peer_measured_in_evaluation_mode(conduct):
    class Refusing(conduct.Peer):
        def curvature(self, net, data):
            if net.training:
                raise NotImplementedError("BN in training mode")

    found = conduct.Conduct()
    conduct.behaviour(Refusing(), make(conduct, "bn"), found)
    assert found.notices == "NotImplementedError: BN in training mode"
    assert found.mode == "eval"


def test_ratios_are_medians_over_the_plain_pass(monkeypatch):
    turns = importlib.import_module("turns")
    times = iter([1.0, 4.0, 2.0, 10.0, 3.0, 6.0])
    monkeypatch.setattr(turns, "clocked", lambda work: next(times))
    ratios, plain = turns.in_turns({"a": lambda: None}, lambda: None, 3)
    assert plain == 2.0
    assert ratios == {"a": 3.0}


def test_a_batch_of_a_pass_is_timed_from_one_that_is_asked_for_to_the_next(conduct, monkeypatch):
    nets, turns = importlib.import_module("nets"), importlib.import_module("turns")
    now = [0.0]
    monkeypatch.setattr(nets.time, "process_time", lambda: now[0])

    class Slow(conduct.Peer):
        def curvature(self, net, data):
            next(iter(data))  # a look at the first batch, which is no pass
            for cost in (2.0, 0.5):  # two passes, whose first batch takes longer
                for index, _ in enumerate(list(data) if self.ahead else data):
                    now[0] += cost + (5.0 if index == 0 else 0.0)
            now[0] += 100.0

    batch = torch.zeros(2, 3), torch.zeros(2)
    for ahead, delays, inside in (
        (False, False, True), (True, False, True), (False, True, True), (False, False, False)
    ):  # fmt: skip
        peer = Slow()
        peer.ahead, peer.delays = ahead, delays
        stand = turns.Stand(peer, nets.Case(torch.nn.Linear(1, 1), *batch))
        assert turns.seconds_of(stand, batch, 4, inside=inside) == (2.5, 4 * 2.5 + 2 * 5.0 + 100.0)


def test_the_row_of_our_default_has_the_draws_of_our_default(conduct):
    assert conduct.PEERS["xkfac-default"].options["draws"] == xkfac.METHODS["fixed-bn"].settings.draws_over(16)


def test_the_page_takes_new_tables_between_its_marks(tmp_path):
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("peers_main", FOLDER / "__main__.py")
    main = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(main)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin a -->\nold\n<!-- end a -->\nafter\n")
    main.refresh(page, {"a": r"new \1", "b": "unused"})
    assert page.read_text() == "before\n<!-- begin a -->\n\nnew \\1\n\n<!-- end a -->\nafter\n"
    with pytest.raises(SystemExit, match="'a'"):
        main.refresh(page, {"b": ""})
