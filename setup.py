"""Packaging of `dp_sparse`; the tools are configured in `pyproject.toml`."""

from pathlib import Path
from runpy import run_path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

# The library touches Keras internals, each under a contract test: the minor version is pinned.
REQUIRED = [
    "tensorflow>=2.20,<2.22",
    "keras>=3.15,<3.16",
    "dp-accounting>=0.6,<0.7",
    "h5py>=3.12,<4",
    "numpy>=2.1,<3",
    "scipy>=1.14,<2",
    "tqdm>=4.66,<5",
]

# Optional for users, who import it themselves; its layers' clipping rules are tested.
KERAS_HUB = "keras-hub>=0.32,<0.33"

PIPELINES = [
    "ml_collections>=1.1,<2",
    "absl-py>=2.3,<3",
    "matplotlib>=3.10,<4",
    KERAS_HUB,  # BERT, RoBERTa, XLM-R and their tokenizers inside a graph
    "safetensors>=0.8,<0.9",  # their weights, read by NumPy
    "tokenizers>=0.23,<0.24",  # their text, before training
]

# Optional for users, as keras-hub.
RECOMMENDERS = [
    "keras-rs>=0.4,<0.5",
    "tensorflow-recommenders>=0.7.7,<0.8",
    "tf-keras>=2.20,<2.22",  # TF_USE_LEGACY_KERAS=1, which tensorflow-recommenders needs
]

DATA = [
    "tensorflow-datasets>=4.9.10,<5",
    "importlib_resources>=6,<8",  # its data sets import it, and it does not require it
    "pyarrow>=23,<26",  # apache-beam's upper bound
    "apache-beam>=2.77,<3",
]

# No resolver can install it beside the rest: it pins older dp-accounting, numpy and dm-tree.
# `make parity` alone reads this, and installs it apart and without what it requires.
PARITY = ["tensorflow-privacy>=0.9,<0.10"]

EXTRAS = {
    "nlp": [KERAS_HUB],
    "recommenders": RECOMMENDERS,
    "data": DATA,
    "pipelines": PIPELINES,
    "test": [
        "pytest>=9,<10",
        "pytest-xdist>=3.8,<4",
        "hypothesis>=6.150,<7",
        "mpmath>=1.3,<2",  # the reference of the normal quantile and of δ(ε)
        "pandas>=2.2,<4",  # data frames, which users bring
        "setuptools>=64",  # with wheel, builds the wheel that is tested
        "wheel>=0.43",
        *RECOMMENDERS,
        *DATA,
        *PIPELINES,
    ],
    "parity": PARITY,
    "docs": [
        "mkdocs>=1.6,<1.7",
        "mkdocs-material>=9.8,<9.9",
        "mkdocstrings>=1.0,<1.1",
        "mkdocstrings-python>=2.0,<2.1",
    ],
    "lint": ["ruff>=0.17,<0.18", "mypy>=2.4,<2.5"],
}

setup(
    name="dp-sparse",
    version=run_path(str(ROOT / "dp_sparse" / "core" / "version.py"))["__version__"],
    description="Differentially private Keras training whose embedding gradients stay sparse",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["dp_sparse", "dp_sparse.*"]),
    package_data={"dp_sparse": ["py.typed"]},
    install_requires=REQUIRED,
    extras_require=EXTRAS,
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
