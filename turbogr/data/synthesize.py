"""A look-alike of KuaiRand-27K's logs, written from the published statistics of the complete data set.

What is alike: the file layout, events per user, clicks per user, exposures per video, impression lists that share one
``time_ms``, sessions, hours of the day, the share of the two periods, the rules that tie ``is_click`` and ``long_view`` to the
play time, and the random log. What is not: taste. Videos are dealt to users at random, so a model cannot learn more from
these logs than popularity; they are there to try sizes, memory and speed without a download.
"""

import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from turbogr.data import kuairand_statistics as stats
from turbogr.errors import ConfigurationError, DataError

_HOUR_MS, _DAY_MS = 3_600_000, 86_400_000
_WINDOW_MS = sum(stats.PERIOD_DAYS) * _DAY_MS
_BATCH_ROWS = 1 << 18  # part of the format of a seed: another value deals other rows
_CLICK_MS, _LONG_VIEW_MS = 7_000, 18_000


@dataclass(frozen=True)
class Synthesized:
    """What was written.

    Attributes:
        path: The folder.
        files: Rows of every file, by name; a file that would hold no row is not written.
        users: Number of users; ids are 0..users-1.
        videos: Number of videos of the standard logs; ids are 0..videos-1.
    """

    path: Path
    files: dict[str, int]
    users: int
    videos: int


def synthesize_kuairand(
    out: Path, users: int, seed: int, rows: int | None = None, *, workers: int | None = None
) -> Synthesized:
    """Write a look-alike of KuaiRand-27K in the official CSV layout (Gao et al., CIKM 2022).

    The catalogue grows with the rows (10.06 exposures per video, as published), so the histogram of exposures per video stays
    the same at every size; few users with full-length histories therefore see popular videos several times. Keep the users
    and shorten the histories (``rows``) where that matters. Equal arguments give equal bytes, whatever ``workers`` is.

    Args:
        out: Folder to write; absent or empty.
        users: Number of users, at least 2 (27,285 in the original; about 11,800 rows each).
        seed: Seed of all random numbers, not negative.
        rows: Scale the lengths of all histories so that about this many standard rows come out; None keeps the published
            lengths.
        workers: Threads that make and format rows; None takes one a core.

    Returns:
        What was written.

    Raises:
        ConfigurationError: A number is impossible.
        DataError: The folder is not empty or cannot be written.
    """
    _check(users, seed, rows, workers)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out}: is not an empty folder; give another --out or empty it")
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        plan = _Plan.draw(users, seed, rows)
        files = _write(plan, temporary, workers or os.cpu_count() or 1)
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{error.filename or out}: cannot be written ({reason}); mend that or give another --out") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    console.print(f"{sum(files.values()):,} rows written to {out}")
    return Synthesized(out, files, users, plan.num_videos)


def _check(users: int, seed: int, rows: int | None, workers: int | None) -> None:
    if users < 2:
        raise ConfigurationError(f"--users {users}: at least 2 users are needed, one for each part of the log")
    if seed < 0:
        raise ConfigurationError(f"--seed {seed}: the seed must not be negative")
    if rows is not None and rows < users:
        raise ConfigurationError(f"--rows {rows}: {users} users need at least {users} rows")
    if workers is not None and workers < 1:
        raise ConfigurationError(f"--workers {workers}: at least 1 is needed")


