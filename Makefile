# What a fresh machine needs: python3 >= 3.10 (with venv), cargo, make, a C compiler, the package registries.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
# Container images often set this. Each process would then compile all that it imports of torch and transformers: 9 CPU
# seconds of 17, and the tests start hundreds. What is written lies in .venv and in __pycache__ here.
unexport PYTHONDONTWRITEBYTECODE
VENV   := .venv
BIN    := $(VENV)/bin
DFLOP  := $(BIN)/dflop
UV     := $(BIN)/uv
UV_VERSION   := 0.13.8
RUST_SOURCES   := $(shell find crates -type f 2>/dev/null) Cargo.toml Cargo.lock
PYTHON_SOURCES := $(shell find python -name '*.py' -o -name '*.pyi' -o -name py.typed 2>/dev/null) pyproject.toml README.md

.PHONY: help setup demo test test-rust test-python test-more test-explore test-dist test-layouts test-hosts test-hostile test-oldest test-deepspeed test-frameworks test-gpu lint fmt snap lock bench bench-data bench-cost bench-gpu bench-step bench-layouts bench-train bench-compile bench-curves bench-kills bench-schedule bench-plan bench-paper bench-report bench-adapt bench-sim bench-prepare bench-loader bench-adopt bench-measured bench-padding bench-generations docs pages site picture package wheel-aarch64 release check clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Anything missing is named in one line before anything is built.
.PHONY: prerequisites
prerequisites:
	@missing=""; \
	command -v $(PYTHON) >/dev/null || missing="$$missing, python3 (3.10 or newer)"; \
	if command -v $(PYTHON) >/dev/null; then \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || missing="$$missing, python3 3.10 or newer (found $$($(PYTHON) -V 2>&1))"; \
	  $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || missing="$$missing, the python3 venv module (Debian: python3-venv)"; \
	fi; \
	command -v cargo >/dev/null || missing="$$missing, cargo (Rust 1.92 or newer)"; \
	if command -v rustc >/dev/null; then \
	  case "$$(rustc --version)" in "rustc 1."[0-9].*|"rustc 1."[0-8][0-9].*|"rustc 1.9"[01].*) missing="$$missing, Rust 1.92 or newer (found $$(rustc --version))";; esac; \
	fi; \
	command -v cc >/dev/null || missing="$$missing, a C compiler (cc)"; \
	if [ -n "$$missing" ]; then echo "error: this machine lacks: $${missing#, }" >&2; exit 2; fi

setup: $(VENV)/.wheel ## Make .venv, install locked dependencies, build and install the wheel (tests and lints install more)

# What comes, how many of them there are, and how long it takes on two free cores. stderr: it is no one's output.
say = @printf '\033[1m[%s/4] %s\033[0m\n' '$(1)' '$(2)' >&2

$(VENV)/.dependencies: requirements.lock | prerequisites
	$(call say,1,Python packages (half a minute where uv has them; else 3 GB are downloaded))
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(UV) && [ "$$($(UV) --version | cut -d' ' -f2)" = "$(UV_VERSION)" ] || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@# Its bars where someone looks; else each package's name, when all are done, is no news.
	@[ -t 2 ] || quiet=--quiet; $(UV) pip install $$quiet --python $(BIN)/python --require-hashes -r requirements.lock
	@touch $@

# Beside these what tests, lints and benchmarks need, and the trainers that dflop is tested in.
DEV := $(VENV)/.dev
$(DEV): requirements-dev.lock $(VENV)/.dependencies
	@printf '\033[1mPython packages of the tests and lints\033[0m\n' >&2
	@[ -t 2 ] || quiet=--quiet; $(UV) pip install $$quiet --python $(BIN)/python --require-hashes -r requirements-dev.lock
	@touch $@

$(VENV)/.wheel: $(VENV)/.dependencies $(RUST_SOURCES) $(PYTHON_SOURCES)
	@rm -f dist/dflop-*.whl
	$(call say,2,Sources of the Rust crates (half a minute where cargo has none))
	@# Not left to maturin, whose cargo names each of the 400.
	@cargo fetch --locked --quiet
	$(call say,3,Build of the native module (4 to 5 minutes where nothing is built yet))
	@num=$$(cargo tree --locked --offline --package dflop-py --edges normal,build --prefix none | cut -d' ' -f1,2 | sort -u | wc -l); \
	build() { $(BIN)/maturin build --release --locked --interpreter $(BIN)/python --out dist; }; \
	if [ -t 2 ]; then build; else set -o pipefail; build 2>&1 | { $(COUNT_CRATES); } >&2; fi
	$(call say,4,Installation of the wheel)
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --reinstall dist/dflop-*.whl
	@touch $@

