"""A standing attack: ways to learn whether a row was in a batch, each refused or measured.

An entry of the catalogue (`entries.Entry`) is a model, a loss, a data pipeline or a way of training
by which somebody would see more of one example than its clipped gradient under noise. It goes
through the package's public names alone, as a user would: `compile` and `fit`, eagerly, under XLA,
in micro-batches, on several replicas, by `distribution.train` and `distribution.train_tables`.

**Refused** means: the package raises one of its own errors (its class, or a sentence of the form
"Expected ..., got ..."), and no weight or state has moved since the attack began.

**Measured** means: the sensitivity ‖S(D) − S(D′)‖ / C is at most 1 + 1e-3, where D and D′ are
neighbours (one example removed and the others moving up; for streams one example replaced by
padding in its place) and S is what a step adds up, read from the weights: with noise switched off
(`no_noise` of `tests/conftest.py`), an SGD of learning rate 1/C and an expected batch size B,
S/C is −B times the change of all weights, tables included, jointly. The same bound holds for the
contribution map in units of C1, over all tables jointly, which is seen by a spy in its place. State
that is not trainable, and what an attack keeps outside of the model, may not differ at all: if it
does, the sensitivity is infinite. Of attacks on the course of training (batches used twice, steps
under another plan) it is what an example got, in units of what the plan pays for.

A new layer, loss, sampler or way of training joins the catalogue:

- **a model or a loss**: a `Problem` (`measuring`) in the module of its class, as
  `Entry(name, measured(problem), expected)`; honest ones are expected `MEASURED`, which also shows
  that nothing harmless is refused;
- **a way of training**: a function of a `Way` (`ways`) whose last steps are under
  `attacking(model)`, and which returns what was measured if nothing refused it; `counting` has a
  model whose weights count the uses of each example;
- **a way**: a `Way` in `ways.WAYS`; the slow test runs every entry on it.

An entry names the `ways` with code of their own for it; these run in every suite. The expectation
says what is right, not what the code does today: an entry that fails is a hole.
"""
