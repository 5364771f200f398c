"""`baton quantize`: a checkpoint with its weights in 8 or 4 bits."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from baton.checkpoints import hub
from baton.errors import InvalidRequest
from deploy.commands.terminal import command, err, out


class Format(StrEnum):
    """What products are rounded to."""

    INT8 = "int8"
    INT4 = "int4"


class Group(StrEnum):
    """Inputs that share a scale."""

    SMALL = "32"
    LARGE = "128"


@command(
    "baton quantize ./model --format int8 -o ./model-int8",
    "baton quantize smollm2 --format int4 --group 32 --head -o ./smollm2-int4",
)
def quantize(
    model: Annotated[str, typer.Argument(help="Directory of a checkpoint, a GGUF file, a hub id or smollm2.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="A new directory.")],
    form: Annotated[Format, typer.Option("--format", help="int8 or int4.")] = Format.INT8,
    group: Annotated[
        Group, typer.Option(help="Inputs that share a scale. 32 loses less, 128 is faster.")
    ] = Group.LARGE,
    head: Annotated[
        bool, typer.Option("--head", help="The output head, too, in 8 bits: a decode step reads all of it.")
    ] = False,
) -> None:
    """Round the products of a checkpoint's layers to 8 or 4 bits, and print the error of each layer.

    The result is in compressed-tensors' form, which vLLM reads, too. Each number is rounded to the nearest, and a
    group has the scale that loses least of those tried.
    """
    from safetensors import SafetensorError

    from engine.models.quantize import LayerError, quantize  # imports torch

    def say(error: LayerError) -> None:
        place = "head" if error.layer is None else f"layer {error.layer}"
        out.print(f"{place}: error {error.mean:.2%}, at most {error.worst:.2%} ({error.worst_name})")

    source = hub.resolve(model, say=err.print)
    try:
        products = quantize(source, output, int(form.removeprefix("int")), int(group), head, say)
    except (OSError, SafetensorError) as error:
        raise InvalidRequest(f"{source} can't be read, or {output} written: {error}") from None
    if products.plain:
        kinds = dict.fromkeys(name.rpartition(".")[2] for name in products.plain)
        out.print(
            f"{len(products.plain)} of {products.total} products have no whole groups of {group} inputs and stay "
            f"plain: {', '.join(kinds)}"
        )
    err.print(f"{output} has the checkpoint: baton up --model {output}")
