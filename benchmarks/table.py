"""The figures of the benchmarks in docs/results, written from their results.

`python -m benchmarks.NAME --out benchmarks/results.jsonl` adds a line to the results;
`python -m benchmarks.table` takes the newest line of each benchmark and rewrites the text between
two markers of docs/results/benchmarks.md, in `PAGES` each table that a benchmark printed, between
markers of its own, and in README the times of the optimizers. With `--check` it writes nothing,
and fails if a page has another text.
"""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results.jsonl", ROOT / "docs/results/benchmarks.md"
BEGIN, END = "<!-- begin: python -m benchmarks.table -->", "<!-- end -->"
CLIPPING = ROOT / "docs/results/clipping.md"
PAGES = (ROOT / "docs/results/selection.md", CLIPPING)
README = ROOT / "README.md"
STEPS = {"DPSGDOptimizer": "dpsgd", "DPAdaFESTOptimizer": "adafest", "DPFESTOptimizer": "fest"}
SPEED_UPS, BOUND = "<!-- speed-ups -->", "<!-- bounds -->"
PRINTED = re.compile(r"<!-- printed: (\w+) -->\n.*?<!-- end -->", re.DOTALL)

BOUNDS = (  # of clipping at batch 128: what, the bound, its metric, whether it is the least
    ("MLP over stock Keras", 1.3, "mlp_over_nonprivate_128", False),
    ("CNN over stock Keras", 1.3, "cnn_over_nonprivate_128", False),
    ("Transformer over stock Keras", 1.3, "transformer_over_nonprivate_128", False),
    ("RNN over stock Keras", 1.6, "rnn_over_nonprivate_128", False),
    ("LSTM over stock Keras", 1.6, "lstm_over_nonprivate_128", False),
    ("naive loop over ours, MLP", 54, "mlp_naive_over_ours_128", True),
    ("naive loop over ours, CNN", 10, "cnn_naive_over_ours_128", True),
    (
        "memory that a step adds, over stock Keras, worst model",
        1.25,
        "memory_over_nonprivate_max",
        False,
    ),
)

Results = dict[str, dict[str, Any]]  # the JSON line of each benchmark


@dataclasses.dataclass(frozen=True)
class Row:
    """What is measured, by which benchmark, and its metrics' keys in a format string."""

    what: str
    benchmark: str
    value: str


