"""What the kernels of look-up and negative logits move, as their READMEs have it."""

from __future__ import annotations

import pytest

from tests.ascendc import lookup_counters
from turbogr.resources import kernels_dir


@pytest.mark.parametrize(
    ("kernel", "table"),
    [
        ("jagged_embedding_lookup", lookup_counters.lookup_table),
        ("negative_logits", lookup_counters.negative_table),
    ],
)
def test_the_readme_has_the_counters(kernel, table):
    readme = (kernels_dir() / "ascendc" / kernel / "README.md").read_text()
    assert table() in readme, "python -m tests.ascendc.lookup_counters prints the tables"
