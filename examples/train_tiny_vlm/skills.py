"""Skills, and what a question is: its words, the right answer, the skill that it asks. Host
only.
"""

SKILLS = (
    "read",
    "shape_colour",
    "count",
    "where",
    "two_pictures",
    "follow_up",
    "describe",
    "motion",
)
EXTRA = "extra"  # asked in training only: easy questions that teach parts of a skill
Turn = tuple[str, str, str]  # question, answer, skill
Talk = list[Turn]


def article(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def ask(rng, skill: str, answer: str, *questions: str) -> Turn:
    return rng.choice(questions), answer, skill


def plural(shape: str) -> str:
    return shape + ("es" if shape.endswith("s") else "s")
