"""The page of the study."""

from typing import Any

from pipelines.markdown import table
from pipelines.shuffling import theory, training

_HEAD = """# Shuffled DP-SGD

"Shuffled DP-SGD" permutes hidden units and attention heads at random after each step, which
changes no output, and says that the weights may therefore have less noise. The first half is true,
and is here: `ShuffledDPSGDOptimizer`. The second half is not, and this page shows why. The package
accounts shuffled DP-SGD as DP-SGD.

`python -m pipelines.shuffling --mnist=mnist.npz --sst2=FOLDER` computes what is missing and writes
this page; its numbers are in [shuffling.jsonl](shuffling.jsonl).

## The claim, and an attack

Theorem 6 gives a σ for which one step is said to be (ε, δ)-differentially private. For ε =
{claimed:g}, δ = 5·10⁻⁶ and the {weights:,} permuted weights of a small model it is {sigma:.3f} in
units of c, the norm to which an example's gradient is clipped. DP-SGD with this noise guarantees
ε = {guaranteed:.2f}.

The attacker has the weights before the step and after it, as DP-SGD assumes. A step moves a weight
by much less than hidden units differ. So each unit after the step is most like itself before it,
the attacker compares them, and undoes the permutation: {units:.1%} of all units were found. What is
left is DP-SGD with little noise. {canaries:,} examples were in the data or not, by coins; the
threshold of the attack was chosen on others. The optimizer was ours, with `heuristic=True`.

| | ε |
| --- | --- |
| what Theorem 6 says | {claimed:g} |
| what the attacker shows, at least (99.9 % confidence) | **{bound:.2f}** |
| what DP-SGD guarantees at this noise | {guaranteed:.2f} |

So the claim is wrong. The guarantee of DP-SGD is not: the attack stays below it. The proof derives
a lower bound on δ where it needs an upper one (equations 31 to 42), and puts an approximation of
sums of lognormal variables where it needs a bound. The theorem also treats a step as if nothing
else were known of the weights; a permutation hides a unit only from those who cannot recognise it.
"""


def page(results: dict[str, Any]) -> str:
    """All of it, in the order of the paper's figures and tables behind the attack."""
    found = results["attack"]
    fields = {
        "claimed": found["claimed"],
        "guaranteed": found["guaranteed"],
        "bound": found["bound"],
        "sigma": found["sigma"],
        "units": found["units_found"],
        "canaries": found["canaries"],
        "weights": found["weights"],
    }
    return "\n".join(
        [
            _HEAD.format(**fields),
            *_figure_2(results["figure_2"]),
            *_figure_3(results["figure_3"]),
            *_figure_4(results["figure_4"]),
            *_training(results),
            *_table_7(results["table_7"]),
        ]
    )


def _figure_2(found: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## Figure 2: sums of lognormal variables\n",
        "![](shuffling_figure_2.png)\n",
        "Quantiles of log Σ exp(Y), Y independent normals of deviation 1/σ, as in the proof; "
        f"scaled down to {found[0]['terms']:,} terms. At σ = 0.25, which the paper shows, F-W, "
        "which it uses, is the worst of all; at the σ of Figure 3 all agree. (The paper's axes do "
        "not tell which terms it summed; these are the proof's.)\n",
    ]
    rows = [
        (f"{one['sigma']:g}", name, *(f"{value:.3f}" for value in values))
        for one in found
        for name, values in one["quantiles"].items()
    ]
    return [*lines, table(("σ", "method", "5 %", "50 %", "95 %"), rows), ""]


