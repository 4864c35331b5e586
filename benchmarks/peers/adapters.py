"""What each library is asked to do, in its own words, behind one interface.

A curvature batch, the product of the curvature with a displacement of the parameters (which is the gradient of the
quadratic penalty), and a file of it. Each library is imported where it is used: one that is missing fails alone.
"""

from __future__ import annotations

import copy
import tempfile
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from interface import AbsentError, Moved, Peer, Step, layer_parameters, layers_of
from nets import Batches
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


class Xkfac(Peer):
    """This library."""

    package = "xkfac"
    delays = True  # on a CPU, products of few rows
    cycle = 8  # the longest interval between two evaluations of the penalty

    def __init__(self, row: str, **options: Any) -> None:
        self.row = row
        self.options = {"method": "xkfac", "draws": 1, **options}
        # An interval that adapts needs some evaluations for its length; with implicit steps it is fixed.
        self.implicit = self.options["method"] == "fixed-bn"
        self.warm_up = 1 if self.implicit else 3 * self.cycle

    def curvature(self, net: nn.Module, data: Batches) -> Any:  # noqa: D102
        import xkfac

        return xkfac.consolidate(net, data, **self.options)

    def raw(self, net: nn.Module, data: Batches) -> Callable[[Moved], Moved]:  # noqa: D102
        import xkfac

        options = dict(self.options)
        method = xkfac.METHODS[options.pop("method")]
        found = xkfac.estimate(net, data, method.settings, merge=False, per_parameter=method.per_parameter, **options)
        units = [unit for unit in found.coverage.units if unit.name in found.curvature.blocks]

        def product(moved: Moved) -> Moved:
            result: Moved = {}
            for unit in units:
                names = [name for name in (unit.weight, unit.bias) if name is not None] or [unit.name]
                if not all(name in moved for name in names):
                    continue
                groups, rows, _ = unit.shape
                parts = [moved[name].reshape(groups, rows, -1) for name in names]
                whole = found.curvature.blocks[unit.name].product(torch.cat(parts, -1))
                sizes = [part.shape[-1] for part in parts]
                for name, part in zip(names, whole.split(sizes, -1), strict=True):
                    result[name] = part.reshape(moved[name].shape)
            return result

        return product

    def stepper(self, net: nn.Module, state: Any) -> Step:  # noqa: D102
        import xkfac

        learner = xkfac.Learner(net, state)
        learner.begin(recentre=False)
        implicit = learner.implicit(0.01, 0.9) if self.implicit else None  # as begin(loader, optimizer) does

        def step(x: Tensor, y: Tensor) -> None:
            net.zero_grad()
            learner.backward(F.cross_entropy(net(x), y))
            if implicit is not None:
                implicit.step()

        return step

    def save(self, state: Any, net: nn.Module, path: Path) -> None:  # noqa: D102
        state.save(path.with_suffix(".safetensors"))

    def load(self, net: nn.Module, data: Batches, path: Path) -> Any:  # noqa: D102
        import xkfac

        return xkfac.Memory.load(path.with_suffix(".safetensors"))


class Naive(Peer):
    """The diagonal of the Fisher as its definition says: a backward pass for each example of the batch."""

    package = "torch"
    row = "one backward pass an example, diagonal"
    once = True

    def curvature(self, net: nn.Module, data: Batches) -> Any:  # noqa: D102
        parameters = dict(net.named_parameters())
        squares = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        for x, _ in data:
            log_p = net(x).log_softmax(1)
            labels = log_p.detach().exp().multinomial(1)
            for loss in log_p.gather(1, labels)[:, 0]:
                gradients = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
                for square, gradient in zip(squares.values(), gradients, strict=True):
                    square.addcmul_(gradient, gradient, value=1 / len(data.dataset))
        return squares

    def product(self, state: Any, net: nn.Module, moved: Moved) -> Moved:  # noqa: D102
        return {name: square * moved[name] for name, square in state.items()}


