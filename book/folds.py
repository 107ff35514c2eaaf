"""Folds code beside the point of a page, and gives pages a switch that hides all code.

Cells of imports and cells tagged `hide-input`, such as those that draw, become a line
that says what is in them; a click opens them. They are `<details>`, which need no
script. What a chapter exports stands open. The notebooks stay as they are.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

BUTTON = {
    "type": "javascript",
    "javascript": "toggleCode()",
    "tooltip": "Hide or show all code",
    "icon": "fas fa-code",
    "label": "code-button",
}
NO_CODE = re.compile(r"^(#\||%).*\n?", re.M)  # directives, magics


def parse(source: str) -> tuple[list[str], list[ast.stmt]]:
    """A cell's lines and statements; none of the latter where it is no Python."""
    text = NO_CODE.sub("", source).strip()
    try:
        return text.splitlines(), ast.parse(text).body
    except SyntaxError:
        return text.splitlines(), []


def is_import(x: ast.stmt) -> bool:
    docstring = isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)
    return docstring or isinstance(x, ast.Import | ast.ImportFrom)


def folds(source: str) -> bool:
    """Whether a cell without a tag is folded: one of more than two lines of imports."""
    lines, body = parse(source)
    return len(lines) > 2 and bool(body) and all(map(is_import, body))


def summary(source: str, shows: bool) -> str:
    """What a cell says, defines or, in the end, does; and how long it is."""
    lines, body = parse(source)
    named = [signature(x) for x in body if hasattr(x, "name")]
    if lines[0].startswith('"""'):
        words = lines[0].strip('"')
    elif named or not body:
        words = ", ".join(named) or lines[0]
    else:
        words = does(body, shows) or lines[body[-1].lineno - 1]
        words += "…)" if words.endswith("(") else ""
    if len(words) > 64:
        words = words[:64].rsplit(" ", 1)[0].rstrip(",:") + " …"
    return f"{words} · {len(lines)} line{'s'[: len(lines) - 1]}"


def does(body: list[ast.stmt], shows: bool) -> str:
    """What a cell does, where its last statement's first line would not say it."""
    inside = [x for statement in body for x in ast.walk(statement)]
    if shows:
        calls = [ast.unparse(x.func) for x in inside if isinstance(x, ast.Call)]
        if {"print", "say"} & {*calls}:
            return "prints what follows"
        last = body[-1]
        is_figure = isinstance(last, ast.Expr) and isinstance(last.value, ast.Name)
        return "draws the figure" if is_figure else "shows what follows"
    if sum(map(is_import, body)) > len(body) / 2:
        targets = [t for x in body if isinstance(x, ast.Assign) for t in x.targets]
        made = [x.id for x in targets if isinstance(x, ast.Name)]
        return "imports" + (f", and makes {', '.join(made)}" if made else "")
    return ""


def signature(x: Any) -> str:
    if isinstance(x, ast.ClassDef):
        inside = [f.name for f in x.body if isinstance(f, ast.FunctionDef)]
        return f"class {x.name}" + (f": {', '.join(inside)}" if inside else "")
    names = [a.arg for a in (*x.args.posonlyargs, *x.args.args, *x.args.kwonlyargs)]
    return f"def {x.name}({', '.join(names)})"


class Fold(SphinxPostTransform):
    """Marks cells before MyST-NB makes `<details>` of those that are marked."""

    default_priority = 198
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        for cell in self.document.findall(nodes.container):
            if cell.get("nb_element") != "cell_code" or not cell.children:
                continue
            first: Any = cell.children[0]
            source = first.astext()
            if source.startswith("%%ranks"):  # a magic, whose cell has no colours
                first.children[0]["language"] = "python"
            if first.get("nb_element") == "cell_code_source" and (
                cell.get("hide_mode") == "input"
                or (not cell.get("hide_mode") and folds(source))
            ):
                cell["hide_mode"] = "input"
                own = cell["cell_metadata"].get("mystnb", {}).get("code_prompt_show")
                cell["prompt_show"] = cell["prompt_hide"] = own or summary(
                    source, shows=len(cell.children) > 1
                )


def switch(
    app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Put the switch at the head of a page with code cells."""
    body = context.get("body", "")
    if "cell_input" in body:
        app.add_js_file("folds.js")
        context["header_buttons"].append(BUTTON)
    # a summary's name is what it says
    context["body"] = body.replace(' aria-label="Toggle hidden content"', "")


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_post_transform(Fold)
    app.connect("html-page-context", switch, priority=501)  # the theme has its buttons
    return {"parallel_read_safe": True, "parallel_write_safe": True}
