"""Decorators written as the calls that they are."""

from __future__ import annotations

import ast


def undecorated(source: str) -> str:
    """Write ``@decorator`` as the call that it is, after the function: mutmut leaves decorated functions alone.

    It knows class methods and static methods. None needs the one before.
    """
    lines, tree = source.splitlines(), ast.parse(source)
    scopes: list[ast.Module | ast.ClassDef] = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    for node in (node for scope in scopes for node in scope.body):
        decorators = [ast.unparse(one) for one in node.decorator_list] if isinstance(node, ast.FunctionDef) else []
        if not decorators or decorators in (["classmethod"], ["staticmethod"]):
            continue
        assert isinstance(node, ast.FunctionDef)
        assert node.end_lineno is not None
        for one in node.decorator_list:
            lines[one.lineno - 1 : one.end_lineno] = [""] * ((one.end_lineno or 0) - one.lineno + 1)
        call = "(".join([*decorators, node.name]) + ")" * len(decorators)
        lines[node.end_lineno - 1] += f"\n{' ' * node.col_offset}{node.name} = {call}"
    return "\n".join(lines) + "\n"
