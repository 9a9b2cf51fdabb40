# The commands of the README. Every target installs what it needs first (scripts/setup: idempotent, quick when nothing is missing).

CARGO ?= cargo
# Where rustup puts cargo, for a shell that has not been started anew since.
export PATH := $(PATH):$(HOME)/.cargo/bin

.PHONY: run build test soak sim sim-scale bench fmt lint setup setup-dev test-image

run: build
	$(CARGO) run --release --bin sandboxer -- serve --listen 127.0.0.1:8080

build: setup
	$(CARGO) build --release --bin sandboxer

# The tests on the real runsc find their base image here; it is built once.
test soak test-image: export SANDBOXER_IMAGE_DIR ?= $(CURDIR)/target/images

test: test-image
	$(CARGO) test --workspace

# The same promises with large counts and random seeds.
soak: test-image
	scripts/soak

# The lease and the handoff, and collection against writers, in a directory and in a bucket, each on SEEDS seeded schedules of faults; a failing seed says how to replay it.
SEEDS ?= 1000
sim: setup
	$(CARGO) run --release --quiet -p sandboxer-sim -- --seeds $(SEEDS)
	$(CARGO) run --release --quiet -p sandboxer-sim -- --bucket --seeds $(SEEDS)
	$(CARGO) run --release --quiet -p sandboxer-sim -- --collection --seeds $(SEEDS)
	$(CARGO) run --release --quiet -p sandboxer-sim -- --bucket --collection --seeds $(SEEDS)

# What a bucket has to do for 1 to 100,000 sandboxes, and what that costs (SCALE_ARGS: --lease 60, prices and so on; docs/scale.md).
sim-scale: setup
	$(CARGO) run --release --quiet -p sandboxer-sim -- scale $(SCALE_ARGS)

# BENCH_ARGS: --rounds N, --check (exit code 1 if a bar is missed), --growth, --json FILE; see docs/benchmarks.
bench: export SANDBOXER_IMAGE_DIR ?= $(CURDIR)/target/images
bench: build
	@scripts/setup --bench
	$(CARGO) run --release -p sandboxer-bench -- --publish docs/benchmarks $(BENCH_ARGS)

fmt:
	$(CARGO) fmt --all

lint: setup
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings

setup:
	@scripts/setup

setup-dev:
	@scripts/setup --dev

# A no-op of a fraction of a second once the image is there and the agent unchanged.
test-image: setup-dev
	$(CARGO) run --quiet --bin sandboxer -- image build