ROWS = (
    Row(
        "DP-AdaFEST step, 1e7 rows over 1e5 rows (one table, d = 64, batch 1,024)",
        "vocabulary_scaling",
        "{flatness_1e7_over_1e5}",
    ),
    Row(
        "DP-SGD step with dense noise over DP-AdaFEST step, 1e7 rows",
        "vocabulary_scaling",
        "{dpsgd_over_adafest_1e7}",
    ),
    Row(
        "DP-AdaFEST step over the leanest non-private gather and scatter, 1e7 rows",
        "vocabulary_scaling",
        "{adafest_over_nonprivate_1e7}",
    ),
    Row(
        "DP-AdaFEST step over stock Keras' step without privacy, which writes a dense gradient, "
        "1e7 rows",
        "vocabulary_scaling",
        "{adafest_over_stock_1e7:.1%}",
    ),
    Row(
        "Fixed cost of a step (a table of 1,000 rows): stock Keras over the leanest step; "
        "DP-AdaFEST over stock Keras",
        "vocabulary_scaling",
        "{stock_over_nonprivate_1e3}; {adafest_over_stock_1e3}",
    ),
    Row("XLA over graph mode, the pCTR step", "devices", "{xla_over_graph_pctr}"),
    Row(
        "Step under XLA, 1e7 rows over 1e5 rows (one table)",
        "devices",
        "{xla_flatness_1e7_over_1e5}",
    ),
    Row(
        "pCTR private step over stock Keras on two replicas, both under one strategy",
        "devices",
        "{replica_overhead}",
    ),
    Row(
        "pCTR private step over stock Keras, 26 tables, batch 2,048, Adagrad, "
        "1e5 rows in all; 1e6; 1e7",
        "pctr_step",
        "{private_over_stock_1e5}; {private_over_stock_1e6}; {private_over_stock_1e7}",
    ),
    Row(
        "Per-example clipping over stock Keras, batch 128: MLP; CNN; RNN; LSTM; Transformer "
        "([why](clipping.md))",
        "clipping",
        "{mlp_over_nonprivate_128}; {cnn_over_nonprivate_128}; {rnn_over_nonprivate_128}; "
        "{lstm_over_nonprivate_128}; {transformer_over_nonprivate_128}",
    ),
    Row(
        "Memory that such a step adds, over stock Keras: the worst of the five",
        "clipping",
        "{memory_over_nonprivate_max}",
    ),
    Row(
        "One gradient after the other over per-example clipping, batch 128: MLP; CNN",
        "clipping",
        "{mlp_naive_over_ours_128}; {cnn_naive_over_ours_128}",
    ),
    Row(
        "Tied table of 50,000 rows over stock Keras: step; memory",
        "tied_embedding",
        "{step_over_nonprivate_50000}; {memory_over_nonprivate_50000}",
    ),
    Row(
        "Private step of a language model (6 layers of width 384, LoRA, 64 x 64 tokens) over the "
        "leanest non-private one, word table of 50,265 rows; 250,002",
        "language_step",
        "{step_over_nonprivate_50k}; {step_over_nonprivate_250k}",
    ),
    Row(
        "Table's share of such a step, DP-SGD over DP-AdaFEST, 50,265 rows; 250,002",
        "language_step",
        "{dpsgd_table_over_adafest_table_50k}; {dpsgd_table_over_adafest_table_250k}",
    ),
    Row(
        "Private step of a next-item Transformer over stock Keras, batch 1,024, 200 items: step; "
        "memory, by micro-batches of 256; Re-Attention over plain attention, both private",
        "sequence_step",
        "{step_over_nonprivate}; {memory_over_nonprivate}; {re_attention_over_vanilla}",
    ),
    Row(
        "Step that gives memory back over one that keeps it ([why](../advice.md#on-a-cpu)), the "
        "same model, batch 256: stock Keras; private",
        "freed_memory",
        "{stock_given_back_over_kept}; {vanilla_given_back_over_kept}",
    ),
    Row(
        "Selection of rows alone, 1e9 rows over 1e5 rows",
        "selection",
        "{threshold_flatness_1e9_over_1e5}",
    ),
    Row(
        "Step of DP-FEST; DP-AdaFEST+; exponential selection; LazyDP, 1e7 rows over 1e5 rows "
        "([table](selection.md))",
        "selection",
        "{fest_flatness_1e7_over_1e5}; {adafest_plus_flatness_1e7_over_1e5}; "
        "{exponential_flatness_1e7_over_1e5}; {lazy_flatness_1e7_over_1e5}",
    ),
    Row(
        "Examples a second that `select_top_k` counts, 26 features",
        "selection",
        "{top_k_rows_per_second}",
    ),
    Row(
        "Isolation checks, part of the time of a pCTR run of 200 steps",
        "isolation",
        "{checks_share:.1%}",
    ),
    Row(
        "Noise value of the training step over one of TensorFlow's own sampler",
        "noise",
        "{fused_over_one_normal}",
    ),
    Row(
        "First step of the pCTR model, traced and checked, over that of stock Keras: in a new "
        "process; of a further model",
        "planning",
        "{first_step_over_stock}; {second_fit_over_stock}",
    ),
    Row(
        "Seconds to calibrate a plan of 1e6 examples and 20,000 steps; for a table of 18 plans",
        "planning",
        "{calibrate_seconds_median}; {plan_table_seconds_18}",
    ),
    Row(
        "Offline Poisson batches: rows read a second; rows prepared a second by one core",
        "input",
        "{read_rows_per_second}; {prepare_rows_per_second_per_core}",
    ),
    Row(
        "Wait for the next of these batches, part of a pCTR training step",
        "input",
        "{input_wait_share:.1%}",
    ),
    Row(
        "Memory of that preparation, 5,000,000 rows over 100,000",
        "input",
        "{prepare_memory_many_over_few}",
    ),
    Row(
        "Peak memory over that of a table of 1e7 rows, d = 64, while its model is exported; its "
        "rows compared; a delta applied beside it",
        "export",
        "{export_memory_over_table}; {delta_memory_over_table}; {apply_memory_over_table}",
    ),
    Row(
        "Step of shuffled DP-SGD over one of DP-SGD: a small BERT; a small ViT",
        "shuffling",
        "{bert_overhead}; {vit_overhead}",
    ),
    Row(
        "Products with permutation matrices over index gathers, 10,000 × 10,000",
        "shuffling",
        "{matmul_over_index}",
    ),
    Row(
        "What `recommend` learns, as a part of the best gain over a constant that the study found: "
        "ranking; clicks; images ([table](defaults.md))",
        "recipes",
        "{recipe_share_of_gain_ranking}; {recipe_share_of_gain_clicks}; "
        "{recipe_share_of_gain_images}",
    ),
    Row(
        "Kinds of operations of a DP-AdaFEST step that have no GPU kernel, and so run on the host "
        "(`python -m benchmarks.gpu` on a machine with a GPU compares numbers and times)",
        "gpu",
        "{operations_without_gpu_kernel:.0f}",
    ),
    Row(
        "The demo at ε = 1 with DP-AdaFEST: AUC; calibrated log loss over a constant's; table "
        "entries over those that get noise in a step",
        "demo",
        "{demo_adafest_auc:.3f}; {demo_log_loss_over_constant:.3f}; {demo_reduction:,.0f}",
    ),
    Row(
        "The demo: AUC without privacy less AUC of DP-AdaFEST at ε = 3; minutes of all its runs",
        "demo",
        "{demo_auc_below_no_privacy_eps3:.3f}; {demo_minutes:.1f}",
    ),
    Row(
        "Step of a model with a compute_loss of its own over the same loss of compile",
        "custom_loss",
        "{custom_over_compiled}",
    ),
    Row(
        "Step of sampled negatives under DP-AdaFEST over stock in-batch negatives",
        "custom_loss",
        "{sampled_over_in_batch}",
    ),
    Row(
        "Step of DP-AdaFEST with windows of 64 steps over one without: pCTR, one table; one table "
        "of 1e7 rows over 1e5; memory of the sum over 16 bytes for each row of a window",
        "windowed_selection",
        "{window_over_plain_step}, {window_over_plain_step_one_table}; "
        "{window_flatness_1e7_over_1e5}; {window_memory_over_touched_rows}",
    ),
    Row(
        "A step of tensorflow-privacy's DP-SGD over one of DP-AdaFEST, one table of 1e5, 1e6 and "
        "1e7 rows; its memory over that of DP-AdaFEST, 1e6 and 1e7 rows",
        "table_size",
        "{tensorflow_privacy_over_adafest_1e5}; {tensorflow_privacy_over_adafest_1e6}; "
        "{tensorflow_privacy_over_adafest_1e7}; {memory_over_adafest_1e6}; "
        "{memory_over_adafest_1e7}",
    ),
    Row(
        "CSV to records by write_records, rows a second (five columns, two of them hashed text)",
        "custom_loss",
        "{csv_rows_per_second}",
    ),
)


