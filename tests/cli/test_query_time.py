"""`turbogr predict --data.query_time`: when a recommendation is asked for counts, in models that know time."""

import duckdb
import numpy as np
import pytest

from tests.cli.support import fit
from turbogr.cli import main


@pytest.mark.parametrize(("backbone", "aware"), [("HSTU", True), ("FuXi", True), ("SASRec", False)])
def test_query_time_reaches_the_predictions(backbone, aware, prepared):
    fit(prepared, f"--model.backbone={backbone}", "--trainer.max_epochs=1")
    latest = int(np.load(prepared / "times.npy").max())
    scores = []
    for options in ([], [f"--data.query_time={latest}"], [f"--data.query_time={latest + 30 * 86_400}"]):
        main(["predict", "-c", "run/config.yaml", "--model.predict_k=3", *options])
        rows = duckdb.sql("SELECT user_id, scores FROM 'run/predictions.parquet' ORDER BY user_id").fetchall()
        assert len(rows) == 60
        scores.append([score for _, scores in rows for score in scores])
    # Without the option each user is asked at the time of the own last event.
    assert (scores[0] != scores[1]) == aware
    assert (scores[1] != scores[2]) == aware
