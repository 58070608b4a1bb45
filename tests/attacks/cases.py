"""The case of a seed: a sound line of a command, and one trouble."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from types import MappingProxyType

from attacks import commands, damage, places, recipes, surroundings, values
from attacks.case import Case
from attacks.commands import options, takes_number, takes_path
from attacks.stock import CACHE

Trouble = Callable[[Random, Case], None]
# How often a command is drawn. `roofline` and `bench` take seconds of processor time each.
SHARES: Mapping[str, int] = MappingProxyType(
    {
        "run": 9,
        "plan": 6,
        "inspect": 4,
        "eval": 6,
        "export": 7,
        "generate": 6,
        "chat": 3,
        "roofline": 1,
        "bench": 1,
        "recipes": 1,
        "doctor": 1,
    }
)


def none(rng: Random, case: Case) -> None:
    """Nothing: the command must do what it was asked."""
    case.sound = True


def number(rng: Random, case: Case) -> None:
    """An absurd number for an option."""
    found = [name for name, option in options(case.command).items() if takes_number(option)]
    name, value = rng.choice(found), rng.choice(values.NUMBERS)
    case.argv += [name, value]
    case.names = [*(said.strip("-") for said in options(case.command)[name].opts), value]


def word(rng: Random, case: Case) -> None:
    """An odd text for an option or an argument."""
    found = [
        name
        for name, option in options(case.command).items()
        if not takes_number(option) and not option.is_flag and not takes_path(option)
    ]
    value = rng.choice(values.TEXTS)
    if found and rng.random() < 0.8:
        name = rng.choice(found)
        case.argv += [name, value]
        case.names = [name.strip("-"), value, "set"]
    else:
        case.argv.insert(rng.randrange(1, len(case.argv) + 1), value)


def option_set(rng: Random, case: Case) -> None:
    """Two to six options beside each other, some of which exclude others."""
    known = options(case.command)
    for name in rng.sample(list(known), min(len(known), rng.randint(2, 6))):
        option = known[name]
        if option.is_flag:
            case.argv.append(name)
        elif takes_number(option):
            case.argv += [name, rng.choice(["1", "2", "3", "8", "0", "0.5", "100"])]
        elif takes_path(option):
            case.argv += [name, rng.choice([commands.OUT, commands.MODEL, "words.txt", "new"])]
        else:
            case.argv += [name, _choice(rng, option)]


def _choice(rng: Random, option: object) -> str:
    found = list(getattr(getattr(option, "type", None), "choices", ()))
    return str(rng.choice([*found, *found, "cpu", "1", "x", "onnx", "gptq", "seed=1"]))


def said_path(rng: Random, case: Case) -> None:
    """Another path in a path's place."""
    given = [path for path in case.roles if path in case.argv]
    path = rng.choice(given)
    odd = places.odd_path(rng, case.folder)
    case.replace(path, odd)
    case.roles = {(odd if key == path else key): role for key, role in case.roles.items()}


def special_file(rng: Random, case: Case) -> None:
    """Something special where a file or a folder is expected, or where the result goes."""
    path = rng.choice(list(case.roles))
    places.replace(rng, case.folder / path)
    case.names = [path, Path(path).stem]
    if rng.random() < 0.3 and case.roles[path] == "out" and "--overwrite" in options(case.command):
        case.argv.append("--overwrite")


def recipe_text(rng: Random, case: Case) -> None:
    path = case.folder / commands.RECIPE
    path.write_bytes(recipes.spoil(rng, recipes.pick(rng)))
    case.names = [commands.RECIPE, "model.layers", "words.txt", "calibrat", "tokens", "evaluation"]


def setting(rng: Random, case: Case) -> None:
    """One or two odd `--set`."""
    for _ in range(rng.choice([1, 1, 2])):
        key, value = rng.choice(recipes.KEYS), rng.choice(recipes.SETTINGS)
        case.argv += [
            "--set",
            rng.choice([f"{key}={value}"] * 8 + [key, f"={value}", f"{key} {value}"]),
        ]


def pattern(rng: Random, case: Case) -> None:
    chosen = recipes.with_pattern(rng, recipes.RECIPES[0])
    (case.folder / commands.RECIPE).write_text(recipes.text_of(chosen))
    case.names = [commands.RECIPE]


def broken_model(rng: Random, case: Case) -> None:
    damage.checkpoint(rng, case.folder / commands.MODEL)


