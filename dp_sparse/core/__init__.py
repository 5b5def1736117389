"""What all subpackages use and no privacy rests on: errors, validation, XLA, replicas, files.

May use: nothing of the package. `graphs`, `replicas`, `validate` and `xla` are used
as modules.
"""

from dp_sparse.core import graphs, replicas, validate, xla
from dp_sparse.core.branches import seldom
from dp_sparse.core.config import Registered, fingerprint
from dp_sparse.core.console import stderr_without
from dp_sparse.core.errors import (
    BadExampleError,
    NoStepsLeftError,
    PrivacyError,
    UnsupportedLayerError,
    marked,
    require,
    translated,
)
from dp_sparse.core.files import (
    exclusive,
    first_file,
    local_form,
    synced,
    whole_file,
    whole_folder,
)
from dp_sparse.core.key_bytes import key_bytes
from dp_sparse.core.known_seeds import KnownSeeds, draws_entropy, seeds_of
from dp_sparse.core.layer_call import replaced_call
from dp_sparse.core.optional import require_matplotlib
from dp_sparse.core.unique import grouped, lower_bound
from dp_sparse.core.version import __version__

__all__ = [
    "BadExampleError",
    "KnownSeeds",
    "NoStepsLeftError",
    "PrivacyError",
    "Registered",
    "UnsupportedLayerError",
    "__version__",
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
    "replaced_call",
    "replicas",
    "require",
    "require_matplotlib",
    "seeds_of",
    "seldom",
    "stderr_without",
    "synced",
    "translated",
    "validate",
    "whole_file",
    "whole_folder",
    "xla",
]
