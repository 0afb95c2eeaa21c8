# Two commands on a fresh machine: `make demo` and `make test`. The others are for development.

ARGS ?=
SCENARIO ?= pipeline
SECONDS ?= 20
FUZZ ?=
TARGET = $(or $(CARGO_TARGET_DIR),target)

# After a new installation of rustup, its directory is not in the PATH of open shells.
export PATH := $(PATH):$(or $(CARGO_HOME),$(HOME)/.cargo)/bin

.DEFAULT_GOAL := help
.PHONY: help setup setup-demo setup-build setup-peers setup-instructions setup-spec setup-deb demo test test-valkey fuzz screenshots samples bench isolation faults soak rolling kills peers instructions spec model mutants mutants-rust release release-bench deb deb-test kubernetes check check-fmt check-clippy check-doc check-deny

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "Pass arguments with ARGS: make demo ARGS='--bots 1000 --seconds 30', make test ARGS='--test it'"

setup: ## install what is missing: redis-server, a C compiler, curl, and the programs of the tests
	@bash .ci/setup test

# Those of the build, and what makes the Debian package.
setup-deb:
	@bash .ci/setup deb

# The demo needs only these tools.
setup-demo:
	@bash .ci/setup demo

# These tools, and those that build the client of Kafka.
setup-build:
	@bash .ci/setup build

# These tools, and Node.js with the packages of other queues.
setup-peers:
	@bash .ci/setup peers

setup-instructions:
	@bash .ci/setup instructions

setup-spec:
	@bash .ci/setup spec

# Only the program, for a short first build: what only tests and benchmarks need would double it.
demo: setup-demo ## generated traffic with live figures, on private local servers
	cargo build --locked --bin fairlane
	$(TARGET)/debug/fairlane demo $(ARGS)

test: setup ## all tests, on real servers
	cargo test --locked --workspace $(ARGS)

# The scripts, replicas and sentinels, the rights of the user, and a whole pipeline.
VALKEY_TESTS = core::scripts:: core::replicas:: core::sentinel:: core::order:: operations::acl::
test-valkey: setup ## a part of the tests, on Valkey instead of Redis
	FAIRLANE_TEST_REDIS=$(abspath $(TARGET)/valkey/valkey-server) \
	  cargo test --locked --workspace --test it -- $(VALKEY_TESTS)

# The tests check the same properties on the committed inputs and a bounded number of changes of them.
fuzz: setup-build ## look for inputs that break a property; SECONDS=20 for each target, FUZZ='event url'
	bash .ci/fuzz $(SECONDS) $(FUZZ)

# The pictures show the same installation as the tests of the pages.
screenshots: setup ## pictures of all web pages, light and dark, in target/screenshots
	cargo test --locked --test it -- --ignored --exact http::looks::screenshots
	@echo "the pictures are in $(TARGET)/screenshots"

# The data that a killed process of this version leaves, which every later version must handle.
samples: setup ## write the sample of this version, in tests/it/fixtures/stored
	cargo test --locked --workspace --test it -- --ignored --exact operations::years::story::write_the_sample_of_this_version

check: check-fmt check-clippy check-doc check-deny ## formatting, lints, documentation, dependencies

# `pipeline --bus nats` and `kafka` start the servers of the tests, once `make setup` has installed them.
bench: export FAIRLANE_NATS_SERVER ?= $(abspath $(TARGET)/buses/bin/nats-server)
bench: export FAIRLANE_NOIDA_DB ?= $(abspath $(TARGET)/buses/noida-db)
bench: setup-build release-bench ## measure this machine; SCENARIO=latency, fairness, ...
	$(TARGET)/release/fairlane-bench $(SCENARIO) $(ARGS)

# Rules and exports need MongoDB: the server of the tests, unless another one is named.
isolation: export FAIRLANE_MONGOD ?= $(abspath $(TARGET)/mongodb/bin/secantusd-py)
isolation: setup release-bench ## put a hostile tenant beside quiet ones; SECONDS=20 for each phase
	$(TARGET)/release/fairlane-bench isolation --seconds $(SECONDS) $(ARGS)

# SEED=N draws other faults. The servers are those of the tests.
SEED ?= 1
faults: setup release-bench ## every product under random faults; SECONDS=3600 SEED=7 ARGS='--cluster --rate 2000'
	$(TARGET)/release/fairlane-bench faults --seed $(SEED) --seconds $(SECONDS) $(ARGS)