# Without a terminal there is no bar, and a line a crate is too many: one a tenth of them. Not awk: Debian's holds back
# what it reads from a pipe, and the screen says nothing for minutes.
define COUNT_CRATES
while IFS= read -r line; do \
  if [[ $$line =~ ^\ *Compiling\  ]]; then (( ++built % (num / 10 + 1) )) || echo "  crate $$built of $$num"; \
  else printf "%s\n" "$$line"; fi; \
done
endef

demo: setup ## Profile, plan, train and report on this machine's CPU; ends with demo/summary.json
	@PATH="$(abspath $(BIN)):$$PATH" bash examples/demo.sh demo

test: test-rust test-python ## The tests that need no GPU (`make test-more` has further cases of them)

# The wheel first: the tests share its profile, so that every crate is built once.
CARGO_TEST := RUSTC_WRAPPER=$(abspath tools/rustc_of_tests) cargo test
test-rust: setup
	@# Without examples and benches, which clippy compiles.
	$(CARGO_TEST) --release --locked --workspace --exclude dflop-py --exclude dflop-bench --quiet --lib --bins --tests
	$(CARGO_TEST) --release --locked --workspace --exclude dflop-py --exclude dflop-bench --quiet --doc

# Processes that run tests beside each other: more than cores, as many tests wait for ranks of theirs. Neighbours in a file stay together, as they share what is made for it.
TEST_JOBS ?= 3
test-python: setup $(DEV)
	$(BIN)/python -m pytest -m "not gpu and not layouts and not site and not more" -n $(TEST_JOBS) --dist worksteal

test-more: setup $(DEV) ## Further cases of what `make test` tries: other families, layouts and seeds (half an hour)
	$(CARGO_TEST) --release --locked --package dflop-plan --package dflop-cli --lib --test all --quiet -- --ignored more::
	$(BIN)/python -m pytest -m "more and not gpu and not layouts and not site" -n $(TEST_JOBS) --dist worksteal

SEEDS ?= 20
test-explore: setup ## The property tests on new random cases, SEEDS times (20); `make test` draws the same ones each time
	for round in $$(seq $(SEEDS)); do \
	  seed=$$(od -An -N4 -tu4 /dev/urandom | tr -d ' '); echo "PROPTEST_RNG_SEED=$$seed"; \
	  PROPTEST_RNG_SEED=$$seed $(CARGO_TEST) --release --locked --workspace --exclude dflop-py --exclude dflop-bench --exclude dflop-cli --quiet --lib --tests || exit 1; \
	done

test-dist: setup $(DEV) ## The tests with several processes
	$(BIN)/python -m pytest tests/dist -m "not gpu and not layouts and not site" -n $(TEST_JOBS) --dist worksteal

test-layouts: setup $(DEV) ## Gradients and weights of layouts against one process: every one of up to eight ranks (an hour; `make test` has few)
	$(BIN)/python -m pytest $$(grep -lrE --include='test_*.py' 'pytest.mark.layouts|mark.some\([0-9]+, ' tests) -n $(TEST_JOBS) --dist worksteal

test-hosts: setup ## Two hosts in network namespaces: train, cut the wire, go on, rehearse (root, Linux; minutes) -> bench/out/hosts.json
	$(BIN)/python benches/hosts.py bench/out/hosts.json

test-hostile: setup $(DEV) ## Hostile inputs, within a limit on memory (docs/limits.md)
	ulimit -v 8388608; $(BIN)/python -m pytest tests/hostile

