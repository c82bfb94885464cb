"""KuaiRand-27K: the layout of its logs, and the statistics by which a look-alike is drawn (`turbogr.data.synthesize`)."""

# The data set's own description: Gao et al., CIKM 2022, https://doi.org/10.1145/3511808.3557624, and its README.
COLUMNS = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab"
)
STANDARD_FILES = tuple(
    f"log_standard_{period}_27k_part{part}.csv" for period in ("4_08_to_4_21", "4_22_to_5_08") for part in (1, 2)
)
RANDOM_FILE = "log_random_4_22_to_5_08_27k.csv"
CANDIDATES = 7_583  # videos of the random log; their ids come first
PERIOD_DAYS = (14, 17)
PERIOD_BYTES = (9.6, 13.2)  # GB of the two periods' standard logs, taken as their shares of the rows
RANDOM_PER_STANDARD = 1_186_059 / (322_278_385 * 13.2 / 22.8)  # random rows over standard rows of the same period
WINDOW_START_MS = 1_649_347_200_000  # 2022-04-08 00:00 in China, where `date` and `hourmin` are read
DATES = tuple([20220408 + day for day in range(23)] + [20220501 + day for day in range(8)])

# Statistics counted over the complete standard log (322,278,385 rows, 27,285 users, 32,038,693 videos seen).
# Log exposures of a user, by powers of a standard normal number: log-normal (mu 8.973, sigma 0.959) with the shorter upper tail
# of the 27,285 users (p10 2,188, p50 8,594, p90 24,587, p99 56,230; within 4 % of their sorted counts).
EXPOSURE_POLYNOMIAL, EXPOSURE_RANGE = (9.0624, 0.9221, -0.1049, 0.0101, 0.0050), (100, 228_000)
EXPOSURE_LOG_MEAN, EXPOSURE_LOG_STD = 8.973, 0.959
CLICK_LOG_MEAN, CLICK_LOG_STD, CLICK_EXPOSURE_CORRELATION = 8.120, 0.840, 0.865
# (exposures, videos with at least that many): slopes 0.25, 0.48 and 1.0 by rank, 54 % of videos with one exposure.
VIDEOS_WITH_AT_LEAST = (
    (1, 32038693), (2, 14731879), (3, 10390415), (4, 8236543), (5, 6864792), (6, 5923279), (8, 4688145), (10, 3921150),
    (14, 3002023), (20, 2253502), (30, 1612691), (50, 1041150), (80, 679677), (130, 421126), (200, 264836), (300, 161720),
    (500, 74968), (800, 31405), (1200, 14765), (2000, 5282), (3000, 1978), (4000, 853), (5000, 421), (6000, 209), (7000, 117),
    (8000, 62), (9000, 24), (10000, 10), (11000, 4), (12000, 2), (15380, 1),
)  # fmt: skip
# Gaps between a user's consecutive rows: share below one second (the next row of the same list), then by upper bound in ms.
TIE_SHARE = 0.8278
SHORT_GAPS = ((10_000, 0.0161), (60_000, 0.0551), (300_000, 0.0653), (1_800_000, 0.0231), (7_200_000, 0.0068))
LONG_GAP_SHARE = 0.0058  # two hours and more: a new session

# Counted over 41,828 original rows (users who both liked and hated): hours of the day, durations at quantiles, ms.
HOURS = (
    346, 185, 95, 59, 50, 65, 169, 280, 338, 401, 453, 520, 682, 603, 420, 409, 504, 608, 634, 632, 607, 667, 709, 564,
)  # fmt: skip
DURATION_QUANTILES = {
    0.0: 3000, 0.01: 6000, 0.1: 7533, 0.25: 9876, 0.5: 16783, 0.75: 46925, 0.9: 113600, 0.99: 328125, 1.0: 1337733,
}  # fmt: skip

# Not published for the complete log. Likes are 1.5 % of KuaiRand-1K's views; the others keep the proportions seen in the
# original rows. (given no click, given a click)
SIGNAL_RATES = {
    "is_like": (0.0015, 0.036),
    "is_follow": (0.0001, 0.003),
    "is_comment": (0.0003, 0.006),
    "is_forward": (0.0001, 0.0024),
    "is_hate": (0.0005, 0.0002),
}
PROFILE_ENTER_RATES, COMMENT_STAY_RATES = (0.001, 0.02), (0.005, 0.15)
STAY_MEDIAN_MS, STAY_LOG_STD = 5840, 1.03
UNPLAYED_SHARE = 0.45  # of the rows without a click
EXTRA_PLAY_MEDIAN_MS, EXTRA_PLAY_LOG_STD = 16_000, 1.3  # play time beyond what makes it a click
RANDOM_CLICK_FACTOR = 0.6  # the random log is clicked less
TAB_SHARES = (0.13, 0.72, 0.04, 0.003, 0.06, 0.01, 0.012, 0.003, 0.008, 0.002, 0.003, 0.002, 0.003, 0.002, 0.002)
