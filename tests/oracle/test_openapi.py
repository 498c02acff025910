"""The OpenAPI file against the server that serves it: requests that the file allows and requests that it forbids, made by
schemathesis from a fixed seed. A reply must have a status, a type and a form that the file tells; what the file forbids must
be refused; nothing may make the server fail."""
import json
import re
import urllib.error
import urllib.request

import hypothesis
import pytest
import schemathesis
from schemathesis.config import (CoveragePhaseConfig, GenerationConfig, PhasesConfig, ProjectConfig, ProjectsConfig,
                                 SchemathesisConfig)
from schemathesis.specs.openapi.checks import positive_data_acceptance

from plumb_server import ROOT, serve
from run_files import append, sample, write_run

KEY = "a-key-of-the-test"
RUN = "sweep/1"
FILE = ROOT / "src/serve/openapi.json"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY + "\n")
    runs = tmp_path_factory.mktemp("runs")
    run = write_run(runs / RUN)
    append(run / "samples.jsonl", sample(1, 0, [5], [438, 1], 1.0, [0.0, 0.1]), sample(1, 1, [5], [460, 1], 0.0, [], failure="no reward"))
    append(run / "log.txt", "2026-11-30 17:43:06 warning step 3: something")
    with serve("--runs", runs, "--api-keys", keys, "--max-model-len", 256, "--default-max-tokens", 4, "--max-choices", 4) as address:
        yield address


def load():
    generation = GenerationConfig(max_examples=12, deterministic=True, no_shrink=True)
    # Unknown methods are few, and the same for all routes.
    coverage = CoveragePhaseConfig(unexpected_methods={"DELETE", "PATCH"})
    project = ProjectConfig(generation=generation, phases=PhasesConfig(coverage=coverage), headers={"Authorization": f"Bearer {KEY}"})
    file = json.loads(FILE.read_text())
    # Nearly all names are those of no model, and the answer to such a request says nothing about its other fields.
    for name in ("ChatRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest"):
        file["components"]["schemas"][name]["properties"]["model"] = {"enum": ["tiny", None]}
    # Nor would a made-up name ever be that of a run, or a number that of a sample.
    for path in ("metrics", "warnings", "samples", "sample"):
        parameters = {p["name"]: p for p in file["paths"]["/training/" + path]["get"]["parameters"]}
        parameters["run"]["schema"] = {"enum": [RUN]}
        if path == "sample":
            parameters["step"]["schema"], parameters["index"]["schema"] = {"enum": [1]}, {"enum": [0, 1]}
    return schemathesis.openapi.from_dict(file, config=SchemathesisConfig(projects=ProjectsConfig(default=project)))


schema = load()


def test_the_file_is_the_one_in_the_source(server):
    with urllib.request.urlopen(server + "/openapi.json", timeout=30) as reply:
        assert reply.read() == FILE.read_bytes()


def test_the_file_has_all_routes(server):
    """The server lists them when it is asked for another one."""
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(server + "/nothing", timeout=30)
    said = json.load(raised.value)["error"]["message"]
    served = {(m, path + "{model}" if path == "/v1/models/" else path) for m, path in re.findall(r"(GET|POST) (/[^ ,]*)", said)}
    described = {(m.upper(), path) for path, item in json.loads(FILE.read_text())["paths"].items() for m in item}
    assert served == described


# A file can forbid a value, but it cannot say all that makes a request impossible (a choice of tools that are not there, a
# prompt that is too long): that an allowed request is refused is no fault.
NO_FAULT = [positive_data_acceptance]


@schema.parametrize()
@hypothesis.settings(deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
def test_what_the_file_says(server, case):
    case.call_and_validate(base_url=server, excluded_checks=NO_FAULT, timeout=30)