class Figure(float):
    """Written with two decimals below 10, three digits from there on."""

    def __format__(self, form: str) -> str:
        """As `form` says, if it says anything."""
        if form:
            return super().__format__(form)
        if self >= 1e6:
            return f"{self / 1e6:.1f} million"
        return f"{float(f'{self:.3g}'):,.0f}" if self >= 100 else f"{self:.{1 + (self < 10)}f}"


def by_date(lines: Sequence[str]) -> list[dict[str, Any]]:
    """The results, newest last."""
    return sorted(map(json.loads, lines), key=lambda line: line["date"])


def newest(measured: Sequence[dict[str, Any]]) -> Results:
    """The last measured line of each benchmark; the lines are those of `by_date`.

    Raises:
        ValueError: A benchmark of the table has no line.
    """
    found: Results = {}
    for line in measured:
        found[line["benchmark"]] = line
    for name in {row.benchmark for row in ROWS} - found.keys():
        raise ValueError(
            f"Expected a line of {name} among the results: run "
            f"`python -m benchmarks.{name} --out benchmarks/results.jsonl`."
        )
    return found


def table(results: Results) -> str:
    """The text between the markers."""
    lines = ["| | measured | printed by |", "|---|---|---|"]
    for row in ROWS:
        figures = {key: Figure(value) for key, value in results[row.benchmark]["metrics"].items()}
        command = f"`{_command(row.benchmark, results[row.benchmark]['quick'])}`"
        lines.append(f"| {row.what} | {row.value.format(**figures)} | {command} |")
    return "\n".join([*lines, "", *_origins(results)])


def _origins(results: Results) -> list[str]:
    """A line for each machine, date and commit; the benchmarks are named if there are several."""
    benchmarks: dict[str, list[str]] = {}
    for name in dict.fromkeys(row.benchmark for row in ROWS):
        benchmarks.setdefault(_origin(results[name]), []).append(name)
    if len(benchmarks) == 1:
        return [f"Measured on {origin}." for origin in benchmarks]
    return [f"- On {origin}: {', '.join(names)}." for origin, names in benchmarks.items()]


