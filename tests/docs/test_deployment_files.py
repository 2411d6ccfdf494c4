"""Deployment files hold together: references between compose services, images, scripts and the Prefect file."""

import re
import subprocess
from pathlib import Path

import yaml

from tasks.recipe_file import list_recipes

REPO = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((REPO / "docker" / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]


def test_services_depend_on_services_that_exist():
    wanted = {name for service in SERVICES.values() for name in service.get("depends_on", {})}
    assert wanted <= SERVICES.keys()


def test_a_service_awaited_as_healthy_has_a_health_check():
    for service in SERVICES.values():
        for name, condition in service.get("depends_on", {}).items():
            if condition["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[name]


def test_images_are_pinned_or_built_here():
    built = {service["image"] for service in SERVICES.values() if "build" in service}
    for service in SERVICES.values():
        assert service["image"] in built or re.search(r":v?\d", service["image"])


def test_named_volumes_are_declared_and_mounted_files_exist():
    for service in SERVICES.values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (REPO / "docker" / source).is_file()
            else:
                assert source in COMPOSE["volumes"]


def test_nothing_is_published_beyond_this_machine():
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_every_variable_has_an_example_value():
    used = set(re.findall(r"\$\{(\w+)", (REPO / "docker" / "compose.yaml").read_text()))
    given = {line.split("=")[0] for line in (REPO / "docker" / "env.example").read_text().splitlines() if "=" in line}
    assert used == given


def test_the_files_that_an_image_is_built_from_are_in_the_build_context():
    dockerfile = (REPO / "docker" / "Dockerfile.cpu").read_text()
    ignored = {line for line in (REPO / ".dockerignore").read_text().splitlines() if line and line[0] != "#"}
    copied = [
        name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile, re.MULTILINE) for name in line.split()
    ]
    assert copied
    assert all((REPO / name).exists() and name not in ignored for name in copied)


def test_setup_script_is_valid_shell():
    checked = subprocess.run(
        ["sh", "-n", str(REPO / "docker" / "setup.sh")], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


def test_deployments_name_recipes_and_a_flow_that_exist():
    deployments = yaml.safe_load((REPO / "deployments" / "prefect.yaml").read_text())["deployments"]
    assert deployments
    for deployment in deployments:
        file, function = deployment["entrypoint"].split(":")
        assert f"def {function}(" in (REPO / file).read_text()
        assert deployment["parameters"]["recipe"] in list_recipes()
        assert deployment["work_pool"]["name"] == "dspark"
