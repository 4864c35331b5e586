"""The table of methods, changes to its entries, and the sentences for what cannot be."""

import dataclasses

import pytest

import xkfac
from xkfac import METHODS, Method, Settings, XkfacError
from xkfac.methods import get_method
from xkfac.model.merged_weight import INTERPRETATIONS


def test_the_table_names_its_methods():
    names = [
        "fixed-bn",
        "paper",
        "xkfac",
        "kfac",
        "corrected",
        "diagonal",
        "unmerged",
        "ewc",
        "fixed-affine",
        "fixed-statistics",
        "own-bn",
        "fine-tuning",
    ]
    assert list(METHODS) == names
    assert all(method.name == name for name, method in METHODS.items())


def test_xkfac_is_the_papers_method_in_the_mean_form():
    method = METHODS["xkfac"]
    assert method.settings == Settings("xkfac", "mean", "paper", "signs", None, "batch", False)
    assert (method.interpretation, method.recentre, method.merge, method.per_parameter) == ("brn", True, True, False)
    assert (method.penalised, method.fixed_bn) == (True, False)


@pytest.mark.parametrize("name", ["xkfac", "kfac", "corrected", "diagonal"])
def test_merging_methods_differ_in_their_curvature_alone(name):
    assert METHODS[name] == dataclasses.replace(METHODS["xkfac"], name=name, settings=Settings(name))


def test_the_unmerged_method_is_xkfac_without_merging_and_what_serves_merged_weights():
    assert METHODS["unmerged"] == dataclasses.replace(METHODS["xkfac"], name="unmerged", merge=False, recentre=False)


def test_ewc_can_have_its_bn_fixed():
    changed = get_method("ewc", fixed_bn=True, interpretation="eval", recentre=False)
    assert changed == dataclasses.replace(METHODS["ewc"], fixed_bn=True)


def test_the_other_methods_are_what_their_names_say():
    ewc, fixed, tuning = METHODS["ewc"], METHODS["fixed-bn"], METHODS["fine-tuning"]
    assert (ewc.settings.kind, ewc.per_parameter, ewc.merge, ewc.recentre) == ("diagonal", True, False, False)
    assert (fixed.fixed_bn, fixed.recentre, fixed.interpretation) == (True, False, "eval")
    assert fixed.settings == Settings(grouping="hierarchical", statistics="population")
    assert METHODS["paper"] == dataclasses.replace(METHODS["xkfac"], name="paper", settings=Settings(form="paper"))
    assert (tuning.penalised, tuning.recentre) == (False, False)
    assert [name for name, method in METHODS.items() if not method.penalised] == ["fine-tuning"]
    assert [name for name, method in METHODS.items() if method.fixed_bn] == ["fixed-bn"]
    own = METHODS["own-bn"]
    assert (own.own_bn, own.recentre, own.interpretation) == (True, False, "eval")
    assert (own.settings.kind, own.settings.grouping, own.settings.statistics) == (
        "xkfac",
        "hierarchical",
        "population",
    )


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_found_by_name_and_by_itself(name):
    assert get_method(name) == get_method(METHODS[name]) == METHODS[name]


def test_changes_reach_the_method_and_its_settings_and_not_the_table():
    changed = get_method("xkfac", form="paper", draws=3, interpretation="bn", recentre=False)
    assert changed == Method("xkfac", Settings(form="paper", draws=3), interpretation="bn", recentre=False)
    assert METHODS["xkfac"] == Method("xkfac")
    assert get_method(changed, form="mean", draws=None, interpretation="brn", recentre=True) == METHODS["xkfac"]


@pytest.mark.parametrize("interpretation", INTERPRETATIONS)
def test_every_interpretation_is_taken(interpretation):
    assert get_method("kfac", interpretation=interpretation).interpretation == interpretation


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("xkfc", "xkfac"),
        ("XK-FAC", "xkfac"),
        ("K-FAC", "kfac"),
        ("EWC", "ewc"),
        ("fixed_bn", "fixed-bn"),
        ("un-merged", "unmerged"),
        ("finetuning", "fine-tuning"),
        ("diag", "diagonal"),
        ("correct", "corrected"),
    ],
)
def test_a_typo_in_a_method_is_met_with_the_nearest(typo, meant):
    with pytest.raises(XkfacError) as caught:
        get_method(typo)
    assert str(caught.value) == (
        f"method '{typo}' is not known (did you mean '{meant}'?); it is one of {', '.join(METHODS)}"
    )