# `pyproject.toml` names the oldest versions. Oracles that these versions have otherwise (counters of operations, counts of
# patches, templates of videos) are left out, and so are tests of TRL's trainers, which no user of ours need have.
OLDEST := .venv-oldest
test-oldest: setup ## The tests that train, with the oldest PyTorch and transformers that are taken (5 GB to download; minutes)
	$(UV) venv --quiet --clear --python $(BIN)/python $(OLDEST)
	$(UV) pip compile --quiet --no-header --resolution lowest-direct --extra train --extra lora pyproject.toml -o $(OLDEST)/lock.txt
	$(UV) pip install --quiet --python $(OLDEST)/bin/python -r $(OLDEST)/lock.txt pytest pytest-timeout pytest-xdist pyarrow soundfile
	$(UV) pip install --quiet --python $(OLDEST)/bin/python --no-deps --reinstall dist/dflop-*.whl
	$(OLDEST)/bin/python -m pytest tests/dist tests/unit/test_conformance.py tests/unit/test_models.py tests/unit/test_pieces.py \
	  tests/unit/test_experts.py tests/unit/test_profiling.py tests/unit/test_memory.py tests/unit/test_wide_gradients.py \
	  --ignore tests/dist/test_examples.py --ignore tests/dist/test_trainers.py \
	  --ignore tests/dist/test_preference.py --ignore tests/dist/test_generations.py \
	  -m "not gpu and not layouts and not site" -n $(TEST_JOBS) --dist worksteal

# Built from its sources with the PyTorch that is installed, without kernels of its own, and kept apart: `.venv` stays as it is.
DEEPSPEED := target/deepspeed
test-deepspeed: setup $(DEV) ## The first line under DeepSpeed's ZeRO-0 to 3 on two CPU ranks (installs DeepSpeed; 2 minutes)
	DS_BUILD_OPS=0 $(UV) pip install --quiet --python $(BIN)/python --target $(DEEPSPEED) --no-deps --no-build-isolation deepspeed==0.19.8 hjson ninja py-cpuinfo einops msgpack
	@# It compiles its shared-memory sums with ninja where all ranks are of one machine.
	PATH=$(abspath $(DEEPSPEED))/bin:$$PATH PYTHONPATH=$(DEEPSPEED) $(BIN)/python -m pytest tests/dist/test_deepspeed.py

# Each with the versions that it pins itself, and apart from `.venv`. `make test-frameworks FRAMEWORKS=NAME` runs one.
# No registry has EasyR1: `EASYR1` names a checkout of it, without which it is left out.
FRAMEWORKS := axolotl llamafactory lmms nemo swift veomni verl $(if $(EASYR1),easyr1)
export EASYR1
test-frameworks: setup ## The lines in fine-tuning frameworks on two CPU ranks (installs them; minutes)
	@set -e; for name in $(FRAMEWORKS); do \
	  python=target/frameworks/$$name/bin/python; \
	  $(UV) venv --quiet --allow-existing --python $(BIN)/python target/frameworks/$$name; \
	  $(UV) pip install --quiet --python $$python --no-deps -r tests/frameworks/$$name.lock; \
	  $(UV) pip install --quiet --python $$python --no-deps --reinstall dist/dflop-*.whl; \
	  $$python -m pytest tests/frameworks/test_$$name*.py; \
	done

test-gpu: setup $(DEV) ## The tests that need a GPU
	$(BIN)/python -m pytest -m gpu

PYTHON_ROOMS := python tests benches tools docs/site.py
fmt: $(DEV) ## Format all sources
	cargo fmt --all
	$(BIN)/ruff format $(PYTHON_ROOMS)
	$(BIN)/ruff check --fix --quiet $(PYTHON_ROOMS)

lint: setup $(DEV) ## Formatting, clippy, ruff, types, import contracts, spelling
	cargo fmt --all --check
	cargo clippy --release --locked --workspace --all-targets --quiet -- -D warnings
	$(BIN)/ruff format --check $(PYTHON_ROOMS)
	$(BIN)/ruff check $(PYTHON_ROOMS)
	$(BIN)/basedpyright --level error
	$(BIN)/python -m mypy.stubtest dflop._native --ignore-missing-stub --mypy-config-file pyproject.toml
	$(BIN)/pydoclint --quiet python/dflop
	$(BIN)/lint-imports
	$(BIN)/typos

snap: setup ## Accept changed snapshots (look at the diff)
	INSTA_UPDATE=always cargo test --release --locked --workspace --exclude dflop-py --quiet || true
	git diff --stat -- '*.snap'

COMPILE := $(UV) pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-header
lock: $(VENV)/.dependencies ## Renew the lock files
	$(COMPILE) --extra train --extra lora --extra integrations --extra build --extra dev pyproject.toml -o requirements-dev.lock
	$(COMPILE) --extra train --extra build -c requirements-dev.lock pyproject.toml -o requirements.lock
	cargo update

