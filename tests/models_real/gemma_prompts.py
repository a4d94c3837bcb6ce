"""Ten prompts for a model that continues texts."""

_STORY = (
    "The lighthouse keeper wrote in the log every evening, whether or not a ship had passed. He noted "
    "the wind, the height of the sea, the hour at which the lamp was lit, and what he ate. On the "
    "ninth of March he wrote that a grey bird had come down on the rail and would not leave. On the "
    "tenth he wrote that the bird was still there, and that he had given it bread. "
)
_LOG = "\n".join(
    f"2024-05-{day:02d}  north-west {day % 7 + 2}  sea {day % 4 + 1} m  ships: {day * 3 % 5}"
    for day in range(1, 29)
)

PROMPTS = {
    "english": "The three largest cities of Italy are",
    "letter": "Dear Ms. Okafor,\n\nThank you for your letter of 3 April. I'm writing to tell you that",
    "python": (
        "def median(values: list[float]) -> float:\n"
        '    """The middle value, or the mean of the two in the middle."""\n'
        "    ordered = sorted(values)\n"
    ),
    "html": "<table>\n  <tr>\n    <th>Name</th>\n    <th>Age</th>\n  </tr>\n  <tr>\n",
    "chinese": "从前有一座山，山里有一座庙，庙里有一个老和尚。有一天，",
    "emoji": "Breakfast 🥐☕️, lunch 🥗, dinner 🍝🍷. My week in emoji 👩‍👩‍👧‍👦: Monday",
    "german": "Die Straße führte über den Fluß, und am anderen Ufer",
    "numbers": "1, 1, 2, 3, 5, 8, 13, 21, 34,",
    "long": _STORY * 3 + "On the eleventh",
    "longer than a window": f"{_LOG}\n2024-05-29 ",
}