def broken_quantization(rng: Random, case: Case) -> None:
    damage.quantization(rng, case.folder / commands.MODEL)


def broken_data(rng: Random, case: Case) -> None:
    """A text, a file of items, or rows of calibration."""
    how = {"text": damage.text, "task": damage.task, "jsonl": damage.jsonl}
    found = [path for path, role in case.roles.items() if role in how]
    path = rng.choice(found)
    how[case.roles[path]](rng, case.folder / path)


def variables(rng: Random, case: Case) -> None:
    surroundings.environment(rng, case, fresh=False)


def limits(rng: Random, case: Case) -> None:
    surroundings.limit(rng, case, fresh=False)


def streams(rng: Random, case: Case) -> None:
    surroundings.streams(rng, case, fresh=False)


def full_disk(rng: Random, case: Case) -> None:
    case.full_at = rng.randrange(40)


def interrupt(rng: Random, case: Case) -> None:
    case.interrupt = rng.choice([0.001, 0.01, 0.05, 0.1, 0.2, 0.4, 0.8])


def start(rng: Random, case: Case) -> None:
    """What matters before anything is imported."""
    how = (surroundings.environment, surroundings.environment, surroundings.limit)
    rng.choice([*how, surroundings.streams])(rng, case, fresh=True)


def with_text(case: Case) -> bool:
    return any(role in ("text", "task", "jsonl") for role in case.roles.values())


def with_paths(case: Case) -> bool:
    return any(path in case.argv for path in case.roles)


def with_numbers(case: Case) -> bool:
    return any(takes_number(option) for option in options(case.command).values())


def always(case: Case) -> bool:
    return True


def among(*names: str) -> Callable[[Case], bool]:
    return lambda case: case.command in names


_RECIPES = among("run", "plan")
_MODELS = among("run", "plan", "inspect", "eval", "export", "generate", "chat", "roofline", "bench")
_QUANTIZED = among("inspect", "export", "eval", "generate")
_WRITERS = among("run", "export", "eval")
# Name -> what it does, which lines it is for, and how many of SLOTS it has.
TROUBLES: Mapping[str, tuple[Trouble, Callable[[Case], bool], int]] = MappingProxyType(
    {
        "none": (none, always, 3),
        "number": (number, with_numbers, 8),
        "word": (word, always, 5),
        "options": (option_set, always, 6),
        "said path": (said_path, with_paths, 7),
        "special file": (special_file, with_paths, 9),
        "recipe": (recipe_text, _RECIPES, 8),
        "setting": (setting, _RECIPES, 7),
        "pattern": (pattern, _RECIPES, 4),
        "checkpoint": (broken_model, _MODELS, 10),
        "quantization": (broken_quantization, _QUANTIZED, 4),
        "data": (broken_data, with_text, 7),
        "rights": (surroundings.closed_places, with_paths, 4),
        "variables": (variables, always, 3),
        "limits": (limits, always, 5),
        "streams": (streams, always, 3),
        "full disk": (full_disk, _WRITERS, 3),
        "interrupt": (interrupt, _WRITERS, 3),
        "start": (start, always, 4),
        "packages": (surroundings.packages, always, 3),
    }
)
SLOTS: Sequence[str] = tuple(name for name, (_, _, n) in TROUBLES.items() for _ in range(n))
_JSON = 0.2  # of the lines that can say it


def draw(seed: int, stock: Path, folder: Path) -> Case:
    """The case with that number. Its files are laid below `folder`, which is made."""
    rng = Random(seed)
    trouble = SLOTS[seed * 37 % len(SLOTS)]
    apply, suits, _ = TROUBLES[trouble]
    drawn = rng.choices(list(SHARES), list(SHARES.values()), k=50)
    for number, command in enumerate(drawn):
        own = folder / str(number) / "here"
        own.mkdir(parents=True)
        (own.parent / "home").mkdir()
        case = Case(seed, trouble, command, [], own)
        case.environ = {"HOME": str(own.parent / "home"), "TMPDIR": str(own), "HF_HUB_OFFLINE": "1"}
        commands.LINES[command](rng, case, stock)
        if not suits(case):
            continue
        if rng.random() < _JSON and "--json" in options(command):
            case.argv.append("--json")
        apply(rng, case)
        if case.fresh:  # its kernels are compiled already
            case.environ.setdefault("XDG_CACHE_HOME", str(stock / CACHE))
        return case
    raise AssertionError(f"no command for {trouble}")
