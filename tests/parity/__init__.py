"""Ours beside tensorflow-privacy, which is installed for them alone: `make parity`."""

import sys

sys.skip_tf_privacy_import = True  # else tensorflow-privacy imports Estimators, which are gone
