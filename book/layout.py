"""What a line of text keeps together, and where a hint stands.

A stage's name does not break at its hyphen, nor a line between a formula, or code, and
a comma behind it or the parentheses around it. A hint stands below the box of its
exercise, as the solution does, in every chapter.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

NAME = re.compile(r"(ZeRO-\d)")
BEHIND = re.compile(r"[.,;:!?)]+")
AS_IT_IS = nodes.literal, nodes.FixedTextElement, nodes.math


def kept(*children: nodes.Node) -> nodes.Node:
    return nodes.inline("", "", *children, classes=["kept"])


class Layout(SphinxPostTransform):
    """The notebooks stay as they are."""

    default_priority = 900  # what it looks at is no reference any more
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        for text in list(self.document.findall(nodes.Text)):
            parts = NAME.split(text)
            if len(parts) > 1 and not isinstance(text.parent, AS_IT_IS):
                every = enumerate(map(nodes.Text, parts))
                text.parent.replace(text, [kept(p) if i % 2 else p for i, p in every])
        for kind in (nodes.math, nodes.literal):
            for node in list(self.document.findall(kind)):
                line, at = node.parent, node.parent.index(node)
                parts: list[nodes.Node] = [node]
                before = line[at - 1] if at else None
                if isinstance(before, nodes.Text) and before.endswith("("):
                    line[at - 1] = nodes.Text(before[:-1])
                    parts.insert(0, nodes.Text("("))
                after = line[at + 1] if at + 1 < len(line) else None
                if isinstance(after, nodes.Text) and (found := BEHIND.match(after)):
                    line[at + 1] = nodes.Text(after[found.end() :])
                    parts.append(nodes.Text(found[0]))
                if len(parts) > 1:
                    line[at] = kept(*parts)
        for hint in list(self.document.findall(nodes.Admonition)):
            box: Any = hint.parent.parent
            if "dropdown" in hint["classes"] and "exercise" in box.get("classes", ()):
                hint.parent.remove(hint)
                box.parent.insert(box.parent.index(box) + 1, hint)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_post_transform(Layout)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