class Asdl(Peer):
    """ASDL's Kronecker-factored Fisher; it leaves the factors on the modules, as `fisher`."""

    package = "asdfghjkl"
    row = "K-FAC, one draw"

    def curvature(self, net: nn.Module, data: Batches) -> Any:  # noqa: D102
        from asdl import FISHER_MC, LOSS_CROSS_ENTROPY, SHAPE_KRON, FisherConfig, get_fisher_maker

        config = FisherConfig(FISHER_MC, [SHAPE_KRON], LOSS_CROSS_ENTROPY, data_size=len(data.dataset))
        maker = get_fisher_maker(net, config)
        for index, (x, _) in enumerate(data):
            maker.setup_logits_repr(maker.setup_model_call(net, x))
            maker.forward_and_backward(accumulate=index > 0)
        return {name: module.fisher for name, module in net.named_modules() if hasattr(module, "fisher")}

    def product(self, state: Any, net: nn.Module, moved: Moved) -> Moved:  # noqa: D102
        result: Moved = {}
        for name, fisher in state.items():
            if fisher.kron is not None:
                parts = [f"{name}.{part}" for part in ("weight", "bias") if f"{name}.{part}" in moved]
                found = fisher.kron.mvp(*(moved[part] for part in parts))
                result.update(zip(parts, (found,) if isinstance(found, Tensor) else found, strict=True))
        return result


class Curvlinops(Peer):
    """curvlinops' operator of K-FAC, on the parameters of linear and convolutional layers: it has no BN."""

    package = "curvlinops-for-pytorch"

    def __init__(self, row: str, **options: Any) -> None:
        self.row = row
        self.options = options
        self.once = not options

    def _given(self, data: Batches) -> dict[str, Any]:
        """Return what a caller can tell so that the library need not pass over the data to find it out."""
        known = {"num_data": len(data.dataset), "num_per_example_loss_terms": 1}
        return {**known, **self.options} if self.options else {}

    def curvature(self, net: nn.Module, data: Batches) -> Any:  # noqa: D102
        from curvlinops import KFACLinearOperator

        parameters = list(layer_parameters(net).values())
        operator = KFACLinearOperator(net, nn.CrossEntropyLoss(), parameters, data, **self._given(data))
        if not operator._input_covariances:
            operator.compute_kronecker_factors()
        return operator

    def product(self, state: Any, net: nn.Module, moved: Moved) -> Moved:  # noqa: D102
        names = list(layer_parameters(net))
        return dict(zip(names, state @ [moved[name] for name in names], strict=True))

    def stored(self, state: Any) -> Any:  # noqa: D102
        return state.state_dict()

    def restored(self, content: Any, net: nn.Module, data: Batches) -> Any:  # noqa: D102
        from curvlinops import KFACLinearOperator

        parameters = list(layer_parameters(net).values())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return KFACLinearOperator.from_state_dict(content, net, parameters, data, check_deterministic=False)


class Nngeometry(Peer):
    """NNGeometry's PMatKFAC of linear and convolutional layers: it has no K-FAC of a BN."""

    package = "nngeometry"

    def __init__(self, row: str, *, sampled: bool) -> None:
        self.row = row
        self.sampled = sampled
        self.once = not sampled

    def curvature(self, net: nn.Module, data: Batches) -> Any:  # noqa: D102
        from nngeometry.layercollection import LayerCollection
        from nngeometry.metrics import FIM, FIM_MonteCarlo
        from nngeometry.object import PMatKFAC

        collection = LayerCollection()
        for layer in layers_of(net).values():
            collection.add_layer_from_model(net, layer)
        metric = FIM_MonteCarlo if self.sampled else FIM
        return metric(net, data, PMatKFAC, layer_collection=collection)

    def product(self, state: Any, net: nn.Module, moved: Moved) -> Moved:  # noqa: D102
        from nngeometry.object import PVector

        layers = layers_of(net).items()
        parts = {name: [f"{name}.{part}" for part, _ in layer.named_parameters()] for name, layer in layers}
        given = {name: tuple(moved[part] for part in own) for name, own in parts.items()}
        found = state.mv(PVector(state.generator.layer_collection, dict_repr=given)).to_dict()
        return {part: tensor for name, own in parts.items() for part, tensor in zip(own, found[name], strict=True)}


class Laplace(Peer):
    """laplace-torch with its Kronecker structure, through its default backend; BN's parameters are left out."""

    package = "laplace-torch"

    def __init__(self, row: str, *, tuned: bool) -> None:
        self.row = row
        self.tuned = self.sampled = tuned
        self.once = not tuned

    def prepare(self, net: nn.Module) -> None:  # noqa: D102
        known = {id(parameter) for parameter in layer_parameters(net).values()}
        for parameter in net.parameters():
            parameter.requires_grad_(id(parameter) in known)

    def curvature(self, net: nn.Module, data: Batches) -> Any:  # noqa: D102
        from laplace import Laplace as make
        from laplace.curvature import CurvlinopsGGN

        count = len(data.dataset)
        if not self.tuned:
            fitted = make(net, "classification", subset_of_weights="all", hessian_structure="kron")
            fitted.fit(data)
            return fitted.H, count
        backend = CurvlinopsGGN(net, "classification", stochastic=True)
        total = None
        for seed, (x, y) in enumerate(data):
            _, kron = backend.kron(x, y, N=count, seed=seed)  # by itself it draws from one seed for every batch
            total = kron if total is None else total + kron
        return total, count

    def product(self, state: Any, net: nn.Module, moved: Moved) -> Moved:  # noqa: D102
        names = list(layer_parameters(net))
        flat = torch.cat([moved[name].flatten() for name in names])
        found = state[0].bmm(flat, exponent=1).flatten() / state[1]
        parts = found.split([moved[name].numel() for name in names])
        return {name: part.view_as(moved[name]) for name, part in zip(names, parts, strict=True)}


