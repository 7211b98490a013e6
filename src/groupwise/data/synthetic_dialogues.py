"""Made-up dialogues of two people, for SAMSum: the summary is what they settle on, not always the first idea."""

# ruff: noqa: SIM905 (word lists read better as one string)

import random

from groupwise.data.samsum import instruct
from groupwise.data.text_examples import Request

NAMES = "Anna Ben Chloe Dan Ella Finn Grace Henry Iris Jack Kate Leo Mia Noah Olivia Paul Ruby Sam Tina Will".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
TIMES = ("noon", "5 pm", "6:30", "7 pm", "8 o'clock", "10 am", "half past nine")
OUTINGS = (
    "go to the cinema",
    "play tennis",
    "visit the new museum",
    "cook dinner together",
    "go swimming",
    "see the football match",
    "try the new ramen place",
    "practise for the concert",
)
GOODS = "milk,bread,stamps,batteries,apples,coffee,paint,candles,rice,a light bulb,cat food,oranges".split(",")
THINGS = "drill,tent,bike,suitcase,camera,ladder,guitar,tripod,sewing machine,cool box".split(",")
REASONS = (
    ("my train is stuck", "the train is stuck"),
    ("I missed the bus", "the bus was missed"),
    ("there is a terrible traffic jam", "of a traffic jam"),
    ("my meeting took longer", "a meeting took longer"),
    ("I could not find my keys", "keys could not be found"),
)
SPOTS = ("at the station", "in front of the theatre", "in the cafe", "at the bus stop", "by the fountain")
RESULTS = (
    ("I passed my driving test!", "passed the driving test"),
    ("I got the job!", "got the job"),
    ("They accepted me at the university!", "was accepted at the university"),
    ("I won the photo contest!", "won the photo contest"),
    ("My paper is going to be published!", "is getting a paper published"),
)
GREETINGS = ("Hi {}!", "Hey {}", "Hello {}, how are you?", "{}, are you there?", "Hi {}, got a minute?")
REPLIES = ("Hi!", "Hey, what's up?", "Sure, what is it?", "Hello! All fine here.", "Yes?")
CLOSINGS = ("See you!", "OK, bye!", "Talk to you soon.", "Take care!", "Bye for now.", "Until then!")

Turns = list[tuple[str, str]]


def make_dialogue(rng: random.Random) -> Request:
    """A dialogue of three to eight turns in the instruction format, and one reference."""
    a, b = rng.sample(NAMES, 2)
    turns, summary = rng.choice((_outing, _errand, _loan, _delay, _news))(rng, a, b)
    if rng.random() < 0.7:
        turns = [(a, rng.choice(GREETINGS).format(b)), (b, rng.choice(REPLIES)), *turns]
    if rng.random() < 0.7:
        turns.append((a if turns[-1][0] == b else b, rng.choice(CLOSINGS)))
    return Request(instruct("\n".join(f"{speaker}: {line}" for speaker, line in turns)), (summary,))


def _outing(rng: random.Random, a: str, b: str) -> tuple[Turns, str]:
    """The first day suits, or another one is found, or none."""
    what, (day, another), time = rng.choice(OUTINGS), rng.sample(DAYS, 2), rng.choice(TIMES)
    turns = [(a, rng.choice((f"Shall we {what} on {day}?", f"Do you want to {what} this {day}?")))]
    end = rng.randrange(3)
    if end == 0:
        turns += [(b, "I'd love to! What time?"), (a, f"{time}?"), (b, rng.choice(("Fine with me.", "Works for me.")))]
        return turns, f"{a} and {b} will {what} on {day} at {time}."
    turns.append((b, rng.choice((f"I can't on {day}, I have to work.", f"{day} is bad, my parents are visiting."))))
    if end == 1:
        turns += [(a, f"And {another}?"), (b, f"{another} is fine, let's say {time}.")]
        return turns, f"{a} and {b} will {what} on {another} at {time}."
    turns += [(a, f"And {another}?"), (b, "I'm away then, sorry. Another week maybe."), (a, "What a pity.")]
    return turns, f"{b} has no time to {what} with {a}."


def _errand(rng: random.Random, a: str, b: str) -> tuple[Turns, str]:
    """Something is bought, at once or later; one item may be left out."""
    first, second = rng.sample(GOODS, 2)
    day = rng.choice(DAYS)
    turns = [(a, rng.choice((f"Could you buy {first} and {second}?", f"We need {first} and {second}, can you go?")))]
    end = rng.randrange(3)
    if end == 0:
        turns += [(b, rng.choice(("Sure, I'm at the shop anyway.", "OK, on my way home."))), (a, "I owe you one.")]
        return turns, f"{b} will buy {first} and {second} for {a}."
    if end == 1:
        turns += [
            (b, f"No need for {first}, we still have some."),
            (a, f"Then just {second}, please."),
            (b, "Will do."),
        ]
        return turns, f"{b} will buy {second} for {a}."
    turns += [(b, f"Not today, I'm ill. I can go on {day}."), (a, f"{day} is early enough. Get well!")]
    return turns, f"{b} is ill and will buy {first} and {second} for {a} on {day}."


def _loan(rng: random.Random, a: str, b: str) -> tuple[Turns, str]:
    """A thing is lent, or another has it."""
    thing, day, time = rng.choice(THINGS), rng.choice(DAYS), rng.choice(TIMES)
    other = rng.choice([name for name in NAMES if name not in (a, b)])
    turns = [(a, rng.choice((f"Can I borrow your {thing}?", f"Do you still have that {thing}? I need one.")))]
    if rng.random() < 0.5:
        turns += [(b, "Of course. When do you want it?"), (a, f"On {day}?"), (b, f"Come at {time}, I'll be home.")]
        return turns, f"{b} will lend {a} the {thing} on {day} at {time}."
    turns += [(b, f"I would, but {other} has it at the moment."), (a, f"OK, then I'll ask {other}.")]
    return turns, f"{a} cannot borrow the {thing} from {b}, because {other} has it."


def _delay(rng: random.Random, a: str, b: str) -> tuple[Turns, str]:
    """Somebody is late, and the other waits or not."""
    (said, reason), minutes, spot = rng.choice(REASONS), rng.choice((10, 15, 20, 30, 45)), rng.choice(SPOTS)
    turns = [
        (a, rng.choice((f"Sorry, {said}, I'll be {minutes} minutes late.", f"I'm {minutes} minutes late: {said}.")))
    ]
    if rng.random() < 0.6:
        turns += [(b, f"No problem, I'm waiting {spot}."), (a, "I'm hurrying!")]
        return turns, f"{a} is {minutes} minutes late because {reason}, and {b} is waiting {spot}."
    turns += [(b, "Then I'll go home, it's freezing."), (a, "I understand. I'm really sorry.")]
    return turns, f"{a} is {minutes} minutes late because {reason}, so {b} is going home."


def _news(rng: random.Random, a: str, b: str) -> tuple[Turns, str]:
    """Good news, and how they celebrate."""
    (said, told), day, what = rng.choice(RESULTS), rng.choice(DAYS), rng.choice(OUTINGS)
    turns = [(a, said), (b, rng.choice(("Congratulations!", "Wow, I knew it!", "I'm so proud of you!")))]
    if rng.random() < 0.5:
        turns += [(a, f"Let's celebrate on {day}."), (b, f"Yes! We could {what}."), (a, "Good idea.")]
        return turns, f"{a} {told}, and on {day} {a} and {b} will {what}."
    turns += [(a, "I can't believe it yet."), (b, f"Tell me everything on {day}!"), (a, "I will.")]
    return turns, f"{a} {told} and will tell {b} about it on {day}."
