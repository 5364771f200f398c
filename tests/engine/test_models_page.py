"""docs/models.md and docs/features.md are what the code and the tests say."""

import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = runpy.run_path(str(ROOT / ".ci" / "models_page.py"))


def test_the_page_is_current():
    assert (ROOT / "docs" / "models.md").read_text() == PAGE["page"](), "run python .ci/models_page.py docs/models.md"


def test_the_page_of_features_is_current():
    page = runpy.run_path(str(ROOT / ".ci" / "features_page.py"))["page"]()
    assert (ROOT / "docs" / "features.md").read_text() == page, "run python .ci/features_page.py docs/features.md"


def test_cells_of_vllm_name_tests_that_exist():
    """They run elsewhere, so they are looked up in the source. A test whose name has changed would leave "not run"."""
    for column in ("exact", "TP 2", "PP 2", "LoRA", "formats", "LoRA of formats", "FP8", "FP8, TP 2", "FP8 clusters"):
        assert PAGE["vllm_source"](column) is not None, column
    page = PAGE["page"]()
    assert "| `LlamaForCausalLM` | llama | [exact](../tests/vllm_runner/test_runner.py) |" in page
    assert "[LoRA](../tests/vllm_runner/test_adapters.py) |" in page
    assert "[LoRA, TP 2](../tests/vllm_runner/test_adapters.py) |" in page
    assert "[in float32](../tests/vllm_runner/test_formats.py) | not run | [LoRA]" in page
    assert "[in float16](../tests/vllm_runner/test_formats.py)" in page
    assert "| [FP8: llama, qwen3, mistral-window, gemma3](../tests/vllm_runner/test_fp8_pages.py) |" in page


def test_the_tests_that_it_names_exist():
    files = [PAGE["GENERATION"], PAGE["EXACT"]]
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--no-header", "-p", "no:cacheprovider", *files]
    listed = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True).stdout
    assert set(PAGE["tests"]()) <= set(listed.splitlines())