bench: bench-data bench-cost bench-step bench-schedule bench-plan bench-sim bench-prepare bench-loader ## All benchmarks

bench-data: setup $(DEV) ## Header reading and tokenization against Pillow and Hugging Face -> bench/out/data.json
	cargo build --release --locked --quiet -p dflop-data --example speed
	$(BIN)/python benches/data.py target bench/out/data.json

bench-cost: setup $(DEV) ## Error of the cost and memory models on shapes not measured (5 minutes, a quiet machine) -> bench/out/cost.json
	$(BIN)/python benches/cost.py bench/out/cost.json

bench-gpu: setup $(DEV) ## Profiles of three models on this machine's GPU, errors of what is predicted, the executor, padding (15 minutes) -> bench/out/gpu
	$(BIN)/python benches/gpu.py bench/out/gpu || echo "a model was not measured whole" >&2
	$(BIN)/python benches/actions.py bench/out/gpu/actions.json --device cuda
	PYTORCH_ALLOC_CONF=expandable_segments:True $(BIN)/python benches/unpadded.py bench/out/gpu/unpadded.json

bench-step: setup $(DEV) ## Measured steps of every arm against predicted ones (ROUNDS=30 ORDER=data-aware; a quiet machine) -> bench/out/step.json
	$(BIN)/python benches/step.py bench/out/step.json --rounds $(or $(ROUNDS),30) --order $(or $(ORDER),data-aware)

bench-adopt: setup $(DEV) ## An epoch of transformers.Trainer by who chooses the batches (ROUNDS=6; 8 minutes, a quiet machine) -> bench/out/adopt.json
	$(BIN)/python benches/adopt.py bench/out/adopt.json --rounds $(or $(ROUNDS),6)

bench-measured: setup $(DEV) ## Costs that a model's own times give, in a family without a rule, and what two ranks then need (3 minutes, a quiet machine) -> bench/out/measured_cost.json
	$(BIN)/python benches/measured_cost.py bench/out/measured_cost.json

bench-padding: setup $(DEV) ## The same with padded rows, and the layers computing real tokens alone (ROUNDS=10; 6 minutes, a quiet machine) -> bench/out/adopt_padded.json
	$(BIN)/python benches/adopt.py bench/out/adopt_padded.json --padded --rounds $(or $(ROUNDS),10)

bench-generations: setup $(DEV) ## Training steps of TRL's GRPO by who divides what was generated (ROUNDS=6; 6 minutes, a quiet machine) -> bench/out/generations.json
	$(BIN)/python benches/generations.py bench/out/generations.json --rounds $(or $(ROUNDS),6)

bench-loader: setup $(DEV) ## Images, frames and seconds of sound a second and core, and the wait of training, against torch's DataLoader (ROUNDS=3, WORKERS=1) -> bench/out/loader.json
	$(BIN)/python benches/loader.py bench/out/loader.json --rounds $(or $(ROUNDS),3) --workers $(or $(WORKERS),1)

bench-layouts: setup ## Steps of two CPU ranks by layout: colocated, disaggregated, FSDP2 token-packed; then rehearsals of 8 to 32 (ROUNDS=6; an hour, a quiet machine) -> bench/out/layouts.json
	$(BIN)/python benches/layouts.py bench/out/layouts.json --rounds $(or $(ROUNDS),6)

# Draws of each set and size; of these CP-SAT gets the first CPSAT_SEEDS, each for its seconds; 0 seconds leave it out.
BATCH_SEEDS ?= 10
CPSAT_SEEDS ?= 3
CPSAT_SECONDS ?= 10

bench-train: setup $(DEV) ## Steps of the same global batches: dflop, transformers.Trainer with DDP, FSDP2 (ROUNDS=5; 15 minutes, a quiet machine) -> bench/out/train.json
	$(BIN)/python benches/train.py bench/out/train.json --rounds $(or $(ROUNDS),5)

bench-compile: setup $(DEV) ## Forward and backward by compiled layers and by others, in turns (ROUNDS=10; 5 minutes) -> bench/out/compile.json
	$(BIN)/python benches/compiled.py bench/out/compile.json --rounds $(or $(ROUNDS),10)

bench-curves: setup $(DEV) ## 500 steps in float32, in bfloat16 and by transformers.Trainer (STEPS=500; 10 minutes) -> bench/out/curves.json, curves.svg
	$(BIN)/python benches/curves.py bench/out/curves.json bench/out/curves.svg --steps $(or $(STEPS),500)