class Backpack(Peer):
    """BackPACK with one draw; it leaves its results on the parameters."""

    package = "backpack-for-pytorch"

    def __init__(self, row: str, extension: str) -> None:
        self.row = row
        self.extension = extension

    def prepare(self, net: nn.Module) -> None:  # noqa: D102
        from backpack import extend

        plain = all(isinstance(module, nn.Module) and not list(module.children()) for module in net.children())
        self._net = extend(net, use_converter=not plain)

    def curvature(self, net: nn.Module, data: Batches) -> Any:  # noqa: D102
        from backpack import backpack, extend, extensions

        loss = extend(nn.CrossEntropyLoss())
        extension = getattr(extensions, self.extension)(mc_samples=1)
        total: dict[str, list[Tensor]] = {}
        for x, y in data:
            with backpack(extension):
                loss(self._net(x), y).backward()
            for name, parameter in net.named_parameters():
                found = getattr(parameter, extension.savefield)
                factors = found if isinstance(found, list) else [found]
                if name not in total:
                    total[name] = [torch.zeros_like(factor) for factor in factors]
                for sum_, factor in zip(total[name], factors, strict=True):
                    sum_.add_(factor, alpha=1 / len(data))
        return total

    def product(self, state: Any, net: nn.Module, moved: Moved) -> Moved:  # noqa: D102
        from backpack.utils.kroneckers import apply_kfac_mat_prod

        result: Moved = {}
        for name, factors in state.items():
            flat = moved[name].flatten()
            whole = apply_kfac_mat_prod(factors, flat) if self.extension == "KFAC" else factors[0].flatten() * flat
            result[name] = whole.view_as(moved[name])
        return result


class Singd(Peer):
    """SINGD, an optimizer: the second moments that its hooks take in a backward pass; it keeps no Fisher.

    They are those of the empirical Fisher, in the basis of its preconditioner.
    """

    package = "singd"
    row = "second moments for its optimizer"

    def prepare(self, net: nn.Module) -> None:  # noqa: D102
        from singd.optim.optimizer import SINGD

        self._optimizer = SINGD(net, T=1, warn_unsupported=False)

    def curvature(self, net: nn.Module, data: Batches) -> Any:  # noqa: D102
        for moments in (self._optimizer.H_Ks, self._optimizer.H_Cs):
            moments.clear()
        for x, y in data:
            net.zero_grad()
            F.cross_entropy(net(x), y).backward()

    def product(self, state: Any, net: nn.Module, moved: Moved) -> Moved:  # noqa: D102
        raise AbsentError("no Fisher")

    def stepper(self, net: nn.Module, state: Any) -> Step:  # noqa: D102
        raise AbsentError("no Fisher")

    def stored(self, state: Any) -> Any:  # noqa: D102
        raise AbsentError("no Fisher")


class Avalanche(Peer):
    """Avalanche's EWC: the square of a batch's mean gradient, with the true labels and BN in evaluation mode."""

    package = "avalanche-lib"
    row = "EWC"
    ahead = True

    def curvature(self, net: nn.Module, data: Batches) -> Any:  # noqa: D102
        from avalanche.training.plugins import EWCPlugin

        dataset = [(x, y, 0) for xs, ys in data for x, y in zip(xs, ys, strict=True)]
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        plugin = EWCPlugin(1.0)
        found = plugin.compute_importances(net, nn.CrossEntropyLoss(), optimizer, dataset, "cpu", data.batch_size)
        plugin.update_importances(found, 0)
        return plugin

    def product(self, state: Any, net: nn.Module, moved: Moved) -> Moved:  # noqa: D102
        return {name: one.data * moved[name] for name, one in state.importances[0].items()}

    def stepper(self, net: nn.Module, state: Any) -> Step:  # noqa: D102
        from avalanche.training.utils import copy_params_dict

        state.saved_params[0] = copy_params_dict(net)
        strategy = types.SimpleNamespace(
            clock=types.SimpleNamespace(train_exp_counter=1), device="cpu", model=net, loss=None
        )

        def step(x: Tensor, y: Tensor) -> None:
            net.zero_grad()
            strategy.loss = F.cross_entropy(net(x), y)
            state.before_backward(strategy)
            strategy.loss.backward()

        return step

    def stored(self, state: Any) -> Any:  # noqa: D102
        return dict(state.importances)

    def restored(self, content: Any, net: nn.Module, data: Batches) -> Any:  # noqa: D102
        from avalanche.training.plugins import EWCPlugin

        plugin = EWCPlugin(1.0)
        plugin.importances.update(content)
        return plugin


