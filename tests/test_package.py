"""The installed package, built as a wheel and imported with nothing of the checkout beside it; imports go down only."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel alone."""
    place = tmp_path_factory.mktemp("wheel")
    for name in ("attention", "pyproject.toml", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, place / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(place), str(place)]
    subprocess.run(build, check=True)
    (wheel,) = place.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(place / "site"), str(wheel)], check=True)
    return place / "site"


def run_installed(site: Path, code: str) -> str:
    """What a program prints that sees the installed wheel and, last, the checkout."""
    start = f"import sys; sys.path.insert(0, {str(site)!r}); sys.path.append({str(ROOT)!r})\n"
    done = subprocess.run([sys.executable, "-I", "-c", start + code], capture_output=True, text=True, cwd=site)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_wheel_holds_every_module(site: Path) -> None:
    def modules(folder: Path) -> set[Path]:
        return {path.relative_to(folder) for path in folder.rglob("*.*") if path.suffix in (".py", ".zip")}

    assert modules(site / "low_precision_attention") == modules(ROOT / "attention")


def test_checkout_and_wheel_in_one_process_give_the_same_gradients(site: Path) -> None:
    """Custom operators of one name may be registered once in a process; the package is imported under two names."""
    code = """
import torch, attention, low_precision_attention
gradients = []
for package in (attention, low_precision_attention):
    config = package.AttentionConfig(default=package.AttentionSpec(), flash_backend="flash_reference")
    q = torch.randn(1, 8, 2, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    o = package.run(q, q, q, config.resolve(1, 2)[0], rounding_seed=torch.tensor(0))
    gradients += torch.autograd.grad(o.sum(), q)
assert torch.equal(*gradients)
print(low_precision_attention.__file__)
"""
    assert Path(run_installed(site, code).strip()).is_relative_to(site)


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("README.md", "o.float().square().sum().backward(); assert o.shape == q.shape and q.grad.any()"),
        ("docs/huggingface.md", "model(input_ids=torch.arange(8)[None]); assert q.grad.any()"),
    ],
)
def test_what_pages_show_runs_with_the_wheel(site: Path, page: str, shown: str) -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    own = [text for text in examples if "trainer." not in text]
    if any("transformers" in text for text in own):
        pytest.importorskip("transformers")
    code = "\n".join([*own, shown, "import low_precision_attention; print(low_precision_attention.__file__)"])
    assert Path(run_installed(site, code).strip().splitlines()[-1]).is_relative_to(site)


@pytest.mark.parametrize("path", sorted((ROOT / "attention").rglob("*.py")), ids=lambda path: path.name)
def test_the_package_needs_nothing_but_torch_and_triton(path: Path) -> None:
    allowed = {*sys.stdlib_module_names, "torch", "triton"}
    if path.parent.name == "hopper":  # the extra fast; imported where it is chosen
        allowed |= {"cutlass", "flash_attn", "quack"}
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        if isinstance(node, ast.ImportFrom) and node.level and "hopper" in (node.module or ""):
            assert node not in tree.body
        optional = set() if node in tree.body else {"transformers", "wandb"}
        assert {name.partition(".")[0] for name in names} <= allowed | optional


# Each part may import itself and what stands to its right.
ORDER = [
    "scripts", "figures", "train", "configs", "config", "training", "probes", "data", "model", "fused", "files", "errors", "attention",
]  # fmt: skip


def parts() -> list[tuple[Path, str]]:
    files = [*ROOT.glob("*.py"), *(f for name in ORDER for f in (ROOT / name).rglob("*.py"))]
    return [(f, f.relative_to(ROOT).parts[0].removesuffix(".py")) for f in sorted(files)]


@pytest.mark.parametrize(("path", "part"), parts(), ids=lambda x: x.name if isinstance(x, Path) else "")
def test_imports_go_down_only(path: Path, part: str) -> None:
    tree = ast.parse(path.read_text())
    checks = (b for b in ast.walk(tree) if isinstance(b, ast.If) and "TYPE_CHECKING" in ast.dump(b.test))
    typing_only = {id(n) for b in checks for n in ast.walk(b)}
    for node in ast.walk(tree):
        if id(node) in typing_only or not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        for top in (name.split(".")[0] for name in names):
            assert top != "experiments", f"{path.name} imports experiments, which holds studies"
            if top in ORDER:
                assert ORDER.index(top) >= ORDER.index(part), f"{path.name} imports {top}, which stands above {part}"


def test_attention_is_imported_without_the_compiler() -> None:
    code = "import sys; from attention import functional, huggingface; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_training_imports_nothing_optional() -> None:
    code = (
        "import sys, train; from scripts import compare_runs, prepare_data; "
        "heavy = {'wandb', 'datasets', 'matplotlib', 'transformers'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": "scripts"})
