"""Decorators written as the calls that they are."""

from __future__ import annotations

import ast


def undecorated(source: str) -> str:
    """Write ``@decorator`` as the call that it is, after the function: mutmut leaves decorated functions alone.

    It knows class methods and static methods. None needs the one before.
    """
    lines, tree = source.splitlines(), ast.parse(source)
    scopes: list[ast.Module | ast.ClassDef] = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    for scope in scopes:
        for node in scope.body:
            if not isinstance(node, ast.FunctionDef):
                continue
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if not decorators or decorators in (["classmethod"], ["staticmethod"]):
                continue
            for decorator in node.decorator_list:
                assert decorator.end_lineno is not None
                lines[decorator.lineno - 1 : decorator.end_lineno] = [""] * (
                    decorator.end_lineno - decorator.lineno + 1
                )
            call = "(".join([*decorators, node.name]) + ")" * len(decorators)
            assert node.end_lineno is not None
            lines[node.end_lineno - 1] += f"\n{' ' * node.col_offset}{node.name} = {call}"
    return "\n".join(lines) + "\n"