bench-kills: setup ## Ten random ranks killed in 200 steps, restarted by the agent: each sample trained once? (10 minutes) -> bench/out/kills.json
	$(BIN)/python benches/kills.py bench/out/kills.json --steps $(or $(STEPS),200) --kills $(or $(KILLS),10)

bench-schedule: setup $(DEV) ## Scheduler beside others: gap to the bound and time by size (an hour, a quiet machine) -> bench/out/schedule.json
	@mkdir -p bench/out
	cargo run --release --locked --quiet -p dflop-plan --example makespan -- bench/out/makespan.json $(BATCH_SEEDS) > /dev/null
	$(BIN)/python benches/schedule.py bench/out/schedule.json --seeds $(BATCH_SEEDS) --cpsat-seeds $(CPSAT_SEEDS) \
	  --cpsat-seconds $(CPSAT_SECONDS) --makespan bench/out/makespan.json

bench-plan: setup $(DEV) ## The search for a plan: seconds, memory and regret by number of ranks (9 minutes, a quiet machine) -> bench/out/plan.json
	cargo build --release --locked --quiet -p dflop-plan --example search
	$(BIN)/python benches/plan.py bench/out/plan.json

bench-adapt: setup $(DEV) ## Slow shapes and slow ranks: what correction wins back, costs and names; simulated, rehearsed and slept (40 minutes, a quiet machine) -> bench/out/adapt.json
	cargo build --release --locked --quiet -p dflop-plan --example adapt
	$(BIN)/python benches/adapt.py bench/out/adapt.json

bench-report: setup ## The report of 1,000 steps on 64 ranks: bytes, seconds, memory (5 minutes) -> bench/out/report.json
	$(BIN)/python benches/report.py bench/out/report.json

bench-paper: setup ## The paper's models on 8 to 1,024 A100, simulated beside what people run today -> bench/out/paper.json
	$(BIN)/python benches/paper.py bench/out/paper.json --dflop $(BIN)/dflop

bench-sim: ## Simulator: time of a step by size -> bench/out/sim.json
	$(call criterion,sim,sim)

bench-prepare: ## The schedule of one training step, and its action lists -> bench/out/prepare.json
	$(call criterion,step,prepare)

# Bench $(1) of benches/criterion -> bench/out/$(2).json. Criterion adds to what stands in its folder: begin with an empty one.
define criterion
	@rm -rf target/criterion-$(1)
	CRITERION_HOME=$(abspath target/criterion-$(1)) cargo bench --locked -p dflop-bench --bench $(1)
	@$(PYTHON) benches/collect.py $(2) target/criterion-$(1) bench/out/$(2).json
endef

docs: pages ## The site, and Rust documentation in site/rust; warnings are errors
	RUSTDOCFLAGS="-D warnings" cargo doc --release --locked --workspace --exclude dflop-py --no-deps --quiet
	@rm -rf site/rust && cp -r target/doc site/rust

pages: setup $(DEV) ## The site -> site/index.html: every link leads somewhere
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

site: pages ## The site, and every snippet of its guide run as written (5 minutes)
	$(BIN)/python -m pytest tests/docs/test_guide.py tests/docs/test_blocks.py tests/docs/test_site.py -m site -n $(TEST_JOBS)

picture: setup ## docs/report.png anew: the top of a report over made-up numbers (needs Chromium)
	$(BIN)/python tools/picture.py

package: setup $(DEV) ## Wheel and sdist as a stranger installs them, crates as crates.io would take them -> dist/
	$(BIN)/python tools/package.py dist

wheel-aarch64: $(VENV)/.dependencies ## The wheel for aarch64 Linux, built here with zig -> dist/aarch64/; ARM64_ROOT=DIR tries it in that Debian by qemu
	$(BIN)/python tools/cross_wheel.py dist/aarch64 $(if $(ARM64_ROOT),--root $(ARM64_ROOT))

release: $(VENV)/.dependencies ## A new version in every file that names it (VERSION=0.2.0)
	$(BIN)/python tools/release.py $(VERSION)

check: test test-more lint docs site ## Tests with all their cases, lints, docs and the guide as it is written

clean: ## Remove what was built and the demo
	rm -rf target $(VENV) dist demo bench/out site
