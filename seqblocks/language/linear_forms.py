"""Formulas that are linear in some of their values: a coefficient for each of these, and a constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Apply = Callable[..., Any]  # computes an operator of its name and operands, as `applied` of ops/calc.py does


class Form(NamedTuple):
    """A value that is linear in the states: the sum of their products with the coefficients, and a constant."""

    coefficients: dict[str, Any]
    constant: Any


def apply(compute: Apply, name: str, a: Any, *others: Any) -> Any:
    """Compute an operator of a linear formula, some of whose operands are Forms. compute: does so for other operands.

    Only sums, differences, products with what is no Form, and quotients by it are linear.
    """
    if not isinstance(a, Form) and not any(isinstance(each, Form) for each in others):
        return compute(name, a, *others)
    if name == "-" and not others:
        return _scaled(a, lambda x: compute("-", x))
    (b,) = others
    match name:
        case "+":
            return _added(compute, form_of(a), form_of(b))
        case "-":
            return _added(compute, form_of(a), _scaled(form_of(b), lambda x: compute("-", x)))
        case "/":
            return _scaled(a, lambda x: compute("/", x, b))
    form, factor = (a, b) if isinstance(a, Form) else (b, a)
    return _scaled(form, lambda x: compute("*", x, factor))


def form_of(x: Any) -> Form:
    return x if isinstance(x, Form) else Form({}, x)


def _scaled(form: Form, change: Callable[[Any], Any]) -> Form:
    constant = None if form.constant is None else change(form.constant)
    return Form({name: change(x) for name, x in form.coefficients.items()}, constant)


def _added(compute: Apply, a: Form, b: Form) -> Form:
    coefficients = dict(a.coefficients)
    for name, x in b.coefficients.items():
        coefficients[name] = compute("+", coefficients[name], x) if name in coefficients else x
    if a.constant is None or b.constant is None:
        return Form(coefficients, b.constant if a.constant is None else a.constant)
    return Form(coefficients, compute("+", a.constant, b.constant))
