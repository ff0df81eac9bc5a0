# `make` lists the targets. Each target installs what it needs, on a Debian machine with make,
# root and the Go that hack/need-go.sh checks for.

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
IMAGE   ?= gpu-dra-driver:$(VERSION)
# Arguments of the Dockerfile: BUILDER (base image), GOPROXY, GOFLAGS, GOMODCACHE, GOCACHE.
BUILD_ARGS ?=
# The first of docker, podman and buildah that is installed.
ENGINE  ?= $(firstword $(notdir $(foreach b,docker podman buildah,$(shell command -v $(b) 2>/dev/null))))

CACHE  := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/gpu-dra-driver
BUILD  := $(CURDIR)/build
NEED   := hack/need.sh
# The NVML bindings call deprecated functions.
export CGO_CFLAGS ?= -O2 -g -Wno-deprecated-declarations

# The linter has the hash of its module file in its name. So a change of that file rebuilds it.
LINT := $(CACHE)/bin/golangci-lint-$(shell cat hack/tools/go.mod hack/tools/go.sum | sha256sum | cut -c1-12)
# The documentation's linter, named in the same way.
VALE := $(CACHE)/bin/vale-$(shell cat hack/vale/go.mod hack/vale/go.sum | sha256sum | cut -c1-12)
CLUSTER := go run ./test/cluster/cmd/cluster
# go test, which lists the skipped tests at its end.
GOTEST := go run ./hack/gotest

