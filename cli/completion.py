"""`seqblocks completion`: print a script that completes verbs, options and names of specs in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from shlex import quote

from seqblocks.cli import arguments, output
from seqblocks.language.spec_files import bundled
from seqblocks.record import Record

SPECS = ("SPEC", "A", "B", "CODE|SPEC")  # what stands for a path or the name of a bundled spec
FILES = ("FILE", "DIR", "RUN", "FILE.pt2")


class Option(Record):
    """An option of a verb. takes: whether a value follows. choices: its values, if they are words. files: whether the
    value is a path."""

    names: list[str]
    about: str
    takes: bool
    choices: list[str]
    files: bool


class Completed(Record):
    """A verb with its options. specs: whether it reads specs. words: what else may follow."""

    name: str
    about: str
    options: list[Option]
    specs: bool
    words: list[str]


def run(options: argparse.Namespace) -> int:
    """Print the script for a shell."""
    output.write(SHELLS[options.shell]([*_verbs()], [*bundled()]), raw=True)
    return 0


def _verbs() -> Iterator[Completed]:
    for name, verb in arguments.VERBS.items():
        parser = arguments.Parser(prog=name)
        arguments.declare(parser, verb)
        actions = parser._actions
        positional = [action for action in actions if not action.option_strings]
        yield Completed(
            name, verb.about, [_option(action) for action in actions if action.option_strings],
            any(action.metavar in SPECS for action in positional),
            [str(each) for action in positional for each in action.choices or ()],
        )  # fmt: skip


def _option(action: argparse.Action) -> Option:
    takes = action.nargs != 0
    about = (action.help or "").replace("\n", " ")
    choices = [str(each) for each in action.choices or ()]
    return Option([*action.option_strings], about, takes, choices, takes and action.metavar in FILES)


# --- bash -------------------------------------------------------------------------------------------------------------


def _bash(verbs: list[Completed], specs: list[str]) -> str:
    lines = []
    for verb in verbs:
        words = [name for option in verb.options for name in option.names]
        for option in verb.options:
            if option.takes:
                words_of = f"_seqblocks_words {quote(' '.join(option.choices))}"
                values = words_of if option.choices else "_seqblocks_files" if option.files else ":"
                keys = "|".join(f"{verb.name}:{name}" for name in option.names)
                lines.append(f"        {keys}) {values}; return ;;")
        lines.append(f"        {verb.name}:*) words={quote(' '.join(words))}; more={quote(' '.join(verb.words))};"
                     f" specs={quote(' '.join(specs) if verb.specs else '')} ;;")  # fmt: skip
    return f"""# bash completion of seqblocks: source it, or put it into
# ~/.local/share/bash-completion/completions/seqblocks
_seqblocks_words() {{
    COMPREPLY+=($(compgen -W "$1" -- "$word"))
}}
_seqblocks_files() {{
    local IFS=$'\\n'  # names of files may contain spaces
    compopt -o filenames 2>/dev/null
    COMPREPLY+=($(compgen -f -- "$word"))
}}
_seqblocks() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} verb=${{COMP_WORDS[1]}} words more specs
    COMPREPLY=()
    compopt +o filenames 2>/dev/null  # otherwise `build` becomes `build/` beside a folder of that name
    if [ "$COMP_CWORD" -eq 1 ]; then
        _seqblocks_words {quote(' '.join(verb.name for verb in verbs))}
        return
    fi
    case "$verb:$before" in
{chr(10).join(lines)}
        *) return ;;
    esac
    case "$word" in
        -*) _seqblocks_words "$words" ;;
        *) _seqblocks_words "$more $specs"; _seqblocks_files ;;
    esac
}}
complete -o filenames -F _seqblocks seqblocks"""


# --- zsh --------------------------------------------------------------------------------------------------------------


def _zsh(verbs: list[Completed], specs: list[str]) -> str:
    described = " ".join(quote(f"{verb.name}:{verb.about}") for verb in verbs)
    cases = []
    for verb in verbs:
        given = [line for option in verb.options for line in _zsh_option(option)]
        if verb.words:
            given.append(f"*:word:({' '.join(verb.words)})")
        elif verb.specs:
            given.append("*:spec:_seqblocks_specs")
        else:
            given.append("*:file:_files")
        cases.append(f"        {verb.name}) _arguments {' '.join(map(quote, given))} ;;")
    return f"""#compdef seqblocks
# zsh completion of seqblocks: put it into a folder of $fpath as _seqblocks, or source it after compinit
_seqblocks_specs() {{
    local -a names=({' '.join(map(quote, specs))})
    _alternative "specs:bundled spec:($names)" "files:file:_files"
}}
_seqblocks() {{
    local -a verbs=({described})
    if (( CURRENT == 2 )); then
        _describe verb verbs
        return
    fi
    shift words
    (( CURRENT-- ))
    case $words[1] in
{chr(10).join(cases)}
    esac
}}
if [ "$funcstack[1]" = "_seqblocks" ]; then _seqblocks "$@"; else compdef _seqblocks seqblocks; fi"""


def _zsh_option(option: Option) -> Iterator[str]:
    about = option.about.translate(str.maketrans("[]:`", "(),'"))
    for name in option.names:
        value = ""
        if option.takes:
            what = f"({' '.join(option.choices)})" if option.choices else "_files" if option.files else " "
            value = f":value:{what}"
        yield f"*{name}[{about}]{value}"


# --- fish -------------------------------------------------------------------------------------------------------------


def _fish(verbs: list[Completed], specs: list[str]) -> str:
    lines = [
        "# fish completion of seqblocks: put it into ~/.config/fish/completions/seqblocks.fish",
        "complete -c seqblocks -f",
    ]
    for verb in verbs:
        lines.append(f"complete -c seqblocks -n __fish_use_subcommand -a {verb.name} -d {_fish_text(verb.about)}")
        seen = f"complete -c seqblocks -n '__fish_seen_subcommand_from {verb.name}'"
        if verb.specs:
            lines.append(f"{seen} -F -a {_fish_text(' '.join(specs))} -d 'bundled spec'")
        if verb.words:
            lines.append(f"{seen} -a {_fish_text(' '.join(verb.words))}")
        for option in verb.options:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            value = " -x" if option.takes and not option.files else " -r -F" if option.takes else ""
            values = f" -a {_fish_text(' '.join(option.choices))}" if option.choices else ""
            lines.append(f"{seen} {names}{value}{values} -d {_fish_text(option.about)}")
    return "\n".join(lines)


def _fish_text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SHELLS: dict[str, Callable[[list[Completed], list[str]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