class Kronfluence(Peer):
    """Kronfluence's factors, made by a model that it has set to evaluation mode, and read from the files it writes."""

    package = "kronfluence"
    row = "K-FAC, one draw, BN in evaluation mode"
    ahead = True

    def curvature(self, net: nn.Module, data: Batches) -> Any:  # noqa: D102
        from kronfluence.analyzer import Analyzer, prepare_model
        from kronfluence.task import Task

        class Classification(Task):
            def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
                logits = model(batch[0])
                labels = logits.detach().softmax(1).multinomial(1)[:, 0] if sample else batch[1]
                return F.cross_entropy(logits, labels, reduction="sum")

            def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
                return self.compute_train_loss(batch, model)

        task, batches = Classification(), list(data)
        dataset = TensorDataset(*(torch.cat(part) for part in zip(*batches, strict=True)))
        with tempfile.TemporaryDirectory() as folder:
            model = prepare_model(copy.deepcopy(net), task)
            analyzer = Analyzer("peers", model, task, cpu=True, disable_tqdm=True, output_dir=folder)
            analyzer.fit_covariance_matrices("kfac", dataset, per_device_batch_size=len(batches[0][0]))
            found = analyzer.load_covariance_matrices("kfac")
        inputs, gradients, counts = (
            found[name]
            for name in ("activation_covariance", "gradient_covariance", "num_gradient_covariance_processed")
        )
        # Means over examples and positions; a layer's Fisher has the sum over positions.
        return {name: (inputs[name] / len(dataset), gradients[name] / counts[name]) for name in inputs}

    def product(self, state: Any, net: nn.Module, moved: Moved) -> Moved:  # noqa: D102
        result: Moved = {}
        for name, (left, right) in state.items():
            names = [f"{name}.{part}" for part in ("weight", "bias") if f"{name}.{part}" in moved]
            parts = [moved[one].reshape(len(right), -1) for one in names]
            whole = right @ torch.cat(parts, 1) @ left
            for one, part in zip(names, whole.split([part.shape[1] for part in parts], 1), strict=True):
                result[one] = part.reshape(moved[one].shape)
        return result


def _rows() -> dict[str, Peer]:
    return {
        "xkfac": Xkfac("XK-FAC, one draw"),
        "xkfac-fixed": Xkfac("fixed BN, hierarchical: the default method, one draw", method="fixed-bn"),
        "xkfac-8": Xkfac("XK-FAC, 8 draws", draws=8),
        "xkfac-default": Xkfac("fixed BN, default over 16 batches: 8 draws", method="fixed-bn", draws=8),
        "xkfac-kfac": Xkfac("K-FAC, one draw", method="kfac"),
        "xkfac-ewc": Xkfac("EWC, one draw", method="ewc"),
        "asdl": Asdl(),
        "nngeometry": Nngeometry("K-FAC, one draw", sampled=True),
        "nngeometry-default": Nngeometry("K-FAC, default: all classes", sampled=False),
        "curvlinops": Curvlinops("K-FAC, one draw, no checks", check_deterministic=False),
        "curvlinops-default": Curvlinops("K-FAC, default: one draw, checks"),
        "laplace": Laplace("K-FAC, one draw, factors alone", tuned=True),
        "laplace-default": Laplace("K-FAC, default: all classes, fitted", tuned=False),
        "backpack": Backpack("K-FAC, one draw", "KFAC"),
        "backpack-diagonal": Backpack("diagonal, one draw", "DiagGGNMC"),
        "kronfluence": Kronfluence(),
        "singd": Singd(),
        "avalanche": Avalanche(),
        "naive": Naive(),
    }


PEERS = _rows()