# Minimum coverage of pkg/ by unit tests, in percent.
COVERAGE := 80
# Packages without goroutines. The race detector would find nothing and make their tests slow.
PURE := ./api/... ./pkg/claim/... ./pkg/device/... ./pkg/health/...
# Packages whose tests inject every fault into every call and write. They run completely without the
# race detector, and as a sample (-short) with it.
LONG := ./pkg/nvidia/... ./pkg/prepare
# By default a process with the race detector waits a second before it ends.
export GORACE ?= atexit_sleep_ms=0
PACKAGES := $(filter-out $(PURE),$(addsuffix /...,$(wildcard ./pkg/*)))
UNIT := $(PACKAGES) ./cmd/... ./hack/... ./test/bench/cmd/... ./test/bench/report/... \
	./test/chart/... ./test/cluster/... ./test/neighbours/...

.DEFAULT_GOAL := help
.PHONY: help
help: ## Show this list
	@echo "gpu-dra-driver: NVIDIA GPUs for Kubernetes by Dynamic Resource Allocation"
	@echo
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

##@ Build

.PHONY: build
build: toolchain ## Build the plugin, its hooks and the MPS supervisor into build/bin
	go build -tags grpcnotrace -trimpath -buildvcs=false -ldflags "-s -w -X main.version=$(VERSION)" \
	    -o $(BUILD)/bin/gpu-kubelet-plugin ./cmd/gpu-kubelet-plugin
	CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags "-s -w -X main.version=$(VERSION)" \
	    -o $(BUILD)/bin/gpu-mps ./cmd/gpu-mps
	go build -trimpath -buildvcs=false -tags netgo,osusergo -ldflags "-s -w -extldflags=-static" \
	    -o $(BUILD)/bin/nvidia-cdi-hook github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook 2>$(BUILD)/hook.log || \
	    { cat $(BUILD)/hook.log; exit 1; }

.PHONY: sbom
sbom: build ## List the modules and licences of each program (CycloneDX) in build/sbom
	cd hack/sbom && go vet . && go test . && go run . -out $(BUILD)/sbom $(addprefix $(BUILD)/bin/,gpu-kubelet-plugin gpu-mps nvidia-cdi-hook)

.PHONY: reproducible
reproducible: build ## Build the programs in another folder too, and compare (FRESH=1: without caches)
	hack/reproducible.sh $(BUILD)/bin $(VERSION) $(if $(FRESH),$(CACHE)/reproducible)

.PHONY: image
image: ## Build the image (IMAGE, VERSION, ENGINE=docker|podman|buildah, BUILD_ARGS="BUILDER=… GOPROXY=…")
	@test -n "$(ENGINE)" || { echo "make image: none of docker, podman, buildah is installed"; exit 1; }
	$(ENGINE) build --build-arg VERSION=$(VERSION) $(addprefix --build-arg ,$(BUILD_ARGS)) -t $(IMAGE) -f Dockerfile .

##@ Test

.PHONY: check
check: vet lint text helm-lint sbom reproducible ## Static checks: go vet, linters, texts, helm lint, SBOM, reproducible build

.PHONY: text
text: toolchain $(VALE) ## Check the words and width of all texts, and the sentences of the documentation
	go run ./hack/textcheck
	$(VALE) --no-global --config hack/vale/.vale.ini --output line $$(git ls-files '*.md' ':!*/testdata/*')

.PHONY: test
test: test-unit test-faults test-sim test-e2e ## Run every test: unit, random faults, simulated GPU, real cluster

# More packages than cores at once (-p), because many tests wait for processes to end.
.PHONY: test-unit
test-unit: toolchain ## Unit and chart tests, with the race detector and the coverage of pkg/
	@mkdir -p $(BUILD)
	$(GOTEST) -covermode=atomic -coverpkg=./pkg/... -coverprofile=$(BUILD)/pure.out $(PURE) $(LONG)
	helm=$$($(CLUSTER) program helm) && \
	HELM=$$helm $(GOTEST) -p 4 -race -short -coverpkg=./pkg/... -coverprofile=$(BUILD)/cover.out $(UNIT)
	@tail -n +2 $(BUILD)/pure.out >>$(BUILD)/cover.out
	@go tool cover -func=$(BUILD)/cover.out | awk '/^total:/ { print "coverage of pkg/ by unit tests: " $$3; exit $$3+0 < $(COVERAGE) }'

# The schedules of faults: this many seeds, from this one on. A seed always gives the same schedule.
SEED      ?= 1
SCHEDULES ?= 500
POLICIES  ?= 2000

.PHONY: test-faults
test-faults: toolchain ## Random schedules of faults over the real transaction (SEED=1 SCHEDULES=500 POLICIES=2000)
	$(GOTEST) ./test/schedules/mutants
	$(GOTEST) -count=1 -timeout 60m ./test/schedules -args -seed=$(SEED) -schedules=$(SCHEDULES) -policies=$(POLICIES)

# How long each fuzz target runs, and which ones (a regular expression over package.Target).
FUZZTIME ?= 60s
FUZZ     ?= .

.PHONY: fuzz
fuzz: toolchain ## Run the fuzz targets one after another (FUZZTIME=60s; FUZZ=pkg/claim for some)
	hack/fuzz.sh $(FUZZTIME) '$(FUZZ)'

.PHONY: test-faults-long
test-faults-long: toolchain ## 10,000 schedules, with every fault at every fault point 20 times (table: build/faults.md; minutes)
	@mkdir -p $(BUILD)
	go test -count=1 -timeout 120m -run '^TestInvariantsHoldUnderFaults' ./test/schedules -args \
	    -schedules=10000 -least=20 -table=$(BUILD)/faults.md

# How many schedules must find a mutant. One mutant needs more than the schedules of test-faults.
MUTANT_SCHEDULES ?= 1000

.PHONY: test-mutants
test-mutants: toolchain ## Fail unless the schedules find each mutant of the code (MUTANT_SCHEDULES=1000; up to 20 minutes)
	go run ./test/schedules/mutants -schedules $(MUTANT_SCHEDULES)

.PHONY: test-sim
test-sim: toolchain ## The simulated GPU library with all that runs on it, and the golden outputs
	$(MAKE) --no-print-directory -C test/nvmlsim
	helm=$$($(CLUSTER) program helm) && \
	HELM=$$helm $(GOTEST) ./test/nvmlsim/... ./test/hwcheck/... ./test/faults/... ./test/allocation/... ./test/golden/...

.PHONY: golden
golden: toolchain ## Rewrite the golden outputs in test/golden/testdata; git diff shows what changed
	helm=$$($(CLUSTER) program helm) && HELM=$$helm go test -count=1 ./test/golden -args -update

# Programs to measure, alternating. The default is the one of this checkout. To compare:
# PROGRAMS=before=/tmp/old,after=build/bin/gpu-kubelet-plugin
PROGRAMS ?= $(BUILD)/bin/gpu-kubelet-plugin
BENCH := go run ./test/bench/cmd/bench -programs $(PROGRAMS) -json $(BUILD)/bench.json

# Coverage counters of all rooms, cleared before the call. Those of child processes are not read.
.PHONY: prepare-path
prepare-path: toolchain ## List the functions that run during one Prepare of a whole GPU (root; PATH_ARGS="-functions 40 -files 20")
	@mkdir -p $(BUILD)/children
	GOCOVERDIR=$(BUILD)/children go run -cover -covermode=atomic -coverpkg=./pkg/...,./test/bench/cmd/preparepath \
	    ./test/bench/cmd/preparepath $(PATH_ARGS)
	@rm -rf $(BUILD)/children

.PHONY: bench
bench: build ## Measure the plugin's cost against the minimum for durable writes, on an idle machine (root; BENCH_ARGS="-only single")
	$(BENCH) $(BENCH_ARGS)

.PHONY: bench-quick
bench-quick: build
	$(BENCH) -quick $(BENCH_ARGS)

.PHONY: bench-scale
bench-scale: build ## Measure schedulers with our slices of 500 nodes, on an idle machine (root; SCALE_ARGS="-kubernetes v1.37.0")
	go run ./test/bench/cmd/scale -program $(BUILD)/bin/gpu-kubelet-plugin -json $(BUILD)/scale.json $(SCALE_ARGS)

# Runs of each benchmark: benchstat needs ten to distinguish a change from noise.
COUNT ?= 10

.PHONY: bench-go
bench-go: toolchain ## Run the Go benchmarks, into build/bench-go.txt for benchstat (COUNT=10)
	@mkdir -p $(BUILD)
	go test -run '^$$' -bench . -count $(COUNT) $(PURE) ./pkg/checkpoint ./pkg/cdi | tee $(BUILD)/bench-go.txt

.PHONY: bench-pods
bench-pods: toolchain ## Measure how much a GPU claim delays a Pod, on a real cluster on an idle machine (root; PODS_ARGS="-pods 20")
	@mkdir -p $(BUILD)
	go run ./test/bench/cmd/pods -json $(BUILD)/pods.json $(PODS_ARGS)

.PHONY: bench-limits
bench-limits: toolchain ## Hold the cost of many simultaneous partition claims to limits, on an idle machine (root)
	$(GOTEST) -v -count=1 ./test/bench

# Parallel suites on clusters. Each takes about a minute of processor time, in two to four minutes.
SUITES ?= 3

.PHONY: test-e2e
test-e2e: toolchain ## The chart, the image and the plugin on a real cluster with simulated GPUs (root)
	go test -count=1 -timeout 20m -tags cluster ./test/cluster
	$(MAKE) --no-print-directory bench-quick
	$(GOTEST) -v -count=1 -parallel $(SUITES) -timeout 60m ./test/e2e/...

# The number of Pods, and the seconds between kills of the plugin and the kubelet.
SOAK := SOAK_PODS=2000 SOAK_KILL_PLUGIN=20 SOAK_KILL_KUBELET=120

.PHONY: soak
soak: toolchain ## Run thousands of Pods while plugin and kubelet are killed; half an hour (root; SOAK="SOAK_PODS=10000 …")
	$(SOAK) $(GOTEST) -v -count=1 -timeout 12h ./test/e2e/... -run 'TestSoak$$'

.PHONY: hwcheck
hwcheck: toolchain ## Build build/hwcheck, a folder that checks a real GPU without Go or network, and only reads
	hack/hwcheck.sh $(BUILD)/hwcheck

##@ Demo

.PHONY: demo
demo: toolchain ## Start a cluster with a simulated 8-GPU node, and a Pod with a claim that runs nvidia-smi (root)
	@mkdir -p $(BUILD)/bin
	go build -o $(BUILD)/bin/demo ./hack/demo
	$(BUILD)/bin/demo up

.PHONY: demo-down
demo-down: toolchain ## Remove the demo's cluster; build/ and the caches stay
	go run ./hack/demo down

.PHONY: reference
reference: ## Rewrite the tables of docs/reference.md from the plugin's settings and the chart's values
	go run ./hack/reference

.PHONY: clean
clean: ## Remove build/; the caches below ~/.cache/gpu-dra-driver stay
	rm -rf $(BUILD)

# --- parts of the above ---

.PHONY: toolchain
toolchain:
	@hack/need-go.sh
	@$(NEED) gcc /usr/include/stdlib.h=libc6-dev nm=binutils

.PHONY: vet
vet: toolchain
	go vet -tags cluster ./...

.PHONY: lint
lint: toolchain $(LINT)
	$(LINT) run ./...

$(LINT):
	@echo "building golangci-lint: a minute or two, once"
	@mkdir -p $(@D)
	cd hack/tools && CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o $@.tmp \
	    github.com/golangci/golangci-lint/v2/cmd/golangci-lint
	@mv $@.tmp $@

$(VALE):
	@echo "building vale: two minutes, once"
	@mkdir -p $(@D)
	cd hack/vale && CGO_CFLAGS="-O2 -w" go build -trimpath -ldflags "-s -w" -o $@.tmp github.com/vale-cli/vale/v3/cmd/vale
	@mv $@.tmp $@

# helm comes from the test cluster's programs, in the tests' version.
.PHONY: helm-lint
helm-lint: toolchain
	@helm=$$($(CLUSTER) program helm) && \
	$$helm lint --strict deployments/helm/gpu-dra-driver && \
	$$helm lint --strict deployments/helm/gpu-dra-driver --values test/e2e/values.yaml
