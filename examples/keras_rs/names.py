"""What runs: the scripts, and each with which optimizer at which ε."""

from pipelines.points import point

TWO_LINES = 2  # the optimizer and the data
PRIVATE, SPARSE = OPTIMIZERS = "recommended", "DP-AdaFEST"
TUTORIAL, ADAM, STEPS = "tutorial", "Adam", "step time"
SCRIPTS = (
    "basic_ranking",
    "dcn",
    "listwise_ranking",
    "basic_retrieval",
    "data_parallel_retrieval",
    "scann",
    "deep_recommender",
    "multi_task",
    "sequential_retrieval",
    "sas_rec",
)
_RUNS = (
    (PRIVATE, 8.0),
    (TUTORIAL, None),
    (PRIVATE, 3.0),
    (STEPS, None),
    (SPARSE, 8.0),
    (ADAM, None),
)
SAME_MODEL = ("data_parallel_retrieval", "scann")  # as basic_retrieval
POINTS = [
    point(script, name, epsilon, {}, (0,))
    for name, epsilon in _RUNS
    for script in SCRIPTS
    if script not in SAME_MODEL or name not in (SPARSE, ADAM)
]
