"""Faults of the inputs and outputs of a model."""

from __future__ import annotations

from seqblocks.errors import Fault, quote

# ------------------------------------------------------------------------------
# Inputs

_KINDS = "{tokens: vocabulary}, {features: width}, {vector: width} or {image: {size: 224, channels: 3}}"


def no_input() -> Fault:
    return Fault("E202", "the model must say what its input is", expected=_KINDS)


def not_an_input() -> Fault:
    return Fault("E203", "the model must say what its input is", expected=_KINDS)


def not_one_kind() -> Fault:
    return Fault("E202", "the input must be of exactly one kind", expected=_KINDS)


def input_and_inputs() -> Fault:
    hint = "use `inputs:` for several named inputs, `input:` for a single one"
    return Fault("E210", "use either `input` or `inputs`, not both", hint=hint)


def not_named(found: str) -> Fault:
    """Describe `inputs:` that is not a mapping."""
    hint = "inputs: {text: {tokens: 256}, image: {image: {size: 224, channels: 3}}}"
    return Fault("E317", "inputs must be a mapping of names to inputs", found=found, hint=hint)


def name_of_argument(name: str) -> Fault:
    message = f"an input cannot be named {quote(name)}: the model's call has an argument of that name"
    return Fault("E317", message, hint="choose another name")


def not_read(name: str) -> Fault:
    hint = f"read it with `from: {name}` or by a port, or remove it"
    return Fault("E319", f"no step reads the input {quote(name)}", hint=hint)


# ------------------------------------------------------------------------------
# Sizes


def not_rows_times_columns(length: int, rows: int, columns: int) -> Fault:
    return Fault("E412", "length must equal rows times columns", found=f"{length}, {rows} x {columns}")


def not_an_image(found: str) -> Fault:
    return Fault("E203", "an image must be a mapping such as {size: 224, channels: 3}", found=found)


def image_without_size() -> Fault:
    return Fault("E202", "an image needs a size", hint="size: 224, or size: [height, width]")


def not_two_numbers(count: int) -> Fault:
    message = "a size must be one number or two, [rows, columns]"
    return Fault("E203", message, found=f"{count} number{'s' if count != 1 else ''}")


def sample_rate(found: float) -> Fault:
    message = "a sample rate must be positive, in Hz"
    return Fault("E209", message, found=f"{found:g}", hint="sample_rate: 16000")


# ------------------------------------------------------------------------------
# Outputs


def outputs_are_no_list(found: str) -> Fault:
    return Fault("E318", "outputs must be a list of wires", found=found, hint="outputs: [logits, value]")


def output_is_no_name(found: str) -> Fault:
    return Fault("E203", "an output must be the name of a wire", found=found)


def output_twice(name: str) -> Fault:
    return Fault("E318", f"the output {quote(name)} is listed twice")


def output_is_input(name: str) -> Fault:
    return Fault("E318", f"{quote(name)} is an input of the model", expected="the output of a step, named with `as:`")
