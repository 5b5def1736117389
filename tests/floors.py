"""The rooms of the library from the ground up: a room may use the floors below its own."""

FLOORS = (
    {"core"},
    {"noise", "sampling"},
    {"clipping", "accounting"},
    {"selection", "guards"},
    {"optimizers", "layers"},
    {"step"},
    {"reports"},
    {"training"},
    {"distribution", "export", "auditing", "shuffling", "probabilities"},
    {"runs"},
)
