"""Variables are created before anything is recorded, on every replica."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from dp_sparse.accounting import RestsOnRelease
from dp_sparse.core import PrivacyError
from dp_sparse.optimizers import PrivateOptimizer, known_noise
from dp_sparse.sampling import Examples
from dp_sparse.step import flush_hooks, own_loss
from dp_sparse.step.losses import with_nothing


def build_for(model: keras.Model, optimizer: PrivateOptimizer, examples: Examples) -> None:
    """Creates all variables for examples like these, or of this signature.

    On every replica, and before anything is recorded.
    """
    x, y = examples.x, examples.y
    with tf.init_scope(), model.distribute_strategy.scope():
        if not all_built(model) and own_loss.has_own_loss(model):
            own_loss.build_layers(model, examples)
        if not all_built(model):
            with _losses_left_out(model):
                model._symbolic_build(data_batch=(x, y, None))  # weights may lack the losses' axes
        if not all_built(model):  # as a layer that is an activation, which needs a real call
            specs = tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), x)
            given = {"training": False} if model._call_has_training_arg else {}
            called = functools.partial(model, **given)
            tf.function(called, autograph=False).get_concrete_function(specs)
        build_metrics(model, x, y)
        build_optimizer(model, optimizer)


def build_metrics(model: keras.Model, x: Any, y: Any) -> None:
    """Creates the compiled loss and metrics for batches of this signature.

    A step that creates variables while it is traced is traced a second time. What is wrong with the
    model or its metrics is left to that step to say. It is called with `training=True`, when it may
    have other outputs.
    """
    unbuilt = _unbuilt_losses(model)
    if not unbuilt:
        return
    x, y = tf.nest.map_structure(
        lambda leaf: keras.KerasTensor(leaf.shape, tf.as_dtype(leaf.dtype).name), (x, y)
    )
    try:
        outputs = model(x, training=True) if model._call_has_training_arg else model(x)
        for each in unbuilt:
            is_loss = each is model._compile_loss
            each.build(with_nothing(each, y) if is_loss else y, outputs)
    except Exception:
        return


def _unbuilt_losses(model: keras.Model) -> list[Any]:
    """The compiled metrics and loss, as far as they are not built."""
    compiled = [model._compile_metrics, model._compile_loss]
    return [each for each in compiled if each is not None and not each.built]


@contextlib.contextmanager
def _losses_left_out(model: keras.Model) -> Iterator[None]:
    """Keras builds the layers alone: it would build losses for the outputs of an evaluation."""
    unbuilt = _unbuilt_losses(model)
    for each in unbuilt:
        each.built = True
    try:
        yield
    finally:
        for each in unbuilt:
            each.built = False


def all_built(model: keras.Model) -> bool:
    """Whether every layer has its variables; Keras calls a model built before that."""
    return all(layer.built for layer in model._flatten_layers())


def build_optimizer(model: keras.Model, optimizer: PrivateOptimizer) -> None:
    """Creates the optimizer's variables.

    Raises:
        ValueError: Nothing of the model is trained, or something in another type than float32.
        PrivacyError: The plan does not pay for frequencies that the model was made with, a run
            whose noise is known trained a weight, or the optimizer was built for other variables.
    """
    with_frequencies = [x for x in model._flatten_layers() if isinstance(x, RestsOnRelease)]
    for layer in with_frequencies:
        fix = "train with a plan that has this release, as PrivacyPlan(..., releases=(...,))"
        layer.require_paid(optimizer.plan.releases, fix)
    refuse_known_noise(model, optimizer)
    if not model.trainable_variables:
        raise ValueError(
            f"Expected a model with something to train, got {model.name} without trainable "
            "variables."
        )
    for variable in model.trainable_variables:
        if variable.dtype != "float32":
            raise ValueError(
                f"Expected variables in float32, got {variable.path} in {variable.dtype}: use "
                'dtype="float32", or a mixed policy, which keeps variables in float32.'
            )
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    _refuse_other_variables(model, optimizer)
    for layer in with_frequencies:
        private = optimizer.plan.sampling.not_private_seed is None
        if private and not layer.is_paid and layer.release in optimizer.plan.releases:
            layer.pay(functools.partial(_value, optimizer.steps_spent))
    if optimizer.delays_noise:
        flush_hooks.guard_layers(model, optimizer)


def _refuse_other_variables(model: keras.Model, optimizer: PrivateOptimizer) -> None:
    """Raises PrivacyError unless the optimizer was built for what the model trains now."""
    built = {id(v): v.path for v in (*optimizer.dense_variables, *optimizer.tables)}
    trained = {id(v): v.path for v in model.trainable_variables}
    for variables, others, what in [
        (built, trained, "is no longer trained"),
        (trained, built, "was not trained then"),
    ]:
        changed = [path for key, path in variables.items() if key not in others]
        if changed:
            raise PrivacyError(
                f"The trainable variables of {model.name} are not those that its "
                f"{type(optimizer).__name__} was built for: {changed[0]} {what} (a layer was "
                "frozen, unfrozen, added, or given LoRA).\nCompile the model with a new optimizer "
                "and a new plan for the remaining steps: the epsilons and deltas of both plans "
                "add up."
            )


def refuse_known_noise(model: keras.Model, optimizer: PrivateOptimizer) -> None:
    """Raises PrivacyError if a run without privacy trained weights that a plan would protect."""
    if optimizer.plan.sampling.not_private_seed is None and known_noise(model):
        raise PrivacyError(
            f"Expected weights that private training may begin with, got {model.name}, some of "
            "which were trained under a plan of not_private_plan, whose noise anybody can take "
            "away: make the model anew."
        )


def _value(steps: Any) -> int:
    return int(steps.numpy())
