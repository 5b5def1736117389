"""Ours beside other libraries, in an environment of its own: `make parity`."""

import sys

sys.skip_tf_privacy_import = True  # else tensorflow-privacy imports Estimators, which are gone