@dataclass(frozen=True)
class _Plan:
    """Everything that is drawn before the first row: the numbers of rows, and which video stands in which row.

    Attributes:
        seed: The seed.
        lengths: int64 [U], rows of every user.
        click_rates: float64 [U], share of a user's rows that are clicked.
        videos: int32 [N], the video of every row; every video has its published share exactly.
        num_videos: V.
    """

    seed: int
    lengths: np.ndarray
    click_rates: np.ndarray
    videos: np.ndarray
    num_videos: int

    @classmethod
    def draw(cls, users: int, seed: int, rows: int | None) -> Self:
        rng = np.random.default_rng([seed, 0])
        normal = rng.standard_normal((2, users))
        log_exposures = np.clip(np.polyval(stats.EXPOSURE_POLYNOMIAL[::-1], normal[0]), *np.log(stats.EXPOSURE_RANGE))
        standardised = (log_exposures - stats.EXPOSURE_LOG_MEAN) / stats.EXPOSURE_LOG_STD
        rest = (1 - stats.CLICK_EXPOSURE_CORRELATION**2) ** 0.5
        log_clicks = stats.CLICK_LOG_MEAN + stats.CLICK_LOG_STD * (
            stats.CLICK_EXPOSURE_CORRELATION * standardised + rest * normal[1]
        )
        exposures = np.exp(log_exposures)
        scale = 1.0 if rows is None else rows / exposures.sum()
        # Rounding the running sum, not each length, keeps the total.
        lengths = np.maximum(1, np.diff(np.rint(np.cumsum(exposures) * scale), prepend=0.0)).astype(np.int64)
        counts = exposures_per_video(int(lengths.sum()))
        videos = np.arange(len(counts), dtype=np.int32)
        rng.shuffle(videos)  # ids carry no rank
        dealt = np.repeat(videos, counts)
        rng.shuffle(dealt)
        click_rates = np.minimum(0.98, np.exp(log_clicks - log_exposures))
        return cls(seed, lengths, click_rates, dealt, len(counts))

    def batches(self) -> Iterator[tuple[int, int, int]]:
        """(first user, end user, part) of every batch: whole users, about ``_BATCH_ROWS`` rows, never both parts."""
        middle = (len(self.lengths) + 1) // 2
        for part, (first, end) in enumerate(((0, middle), (middle, len(self.lengths)))):
            begin = first
            while begin < end:
                total = np.cumsum(self.lengths[begin : min(end, begin + _BATCH_ROWS)])
                stop = begin + max(1, int(np.searchsorted(total, _BATCH_ROWS, side="right")))
                yield begin, stop, part
                begin = stop


def exposures_per_video(rows: int) -> np.ndarray:
    """Exposures of every video of a look-alike with that many rows, most popular first: int32 [V], sum ``rows``, each ≥ 1.

    The published counts by rank are stretched to the smaller catalogue and integrated over each video's share of the ranks,
    so that the head's mass is kept however small the catalogue is.
    """
    at_least, ranks = np.array(stats.VIDEOS_WITH_AT_LEAST, dtype=np.float64).T
    counts = np.arange(at_least[-1], 0, -1)
    bounds = np.exp(np.interp(np.log(counts), np.log(at_least), np.log(ranks)))  # videos with at least that many
    mass = np.cumsum(np.diff(bounds, prepend=0.0) * counts)
    videos = max(1, int(rows * (ranks[0] / mass[-1])))  # rounded down: one more would have less than one exposure
    edges = np.arange(videos + 1) * (ranks[0] / videos)
    running = np.interp(edges, np.concatenate(([0.0], bounds)), np.concatenate(([0.0], mass * (rows / mass[-1]))))
    return np.diff(np.rint(running)).astype(np.int32)


def _write(plan: _Plan, folder: Path, workers: int) -> dict[str, int]:
    """Make the batches in threads and append them in order; returns the rows of every file by name."""
    rows: dict[str, int] = {}
    opened: dict[str, BinaryIO] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    pool = ThreadPoolExecutor(workers)
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("rows", total=len(plan.videos))
            starts = np.concatenate(([0], np.cumsum(plan.lengths)))
            pending: deque[Future[list[tuple[str, int, pa.Buffer]]]] = deque()

            def write_next() -> None:
                for name, count, text in pending.popleft().result():
                    if name not in opened:
                        opened[name] = (folder / name).open("wb")
                        opened[name].write(f"{stats.COLUMNS}\n".encode())
                    opened[name].write(text)
                    rows[name] = rows.get(name, 0) + count
                    progress.update(task, advance=0 if name == stats.RANDOM_FILE else count)

            for begin, end, part in plan.batches():
                pending.append(pool.submit(_batch, plan, begin, end, part, int(starts[begin])))
                if len(pending) > workers:  # bounds memory: one finished batch waits while every thread has one
                    write_next()
            while pending:
                write_next()
    finally:
        pool.shutdown(cancel_futures=True)
        for file in opened.values():
            file.close()
    return {name: rows[name] for name in (*stats.STANDARD_FILES, stats.RANDOM_FILE) if name in rows}


