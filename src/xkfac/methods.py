"""The methods of continual learning that share the library's interface: one word chooses between them."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Unpack

from xkfac.curvature.operator import Settings, SettingsOptions
from xkfac.errors import XkfacError, nearest
from xkfac.model.merged_weight import Interpretation
from xkfac.plain_values import check_fields


@dataclass(frozen=True)
class Method:
    """What is penalised, with which curvature, and how BN is treated while a target task is learnt.

    settings: the curvature. penalised: False for plain fine-tuning, which has none.
    merge: a layer and its BN are one unit; False penalises the layer, gamma, beta, mu and sigma one by one.
    per_parameter: every parameter is penalised by itself, and no statistics (plain EWC).
    interpretation: how merged weights are read in training. recentre: whether BN is re-centred at a task's start.
    fixed_bn: gamma, beta and the statistics of every BN stay as they are, and BN runs in evaluation mode.
    fixed_affine: gamma and beta of every BN stay as they are; its statistics follow the batches.
    fixed_statistics: BN runs in evaluation mode, with the statistics that re-centring gave it; gamma and beta learn.
    own_bn: BN is task-specific, so that the layers in front of it are units alone, and BN is free, as is every
    `TaskLayer`.
    """

    name: str
    settings: Settings = field(default_factory=Settings)
    penalised: bool = True
    merge: bool = True
    per_parameter: bool = False
    interpretation: Interpretation = "brn"
    recentre: bool = True
    fixed_bn: bool = False
    own_bn: bool = False
    fixed_affine: bool = False
    fixed_statistics: bool = False

    def __post_init__(self) -> None:
        check_fields(self, XkfacError)
        self._check_contradictions()

    @property
    def follows_target(self) -> bool:
        """Whether merged weights are protected while the statistics of a shared BN follow the target."""
        kept = self.fixed_bn or self.fixed_statistics or self.own_bn
        return self.penalised and not (kept or self.per_parameter)

    def _check_contradictions(self) -> None:
        """Raise XkfacError for an option that would have no effect beside another."""
        if self.fixed_bn and self.recentre:
            raise XkfacError("fixed_bn=True keeps BN as it is and recentre=True changes it; pass recentre=False")
        if self.fixed_bn and self.interpretation != "eval":
            raise XkfacError(
                f"fixed_bn=True keeps BN in evaluation mode, so interpretation='{self.interpretation}' has no "
                "mini-batch statistics to read; pass interpretation='eval'"
            )
        if self.own_bn and (self.fixed_bn or self.recentre or self.interpretation != "eval"):
            raise XkfacError(
                "own_bn=True leaves every BN to its task, so there is none to keep, re-centre or merge; pass "
                "fixed_bn=False, recentre=False and interpretation='eval'"
            )
        if self.fixed_affine and (self.fixed_bn or self.own_bn or self.recentre):
            raise XkfacError(
                "fixed_affine=True keeps gamma and beta, which re-centring and task-specific BN change and "
                "fixed BN keeps too; pass recentre=False, own_bn=False and fixed_bn=False"
            )
        if self.fixed_statistics and (self.fixed_bn or self.own_bn or self.interpretation != "eval"):
            raise XkfacError(
                "fixed_statistics=True keeps BN in evaluation mode with one set of statistics; pass fixed_bn=False, "
                "own_bn=False and interpretation='eval'"
            )
        if self.per_parameter and self.settings.kind != "diagonal":
            raise XkfacError(
                f"per_parameter=True penalises every parameter by itself, which has no {self.settings.kind} factors; "
                "pass kind='diagonal'"
            )
        if not self.penalised and (self.settings, self.merge, self.per_parameter) != (Settings(), True, False):
            raise XkfacError("penalised=False has no curvature, so its options have no effect; leave them out")


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        # BN whose statistics follow the target forgets more, see docs/fine-grained.md: so this is the default.
        Method(
            "fixed-bn",
            Settings(grouping="hierarchical", statistics="population"),
            interpretation="eval",
            recentre=False,
            fixed_bn=True,
        ),
        Method("paper", Settings(form="paper")),
        Method("xkfac"),
        Method("kfac", Settings("kfac")),
        Method("corrected", Settings("corrected")),
        Method("diagonal", Settings("diagonal")),
        # Re-centring keeps merged weights and moves gamma, beta, mu and sigma away from anchors of their own.
        Method("unmerged", merge=False, recentre=False),
        Method("ewc", Settings("diagonal"), merge=False, per_parameter=True, interpretation="eval", recentre=False),
        Method("fixed-affine", recentre=False, fixed_affine=True),
        Method(
            "fixed-statistics",
            Settings("kfac", statistics="population"),
            interpretation="eval",
            fixed_statistics=True,
        ),
        # Past tasks are used with their own statistics, which do not follow the weights.
        Method(
            "own-bn",
            Settings(grouping="hierarchical", statistics="population"),
            interpretation="eval",
            recentre=False,
            own_bn=True,
        ),
        Method("fine-tuning", penalised=False, interpretation="eval", recentre=False),
    )
}


class MethodOptions(SettingsOptions, total=False):
    """The fields of a `Method` and of its `Settings` that a call can change, with their types."""

    penalised: bool
    merge: bool
    per_parameter: bool
    interpretation: Interpretation
    recentre: bool
    fixed_bn: bool
    own_bn: bool
    fixed_affine: bool
    fixed_statistics: bool


def get_method(method: str | Method, **changes: Unpack[MethodOptions]) -> Method:
    """Return a method by name, or the given one, with fields of `Method` or `Settings` changed.

    Raises XkfacError for an unknown name or field, with the nearest one that exists.
    """
    if isinstance(method, str) and method not in METHODS:
        raise XkfacError(f"method '{method}' is not known{nearest(method, METHODS)}; it is one of {', '.join(METHODS)}")
    method = METHODS[method] if isinstance(method, str) else method
    if not isinstance(method, Method):
        raise XkfacError(f"a method is a {type(method).__name__}; it must be a Method or one of {', '.join(METHODS)}")
    own = {f.name for f in fields(Method)} - {"name", "settings"}
    inner = {f.name for f in fields(Settings)}
    for name in changes:
        if name not in own | inner:
            known = sorted(own | inner)
            raise XkfacError(f"'{name}' is no option of a method{nearest(name, known)}; options are {', '.join(known)}")
    given: dict[str, Any] = dict(changes)
    settings = replace(method.settings, **{k: v for k, v in given.items() if k in inner})
    return replace(method, settings=settings, **{k: v for k, v in given.items() if k in own})
