"""What all subpackages use and no privacy rests on: errors, validation, XLA, replicas, files.

May use: nothing of the package. `graphs`, `replicas`, `validate` and `xla` are used
as modules.
"""

from dp_sparse.core import graphs, replicas, validate, xla
from dp_sparse.core.config import Registered, fingerprint
from dp_sparse.core.errors import (
    BadExampleError,
    NoStepsLeftError,
    PrivacyError,
    UnsupportedLayerError,
    marked,
    require,
    stderr_without,
    translated,
)
from dp_sparse.core.files import (
    StateFile,
    damage_told,
    exclusive,
    first_file,
    local_form,
    read_arrays,
    require_room,
    synced,
    whole_file,
    whole_folder,
    write_arrays,
)
from dp_sparse.core.graphs import KnownSeeds, draws_entropy, replaced_call, seeds_of
from dp_sparse.core.key_bytes import key_bytes
from dp_sparse.core.replicas import rare_branch
from dp_sparse.core.validate import require_matplotlib
from dp_sparse.core.version import __version__
from dp_sparse.core.xla import grouped, lower_bound, places_of

__all__ = [
    "BadExampleError",
    "KnownSeeds",
    "NoStepsLeftError",
    "PrivacyError",
    "Registered",
    "StateFile",
    "UnsupportedLayerError",
    "__version__",
    "damage_told",
    "draws_entropy",
    "exclusive",
    "fingerprint",
    "first_file",
    "graphs",
    "grouped",
    "key_bytes",
    "local_form",
    "lower_bound",
    "marked",
    "places_of",
    "rare_branch",
    "read_arrays",
    "replaced_call",
    "replicas",
    "require",
    "require_matplotlib",
    "require_room",
    "seeds_of",
    "stderr_without",
    "synced",
    "translated",
    "validate",
    "whole_file",
    "whole_folder",
    "write_arrays",
    "xla",
]