def _batch(plan: _Plan, begin: int, end: int, part: int, first_row: int) -> list[tuple[str, int, pa.Buffer]]:
    """Rows of the users ``begin..end-1``, by user and time, as (file name, rows, CSV text) for every file that has some."""
    rng = np.random.default_rng([plan.seed, 1, begin])
    lengths = plan.lengths[begin:end]
    user = np.repeat(np.arange(end - begin, dtype=np.int32), lengths)
    new_list = rng.random(len(user), dtype=np.float32) >= stats.TIE_SHARE
    new_list[np.cumsum(lengths) - lengths] = True
    time = _list_times(rng, user[new_list])
    tab = _draw(rng, len(time), stats.TAB_SHARES)
    of_list = np.cumsum(new_list, dtype=np.int32) - 1
    videos = plan.videos[first_row : first_row + len(user)]
    late = (time >= stats.PERIOD_DAYS[0] * _DAY_MS)[of_list]
    replaced = np.flatnonzero(late & (rng.random(len(user), dtype=np.float32) < stats.RANDOM_PER_STANDARD))
    candidates = rng.integers(min(stats.CANDIDATES, plan.num_videos), size=len(replaced), dtype=np.int32)
    pieces = []
    for name, rows, video, factor in (
        (stats.STANDARD_FILES[part], np.flatnonzero(~late), videos, 1.0),
        (stats.STANDARD_FILES[2 + part], np.flatnonzero(late), videos, 1.0),
        (stats.RANDOM_FILE, replaced, candidates, stats.RANDOM_CLICK_FACTOR),
    ):
        if len(rows):
            who, random = user[rows], name == stats.RANDOM_FILE
            when = time[of_list[rows]]
            text = _format(
                rng,
                user=who + begin,
                video=video if random else video[rows],
                time=when,
                click_rate=(plan.click_rates[begin:end] * factor).astype(np.float32)[who],
                random=random,
                tab=np.ones_like(who) if random else tab[of_list[rows]],
            )
            pieces.append((name, len(rows), text))
    return pieces


def _draw(rng: np.random.Generator, size: int, shares: tuple[float, ...] | np.ndarray) -> np.ndarray:
    """Indices drawn with the given shares: int64 [size]."""
    bounds = np.cumsum(shares)
    return np.searchsorted(bounds[:-1] / bounds[-1], rng.random(size), side="right")


def _list_times(rng: np.random.Generator, user: np.ndarray) -> np.ndarray:
    """Times of impression lists in ms since the window's start: int64 [L], rising within each user.

    The middle of a session lies at an hour drawn by the day's and the hour's share; gaps are log-uniform within their bins.

    Args:
        rng: Random numbers.
        user: int32 [L], rising.
    """
    session_share = stats.LONG_GAP_SHARE / (1 - stats.TIE_SHARE)
    new_session = (rng.random(len(user), dtype=np.float32) < session_share) | (np.diff(user, prepend=-1) != 0)
    first = np.flatnonzero(new_session)
    day_share = np.repeat(np.array(stats.PERIOD_BYTES) / stats.PERIOD_DAYS, stats.PERIOD_DAYS)
    hour = _draw(rng, len(first), np.outer(day_share, stats.HOURS).ravel())
    middle = hour * _HOUR_MS + rng.integers(_HOUR_MS, size=len(first))
    cumulative = np.cumsum([0.0] + [share for _, share in stats.SHORT_GAPS])
    bounds = np.log([1000] + [bound for bound, _ in stats.SHORT_GAPS])
    gap = np.exp(np.interp(rng.random(len(user)) * cumulative[-1], cumulative, bounds))
    elapsed = np.cumsum(gap).astype(np.int64)
    last = np.append(first[1:], len(user)) - 1
    shift = middle - (elapsed[first] + elapsed[last]) // 2
    # Sessions that leave the window go on at its other end; otherwise its first and last millisecond would collect them all.
    time = (elapsed + shift[np.cumsum(new_session) - 1]) % _WINDOW_MS
    key = (user.astype(np.int64) << 32) | time
    key.sort()
    return key & 0xFFFFFFFF