def _origin(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    day, _, _ = result["date"].partition("T")
    return (
        f"{machine['cpu']}, {machine['cores']} cores, TensorFlow {versions['tensorflow']}, "
        f"Keras {versions['keras']}; {day}, commit {result['commit']}"
    )


def rewritten(page: str, text: str, begin: str) -> str:
    """`page` with `text` between the marker `begin` and the next end.

    Raises:
        ValueError: There is not one such marker, and an end below it.
    """
    before, found, rest = page.partition(begin)
    _, end, after = rest.partition(END)
    if not (found and end) or begin in rest:
        raise ValueError(f"Expected one line {begin!r} and, below it, {END!r}.")
    return f"{before}{begin}\n{text}\n{end}{after}"


def _table_of(name: str, measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The newest line of a benchmark that has its table.

    Raises:
        ValueError: There is none.
    """
    found = [line for line in measured if line["benchmark"] == name and "printed" in line]
    if not found:
        raise ValueError(
            f"Expected the table of {name} among the results: run `{_command(name, False)} "
            "--out benchmarks/results.jsonl`."
        )
    return found[-1]


def printed(page: str, measured: Sequence[dict[str, Any]]) -> str:
    """`page` with the newest table of each benchmark that it names.

    Raises:
        ValueError: No line of a benchmark has its table.
    """

    def block(found: re.Match[str]) -> str:
        line = _table_of(found[1], measured)
        origin = f"`{_command(found[1], line['quick'])}`, on {_origin(line)}:"
        text = "\n".join(line["printed"])
        return f"<!-- printed: {found[1]} -->\n{origin}\n\n```\n{text}\n```\n{END}"

    return PRINTED.sub(block, page)


def speed_ups(measured: Sequence[dict[str, Any]]) -> str:
    """How many times as long others take as ours, at the largest batch of each model.

    Nothing that clips is faster than a step without privacy, so the loop over that is the limit.
    """
    lines = _table_of("clipping", measured)["printed"]
    names, *rows = (re.split(r"\s{2,}", line.strip()) for line in lines)
    largest = {row[0]: dict(zip(names, row, strict=True)) for row in rows}  # batches grow
    pairs = [("nxBP", "ours"), ("nxBP", "stock"), ("multiLoss", "ours")]
    pairs.append(("tensorflow-privacy", "ours"))
    text = "| model | loop over ours | limit | multiLoss over ours | tensorflow-privacy over ours |"
    text += "\n|---|---|---|---|---|"
    for model, cells in largest.items():
        text += f"\n| {model} | {' | '.join(_ratio(cells, *pair) for pair in pairs)} |"
    return text


def bounds(measured: Sequence[dict[str, Any]]) -> str:
    """The bounds of clipping at batch 128, beside the range that all stored runs measured."""
    runs = [line["metrics"] for line in measured if line["benchmark"] == "clipping"]
    text = "| | wanted | measured | |\n|---|---|---|---|"
    for what, wanted, key, is_least in BOUNDS:
        found = [metrics[key] for metrics in runs]
        low, high = Figure(min(found)), Figure(max(found))
        met = low >= wanted if is_least else high <= wanted
        verdict = "met" if met else "missed"
        text += f"\n| {what} | {wanted:g} | {low} to {high} | {verdict} |"
    return text


def _ratio(cells: dict[str, str], above: str, below: str) -> str:
    if "-" in (cells[above], cells[below]):
        return ""
    times = (float(cells[name].replace(",", "")) for name in (above, below))
    return f"{Figure(next(times) / next(times))}"


def timed(readme: str, measured: Sequence[dict[str, Any]]) -> str:
    """README with the milliseconds of a step at 1e5 and 1e6 rows, as `benchmarks.selection` has."""
    cells = [line.split() for line in _table_of("selection", measured)["printed"]]
    for optimizer, step in STEPS.items():
        times = {cell[1]: cell[2] for cell in cells if cell[0] == step}
        row = re.compile(rf"^(\| `{optimizer}` \|.*\| )[^|]*( \|)$", re.MULTILINE)
        readme = row.sub(rf"\g<1>{times['1e5']}; {times['1e6']}\2", readme)
    return readme


def _command(name: str, quick: bool) -> str:
    module, _, sweep = name.partition("clipping_")
    own = f"benchmarks.clipping --sweep {sweep}" if sweep else f"benchmarks.{module}"
    return f"python -m {own}{' --quick' if quick else ''}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites the pages, or compares them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    options = parser.parse_args(arguments)
    measured = by_date(RESULTS.read_text(encoding="utf-8").splitlines())
    pages = {path: path.read_text(encoding="utf-8") for path in (PAGE, README, *PAGES)}
    wanted = {path: printed(pages[path], measured) for path in PAGES}
    for begin, text in ((SPEED_UPS, speed_ups(measured)), (BOUND, bounds(measured))):
        wanted[CLIPPING] = rewritten(wanted[CLIPPING], text, begin)
    wanted[README] = timed(pages[README], measured)
    wanted[PAGE] = rewritten(pages[PAGE], table(newest(measured)), BEGIN)
    differing = [path for path, text in wanted.items() if pages[path] != text]
    for path in differing:
        if options.check:
            problem = "is not as its results: run `python -m benchmarks.table`."
            print(f"{path} {problem}", file=sys.stderr)
        else:
            path.write_text(wanted[path], encoding="utf-8")
    return int(options.check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