soak: setup release-bench ## every product for four hours with the load of 24 days; ARGS='--seconds 600 --days 4'
	$(TARGET)/release/fairlane-bench soak --chart soak.svg $(ARGS)

# A short form is among the tests.
rolling: setup ## rolling restarts behind HAProxy during 100,000 requests, in some minutes
	cargo test --locked --test it -- --ignored --exact --nocapture \
	  http::rolling::rolling_restarts_during_100000_requests_lose_none_and_repeat_no_finished_slice

# `make test` kills three times at each step, has one random history of the counters, and 250 events in order per bot.
TIMES ?= 30
kills: setup ## kill processes at every step of automations, counters and notifications; TIMES=30 at each
	FAIRLANE_TEST_KILLS=$(TIMES) FAIRLANE_TEST_HISTORIES=3 FAIRLANE_TEST_EVENTS=1000 \
	  cargo test --locked --test it -- --nocapture \
	  three_processes_killed_at with_a_rate_killed although_processes_are_killed \
	  in_any_history_totals_are three_processes_handle_every_bots_events

peers: setup-peers release-bench ## compare with GroupMQ, BullMQ and a plain stream worker, also under faults, in half an hour
	$(TARGET)/release/fairlane-bench peers $(ARGS)

# The scripts are measured by a test, in the build of `make test`.
instructions: setup-instructions ## count instructions, and compare with the references; ARGS=--renew
	@bash .ci/instructions $(ARGS)

spec: setup-spec ## check the two hard rules of the protocol in all states of small systems; ARGS=--large
	@bash .ci/spec $(ARGS)

# A small program of its own: it is optimised, and needs no other package of the workspace.
model: setup-build ## explore the models of the protocol in large systems; ARGS='rates' for some lines
	cargo run --locked --package fairlane-model -- $(ARGS)

# Without MUTANTS all of them, in some hours. SCRIPT=all includes scripts that only tables test.
SCRIPT ?=
MUTANTS ?=
mutants: setup-build ## change the scripts, and see whether tests notice; SCRIPT=claim MUTANTS=50 SEED=1
	FAIRLANE_MUTANTS=$(MUTANTS) FAIRLANE_MUTANTS_SCRIPT=$(SCRIPT) FAIRLANE_MUTANTS_SEED=$(SEED) \
	  cargo test --locked --workspace --test it -- --ignored --exact --nocapture \
	  model::mutants::tests_find_every_change_of_a_script

# All mutants are compiled in one build, and most run only tests that take milliseconds.
mutants-rust: setup ## change the code in Rust, and see whether tests notice, in some hours; ARGS='--file src/pool'
	cargo run --locked --package fairlane-mutants -- $(ARGS)

release: | setup-build ## the program for production, in target/release
	cargo build --release --locked --features nats,kafka

# The program makes its own completions and manual pages. cargo-deb looks for all of this in target/release.
deb: PACKAGE = $(TARGET)/release/package
deb: | setup-deb release ## the Debian package, in target/debian
	rm -rf $(PACKAGE) $(TARGET)/debian
	mkdir -p $(PACKAGE)/completions
	for shell in bash zsh fish; do \
	  $(TARGET)/release/fairlane completions $$shell > $(PACKAGE)/completions/fairlane.$$shell || exit 1; \
	done
	$(TARGET)/release/fairlane man --dir $(PACKAGE)/man
	gzip -9n $(PACKAGE)/man/*.1
	cargo deb --no-build $(ARGS)

# The same script as in `make test`, which makes a package of the same files without cargo-deb. Needs root.
deb-test: deb ## install, start, upgrade and purge the package, in a copy of this system in memory
	unshare --mount --net --pid --fork --kill-child --cgroup --ipc --uts \
	  sh tests/it/fixtures/package.sh $(TARGET)/debian/fairlane_*.deb "$$(mktemp -d)"

# Needs kubectl 1.27 or later, and no cluster.
kubernetes: ## render the overlays of deploy/kubernetes
	@bash .ci/kubernetes

release-bench: | setup-build
	cargo build --release --locked -p fairlane-bench

check-fmt:
	cargo fmt --all --check

check-clippy:
	cargo clippy --locked --workspace --all-targets -- -D warnings

# The examples give the dependencies the features that lints and tests use, so cargo does not build them again.
check-doc:
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --lib --examples --bin fairlane-bench

check-deny:
	@bash .ci/deny