def _format(
    rng: np.random.Generator,
    *,
    user: np.ndarray,
    video: np.ndarray,
    time: np.ndarray,
    click_rate: np.ndarray,
    random: bool,
    tab: np.ndarray,
) -> pa.Buffer:
    """Draw the feedback of n rows (all arguments [n], times in ms since the window's start) and format them as CSV lines."""
    size = len(user)
    click = rng.random(size, dtype=np.float32) < click_rate
    duration = _DURATIONS[_hash16(video)]
    # `is_click` and `long_view` as the data set's README defines them.
    enough = np.minimum(duration, _CLICK_MS + 1)
    play = (enough * (rng.random(size, dtype=np.float32) - stats.UNPLAYED_SHARE) / (1 - stats.UNPLAYED_SHARE)).astype(np.int32)
    play = np.maximum(play, 0)
    clicked = np.flatnonzero(click)
    play[clicked] = enough[clicked] + _log_normal(rng, len(clicked), stats.EXTRA_PLAY_MEDIAN_MS, stats.EXTRA_PLAY_LOG_STD)
    flags = click.astype(np.int32)
    for rates in stats.SIGNAL_RATES.values():
        flags = flags * 2 + _signal(rng, click, rates)
    flags = flags * 2 + (play >= np.minimum(duration, _LONG_VIEW_MS))
    enter = _signal(rng, click, stats.PROFILE_ENTER_RATES)
    profile_stay, comment_stay = np.zeros((2, size), dtype=np.int32)
    for stay, chosen in ((profile_stay, enter), (comment_stay, _signal(rng, click, stats.COMMENT_STAY_RATES))):
        rows = np.flatnonzero(chosen)
        stay[rows] = _log_normal(rng, len(rows), stats.STAY_MEDIAN_MS, stats.STAY_LOG_STD)
    fields = (
        user,
        video,
        _DATE_HOUR.take(pa.array(time // _HOUR_MS)),
        time + stats.WINDOW_START_MS,
        _FLAGS.take(pa.array(flags)),
        play,
        duration,
        profile_stay,
        comment_stay,
        _TAILS.take(pa.array((enter * 2 + random) * len(stats.TAB_SHARES) + tab)),
    )
    # Joined columns are the file's text already: twice as fast as a CSV writer, which quotes and escapes what cannot occur.
    texts = [field if isinstance(field, pa.Array) else pc.cast(pa.array(field), pa.string()) for field in fields]
    return pc.binary_join_element_wise(*texts, ",").buffers()[2]


def _signal(rng: np.random.Generator, click: np.ndarray, rates: tuple[float, float]) -> np.ndarray:
    """A 0/1 signal with one rate without and one with a click: int32 [n]."""
    bounds = np.rint(np.array(rates) * 65536).astype(np.uint16)
    drawn = rng.integers(65536, size=len(click), dtype=np.uint16)
    return (drawn < bounds[click.view(np.uint8)]).astype(np.int32)


def _log_normal(rng: np.random.Generator, size: int, median: float, log_std: float) -> np.ndarray:
    """Whole milliseconds, at most half an hour: int32 [size]."""
    drawn = median * np.exp(log_std * rng.standard_normal(size, dtype=np.float32))
    return np.minimum(drawn, _HOUR_MS // 2).astype(np.int32)


def _hash16(video: np.ndarray) -> np.ndarray:
    """16 bits that depend on the id only, so that a video has one duration without a table of all videos."""
    return (video.astype(np.uint32) * np.uint32(2654435761)) >> np.uint32(16)


_DURATIONS = np.exp(
    np.interp(np.arange(65536) / 65535, list(stats.DURATION_QUANTILES), np.log(list(stats.DURATION_QUANTILES.values())))
).astype(np.int32)
_DATE_HOUR = pa.array([f"{date},{hour * 100}" for date in stats.DATES for hour in range(24)])
_FLAGS = pa.array([",".join(f"{flags:07b}") for flags in range(128)])
_TAILS = pa.array(
    [f"{enter},{random},{tab}\n" for enter in (0, 1) for random in (0, 1) for tab in range(len(stats.TAB_SHARES))]
)
