"""The look-alike of KuaiRand-27K: its layout, its statistics against the published ones, its seeds, its refusals."""

import csv
import filecmp
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pytest

from turbogr.data import synthesize
from turbogr.data.synthesize import Synthesized, exposures_per_video, synthesize_kuairand
from turbogr.errors import ConfigurationError, DataError

# The data set's README, literally: the module under test has its own copy.
OFFICIAL = [
    "user_id", "video_id", "date", "hourmin", "time_ms", "is_click", "is_like", "is_follow", "is_comment", "is_forward",
    "is_hate", "long_view", "play_time_ms", "duration_ms", "profile_stay_time", "comment_stay_time", "is_profile_enter",
    "is_rand", "tab",
]  # fmt: skip
STANDARD = [
    "log_standard_4_08_to_4_21_27k_part1.csv",
    "log_standard_4_08_to_4_21_27k_part2.csv",
    "log_standard_4_22_to_5_08_27k_part1.csv",
    "log_standard_4_22_to_5_08_27k_part2.csv",
]
RANDOM = "log_random_4_22_to_5_08_27k.csv"
CHINA_MS = 8 * 3_600_000
Log = dict[str, np.ndarray]


def read(*paths: Path) -> Log:
    table = pa.concat_tables([pacsv.read_csv(path) for path in paths])
    assert all(pa.types.is_int64(kind) for kind in table.schema.types), "an official column is not whole numbers"
    return {name: table[name].to_numpy() for name in table.column_names}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Synthesized:
    """Many users with shortened histories: about the published repeat rate, 600,000 rows."""
    return synthesize_kuairand(tmp_path_factory.mktemp("made") / "log", users=4000, seed=3, rows=600_000)


@pytest.fixture(scope="module")
def log(made: Synthesized) -> Log:
    return read(*(made.path / name for name in STANDARD))


# -- layout -------------------------------------------------------------------------------------------------------------------


def test_files_and_columns_are_the_official_ones(made):
    assert sorted(path.name for path in made.path.iterdir()) == sorted([*STANDARD, RANDOM])
    for name, rows in made.files.items():
        with (made.path / name).open(newline="", encoding="utf-8") as file:
            lines = list(csv.reader(file))
        assert lines[0] == OFFICIAL
        assert len(lines) - 1 == rows
        assert {len(line) for line in lines} == {19}
        assert (made.path / name).read_bytes().endswith(b"\n")


def test_header_equals_the_real_file_s(made, shared_data):
    for real in (shared_data / "kuairand-27k-sample").glob("log_*.csv"):
        header = real.read_text(encoding="utf-8").splitlines()[0]
        assert (made.path / STANDARD[0]).read_text(encoding="utf-8").splitlines()[0] == header


def test_rows_stand_by_user_and_time_as_in_the_real_file(made, shared_data):
    def violations(log: Log) -> int:
        same_user = np.diff(log["user_id"]) == 0
        return int((np.diff(log["user_id"]) < 0).sum() + (np.diff(log["time_ms"])[same_user] < 0).sum())

    def falls(log: Log) -> int:
        return int((np.diff(log["time_ms"]) < 0).sum())

    real = read(shared_data / "kuairand-27k-sample" / "log_standard_4_08_to_4_21_27k.csv")
    assert violations(real) == 0
    assert falls(real) > 0, "the file as a whole is not sorted by time"
    for name in (*STANDARD, RANDOM):
        part = read(made.path / name)
        assert violations(part) == 0
        assert falls(part) > 0


def test_parts_divide_users_and_periods_divide_time(made):
    parts = [read(made.path / name) for name in STANDARD]
    for first, second in (parts[:2], parts[2:]):
        assert first["user_id"].max() < second["user_id"].min()
    assert len(np.intersect1d(parts[0]["user_id"], parts[2]["user_id"])) > 300, "users are in both periods"
    for part, (begin, end) in zip(parts, [(20220408, 20220421)] * 2 + [(20220422, 20220508)] * 2, strict=True):
        assert (part["date"].min(), part["date"].max()) == (begin, end)