def test_a_method_that_is_like_none_gets_no_suggestion():
    with pytest.raises(XkfacError, match=r"^method 'zzz' is not known; it is one of fixed-bn, paper, xkfac, kfac, "):
        get_method("zzz")


@pytest.mark.parametrize("method", [None, 3, Method, ["xkfac"], Settings()])
def test_what_is_no_method_is_refused(method):
    with pytest.raises(XkfacError, match=r"^a method is a \w+; it must be a Method or one of fixed-bn, "):
        get_method(method)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("interpretaton", "interpretation"), ("Draws", "draws"), ("recenter", "recentre"), ("group", "grouping")],
)
def test_a_typo_in_an_option_is_met_with_the_nearest(typo, meant):
    with pytest.raises(XkfacError, match=rf"^'{typo}' is no option of a method \(did you mean '{meant}'\?\); opt"):
        get_method("xkfac", **{typo: 1})


@pytest.mark.parametrize("name", ["name", "settings", "zzz"])
def test_what_is_no_option_is_refused_with_all_that_are(name):
    with pytest.raises(XkfacError, match=f"^'{name}' is no option of a method.*; options are .*cross_layer, draws, "):
        get_method("xkfac", **{name: "x"})


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("interpretation", "train", "interpretation is 'train'; it must be one of bn, brn, const, eval"),
        ("kind", "hessian", "kind is 'hessian'; it must be one of xkfac, kfac, diagonal, corrected"),
        ("form", "papers", "form is 'papers' \\(did you mean 'paper'\\?\\); it must be one of paper, mean"),
        ("grouping", "none", "grouping is 'none'; it must be one of paper, pooled, hierarchical"),
        ("labels", "true", "labels is 'true'; it must be one of signs, sampled, exact, empirical"),
        ("statistics", "running", "statistics is 'running'; it must be one of batch, population"),
        ("draws", 0, "draws must be at least 1, not 0"),
        ("recentre", "no", "recentre is 'no'; it must be true or false"),
        ("merge", None, "merge is None; it must be true or false"),
        ("own_bn", 1, "own_bn is 1; it must be true or false"),
        ("fixed_bn", 1, "fixed_bn is 1; it must be true or false"),
    ],
)
def test_bad_values_are_refused(option, value, sentence):
    with pytest.raises(XkfacError, match=f"^{sentence}"):
        get_method("xkfac", **{option: value})


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("xkfac", {"fixed_bn": True}, "fixed_bn=True keeps BN as it is and recentre=True changes it; pass recentre=Fa"),
        ("fixed-bn", {"recentre": True}, "fixed_bn=True keeps BN as it is and recentre=True changes it"),
        (
            "fixed-bn",
            {"interpretation": "brn"},
            "interpretation='brn' has no mini-batch .*; pass interpretation='eval'",
        ),
        (
            "xkfac",
            {"per_parameter": True},
            "per_parameter=True penalises every parameter by itself, .*; pass kind='diagonal'",
        ),
        (
            "unmerged",
            {"per_parameter": True},
            "per_parameter=True penalises every parameter by itself, .*; pass kind='diagonal'",
        ),
        ("ewc", {"kind": "kfac"}, "per_parameter=True penalises every parameter by itself, which has no kfac factors"),
        ("fine-tuning", {"form": "paper"}, "penalised=False has no curvature, so its options have no effect"),
        ("fine-tuning", {"merge": False}, "penalised=False has no curvature, so its options have no effect"),
        ("xkfac", {"labels": "exact", "draws": 2}, "draws=2 goes with labels='signs' or 'sampled', not 'exact'"),
        ("diagonal", {"cross_layer": True}, "cross_layer goes with kind 'xkfac' or 'kfac', not 'diagonal'"),
        ("corrected", {"cross_layer": True}, "cross_layer goes with kind 'xkfac' or 'kfac', not 'corrected'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(name, changes, sentence):
    with pytest.raises(XkfacError, match=sentence):
        get_method(name, **changes)


def test_consolidate_refuses_before_it_looks_at_the_data():
    with pytest.raises(XkfacError, match="did you mean 'xkfac'"):
        xkfac.consolidate(None, None, "xkfak")
    with pytest.raises(XkfacError, match="did you mean 'form'"):
        xkfac.consolidate(None, None, "xkfac", forms="mean")
