"""The Dockerfile and the example for Kubernetes name what there is: options, pages, files. No image is built here."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import fastgen

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "Dockerfile").is_file():
    pytest.skip("needs a checkout", allow_module_level=True)


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, with lines that go on put together."""
    lines = [line for line in (ROOT / "Dockerfile").read_text("utf-8").splitlines() if not line.startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in whole.splitlines() if line)]


INSTRUCTIONS = instructions()


def of(name: str) -> list[str]:
    return [rest for found, rest in INSTRUCTIONS if found == name]


def is_ignored(path: str) -> bool:
    """Whether .dockerignore leaves a path out: the last pattern that matches it, or a folder above it, decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        parts = path.split("/")
        above = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        if pattern.startswith("**/"):
            matches = pattern.removeprefix("**/") in parts
        else:
            matches = any(fnmatch.fnmatch(name, pattern) for name in above)
        if matches:
            ignored = not line.startswith("!")
    return ignored


def served(arguments: list[str]) -> Any:
    """The settings of fastgen-serve for these arguments."""
    pytest.importorskip("transformers", reason="fastgen-serve needs transformers")
    from fastgen.cli import serve

    args = serve.parser().parse_args(arguments)
    if args.local:
        serve.check_local(args)
    return args


HEALTH = ("/health", "/health/live", "/health/ready")


def test_these_are_the_pages_of_health() -> None:
    pytest.importorskip("fastapi", reason="the service needs FastAPI")
    from fastgen.serving import limited

    assert limited.HEALTH == HEALTH


# ---------------------------------------------------------------------------------------------- the image
def test_the_last_stage_runs_as_a_user_without_rights() -> None:
    last = max(place for place, (name, _) in enumerate(INSTRUCTIONS) if name == "FROM")
    names = [name for name, _ in INSTRUCTIONS[last:]]
    assert names.count("USER") == 1 and of("USER") == ["10001"]
    assert "useradd" in of("RUN")[-1] and "--uid 10001" in of("RUN")[-1]
    assert "RUN" not in names[names.index("USER") :]  # which would be that user's


def test_stages_copy_what_there_is() -> None:
    stages = re.findall(r"^FROM \S+ AS (\w+)$", (ROOT / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    for rest in of("COPY"):
        source, *_ = (word for word in rest.split() if not word.startswith("--"))
        if found := re.search(r"--from=(\w+)", rest):
            assert found[1] in stages and source == "/opt/fastgen"
        else:
            assert (ROOT / source).exists() and (source == "." or not is_ignored(source))


def test_the_commands_and_their_options_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    (entry,) = of("ENTRYPOINT")
    command, *options = json.loads(entry)
    assert f"\n{command} = " in project
    args = served([*options, "MODEL", "--log-format", "json"])
    assert args.local and args.host == "0.0.0.0" and [str(args.port)] == of("EXPOSE")
    for extra in re.findall(r"'\.\[([\w,]+)\]'", "\n".join(of("RUN"))):
        for name in extra.split(","):
            assert re.search(rf"^{name} = \[", project, re.MULTILINE), name


def test_its_health_is_asked_for_where_it_listens() -> None:
    (check,) = of("HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    assert command[:2] == ["python", "-c"]
    compile(command[2], "HEALTHCHECK", "exec")
    (page,) = re.findall(r"http://127\.0\.0\.1:8000(/[\w/]+)", command[2])
    assert page in HEALTH


def shown(what: str) -> str:
    """The block of docs/cluster.md that has `what` in it."""
    blocks = re.findall(r"^```text\n(.*?)^```", (ROOT / "docs/cluster.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (found,) = (block for block in blocks if what in block)
    return str(found)


def test_the_documented_commands_fit_the_image() -> None:
    build, run = (shlex.split(line) for line in shown("docker run").splitlines())
    tag = f"fastgen:{fastgen.__version__}"
    assert build == ["docker", "build", "--tag", tag, "."]
    assert run[run.index("--publish") + 1].endswith(f":8000:{of('EXPOSE')[0]}")
    (entry,) = of("ENTRYPOINT")
    served([*json.loads(entry)[1:], *run[run.index(tag) + 1 :]])


def test_the_documented_proxy_fits_the_service() -> None:
    block, args = shown("proxy_pass"), served(["MODEL"])
    assert f"proxy_pass http://127.0.0.1:{args.port};" in block and args.host == "127.0.0.1"
    (location,) = re.findall(r"location ~ (\S+) \{", block)
    passed = [
        page for page in ("/v1/generate", "/v1/models", *HEALTH, "/docs", "/metrics") if re.search(location, page)
    ]
    assert passed == ["/v1/generate", "/v1/models", "/health/ready"]
    (seconds,) = re.findall(r"proxy_read_timeout (\d+)s;", block)
    assert int(seconds) > args.timeout
    (size,) = re.findall(r"client_max_body_size (\d+)m;", block)
    assert int(size) * 2**20 >= args.max_body


def test_a_setting_of_the_image_is_one_of_fastgens() -> None:
    variables = re.findall(r"\b(FASTGEN_\w+)=(\w+)", "\n".join(of("ENV")))
    assert variables == [("FASTGEN_NATIVE", "required")]
    assert "| `required` |" in (ROOT / "docs/operators.md").read_text("utf-8")


@pytest.mark.parametrize(
    "path, is_left_out",
    (
        (".git/config", True),
        ("tests/conftest.py", True),
        ("docs/index.md", True),
        ("keys", True),
        ("fastgen/__init__.py", False),
        ("fastgen/cli/serve.py", False),
        ("fastgen/demo/model/config.json", False),
        ("fastgen/_native/cpu-1.so", True),
        ("fastgen/cli/__pycache__/serve.cpython-311.pyc", True),
        ("csrc/cpu/attention.cpp", False),
        ("README.md", False),
    ),
)
def test_what_the_build_gets(path: str, is_left_out: bool) -> None:
    assert is_ignored(path) == is_left_out


def test_a_wheel_can_be_built_from_what_the_build_gets(tmp_path: Path) -> None:
    """The same files as from the whole repository."""
    pytest.importorskip("setuptools", minversion="77", reason="needs setuptools")

    def files_of_wheel(name: str, leaves_out: Any) -> set[str]:
        project, out = tmp_path / name, tmp_path / f"{name}-wheel"
        shutil.copytree(ROOT, project, ignore=leaves_out)
        code = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=project, capture_output=True, text=True, env={"FASTGEN_NATIVE": "0"}
        )
        assert run.returncode == 0, run.stderr
        return {path for (file,) in [out.glob("*.whl")] for path in zipfile.ZipFile(file).namelist()}

    def ignored(folder: str, names: list[str]) -> set[str]:
        inside = Path(folder).relative_to(ROOT).as_posix()
        prefix = "" if inside == "." else f"{inside}/"
        return {name for name in names if is_ignored(prefix + name)}

    names = (".*_cache", ".git", ".venv", "__pycache__", "build", "dist", "*.egg-info", "_native")
    unneeded = shutil.ignore_patterns(*names)
    found, wanted = files_of_wheel("image", ignored), files_of_wheel("whole", unneeded)
    assert found == wanted and len(found) > 200


# ---------------------------------------------------------------------------------------------- Kubernetes
@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    text = (ROOT / "examples/kubernetes.yaml").read_text("utf-8")
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def test_the_pod_is_what_the_image_is(objects: dict[str, Any]) -> None:
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == f"fastgen:{fastgen.__version__}"
    assert [str(pod["securityContext"]["runAsUser"])] == of("USER") and pod["securityContext"]["runAsNonRoot"]
    assert [str(port["containerPort"]) for port in container["ports"]] == of("EXPOSE")
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    assert container["resources"]["limits"] == container["resources"]["requests"]


def test_its_probes_are_pages_of_health(objects: dict[str, Any]) -> None:
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    ports = {port["name"] for port in container["ports"]}
    asked = {}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked[name] = container[name]["httpGet"]["path"]
        assert asked[name] in HEALTH and container[name]["httpGet"]["port"] in ports
    # A service that is stopping lives, and is sent no more requests.
    assert (asked["readinessProbe"], asked["livenessProbe"]) == ("/health/ready", "/health/live")


def test_its_arguments_are_options_and_their_files_are_mounted(objects: dict[str, Any]) -> None:
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    args = served([*json.loads(of("ENTRYPOINT")[0])[1:], *container["args"]])
    assert pod["terminationGracePeriodSeconds"] > args.timeout
    volumes = {volume["name"] for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == volumes
    folder = str(Path(args.api_key_file).parent)
    (keys,) = (volume for volume in pod["volumes"] if volume["name"] == mounts[folder])
    text = (ROOT / "examples/kubernetes.yaml").read_text("utf-8")
    secret, file = keys["secret"]["secretName"], Path(args.api_key_file).name
    assert f"kubectl create secret generic {secret} --from-file={file}\n" in text


def test_the_service_finds_its_pods(objects: dict[str, Any]) -> None:
    deployment, service = objects["Deployment"]["spec"], objects["Service"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert labels == deployment["selector"]["matchLabels"] == service["selector"]
    ports = {port["name"] for port in deployment["template"]["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"] for port in service["ports"]} == ports
