"""The methods against vectors of their original code (see vectors/manifest.json for what each case is)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.check import NOT_COVERED, run_case

VECTORS = Path(__file__).parent / "vectors"
CASES = json.loads((VECTORS / "manifest.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=[case["file"].removesuffix(".safetensors") for case in CASES])
def test_reference_vectors(case: dict) -> None:
    fault = run_case(VECTORS, case)
    if fault == NOT_COVERED:
        pytest.skip("a variant that kvbench does not have")
    assert fault is None


def test_the_manifest_names_every_file_once() -> None:
    """A case listed twice would count twice, a file that is not listed would never be looked at."""
    assert sorted(case["file"] for case in CASES) == sorted(path.name for path in VECTORS.glob("*.safetensors"))


def test_the_checker_sees_a_wrong_kernel() -> None:
    """A checker that cannot fail proves nothing."""
    case = next(case for case in CASES if case["file"] == "snapkv_max_k7_w16.safetensors")
    wrong = {**case, "params": {**case["params"], "kernel_size": 3}}
    assert run_case(VECTORS, wrong) not in (None, NOT_COVERED)
