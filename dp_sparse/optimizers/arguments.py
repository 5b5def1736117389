"""What a private optimizer is given, checked; each error says what to give instead."""

import keras

from dp_sparse.accounting import Mechanism, PrivacyPlan
from dp_sparse.clipping import STYLES, ClippingStyle, FlatClipping
from dp_sparse.core import validate
from dp_sparse.optimizers.keras_wrapper import NoForeignGradients

_COUPLED = ("gradient_accumulation_steps", "loss_scale_factor")


def checked_plan(
    plan: PrivacyPlan, mechanism: type[Mechanism], *others: type[Mechanism]
) -> PrivacyPlan:
    """A calibrated plan for steps of a mechanism; raises ValueError for any other."""
    if not isinstance(plan, PrivacyPlan) or not (plan.noise_multiplier and plan.plan_id):
        raise ValueError(
            f"Expected a calibrated PrivacyPlan, got plan={plan!r}: use plan.calibrate(), or "
            "plan.with_noise(...)."
        )
    if type(plan.mechanism) not in (mechanism, *others):
        raise ValueError(
            f"Expected a plan with mechanism={mechanism.__name__}(...), got "
            f"mechanism={plan.mechanism!r}: its noise is for other releases than this optimizer's."
        )
    return plan


def checked_style(clipping: ClippingStyle | None) -> ClippingStyle:
    """The style, flat by default; raises ValueError for what is none of `STYLES`.

    A subclass could give any factors, and the guarantee rests on them.
    """
    if clipping is not None and type(clipping) not in STYLES:
        names = ", ".join(f"{style.__name__}()" for style in STYLES)
        raise ValueError(
            f"Expected a clipping style, got clipping={clipping!r}: use one of {names}."
        )
    return clipping or FlatClipping()


def checked_optimizer(
    optimizer: keras.optimizers.Optimizer | str,
) -> keras.optimizers.Optimizer:
    """A plain Keras optimizer that a private one may wrap; raises ValueError for any other."""
    if isinstance(optimizer, str):
        optimizer = keras.optimizers.get(optimizer)
    validate.of_keras_3("an optimizer", optimizer)
    plain = isinstance(optimizer, keras.optimizers.Optimizer)
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if not plain or scaled or isinstance(optimizer, NoForeignGradients):
        raise ValueError(
            f"Expected a plain Keras optimizer to wrap, got optimizer={optimizer!r}: use one of "
            "keras.optimizers, such as keras.optimizers.Adam(), without a loss scale and without "
            "another private optimizer in it."
        )
    for name in _COUPLED:
        if getattr(optimizer, name, None):
            raise ValueError(
                f"Expected an optimizer without {name}, got {name}={getattr(optimizer, name)}: "
                "the plan pays for one update a batch."
            )
    return optimizer
