"""How the tensors of a quantized module are called: below the path that its weight had."""

from compress.errors import CheckpointError


def module_of(name: str) -> str:
    """Module path of a weight: "a.b.weight" -> "a.b"; a CheckpointError for any other name."""
    if not name.endswith(".weight"):
        raise CheckpointError(
            f"tensor {name!r} cannot be stored quantized: only names that end in '.weight' have a"
            " place for scales; ignore it, or use format 'dense'"
        )
    return name.removesuffix(".weight")