def test_date_and_hour_are_those_of_time_ms_in_china(log):
    local = (log["time_ms"] + CHINA_MS).astype("datetime64[ms]")
    day = local.astype("datetime64[D]")
    month = day.astype("datetime64[M]")
    number = (
        (month.astype("datetime64[Y]").astype(int) + 1970) * 10_000
        + (month.astype(int) % 12 + 1) * 100
        + ((day - month).astype(int) + 1)
    )
    np.testing.assert_array_equal(number, log["date"])
    np.testing.assert_array_equal((local - day).astype(int) // 3_600_000 * 100, log["hourmin"])


def test_feedback_follows_the_official_definitions(made, log):
    for part in (log, read(made.path / RANDOM)):
        play, duration = part["play_time_ms"], part["duration_ms"]
        click = np.where(duration <= 7000, play >= duration, play > 7000)
        long_view = np.where(duration <= 18000, play >= duration, play >= 18000)
        np.testing.assert_array_equal(click, part["is_click"])
        np.testing.assert_array_equal(long_view, part["long_view"])
        assert duration.min() > 0
        np.testing.assert_array_equal(part["profile_stay_time"] > 0, part["is_profile_enter"] == 1)
        assert play.min() >= 0
        assert 0 <= part["tab"].min() <= part["tab"].max() <= 14
        for signal in OFFICIAL[5:12]:
            assert set(np.unique(part[signal])) == {0, 1} or part is not log, signal
    assert not log["is_rand"].any()
    order = np.argsort(log["video_id"], kind="stable")
    same_video = np.diff(log["video_id"][order]) == 0
    assert not np.diff(log["duration_ms"][order])[same_video].any(), "a video has one duration"


def test_random_log(made, log):
    part = read(made.path / RANDOM)
    assert part["is_rand"].all()
    assert part["video_id"].max() < 7583
    assert len(part["user_id"]) / len(log["user_id"]) == pytest.approx(1_186_059 / 322_278_385, rel=0.1)
    assert part["is_click"].mean() < log["is_click"].mean()
    # A random video replaces one of a list: the list's user and time are in the standard log.
    lists = set(zip(log["user_id"].tolist(), log["time_ms"].tolist(), strict=True))
    assert lists.issuperset(zip(part["user_id"].tolist(), part["time_ms"].tolist(), strict=True))


def test_every_user_and_video_occurs(made, log):
    assert len(np.unique(log["user_id"])) == made.users == 4000
    assert len(np.unique(log["video_id"])) == made.videos == log["video_id"].max() + 1
    assert len(log["user_id"]) == pytest.approx(600_000, rel=0.001)


# -- statistics, each beside a log that must fail it --------------------------------------------------------------------------


def tie_share(log: Log) -> float:
    order = np.lexsort((log["time_ms"], log["user_id"]))
    gaps = np.diff(log["time_ms"][order])[np.diff(log["user_id"][order]) == 0]
    return float((gaps < 1000).mean())


def exposures(log: Log) -> np.ndarray:
    return np.sort(np.unique(log["video_id"], return_counts=True)[1])[::-1]


def seen_once(log: Log) -> float:
    return float((exposures(log) == 1).mean())


def top_mass(share: float) -> Callable[[Log], float]:
    def mass(log: Log) -> float:
        counts = exposures(log)
        return float(counts[: round(len(counts) * share)].sum() / counts.sum())

    return mass


def slope(begin: float, end: float) -> Callable[[Log], float]:
    """Of log exposures by log rank, between two ranks of the complete data (32,038,725 videos)."""

    def fitted(log: Log) -> float:
        counts = exposures(log)
        ranks = np.unique(np.geomspace(*(rank / 32_038_725 * len(counts) for rank in (begin, end)), 50).astype(int))
        return -float(np.polyfit(np.log(ranks + 0.5), np.log(counts[ranks]), 1)[0])

    return fitted


def spread_of_log_lengths(log: Log) -> float:
    return float(np.log(np.unique(log["user_id"], return_counts=True)[1]).std())


def night_share(log: Log) -> float:
    return float((log["hourmin"] < 700).mean())


@pytest.fixture(scope="module")
def plain(log: Log) -> Log:
    """As many rows without any of the likeness: uniform users, videos and times."""
    rng = np.random.default_rng(0)
    size = len(log["user_id"])
    time = np.sort(rng.integers(log["time_ms"].min(), log["time_ms"].max(), size))
    return {
        "user_id": rng.integers(4000, size=size),
        "video_id": rng.integers(len(exposures(log)), size=size),
        "time_ms": time,
        "hourmin": (time + CHINA_MS) // 3_600_000 % 24 * 100,
    }


@pytest.mark.parametrize(
    ("statistic", "published", "tolerance"),
    [
        pytest.param(tie_share, 0.83, 0.005, id="ties"),
        pytest.param(seen_once, 0.54, 0.01, id="seen once"),
        pytest.param(top_mass(0.001), 0.147, 0.01, id="top 0.1 %"),
        pytest.param(top_mass(0.01), 0.441, 0.01, id="top 1 %"),
        pytest.param(top_mass(0.1), 0.799, 0.01, id="top 10 %"),
        pytest.param(slope(1e3, 1e5), 0.48, 0.06, id="slope of the middle"),
        # "1.0" is rounded: the real counts fall from 419 to 3 over these two decades, 1.07, and whole numbers bend the fit.
        pytest.param(slope(1e5, 1e7), 1.07, 0.06, id="slope of the tail"),
        pytest.param(spread_of_log_lengths, 0.959, 0.04, id="log-normal lengths"),
        # Counted over the original rows of ../shared; published nowhere.
        pytest.param(night_share, 0.097, 0.03, id="night"),
    ],
)
def test_statistic_is_the_published_one(log, plain, statistic, published, tolerance):
    assert statistic(log) == pytest.approx(published, abs=tolerance)
    assert statistic(plain) != pytest.approx(published, abs=tolerance), "the check would pass without any likeness"


def test_slope_of_the_head_at_full_size():
    """Ranks 10 to 1000 of 32 million videos are less than one video of a small log: looked at in the plan of a large one."""
    counts = exposures_per_video(322_278_385)
    assert len(counts) == pytest.approx(32_038_725, rel=5e-3)
    ranks = np.unique(np.geomspace(10, 1000, 50).astype(int))
    assert -np.polyfit(np.log(ranks), np.log(counts[ranks - 1]), 1)[0] == pytest.approx(0.25, abs=0.05)
    assert counts[0] == pytest.approx(15_380, rel=0.05)
    assert counts.sum() == 322_278_385


def test_lengths_and_clicks_at_published_length(tmp_path):
    made = synthesize_kuairand(tmp_path / "log", users=150, seed=1)
    log = read(*(made.path / name for name in STANDARD))
    lengths = np.bincount(log["user_id"])
    clicks = np.bincount(log["user_id"], weights=log["is_click"])
    # Means of 150 logarithms; four standard errors.
    assert np.log(lengths).mean() == pytest.approx(8.973, abs=4 * 0.959 / 150**0.5)
    assert np.log(clicks).mean() == pytest.approx(8.120, abs=4 * 0.840 / 150**0.5)
    assert np.corrcoef(np.log(lengths), np.log(clicks))[0, 1] > 0.75
    assert lengths.min() >= 100
    assert lengths.max() <= 228_000


def test_lengths_of_all_users_have_the_published_percentiles():
    plan = synthesize._Plan.draw(27_285, 0, 5_000_000)
    lengths = plan.lengths * (11_812 / plan.lengths.mean())  # the published mean
    assert np.log(lengths).mean() == pytest.approx(8.973, abs=0.02)
    assert np.log(lengths).std() == pytest.approx(0.959, abs=0.02)
    np.testing.assert_allclose(np.percentile(lengths, [10, 50, 90, 99]), [2188, 8594, 24587, 56230], rtol=0.05)


def test_histogram_of_exposures_is_the_real_one(shared_data, log):
    lines = (shared_data / "kuairand-27k-stats" / "log_standard_video_exposure_freq.csv").read_text(encoding="utf-8-sig")
    real = np.array([line.split(",") for line in lines.split()[1:]], dtype=np.int64)
    counts = exposures(log)
    for exposure in (1, 2, 3, 5, 10, 20, 100, 1000):
        expected = real[real[:, 0] >= exposure, 1].sum() / real[:, 1].sum()
        assert (counts >= exposure).mean() == pytest.approx(expected, rel=0.03, abs=2 / len(counts)), exposure


@pytest.mark.parametrize("rows", [1, 2, 9, 10, 11, 1000, 123_457])
def test_every_row_count_is_dealt_completely(rows):
    counts = exposures_per_video(rows)
    assert counts.sum() == rows
    assert counts.min() >= 1
    assert (np.diff(counts) <= 1).all(), "most popular first, but for rounding"


# -- seeds, refusals, interruptions --------------------------------------------------------------------------------------------


def test_equal_seeds_give_equal_bytes_for_any_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(synthesize, "_BATCH_ROWS", 3000)  # several batches in flight
    for name, seed, workers in (("a", 5, 1), ("b", 5, 4), ("c", 6, 1)):
        synthesize_kuairand(tmp_path / name, users=300, seed=seed, rows=30_000, workers=workers)
    _, different, failed = filecmp.cmpfiles(tmp_path / "a", tmp_path / "b", [*STANDARD, RANDOM], shallow=False)
    assert (different, failed) == ([], [])
    same, _, _ = filecmp.cmpfiles(tmp_path / "a", tmp_path / "c", [*STANDARD, RANDOM], shallow=False)
    assert same == [], "another seed gives other rows"


def test_smallest_log_has_no_file_without_rows(tmp_path):
    made = synthesize_kuairand(tmp_path / "log", users=2, seed=0, rows=2)
    assert sum(made.files.values()) >= 2
    assert sorted(made.files) == sorted(path.name for path in made.path.iterdir())
    assert all(rows > 0 for rows in made.files.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"users": 1}, "--users 1"),
        ({"seed": -1}, "--seed -1"),
        ({"users": 10, "rows": 9}, "--rows 9: 10 users"),
        ({"workers": 0}, "--workers 0"),
    ],
)
def test_impossible_numbers(tmp_path, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        synthesize_kuairand(tmp_path / "log", **{"users": 3, "seed": 0, **arguments})
    assert list(tmp_path.iterdir()) == []


def test_folder_in_use_is_refused_and_kept(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(DataError, match="not an empty folder"):
        synthesize_kuairand(tmp_path, users=3, seed=0, rows=30)
    with pytest.raises(DataError, match="not an empty folder"):
        synthesize_kuairand(tmp_path / "mine.txt", users=3, seed=0, rows=30)
    assert (tmp_path / "mine.txt").read_text() == "keep"
    (tmp_path / "empty").mkdir()
    assert synthesize_kuairand(tmp_path / "empty", users=3, seed=0, rows=30).path.is_dir()


def test_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        synthesize_kuairand(tmp_path / "file" / "log", users=3, seed=0, rows=30)


def test_full_disk_leaves_nothing(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # the system refuses the byte after, as a full disk does
    try:
        with pytest.raises(DataError, match="cannot be written"):
            synthesize_kuairand(tmp_path / "log", users=300, seed=0, rows=30_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_interruption_leaves_nothing(tmp_path, monkeypatch):
    original, calls = synthesize._batch, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(synthesize, "_BATCH_ROWS", 3000)
    monkeypatch.setattr(synthesize, "_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        synthesize_kuairand(tmp_path / "log", users=300, seed=0, rows=30_000)
    assert len(calls) > 3
    assert list(tmp_path.iterdir()) == []