def _figure_3(rows: list[dict[str, Any]]) -> list[str]:
    ratios = "; ".join(f"{p.model}: √{p.squared_ratio}" for p in theory.PANELS)
    cells = [
        (
            row["model"],
            f"{row['epsilon']:g}",
            f"{row['sigma']:.3f}",
            "-" if row["printed"] is None else f"{row['printed']:.3f}",
            f"{row['dp_sgd_sigma']:.2f}",
            f"{row['guaranteed_epsilon']:.2f}",
            f"{row['true_delta']:.2g}",
        )
        for row in rows
    ]
    headers = (
        "model", "claimed ε", "σ by Theorem 6", "printed", "σ of DP-SGD", "guaranteed ε",
        "δ at the claimed ε",
    )  # fmt: skip
    return [
        "## Figure 3: σ against ε\n",
        "![](shuffling_figure_3.png)\n",
        "One step, σ in units of c. The paper does not give c′/c; these give what it prints: "
        f"{ratios}. "
        "For GPT-2-large it prints no numbers that can be read, and GPT-2's ratio is taken. "
        "Anyone who undoes the permutation has DP-SGD's δ in the last column, where at most "
        "10⁻⁵ is claimed.\n",
        table(headers, cells),
        "",
    ]


def _figure_4(rows: list[dict[str, Any]]) -> list[str]:
    names = ("ε", "DP-SGD", *(f"d = {d:.0e}" for d in theory.DIMENSIONS))
    cells = [(f"{row['epsilon']:g}", *(f"{s:.2f}" for s in row["sigma"])) for row in rows]
    return [
        "## Figure 4: σ over ε and dimension\n",
        "![](shuffling_figure_4.png)\n",
        "δ = 10⁻⁵, c′/c = √250, one step; the paper's smallest and largest σ, 0.86 and 13.2, are "
        "among them (at ε ≤ 1).\n",
        table(names, cells),
        "",
    ]


def _training(results: dict[str, Any]) -> list[str]:
    cells, times = [], []
    for name, shown in (("vit", "ViT, MNIST"), ("bert", "BERT, SST-2")):
        for kind, words in (
            ("without_noise", "no noise"),
            ("private", f"ε = {training.EPSILON:g}"),
        ):
            if f"{name}_{kind}" not in results:
                continue
            found = results[f"{name}_{kind}"]
            plain, shuffled = found["plain"], found["shuffled"]
            cells.append(
                (
                    shown, words, f"{plain['loss']:.5f}", f"{shuffled['loss']:.5f}",
                    f"{plain['accuracy']:.2%}", f"{shuffled['accuracy']:.2%}",
                    f"{found['weights_apart']:.1f}", f"{found['logits_apart']:.2g}",
                )
            )  # fmt: skip
            seconds = plain["epoch_seconds"], shuffled["epoch_seconds"]
            times.append((shown, words, *(f"{s:.1f}" for s in seconds)))
    heads = "model", "noise", "test loss, plain", "shuffled", "accuracy, plain", "shuffled"
    return [
        "## Table II: permutations change nothing\n",
        f"Scaled down: {training.EXAMPLES:,} examples, {training.EPOCHS} epochs, two layers of "
        "width 64, Adam, clipped to 1. Without noise both runs have the same batches, and their "
        "losses agree up to rounding though their weights are far apart. With noise they differ as "
        "two runs of DP-SGD do: noise of one place comes to another unit. (The paper prints equal "
        "losses there, too.) Where both accuracies are near 50 %, the private model has learned "
        "nothing: these examples are too few for it.\n",
        table((*heads, "‖weights apart‖", "logits apart, at most"), cells),
        "",
        "## Table VIII: seconds of an epoch\n",
        "The same runs, steps in turns in one process; medians of a step, times steps. "
        "`python -m benchmarks.shuffling` has the ratio for larger models.\n",
        table(("model", "noise", "plain", "shuffled"), times),
        "",
    ]


def _table_7(seconds: dict[str, float]) -> list[str]:
    cells = [
        (name, f"{1000 * each:,.0f}", f"{each / seconds['index']:.1f}")
        for name, each in seconds.items()
    ]
    return [
        "## Table VII: three ways to permute\n",
        "Rows and columns of a matrix of 10,000 × 10,000; the matrices of the products are there "
        "before.\n",
        table(("by", "ms", "times the index"), cells),
        "",
    ]
