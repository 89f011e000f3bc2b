"""No pickle anywhere in the package (F72): what arrives from a socket or a file is parsed, never executed."""

import ast
from pathlib import Path

import prefixmesh

PACKAGE = Path(prefixmesh.__file__).parent
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def test_no_module_imports_pickle_or_its_kin() -> None:
    """Nor asks torch or numpy to unpickle for it."""
    found = [
        f"{path.relative_to(PACKAGE)}: {ast.unparse(node)}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if _is_forbidden(node)
    ]
    assert not found


def _is_forbidden(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            return any(name.name.split(".")[0] in FORBIDDEN_MODULES for name in names)
        case ast.ImportFrom(module=str(module)):
            return module.split(".")[0] in FORBIDDEN_MODULES
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
            return True
        case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
            return True
        case _:
            return False
